"""Top-k attention over latent rows with the heads that there are, by one of several implementations."""

import torch
from torch import Tensor

from ._attention_checks import check_scale
from ._sparse_mla_checks import check_call, check_out
from ._sparse_mla_overlap import Overlap, measure_overlap
from ._sparse_mla_plan import IMPLEMENTATIONS, SparseMlaCall, SparseMlaPlan, SparseMlaShape, plan_sparse_mla

__all__ = [
    "IMPLEMENTATIONS",
    "Overlap",
    "SparseMlaPlan",
    "SparseMlaShape",
    "measure_overlap",
    "plan_sparse_mla",
    "sparse_mla",
]


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    plan: SparseMlaPlan,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend each query to its selected rows of the latent cache; return ``(out, lse, max_logits)``.

    For query ``s`` and head ``h``, over the valid entries ``j < topk_length[s]``, with ``t = indices[s, j]``::

        z[j]       = softmax_scale * q[s, h] . kv[t]
        out[s, h]  = sum_j exp(z[j]) kv[t, :d_v] / (sum_j exp(z[j]) + exp(attn_sink[h]))
        lse[s, h]  = ln sum_j exp(z[j])                                                    without the sink

    A row that is listed twice counts twice (a multiset). A query without a valid entry gives ``out = 0`` and
    ``lse = max_logits = -inf``, whatever the sink; a sink of ``+inf`` takes all the weight, one of ``-inf`` none.

    Args:
        q: ``[s_q, h_q, d_qk]``, bfloat16, float16, float32 or float64; absorbed queries, the part without RoPE first,
            or those of a unified head. Any strides, such as the native heads of a padded buffer.
        kv: ``[s_kv, d_qk]``, dtype of ``q``; one latent row per token, shared by all heads. The row stride is free.
            Rows that no query lists are never read.
        indices: ``[s_q, topk]``, int32, any order; negative values and values of at least ``s_kv`` are padding.
        softmax_scale: Factor on the logits, of the head size before absorption; a finite number of the host.
        plan: Of ``plan_sparse_mla``; it holds ``topk_length``, how many entries of each list count.
        attn_sink: ``[h_q]``, float32 (float64 for float64 inputs), natural log; weight without a value.
        out: ``[s_q, h_q, d_v]``, dtype of ``q``: where the answer goes, such as a view of some heads and rows of a
            larger buffer, whose other elements stay as they are. A new tensor without.

    Returns:
        ``out``; ``lse``, ``[s_q, h_q]``, float32 (float64 for float64 inputs), natural log of the scaled logits; and
        ``max_logits``, ``[s_q, h_q]``, the highest scaled logit.

    Raises:
        ValueError: If a shape or device is not that of the plan, or ``out`` overlaps itself or an input.
        TypeError: If a dtype is not that of the plan, or the scale is no number.
        NotImplementedError: If ``kv`` is quantised, or the implementation does not serve these strides.

    Precision: products summed in float32, weights rounded to the dtype of ``q`` before the second product, the sum of
    the weights taken before that rounding. Deterministic; under ``gluon-union`` a query's bits depend on what its
    neighbours list. Never synchronises; CUDA graphs can capture it. A plan of ``gluon-union`` holds scratch memory, so
    that its calls must follow one another on one stream. Oracle: ``reference.sparse_mla.sparse_mla``.
    """
    check_call(q, kv, indices, attn_sink, plan)
    check_scale(softmax_scale)
    shape = plan.shape
    if out is None:
        out = q.new_empty(shape.s_q, shape.h_q, shape.d_v)
    else:
        inputs = {"q": q, "kv": kv, "indices": indices, "topk_length": plan.topk_length, "attn_sink": attn_sink}
        check_out(out, inputs, plan)
    lse = torch.empty(shape.s_q, shape.h_q, dtype=shape.accumulator_dtype, device=shape.device)
    max_logits = torch.empty_like(lse)
    call = SparseMlaCall(
        q=q,
        kv=kv,
        indices=indices,
        topk_length=plan.topk_length,
        attn_sink=None if attn_sink is None else attn_sink.contiguous(),
        softmax_scale=float(softmax_scale),
        out=out,
        lse=lse,
        max_logits=max_logits,
    )
    if shape.s_q:
        plan.module.attend(call, plan)
    return out, lse, max_logits
