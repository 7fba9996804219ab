"""G7: the answer follows the contents, wherever they lie; side streams and graphs give the bits of a plain call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .answers import Answer, copied
from .contract import Contract
from .cuda_graph import record_graph
from .in_place import put_back
from .operation import AnyOutline
from .phases import phase
from .poison import same_bits
from .record import GateResult


def replay_gates(
    run: Callable[[], Any],
    bind: Callable[[dict[str, Any]], Callable[[], Any]],
    arguments: dict[str, Any],
    contract: Contract,
    first: Answer,
    outline: AnyOutline,
    restore: Callable[[], None],
) -> list[GateResult]:
    """Run again on other contents at the same addresses; on a GPU, on a side stream and through a graph, too.

    Args:
        run: The bound forward of a kernel.
        bind: Binds it anew, to hold its answer for changed contents against one that can remember nothing of them.
        arguments: Its inputs, whose floating contents are changed in place: lengths and slots are the host's plan.
        contract: What it promised; bits are compared only if it is deterministic.
        first: Its answer to the unchanged inputs.
        outline: Which integer inputs are no plan, and change as well; what a call writes in place.
        restore: Undoes whatever was done to the inputs.
    """
    gates = []
    device = first[0].device
    if device.type == "cuda" and contract.deterministic:
        with put_back(arguments, outline.in_place):
            gates.append(_side_stream(run, first, device))
        if contract.capturable:
            gates.append(_graph(run, arguments, outline, device))
            # one change alone is known to change the answer: after two, scores have their first order again
            restore()
    _change_contents(arguments, outline)
    # copied before the run, which may write what its contract lets it write
    moved_inputs = {name: elsewhere(value) for name, value in arguments.items()} if contract.deterministic else None
    with phase("kernel", device):
        changed = copied(run())
    if same_bits(changed[0], first[0]):
        text = "the answer stayed the same when the inputs changed"
        return [*gates, GateResult(gate="G7 changed contents", ratio=float("inf"), text=text)]
    gates.append(GateResult(gate="G7 changed contents", ratio=0.0))
    if moved_inputs is not None:
        with phase("kernel", device):
            moved = copied(bind(moved_inputs)())
        gates.append(_gate("G7 other addresses", moved, changed))
    return gates


def elsewhere(value: Any) -> Any:
    """The same tensor in a copy of its memory, offset, strides and guard bands included."""
    if not isinstance(value, Tensor):
        return value
    memory = torch.empty(0, dtype=value.dtype, device=value.device)
    return memory.set_(value.untyped_storage().clone(), value.storage_offset(), value.size(), value.stride())


def _side_stream(run: Callable[[], Any], first: Answer, device: torch.device) -> GateResult:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with phase("kernel", device):
        with torch.cuda.stream(stream):
            aside = copied(run())
        torch.cuda.current_stream(device).wait_stream(stream)
    return _gate("G7 side stream", first, aside)


def _graph(run: Callable[[], Any], arguments: dict[str, Any], outline: AnyOutline, device: torch.device) -> GateResult:
    """Capture, change the contents, replay: a kernel that read anything at capture time gives old values."""
    try:
        with phase("kernel"):
            graph, captured = record_graph(run, device)
    except RuntimeError as error:
        text = f"declared capturable, but the capture failed: {error}"
        return GateResult(gate="G7 graph capture", ratio=float("inf"), text=text)
    _change_contents(arguments, outline)
    with phase("kernel", device):
        with put_back(arguments, outline.in_place):
            graph.replay()
            replayed = copied(captured)
        with put_back(arguments, outline.in_place):
            plain = copied(run())
    return _gate("G7 graph replay", plain, replayed)


def _change_contents(arguments: dict[str, Any], outline: AnyOutline) -> None:
    """Other values at the same addresses; NaN stays where no token lies, and so do infinities, which have a meaning.

    Each position of a list becomes the next one, which leaves no set of some positions what it was; padding stays.
    """
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.mul_(torch.where(value.isinf(), 1.0, 0.5 if name in outline.signed else -0.5))
        elif name in outline.lists:
            value.add_((value >= 0) & (value < torch.iinfo(value.dtype).max))


def _gate(name: str, expected: Answer, got: Answer) -> GateResult:
    same = all(same_bits(a, b) for a, b in zip(expected, got, strict=True))
    text = "" if same else f"{name}: bits differ from a plain call"
    return GateResult(gate=name, ratio=0.0 if same else float("inf"), text=text)
