"""The clean torch twin of ``attention``: one request at a time, the precision of the kernels, nothing hidden.

Also the torch form of the merge. Part of ``optimized/attention.py``; call it from there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import AttentionPlan, AttentionShape


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """None: any device, dtype, head size and length is served."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend request by request; arguments and results as in ``attention``.

    Memory: the logits of one request, ``[H, n, m]`` float32, a few times over.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
    query_lens, key_lens = list(plan.query_lens), list(plan.key_lens)
    parts = zip(
        torch.split(q, query_lens),
        torch.split(k, key_lens),
        torch.split(v, key_lens),
        torch.split(out, query_lens),
        torch.split(lse, query_lens),
        strict=True,
    )
    for q_part, k_part, v_part, out_part, lse_part in parts:
        part, part_lse = attend_request(q_part, k_part, v_part, softmax_scale=softmax_scale, causal=plan.causal)
        out_part.copy_(part)
        lse_part.copy_(part_lse)
    return out, lse


def attend_request(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend within one request.

    The row sum is taken before the weights are rounded, as in the Triton kernel; the division comes last.

    Args:
        q: ``[n, H, Dq]``.
        k: ``[m, H_kv, Dq]``.
        v: ``[m, H_kv, Dv]``.
        softmax_scale: Factor on the logits.
        causal: Query ``i`` sees keys ``0 .. i + m - n``.

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
    if causal:
        logits = logits.masked_fill(future_keys(n, m, q.device), float("-inf"))
    highest = logits.amax(dim=-1, keepdim=True)
    # a row that sees no key has no highest logit; any finite shift makes its weights 0
    shift = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(logits - shift)
    total = weights.sum(dim=-1, keepdim=True)
    mixed = torch.einsum("kgnm,mkd->kgnd", weights.to(q.dtype).to(wide), v.to(wide))
    out = mixed / total.masked_fill(total == 0.0, 1.0)
    lse = shift + torch.log(total)
    return out.flatten(0, 1).transpose(0, 1), lse[..., 0].flatten(0, 1).transpose(0, 1)


def future_keys(n: int, m: int, device: torch.device) -> Tensor:
    """``[n, m]``, True where a query must not look: key ``s > i + m - n``, aligned to the last query."""
    last_key = torch.arange(n, device=device) + (m - n)
    return torch.arange(m, device=device) > last_key[:, None]


def merge_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The merge in the dtype of accumulation; arguments as in ``merge_states``."""
    wide = accumulation_dtype(torch.promote_types(out_a.dtype, out_b.dtype))
    wide_lse = accumulation_dtype(torch.promote_types(lse_a.dtype, lse_b.dtype))
    lse_a, lse_b = lse_a.to(wide_lse), lse_b.to(wide_lse)
    highest = torch.maximum(lse_a, lse_b)
    shift = highest.masked_fill(highest == float("-inf"), 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = weight_a + weight_b
    # an empty side may hold garbage, NaN included: it is dropped by selection, not by its weight of 0
    part_a = torch.where(lse_a[..., None] == float("-inf"), 0.0, out_a.to(wide))
    part_b = torch.where(lse_b[..., None] == float("-inf"), 0.0, out_b.to(wide))
    merged = weight_a[..., None] * part_a + weight_b[..., None] * part_b
    return merged / total.masked_fill(total == 0.0, 1.0)[..., None], shift + torch.log(total)


def merge_into_torch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The merge in place; arguments as in ``merge_into``."""
    merged, merged_lse = merge_torch(out, lse, part_out, part_lse)
    out.copy_(merged)
    lse.copy_(merged_lse)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
