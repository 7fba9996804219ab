"""Sparse MLA as one plain Triton kernel: a query a program, its heads padded to the 16 rows of a matrix instruction.

Part of ``optimized/sparse_mla.py``; call it from there. No count is known when the kernel is compiled but those of the
model, so that new lengths compile nothing.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from ._attention_triton import _shared_memory, block_widths
from ._sparse_mla_triton_kernel import flagged_kernel, sparse_mla_kernel

if TYPE_CHECKING:
    from ._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape

LOG2_E = math.log2(math.e)

# queries of whose flags a program looks at once
_FLAGGED_QUERIES = 64

# decided when the kernel was decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(sparse_mla_kernel, triton.runtime.JITFunction)


class Tile(NamedTuple):
    """Launch configuration: ``block_h`` heads a program, ``block_n`` rows a step."""

    block_h: int
    block_n: int
    num_stages: int
    num_warps: int


def refusal(shape: "SparseMlaShape") -> str | None:
    """Why the kernel cannot serve a shape, or None."""
    if shape.dtype == torch.float64:
        return "float64 is not served: the kernel sums in float32"
    if INTERPRETED and shape.dtype == torch.bfloat16:
        return "bfloat16 is not served under TRITON_INTERPRET: the interpreter multiplies its bit patterns"
    if not INTERPRETED and shape.device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {shape.device}"
    if not INTERPRETED and torch.cuda.get_device_capability(shape.device) < (8, 0):
        return f"compute capability 8.0 is needed, got {torch.cuda.get_device_capability(shape.device)}"
    main = block_widths(shape.d_qk, 1)[0]
    if shape.d_v > main:
        return f"values must lie in the first {main} of {shape.d_qk} columns, got d_v = {shape.d_v}"
    if choose_tile(shape) is None:
        return f"no tile of rows of width {shape.d_qk} fits in shared memory"
    return None


def choose_tile(shape: "SparseMlaShape") -> Tile | None:
    """The first configuration, best first, that fits in shared memory; None if there is none."""
    width = sum(block_widths(shape.d_qk, 1)[:2])
    # 64 rows are what Hopper has an instruction of its own for, which triton 3.6 feeds wrongly with padded widths
    block_h = min(64 if width == shape.d_qk else 32, max(16, 1 << (shape.h_q - 1).bit_length()))
    if INTERPRETED:
        return Tile(block_h, 32, 1, 4)
    num_warps = 4 if block_h <= 16 else 8
    preferred = [Tile(block_h, 64, 2, num_warps), Tile(block_h, 32, 2, num_warps), Tile(block_h, 16, 1, num_warps)]
    smallest = Tile(16, 16, 1, 4)
    # float32 products do without matrix instructions, which larger tiles are for
    preferred = [smallest] if shape.dtype.itemsize == 4 else [*preferred, smallest]
    available = _shared_memory(shape.device)
    for tile in preferred:
        if (tile.block_h + tile.num_stages * tile.block_n) * width * shape.dtype.itemsize + 2048 <= available:
            return tile
    return None


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits`` in one launch."""
    launch(call, plan.shape)


def launch(call: "SparseMlaCall", shape: "SparseMlaShape") -> None:
    """Run the kernel for all queries of a shape, which may have other heads than that of a plan."""
    tile = _tile(shape)
    with torch.cuda.device_of(call.q):
        sparse_mla_kernel[(shape.s_q, triton.cdiv(shape.h_q, tile.block_h))](
            *_arguments(call, shape), **_constants(call, shape, tile)
        )


def launch_flagged(call: "SparseMlaCall", shape: "SparseMlaShape", flags: Tensor) -> None:
    """Run the kernel for the queries of which ``flags``, ``[s_q, h_q]``, int8, names a head."""
    tile = _tile(shape)
    with torch.cuda.device_of(call.q):
        flagged_kernel[(triton.cdiv(shape.s_q, _FLAGGED_QUERIES), triton.cdiv(shape.h_q, tile.block_h))](
            flags, shape.s_q, *_arguments(call, shape), QUERIES=_FLAGGED_QUERIES, **_constants(call, shape, tile)
        )


def _tile(shape: "SparseMlaShape") -> Tile:
    """The configuration of a shape that was not refused."""
    tile = choose_tile(shape)
    if tile is None:
        raise NotImplementedError(f"no tile of this kernel serves {shape}")
    return tile


def _arguments(call: "SparseMlaCall", shape: "SparseMlaShape") -> tuple[Any, ...]:
    """What both kernels take."""
    tensors = call.q, call.kv, call.indices, call.topk_length, call.attn_sink, call.out, call.lse, call.max_logits
    strides = *call.q.stride(), *call.kv.stride(), *call.indices.stride(), *call.out.stride()
    return *tensors, call.softmax_scale * LOG2_E, shape.s_kv, shape.h_q, *strides


def _constants(call: "SparseMlaCall", shape: "SparseMlaShape", tile: Tile) -> dict[str, Any]:
    """What both kernels know when they are compiled."""
    main, rest, _ = block_widths(shape.d_qk, 1)
    return {
        "TOPK": shape.topk,
        "D_QK": shape.d_qk,
        "D_V": shape.d_v,
        "BLOCK_H": tile.block_h,
        "BLOCK_N": tile.block_n,
        "BLOCK_MAIN": main,
        "BLOCK_REST": rest,
        "NUM_STAGES": tile.num_stages,
        # offsets of columns then fit 32 bits
        "UNIT_STRIDES": call.q.stride(2) == call.kv.stride(1) == call.indices.stride(1) == 1,
        "num_warps": tile.num_warps,
    }
