"""Sparse MLA in plain torch, a block of queries at a time. Part of ``optimized/sparse_mla.py``; call it from there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape

# elements of the rows that a block of queries gathers at most
_BLOCK_ELEMENTS = 1 << 23


def refusal(shape: "SparseMlaShape") -> str | None:
    """There is nothing that torch does not serve."""
    return None


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits``."""
    shape = plan.shape
    block = max(1, _BLOCK_ELEMENTS // (shape.topk * shape.d_qk))
    # what is not valid reads a row of zeros behind the last
    behind = torch.cat([call.kv, call.kv.new_zeros(1, shape.d_qk)])
    for start in range(0, shape.s_q, block):
        _attend_block(call, plan, behind, slice(start, min(start + block, shape.s_q)))


def _attend_block(call: "SparseMlaCall", plan: "SparseMlaPlan", kv: Tensor, queries: slice) -> None:
    """The same for a range of queries; ``kv`` has a row of zeros behind the last."""
    shape, wide = plan.shape, plan.shape.accumulator_dtype
    indices = call.indices[queries].long()
    valid = (indices >= 0) & (indices < shape.s_kv)
    if call.topk_length is not None:
        valid &= torch.arange(shape.topk, device=indices.device) < call.topk_length[queries, None]
    rows = kv[torch.where(valid, indices, shape.s_kv)].to(wide)  # [block, topk, d_qk]
    logits = torch.einsum("shd,sjd->shj", call.q[queries].to(wide), rows) * call.softmax_scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    highest = logits.amax(dim=-1)
    empty = highest == float("-inf")
    shift = highest.masked_fill(empty, 0.0)
    weights = torch.exp(logits - shift[..., None])
    total = weights.sum(dim=-1)
    lse = shift + torch.log(total)
    # weights meet the values in the dtype of the inputs; their sum is taken before
    out = torch.einsum("shj,sjd->shd", weights.to(shape.dtype).to(wide), rows[..., : shape.d_v])
    share = torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, total))
    if call.attn_sink is not None:
        share = share * torch.where(empty, 0.0, torch.sigmoid(lse - call.attn_sink))
    call.out[queries] = (out * share[..., None]).to(shape.dtype)
    call.lse[queries] = lse
    call.max_logits[queries] = highest
