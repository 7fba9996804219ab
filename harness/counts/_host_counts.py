"""What one step costs the host: kernel launches, allocations, waits and calls, counted while a function runs.

The device is a stand-in, so the code takes its way to the GPU on any machine. One operation that torch dispatches
counts as one launch, whatever number of kernels it is made of on a GPU; views are free.
"""

import functools
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .standin_device import Direction, StandInDevice, standin_device

# operations after which the host knows something that the device computed
_WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
# memory without a kernel that fills it
_ALLOCATIONS = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# views whose schema does not say so
_VIEWS = {"_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "detach", "alias", "set_"}

_HARNESS = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_SITE = ("site-packages", "dist-packages")


@dataclass(slots=True)
class StepCounts:
    """The counts of one step.

    Attributes:
        launches: What was put to work on the device, by name, such as ``aten.bmm`` or ``triton.attention_kernel``.
        waits: Times that the host waited for the device, by what made it wait.
        allocations: Tensors that took new memory of the device.
        host_operations: Operations of torch on tensors of the host.
        python_calls: Calls that the kernel's own code, neither Python's nor torch's nor Triton's, received or made.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    host_operations: int = 0
    python_calls: int = 0

    def fields(self) -> dict[str, Any]:
        """Flat fields in a fixed order; sums first, then each name."""
        return {
            "launches": self.launches.total(),
            "allocations": self.allocations,
            "synchronisations": self.waits.total(),
            "host operations": self.host_operations,
            "python calls": self.python_calls,
            **{f"launches of {name}": count for name, count in sorted(self.launches.items())},
            **{f"synchronisations by {name}": count for name, count in sorted(self.waits.items())},
        }


def count_steps(steps: list[Callable[[], Any]]) -> list[StepCounts]:
    """Run the steps one after the other, three times: to warm up, to count work, and to count calls.

    Each may use what those before it left. Tensors of the device are made by ``to_standin``.
    """
    counts = [StepCounts() for _ in steps]
    counter = WorkCounter()
    with standin_device(counter) as device:
        counter.device = device
        for step in steps:
            step()
        with counter:
            for step, count in zip(steps, counts, strict=True):
                counter.count = count
                step()
        counter.count = StepCounts()
        for step, count in zip(steps, counts, strict=True):
            count.python_calls = python_calls(step)
    return counts


class WorkCounter(TorchDispatchMode):
    """Sees what torch dispatches and what the stand-in reports."""

    device: StandInDevice

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = StepCounts()

    def launch(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.count.launches[f"triton.{kernel.__name__}"] += 1

    def operation(self, name: str) -> None:
        self.count.launches[f"aten.{name}"] += 1

    def transfer(self, direction: Direction, function: str) -> None:
        if direction == "to host":
            self.count.waits[f"copy to the host by {function}"] += 1
        else:
            self.count.launches["copy to the device"] += 1
            self.count.allocations += function != "copy_"

    def wait(self, function: str) -> None:
        self.count.waits[function] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        # what gives no tensor asks about dtypes and the like, unless it reads a value
        answers = any(isinstance(one, Tensor) for one in _sequence(result)) or name in _WAITS
        if self.device.moving or func.is_view or name in _VIEWS or not answers:
            return result
        if not self.device.on_device:
            self.count.host_operations += 1
            return result
        reason = "a boolean index" if name in ("index", "index_put_") and _boolean_index(args) else f"aten.{name}"
        if name in _WAITS or reason == "a boolean index":
            self.count.waits[reason] += 1
        if name not in _ALLOCATIONS and name != "_local_scalar_dense":
            self.count.launches[f"aten.{name}"] += 1
        self.count.allocations += _fresh(func, result)
        return result


def python_calls(function: Callable[[], Any]) -> int:
    """Calls that own code receives or makes while ``function`` runs, except those that lead into the harness."""
    calls = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        name, caller = frame.f_code.co_filename, frame.f_back
        if event == "call":
            called = caller is not None and _is_own(caller.f_code.co_filename) and not name.startswith(_HARNESS)
            calls += called or _is_own(name)
        elif event == "c_call":
            calls += _is_own(name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@functools.cache
def _is_own(file: str) -> bool:
    """Whether code belongs to a kernel: not to Python, torch, Triton or the harness."""
    if file.startswith("<") or file.startswith(_HARNESS):
        return False
    parts = Path(file).parts
    installed = next((parts[at + 1 :] for at, part in enumerate(parts) if part in _SITE), None)
    if installed is None:
        return not file.startswith(_STANDARD_LIBRARY)
    return installed[0] not in ("torch", "triton")


def _boolean_index(args: Any) -> bool:
    indices = args[1]
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _fresh(func: Any, result: Any) -> int:
    """Results that own new memory: those that the schema does not call an alias of an argument."""
    results, returns = _sequence(result), func._schema.returns
    # one declared return may be a list of tensors
    declared = returns * len(results) if len(returns) == 1 else returns
    return sum(isinstance(one, Tensor) and not alias.alias_info for alias, one in zip(declared, results, strict=True))


def _sequence(result: Any) -> Any:
    return result if isinstance(result, tuple | list) else (result,)
