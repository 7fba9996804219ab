"""Masked attention over packed requests as one Triton kernel, after a list of the tiles that hold any bit.

Part of ``optimized/masked_mha.py``; call it from there. The kernel is that of ``attention`` with the mask in each tile:
one word for 32 keys, the bounds of causality and of the chunk taken to the words, the bits spread over the logits.
"""

import contextvars
import math
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ._attention_triton import NARROW_TILES, Tile, _preferred_tiles, _shared_memory, block_widths, takes_descriptors
from ._masked_mha_triton_kernel import list_kernel, masked_mha_kernel

if TYPE_CHECKING:
    from ._masked_mha_plan import MaskedMhaPlan
    from .attention import AttentionShape

_LOG2_E = math.log2(math.e)
# columns of the map that the list takes at a time
_COLUMNS = 256

# decided when the kernel was decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(masked_mha_kernel, triton.runtime.JITFunction)


def refusal(shape: "AttentionShape", num_requests: int) -> str | None:
    """Why the kernel cannot serve a shape, or None."""
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
    if not INTERPRETED and torch.cuda.get_device_capability(shape.device) >= (10, 0):
        return "triton 3.6 and 3.7 fail to compile the kernel for compute capability 10 and later"
    if max(shape.num_heads, num_requests) > 65535:
        return f"at most 65535 heads and requests fit in a grid, got {shape.num_heads} and {num_requests}"
    if choose_tile(shape) is None:
        return f"no tile of head sizes {shape.head_dim_qk} and {shape.head_dim_v} fits in shared memory"
    return None


def map_tile(shape: "AttentionShape") -> tuple[int, int]:
    """Queries and keys of a tile of the map: those of the kernel."""
    tile = _tile_of(shape)
    return tile.block_m, tile.block_n


def choose_tile(shape: "AttentionShape") -> Tile | None:
    """The first configuration, best first, whose tiles fit in shared memory; None if there is none."""
    if INTERPRETED:
        return Tile(32, 32, 1, 4)
    main, rest, block_v = block_widths(shape.head_dim_qk, shape.head_dim_v)
    available = _shared_memory(shape.device)
    padded = main + rest + block_v != shape.head_dim_qk + shape.head_dim_v
    # of padded heads, wider tiles are miscompiled unless a descriptor loads them, see _attention_triton.NARROW_TILES
    width, itemsize = main + rest + block_v, shape.dtype.itemsize
    # measured on an H200: 8 % faster at 192/128 than the tiles of dense attention, which rescale twice as often
    wide: tuple[Tile, ...] = (Tile(128, 128, 2, 8),) if itemsize == 2 and 256 < width <= 512 else ()
    best = NARROW_TILES[:1] if padded else (*wide, *_preferred_tiles(width, block_v, itemsize))
    for tile in (*best, Tile(16, 32, 1, 4)):
        elements = tile.block_m * (main + rest) + tile.num_stages * tile.block_n * (main + rest + block_v)
        words = tile.num_stages * tile.block_m * tile.block_n // 32
        # a tile of keys takes whole words
        if tile.block_n % 32 == 0 and elements * shape.dtype.itemsize + 4 * words + 2048 <= available:
            return tile
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    tile_map: Tensor | None,
    softmax_scale: float,
    plan: "MaskedMhaPlan",
) -> tuple[Tensor, Tensor]:
    """Attend in one launch, or two with a map; arguments and results as in ``masked_mha``."""
    tile, descriptors = _tile_of(plan.shape), takes_descriptors(q, k, v)
    return launch(q, k, v, mask, tile_map, softmax_scale, plan, tile=tile, descriptors=descriptors)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    tile_map: Tensor | None,
    softmax_scale: float,
    plan: "MaskedMhaPlan",
    *,
    tile: Tile,
    descriptors: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel with a given configuration; other arguments and results as in ``masked_mha``.

    Args:
        q: As in ``masked_mha``.
        k: As in ``masked_mha``.
        v: As in ``masked_mha``.
        mask: As in ``masked_mha``.
        tile_map: As in ``masked_mha``; its tiles are those of ``tile``.
        softmax_scale: As in ``masked_mha``.
        plan: As in ``masked_mha``.
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
    listed, rank = (mask, mask) if tile_map is None else list_tiles(tile_map)

    def run() -> None:
        # descriptors made in the kernel lie in scratch memory of the launch
        triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=q.device))
        masked_mha_kernel[grid](
            q,
            k,
            v,
            mask,
            listed,
            rank,
            out,
            lse,
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            plan.starts,
            softmax_scale * _LOG2_E,
            mask.shape[1],
            0 if tile_map is None else tile_map.shape[1],
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *mask.stride(),
            GROUP=shape.num_heads // shape.num_kv_heads,
            DQ=shape.head_dim_qk,
            DV=shape.head_dim_v,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_MAIN=main,
            BLOCK_REST=rest,
            BLOCK_V=block_v,
            LISTED=tile_map is not None,
            POSITIVE_SCALE=softmax_scale > 0,
            DESCRIPTORS=descriptors,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )

    # the allocator is a context variable: set in a copy of the context, it does not leak into the caller's
    with torch.cuda.device_of(q):
        contextvars.copy_context().run(run)
    return out, lse


def list_tiles(tile_map: Tensor) -> tuple[Tensor, Tensor]:
    """List the tiles that hold a bit.

    Args:
        tile_map: ``[tiles, columns]``, bool.

    Returns:
        ``listed``, ``[tiles, columns]``, int32, the marked columns of each row in order, whatever lies behind them; and
        ``rank``, ``[tiles, columns + 1]``, int32, how many marked columns come before each.
    """
    tiles, columns = tile_map.shape
    tile_map = tile_map.contiguous()
    listed = torch.empty(tiles, columns, dtype=torch.int32, device=tile_map.device)
    rank = torch.empty(tiles, columns + 1, dtype=torch.int32, device=tile_map.device)
    if tiles:
        with torch.cuda.device_of(tile_map):
            list_kernel[(tiles,)](tile_map.view(torch.uint8), listed, rank, columns, BLOCK=_COLUMNS)
    return listed, rank


def _tile_of(shape: "AttentionShape") -> Tile:
    tile = choose_tile(shape)
    if tile is None:
        raise NotImplementedError(f"no tile of this kernel serves {shape}")
    return tile
