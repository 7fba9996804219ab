"""``assay check``: plan, judge case by case with progress, leave records, return an exit code."""

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import operations
from .case import Case, plan_digest
from .kernels import KernelNotFoundError, find_kernels, is_strange
from .operation import CaseRequest, Operation
from .plan import DTYPES, TIERS, Selection, UsageError, describe, plan_cases
from .record import ExitCode, Record, Verdict, open_records
from .report import case_table, failure_lines, print_run
from .runner import ExamRoom, run_case
from .worker import isolated

NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.INVALID_CASE)
GEOMETRY_SIZES = {"mla_prefill": ("R", "Dn", "Dr", "Dv"), "attention": ("Dq", "Dv")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of ``assay check``, as given."""

    ops: tuple[str, ...] = ()
    kernel: str | None = None
    tier: str = "smoke"
    device: str = "auto"
    dtypes: tuple[str, ...] = ()
    seed: int = 0
    geometry: str | None = None
    heads: int | None = None
    shapes: Path | None = None
    case_id: str | None = None
    family: str | None = None
    list_cases: bool = False
    fail_fast: bool = False
    max_seconds: float | None = None
    timeout: float = 120.0
    in_process: bool = False
    out: Path | None = None


def run_check(options: CheckOptions, console: Console) -> int:
    """Judge and report; return the exit code.

    Raises:
        UsageError: If the options cannot be served.
    """
    chosen, device = _operations(options), resolve_device(options.device)
    request = _request(options, chosen)
    selection = Selection(case_id=options.case_id, family=options.family, shapes=options.shapes)
    # the plan is frozen and its digest printed before a kernel's code is imported
    cases = plan_cases(chosen, request, selection)
    console.print(f"seed {options.seed}, {describe(cases)}, {_device_text(device)}", highlight=False)
    if options.list_cases:
        console.print(case_table(cases))
        return ExitCode.PASSED
    with ExitStack() as stack:
        work = _work(chosen, cases, options, device, stack)
        with open_records(options.out, _header(options, cases, device)) as writer:
            records = _judge_all(work, options, console, writer.write)
    print_run(console, records, title=f"assay check, tier {options.tier}")
    left = len(work) - len(records)
    if left:
        console.print(f"{left} of {len(work)} judgements not started", style="yellow")
    return _exit_code(records, left=left)


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, or else the CPU.

    Raises:
        UsageError: If the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise UsageError(f"--device must be the CPU or one of the {count} CUDA devices here, got {name!r}")
    return torch.device("cuda", device.index or 0)


def _operations(options: CheckOptions) -> list[Operation]:
    if options.tier not in TIERS:
        raise UsageError(f"--tier must be one of {', '.join(TIERS)}, got {options.tier!r}")
    names = options.ops or operations.NAMES
    unknown = [name for name in names if name not in operations.NAMES]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(operations.NAMES)}, got {unknown[0]!r}")
    foreign = is_strange(options.kernel)
    if foreign and len(names) != 1:
        raise UsageError(f"a kernel of yours needs exactly one operation, got {', '.join(names)}")
    return [operations.load(name) for name in dict.fromkeys(names)]


def _request(options: CheckOptions, chosen: list[Operation]) -> CaseRequest:
    dtypes = options.dtypes or DTYPES
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {unknown[0]!r}")
    geometry = None
    if options.geometry is not None:
        geometry = _geometry(options.geometry, chosen)
    return CaseRequest(
        tier=options.tier, seed=options.seed, dtypes=tuple(dtypes), geometry=geometry, heads=options.heads
    )


def _geometry(text: str, chosen: list[Operation]) -> tuple[int, ...]:
    parts = text.split("/")
    for operation in chosen:
        names = GEOMETRY_SIZES[operation.name]
        if len(parts) != len(names) or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--geometry must be {'/'.join(names)} for {operation.name}, got {text!r}")
    sizes = tuple(int(part) for part in parts)
    if any(size == 0 for at, size in enumerate(sizes) if not (len(sizes) == 4 and at == 2)):
        raise UsageError(f"--geometry must have positive sizes (only Dr may be 0), got {text!r}")
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A kernel as the session sees it: a name, and how a case is judged."""

    name: str
    run_case: Callable[[Case], Record]


def _candidates(
    operation: Operation, options: CheckOptions, device: torch.device, stack: ExitStack
) -> list[_Candidate]:
    """Our kernels are run here, a stranger's in a process of its own."""
    foreign, room = is_strange(options.kernel), ExamRoom()
    try:
        if foreign and not options.in_process:
            worker = isolated(operation, str(options.kernel), device, timeout=options.timeout)
            running = stack.enter_context(worker)
            return [_Candidate(name=running.name, run_case=running.run_case)]
        kernels = find_kernels(operation, options.kernel)
    except (KernelNotFoundError, TypeError) as error:
        raise UsageError(str(error)) from error
    judges = {kernel.name: partial(run_case, operation, kernel, device=device, room=room) for kernel in kernels}
    return [_Candidate(name=name, run_case=judge) for name, judge in judges.items()]


def _work(
    chosen: list[Operation], cases: list[Case], options: CheckOptions, device: torch.device, stack: ExitStack
) -> list[tuple[_Candidate, Case]]:
    """Every kernel on every case of its operation, case by case: the kernels share its inputs and oracle."""
    return [
        (candidate, case)
        for operation in chosen
        for case, candidate in product(
            [case for case in cases if case.op == operation.name],
            _candidates(operation, options, device, stack),
        )
    ]


def _judge_all(
    work: list[tuple[_Candidate, Case]], options: CheckOptions, console: Console, write: Callable[[str], None]
) -> list[Record]:
    """Run the list in order, each record written as soon as it is there."""
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("judging", total=len(work))
        for candidate, case in work:
            if options.max_seconds is not None and time.monotonic() - start > options.max_seconds:
                break
            progress.update(task, description=f"{candidate.name} {case.family} {case.dtype}")
            record = candidate.run_case(case)
            record = replace(record, command=_command(options, record))
            write(record.to_json())
            records.append(record)
            progress.advance(task)
            if record.verdict is not Verdict.PASS and record.verdict not in NOT_JUDGED:
                console.print(failure_lines(record, _command(options, record)))
                if options.fail_fast:
                    break
    return records


def _command(options: CheckOptions, record: Record) -> str:
    """The command that judges this one record again."""
    parts = ["assay check", record.op, "--case", record.case["id"], "--tier", options.tier, "--seed", str(options.seed)]
    parts += ["--kernel", f"'{options.kernel or record.kernel}'", "--device", options.device]
    for flag, value in (("--geometry", options.geometry), ("--heads", options.heads), ("--shapes", options.shapes)):
        parts += [flag, str(value)] if value is not None else []
    for dtype in options.dtypes:
        parts += ["--dtype", dtype]
    return " ".join(parts)


def _exit_code(records: list[Record], *, left: int) -> int:
    verdicts = {record.verdict for record in records}
    if Verdict.HARNESS_ERROR in verdicts:
        return ExitCode.HARNESS_ERROR
    if verdicts - {Verdict.PASS, *NOT_JUDGED}:
        return ExitCode.FAILED
    if left:
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASSED if Verdict.PASS in verdicts else ExitCode.NOTHING_JUDGED


def _header(options: CheckOptions, cases: list[Case], device: torch.device) -> dict[str, Any]:
    return {
        "tier": options.tier,
        "seed": options.seed,
        "kernel": options.kernel,
        "plan": plan_digest(cases),
        "cases": len(cases),
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
