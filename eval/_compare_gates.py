"""The gates of a suite on two runs: values in pairs, their estimate, the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .arms import Arm, both_ok
from .comparison import GateResult
from .divergence import agreement, tied
from .scorers import find_scorer
from .statistics import ALPHA, Differences, Estimate, Verdict, binary_estimate, holm, macro_estimate
from .suite import AGREEMENT, NLL, SCORE, Gate
from .tasks import find_task

CERTAIN_LOSS = "a loss is certain, and smaller than the margin"


@dataclass(frozen=True, slots=True)
class Values:
    """One metric of two runs on the samples of a task that both answered; larger is better.

    Attributes:
        samples: Their ids.
        clusters: What they share.
        first: Of the first run.
        second: Of the second run.
        ties: Samples whose first difference is a tie, and counts as none.
    """

    samples: list[str]
    clusters: list[str]
    first: list[float]
    second: list[float]
    ties: int = 0

    @property
    def differences(self) -> Differences:
        """Second minus first."""
        return Differences.of(
            [after - before for before, after in zip(self.first, self.second, strict=True)], self.clusters
        )


def values_of(metric: str, first: Arm, second: Arm, task: str, *, tie: float = 0.0) -> Values:
    """The values of a metric; samples on which it was not measured are left out. ``tie`` is that of a gate."""
    samples, before, after, ties = [], [], [], 0
    for one in both_ok(first, second, task):
        pair = _pair(metric, first, second, task, one)
        if pair is not None:
            excused = metric == AGREEMENT and tied(first.records[task][one], second.records[task][one], tie)
            ties += excused
            samples.append(one)
            before.append(pair[0])
            after.append(pair[0] if excused else pair[1])
    return Values(samples, [first.items[task][one].cluster or one for one in samples], before, after, ties)


def _pair(metric: str, first: Arm, second: Arm, task: str, sample: str) -> tuple[float, float] | None:
    if metric == SCORE:
        one, other = first.scores[task].get(sample), second.scores[task].get(sample)
        return None if one is None or other is None else (one, other)
    here, there = first.records[task][sample], second.records[task][sample]
    if metric == NLL:
        one, other = here.get("gold_nll"), there.get("gold_nll")
        # a smaller loss is better
        return None if one is None or other is None else (-one, -other)
    ids = here.get("output_ids"), there.get("output_ids")
    return None if ids[0] is None or ids[1] is None else (1.0, agreement(ids[0], ids[1]))


def gate_result(gate: Gate, tasks: tuple[str, ...], first: Arm, second: Arm) -> GateResult:
    """A gate on one pair, before other pairs are taken into account."""
    # a task whose data could not be read is in the suite and not in the runs
    by_task = {task: values_of(gate.metric, first, second, task, tie=gate.tie) for task in tasks if task in first.items}
    empty = [task for task in tasks if task not in by_task or not by_task[task].samples]
    if empty:
        note = f"{gate.metric} was not measured on {', '.join(empty)}"
        return GateResult(gate=gate, tasks=tasks, estimate=None, verdict=Verdict.INCONCLUSIVE, note=note)
    estimate = _estimate(gate, list(by_task.items()))
    sign = -1.0 if gate.metric == NLL else 100.0
    means = [
        sign * sum(sum(values) / len(values) for values in side) / len(by_task)
        for side in ([one.first for one in by_task.values()], [one.second for one in by_task.values()])
    ]
    return judged(
        GateResult(
            gate=gate,
            tasks=tasks,
            estimate=estimate,
            verdict=Verdict.INCONCLUSIVE,
            p_adjusted=estimate.p,
            first=means[0],
            second=means[1],
            note=_of_ties(sum(values.ties for values in by_task.values()), gate.tie),
        )
    )


def _of_ties(count: int, tie: float) -> str:
    what = "first difference lies" if count == 1 else "first differences lie"
    return f"{count} {what} between tokens at most {tie:g} nats apart and cost nothing" if count else ""


def judged(result: GateResult) -> GateResult:
    """The result with its verdict, from the adjusted p value."""
    estimate = result.estimate
    if estimate is None:
        return result
    if result.gate.metric == AGREEMENT:
        return replace(result, verdict=_agreement_verdict(estimate))
    verdict = replace(estimate, p=result.p_adjusted).verdict()
    small = verdict in (Verdict.EQUIVALENT, Verdict.NON_INFERIOR)
    # a loss that was certain on one pair alone may not be so among several
    note = CERTAIN_LOSS if small and estimate.high < 0 and result.p_adjusted < ALPHA else ""
    return replace(result, verdict=verdict, note=note)


def adjusted(results: Sequence[GateResult]) -> list[GateResult]:
    """The results of one gate on several pairs, after Holm over the pairs."""
    p_values = holm([result.estimate.p if result.estimate else 1.0 for result in results])
    return [judged(replace(result, p_adjusted=p)) for result, p in zip(results, p_values, strict=True)]


def _estimate(gate: Gate, by_task: list[tuple[str, Values]]) -> Estimate:
    if gate.metric == SCORE and len(by_task) == 1:
        ((task, values),) = by_task
        if find_scorer(find_task(task).scored_by).binary and not values.differences.is_clustered:
            lost = sum(before > after for before, after in zip(values.first, values.second, strict=True))
            won = sum(before < after for before, after in zip(values.first, values.second, strict=True))
            return binary_estimate(lost, won, len(values.samples), margin=gate.loss)
    scale = gate.scale if gate.metric == NLL else 1.0
    return macro_estimate([values.differences for _, values in by_task], margin=gate.loss, scale=scale)


def _agreement_verdict(estimate: Estimate) -> Verdict:
    """Agreement can only be lost, so a loss is certain as soon as a token differs: the margin alone decides."""
    if estimate.non_inferior():
        return Verdict.EQUIVALENT
    return Verdict.REGRESSED if estimate.high < -(estimate.margin or 0.0) else Verdict.INCONCLUSIVE
