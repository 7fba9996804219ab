"""Runs Gluon kernels without a GPU: partitions as threads that take turns, barriers with parities, memory with bounds.

Triton has no interpreter for Gluon. What is checked here is the logic of a kernel: which rows are copied where, masks,
the order of waits and arrivals (a deadlock is an error), reads of memory that nobody has filled (NaN) and accesses past
the end of a tensor (an error). Layouts mean nothing, and the sums are those of numpy.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import builtins
import random
import threading
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {"bfloat16": np.float32, "float32": np.float32, "int64": np.int64, "int32": np.int32, "int8": np.int8}


def rounded(values: Any, dtype: str) -> Any:
    """Values as that dtype holds them; bfloat16 lives in float32 arrays."""
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.asarray(values).astype(_DTYPES[dtype])
    return torch.from_numpy(np.array(array)).bfloat16().float().numpy() if dtype == "bfloat16" else array


class Value:
    """A block or a number of a kernel."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def to(self, dtype: str) -> "Value":
        return Value(rounded(self.array, dtype))

    def __index__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)


def _operator(name: str) -> Any:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return Value(getattr(self.array, name)(raw(other)))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "rshift", "lshift"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Value, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


def raw(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


class Pointer:
    """Offsets into the memory of a tensor, all of its storage."""

    def __init__(self, memory: "Memory", offsets: Any) -> None:
        self.memory, self.offsets = memory, np.asarray(offsets, dtype=np.int64)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + raw(other))


class Memory:
    """The storage of a tensor as numbers of numpy."""

    def __init__(self, tensor: Tensor) -> None:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        self.tensor, self.flat = tensor, flat
        self.data = flat.float().numpy().copy() if tensor.dtype == torch.bfloat16 else flat.numpy().copy()
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def write_back(self) -> None:
        self.flat.copy_(torch.from_numpy(self.data))


class Shared:
    """A view of shared memory, NaN until something is stored."""

    def __init__(self, array: Any, overlays: dict[Any, Any], dtype: str = "bfloat16") -> None:
        self.array, self.overlays, self.dtype = array, overlays, dtype

    def index(self, at: Any) -> "Shared":
        return Shared(self.array[int(at)], self.overlays, self.dtype)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.array.transpose(order), self.overlays, self.dtype)

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.array.take(range(start, start + length), dim) if dim else self.array[start : start + length],
                      self.overlays, self.dtype)  # fmt: skip

    def _reinterpret(self, dtype: str, shape: list[int], layout: Any) -> "Shared":
        assert self.array.nbytes // 2 >= np.prod(shape) * 4, "the slot is too small"
        key = self.array.__array_interface__["data"][0]
        overlay = self.overlays.setdefault(key, np.full(shape, np.nan, np.float32))
        # what was there is lost
        self.array[:] = np.nan
        return Shared(overlay, self.overlays, dtype)

    def store(self, value: Value) -> None:
        assert value.array.shape == self.array.shape
        self.array[:] = rounded(value.array, self.dtype)

    def load(self, layout: Any) -> Value:
        return Value(self.array.copy())


class Barrier:
    """Counts arrivals; each time that all have come, one more phase is complete."""

    def __init__(self) -> None:
        self.count = self.pending = self.completed = 0


class Barriers:
    """An array of barriers."""

    def __init__(self, shape: list[int]) -> None:
        self.items = [Barrier() for _ in range(shape[0])]

    def index(self, at: Any) -> Barrier:
        return self.items[int(at)]


class Deadlock(Exception):
    """Nobody can go on."""


class Turns:
    """Lets one partition run at a time; who is next is drawn."""

    def __init__(self, seed: int) -> None:
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.waiting: dict[int, Any] = {}
        self.turn: int | None = None
        self.error: BaseException | None = None

    def run(self, partitions: list[Any]) -> None:
        threads = [threading.Thread(target=self._one, args=(me, run)) for me, run in enumerate(partitions)]
        self.waiting = {me: lambda: True for me in range(len(partitions))}
        self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _one(self, me: int, run: Any) -> None:
        try:
            self._my_turn(me)
            run()
        except BaseException as error:
            self.error = self.error or error
        with self.changed:
            del self.waiting[me]
            self._next()

    def _next(self) -> None:
        able = [me for me, ready in self.waiting.items() if ready()]
        if self.waiting and not able:
            self.error = self.error or Deadlock(f"partitions {sorted(self.waiting)} wait for each other")
        self.turn = self.random.choice(able) if able else None
        self.changed.notify_all() if self.changed._is_owned() else None  # type: ignore[attr-defined]

    def _my_turn(self, me: int) -> None:
        with self.changed:
            while self.turn != me and self.error is None:
                self.changed.wait(timeout=20.0)
        if self.error is not None:
            raise Deadlock("another partition failed")

    def until(self, ready: Any) -> None:
        """Let others run, and go on once ``ready()`` holds."""
        me = self.turn
        assert me is not None
        with self.changed:
            self.waiting[me] = ready
            self._next()
        self._my_turn(me)
        self.waiting[me] = lambda: True


class Language:
    """Stands for ``gluon.language``, ``mbarrier``, ``async_copy`` and the rest, within one program of a launch."""

    bfloat16, float32, int64, int32, int8 = "bfloat16", "float32", "int64", "int32", "int8"

    def __init__(self, program: int, programs: int, turns: Turns) -> None:
        self.program, self.programs, self.turns = program, programs, turns
        self.copies: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    static_range = staticmethod(builtins.range)

    def program_id(self, axis: int) -> Value:
        return Value(np.int32(self.program))

    def num_programs(self, axis: int) -> Value:
        return Value(np.int32(self.programs))

    def arange(self, start: int, stop: int, layout: Any) -> Value:
        return Value(np.arange(start, stop, dtype=np.int32))

    def zeros(self, shape: list[int], dtype: str, layout: Any) -> Value:
        return Value(np.zeros(shape, _DTYPES[dtype]))

    def full(self, shape: list[int], value: float, dtype: str, layout: Any) -> Value:
        return Value(np.full(shape, value, _DTYPES[dtype]))

    def expand_dims(self, value: Any, axis: int) -> Any:
        if isinstance(value, Pointer):
            return Pointer(value.memory, np.expand_dims(value.offsets, axis))
        return Value(np.expand_dims(value.array, axis))

    def convert_layout(self, value: Value, layout: Any) -> Value:
        return value

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        if isinstance(yes, Pointer):
            return yes if condition else no
        dtype = np.float32 if isinstance(yes, float) and isinstance(no, float) else None
        return Value(np.where(raw(condition), np.asarray(raw(yes), dtype), raw(no)))

    def minimum(self, a: Any, b: Any) -> Value:
        return Value(np.minimum(raw(a), raw(b)))

    def maximum(self, a: Any, b: Any) -> Value:
        # as the hardware, which drops a NaN
        return Value(np.fmax(raw(a), raw(b)))

    def max(self, value: Value, axis: int) -> Value:
        return Value(np.fmax.reduce(value.array, axis=axis))

    def sum(self, value: Value, axis: int) -> Value:
        return Value(value.array.sum(axis=axis))

    def exp2(self, value: Value) -> Value:
        with np.errstate(over="ignore", under="ignore"):
            return Value(np.exp2(value.array))

    def log2(self, value: Value) -> Value:
        return Value(np.log2(value.array))

    def _inside(self, pointer: Pointer, mask: Any) -> tuple[Any, Any]:
        mask = np.broadcast_to(True if mask is None else raw(mask), pointer.offsets.shape)
        wrong = mask & ((pointer.offsets < 0) | (pointer.offsets >= len(pointer.memory.data)))
        assert not wrong.any(), f"an access past the end of {tuple(pointer.memory.tensor.shape)}"
        return np.where(mask, pointer.offsets, 0), mask

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
        offsets, mask = self._inside(pointer, mask)
        data = pointer.memory.data
        # what is masked off and has no substitute is anything
        if not len(data):
            return Value(np.full(offsets.shape, other, data.dtype))
        substitute = (np.nan if data.dtype == np.float32 else 2**31 - 7) if other is None else other
        return Value(np.where(mask, data[offsets], np.asarray(substitute).astype(data.dtype)))

    def store(self, pointer: Pointer, value: Value, mask: Any = None) -> None:
        offsets, mask = self._inside(pointer, mask)
        values = np.broadcast_to(rounded(value.array, pointer.memory.dtype), offsets.shape)
        pointer.memory.data[offsets[mask]] = values[mask]

    def inline_asm_elementwise(self, text: str, constraints: str, arguments: list[Pointer], **options: Any) -> None:
        assert "prefetch" in text
        self._inside(arguments[0], None)

    def allocate_shared_memory(self, dtype: str, shape: list[int], layout: Any) -> Any:
        if dtype == "int64":
            return Barriers(shape)
        return Shared(np.full(shape, np.nan, np.float32), {}, dtype)

    def async_copy_global_to_shared(self, target: Shared, pointer: Pointer, mask: Value) -> None:
        offsets, inside = self._inside(pointer, mask)
        data = pointer.memory.data
        values = np.where(inside, data[offsets] if len(data) else 0.0, 0.0)
        # until it lands there is nothing
        target.array[:] = np.nan
        self.copies.append((target, values))

    def mbarrier_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        for target, values in self.copies:
            target.array[:] = values
        self.copies.clear()
        self.arrive(barrier, count=128)

    def init(self, barrier: Any, count: int) -> None:
        barrier = barrier.items[0] if isinstance(barrier, Barriers) else barrier
        barrier.count = barrier.pending = count

    def arrive(self, barrier: Any, count: int, pred: Any = True) -> None:
        barrier = barrier.items[0] if isinstance(barrier, Barriers) else barrier
        if not pred:
            return
        barrier.pending -= count
        assert barrier.pending >= 0, "more arrivals than were announced"
        if barrier.pending == 0:
            barrier.pending, barrier.completed = barrier.count, barrier.completed + 1
        self.turns.until(lambda: True)

    def wait(self, barrier: Any, parity: Any, pred: Any = True) -> None:
        barrier = barrier.items[0] if isinstance(barrier, Barriers) else barrier
        if pred:
            wanted = int(parity)
            self.turns.until(lambda: barrier.completed % 2 != wanted)

    def fence_async_shared(self) -> None:
        """All stores are seen here."""

    def thread_barrier(self) -> None:
        """A partition is one thread here."""

    def warpgroup_mma(self, a: Shared, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
        with np.errstate(invalid="ignore"):
            product = a.array.astype(np.float32) @ b.array.astype(np.float32)
        return Value(product + acc.array if use_acc else product)

    def warpgroup_mma_wait(self, number: int, deps: tuple[Value, ...]) -> Value:
        return deps[0]

    def warp_specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        self.turns.run([lambda f=function, a=arguments: f(*a) for function, arguments in partitions])


def _value_range(*bounds: Any) -> Any:
    return (Value(np.int32(number)) for number in builtins.range(*(int(bound) for bound in bounds)))


def _emulated(function: Any, language: Language) -> Any:
    """The Python function of a kernel or of what it calls, its names bound to the emulation."""
    names: dict[str, Any] = {"range": _value_range, "float": float, "hasattr": hasattr}
    for name, value in function.__globals__.items():
        if name in ("gl", "mbarrier", "async_copy"):
            names[name] = language
        elif hasattr(value, "is_gluon"):
            names[name] = (lambda inner: lambda *args, **kw: _emulated(inner, language)(*args, **kw))(value.fn)
        elif name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait", "thread_barrier"):
            names[name] = getattr(language, name)
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def launch(kernel: Any, programs: int, arguments: list[Any], *, seed: int = 0, **constants: Any) -> None:
    """Run all programs of a launch, one after the other, and write what they stored into the tensors.

    Tensors that share a storage share the memory of the kernel, too.
    """
    memories: dict[int, Memory] = {}
    given: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            memory = memories.setdefault(argument.untyped_storage().data_ptr(), Memory(argument))
            given.append(Pointer(memory, argument.storage_offset()))
        else:
            given.append(Value(np.float32(argument)) if isinstance(argument, float) else Value(np.int64(argument)))
    for program in range(programs):
        language = Language(program, programs, Turns(seed + program))
        _emulated(kernel.fn, language)(*given, **constants)
    for memory in memories.values():
        memory.write_back()
