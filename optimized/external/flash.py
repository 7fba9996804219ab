"""torch's own FlashAttention 2 as an attention provider: the operator behind ``torch.nn.attention.varlen``.

Written against torch 2.11 and 2.13, whose ``varlen_attn`` calls this operator, and against ``mha_varlen_fwd`` behind
it: ``lse`` is ``[H, T]`` in natural log, the causal mask is aligned to the last key, a row without keys is
``(0, +inf)``, and grouped heads are served as they are. Queries, keys and values must be equally wide: the narrower are
padded with zeros, which changes no logit, and the output is cut. Not yet run on a GPU by this project; the change of
convention is tested against a stand-in.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import pad

from ._partial_state import (
    Prepared,
    canonical_state,
    check_call,
    empty_rows,
    empty_state,
    library_refusal,
    prepared_of,
)

if TYPE_CHECKING:
    from ..attention import AttentionPlan, AttentionShape

_WIDEST = 256


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why torch's FlashAttention 2 cannot serve a request, or None."""
    reason = library_refusal(shape, library="torch's FlashAttention 2", capabilities=(8, 9, 10, 11, 12))
    if reason is not None:
        return reason
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch is built without FlashAttention 2"
    replacement = current_flash_attention_impl()
    if replacement is not None:
        return f"torch's FlashAttention 2 is replaced by {replacement} in this process"
    if _width(shape.head_dim_qk, shape.head_dim_v) > _WIDEST:
        served = f"torch's FlashAttention 2 serves head sizes up to {_WIDEST}"
        return f"{served}, got {shape.head_dim_qk} and {shape.head_dim_v}"
    return None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Find the rows without keys, once a plan."""
    return Prepared(empty=empty_rows(plan))


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend by FlashAttention 2; arguments and results as in ``attention``.

    Raises:
        NotImplementedError: If it does not serve the scale or the strides.
    """
    prepared, head_dim_v = prepared_of(plan), v.shape[-1]
    if plan.num_queries == 0 or plan.num_keys == 0:
        return empty_state(q, head_dim_v)
    width = _width(q.shape[-1], head_dim_v)
    q, k, v = (_widened(tensor, width) for tensor in (q, k, v))
    check_call(q, k, v, softmax_scale, library="torch's FlashAttention 2")
    longest = max(plan.query_lens)
    if longest == 1 and plan.num_queries != len(plan.query_lens):
        # of a longest request of 1 the operator concludes that each request has 1
        longest = 2
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        longest,
        max(plan.key_lens),
        0.0,
        plan.causal,
        return_debug_mask=False,
        scale=softmax_scale,
    )
    return canonical_state(out[..., :head_dim_v], lse, base="e", layout="HT", empty=prepared.empty)


def _width(head_dim_qk: int, head_dim_v: int) -> int:
    """The common width of queries, keys and values: the wider one, in steps of 8."""
    return -(-max(head_dim_qk, head_dim_v) // 8) * 8


def _widened(tensor: Tensor, width: int) -> Tensor:
    """The tensor with zeros behind its columns; itself where it is as wide already."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
