"""The kernel's side of a judgement: run it under poison, again, on other contents. No oracle takes part in it."""

import math
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import poison
from .answers import Answer, copied, tensors_of
from .case import Case
from .contract import Contract
from .conventions import Conventions
from .in_place import completing
from .interpreter import InterpretedBfloat16Error, no_interpreted_bfloat16
from .layouts import DESTINATION, empty_row_gates, prepared, restated, settled
from .metamorphic.gate import MOVES, ask_again
from .metamorphic.rearranged import MisshapenError, Rearranged, RefusedError, what_it_raises
from .operation import (
    AnyOutline,
    Ask,
    AttentionOperation,
    AttentionOutline,
    Inputs,
    Kernel,
    Operation,
    RearrangedOperation,
)
from .phases import phase
from .poison import SENTINEL, Allocations, left_as, poisoned_allocations, same_bits
from .record import GateResult, Location, Verdict
from .replays import replay_gates
from .structure import misshapen

# rearrangements are about layout, not values: one family asks them, that in which a single key decides
REARRANGED_FAMILIES = ("peaked",)
# what torch says without a type of its own: of the CPU's memory, and of CUDA's outside of its caching allocator
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(torch.__file__).parents[1] / "triton"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a run ended before there was an answer to judge."""

    verdict: Verdict
    text: str
    gates: tuple[GateResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What came of running a kernel on a case.

    Attributes:
        contract: What the kernel promised for the case.
        first: The results of the first call, by value, in the oracle's conventions.
        last: The same of the third.
        gates: Repeats and replays (G7), in which no oracle takes part.
        again: What it answered to rearrangements of the case (G8); None where none were asked.
        conventions: Of the kernel, for the places that a report names.
    """

    contract: Contract
    first: Answer
    last: Answer
    gates: tuple[GateResult, ...]
    conventions: Conventions = field(default_factory=Conventions)
    again: Rearranged | None = None


def execute(operation: Operation, kernel: Kernel, case: Case, inputs: Inputs, device: torch.device) -> Execution | Stop:
    """Run ``kernel`` three times and on changed contents; whatever it raises is a ``Stop``.

    Args:
        operation: Of the case.
        kernel: The candidate.
        case: Its inputs as a description.
        inputs: The inputs themselves; left as they were unless the kernel wrote them.
        device: Where they lie.
    """
    answers: list[Answer] = []
    try:
        with no_interpreted_bfloat16():
            contract, outline = kernel.contract(case), operation.outline(case)
            given = prepared(inputs, kernel, case, contract, outline)
            result = _restated(_execute(kernel, contract, outline, given, device, answers), kernel.conventions, outline)
            if isinstance(result, Execution) and isinstance(operation, RearrangedOperation):
                ask = _asking(operation, kernel, contract, inputs, given, device)
                return replace(result, again=operation.ask_again(case, inputs.arguments, ask, result.first, contract))
            if isinstance(result, Stop) or case.family not in REARRANGED_FAMILIES or operation.name not in MOVES:
                return result
            if not isinstance(operation, AttentionOperation):
                raise NotImplementedError(f"rearrangements are asked of attention, got {operation.name}")
            again = ask_again(operation, kernel, case, inputs, device, result.first, contract, given)
            return replace(result, again=again)
    except (Exception, SystemExit) as error:
        return _raised(error, served=bool(answers))


def _execute(
    kernel: Kernel,
    contract: Contract,
    outline: AnyOutline,
    inputs: Inputs,
    device: torch.device,
    answers: list[Answer],
) -> Execution | Stop:
    """Three calls, added to ``answers`` as they come, and the replays."""
    run: Callable[[], Any] | None = None
    bind = completing(kernel.bind, tuple(result.name for result in outline.results), outline.in_place)
    writable = tuple(dict.fromkeys((*contract.mutates, *outline.in_place)))
    # kept alive, so that memory handed out twice is the kernel's own doing
    held: list[Answer] = []
    for fill in (math.nan, SENTINEL, None):
        with poisoned_allocations(fill) if fill is not None else nullcontext() as allocations:
            with phase("kernel", device):
                run = run or bind(inputs.arguments)
                answer = run()
        stop = (_overran(allocations) if allocations else None) or _strayed(inputs)
        if stop is not None:
            return stop
        if (form := misshapen(answer, outline, contract, inputs)) is not None:
            return Stop(verdict=Verdict.STRUCTURE, text=form)
        stop = _handed_out_again(outline, tensors_of(answer), held)
        if stop is not None:
            return stop
        answers.append(copied(answer))
        held.append(tensors_of(answer))
        written = inputs.ledger.written(allowed=writable)
        if written:
            return Stop(verdict=Verdict.MUTATED_INPUT, text=f"wrote its input {', '.join(written)}")
        beside = inputs.ledger.written_beside(outline.in_place, inputs.arguments)
        if beside:
            return Stop(verdict=Verdict.WRITE_SCOPE, text=f"wrote beside {', '.join(beside)}")
        inputs.ledger.restore(writable)
    first, second, last = answers
    stop = _unwritten(outline, first, second)
    if stop is not None or run is None:
        return stop or Stop(verdict=Verdict.CRASH, text="the kernel was never bound")
    gates = _repeats(outline, first, second, last) if contract.deterministic else []
    if outline.follows_contents:
        gates += replay_gates(run, bind, inputs.arguments, contract, first, outline, inputs.ledger.restore)
        inputs.ledger.restore()
    return Execution(contract=contract, first=first, last=last, gates=tuple(gates))


def _asking(
    operation: Operation, kernel: Kernel, contract: Contract, inputs: Inputs, home: Inputs, device: torch.device
) -> Ask:
    """What an operation asks further questions with, on memory full of NaN.

    What has the form of an input of the case takes its place in memory: who knows inputs by their addresses is wrong.
    """

    def ask(case: Case, arguments: dict[str, Any]) -> Answer:
        reason = kernel.unsupported(case, device)
        if reason is not None:
            raise RefusedError(reason)
        outline = operation.outline(case)
        placed = {name: _in_place_of(inputs.arguments.get(name), value) for name, value in arguments.items()}
        given = prepared(Inputs(arguments=placed, ledger=inputs.ledger), kernel, case, contract, outline)
        given = settled(given, home)
        bind = completing(kernel.bind, tuple(result.name for result in outline.results), outline.in_place)
        try:
            with what_it_raises(), poisoned_allocations(math.nan), phase("kernel", device):
                answer = bind(given.arguments)()
            if (form := misshapen(answer, outline, contract, given)) is not None:
                raise MisshapenError(form)
            return copied(answer)
        finally:
            inputs.ledger.restore()

    return ask


def _in_place_of(original: Any, value: Any) -> Any:
    """The original with other contents, if the value can be written there."""
    if not (isinstance(original, Tensor) and isinstance(value, Tensor)) or value is original:
        return value
    if (value.shape, value.stride(), value.dtype) != (original.shape, original.stride(), original.dtype):
        return value
    return original.copy_(value)


def _restated(result: Execution | Stop, conventions: Conventions, outline: AnyOutline) -> Execution | Stop:
    """The answers in the oracle's words, unless an empty row is not what the kernel declared."""
    if isinstance(result, Stop):
        structure = result.verdict is Verdict.STRUCTURE and conventions.note
        return replace(result, text=f"{result.text}, under {conventions.note}") if structure else result
    if not isinstance(outline, AttentionOutline):
        return replace(result, conventions=conventions)
    gates = tuple(empty_row_gates(result.first, conventions, outline))
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        return Stop(verdict=Verdict.NONFINITE, text=failed[0].text, gates=gates)
    first, last = (restated(answer, conventions, outline.empty_rows) for answer in (result.first, result.last))
    return replace(result, first=first, last=last, conventions=conventions)


def _raised(error: Exception | SystemExit, *, served: bool) -> Stop:
    if isinstance(error, InterpretedBfloat16Error) or (isinstance(error, NotImplementedError) and not served):
        return Stop(verdict=Verdict.UNSUPPORTED, text=str(error))
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)
    ):
        return Stop(verdict=Verdict.OUT_OF_MEMORY, text=str(error) or "out of memory")
    # who has answered a case cannot refuse it any more
    late = isinstance(error, NotImplementedError)
    return Stop(verdict=Verdict.CRASH, text=f"{'refused a case that it had served: ' if late else ''}{describe(error)}")


def describe(error: BaseException) -> str:
    """The error and the last place outside of torch, triton and the judge's allocation hook where it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES) and frame.filename != poison.__file__]
    place = (own or frames)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _handed_out_again(outline: AnyOutline, answer: Answer, held: list[Answer]) -> Stop | None:
    """G0: whether a result lies in the memory of an earlier one that is still in use."""
    earlier = {tensor.untyped_storage().data_ptr() for one in held for tensor in one if tensor.numel()}
    for result, tensor in zip(outline.results, answer, strict=True):
        if tensor.numel() and not result.in_place and tensor.untyped_storage().data_ptr() in earlier:
            text = f"{result.name} must own its memory, got that of an earlier result"
            return Stop(verdict=Verdict.STRUCTURE, text=text)
    return None


def _overran(allocations: Allocations) -> Stop | None:
    """G2: whether a guard band beside the kernel's own memory was written."""
    if allocations.intact():
        return None
    return Stop(verdict=Verdict.WRITE_SCOPE, text="wrote outside the memory that it allocated")


def _strayed(inputs: Inputs) -> Stop | None:
    """G2: whether the buffer was written in whose midst a given tensor lies: other heads, other rows."""
    destination = inputs.arguments.get(DESTINATION)
    beside = destination.written_beside() if destination is not None else []
    if not beside:
        return None
    return Stop(verdict=Verdict.WRITE_SCOPE, text=f"wrote beside {', '.join(beside)}, in the buffer around it")


def _unwritten(outline: AnyOutline, first: Answer, second: Answer) -> Stop | None:
    """G2: elements that hold whatever their memory held before, another poison in one call than in the next."""
    for result, before, after in zip(outline.results, first, second, strict=True):
        if result.in_place:
            continue
        unwritten, name = left_as(before, math.nan) & left_as(after, SENTINEL), result.name
        if bool(unwritten.any()):
            index = [int(i) for i in unwritten.nonzero()[0]]
            where = Location(**dict(zip(result.axes, index, strict=True)))
            gate = GateResult(gate=f"G2 {name} written", ratio=float("inf"), where=where)
            text = f"{int(unwritten.sum())} of {unwritten.numel()} elements of {name} left unwritten"
            return Stop(verdict=Verdict.WRITE_SCOPE, text=text, gates=(gate,))
    return None


def _repeats(outline: AnyOutline, *answers: Answer) -> list[GateResult]:
    """G7: the same bits on NaN-poisoned, sentinel-poisoned and plain memory."""
    gates = []
    for result, first, *others in zip(outline.results, *answers, strict=True):
        name, same = result.name, all(same_bits(first, other) for other in others)
        text = "" if same else f"{name} differs between equal calls (poisoned memory, then plain)"
        gates.append(GateResult(gate=f"G7 repeat {name}", ratio=0.0 if same else float("inf"), text=text))
    return gates
