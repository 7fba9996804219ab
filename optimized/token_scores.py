"""How much an observation window of MLA prefill looks at each token of its request, alone or within a prefill."""

import torch
from torch import Tensor

from ._attention_checks import check_scale
from ._mla_prefill_latent import Latent, check_inputs
from ._token_scores_collect import check_scores, collect_expanded, collect_latent, reset
from ._token_scores_plan import IMPLEMENTATIONS, Mode, TokenScoresPlan, observation_ranges, plan_token_scores

__all__ = ["IMPLEMENTATIONS", "Mode", "TokenScoresPlan", "observation_ranges", "plan_token_scores", "token_scores"]


def token_scores(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    softmax_scale: float,
    plan: TokenScoresPlan,
    lse: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Score the tokens of each request by what its observed queries see of them; return ``[N, max_context]``.

    Over the observed queries ``t`` and the heads ``h`` that may look at token ``s``, candidates up to the query::

        logits       max_t max_h  q[t, h] . k[s, h]                                raw: no scale, no softmax
        probability  max_h mean_t softmax_s(softmax_scale * q[t, h] . k[s, h])     over the candidates alone

    This serves beside any attention, and gives the bits that ``mla_prefill`` collects on its way with the same plan:
    ``logits`` then costs a projection of its own, ``probability`` needs none, since its queries are absorbed. A token
    that no observed query may look at scores ``-inf`` or 0. The call never synchronises and can be captured.

    Where a window spans two steps, ``logits`` of the parts are joined by their maximum. Probabilities are not, as the
    mean over the whole window comes before the maximum over the heads: keep the observed rows of ``q`` (and of ``lse``)
    from both steps, and score them here as the current tokens of a step of their own.

    Args:
        q: ``[T, H, Dn + Dr]``, float16, bfloat16, float32 or float64; packed current tokens.
        kv_c: ``[slots, R]``, dtype of ``q``; the latent cache, row stride free. Unused rows are never read.
        k_pe: ``[slots, Dr]``, dtype of ``q``; the rotated rope cache, ``Dr`` may be 0.
        kv_b_proj: ``[H, Dn + Dv, R]``, dtype of ``q``; per head ``W_UK`` above ``W_UV``.
        softmax_scale: Factor on the logits under ``probability``.
        plan: Of ``plan_token_scores``.
        lse: ``[T, H]``, float32 (float64 for float64), natural log of the scaled logits, from the attention of the same
            queries to all tokens up to each. For ``probability`` with every token a candidate: one scan instead of two.
        scores: ``[N, max_context]``, float32 (float64 for float64), any strides: where the scores go, whatever it held
            before. A new tensor without.

    Returns:
        The scores.

    Raises:
        ValueError: If a shape or device disagrees with the plan, or ``lse`` is given where it is no denominator.
        TypeError: If a dtype disagrees with the plan.

    Precision: under ``logits`` keys are rounded to the dtype of ``q`` after a float32-accumulated projection; under
    ``probability`` the absorbed queries are instead. Products are summed in float32, and nothing else is rounded.
    Deterministic. Oracle: ``reference.token_scores.token_scores``. Source: the sparse scoring of SparseEngine.
    """
    check_inputs(q, kv_c, k_pe, kv_b_proj, plan.prefill)
    check_scale(softmax_scale)
    _check_lse(lse, plan)
    if scores is None:
        scores = torch.empty(plan.score_shape, dtype=plan.score_dtype, device=q.device)
    else:
        check_scores(scores, plan)
    reset(scores, plan)
    if plan.mode == "probability":
        collect_latent(scores, q, kv_c, k_pe, kv_b_proj, lse, softmax_scale=softmax_scale, plan=plan)
        return scores
    latent = Latent(kv_c=kv_c, k_pe=k_pe, weight=kv_b_proj.flatten(0, 1), shape=plan.prefill.shape)
    for index, slots in enumerate([plan.prefill.current_slots, *(chunk.slots for chunk in plan.prefill.chunks)]):
        if plan.passes[index].spans:
            # values are projected as well, for the bits of a projection depend on its shape
            k, _ = latent.expand(slots)
            collect_expanded(scores, q, k, plan, index)
            del k, _
    return scores


def _check_lse(lse: Tensor | None, plan: TokenScoresPlan) -> None:
    """Refuse denominators that are not those of the plan."""
    if lse is None:
        return
    if plan.mode != "probability" or not plan.full:
        raise ValueError(
            "lse must be None unless probabilities are over every token up to a query, got one under "
            f"{plan.mode} {'with' if plan.full else 'without'} every token a candidate"
        )
    size = plan.prefill.num_tokens, plan.prefill.shape.num_heads
    if tuple(lse.shape) != size:
        raise ValueError(f"lse must have the planned shape {size}, got {tuple(lse.shape)}")
    if lse.dtype != plan.score_dtype:
        raise TypeError(f"lse must have the planned dtype {plan.score_dtype}, got {lse.dtype}")
    if lse.device != plan.prefill.device:
        raise ValueError(f"lse must be on the planned device {plan.prefill.device}, got {lse.device}")
