"""The words and numbers of a comparison, the same in every report."""

from collections.abc import Iterator

from .averages import averages
from .comparison import Comparison, GateResult, Pair, TaskResult
from .statistics import ALPHA, Estimate, Verdict
from .suite import NLL

MARKS = {
    Verdict.EQUIVALENT: "✅",
    Verdict.IMPROVED: "✅",
    Verdict.NON_INFERIOR: "✅",
    Verdict.REGRESSED: "❌",
    Verdict.INCONCLUSIVE: "⚪",
}
WORDS = {
    Verdict.EQUIVALENT: "equivalent",
    Verdict.IMPROVED: "improved",
    Verdict.NON_INFERIOR: "not worse",
    Verdict.REGRESSED: "regressed",
    Verdict.INCONCLUSIVE: "inconclusive",
}
GATE_COLUMNS = ("question", "first", "second", "gain", "95 % interval", "p", "margin", "verdict")
TASK_COLUMNS = ("task", "scorer", "pairs", "first", "second", "gain", "95 % interval", "changed", "p", "p (Holm)")


def title(pair: Pair) -> str:
    """Both labels, and the factors in which they differ."""
    factors = ", ".join(f"{name}: {before} → {after}" for name, (before, after) in pair.differs_in.items())
    return f"{pair.second} against {pair.first}" + (f" ({factors})" if factors else "")


def gate_cells(result: GateResult) -> tuple[str, ...]:
    """One line of the table of gates; a gain is positive where the second run is better."""
    gate, estimate = result.gate, result.estimate
    margin = f"{gate.margin:g} {unit(result)}"
    if estimate is None:
        return gate.name, "", "", "", "", "", margin, WORDS[result.verdict]
    return (
        gate.name,
        level(result, result.first),
        level(result, result.second),
        signed(result, estimate.delta),
        f"[{signed(result, estimate.low)}, {signed(result, estimate.high)}] {estimate.interval}",
        p_text(result.p_adjusted),
        margin,
        WORDS[result.verdict],
    )


def unit(result: GateResult) -> str:
    """Of the margin and of a difference."""
    return "nats" if result.gate.metric == NLL else "points"


def level(result: GateResult, value: float | None) -> str:
    """A mean of one run."""
    if value is None:
        return ""
    return f"{value:.4f}" if result.gate.metric == NLL else f"{value:.2f}"


def signed(result: GateResult, value: float) -> str:
    """A difference in the unit of the gate."""
    return f"{value:+.4f}" if result.gate.metric == NLL else f"{100 * value:+.2f}"


def p_text(p: float) -> str:
    """A p value, short."""
    return f"{p:.1e}" if p < 1e-4 else f"{p:.4f}"


def explanation(result: GateResult) -> str:
    """What the verdict means, and what is missing for another one."""
    estimate = result.estimate
    if estimate is None:
        return result.note
    tasks = "" if len(result.tasks) == 1 else f"mean of {len(result.tasks)} tasks; "
    parts = [f"{tasks}{estimate.n} pairs, {estimate.changed} differ"]
    if estimate.flip_bound is not None:
        parts.append(f"no difference seen: up to {100 * estimate.flip_bound:.3g} % of pairs may differ")
    elif estimate.se:
        parts.append(_error(result, estimate))
    if result.verdict is Verdict.INCONCLUSIVE:
        parts.append(_missing(result, estimate))
    if result.note:
        parts.append(result.note)
    return "; ".join(parts)


def _error(result: GateResult, estimate: Estimate) -> str:
    kind = "clustered" if estimate.se_clustered > estimate.se_naive * (1 + 1e-9) else "paired"
    scale = 1.0 if result.gate.metric == NLL else 100.0
    text = f"{kind} standard error {scale * estimate.se:.3g} {unit(result)}"
    return f"{text}, so a change of {scale * estimate.detectable:.3g} would be found in 80 % of runs"


def _missing(result: GateResult, estimate: Estimate) -> str:
    if estimate.needed is None:
        return "no margin is declared"
    of = "pairs" if len(result.tasks) == 1 else "pairs of each task"
    if not estimate.variance:
        return f"with {estimate.needed:,} {of} that change as little, no change of the margin would be left"
    if estimate.needed * len(result.tasks) <= estimate.n:
        return "the change lies too near the margin for either"
    return f"about {estimate.needed:,} {of} would find a change of the margin in 80 % of runs"


def task_cells(result: TaskResult) -> tuple[str, ...]:
    """One line of the table of tasks."""
    estimate = result.estimate
    return (
        result.task + (" (synthetic)" if result.synthetic and not result.task.startswith("synthetic") else ""),
        result.scorer,
        str(result.n),
        f"{result.first:.2f}",
        f"{result.second:.2f}",
        f"{100 * estimate.delta:+.2f}",
        f"[{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}] {estimate.interval}",
        f"{estimate.changed / estimate.n:.0%}",
        p_text(estimate.p),
        p_text(result.p_holm),
    )


def task_lines(pair: Pair) -> list[str]:
    """Whether any single task lost, all tasks taken into account."""
    if len(pair.tasks) < 2:
        return []
    lost = [result for result in pair.tasks if result.estimate.high < 0 and result.p_holm < ALPHA]
    if not lost:
        return [f"No single task of {len(pair.tasks)} lost for certain (Holm over the tasks)."]
    names = ", ".join(f"{one.task} {100 * one.estimate.delta:+.2f} points (p {p_text(one.p_holm)})" for one in lost)
    return [f"Lost for certain, Holm over {len(pair.tasks)} tasks: {names}."]


def average_rows(pair: Pair) -> list[tuple[str, ...]]:
    """Both averages of both runs with the tasks they are made of."""
    first = averages((result.task, result.first) for result in pair.tasks)
    second = averages((result.task, result.second) for result in pair.tasks)
    rows: list[tuple[str, ...]] = []
    for before, after in zip(first, second, strict=True):
        if len(before.tasks) == 1:
            continue
        name = f"{before.family}, {before.group}"
        tasks = f"{len(before.tasks)}: {', '.join(before.tasks)}"
        rows.append((f"{name}, every task alike", f"{before.task_mean:.2f}", f"{after.task_mean:.2f}", tasks))
        if len(before.categories) > 1:
            names = f"{len(before.categories)} categories: {', '.join(before.categories)}"
            means = f"{before.category_mean:.2f}", f"{after.category_mean:.2f}"
            rows.append((f"{name}, every category alike", *means, names))
    return rows


def divergence_lines(pair: Pair) -> list[str]:
    """The tokens in sentences."""
    found = pair.divergence
    if not found.n:
        return ["The generated tokens are not known in both runs."]
    lines = [f"{found.identical} of {found.n} answers have the same tokens ({found.identical / found.n:.1%})."]
    if found.positions:
        places = ", ".join(f"{label}: {count}" for label, count in found.positions.items())
        lines.append(f"Position of the first token that differs: {places}.")
    if found.median_gap is not None:
        lines.append(
            f"There the likelier token led by {found.median_gap:.3g} nats at the median; in {found.no_ties} of "
            f"{found.gaps} both runs were sure of different tokens, which rounding does not explain."
        )
    return lines


def probe_rows(pair: Pair) -> list[tuple[str, ...]]:
    """Prompt log-probabilities by context length: both means, and their difference beside that of the repetition."""
    repeated = {one.context: one for one in pair.noise.probes} if pair.noise else {}
    rows: list[tuple[str, ...]] = []
    for one in pair.probes:
        floor = repeated.get(one.context)
        beside = f"{floor.mean:.2e}" if floor else ""
        means = f"{one.first:.4f}", f"{one.second:.4f}"
        rows.append((one.context, str(one.n), *means, f"{one.mean:.2e}", f"{one.largest:.2e}", beside))
    return rows


def noise_lines(pair: Pair) -> list[str]:
    """What changes without a change, beside what changed."""
    noise = pair.noise
    if noise is None:
        return []
    lines = [f"{noise.label} repeats {pair.first}, on {noise.n} samples that all three answered:"]
    for name, both, form in (
        ("scores changed", noise.changed, "{:.2%}"),
        ("identical tokens", noise.identical, "{:.2%}"),
        ("mean |difference| of gold log-probabilities", noise.nll, "{:.2e} nats"),
    ):
        if both is not None:
            lines.append(f"{name}: {form.format(both[0])} repeated, {form.format(both[1])} in {pair.second}.")
    if noise.changed is not None:
        lines.append(f"Excess of changed scores over the repetition: {noise.changed[1] - noise.changed[0]:+.2%}.")
    return lines


def failure_rows(pair: Pair) -> list[tuple[str, ...]]:
    """Samples that were not answered by both."""
    return [(task, one, other, str(count)) for (task, one, other), count in sorted(pair.failures.table.items())]


def failure_lines(pair: Pair) -> list[str]:
    """What failures may hide."""
    lines = []
    if pair.failures.one_sided:
        lines.append(f"{pair.failures.one_sided} samples failed in one run alone: the runs are not alike.")
    for name, (delta, low, high) in pair.failures.sensitivity.items():
        lines.append(f"{name}, failures counted as wrong: {delta:+.2f} [{low:+.2f}, {high:+.2f}] points.")
    return lines


def speed_lines(pair: Pair) -> list[str]:
    """Latencies in sentences."""
    speed = pair.speed
    if speed is None:
        return []
    lines = [
        f"Median latency {speed.first_latency:.3g} s and {speed.second_latency:.3g} s over {speed.n} prompts; "
        f"{speed.first_rate:.1f} and {speed.second_rate:.1f} tokens a second."
    ]
    if speed.first_ttft is not None and speed.second_ttft is not None:
        lines.append(f"Median time to the first token {speed.first_ttft:.3g} s and {speed.second_ttft:.3g} s.")
    if speed.tokens_differ:
        lines.append(f"{speed.tokens_differ} answers differ in length, so their latencies do not compare.")
    return lines


def kernel_rows(pair: Pair) -> list[tuple[str, ...]]:
    """Calls of each kernel."""
    return [(name, f"{one:,}", f"{other:,}") for name, (one, other) in pair.kernels.items()]


def arm_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Label, model, counts of samples."""
    for label, arm in comparison.arms.items():
        counts = ", ".join(f"{count} {status}" for status, count in sorted(arm["counts"].items()))
        counts += f"; {arm['cut_answers']} answers cut at their greatest length" if arm["cut_answers"] else ""
        yield label, str(arm["model"].get("name", "")), counts, arm["folder"], arm["fingerprint"][:12]
