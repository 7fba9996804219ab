"""How long a run will take, by a model that takes a known time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from assay.eval.forecast import MOST_TOKENS, forecast
from assay.eval.models.interface import ERROR, Failure, GenerateRequest, ScoreRequest
from assay.eval.suite import Asking


class Slow:
    """Takes 2 s a token of a prompt and 3 s a new one, and to score 1 s a token of a prompt."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, ...]] = []

    def generate(self, requests: list[GenerateRequest]) -> list[Any]:
        self.asked += [one.prompt_ids for one in requests]
        self.now += sum(2 * len(one.prompt_ids) + 3 * one.max_new_tokens for one in requests)
        return [None] * len(requests)

    def score(self, requests: list[ScoreRequest]) -> list[Any]:
        self.now += sum(len(one.prompt_ids) for one in requests)
        return [None] * len(requests)


def batch(*lengths: int, new: int = 10) -> Any:
    """Samples whose prompts are so long."""
    prompts = [SimpleNamespace(ids=tuple(range(length)), target_ids=(1, 2)) for length in lengths]
    return SimpleNamespace(members=[SimpleNamespace(prompt=prompt, max_new_tokens=new) for prompt in prompts])


def seconds(batches: list[Any], **asking: bool) -> tuple[float | None, str]:
    model = Slow()
    found = forecast(cast("Any", model), Asking(**asking), batches, clock=lambda: model.now)
    return found.seconds, found.basis


def test_it_is_the_time_of_all_prompts_and_of_the_longest_answer_of_each_batch() -> None:
    # the prompt of 8 tokens: 16 + 3 s for its first new token, and 8 s to be scored, so 27 / 8 s a token
    batches = [batch(20, 8), batch(4, new=100)]
    assert seconds(batches) == (32 * 27 / 8 + 3 * 110, "measured on one prompt of 8 tokens")
    assert seconds(batches, score=False) == (32 * 19 / 8 + 3 * 110, "measured on one prompt of 8 tokens")
    assert seconds(batches, generate=False) == (32.0, "measured on one prompt of 8 tokens")
    assert seconds([]) == (0.0, "nothing is left")


def test_of_a_long_prompt_the_end_is_asked_alone() -> None:
    model, long = Slow(), 7500
    found = forecast(cast("Any", model), Asking(), [batch(long)], clock=lambda: model.now)
    assert {one[:1] + one[-1:] for one in model.asked} == {(long - MOST_TOKENS, long - 1)}
    assert found.seconds == pytest.approx(long * (3 * MOST_TOKENS + 3) / MOST_TOKENS + 30)
    assert found.basis == "measured on 1024 of 7500 tokens of one prompt, and more where attention takes most time"


def test_what_fails_leaves_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(status=ERROR, reason="broken")
    monkeypatch.setattr(Slow, "generate", lambda self, requests: [failure])
    assert seconds([batch(8)]) == (None, "no estimate: RuntimeError: broken")
