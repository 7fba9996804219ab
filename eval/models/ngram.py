"""A model without weights: it predicts the next character from what followed the same characters in its own prompt.

It is an interpolated n-gram model of the prompt (prediction by partial matching, Cleary and Witten 1984, method C), so
it copies, answers what stands in the text after the same words, and gives proper probabilities. It has no attention and
says nothing about a kernel: it is there to try suites, runs and comparisons where no weights are at hand.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from .interface import LENGTH, STOP, Failure, Generated, GenerateRequest, Scored, ScoreRequest

START = 0
# of Unicode's characters any may come next
ALPHABET = 0x110000


class Characters:
    """A token per character, and one that marks the start."""

    has_chat_template = False

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Code points."""
        return [START] * special + [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters, without the start."""
        return "".join(chr(one) for one in ids if one != START)

    def chat(self, text: str) -> str:
        """There is no template."""
        raise ValueError("the model must have a chat template, got none")


class History:
    """Counts of what followed each context of up to ``order`` tokens."""

    def __init__(self, order: int) -> None:
        """Nothing has been read yet."""
        self._order = order
        self._ids: list[int] = []
        self._counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def read(self, one: int) -> None:
        """One more token."""
        for context in self._contexts():
            self._counts[context][one] += 1
        self._ids.append(one)

    def log_probability(self, one: int) -> float:
        """Of the next token, natural."""
        return math.log(self._distribution({one})[one])

    def likeliest(self, without: set[int]) -> tuple[int, float]:
        """The likeliest next token, the smallest of equals, and by how much its log-probability leads."""
        shares = self._distribution(set())
        ranked = sorted(((-share, one) for one, share in shares.items() if one not in without and one != START))[:2]
        if not ranked:
            # nothing has been read: a blank is as good as anything
            return ord(" "), 0.0
        second = -ranked[1][0] if len(ranked) > 1 else 1 / ALPHABET
        return ranked[0][1], math.log(-ranked[0][0] / second)

    def _contexts(self) -> list[tuple[int, ...]]:
        longest = min(self._order, len(self._ids))
        return [tuple(self._ids[len(self._ids) - length :]) for length in range(longest, -1, -1)]

    def _distribution(self, wanted: set[int]) -> dict[int, float]:
        """Probabilities of all tokens that followed any of the contexts, and of those that are wanted."""
        shares: defaultdict[int, float] = defaultdict(float)
        left = 1.0
        for context in self._contexts():
            counts = self._counts.get(context)
            if counts:
                total = counts.total() + len(counts)
                for one, count in counts.items():
                    shares[one] += left * count / total
                left *= len(counts) / total
        return {one: shares[one] + left / ALPHABET for one in {*shares, *wanted}}


class NgramModel:
    """The model; ``order`` is the length of the longest context."""

    context_length = 1 << 20

    def __init__(self, order: int) -> None:
        """Refuse a model without a context."""
        if order < 1:
            raise ValueError(f"order must be at least 1, got {order}")
        self.order = order
        self.tokenizer = Characters()

    def describe(self) -> dict[str, Any]:
        """All that its answers depend on."""
        return {"name": "ngram", "order": self.order, "attention": "none", "version": 1}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """One after the other."""
        return [self._generate(request) for request in requests]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """One after the other."""
        return [self._score(request) for request in requests]

    def _generate(self, request: GenerateRequest) -> Generated:
        history = History(self.order)
        for one in request.prompt_ids:
            history.read(one)
        ids: list[int] = []
        gaps: list[float] = []
        text = ""
        while len(ids) < request.max_new_tokens:
            early = len(ids) < request.min_new_tokens
            one, gap = history.likeliest(_ends(text, request.stop) if early else set())
            history.read(one)
            ids.append(one)
            gaps.append(gap)
            text += chr(one)
            found = [text.index(stop) for stop in request.stop if stop in text]
            if found:
                return Generated(text=text[: min(found)], ids=tuple(ids), finish_reason=STOP, gaps=tuple(gaps))
        return Generated(text=text, ids=tuple(ids), finish_reason=LENGTH, gaps=tuple(gaps))

    def _score(self, request: ScoreRequest) -> Scored:
        history = History(self.order)
        found = []
        for one in (*request.prompt_ids, *request.target_ids):
            found.append(history.log_probability(one))
            history.read(one)
        at = len(request.prompt_ids)
        return Scored(prompt=tuple(found[1:at]), target=tuple(found[at:]))


def _ends(text: str, stops: Sequence[str]) -> set[int]:
    """Characters that would complete a stop text."""
    return {ord(stop[-1]) for stop in stops if text.endswith(stop[:-1])}


def load(order: int = 6) -> NgramModel:
    """The model."""
    return NgramModel(int(order))
