"""The clean torch twin of ``topk_mask``: a row of booleans for each query, then their bits.

Part of ``optimized/topk_mask.py``; call it from there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .topk_mask import query_tiles

if TYPE_CHECKING:
    from .topk_mask import TopkMaskPlan

# booleans that lie in memory at once
_CELLS = 1 << 26


def refusal(device: torch.device) -> str | None:
    """None: any device is served."""
    return None


def build(indices: Tensor, plan: "TopkMaskPlan") -> Tensor:
    """Build the mask, some queries at a time; arguments as in ``topk_mask``."""
    columns = 32 * plan.num_words
    mask = torch.zeros(plan.num_queries, plan.num_words, dtype=torch.int32, device=plan.device)
    if mask.numel() == 0:
        return mask
    rows = max(1, _CELLS // columns)
    weights = torch.ones(32, dtype=torch.int32, device=plan.device) << torch.arange(32, device=plan.device)
    for first in range(0, plan.num_queries, rows):
        part = slice(first, first + rows)
        bounds = plan.key_bounds[plan.request_of_query[part].long()]
        valid = (indices[part] >= bounds[:, :1]) & (indices[part] < bounds[:, 1:])
        # what is not valid is marked in a column behind the last
        key = (indices[part] - bounds[:, :1]).masked_fill(~valid, columns).long()
        selected = torch.zeros(len(key), columns + 1, dtype=torch.bool, device=plan.device)
        selected.scatter_(1, key, True)
        # the sum wraps to the sign bit, as no two bits are the same
        bits = selected[:, :-1].unflatten(1, (plan.num_words, 32)) * weights
        mask[part] = bits.sum(dim=-1, dtype=torch.int32)
    return mask


def build_map(mask: Tensor, plan: "TopkMaskPlan") -> Tensor:
    """Build the map of tiles; ``mask`` as ``build`` returns it."""
    if plan.tile is None:
        raise ValueError("plan.tile must be set to build a map of tiles, got None")
    words = plan.tile[1] // 32
    columns = plan.map_shape[1]
    marked = torch.nn.functional.pad(mask != 0, (0, columns * words - plan.num_words))
    held = marked.unflatten(1, (columns, words)).any(dim=-1) if columns else marked
    tiles = [held[first:behind].any(dim=0) for first, behind in query_tiles(plan.query_lens, plan.tile[0])]
    return torch.stack(tiles) if tiles else held.new_zeros(plan.map_shape)
