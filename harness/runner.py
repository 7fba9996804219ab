"""One kernel on one case: run it under poison, hold the answer against the oracle, write the record."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import poison
from .case import Case
from .contract import PRECISION_OF_DTYPE, Contract
from .gates import judge, nonfinite_gates
from .interpreter import InterpretedBfloat16Error, no_interpreted_bfloat16
from .operation import Inputs, Kernel, Operation, Outline
from .poison import SENTINEL, poisoned_allocations, same_bits
from .record import GateResult, Location, Record, RowErrors, Verdict
from .replays import replay_gates

# elements [rows, keys, dims] that the oracle answers for in full; above it rows are sampled
ROW_BUDGET = {"cpu": 1 << 27, "cuda": 1 << 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """Why judging stopped."""

    verdict: Verdict
    text: str = ""
    gates: tuple[GateResult, ...] = ()
    rows_judged: int = 0
    rows: RowErrors = field(default_factory=RowErrors)
    last: tuple[Tensor, ...] = ()


def run_case(operation: Operation, kernel: Kernel, case: Case, device: torch.device) -> Record:
    """Judge ``kernel`` on ``case``; whatever the kernel does, the answer is a record.

    Args:
        operation: To which the case belongs.
        kernel: The candidate.
        case: The inputs.
        device: Where to run.
    """
    start = time.perf_counter()
    try:
        finding = _find(operation, kernel, case, device)
    except Exception as error:
        # kernels fail inside their own guards, so this is a fault of the judge, and is reported as one
        finding = _Finding(verdict=Verdict.HARNESS_ERROR, text=_describe(error))
    return Record(
        op=operation.name,
        kernel=kernel.name,
        case=case.to_json(),
        device=_device_name(device),
        verdict=finding.verdict,
        text=finding.text,
        gates=list(finding.gates),
        rows_judged=finding.rows_judged,
        rows=finding.rows,
        seconds=round(time.perf_counter() - start, 4),
    )


def _find(operation: Operation, kernel: Kernel, case: Case, device: torch.device) -> _Finding:
    if case.needs_device and device.type == "cpu":
        return _Finding(verdict=Verdict.UNSUPPORTED, text="too large for a CPU, needs a device")
    reason = kernel.unsupported(case, device)
    if reason is not None:
        return _Finding(verdict=Verdict.UNSUPPORTED, text=reason)
    # the oracle is float64 throughout, and no product anywhere may be cut to tf32 behind its contract
    torch.set_float32_matmul_precision("highest")
    try:
        inputs = operation.inputs(case, device)
    except ValueError as error:
        return _Finding(verdict=Verdict.INVALID_CASE, text=str(error))
    with no_interpreted_bfloat16():
        outcome = _run_kernel(kernel, inputs, device)
        if isinstance(outcome, _Finding):
            return outcome
        run, out, lse = outcome
        return _judge(operation, kernel, case, inputs, run, out, lse)


def _judge(
    operation: Operation, kernel: Kernel, case: Case, inputs: Inputs, run: Callable[[], Any], out: Any, lse: Any
) -> _Finding:
    """All gates in the order in which a failure explains the later ones."""
    contract, outline = kernel.contract(case), operation.outline(case)
    structure = _structure(out, lse, outline, contract, inputs)
    if structure is not None:
        return _Finding(verdict=Verdict.STRUCTURE, text=structure)
    # kept by value: a kernel may hand out its own buffer again at the next call
    first = out.clone(), lse.clone()
    repeat = _repeat(run, inputs, contract, first)
    if repeat.verdict is not Verdict.PASS:
        return repeat
    written = inputs.ledger.written(allowed=contract.mutates)
    if written:
        return _Finding(verdict=Verdict.MUTATED_INPUT, text=f"wrote its input {', '.join(written)}")

    gates = nonfinite_gates(*first, outline)
    if not all(gate.passed for gate in gates):
        return _Finding(verdict=Verdict.NONFINITE, text=_failed(gates).text, gates=tuple(gates))
    # a kernel that promises no determinism must pass with its last answer as well as with its first
    for answer in [first] if contract.deterministic else [first, repeat.last]:
        rows = operation.rows(case, inputs.arguments, budget=ROW_BUDGET[out.device.type] // outline.d_v)
        tally = judge(*answer, rows, contract=contract, family=case.family)
        gates += sorted(tally.results(), key=lambda gate: gate.gate)
    judged: dict[str, Any] = {"rows_judged": tally.rows_judged, "rows": tally.row_errors()}
    if not all(gate.passed for gate in gates):
        worst = _failed(gates)
        text = worst.text or f"{worst.gate}: {worst.ratio:.3g} x its limit"
        return _Finding(verdict=Verdict.NUMERIC, text=text, gates=tuple(gates), **judged)
    gates += repeat.gates
    if not bool(outline.empty_rows.all()):
        gates += replay_gates(run, inputs.arguments, contract, first)
    failed = [gate for gate in gates if not gate.passed]
    verdict, text = (Verdict.NONDETERMINISTIC, failed[0].text) if failed else (Verdict.PASS, "")
    return _Finding(verdict=verdict, text=text, gates=tuple(gates), **judged)


def _run_kernel(kernel: Kernel, inputs: Inputs, device: torch.device) -> tuple[Callable[[], Any], Any, Any] | _Finding:
    """Bind and run once on NaN-poisoned memory; a failure of any kind is a finding."""
    try:
        with poisoned_allocations(float("nan")) as allocations:
            run = kernel.bind(inputs.arguments)
            answer = run()
            _wait(device)
    except Exception as error:
        return _crash(error)
    if not allocations.intact():
        return _Finding(verdict=Verdict.WRITE_SCOPE, text="wrote outside the memory that it allocated")
    if not (isinstance(answer, tuple) and len(answer) == 2):
        text = f"a kernel must return (out, lse), got {type(answer).__name__}"
        return _Finding(verdict=Verdict.STRUCTURE, text=text)
    return run, *answer


def _crash(error: Exception) -> _Finding:
    if isinstance(error, InterpretedBfloat16Error | NotImplementedError):
        return _Finding(verdict=Verdict.UNSUPPORTED, text=str(error))
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return _Finding(verdict=Verdict.OUT_OF_MEMORY, text=str(error))
    return _Finding(verdict=Verdict.CRASH, text=_describe(error))


def _describe(error: Exception) -> str:
    """The error and where it was raised, the judge's own allocation hook aside."""
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != poison.__file__][-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _structure(out: Any, lse: Any, outline: Outline, contract: Contract, inputs: Inputs) -> str | None:
    """G0: what is wrong with the shape of the answer, or None."""
    q = inputs.arguments["q"]
    expected = {
        "out": (out, (outline.num_tokens, outline.num_heads, outline.d_v), contract.out),
        "lse": (lse, (outline.num_tokens, outline.num_heads), contract.lse),
    }
    owned = {buffer.untyped_storage().data_ptr() for buffer in inputs.ledger.buffers.values()}
    for name, (tensor, shape, precision) in expected.items():
        if type(tensor) is not Tensor:
            return f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
        if tuple(tensor.shape) != shape:
            return f"{name} must have shape {shape}, got {tuple(tensor.shape)}"
        if PRECISION_OF_DTYPE.get(str(tensor.dtype).removeprefix("torch.")) != precision:
            return f"{name} must have the declared precision {precision}, got {tensor.dtype}"
        if tensor.device != q.device:
            return f"{name} must be on {q.device}, got {tensor.device}"
        if tensor.numel() and tensor.untyped_storage().data_ptr() in owned:
            return f"{name} must own its memory, got a view of an input"
    return None


def _repeat(run: Callable[[], Any], inputs: Inputs, contract: Contract, first: tuple[Tensor, Tensor]) -> _Finding:
    """G2 and G7: once more on memory full of a finite sentinel, and once on memory as it comes."""
    names = ("out", "lse")
    try:
        with poisoned_allocations(SENTINEL) as allocations:
            second = run()
            _wait(first[0].device)
        if not allocations.intact():
            return _Finding(verdict=Verdict.WRITE_SCOPE, text="wrote outside the memory that it allocated")
        for name, before, after in zip(names, first, second, strict=True):
            unwritten = before.isnan() & (after == SENTINEL)
            if bool(unwritten.any()):
                where = _element(unwritten, before)
                gate = GateResult(gate=f"G2 {name} written", ratio=float("inf"), where=where)
                text = f"{int(unwritten.sum())} of {unwritten.numel()} elements of {name} left unwritten"
                return _Finding(verdict=Verdict.WRITE_SCOPE, text=text, gates=(gate,))
        second = tuple(tensor.clone() for tensor in second)
        third = run()
        _wait(first[0].device)
    except Exception as error:
        return _crash(error)
    gates = []
    for name, *answers in zip(names, first, second, third, strict=True):
        same = all(same_bits(answers[0], other) for other in answers[1:])
        text = "" if same else f"{name} differs between equal calls (poisoned memory, then plain)"
        gates.append(GateResult(gate=f"G7 repeat {name}", ratio=0.0 if same else float("inf"), text=text))
    if not contract.deterministic:
        gates = []
    return _Finding(verdict=Verdict.PASS, gates=tuple(gates), last=tuple(tensor.clone() for tensor in third))


def _element(mask: Tensor, values: Tensor) -> Location:
    index = [int(i) for i in mask.nonzero()[0]]
    dim = index[2] if len(index) > 2 else None
    return Location(token=index[0], head=index[1], dim=dim, got=float(values[tuple(index)]), expected=float("nan"))


def _failed(gates: list[GateResult]) -> GateResult:
    return next(gate for gate in gates if not gate.passed)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
