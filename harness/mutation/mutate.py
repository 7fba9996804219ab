"""Does the judge judge? Runs planted faults, which it must find, and correct variants, which it must not reject."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .. import operations
from ..case import Case
from ..downgrade import reassess
from ..faults import Fault, Variant, load, not_applicable
from ..kernels import wrap_function
from ..operation import Kernel, Operation
from ..record import Record, RowErrors, Verdict
from ..runner import ExamRoom, run_case
from .kill_matrix import NOT_JUDGED, FaultResult, KillMatrix, Outcome, Status, VariantResult

__all__ = ["FaultResult", "KillMatrix", "Outcome", "Status", "VariantResult", "cheapest_first", "kill_matrix", "render"]

Progress = Callable[[int, int, str], None]


def kill_matrix(
    op: str,
    cases: list[Case],
    device: torch.device,
    *,
    stop_when_killed: bool = False,
    progress: Progress | None = None,
) -> KillMatrix:
    """Judge every fault and every variant of an operation.

    On each case the variants run first: one on which any of them is rejected proves nothing about a fault. A fault that
    ran on all cases is then looked at over all of them, as a kernel is by ``assay check``.

    Args:
        op: Name of the operation.
        cases: Its cases, in any order; the cheap ones run first.
        device: Where to run.
        stop_when_killed: Whether a fault runs no further after its first kill for the right reason; what a look over
            all cases would call it remains unknown then.
        progress: Called before each judgement with those done, those planned and the name of the kernel; a judgement
            that a kill has made needless counts as done.

    Raises:
        ValueError: If there is no case of the operation.
    """
    operation, (faults, variants) = operations.load(op), load(op)
    mine = cheapest_first([case for case in cases if case.op == op])
    if not mine:
        raise ValueError(f"cases must hold at least one of {op}, got none among {len(cases)}")
    start, run = time.perf_counter(), _Run(operation, device, progress, (len(faults) + len(variants)) * len(mine))
    running = [fault for fault in faults if device.type != "cpu" or not fault.device_only]
    sound: set[str] = set()
    for case in mine:
        passed = [run.judge(one, case).verdict in (Verdict.PASS, *NOT_JUDGED) for one in variants]
        if all(passed):
            sound.add(case.id)
        for fault in tuple(running):
            verdict = run.judge(fault, case).verdict
            if stop_when_killed and case.id in sound and verdict in fault.expects:
                running.remove(fault)
        run.done += len(faults) - len(running)
    for fault in running:
        run.reassess(fault, mine)
    return KillMatrix(
        op=op,
        faults=tuple(FaultResult(fault=one, outcomes=run.of(one), sound=frozenset(sound)) for one in faults),
        variants=tuple(VariantResult(variant=one, outcomes=run.of(one)) for one in variants),
        not_applicable=not_applicable(op),
        cases=len(mine),
        seconds=time.perf_counter() - start,
    )


class _Run:
    """Judges one kernel after the other on a case, so that they share its inputs and its oracle."""

    def __init__(self, operation: Operation, device: torch.device, progress: Progress | None, total: int) -> None:
        """Nothing is judged yet."""
        self._operation, self._device, self._progress, self._total = operation, device, progress, total
        self._room = ExamRoom()
        self._kernels: dict[str, Kernel] = {}
        self._records: dict[str, list[Record]] = {}
        self.done = 0

    def judge(self, entry: Fault | Variant, case: Case) -> Outcome:
        """Judge, and remember what came of it."""
        if self._progress is not None:
            self._progress(self.done, self._total, entry.name)
        if entry.name not in self._kernels:
            self._kernels[entry.name] = wrap_function(entry.function, self._operation)
        kernel = self._kernels[entry.name]
        record = run_case(self._operation, kernel, case, self._device, room=self._room)
        # thousands of judgements are kept, and nobody draws the rows of these
        self._records.setdefault(entry.name, []).append(replace(record, rows=RowErrors()))
        self.done += 1
        return Outcome.of(record)

    def reassess(self, fault: Fault, cases: list[Case]) -> None:
        """Call its failures a precision downgrade if a lower precision explains them all."""
        if self._progress is not None:
            self._progress(self.done, self._total, fault.name)
        records = self._records.get(fault.name, [])
        if records:
            kernel = self._kernels[fault.name]
            self._records[fault.name] = reassess(self._operation, kernel, cases, records, self._device)

    def of(self, entry: Fault | Variant) -> tuple[Outcome, ...]:
        """What came of an entry, case by case."""
        return tuple(map(Outcome.of, self._records.get(entry.name, ())))


def cheapest_first(cases: list[Case]) -> list[Case]:
    """Families by the work of their cases, and cases within a family alike; the plan's order breaks ties."""
    work = {
        case.id: math.prod(sum(value) for value in case.sizes.values() if isinstance(value, list)) for case in cases
    }
    of_family: Counter[str] = Counter()
    for case in cases:
        of_family[case.family] += work[case.id]
    return sorted(cases, key=lambda case: (of_family[case.family], case.family, work[case.id]))


def render(matrix: KillMatrix) -> RenderableType:
    """What got away first, then every fault by family with the gates that found it, the variants, the rows left out."""
    tables = [_escaped_table(matrix), _fault_table(matrix), _variant_table(matrix)]
    if matrix.not_applicable:
        tables.append(_left_out_table(matrix))
    counts = Counter(result.status for result in matrix.faults)
    statuses = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
    rejected = sum(bool(result.rejections) for result in matrix.variants)
    summary = (
        f"{matrix.op}: {len(matrix.faults)} faults ({statuses}), {len(matrix.variants)} variants "
        f"({rejected} rejected), {matrix.cases} cases, {matrix.seconds:.0f} s"
    )
    return Group(*(table for table in tables if table.row_count), Text(summary, style="bold"))


def _escaped_table(matrix: KillMatrix) -> Table:
    table = _table(f"{matrix.op}: faults that got away", "fault", "status", "rows", "expected", "seen", "nearest gate")
    escaped = [result for result in matrix.faults if result.status is not Status.KILLED]
    for result in sorted(escaped, key=lambda result: list(Status).index(result.status)):
        seen = Counter(one.verdict for one in result.judged)
        nearest = result.nearest
        table.add_row(
            result.fault.name,
            Text(result.status.value, style="yellow" if result.status is Status.NOT_JUDGED else "bold red"),
            ", ".join(result.fault.rows),
            ", ".join(sorted(result.fault.expects)),
            ", ".join(f"{verdict} {count}" for verdict, count in seen.most_common()),
            "" if nearest is None else f"{nearest.gate} {nearest.ratio:.3g} x, {nearest.family} {nearest.dtype}",
        )
    return table


def _fault_table(matrix: KillMatrix) -> Table:
    """Kills of judged cases per family, and the gates or verdicts that decided."""
    families = sorted({one.family for result in matrix.faults for one in result.outcomes})
    table = _table(f"{matrix.op}: kills of cases, and by what", "fault", "rows", *families, "dtypes")
    order = list(Status)
    for result in sorted(matrix.faults, key=lambda result: order.index(result.status)):
        cells = []
        for family in families:
            judged = sum(one.family == family for one in result.judged)
            kills = [one for one in result.kills if one.family == family]
            reasons = " ".join(sorted({one.reason for one in kills}))
            cells.append(f"{len(kills)}/{judged} {reasons}".strip() if judged else "")
        dtypes = sorted({one.dtype for one in result.kills})
        name = Text(result.fault.name, style="" if result.status is Status.KILLED else "bold red")
        table.add_row(name, " ".join(result.fault.rows), *cells, " ".join(dtypes))
    return table


def _variant_table(matrix: KillMatrix) -> Table:
    table = _table(f"{matrix.op}: correct variants", "variant", "passed", "rejected", "not judged", "nearest gate")
    for result in sorted(matrix.variants, key=lambda result: -len(result.rejections)):
        nearest = max(result.judged, key=lambda one: one.ratio, default=None)
        rejected = len(result.rejections)
        table.add_row(
            Text(result.variant.name, style="bold red" if rejected else ""),
            str(len(result.judged) - rejected),
            str(rejected),
            str(len(result.outcomes) - len(result.judged)),
            "" if nearest is None else f"{nearest.gate} {nearest.ratio:.3g} x, {nearest.family} {nearest.dtype}",
        )
    return table


def _left_out_table(matrix: KillMatrix) -> Table:
    table = _table(f"{matrix.op}: rows of the catalogue that are not planted", "row", "reason")
    for left_out in matrix.not_applicable:
        table.add_row(left_out.row, left_out.reason)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
