"""A CUDA device that is not there: host code takes its way to the GPU on any machine, and no kernel runs.

Tensors of the stand-in say that they are on ``cuda:0`` and lie on the CPU. Torch's own operations run there; a Triton
kernel is handed to an observer instead of being launched. So one can see, without a GPU, what the host decides, how
often it launches, allocates and waits, and which kernels it would compile.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)

# bytes of shared memory that one program may take, as the drivers of an A100, an H200 and a B200 report them
SHARED_MEMORY = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}

Direction = Literal["to device", "to host"]


class Observer(Protocol):
    """Hears what the host does with the stand-in."""

    def launch(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A Triton kernel that would be launched; ``options`` holds its grid, its constants and its configuration."""
        ...

    def operation(self, name: str) -> None:
        """An operation of torch that exists on CUDA alone, and so is left out."""
        ...

    def transfer(self, direction: Direction, function: str) -> None:
        """A copy between host and device by a torch function of that name."""
        ...

    def wait(self, function: str) -> None:
        """The host waits for the device."""
        ...


class OnDevice(Tensor):
    """A tensor of the stand-in; whatever torch makes of one is one, too."""


class StandInDevice(TorchFunctionMode):
    """Answers for ``cuda:0``; made by ``standin_device``.

    Attributes:
        on_device: Whether the torch function that runs now works on tensors of the stand-in.
        moving: Whether it copies between host and device.
    """

    def __init__(self, observer: Observer) -> None:
        """Report to ``observer``."""
        super().__init__()
        self._observer = observer
        self.on_device = False
        self.moving = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is asked about the device, or run ``func`` on what lies behind its tensors."""
        for query, answer in _QUERIES:
            if func == query:
                return answer if isinstance(args[0], OnDevice) else func(*args)
        leaves = list(_leaves((args, kwargs or {})))
        reads = any(isinstance(leaf, OnDevice) for leaf in leaves)
        target = next((leaf for leaf in leaves if _is_device(leaf)), None)
        direction = _direction(func, args, reads=reads, target=target)
        args, kwargs = _relocated((args, kwargs or {}))
        outer = self.on_device, self.moving
        self.on_device, self.moving = reads or _is_cuda(target), direction is not None
        try:
            if direction is not None:
                self._observer.transfer(direction, func.__name__)
            replacement = _DEVICE_ONLY.get(getattr(func, "__name__", ""))
            if replacement is not None:
                self._observer.operation(func.__name__)
            result = (replacement or func)(*args, **kwargs)
        finally:
            self.on_device, self.moving = outer
        if direction == "to host":
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        return result.as_subclass(OnDevice) if _is_cuda(target) else result


@contextlib.contextmanager
def standin_device(observer: Observer, capability: tuple[int, int] = (9, 0)) -> Iterator[StandInDevice]:
    """Let host code find one CUDA device of that compute capability within the block."""
    answers: dict[str, Callable[..., Any]] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda device=None: capability,
        "torch.cuda.get_device_properties": lambda device=None: types.SimpleNamespace(multi_processor_count=132),
        "torch.cuda.synchronize": lambda device=None: observer.wait("torch.cuda.synchronize"),
        "torch.backends.cudnn.is_available": lambda: True,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        _stand_in_for_triton(stack, observer, capability)
        yield stack.enter_context(StandInDevice(observer))


def to_standin(value: Any) -> Any:
    """The value with its tensors, in tuples and lists as well, declared to be on the stand-in."""
    if isinstance(value, Tensor):
        return value.as_subclass(OnDevice)
    if isinstance(value, tuple | list):
        return type(value)(to_standin(item) for item in value)
    return value


def _stand_in_for_triton(stack: contextlib.ExitStack, observer: Observer, capability: tuple[int, int]) -> None:
    """Give Triton a driver that knows its target, and hand its launches to the observer."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ModuleNotFoundError:
        # no wheel outside Linux
        return
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver(target, SHARED_MEMORY[capability])))

    def run(kernel: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return observer.launch(kernel, arguments, options)

    stack.enter_context(mock.patch.object(triton.runtime.JITFunction, "run", run))


class _Driver:
    """What Triton and its callers ask a driver while nothing is launched."""

    def __init__(self, target: Any, shared_memory: int) -> None:
        self._target = target
        # processors as an H200 has
        self._properties = {"max_shared_mem": shared_memory, "multiprocessor_count": 132}

    @property
    def utils(self) -> "_Driver":
        return self

    def get_device_properties(self, index: int) -> dict[str, int]:
        return self._properties

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What cuDNN returns first: ``out``, ``[B, H, n, Dv]``, laid out like ``q``, and ``lse``, ``[B, H, n, 1]``."""
    shape = (*q.shape[:3], v.shape[-1])
    strides = q.stride()
    outermost_first = sorted(range(4), key=lambda dimension: -strides[dimension])
    out = q.new_empty([shape[dimension] for dimension in outermost_first])
    inverse = [outermost_first.index(dimension) for dimension in range(4)]
    return out.permute(inverse), q.new_empty(*shape[:3], 1, dtype=torch.float32)


_QUERIES = ((Tensor.device.__get__, DEVICE), (Tensor.is_cuda.__get__, True))  # type: ignore[attr-defined]

# operations that exist on CUDA alone, by name
_DEVICE_ONLY: dict[str, Callable[..., Any]] = {"_scaled_dot_product_cudnn_attention": _cudnn_attention}


def _direction(func: Any, args: Any, *, reads: bool, target: Any) -> Direction | None:
    """Which way a function copies between host and device, or None."""
    if func == Tensor.copy_:
        here, there = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice)
        return None if here == there else "to device" if here else "to host"
    if func in (Tensor.cpu, Tensor.tolist, Tensor.numpy):
        return "to host" if reads else None
    if func in (Tensor.to, Tensor.cuda, torch.tensor, torch.as_tensor) and target is not None:
        return None if reads == _is_cuda(target) else "to device" if _is_cuda(target) else "to host"
    return None


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"))


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _relocated(value: Any) -> Any:
    """The arguments of a torch function with the CPU in place of the stand-in."""
    if isinstance(value, dict):
        return {key: _relocated(item) for key, item in value.items()}
    # a named tuple or a torch.Size holds no device
    if type(value) in (tuple, list):
        return type(value)(_relocated(item) for item in value)
    return torch.device("cpu") if _is_device(value) and _is_cuda(value) else value
