"""Attention over packed requests as one Triton kernel: online softmax, any head sizes, strides and lengths.

Part of ``optimized/attention.py``; call it from there.

Measured on an H200 (triton 3.6.0, bfloat16, 16 or 20 heads, 8192 queries against 16384 keys, no mask), TFLOP/s:

==========  ===========  ===========
``Dq/Dv``   this kernel  cuDNN 9.19
==========  ===========  ===========
192 / 128   499 - 528    631 - 685
256 / 256   489 - 528    660 - 744
128 / 128   504 - 530    676 - 690
192 / 256   503          651
256 / 128   529          696
64 / 64     396 - 464    431 - 479
96 / 96     455 - 491    506 - 530
==========  ===========  ===========

With a causal mask 458 - 514 at 192/128 and 496 - 542 at 256/256 (16384 tokens). Descriptors gain 0 - 7 % over pointers.
Warp specialisation (``tl.range(..., warp_specialize=True)``) is not used: with that compiler it ran at 606 and 663
TFLOP/s, and gave other, wrong, results in each run.
"""

import contextvars
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from ._attention_triton_kernel import attention_kernel
from ._layout import copy_engine_objection

if TYPE_CHECKING:
    from .attention import AttentionPlan, AttentionShape

_LOG2_E = math.log2(math.e)

# decided when the kernel was decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(attention_kernel, triton.runtime.JITFunction)


class Tile(NamedTuple):
    """Launch configuration: ``block_m`` queries of a head a program, ``block_n`` keys a step."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int


# for padded heads that are read through pointers: with 64 queries or more, for which Hopper has an instruction of its
# own, triton 3.6 read past shared memory at 44/12 and gave wrong values, silently, at 76/12 (bfloat16, H200)
NARROW_TILES = Tile(32, 32, 1, 4), Tile(16, 16, 1, 4)


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why the kernel cannot serve a request, or None."""
    if shape.dtype == torch.float64:
        return "float64 is not served: the kernel sums in float32"
    if INTERPRETED and shape.dtype == torch.bfloat16:
        return "bfloat16 is not served under TRITON_INTERPRET: the interpreter multiplies its bit patterns"
    if not INTERPRETED and shape.device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {shape.device}"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device is available"
    if not INTERPRETED and torch.cuda.get_device_capability(shape.device) < (8, 0):
        return f"compute capability 8.0 is needed, got {torch.cuda.get_device_capability(shape.device)}"
    if max(shape.num_heads, len(query_lens)) > 65535:
        return f"at most 65535 heads and requests fit in a grid, got {shape.num_heads} and {len(query_lens)}"
    if choose_tile(shape) is None:
        return f"no tile of head sizes {shape.head_dim_qk} and {shape.head_dim_v} fits in shared memory"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend in one launch; arguments and results as in ``attention``."""
    descriptors = takes_descriptors(q, k, v)
    tile = choose_tile(plan.shape, pointers=not descriptors)
    if tile is None:
        raise NotImplementedError(f"no tile of this kernel serves {plan.shape}")
    return launch(q, k, v, softmax_scale, plan, tile=tile, descriptors=descriptors)


def takes_descriptors(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tiles are loaded by the copy engine (TMA): 16-bit inputs on Hopper or later, aligned in memory."""
    if INTERPRETED or q.element_size() != 2 or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    return all(copy_engine_objection("", tensor) is None for tensor in (q, k, v))


def choose_tile(shape: "AttentionShape", *, pointers: bool = False) -> Tile | None:
    """The first configuration, best first, whose tiles fit in shared memory; None if there is none.

    Args:
        shape: Of the request.
        pointers: Whether tiles are not loaded through descriptors.
    """
    if INTERPRETED:
        return Tile(32, 32, 1, 4)
    main, rest, block_v = block_widths(shape.head_dim_qk, shape.head_dim_v)
    available = _shared_memory(shape.device)
    padded = main + rest + block_v != shape.head_dim_qk + shape.head_dim_v
    best = _preferred_tiles(main + rest + block_v, block_v, shape.dtype.itemsize)
    for tile in NARROW_TILES if pointers and padded else best:
        elements = tile.block_m * (main + rest) + tile.num_stages * tile.block_n * (main + rest + block_v)
        if elements * shape.dtype.itemsize + 2048 <= available:
            return tile
    return None


def block_widths(head_dim_qk: int, head_dim_v: int) -> tuple[int, int, int]:
    """Cover ``Dq`` by a power of two and a remainder (192 = 128 + 64, 576 = 512 + 64), ``Dv`` by one power of two.

    Returns:
        ``main``, ``rest`` (0 for none) and ``block_v``, each at least 16 as the matrix units ask.
    """
    main = max(16, 1 << (head_dim_qk.bit_length() - 1))
    rest = _block(head_dim_qk - main) if head_dim_qk > main else 0
    return main, rest, _block(head_dim_v)


def launch(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan", *, tile: Tile, descriptors: bool
) -> tuple[Tensor, Tensor]:
    """Run the kernel with a given configuration; other arguments and results as in ``attention``.

    Args:
        q: As in ``attention``.
        k: As in ``attention``.
        v: As in ``attention``.
        softmax_scale: As in ``attention``.
        plan: As in ``attention``.
        tile: Launch configuration.
        descriptors: Whether tiles are loaded through tensor descriptors, whose conditions the caller has checked.
    """
    shape = plan.shape
    out = torch.empty(q.shape[0], shape.num_heads, shape.head_dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], shape.num_heads, dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    main, rest, block_v = block_widths(shape.head_dim_qk, shape.head_dim_v)
    grid = (triton.cdiv(max(plan.query_lens), tile.block_m), shape.num_heads, len(plan.query_lens))

    def run() -> None:
        # descriptors made in the kernel lie in scratch memory of the launch
        triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=q.device))
        attention_kernel[grid](
            q,
            k,
            v,
            out,
            lse,
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            softmax_scale * _LOG2_E,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            GROUP=shape.num_heads // shape.num_kv_heads,
            DQ=shape.head_dim_qk,
            DV=shape.head_dim_v,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_MAIN=main,
            BLOCK_REST=rest,
            BLOCK_V=block_v,
            CAUSAL=plan.causal,
            POSITIVE_SCALE=softmax_scale > 0,
            DESCRIPTORS=descriptors,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )

    # the allocator is a context variable: set in a copy of the context, it does not leak into the caller's
    with torch.cuda.device_of(q):
        contextvars.copy_context().run(run)
    return out, lse


def _preferred_tiles(width: int, block_v: int, itemsize: int) -> tuple[Tile, ...]:
    """Configurations for padded head sizes that add up to ``width``, best first (measured on an H200)."""
    if itemsize == 4:
        return NARROW_TILES
    best: tuple[Tile, ...] = ()
    if width <= 128:
        best = (Tile(64, 128, 3, 4),)
    elif width < 256:
        best = (Tile(128, 64, 3, 4),)
    elif width == 256:
        best = (Tile(64, 64, 3, 4),)
    elif width <= 512:
        best = (Tile(128, 64, 3, 8), Tile(128, 64, 2, 8))
    # accumulators wider than 256 need the registers of 8 warps
    warps = 8 if block_v > 256 else 4
    return *best, Tile(64, 64, 2, warps), Tile(64, 32, 2, warps), Tile(64, 32, 1, warps), Tile(32, 32, 1, warps)


def _block(width: int) -> int:
    """The power of two that covers a width, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; asking the driver takes longer than many a launch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
