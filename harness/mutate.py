"""Does the judge judge? Runs planted faults, which it must find, and correct variants, which it must not reject."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from . import gates, operations
from ._mutate_matrix import FaultResult, KillMatrix, Outcome, Status, VariantResult
from .case import Case
from .companions import Companions, companions
from .faults import Fault, Variant, load, not_applicable
from .kernels import wrap_function
from .operation import Operation, Rows
from .runner import run_case

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

    Variants run first: a case on which one of them is rejected proves nothing about a fault.

    Args:
        op: Name of the operation.
        cases: Its cases, in any order; the cheap ones run first.
        device: Where to run.
        stop_when_killed: Whether a fault's run ends with its first kill for the right reason.
        progress: Called with judgements done, judgements planned and the name of the kernel, before each kernel.

    Raises:
        ValueError: If there is no case of the operation.
    """
    faults, variants = load(op)
    mine = cheapest_first([case for case in cases if case.op == op])
    if not mine:
        raise ValueError(f"cases must hold at least one of {op}, got none among {len(cases)}")
    start = time.perf_counter()
    operation = cast(Operation, _Remembering(operations.load(op)))
    total = (len(faults) + len(variants)) * len(mine)
    announced = itertools.count(step=len(mine))

    def announce(name: str) -> None:
        done = next(announced)
        if progress is not None:
            progress(done, total, name)

    with _companions_once():
        passed = []
        for one in variants:
            announce(one.name)
            passed.append(VariantResult(variant=one, outcomes=tuple(_outcomes(operation, one, mine, device))))
        sound = frozenset(case.id for case in mine) - {one.case_id for result in passed for one in result.rejections}
        found = []
        for fault in faults:
            announce(fault.name)
            outcomes = _fault_outcomes(operation, fault, mine, device, sound, stop_when_killed=stop_when_killed)
            found.append(FaultResult(fault=fault, outcomes=tuple(outcomes), sound=sound))
        announce("")
    return KillMatrix(
        op=op,
        faults=tuple(found),
        variants=tuple(passed),
        not_applicable=not_applicable(op),
        cases=len(mine),
        seconds=time.perf_counter() - start,
    )


class _Remembering:
    """An operation that draws the oracle's rows of a case once: they are the same for every kernel."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._rows: dict[tuple[str, str, int], list[Rows]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """The rows of the first kernel that got as far; its inputs were found unchanged before."""
        key = (case.id, str(arguments["q"].device), budget)
        if key not in self._rows:
            self._rows[key] = list(self._operation.rows(case, arguments, budget=budget))
        return iter(self._rows[key])


@contextmanager
def _companions_once() -> Iterator[None]:
    """Within the block the gates compute the companions of a block of rows once, not once a kernel."""
    # the rows are kept beside their companions, so that no other rows can take their id
    known: dict[int, tuple[Rows, Companions]] = {}

    def remembered(rows: Rows) -> Companions:
        if id(rows) not in known:
            known[id(rows)] = rows, companions(rows)
        return known[id(rows)][1]

    with mock.patch.object(gates, "companions", remembered):
        yield


def cheapest_first(cases: list[Case]) -> list[Case]:
    """Families by the work of their cases, and cases within a family alike; the plan's order breaks ties."""
    work = {
        case.id: math.prod(sum(value) for value in case.sizes.values() if isinstance(value, list)) for case in cases
    }
    of_family: Counter[str] = Counter()
    for case in cases:
        of_family[case.family] += work[case.id]
    return sorted(cases, key=lambda case: (of_family[case.family], case.family, work[case.id]))


def _fault_outcomes(
    operation: Operation,
    fault: Fault,
    cases: list[Case],
    device: torch.device,
    sound: frozenset[str],
    *,
    stop_when_killed: bool,
) -> list[Outcome]:
    if fault.device_only and device.type == "cpu":
        return []
    outcomes: list[Outcome] = []
    for outcome in _outcomes(operation, fault, cases, device):
        outcomes.append(outcome)
        if stop_when_killed and outcome.case_id in sound and outcome.verdict in fault.expects:
            break
    return outcomes


def _outcomes(
    operation: Operation, entry: Fault | Variant, cases: list[Case], device: torch.device
) -> Iterable[Outcome]:
    """One outcome a case, made when it is asked for."""
    kernel = wrap_function(entry.function, operation)
    return (Outcome.of(run_case(operation, kernel, case, device)) for case in cases)


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
