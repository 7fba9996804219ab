"""How long a run will take: two short requests, and what they come to for all batches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .asking import Clock
from .models.interface import Failure, GenerateRequest, Model, ScoreRequest
from .plan import Batch
from .suite import Asking

DECODED = 8
# of a prompt: minutes would pass before a run of long prompts on a CPU had even said how long it takes
MOST_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds, at most: answers may end before their greatest length, and batches share work.

    Attributes:
        seconds: For everything that is left; None if it could not be measured.
        basis: What was measured, or why nothing was.
    """

    seconds: float | None
    basis: str


def forecast(model: Model, asking: Asking, batches: Sequence[Batch], clock: Clock = time.perf_counter) -> Forecast:
    """Ask the sample of median length, for one token, for a few, and for its gold answer; nothing of it is recorded.

    Of a long prompt its end alone is asked, so that attention to all of it, which grows faster than its length, is
    missing.
    """
    members = sorted((one for batch in batches for one in batch.members), key=lambda one: len(one.prompt.ids))
    if not members:
        return Forecast(seconds=0.0, basis="nothing is left")
    middle = members[len(members) // 2]
    whole = len(middle.prompt.ids)
    ids = middle.prompt.ids[-MOST_TOKENS:]
    try:
        token, step = _measured(model, asking, ids, middle.prompt.target_ids, clock)
    except Exception as error:
        return Forecast(seconds=None, basis=f"no estimate: {type(error).__name__}: {error}")
    tokens = sum(len(one.prompt.ids) for one in members)
    steps = sum(max(one.max_new_tokens for one in batch.members) for batch in batches)
    basis = f"measured on one prompt of {whole} tokens"
    if len(ids) < whole:
        basis = f"measured on {len(ids)} of {whole} tokens of one prompt, and more where attention takes most time"
    return Forecast(seconds=token * tokens + step * steps, basis=basis)


def _measured(
    model: Model, asking: Asking, ids: tuple[int, ...], target_ids: tuple[int, ...], clock: Clock
) -> tuple[float, float]:
    """Seconds per token of a prompt, all passes together, and per generated token."""
    prompt, step = 0.0, 0.0
    if asking.generate:
        requests = [
            GenerateRequest(prompt_ids=ids, max_new_tokens=length, min_new_tokens=length) for length in (1, 1 + DECODED)
        ]
        # the first request of all also pays for what is set up once
        _timed(model, requests[:1], clock)
        first, second = (_timed(model, [request], clock) for request in requests)
        prompt, step = first, max(0.0, second - first) / DECODED
    if asking.score:
        prompt += _timed(model, [ScoreRequest(prompt_ids=ids, target_ids=target_ids)], clock)
    return prompt / max(1, len(ids)), step


def _timed(model: Model, requests: Sequence[GenerateRequest] | Sequence[ScoreRequest], clock: Clock) -> float:
    began = clock()
    if isinstance(requests[0], ScoreRequest):
        outcomes: Sequence[object] = model.score([one for one in requests if isinstance(one, ScoreRequest)])
    else:
        outcomes = model.generate([one for one in requests if isinstance(one, GenerateRequest)])
    failed = next((one for one in outcomes if isinstance(one, Failure)), None)
    if failed is not None:
        raise RuntimeError(failed.reason)
    return clock() - began
