"""What the written reports say of a run: counts per kernel, a table of verdicts, what was set aside and why."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..record import GateResult, Record, Verdict
from .run_folder import SET_ASIDE, Run, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSummary:
    """One kernel over all its cases; ``nearest`` is the gate that came nearest to its limit, or passed it furthest."""

    op: str
    kernel: str
    passed: int
    failed: int
    set_aside: int
    nearest: GateResult | None
    rows_judged: int
    seconds: float

    @property
    def word(self) -> str:
        """The verdict on the kernel in a word."""
        return "failed" if self.failed else "passed" if self.passed else "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """One kernel on one family: how many cases had which verdict, by dtype."""

    kernel: str
    family: str
    by_dtype: dict[str, Counter[Verdict]]


def kernel_summaries(run: Run) -> list[KernelSummary]:
    """One per kernel, in the order of judging."""
    summaries = []
    for kernel in run.kernels:
        mine = run.of_kernel(kernel)
        counts = Counter(record.verdict for record in mine)
        aside = sum(counts[verdict] for verdict in SET_ASIDE)
        summaries.append(
            KernelSummary(
                op=mine[0].op,
                kernel=kernel,
                passed=counts[Verdict.PASS],
                failed=len(mine) - counts[Verdict.PASS] - aside,
                set_aside=aside,
                nearest=nearest(mine),
                rows_judged=sum(record.rows_judged for record in mine),
                seconds=sum(record.seconds for record in mine),
            )
        )
    return summaries


def nearest(records: Iterable[Record]) -> GateResult | None:
    """The gate with the largest ratio; one without a number counts as the largest."""
    gates = (gate for record in records if record.verdict not in SET_ASIDE for gate in record.gates)
    return max(gates, key=lambda gate: math.inf if math.isnan(gate.ratio) else gate.ratio, default=None)


def dtypes(run: Run) -> list[str]:
    """The dtypes of the cases, in the order of judging."""
    return list(dict.fromkeys(str(record.case["dtype"]) for record in run.records))


def verdict_rows(run: Run) -> list[VerdictRow]:
    """Kernel x family, in the order of judging."""
    rows: dict[tuple[str, str], VerdictRow] = {}
    for record in run.records:
        key = record.kernel, str(record.case["family"])
        row = rows.setdefault(key, VerdictRow(kernel=key[0], family=key[1], by_dtype={}))
        row.by_dtype.setdefault(str(record.case["dtype"]), Counter())[record.verdict] += 1
    # a kernel's families stay together whatever the order of cases
    return sorted(rows.values(), key=lambda row: run.kernels.index(row.kernel))


def set_aside(run: Run) -> list[tuple[str, Verdict, str, int]]:
    """Kernel, verdict and reason of what was neither passed nor failed, with its count; the most frequent first."""
    reasons = Counter((r.kernel, r.verdict, r.text) for r in run.records if r.verdict in SET_ASIDE)
    return [(*key, count) for key, count in reasons.most_common()]


def settings(run: Run) -> list[tuple[str, str]]:
    """The header as names and texts, nested names joined by a space."""
    return list(_flat("", run.header))


def _flat(prefix: str, content: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in content.items():
        label = f"{prefix} {name}".strip()
        if isinstance(value, dict):
            yield from _flat("" if name == "versions" else label, value)
        else:
            yield label, "none" if value is None else str(value)


def failing_gates(record: Record) -> list[GateResult]:
    """The gates that do not hold, the deciding one first."""
    return [gate for gate in record.gates if not gate.passed]


def said(record: Record) -> str:
    """The text of a record, unless it only repeats the deciding gate, which every report shows with its place."""
    worst = record.worst
    return "" if worst is not None and record.text.startswith(f"{worst.gate}: ") else record.text


def worst_records(run: Run, count: int) -> list[Record]:
    """Records whose rows deserve a picture: failures first, then those nearest to a limit, each kind's worst first.

    Kernels and families take turns, so that one broken family does not hide the others.
    """
    shown = [record for record in run.records if record.rows.token and record.gates]
    shown.sort(key=lambda record: (not failed(record.verdict), -_badness(record)))
    turns: Counter[tuple[str, str]] = Counter()
    ranked = []
    for record in shown:
        kind = record.kernel, str(record.case["family"])
        ranked.append((not failed(record.verdict), turns[kind], record))
        turns[kind] += 1
    ranked.sort(key=lambda entry: entry[:2])
    return [record for *_, record in ranked[:count]]


def _badness(record: Record) -> float:
    worst = record.worst
    return 0.0 if worst is None else math.inf if math.isnan(worst.ratio) else worst.ratio


def ratio_text(ratio: float) -> str:
    """A ratio to a limit, short."""
    if math.isnan(ratio):
        return "undefined"
    if math.isinf(ratio):
        return "∞"
    return f"{ratio:.3g}×" if ratio < 1000 else f"{ratio:.1e}×"  # noqa: RUF001  # the sign of multiplication
