"""Sparse MLA for few heads on Hopper, one query's list at a time.

Part of ``optimized/sparse_mla.py``; call it from there. Rows of width 512 are served by the kernel that takes two
queries at once, rows of width 576 by the one that splits a query's list: shared memory decides. Measured on an H200
(triton 3.6.0, 8192 queries over 32768 rows, uniform lists, ms):

=====================  =============  =========
heads, width, entries  these kernels  FlashMLA
=====================  =============  =========
8, 512, 512 of 640     0.567          1.083
16, 512, 512 of 640    0.744          1.085
8, 576, 2048           2.550          3.874
16, 576, 2048          2.997          3.772
=====================  =============  =========

FlashMLA was given queries that were padded already. With 8 heads the gather from L2 is the limit, with 16 the tensor
cores, whose N = 16 instruction waits for its operand from shared memory.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._sparse_mla_overlap import padded_heads
from ._sparse_mla_triton import INTERPRETED, LOG2_E

if TYPE_CHECKING:
    from ._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape

_BLOCK_N = 64

# the head tile, then slots of the ring and whether one buffer serves the weights of both sides
_SWAP = {8: (3, False), 16: (3, True), 32: (2, False)}
# slots of the ring, of the ring of rope columns, and whether the weights go over the latter
_SPLIT = {8: (3, 2, True), 16: (3, 2, True), 32: (2, 2, False)}


def refusal(shape: "SparseMlaShape") -> str | None:
    """Why the kernels cannot serve a shape, or None."""
    if INTERPRETED:
        return "a CUDA device is needed: there is no interpreter for Gluon"
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return f"a CUDA device is needed, got {shape.device}"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability != (9, 0):
        return f"compute capability 9.0 is needed, got {capability}"
    if shape.dtype != torch.bfloat16:
        return f"bfloat16 is served, got {shape.dtype}"
    if shape.d_qk not in (512, 576) or shape.d_v != 512:
        return f"rows of width 512 or 576 with 512 values are served, got {shape.d_qk} and {shape.d_v}"
    if shape.h_q > 32:
        return f"at most 32 heads are served, got {shape.h_q}"
    return None


def check_layout(call: "SparseMlaCall") -> None:
    """Refuse strides that the kernels do not follow; reads no value.

    Raises:
        NotImplementedError: If a last dimension is not contiguous, rows cannot be copied 16 bytes at a time, or the
            heads of a query lie too far apart for 32-bit offsets.
    """
    for name, tensor in (("q", call.q), ("kv", call.kv), ("indices", call.indices), ("out", call.out)):
        if tensor.stride(-1) != 1:
            raise NotImplementedError(
                f"{name} must be contiguous in its last dimension for gluon, got stride {tensor.stride(-1)}"
            )
    if call.kv.data_ptr() % 16 or call.kv.stride(0) % 16:
        raise NotImplementedError(
            "kv must start at a multiple of 16 bytes, its rows multiples of 16 elements apart for gluon, got "
            f"{call.kv.data_ptr() % 16} bytes past and {call.kv.stride(0)} elements"
        )
    for name, tensor in (("q", call.q), ("out", call.out)):
        if tensor.shape[1] * tensor.stride(1) + tensor.shape[2] > torch.iinfo(torch.int32).max:
            raise NotImplementedError(f"heads of {name} must lie within 2**31 elements, got stride {tensor.stride(1)}")


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits`` in one launch."""
    check_layout(call)
    shape = plan.shape
    kernel, per_program, options = _configuration(shape.h_q, shape.d_qk)
    grid = min(-(-shape.s_q // per_program), num_processors(shape.device))
    with torch.cuda.device_of(call.q):
        kernel[(grid,)](
            call.q,
            call.kv,
            call.indices,
            stand_in(call.topk_length, call.indices),
            stand_in(call.attn_sink, call.lse),
            call.out,
            call.lse,
            call.max_logits,
            shape.s_q,
            shape.s_kv,
            shape.topk,
            call.q.stride(0),
            call.q.stride(1),
            call.kv.stride(0),
            call.indices.stride(0),
            call.out.stride(0),
            call.out.stride(1),
            call.softmax_scale * LOG2_E,
            HEADS=shape.h_q,
            BLOCK_N=_BLOCK_N,
            HAS_LENGTH=call.topk_length is not None,
            HAS_SINK=call.attn_sink is not None,
            num_warps=4,
            **options,
        )


def stand_in(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel never follows where there is no tensor."""
    return other if tensor is None else tensor


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a persistent program occupies one."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _configuration(h_q: int, d_qk: int) -> tuple[Any, int, dict[str, Any]]:
    """The kernel, the queries that a program takes at a time, and its constants for 227 KiB of shared memory."""
    heads = padded_heads(h_q)
    if d_qk == 512:
        from ._sparse_mla_gluon_swap import swap_kernel

        slots, one_buffer = _SWAP[heads]
        options = {"SLOTS": slots, "ONE_BUFFER": one_buffer, "CONSUMER_REGISTERS": 184, "PRODUCER_REGISTERS": 144}
        return swap_kernel, 2, {"H": heads, **options}
    from ._sparse_mla_gluon_split import split_kernel

    slots, rope_slots, over_rope = _SPLIT[heads]
    options = {"SLOTS": slots, "ROPE_SLOTS": rope_slots, "OVER_ROPE": over_rope}
    return split_kernel, 1, {"H": heads, "CONSUMER_REGISTERS": 184, "PRODUCER_REGISTERS": 128, **options}
