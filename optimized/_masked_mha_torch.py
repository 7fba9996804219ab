"""The clean torch twin of ``masked_mha``: one request at a time, the precision of the kernel, nothing hidden.

Part of ``optimized/masked_mha.py``; call it from there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._attention_torch import accumulation_dtype

if TYPE_CHECKING:
    from ._masked_mha_plan import MaskedMhaPlan
    from .attention import AttentionShape


def refusal(shape: "AttentionShape", num_requests: int) -> str | None:
    """None: any device, dtype, head size and length is served."""
    return None


def map_tile(shape: "AttentionShape") -> tuple[int, int] | None:
    """None: nothing is skipped."""
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
    """Attend request by request; arguments and results as in ``masked_mha``.

    Memory: the logits of one request, ``[H, n, m]`` float32, a few times over.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
    query_lens, key_lens = list(plan.query_lens), list(plan.key_lens)
    parts = zip(
        torch.split(q, query_lens),
        torch.split(k, key_lens),
        torch.split(v, key_lens),
        torch.split(mask, query_lens),
        torch.split(out, query_lens),
        torch.split(lse, query_lens),
        plan.query_starts,
        plan.key_starts,
        strict=True,
    )
    for q_part, k_part, v_part, words, out_part, lse_part, first_query, first_key in parts:
        visible = visible_keys(words, len(k_part), first_query=first_query, first_key=first_key)
        part, part_lse = attend_request(q_part, k_part, v_part, visible, softmax_scale=softmax_scale)
        out_part.copy_(part)
        lse_part.copy_(part_lse)
    return out, lse


def visible_keys(words: Tensor, num_keys: int, *, first_query: int, first_key: int) -> Tensor:
    """``[n, m]``, whether a query's bit is set and the key not in its future; rows of the mask of one request."""
    key = torch.arange(first_key, first_key + num_keys, device=words.device)
    query = torch.arange(first_query, first_query + words.shape[0], device=words.device)
    selected = (words[:, key >> 5] >> (key & 31)) & 1
    return (selected == 1) & (key <= query[:, None])


def attend_request(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Attend within one request.

    The row sum is taken before the weights are rounded, as in the Triton kernel; the division comes last.

    Args:
        q: ``[n, H, Dq]``.
        k: ``[m, H_kv, Dq]``.
        v: ``[m, H_kv, Dv]``.
        visible: ``[n, m]``, bool.
        softmax_scale: Factor on the logits.

    Returns:
        ``out``, ``[n, H, Dv]``, and ``lse``, ``[n, H]``, both in the dtype of accumulation.
    """
    wide = accumulation_dtype(q.dtype)
    n, m, heads, kv_heads = q.shape[0], k.shape[0], q.shape[1], k.shape[1]
    if m == 0:
        lse = torch.full((n, heads), float("-inf"), dtype=wide, device=q.device)
        return torch.zeros(n, heads, v.shape[-1], dtype=wide, device=q.device), lse
    grouped = q.to(wide).reshape(n, kv_heads, heads // kv_heads, q.shape[-1])
    logits = softmax_scale * torch.einsum("nkgd,mkd->kgnm", grouped, k.to(wide))
    logits = logits.masked_fill(~visible, float("-inf"))
    highest = logits.amax(dim=-1, keepdim=True)
    # a row that sees no key has no highest logit; any finite shift makes its weights 0
    shift = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(logits - shift)
    total = weights.sum(dim=-1, keepdim=True)
    mixed = torch.einsum("kgnm,mkd->kgnd", weights.to(q.dtype).to(wide), v.to(wide))
    out = mixed / total.masked_fill(total == 0.0, 1.0)
    lse = shift + torch.log(total)
    return out.flatten(0, 1).transpose(0, 1), lse[..., 0].flatten(0, 1).transpose(0, 1)
