"""``assay check``: plan, judge case by case with progress, leave records, return an exit code."""

import atexit
import platform
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .case import Case, plan_digest
from .downgrade import reassess_answers
from .execution import Execution, Stop, execute
from .failures import Candidate, FailureKeeper
from .jobs import default_jobs, side_by_side
from .kernels import KernelNotFoundError, find_kernels, is_strange
from .operation import Kernel, Operation
from .options import CheckOptions, case_request, chosen_operations, chosen_shard, command_of, resolve_device
from .plan import Selection, UsageError, describe, plan_cases
from .record import ExitCode, Record, Verdict, open_records
from .report.terminal import case_table, failure_lines, print_run
from .runner import Exam, ExamRoom, run_case
from .waivers import Waiver, apply, findings, load_waivers
from .worker import isolated

# verdicts that do not fail a run
SET_ASIDE = {Verdict.PASS, Verdict.WAIVED, Verdict.UNSUPPORTED, Verdict.INVALID_CASE}


def run_check(options: CheckOptions, console: Console) -> int:
    """Judge and report; return the exit code.

    Raises:
        UsageError: If the options cannot be served.
    """
    chosen, device, shard = chosen_operations(options), resolve_device(options.device), chosen_shard(options)
    request, waivers = case_request(options, chosen), _waivers(options.waivers)
    selection = Selection(
        case_id=options.case_id,
        family=options.family,
        shapes=options.shapes,
        plugin=options.cases,
        captured=options.captured,
        captured_dtypes=options.dtypes,
    )
    # the plan is frozen and its digest printed before a kernel's code is imported
    plan = plan_cases(chosen, request, selection)
    cases = shard.of(plan)
    part = "" if options.shard is None else f", shard {shard}: {len(cases)} cases"
    console.print(f"seed {options.seed}, {describe(plan)}{part}, {_device_text(device)}", highlight=False)
    if not cases:
        raise UsageError(f"--shard must leave at least one of {len(plan)} cases, got {shard}")
    if options.list_cases:
        console.print(case_table(cases))
        return ExitCode.PASSED
    with ExitStack() as stack:
        work = _work(chosen, cases, options, device, stack)
        try:
            writer = stack.enter_context(open_records(options.out, _header(options, plan, device)))
        except OSError as error:
            raise UsageError(f"--out must be a folder that can be written, got {options.out}: {error}") from error
        session = _Session(options, waivers, device, console, writer.write)
        try:
            with closing(_judged(work, options, device)) as judged:
                session.take_all(work, judged)
        except BrokenProcessPool:
            text = "a process that judged our own kernels died, so its case has no verdict; --jobs 1 shows which"
            console.print(text, style="red", soft_wrap=True)
            return ExitCode.HARNESS_ERROR
        # a downgrade is named over all cases of a plan
        if shard.count == 1:
            session.name_downgrades(work)
    print_run(console, session.records, title=f"assay check, tier {options.tier}")
    left = len(work) - len(session.records)
    if left:
        console.print(f"{left} of {len(work)} judgements not started", style="yellow")
    broken = session.waiver_findings(complete=options.whole_tier and not left)
    for line in broken:
        console.print(line, style="red", soft_wrap=True)
    return ExitCode.FAILED if broken else _exit_code(session.records, left=left)


def _waivers(path: Path | None) -> list[Waiver]:
    try:
        return [] if path is None else load_waivers(path)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _candidates(operation: Operation, options: CheckOptions, device: torch.device, stack: ExitStack) -> list[Candidate]:
    """Our kernels are run here, a stranger's in a process of its own."""
    foreign, room = is_strange(options.kernel), ExamRoom()
    try:
        if foreign and not options.in_process:
            worker = isolated(operation, str(options.kernel), device, timeout=options.timeout)
            running = stack.enter_context(worker)
            return [Candidate(name=running.name, run_case=running.run_case, operation=operation, ask=running.ask)]
        kernels = find_kernels(operation, options.kernel)
    except (KernelNotFoundError, TypeError) as error:
        raise UsageError(str(error)) from error
    return [_house_candidate(operation, kernel, device, room) for kernel in kernels]


def _house_candidate(operation: Operation, kernel: Kernel, device: torch.device, room: ExamRoom) -> Candidate:
    def ask(exam: Exam) -> Execution | Stop:
        return execute(operation, kernel, exam.case, exam.inputs, device)

    return Candidate(
        name=kernel.name,
        run_case=partial(run_case, operation, kernel, device=device, room=room),
        operation=operation,
        ask=ask,
        contract=kernel.contract,
    )


def _work(
    chosen: list[Operation], cases: list[Case], options: CheckOptions, device: torch.device, stack: ExitStack
) -> list[tuple[Candidate, Case]]:
    """Every kernel on every case of its operation, case by case: the kernels share its inputs and oracle."""
    return [
        (candidate, case)
        for operation in chosen
        for case, candidate in product(
            [case for case in cases if case.op == operation.name],
            _candidates(operation, options, device, stack),
        )
    ]


def _judged(
    work: list[tuple[Candidate, Case]], options: CheckOptions, device: torch.device
) -> Generator[Record, None, None]:
    """The record of each piece of work, in order, judged when asked for, or ahead by several processes."""
    cases = [case for at, (_, case) in enumerate(work) if at == 0 or work[at - 1][1] is not case]
    # a debugger follows this process alone
    jobs = min(options.jobs or (1 if options.in_process else default_jobs(device, len(cases))), len(cases))
    if jobs <= 1:
        yield from (candidate.run_case(case) for candidate, case in work)
    else:
        yield from chain.from_iterable(side_by_side(partial(_judge_of, options, device), cases, jobs))


def _judge_of(options: CheckOptions, device: torch.device) -> Callable[[Case], list[Record]]:
    """What judges one case by all candidates of its operation, in a process of its own."""
    stack, chosen = ExitStack(), chosen_operations(options)
    atexit.register(stack.close)
    candidates = {operation.name: _candidates(operation, options, device, stack) for operation in chosen}
    return lambda case: [candidate.run_case(case) for candidate in candidates[case.op]]


class _Session:
    """Takes the records of a list of work with progress; each is written as soon as it is there."""

    def __init__(
        self,
        options: CheckOptions,
        waivers: list[Waiver],
        device: torch.device,
        console: Console,
        write: Callable[[str], None],
    ) -> None:
        self._options, self._waivers, self._console, self._write = options, waivers, console, write
        self._device = device
        self._keeper = None if options.out is None else FailureKeeper(options, options.out, device, console)
        # a waiver changes what a record says, and is itself held against what the judge said
        self._originals: list[Record] = []
        self.records: list[Record] = []

    def take_all(self, work: list[tuple[Candidate, Case]], judged: Iterator[Record]) -> None:
        """Go through the list in order, until its end, the first failure or the end of the time, as the options say."""
        options, start = self._options, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("judging", total=len(work))
            for candidate, case in work:
                if options.max_seconds is not None and time.monotonic() - start > options.max_seconds:
                    break
                progress.update(task, description=f"{candidate.name} {case.family} {case.dtype}")
                record = self._take(next(judged))
                progress.advance(task)
                if record.verdict not in SET_ASIDE:
                    self._console.print(failure_lines(record, record.command), soft_wrap=True)
                    if self._keeper is not None:
                        self._keeper.keep(candidate, case, record)
                    if options.fail_fast:
                        break

    def name_downgrades(self, work: list[tuple[Candidate, Case]]) -> None:
        """Look over all cases of a kernel whether its failures are those of a lower precision than it declares."""
        if len(self.records) < len(work):
            return
        candidates = {(candidate.operation.name, candidate.name): candidate for candidate, _ in work}
        cases, before = [case for _, case in work], self.records
        for candidate in candidates.values():
            self.records = reassess_answers(
                candidate.operation, candidate.name, candidate.ask, cases, self.records, self._device
            )
        revised = [record for record, old in zip(self.records, before, strict=True) if record is not old]
        for record in revised:
            self._write(record.to_json())
            self._console.print(failure_lines(record, record.command), soft_wrap=True)

    def waiver_findings(self, *, complete: bool) -> list[str]:
        """What is wrong with the waivers themselves."""
        return findings(self._originals, self._waivers, date.today(), complete=complete)

    def _take(self, judged: Record) -> Record:
        original = replace(judged, command=command_of(self._options, judged))
        record = apply(original, self._waivers, date.today())
        self._write(record.to_json())
        self._originals.append(original)
        self.records.append(record)
        return record


def _exit_code(records: list[Record], *, left: int) -> int:
    verdicts = {record.verdict for record in records}
    if Verdict.HARNESS_ERROR in verdicts:
        return ExitCode.HARNESS_ERROR
    if verdicts - SET_ASIDE:
        return ExitCode.FAILED
    if left:
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASSED if verdicts & {Verdict.PASS, Verdict.WAIVED} else ExitCode.NOTHING_JUDGED


def _header(options: CheckOptions, cases: list[Case], device: torch.device) -> dict[str, Any]:
    return {
        "tier": options.tier,
        "seed": options.seed,
        "kernel": options.kernel,
        "plan": plan_digest(cases),
        "cases": len(cases),
        **({} if options.shard is None else {"shard": options.shard}),
        "device": _device_text(device),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "kernel-assay")},
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device_text(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU, Triton interpreted"
    return f"{torch.cuda.get_device_name(device)} ({device})"
