"""Collecting scores while keys are at hand: the steps that a prefill and the stand-alone ``token_scores`` share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._mla_prefill_plan import MlaPrefillPlan
from ._token_scores_plan import IDENTITIES, TokenScoresPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScan:
    """The observed queries in absorbed form, and the cache that they scan.

    Attributes:
        absorbed: ``[w, H, R]``, ``W_UK[h]^T q_nope[h]`` in the dtype of ``q``, any strides.
        rope: ``[w, H, Dr]``.
        kv_c: ``[slots, R]``.
        k_pe: ``[slots, Dr]``.
        slots: ``[sum of context_lens]``, of the tokens of all requests.
        softmax_scale: Factor on the logits.
        block_size: Most keys whose logits may be held at once.
    """

    absorbed: Tensor
    rope: Tensor
    kv_c: Tensor
    k_pe: Tensor
    slots: Tensor
    softmax_scale: float
    block_size: int


def check_scores(scores: Tensor, plan: TokenScoresPlan) -> None:
    """Refuse a buffer that does not hold the planned scores; reads no value."""
    if tuple(scores.shape) != plan.score_shape:
        raise ValueError(f"scores must have the planned shape {plan.score_shape}, got {tuple(scores.shape)}")
    if scores.dtype != plan.score_dtype:
        raise TypeError(f"scores must have the planned dtype {plan.score_dtype}, got {scores.dtype}")
    if scores.device != plan.prefill.device:
        raise ValueError(f"scores must be on the planned device {plan.prefill.device}, got {scores.device}")
    if any(stride == 0 and size > 1 for size, stride in zip(scores.shape, scores.stride(), strict=True)):
        raise ValueError(f"scores must not overlap itself, got strides {scores.stride()}")


def check_fused(scores: Tensor | None, score_plan: TokenScoresPlan | None, plan: MlaPrefillPlan) -> None:
    """Refuse a buffer without its plan, a plan without its buffer, and the plan of another step."""
    if scores is None and score_plan is None:
        return
    if scores is None or score_plan is None:
        given = "scores" if score_plan is None else "score_plan"
        raise ValueError(f"scores and score_plan must come together, got {given} alone")
    if score_plan.prefill is not plan:
        raise ValueError("score_plan must be made from plan, got one that was made from another")
    check_scores(scores, score_plan)


def reset(scores: Tensor, plan: TokenScoresPlan) -> None:
    """Give every token the score of one that no query has looked at, whatever the buffer holds."""
    scores.fill_(IDENTITIES[plan.mode])


def collect_expanded(scores: Tensor, q: Tensor, k: Tensor, plan: TokenScoresPlan, index: int) -> None:
    """Take the keys of one pass into the scores, if they are raw logits.

    Args:
        scores: ``[N, max_context]``; raised.
        q: ``[T, H, Dq]``.
        k: ``[n, H, Dq]``, expanded keys.
        plan: Of the scores.
        index: Of the pass: 0 for the current tokens, then one for each history chunk.
    """
    if plan.mode != "logits":
        return
    score_pass = plan.passes[index]
    if score_pass.spans:
        plan.module.raise_to_logits(scores, q, k, score_pass.spans, score_pass.prepared)


def collect_latent(
    scores: Tensor,
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    lse: Tensor | None,
    *,
    softmax_scale: float,
    plan: TokenScoresPlan,
) -> None:
    """Scan the latent rows for the scores, if they are probabilities.

    Args:
        scores: ``[N, max_context]``; written where an observed query may look.
        q: ``[T, H, Dq]``.
        kv_c: ``[slots, R]``.
        k_pe: ``[slots, Dr]``.
        kv_b_proj: ``[H, Dn + Dv, R]``.
        lse: ``[T, H]``, the denominators of all queries, natural log; None to scan for them first.
        softmax_scale: Factor on the logits.
        plan: Of the scores.
    """
    if plan.observed_rows is None or not plan.passes[0].spans:
        return
    shape, score_pass = plan.prefill.shape, plan.passes[0]
    observed = q.index_select(0, plan.observed_rows)
    q_nope, q_rope = observed.split([shape.d_nope, shape.d_rope], dim=-1)
    scan = LatentScan(
        absorbed=torch.bmm(q_nope.transpose(0, 1), kv_b_proj[:, : shape.d_nope]).transpose(0, 1),
        rope=q_rope,
        kv_c=kv_c,
        k_pe=k_pe,
        slots=plan.prefill.slots,
        softmax_scale=softmax_scale,
        block_size=plan.prefill.history_chunk_size,
    )
    if lse is None:
        denominators = plan.module.denominators(scan, score_pass.spans, score_pass.prepared)
    else:
        denominators = lse.index_select(0, plan.observed_rows)
    plan.module.write_probabilities(scores, scan, denominators, score_pass.spans, score_pass.prepared)
