"""One batch put to a model: halved where it does not fit, taken apart where it fails, and turned into records."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .models.interface import (
    ERROR,
    OUT_OF_MEMORY,
    Failure,
    Generated,
    GenerateRequest,
    Model,
    OutOfMemoryError,
    Scored,
    ScoreRequest,
)
from .plan import Batch, Planned, cut
from .redaction import redacted
from .run_folder import OK
from .suite import Asking
from .surrogates import writable

GAP_DIGITS, LOG_DIGITS = 4, 6
# stages that serve the tokens behind the first one
DECODING = ("decode", "kda_decode")
# a token that had no rival at all
WIDEST_GAP = 1e4
Clock = Callable[[], float]


@dataclass(slots=True)
class Questioner:
    """Asks a model, and remembers what did not fit.

    Attributes:
        model: The model.
        asking: How it is asked.
        most_tokens: Tokens that are asked at once at most, each sample counted as long as the longest; where they do
            not fit, half of them from then on.
        kernels: That must serve every sample, as ``stage/kernel``.
        notes: What happened on the way, for people.
        model_seconds: Spent inside the model.
        clock: Seconds.
    """

    model: Model
    asking: Asking
    most_tokens: float = math.inf
    kernels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    model_seconds: float = 0.0
    clock: Clock = time.perf_counter

    def ask(self, batch: Batch, attempts: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
        """One record for each sample of the batch.

        Args:
            batch: What to ask.
            attempts: How often each sample was asked before, by task and id.
        """
        records: list[dict[str, Any]] = []
        for part in cut(batch.members, len(batch.members), self.most_tokens):
            began = self.clock()
            generated = self._answers(part, self._generate) if self.asking.generate else [(None, 0)] * len(part)
            scored = self._answers(part, self._score) if self.asking.score else [(None, 0)] * len(part)
            took = self.clock() - began
            self.model_seconds += took
            for one, (answer, size), (losses, scored_size) in zip(part, generated, scored, strict=True):
                record = _served(_record(one, answer, losses, self.asking), self.kernels)
                record |= {
                    "batch_id": batch.number,
                    "batch_size": size or scored_size,
                    "batch_position": len(records),
                    "batch_s": round(took, 4),
                    "attempt": attempts.get((one.item.task, one.item.id), 0) + 1,
                    "ts": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                records.append(record)
        return records

    def _answers(
        self, members: Sequence[Planned], call: Callable[[Sequence[Planned]], list[Any]]
    ) -> list[tuple[Any, int]]:
        """One outcome per sample, whatever happens, with how many were asked at once."""
        try:
            return [(outcome, len(members)) for outcome in call(members)]
        except OutOfMemoryError as error:
            failure = Failure(status=OUT_OF_MEMORY, reason=str(error) or "out of memory")
        except Exception as error:
            failure = Failure(status=ERROR, reason=f"{type(error).__name__}: {error}")
        # asked again out here, where the error no longer holds what the model had allocated
        if len(members) == 1:
            return [(failure, 1)]
        if failure.status == OUT_OF_MEMORY:
            self._halve(members)
            half = (len(members) + 1) // 2
            return self._answers(members[:half], call) + self._answers(members[half:], call)
        # whose fault it is shows when each is asked alone
        return [outcome for one in members for outcome in self._answers([one], call)]

    def _halve(self, members: Sequence[Planned]) -> None:
        longest = max(one.tokens for one in members)
        half = len(members) * longest / 2
        if half < self.most_tokens:
            self.most_tokens = half
            what = f"{len(members)} samples of up to {longest} tokens did not fit into memory"
            self.notes.append(f"{what}: {half:.0f} tokens at once from now on")

    def _generate(self, members: Sequence[Planned]) -> list[Generated | Failure]:
        requests = [
            GenerateRequest(
                prompt_ids=one.prompt.ids,
                max_new_tokens=one.max_new_tokens,
                min_new_tokens=one.task.min_new_tokens,
                stop=one.task.stop,
            )
            for one in members
        ]
        return _counted(self.model.generate(requests), len(requests))

    def _score(self, members: Sequence[Planned]) -> list[Scored | Failure]:
        requests = [ScoreRequest(prompt_ids=one.prompt.ids, target_ids=one.prompt.target_ids) for one in members]
        return [
            _finite(outcome, request)
            for outcome, request in zip(_counted(self.model.score(requests), len(requests)), requests, strict=True)
        ]


def _counted(outcomes: list[Any], expected: int) -> list[Any]:
    if len(outcomes) != expected:
        raise RuntimeError(f"the model must answer {expected} requests, got {len(outcomes)} answers")
    return outcomes


def _finite(outcome: Scored | Failure, request: ScoreRequest) -> Scored | Failure:
    """A log-probability that is no number, or missing, is a failure: it must not vanish in a mean."""
    if isinstance(outcome, Failure):
        return outcome
    if len(outcome.target) != len(request.target_ids):
        counts = f"{len(request.target_ids)} tokens, got {len(outcome.target)}"
        return Failure(status=ERROR, reason=f"the target must have a log-probability for each of {counts}")
    for name, values in (("target", outcome.target), ("prompt", outcome.prompt)):
        bad = next((at for at, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            reason = f"log-probability of token {bad} of the {name} must be finite, got {values[bad]}"
            return Failure(status=ERROR, reason=reason)
    return outcome


def _record(
    one: Planned, answer: Generated | Failure | None, losses: Scored | Failure | None, asking: Asking
) -> dict[str, Any]:
    failure = next((outcome for outcome in (answer, losses) if isinstance(outcome, Failure)), None)
    record: dict[str, Any] = {
        "task": one.item.task,
        "sample_id": one.item.id,
        "source_idx": one.item.index,
        "prompt_sha256": one.item.prompt_sha256,
        "prompt_tokens": one.item.prompt_tokens,
        "tokens_before": one.item.tokens_before,
        "truncated": one.item.truncated,
        "status": OK if failure is None else failure.status,
        "error": None if failure is None else redacted(failure.reason),
    }
    calls: dict[str, int] = {}
    if isinstance(answer, Generated):
        record |= {
            "output_text": writable(answer.text),
            "output_ids": list(answer.ids),
            "finish_reason": answer.finish_reason,
            "gaps": _gaps(answer.gaps),
            "latency_s": answer.latency_s,
            "first_token_s": answer.first_token_s,
            "facts": redacted(dict(answer.facts)),
        }
        calls = dict(answer.kernel_calls)
    if isinstance(losses, Scored):
        tokens = len(losses.target)
        record |= {
            "gold_nll": round(-math.fsum(losses.target) / tokens, LOG_DIGITS) if tokens else None,
            "gold_tokens": tokens,
            "probes": probes(losses.prompt, asking.probes),
        }
        calls = {name: calls.get(name, 0) + losses.kernel_calls.get(name, 0) for name in {*calls, *losses.kernel_calls}}
    return record | {"kernel_calls": calls}


def _served(record: dict[str, Any], kernels: Sequence[str]) -> dict[str, Any]:
    """The record, failed where a stage was not served by the kernel that must serve it, and by that one alone."""
    for kernel in kernels if record["status"] == OK else ():
        stage = kernel.partition("/")[0]
        calls = {name: count for name, count in record["kernel_calls"].items() if name.partition("/")[0] == stage}
        if not calls and stage in DECODING and len(record.get("output_ids", ())) == 1:
            # the first token comes from the prefill, and was the last
            continue
        if set(calls) != {kernel} or calls[kernel] < 1:
            got = ", ".join(f"{name} {count} times" for name, count in sorted(calls.items())) or "no call"
            return record | {"status": ERROR, "error": f"{stage} must be served by {kernel} alone, got {got}"}
    return record


def _gaps(gaps: Sequence[float]) -> list[float]:
    """Rounded; none at all where one is undefined, since its place would be lost."""
    if any(math.isnan(gap) for gap in gaps):
        return []
    return [round(min(gap, WIDEST_GAP), GAP_DIGITS) for gap in gaps]


def probes(log_probabilities: Sequence[float], count: int) -> list[list[float]]:
    """Evenly spread positions with their log-probabilities; the positions follow from the length alone."""
    length = len(log_probabilities)
    places = range(length) if length <= count else [(at * length + length // 2) // count for at in range(count)]
    # the first token of a prompt has no log-probability
    return [[place + 1, round(log_probabilities[place], LOG_DIGITS)] for place in places]
