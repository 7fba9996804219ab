"""What the Triton interpreter of this process really computes, measured on a few small kernels.

Import this module only while ``TRITON_INTERPRET=1`` is set: ``triton.jit`` decides at decoration time.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._doctor_machine import InterpreterTraits

_SIZE = 16


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + rows * SIZE + columns)
    b = tl.load(b_ptr + rows * SIZE + columns)
    tl.store(out_ptr + rows * SIZE + columns, tl.dot(a, b, out_dtype=tl.float32))


@triton.jit
def _sum_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    total = tl.load(a_ptr + offsets) + tl.load(b_ptr + offsets)
    tl.store(out_ptr + offsets, total.to(tl.float32))


@triton.jit
def _copy_kernel(in_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, tl.load(in_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def _max_kernel(in_ptr, out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(in_ptr + tl.arange(0, SIZE)), axis=0))


@triton.jit
def _range_kernel(out_ptr, count):
    total = 0
    for i in range(count):
        total += i
    tl.store(out_ptr, total)


@triton.jit
def _asm_kernel(in_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    x = tl.load(in_ptr + offsets)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out_ptr + offsets, y)


def _relative_error(value: Tensor, exact: Tensor) -> float:
    """Greatest absolute difference over the greatest exact magnitude; ``inf`` if the value is not finite."""
    error = ((value.double() - exact).abs().max() / exact.abs().max()).item()
    return error if error == error else float("inf")


def _dot_error(dtype: torch.dtype, generator: torch.Generator) -> float:
    a = torch.randn(_SIZE, _SIZE, generator=generator).to(dtype)
    b = torch.randn(_SIZE, _SIZE, generator=generator).to(dtype)
    out = torch.zeros(_SIZE, _SIZE)
    _dot_kernel[(1,)](a, b, out, SIZE=_SIZE)
    return _relative_error(out, a.double() @ b.double())


def _bfloat16_sum_error(generator: torch.Generator) -> float:
    a = torch.randn(_SIZE, generator=generator).bfloat16()
    b = torch.randn(_SIZE, generator=generator).bfloat16()
    out = torch.zeros(_SIZE)
    _sum_kernel[(1,)](a, b, out, SIZE=_SIZE)
    return _relative_error(out, a.double() + b.double())


def _truncated_share(generator: torch.Generator) -> float:
    values = torch.randn(1024, generator=generator)
    stored = torch.zeros(1024, dtype=torch.bfloat16)
    _copy_kernel[(1,)](values, stored, SIZE=1024)
    return (stored != values.bfloat16()).double().mean().item()


def _max_keeps_nan() -> bool:
    values = torch.arange(_SIZE, dtype=torch.float32)
    values[3] = float("nan")
    out = torch.zeros(1)
    _max_kernel[(1,)](values, out, SIZE=_SIZE)
    return bool(out.isnan().item())


def _reads_past_end() -> bool:
    # the memory past the view belongs to the same tensor, so the probe itself stays within bounds
    memory = torch.arange(2 * _SIZE, dtype=torch.float32)
    out = torch.full((2 * _SIZE,), -1.0)
    _copy_kernel[(1,)](memory[:_SIZE], out, SIZE=2 * _SIZE)
    return bool((out == memory).all().item())


def _exception_of(launch: Callable[[], object]) -> str | None:
    """Run a launch; return the name and first line of what it raised, or None."""
    # the probe asks which exception comes, so it must take any
    try:
        launch()
    except Exception as error:
        # the interpreter wraps the exception of a kernel in one of its own
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}".rstrip(": ")
    return None


def interpreter_traits(seed: int = 0) -> InterpreterTraits:
    """Run the probes in the interpreter of this process; takes well under a second.

    Args:
        seed: Seed of the probes' inputs.

    Raises:
        RuntimeError: If the kernels of this module were decorated while ``TRITON_INTERPRET`` was off.
    """
    if isinstance(_dot_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET must be 1 before this module is imported, got a compiled kernel")
    generator = torch.Generator().manual_seed(seed)
    integers = torch.zeros(_SIZE, dtype=torch.int32)
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return InterpreterTraits(
        dot_error={name: _dot_error(dtype, generator) for name, dtype in dtypes.items()},
        bfloat16_sum_error=_bfloat16_sum_error(generator),
        truncated_share=_truncated_share(generator),
        max_keeps_nan=_max_keeps_nan(),
        runtime_range_error=_exception_of(lambda: _range_kernel[(1,)](integers, 4)),
        inline_asm_error=_exception_of(lambda: _asm_kernel[(1,)](integers, integers.clone(), SIZE=_SIZE)),
        reads_past_end=_reads_past_end(),
    )
