"""The merge of a partial attention state into a running one, in place, as one Triton kernel.

Part of ``optimized/attention.py``; call it from there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    num_rows,
    num_heads,
    stride_out_t,
    stride_out_h,
    stride_out_d,
    stride_lse_t,
    stride_lse_h,
    stride_part_out_t,
    stride_part_out_h,
    stride_part_out_d,
    stride_part_lse_t,
    stride_part_lse_h,
    DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge ``BLOCK_ROWS`` rows (a token and a head each), all columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = rows // num_heads
    head = rows % num_heads
    columns = tl.arange(0, BLOCK_V).to(tl.int64)
    inside = rows < num_rows
    inside_tile = inside[:, None] & (columns < DV)[None, :]
    lse_ptrs = lse_ptr + token * stride_lse_t + head * stride_lse_h
    out_ptrs = out_ptr + (token * stride_out_t + head * stride_out_h)[:, None] + columns[None, :] * stride_out_d
    part_out_rows = token * stride_part_out_t + head * stride_part_out_h
    part_out_ptrs = part_out_ptr + part_out_rows[:, None] + columns[None, :] * stride_part_out_d

    lse = tl.load(lse_ptrs, mask=inside, other=float("-inf"))
    part_lse = tl.load(
        part_lse_ptr + token * stride_part_lse_t + head * stride_part_lse_h, mask=inside, other=float("-inf")
    )
    out = tl.load(out_ptrs, mask=inside_tile, other=0.0)
    part_out = tl.load(part_out_ptrs, mask=inside_tile, other=0.0).to(tl.float32)
    # several threads hold the lse of a row: all must have read it before one of them overwrites it
    tl.debug_barrier()

    highest = tl.maximum(lse, part_lse)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(lse - shift)
    part_weight = tl.exp(part_lse - shift)
    total = weight + part_weight
    nonzero = tl.where(total == 0.0, 1.0, total)
    # an empty side may hold garbage, NaN included: it is dropped by selection, not by its weight of 0
    out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
    part_out = tl.where((part_lse == float("-inf"))[:, None], 0.0, part_out)
    merged = (weight[:, None] * out + part_weight[:, None] * part_out) / nonzero[:, None]
    merged_lse = tl.where(total == 0.0, float("-inf"), shift + tl.log(nonzero))
    tl.store(out_ptrs, merged, mask=inside_tile)
    tl.store(lse_ptrs, merged_lse, mask=inside)


# decided when the kernel was decorated, from TRITON_INTERPRET
_INTERPRETED = not isinstance(_merge_kernel, triton.runtime.JITFunction)


def merge_into_triton(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge in place, one pass over the data; arguments as in ``merge_into``.

    Raises:
        NotImplementedError: If there is neither a CUDA device nor the interpreter, or the interpreter would get
            bfloat16.
    """
    if not _INTERPRETED and not out.is_cuda:
        raise NotImplementedError(f"the triton merge needs a CUDA device (or TRITON_INTERPRET=1), got {out.device}")
    if _INTERPRETED and part_out.dtype == torch.bfloat16:
        raise NotImplementedError("the triton merge does not serve bfloat16 under TRITON_INTERPRET")
    tokens, heads, width = out.shape
    if tokens == 0:
        return
    block_v = triton.next_power_of_2(width)
    block_rows = max(1, 2048 // block_v)
    with torch.cuda.device_of(out):
        _merge_kernel[(triton.cdiv(tokens * heads, block_rows),)](
            out,
            lse,
            part_out,
            part_lse,
            tokens * heads,
            heads,
            *out.stride(),
            *lse.stride(),
            *part_out.stride(),
            *part_lse.stride(),
            DV=width,
            BLOCK_ROWS=block_rows,
            BLOCK_V=block_v,
            num_warps=4,
        )
