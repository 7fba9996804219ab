"""Two runs, or several: is the model as good as before? Yes, no, or not enough to say."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean, median
from typing import Any

from ._compare_factors import factor_effects
from ._compare_gates import Values, adjusted, gate_result, values_of
from .arms import Arm, both_ok, check_comparable, check_repetition
from .comparison import Comparison, Failures, Flip, Noise, Pair, Speed, TaskResult
from .divergence import divergence, first_difference, probe_differences
from .run_folder import OK, SKIPPED, Item
from .scorers import find_scorer
from .statistics import Differences, benjamini_hochberg, binary_estimate, holm, macro_estimate, real_estimate
from .suite import NLL, SCORE, Suite
from .tasks import SYNTHETIC, find_task

WORST, LONGEST_TEXT = 10, 300


def compare(arms: Sequence[Arm], repeated: Arm | None = None) -> Comparison:
    """Judge every pair of runs by the gates of their suite.

    Args:
        arms: Two runs or more; of each pair the earlier one is the measure.
        repeated: The first run once more, with another batch size or order: what changes without a change.

    Raises:
        ValueError: If there are fewer than two runs, or two of one label.
        NotComparableError: If the runs do not pair, or ``repeated`` is no repetition of the first.
    """
    labels = [arm.label for arm in [*arms, *([repeated] if repeated else [])]]
    if len(arms) < 2 or len(set(labels)) != len(labels):
        raise ValueError(f"runs must be two or more, each with a label of its own, got {', '.join(labels) or 'none'}")
    check_comparable([*arms, *([repeated] if repeated else [])])
    if repeated is not None:
        check_repetition(arms[0], repeated)
    suite = arms[0].suite
    pairs = [
        # the repetition is one of the first run, and says nothing of the others
        _pair(first, second, suite, repeated if first is arms[0] else None)
        for first, second in combinations(arms, 2)
    ]
    # each gate is one family of tests: all pairs of runs
    columns = [adjusted([pair.gates[at] for pair in pairs]) for at in range(len(suite.gates))]
    return Comparison(
        suite=suite.name,
        arms={arm.label: _arm(arm) for arm in [*arms, *([repeated] if repeated else [])]},
        pairs=[replace(pair, gates=[column[at] for column in columns]) for at, pair in enumerate(pairs)],
        effects=factor_effects(arms, suite),
        notes=_notes(arms),
    )


def _pair(first: Arm, second: Arm, suite: Suite, repeated: Arm | None) -> Pair:
    flips = _flips(first, second)
    return Pair(
        first=first.label,
        second=second.label,
        differs_in={
            name: (level, second.factors[name])
            for name, level in first.factors.items()
            if name in second.factors and second.factors[name] != level
        },
        gates=[gate_result(gate, suite.tasks_of(gate), first, second) for gate in suite.gates],
        tasks=_tasks(first, second),
        failures=_failures(first, second, suite),
        divergence=divergence(first, second),
        probes=probe_differences(first, second),
        flips=flips,
        speed=_speed(first, second),
        kernels=_kernels(first, second),
        noise=None if repeated is None else _noise(first, second, repeated),
    )


def _tasks(first: Arm, second: Arm) -> list[TaskResult]:
    results = []
    for name in first.tasks:
        values = values_of(SCORE, first, second, name)
        if values.samples:
            results.append(_task(name, values, first))
    p_values = [result.estimate.p for result in results]
    return [
        replace(result, p_holm=one, p_fdr=other)
        for result, one, other in zip(results, holm(p_values), benjamini_hochberg(p_values), strict=True)
    ]


def _task(name: str, values: Values, first: Arm) -> TaskResult:
    task, found = find_task(name), values.differences
    scorer = find_scorer(task.scored_by)
    estimate = real_estimate(found)
    if scorer.binary and not found.is_clustered:
        estimate = binary_estimate(int((found.values < 0).sum()), int((found.values > 0).sum()), found.n)
    strata: dict[str, list[tuple[float, float]]] = {}
    scored = list(zip(values.samples, values.first, values.second, strict=True))
    for sample, before, after in scored:
        if first.items[name][sample].stratum:
            strata.setdefault(first.items[name][sample].stratum, []).append((before, after))
    lost = sorted((one for one in scored if one[2] < one[1]), key=lambda one: one[2] - one[1])
    return TaskResult(
        task=name,
        category=task.category,
        language=task.language,
        synthetic=task.origin == SYNTHETIC,
        scorer=scorer.id,
        n=found.n,
        first=_percent(values.first),
        second=_percent(values.second),
        estimate=estimate,
        strata={
            label: (len(rows), _percent(before for before, _ in rows), _percent(after for _, after in rows))
            for label, rows in strata.items()
        },
        worst=lost[:WORST],
    )


def _percent(scores: Iterable[float]) -> float:
    """A mean as the published tables round it."""
    return round(100 * fmean(scores), 2)


def _failures(first: Arm, second: Arm, suite: Suite) -> Failures:
    table: Counter[tuple[str, str, str]] = Counter()
    for task in first.tasks:
        for sample in first.items[task]:
            status = first.status(task, sample), second.status(task, sample)
            if status != (OK, OK):
                table[task, *status] += 1
    if not table:
        return Failures()
    one_sided = sum(count for (_, one, other), count in table.items() if OK in (one, other))
    # what cannot be asked of any model is no failure
    failed = any({one, other} - {OK, SKIPPED} for _, one, other in table)
    found = {
        gate.name: _counted_wrong(suite.tasks_of(gate), first, second)
        for gate in suite.gates
        if gate.metric == SCORE and failed
    }
    return Failures(
        table=dict(table),
        one_sided=one_sided,
        sensitivity={name: one for name, one in found.items() if one is not None},
    )


def _counted_wrong(tasks: Sequence[str], first: Arm, second: Arm) -> tuple[float, float, float] | None:
    """Difference and interval where what was asked and not answered has the score 0; None where nothing was asked."""
    found = []
    for task in tasks:
        items = first.items.get(task, {})
        samples = [one for one in items if SKIPPED not in (first.status(task, one), second.status(task, one))]
        if samples:
            values = [second.scores[task].get(one, 0.0) - first.scores[task].get(one, 0.0) for one in samples]
            found.append(Differences.of(values, [items[one].cluster or one for one in samples]))
    if not found:
        return None
    estimate = macro_estimate(found)
    return 100 * estimate.delta, 100 * estimate.low, 100 * estimate.high


def _flips(first: Arm, second: Arm) -> list[Flip]:
    found = []
    for task in first.tasks:
        values = values_of(SCORE, first, second, task)
        for sample, before, after in zip(values.samples, values.first, values.second, strict=True):
            if before != after:
                one, other = first.records[task][sample], second.records[task][sample]
                ids = one.get("output_ids"), other.get("output_ids")
                at = None if ids[0] is None or ids[1] is None else first_difference(ids[0], ids[1])
                texts = {"first_text": _cut(one["output_text"]), "second_text": _cut(other["output_text"])}
                found.append(Flip(task=task, id=sample, first=before, second=after, differs_at=at, **texts))
    return sorted(found, key=lambda flip: flip.second - flip.first)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _speed(first: Arm, second: Arm) -> Speed | None:
    pairs = [
        (first.records[task][sample], second.records[task][sample])
        for task in first.tasks
        for sample in both_ok(first, second, task)
    ]
    timed = [pair for pair in pairs if all(one.get("latency_s") and one.get("output_ids") is not None for one in pair)]
    if not timed:
        return None
    lengths = [(len(one["output_ids"]), len(other["output_ids"])) for one, other in timed]
    return Speed(
        n=len(timed),
        first_latency=median(one["latency_s"] for one, _ in timed),
        second_latency=median(other["latency_s"] for _, other in timed),
        first_ttft=_median(one.get("first_token_s") for one, _ in timed),
        second_ttft=_median(other.get("first_token_s") for _, other in timed),
        first_rate=sum(one for one, _ in lengths) / sum(one["latency_s"] for one, _ in timed),
        second_rate=sum(other for _, other in lengths) / sum(other["latency_s"] for _, other in timed),
        tokens_differ=sum(one != other for one, other in lengths),
    )


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _kernels(first: Arm, second: Arm) -> dict[str, tuple[int, int]]:
    one, other = _calls(first), _calls(second)
    return {name: (one[name], other[name]) for name in sorted({*one, *other})}


def _calls(arm: Arm) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in _answered(arm):
        total.update(record.get("kernel_calls") or {})
    return total


def _answered(arm: Arm) -> list[dict[str, Any]]:
    """Records of the samples of the plan that have an answer."""
    return [arm.records[task][one] for task, items in arm.items.items() for one in items if arm.status(task, one) == OK]


def _noise(first: Arm, second: Arm, repeated: Arm) -> Noise:
    """The same measures of A against A and of A against B, on the samples that all three answered."""
    common = {task: set(both_ok(first, second, task)) & set(both_ok(first, repeated, task)) for task in first.tasks}
    first = replace(first, items={task: _kept(items, common[task]) for task, items in first.items.items()})
    changed, identical, nll = [], [], []
    for other in (repeated, second):
        scores = [values_of(SCORE, first, other, task) for task in first.tasks]
        moved = [before != after for one in scores for before, after in zip(one.first, one.second, strict=True)]
        changed.append(fmean(moved) if moved else None)
        tokens = divergence(first, other)
        identical.append(tokens.identical / tokens.n if tokens.n else None)
        losses = [values_of(NLL, first, other, task) for task in first.tasks]
        each = [abs(b - a) for one in losses for a, b in zip(one.first, one.second, strict=True)]
        nll.append(fmean(each) if each else None)
    return Noise(
        label=repeated.label,
        n=sum(map(len, common.values())),
        changed=_both(changed),
        identical=_both(identical),
        nll=_both(nll),
        probes=probe_differences(first, repeated),
    )


def _kept(items: dict[str, Item], names: set[str]) -> dict[str, Item]:
    return {name: item for name, item in items.items() if name in names}


def _both(values: Sequence[float | None]) -> tuple[float, float] | None:
    one, other = values
    return None if one is None or other is None else (one, other)


def _arm(arm: Arm) -> dict[str, Any]:
    return {
        "folder": str(arm.path),
        "model": arm.manifest["model"],
        "factors": arm.factors,
        "fingerprint": arm.manifest["fingerprint"],
        "counts": dict(arm.counts()),
        "cut_answers": sum(record.get("finish_reason") == "length" for record in _answered(arm)),
    }


def _notes(arms: Sequence[Arm]) -> list[str]:
    notes = [note for arm in arms for note in arm.manifest.get("notes", [])]
    for arm in arms:
        notes += [f"{name} was not asked: {why}" for name, why in arm.manifest.get("unloaded", {}).items()]
        for name, items in arm.items.items():
            twice = arm.manifest["tasks"][name]["samples"] - len(items)
            if twice:
                notes.append(f"{arm.label}: {twice} samples of {name} are more than once in the plan, and count once")
    truncated = sum(item.truncated for items in arms[0].items.values() for item in items.values())
    if truncated:
        notes.append(f"{truncated} prompts were truncated, the same in all runs")
    return list(dict.fromkeys(notes))
