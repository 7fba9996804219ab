"""``assay mutate``: planted faults, correct variants, admission; the judge's own exam."""

import io
from collections.abc import Callable, Generator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import operations
from ..case import Case
from ..faults import load
from ..jobs import CASES_EACH, default_jobs, side_by_side
from ..kernels import wrap_function
from ..operation import CaseRequest, Operation
from ..options import resolve_device
from ..plan import DTYPES, UsageError
from ..record import ExitCode, Record, Verdict
from ..runner import ExamRoom, run_case
from .admission import Admission, admission_table, admissions
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
    jobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSeeds:
    """Correct variants on further seeds: how many there are, how often they were judged, and who was rejected."""

    variants: int
    judged: int
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What the judge did on one operation; without admission and fresh seeds where they were not asked for."""

    matrix: KillMatrix
    admissions: tuple[Admission, ...] = ()
    fresh: FreshSeeds | None = None

    @property
    def passed(self) -> bool:
        """Whether everything was found, admitted and accepted."""
        rejected = self.fresh is not None and bool(self.fresh.rejected)
        return self.matrix.passed and all(one.admitted for one in self.admissions) and not rejected


def run_mutate(options: MutateOptions, console: Console) -> int:
    """Plant every fault and run every variant on the smoke cases; return the exit code.

    Raises:
        UsageError: If an operation or the device does not exist.
    """
    names = list(dict.fromkeys(options.ops or operations.NAMES))
    unknown = [name for name in names if name not in operations.NAMES]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(operations.NAMES)}, got {unknown[0]!r}")
    exams = []
    try:
        with closing(_exams(names, options, console)) as found:
            for exam in found:
                exams.append(exam)
                _show(exam, options, console)
    except BrokenProcessPool:
        text = f"a process that examined {names[len(exams)]} or a later operation died; --jobs 1 shows which"
        console.print(text, style="red", soft_wrap=True)
        return ExitCode.HARNESS_ERROR
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        matrices = [exam.matrix for exam in exams]
        write_kill_tables(options.out / "kill_matrix.json", matrices)
        text = kill_markdown([KillTable.of(matrix) for matrix in matrices], seed=options.seed)
        (options.out / "kill-matrix.md").write_text(text, encoding="utf-8")
        console.print(f"wrote {options.out / 'kill_matrix.json'} and {options.out / 'kill-matrix.md'}", soft_wrap=True)
    return ExitCode.PASSED if all(exam.passed for exam in exams) else ExitCode.FAILED


def _exams(names: list[str], options: MutateOptions, console: Console) -> Generator[Exam, None, None]:
    """One operation after the other, or several side by side, in the order of their names."""
    device = resolve_device(options.device)
    # an operation is as much work as many cases
    jobs = min(options.jobs or default_jobs(device, CASES_EACH * len(names)), len(names))
    if jobs <= 1:
        yield from (_examine(name, options, device, console) for name in names)
        return
    with _bar(console) as progress:
        task = progress.add_task("operations", total=len(names))
        for exam in side_by_side(partial(_examiner, options, device), names, jobs):
            progress.advance(task)
            yield exam


def _examiner(options: MutateOptions, device: torch.device) -> Callable[[str], Exam]:
    """What examines an operation in a process of its own, which tells nobody how far it is."""
    quiet = Console(file=io.StringIO())
    return lambda name: _examine(name, options, device, quiet)


def _examine(name: str, options: MutateOptions, device: torch.device, console: Console) -> Exam:
    operation = operations.load(name)
    cases = _cases(operation, options.seed)
    matrix = _matrix(name, cases, device, options, console)
    return Exam(
        matrix=matrix,
        admissions=tuple(admissions(operation, cases, matrix, device)) if options.admission else (),
        fresh=_fresh_seeds(operation, options, device, console) if options.fresh_seeds else None,
    )


def _show(exam: Exam, options: MutateOptions, console: Console) -> None:
    console.print(render(exam.matrix))
    if options.admission:
        console.print(admission_table(list(exam.admissions)))
    if exam.fresh is not None:
        fresh = exam.fresh
        for text in fresh.rejected:
            console.print(text, style="red", soft_wrap=True)
        sure = fresh.judged and not fresh.rejected
        bound = f", so at most {zero_event_bound(fresh.judged):.2g} of them at 95 %" if sure else ""
        console.print(
            f"{exam.matrix.op}: {fresh.variants} variants over {options.fresh_seeds} fresh seeds: "
            f"{len(fresh.rejected)} of {fresh.judged} judgements rejected{bound}",
            soft_wrap=True,
        )


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


def _fresh_seeds(operation: Operation, options: MutateOptions, device: torch.device, console: Console) -> FreshSeeds:
    """Run the correct variants on the cases of fresh seeds."""
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
                rejected += [_rejection(record) for record in mine if record.verdict is not Verdict.PASS]
            progress.advance(task)
    return FreshSeeds(variants=len(kernels), judged=judged, rejected=tuple(rejected))


def _rejection(record: Record) -> str:
    worst = record.worst
    place = "" if worst is None else f": {worst.gate} {worst.ratio:.3g} x its limit"
    return f"REJECTED {record.kernel} on {record.case['id']}{place}"


def zero_event_bound(trials: int, confidence: float = 0.95) -> float:
    """Upper bound of Clopper and Pearson on a probability of which no event was seen: ``1 - (1 - c)^(1 / n)``.

    Raises:
        ValueError: If nothing was tried.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    return float(1 - (1 - confidence) ** (1 / trials))
