"""The bit-packed mask as Triton kernels: rows built in shared memory, or by atomic operations on a cleared mask.

Part of ``optimized/topk_mask.py``; call it from there. No length is compiled in. Rows in shared memory come in classes:
one takes every row of as many words as lists have entries, which is 65536 keys for lists of 2048; each doubling of that
is another.
"""

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ._topk_mask_triton_kernel import INTERPRETED, PACK, map_kernel, mark_kernel, mark_single_kernel

if TYPE_CHECKING:
    from .topk_mask import TopkMaskPlan

# entries that a program marks by atomic operations, words of a row that one program of the map reads
_ENTRIES, _WORDS = 1024, 64
# a row of so many words is built in shared memory, of which a program has 48 KiB without asking
_MAX_SHARED_WORDS = 8192
# entries of a list that a warp and a program of 32 of them can hold
_WARP_ENTRIES = 32 * PACK.value
_MAX_SHARED_ENTRIES = 32 * _WARP_ENTRIES


def refusal(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if not INTERPRETED and device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {device}"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device is available"
    return None


def build(indices: Tensor, plan: "TopkMaskPlan") -> Tensor:
    """Build the mask; arguments as in ``topk_mask``."""
    return launch(indices, plan, single=len(plan.query_lens) == 1, in_shared=builds_in_shared(plan))


def builds_in_shared(plan: "TopkMaskPlan") -> bool:
    """Whether a row fits in the shared memory of a program, and there is such memory."""
    if INTERPRETED or torch.version.hip is not None:
        return False
    return plan.num_words <= _MAX_SHARED_WORDS and plan.topk <= _MAX_SHARED_ENTRIES


def launch(indices: Tensor, plan: "TopkMaskPlan", *, single: bool, in_shared: bool) -> Tensor:
    """Build the mask in a given way; other arguments and the result as in ``topk_mask``.

    Args:
        indices: As in ``topk_mask``.
        plan: As in ``topk_mask``.
        single: Whether the bounds of the only request are arguments; otherwise each row looks up those of its own.
        in_shared: Whether a row is built in shared memory, which ``builds_in_shared`` must allow.
    """
    size = plan.num_queries, plan.num_words
    # cleared before the launch: within one, nothing orders a program's stores before its atomic operations
    new = torch.empty if in_shared else torch.zeros
    mask = new(size, dtype=torch.int32, device=indices.device)
    if mask.numel() == 0:
        return mask
    # as long as the block of entries at least: shorter rows would be so many more classes to compile
    row_words = max(_WARP_ENTRIES, _power_of_two(plan.topk), _power_of_two(plan.num_words))
    if in_shared:
        block = row_words
        grid, num_warps = (plan.num_queries, 1), block // _WARP_ENTRIES
    else:
        block = min(_ENTRIES, _power_of_two(plan.topk))
        grid, num_warps = (plan.num_queries, triton.cdiv(plan.topk, block)), 4
    sizes = (plan.topk, *indices.stride(), plan.num_words)
    constants = {"BLOCK": block, "ROW_WORDS": row_words if in_shared else 0, "num_warps": num_warps}
    with torch.cuda.device_of(indices):
        if single:
            first, behind = plan.key_starts[0], plan.key_starts[0] + plan.key_lens[0]
            mark_single_kernel[grid](indices, mask, first, behind, *sizes, **constants)
        else:
            bounds = plan.request_of_query, plan.key_bounds
            mark_kernel[grid](indices, mask, *bounds, *sizes, **constants)
    return mask


def build_map(mask: Tensor, plan: "TopkMaskPlan") -> Tensor:
    """Build the map of tiles; ``mask`` as ``build`` returns it."""
    if plan.tile is None:
        raise ValueError("plan.tile must be set to build a map of tiles, got None")
    tiles, columns = plan.map_shape
    held = torch.empty(tiles, columns, dtype=torch.bool, device=mask.device)
    if held.numel() == 0:
        return held
    words = plan.tile[1] // 32
    block = max(words, _WORDS)
    with torch.cuda.device_of(mask):
        map_kernel[(tiles, triton.cdiv(columns, block // words))](
            mask,
            # triton has no pointer to one byte of truth
            held.view(torch.uint8),
            plan.tile_rows,
            plan.num_words,
            columns,
            BLOCK_ROWS=plan.tile[0],
            BLOCK_WORDS=block,
            TILE_WORDS=words,
        )
    return held


def _power_of_two(number: int) -> int:
    """The power of two that covers a number."""
    return 1 << (number - 1).bit_length()
