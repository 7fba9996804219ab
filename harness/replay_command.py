"""``assay replay``: judge a capsule's case again, with the inputs that the kernel failed on."""

import shlex
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from .capsule import Capsule, read_capsule, recorded_operation, versions
from .case import Case
from .contract import Contract
from .discovery import load_operation
from .kernels import KernelNotFoundError, find_kernels, is_strange
from .operation import Kernel, Operation
from .options import resolve_device
from .plan import UsageError
from .record import ExitCode, Record, Verdict
from .report.terminal import failure_lines
from .runner import run_case
from .shrink import fault_kind
from .worker import isolated

NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.INVALID_CASE)


def run_replay(
    path: Path,
    kernel_override: str | None,
    device_name: str,
    console: Console,
    *,
    timeout: float = 120.0,
    in_process: bool = False,
) -> int:
    """Judge the case of a capsule again, say whether it is the recorded failure, return the exit code.

    A stranger's kernel runs in a process of its own, as in ``assay check``, unless its inputs are no longer those that
    are drawn for the case: then only this process has them.

    Args:
        path: The JSON file of the capsule.
        kernel_override: Another kernel than the recorded one, as ``--kernel`` names it, such as a mended copy.
        device_name: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        console: For the report.
        timeout: Seconds that the case may take in a process of its own.
        in_process: Run the kernel here in any case, where a debugger can follow it.

    Returns:
        0 if every kernel passes now, 1 if one fails, 3 if none can be judged here, 7 if the judge itself failed.

    Raises:
        UsageError: If the capsule, the kernel or the device cannot be had.
    """
    device = resolve_device(device_name)
    try:
        capsule = read_capsule(path)
        operation = load_operation(capsule.case.op)
    except ValueError as error:
        raise UsageError(str(error)) from error
    _say(console, f"{capsule.case.id}: {capsule.kernel} failed on {capsule.device} with {_fault(capsule)}")
    for line in _differences(capsule):
        _say(console, line, style="yellow")
    recorded, drawn_here = _with_recorded_inputs(operation, capsule, device, console)
    name = kernel_override or capsule.kernel
    try:
        if is_strange(name) and drawn_here and not in_process:
            with isolated(operation, name, device, timeout=timeout) as worker:
                records = [worker.run_case(capsule.case)]
        else:
            records = _judge_here(recorded, name, capsule, device, console)
    except KernelNotFoundError as error:
        if kernel_override is None and not is_strange(name):
            # one of the house whose library this machine lacks
            _say(console, str(error), style="yellow")
            return ExitCode.NOTHING_JUDGED
        raise UsageError(str(error)) from error
    for record in records:
        _report(record, capsule, _command(path, kernel_override, device_name), console)
    return _exit_code(records)


def _with_recorded_inputs(
    operation: Operation, capsule: Capsule, device: torch.device, console: Console
) -> tuple[Operation, bool]:
    """The operation with the inputs of the capsule, and whether every process here would draw the same."""
    if capsule.case.needs_device and device.type == "cpu":
        # will be refused, so nothing of that size is drawn
        return operation, True
    try:
        recorded, remark = recorded_operation(capsule, operation, device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if remark:
        _say(console, remark, style="yellow")
    return recorded, not remark


def _judge_here(
    operation: Operation, name: str, capsule: Capsule, device: torch.device, console: Console
) -> list[Record]:
    try:
        kernels = find_kernels(operation, name)
    except TypeError as error:
        raise UsageError(str(error)) from error
    for kernel in kernels:
        changes = _changes(capsule.contract, kernel, capsule.case)
        if changes:
            _say(console, f"{kernel.name} declares another contract now: {changes}", style="yellow")
    return [run_case(operation, kernel, capsule.case, device) for kernel in kernels]


def _report(record: Record, capsule: Capsule, command: str, console: Console) -> None:
    """Verdict, and whether it is the recorded one."""
    if record.verdict is Verdict.PASS:
        _say(console, f"PASS  {record.kernel}  {record.case['id']}: passes now", style="green")
        return
    if record.verdict in NOT_JUDGED:
        _say(console, f"{record.verdict.value}  {record.kernel}: {record.text}", style="yellow")
        return
    console.print(failure_lines(record, command))
    recorded = fault_kind(capsule.verdict, capsule.worst, capsule.text)
    if fault_kind(record.verdict, record.worst, record.text) == recorded:
        _say(console, "  as recorded")
    else:
        _say(console, f"  not the recorded failure, which was {_fault(capsule)}", style="yellow")


def _exit_code(records: list[Record]) -> int:
    verdicts = {record.verdict for record in records}
    if Verdict.HARNESS_ERROR in verdicts:
        return ExitCode.HARNESS_ERROR
    if verdicts - {Verdict.PASS, *NOT_JUDGED}:
        return ExitCode.FAILED
    return ExitCode.PASSED if Verdict.PASS in verdicts else ExitCode.NOTHING_JUDGED


def _fault(capsule: Capsule) -> str:
    """The recorded verdict with the judge's sentence."""
    return capsule.verdict.value + (f" ({capsule.text})" if capsule.text else "")


def _differences(capsule: Capsule) -> list[str]:
    """What of the recorded surroundings is not so here."""
    here = versions()
    changed = [
        f"{name} {there or 'none'} -> {here.get(name) or 'none'}"
        for name, there in capsule.versions.items()
        if here.get(name) != there
    ]
    return [f"other versions than recorded: {', '.join(changed)}"] if changed else []


def _changes(before: Contract | None, kernel: Kernel, case: Case) -> str:
    """What a kernel promises otherwise than it did; empty where it does not, or where that is not known."""
    try:
        after = kernel.contract(case)
    except Exception:
        # the judge meets it again, and has a verdict for it
        return ""
    if before is None:
        return ""
    old, new = asdict(before), asdict(after)
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in old if old[name] != new[name])


def _command(path: Path, kernel: str | None, device: str) -> str:
    """The command that was given."""
    parts = ["assay", "replay", str(path), *(["--kernel", kernel] if kernel else []), "--device", device]
    return shlex.join(parts)


def _say(console: Console, text: str, style: str | None = None) -> None:
    # names of kernels have brackets, which are no markup here
    console.print(text, style=style, markup=False, highlight=False)
