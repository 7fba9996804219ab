"""Prompts side by side for a transformers model: padded on the left, read in steps, answered token by token."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .interface import ERROR, LENGTH, STOP, Failure, Generated, GenerateRequest, Tokenizer

# what stands in columns that no query sees
PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """Rows of tokens that end in the same column.

    Attributes:
        ids: ``[B, S]``, int64.
        mask: ``[B, S]``, int64, 1 where a token stands.
        positions: ``[B, S]``, int64, of the token in its own row.
        pads: Columns without a token, by row.
        calls: How often each kernel served each row.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    pads: list[int]
    calls: list[Counter[str]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device) -> "PaddedBatch":
        """Pad rows to the longest."""
        longest = max(len(row) for row in rows)
        pads = [longest - len(row) for row in rows]
        ids = torch.tensor([[PAD] * pad + list(row) for pad, row in zip(pads, rows, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).long()
        return cls(
            ids=ids.to(device),
            mask=mask.to(device),
            positions=(mask.cumsum(dim=1) - 1).clamp(min=0).to(device),
            pads=pads,
            calls=[Counter() for _ in rows],
        )

    def steps(self, size: int) -> Iterator[tuple[int, int]]:
        """Columns to read at once, ``size`` of them or all if it is 0.

        Counted from the end, where all rows have tokens: a row is cut in the same places whoever stands beside it.
        """
        length = self.ids.shape[1]
        stops = range(length, 0, -size) if size else [length]
        for stop in reversed(stops):
            yield max(0, stop - size) if size else 0, stop

    def count(self, calls: Counter[str], stop: int) -> None:
        """Note calls that served the rows with a token before column ``stop``."""
        for pad, mine in zip(self.pads, self.calls, strict=True):
            if pad < stop:
                mine.update(calls)


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer while it grows; it is finished once ``reason`` is set."""

    request: GenerateRequest
    tokenizer: Tokenizer
    ends: frozenset[int]
    ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reason: str = ""

    @classmethod
    def to(cls, request: GenerateRequest, tokenizer: Tokenizer, ends: frozenset[int]) -> "Answer":
        """One that has not begun; a stop text that is a special token has no text by which it could be found."""
        stops = [tokenizer.encode(stop, special=False) for stop in request.stop]
        special = {ids[0] for ids in stops if len(ids) == 1 and not tokenizer.decode(ids)}
        return cls(request=request, tokenizer=tokenizer, ends=ends | special)

    def banned(self) -> frozenset[int]:
        """Tokens that would end it too early."""
        if len(self.ids) >= self.request.min_new_tokens:
            return frozenset()
        stops = [self.tokenizer.encode(stop, special=False) for stop in self.request.stop]
        return self.ends | {ids[0] for ids in stops if len(ids) == 1}

    def add(self, one: int, best: float, second: float) -> None:
        """The next token, with its logit and that of the runner-up."""
        if not math.isfinite(best):
            self.reason = ERROR
            return
        self.ids.append(one)
        self.gaps.append(best - second)
        early = len(self.ids) < self.request.min_new_tokens
        if not early and (one in self.ends or (self._may_stop() and self._cut() is not None)):
            self.reason = STOP
        elif len(self.ids) >= self.request.max_new_tokens:
            self.reason = LENGTH

    def outcome(self, calls: Counter[str]) -> Generated | Failure:
        """What the runner gets."""
        if self.reason == ERROR:
            return Failure(status=ERROR, reason=f"the logits of token {len(self.ids)} must be finite, and are not")
        text, cut = self.tokenizer.decode(self.ids), self._cut()
        return Generated(
            text=text if cut is None else text[:cut],
            ids=tuple(self.ids),
            finish_reason=self.reason,
            gaps=tuple(self.gaps),
            kernel_calls=dict(calls),
        )

    def _may_stop(self) -> bool:
        """Whether the last tokens hold a stop text; to decode all of them after each one takes as long as the model."""
        if not self.request.stop:
            return False
        if len(self.ids) == self.request.min_new_tokens:
            # one that came too early was not looked for
            return True
        # a token may have no text of its own, as the first bytes of a letter have none
        reach = 2 * max(map(len, self.request.stop)) + 8
        tail = self.tokenizer.decode(self.ids[-reach:])
        return any(stop in tail for stop in self.request.stop)

    def _cut(self) -> int | None:
        """Where the first stop text begins."""
        text = self.tokenizer.decode(self.ids)
        return min((text.index(stop) for stop in self.request.stop if stop in text), default=None)


def choose(logits: Tensor, answers: Sequence[Answer]) -> list[int]:
    """Give every unfinished answer its likeliest token; ``logits`` is ``[B, vocabulary]``. Return a token per row."""
    logits = logits.float()
    for row, answer in enumerate(answers):
        banned = frozenset() if answer.reason else answer.banned()
        if banned:
            logits[row, sorted(banned)] = -math.inf
    values, places = logits.topk(2, dim=-1)
    chosen = []
    for answer, (best, second), (one, _) in zip(answers, values.tolist(), places.tolist(), strict=True):
        if not answer.reason:
            answer.add(one, best, second)
        chosen.append(one)
    return chosen


def trailing(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens behind the prompts of a batch, padded on the right, ``[B, n]``, and 1 where they are, both int64."""
    longest = max(1, max(map(len, rows)))
    ids = torch.tensor([list(row) + [PAD] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), real.long().to(device)


def next_log_probabilities(logits: Tensor, following: Tensor) -> Tensor:
    """Of the tokens that follow, natural; ``[B, n, vocabulary]`` and ``[B, n]`` to ``[B, n]``, float32."""
    # row by row: a float32 copy of all logits is the largest tensor of a pass
    rows = []
    for one, wanted in zip(logits, following, strict=True):
        wide = one.float()
        rows.append(wide.gather(1, wanted[:, None])[:, 0] - wide.logsumexp(dim=1))
    return torch.stack(rows)
