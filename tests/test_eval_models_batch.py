"""Answers while they grow: where a stop text ends them."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from assay.eval.models._hf_batch import Answer
from assay.eval.models.interface import Generated, GenerateRequest

# the text of each token; two have none
TEXTS = ("a", "b", "Q", ":", "ab", "", "Q:", "", ":b")


class Counting:
    """Decodes tokens, and counts them."""

    has_chat_template = False

    def __init__(self) -> None:
        """Begin at none."""
        self.decoded = 0

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Texts that are a token."""
        return [TEXTS.index(text)] if text in TEXTS else [0, 0]

    def decode(self, ids: Sequence[int]) -> str:
        """Of all."""
        self.decoded += len(ids)
        return "".join(TEXTS[one] for one in ids)

    def chat(self, text: str) -> str:
        """There is none."""
        raise ValueError("no template")


def answered(ids: Sequence[int], stop: tuple[str, ...], least: int) -> tuple[Generated, Counting]:
    """What comes of an answer that goes on with these tokens until it is finished."""
    tokenizer = Counting()
    request = GenerateRequest(prompt_ids=(0,), max_new_tokens=len(ids), min_new_tokens=least, stop=stop)
    answer = Answer(request=request, tokenizer=tokenizer, ends=frozenset())
    for one in ids:
        answer.add(one, 1.0, 0.0)
        if answer.reason:
            break
    outcome = answer.outcome(Counter())
    assert isinstance(outcome, Generated)
    return outcome, tokenizer


def first_end(ids: Sequence[int], stop: tuple[str, ...], least: int) -> int:
    """Tokens up to the first that completes a stop text, or those that must be there at least; by the whole text."""
    for count in range(max(1, least), len(ids) + 1):
        if any(one in "".join(TEXTS[at] for at in ids[:count]) for one in stop):
            return count
    return len(ids)


@pytest.mark.parametrize("stop", [("Q:",), ("abQ", ":b"), ("bb", "QQQQ"), ()])
@pytest.mark.parametrize("least", [0, 1, 7, 40])
def test_an_answer_ends_where_its_whole_text_first_holds_a_stop(stop: tuple[str, ...], least: int) -> None:
    rng = random.Random(f"{stop} {least}")
    ends = set()
    for _ in range(200):
        ids = rng.choices(range(len(TEXTS)), weights=(9, 9, 1, 1, 2, 4, 0.1, 4, 0.1), k=60)
        found, _ = answered(ids, stop, least)
        end = first_end(ids, stop, least)
        assert found.ids == tuple(ids[:end])
        text = "".join(TEXTS[at] for at in ids[:end])
        assert found.text == text[: min((text.index(one) for one in stop if one in text), default=len(text))]
        ends.add(end)
    assert len(ends) > 1 or not stop


def test_a_stop_text_that_is_a_special_token_ends_an_answer_by_its_id() -> None:
    class Special(Counting):
        """Its token 5 is ``<end>``, which has no text."""

        def encode(self, text: str, *, special: bool) -> list[int]:
            return [5] if text == "<end>" else super().encode(text, special=special)

    request = GenerateRequest(prompt_ids=(0,), max_new_tokens=9, stop=("Q:", "<end>", "ab"))
    answer = Answer.to(request, Special(), frozenset({7}))
    # ab has a text, by which it is found
    assert answer.ends == {5, 7}
    for one in (0, 0, 5):
        answer.add(one, 1.0, 0.0)
    outcome = answer.outcome(Counter())
    assert isinstance(outcome, Generated)
    assert (outcome.text, outcome.ids, outcome.finish_reason) == ("aa", (0, 0, 5), "stop")


def test_a_long_answer_is_not_decoded_again_with_each_token() -> None:
    found, tokenizer = answered([0] * 1000, ("Q:",), 1)
    assert found.finish_reason == "length"
    # 12 tokens hold any stop text; the whole is decoded for the result
    assert tokenizer.decoded < 1000 * 13 + 3000
