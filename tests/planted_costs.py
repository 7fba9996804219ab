"""Two kernels of ``attention`` under one name for the cost gate, one of which launches a kernel too many.

Named on the command line; the counting process imports them, and does not interpret Triton.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.harness import kernel


@triton.jit
def extra_kernel(x_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x_ptr + index, tl.load(x_ptr + index))


@kernel(op="attention", name="planted")
def clean(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Answer with zeros, which costs the host what it costs."""
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    return out, torch.zeros(q.shape[:2], device=q.device)


@kernel(op="attention", name="planted")
def launches_more(q: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """The same after a launch that changes nothing."""
    extra_kernel[(1,)](q, BLOCK=16)
    return clean(q, **others)
