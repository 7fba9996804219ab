"""``assay mutate``: planted faults, correct variants, admission; the judge's own exam."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import operations
from ..case import Case
from ..faults import load
from ..kernels import wrap_function
from ..operation import CaseRequest, Operation
from ..options import resolve_device
from ..plan import DTYPES, UsageError
from ..record import ExitCode, Verdict
from ..runner import ExamRoom, run_case
from .admission import admission_table, admissions
from .kill_markdown import kill_markdown
from .kill_matrix import NOT_JUDGED
from .kill_table import KillTable, write_kill_tables
from .mutate import KillMatrix, kill_matrix, render


@dataclass(frozen=True, slots=True, kw_only=True)
class MutateOptions:
    """The options of ``assay mutate``."""

    ops: tuple[str, ...] = ()
    device: str = "auto"
    seed: int = 0
    fresh_seeds: int = 0
    admission: bool = False
    out: Path | None = None


def run_mutate(options: MutateOptions, console: Console) -> int:
    """Plant every fault and run every variant on the smoke cases; return the exit code.

    Raises:
        UsageError: If an operation or the device does not exist.
    """
    names = options.ops or operations.NAMES
    unknown = [name for name in names if name not in operations.NAMES]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(operations.NAMES)}, got {unknown[0]!r}")
    device, matrices, failed = resolve_device(options.device), [], False
    for name in dict.fromkeys(names):
        operation = operations.load(name)
        cases = _cases(operation, options.seed)
        matrix = _matrix(name, cases, device, options, console)
        matrices.append(matrix)
        console.print(render(matrix))
        failed |= not matrix.passed
        if options.admission:
            found = admissions(operation, cases, matrix, device)
            console.print(admission_table(found))
            failed |= not all(one.admitted for one in found)
        if options.fresh_seeds:
            failed |= _false_rejections(operation, options, device, console) > 0
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_kill_tables(options.out / "kill_matrix.json", matrices)
        text = kill_markdown([KillTable.of(matrix) for matrix in matrices], seed=options.seed)
        (options.out / "kill-matrix.md").write_text(text, encoding="utf-8")
        console.print(f"wrote {options.out / 'kill_matrix.json'} and {options.out / 'kill-matrix.md'}", soft_wrap=True)
    return ExitCode.FAILED if failed else ExitCode.PASSED


def _cases(operation: Operation, seed: int) -> list[Case]:
    return operation.cases(CaseRequest(tier="smoke", seed=seed, dtypes=DTYPES))


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _matrix(name: str, cases: list[Case], device: torch.device, options: MutateOptions, console: Console) -> KillMatrix:
    with _bar(console) as progress:
        task = progress.add_task(name, total=None)

        def advance(done: int, total: int, kernel: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{name}: {kernel}")

        # admission counts the kills of every case, so there no fault may stop at its first one
        stop = not options.admission and options.out is None
        return kill_matrix(name, cases, device, stop_when_killed=stop, progress=advance)


def _false_rejections(operation: Operation, options: MutateOptions, device: torch.device, console: Console) -> int:
    """Run the correct variants on the cases of fresh seeds; print and return how many were rejected."""
    kernels = [wrap_function(variant.function, operation) for variant in load(operation.name)[1]]
    judged, rejected = 0, []
    with _bar(console) as progress:
        task = progress.add_task(f"{operation.name}: fresh seeds", total=options.fresh_seeds)
        for seed in range(options.seed + 1, options.seed + 1 + options.fresh_seeds):
            room = ExamRoom()
            for case in _cases(operation, seed):
                records = [run_case(operation, kernel, case, device, room=room) for kernel in kernels]
                mine = [record for record in records if record.verdict not in NOT_JUDGED]
                judged += len(mine)
                rejected += [record for record in mine if record.verdict is not Verdict.PASS]
            progress.advance(task)
    for record in rejected:
        worst = record.worst
        place = "" if worst is None else f": {worst.gate} {worst.ratio:.3g} x its limit"
        console.print(f"REJECTED {record.kernel} on {record.case['id']}{place}", style="red", soft_wrap=True)
    bound = f", so at most {zero_event_bound(judged):.2g} of them at 95 %" if judged and not rejected else ""
    console.print(
        f"{operation.name}: {len(kernels)} variants over {options.fresh_seeds} fresh seeds: "
        f"{len(rejected)} of {judged} judgements rejected{bound}",
        soft_wrap=True,
    )
    return len(rejected)


def zero_event_bound(trials: int, confidence: float = 0.95) -> float:
    """Upper bound of Clopper and Pearson on a probability of which no event was seen: ``1 - (1 - c)^(1 / n)``.

    Raises:
        ValueError: If nothing was tried.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    return float(1 - (1 - confidence) ** (1 / trials))
