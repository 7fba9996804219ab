"""MLA prefill that expands a long latent history chunk by chunk and merges the partial results by log-sum-exp."""

from torch import Tensor

from ._mla_prefill_latent import Latent, check_inputs
from ._mla_prefill_plan import HistoryChunk, MlaPrefillPlan, MlaShape, plan_mla_prefill
from ._token_scores_collect import check_fused, collect_expanded, collect_latent, reset
from ._token_scores_plan import TokenScoresPlan
from .attention import attention, merge_into

__all__ = ["HistoryChunk", "MlaPrefillPlan", "MlaShape", "mla_prefill", "plan_mla_prefill"]


def mla_prefill(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    softmax_scale: float,
    plan: MlaPrefillPlan,
    return_lse: bool = True,
    scores: Tensor | None = None,
    score_plan: TokenScoresPlan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend the current tokens of each request to its whole history and to themselves; return ``(out, lse)``.

    The current tokens of all requests go through one packed causal call. Then, for each history chunk of the
    plan: gather its latent rows, project them to keys and values, attend without a mask, merge::

        k, v       = W_UK kv_c[slots] ++ k_pe[slots], W_UV kv_c[slots]
        part, lse' = attention(q[request], k, v)
        out, lse   = merge((out, lse), (part, lse'))

    The buffers of a chunk are released before the next one is gathered, so the peak does not grow with the history.
    Exactly ``sum(context_lens)`` rows are projected. The call never synchronises and can be captured in a CUDA graph.

    Args:
        q: ``[T, H, Dn + Dr]``, float16, bfloat16 or float32; packed current tokens, the part without RoPE first.
        kv_c: ``[slots, R]``, dtype of ``q``; the latent cache, row stride free. Unused rows are never read.
        k_pe: ``[slots, Dr]``, dtype of ``q``; the rotated rope cache, ``Dr`` may be 0.
        kv_b_proj: ``[H, Dn + Dv, R]``, dtype of ``q``; per head ``W_UK`` above ``W_UV``. One that is not contiguous in
            its first two dimensions is copied at every call.
        softmax_scale: Factor on the logits, usually ``(Dn + Dr) ** -0.5``.
        plan: Of this step, from ``plan_mla_prefill``; the same for every layer.
        return_lse: Whether ``lse`` is handed out; ``out`` has the same bits either way.
        scores: ``[N, max_context]``, float32 (float64 for float64), any strides: where token scores go, whatever it
            held before; ``out`` and ``lse`` have the same bits with and without. They are those of ``token_scores``,
            collected from keys that are at hand (``logits``) or in one or two scans of the latent rows at the end
            (``probability``): no row is projected for them.
        score_plan: Of ``plan_token_scores``, made from ``plan``; with ``scores``.

    Returns:
        ``out``, ``[T, H, Dv]``, dtype of ``q``, and ``lse``, ``[T, H]``, float32, natural log of the scaled logits, or
        None.

    Raises:
        ValueError: If a shape disagrees with the plan, or the scores and their plan do not come together.
        TypeError: If a dtype or device disagrees with the plan.

    Precision: keys and values are rounded to the dtype of ``q`` after a float32-accumulated projection; each partial
    result is rounded once to that dtype; merging accumulates in float32 and rounds once, and only if there is
    history. Oracle: ``reference.mla_prefill.mla_prefill``. Source: SparseEngine's history-chunked MLA prefill.
    """
    check_inputs(q, kv_c, k_pe, kv_b_proj, plan)
    check_fused(scores, score_plan, plan)
    latent = Latent(kv_c=kv_c, k_pe=k_pe, weight=kv_b_proj.flatten(0, 1), shape=plan.shape)
    k, v = latent.expand(plan.current_slots)
    out, lse = attention(q, k, v, softmax_scale=softmax_scale, plan=plan.current)
    if scores is not None and score_plan is not None:
        reset(scores, score_plan)
        collect_expanded(scores, q, k, score_plan, 0)
    del k, v
    if plan.chunks:
        total = out.to(plan.accumulator_dtype)
        del out
        for index, chunk in enumerate(plan.chunks, start=1):
            k, v = latent.expand(chunk.slots)
            part, part_lse = attention(q[chunk.queries], k, v, softmax_scale=softmax_scale, plan=chunk.plan)
            if scores is not None and score_plan is not None:
                collect_expanded(scores, q, k, score_plan, index)
            # keys and values go before the merge, so that the next gather never finds them alive
            del k, v
            merge_into(total[chunk.queries], lse[chunk.queries], part, part_lse)
            del part, part_lse
        out = total.to(q.dtype)
        del total
    if scores is not None and score_plan is not None:
        whole = lse if score_plan.full else None
        collect_latent(scores, q, kv_c, k_pe, kv_b_proj, whole, softmax_scale=softmax_scale, plan=score_plan)
    return out, lse if return_lse else None
