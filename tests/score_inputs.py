"""Small cases of token scores: MLA inputs with observation windows, the oracle on them, and the errors allowed."""

import math
from typing import Any

import torch
from builders import MLA_INDICES, MLA_TENSORS, in_dtype, mla_case, planned
from torch import Tensor

from assay.harness.case import Case
from assay.optimized.mla_prefill import MlaPrefillPlan, mla_prefill
from assay.optimized.token_scores import TokenScoresPlan, plan_token_scores
from assay.optimized.token_scores import token_scores as twin
from assay.reference.attention import masked_logits
from assay.reference.mla_prefill import expand_latent, requests
from assay.reference.token_scores import IDENTITIES, eligible_logits, token_scores

INF = math.inf
ROUNDOFF = {torch.float64: 2.0**-52, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# four requests: a history of several chunks, none, a single token after a history, a prompt of one token
QUERIES, CONTEXTS = [9, 5, 1, 1], [60, 5, 23, 1]
WINDOW = torch.tensor([[56, 60], [0, 5], [22, 23], [0, 1]])

# name -> ranges and candidates
REQUESTS: dict[str, dict[str, Any]] = {
    "full": {},
    "all queries": {"query_ranges": torch.tensor([[51, 60], [0, 5], [22, 23], [0, 1]])},
    "some unobserved": {"query_ranges": torch.tensor([[0, 0], [1, 4], [22, 23], [0, 0]])},
    "middle": {"query_ranges": torch.tensor([[53, 57], [2, 3], [0, 0], [0, 1]])},
    "sink": {"candidate_start": 3},
    "recent": {"recent_keep_tokens": 2},
    "sink and recent": {"candidate_start": 4, "recent_keep_tokens": 6},
    "no candidates": {"candidate_start": 40, "recent_keep_tokens": 40},
    # the third is empty, the last past what its query may see
    "ranges": {"candidate_ranges": torch.tensor([[17, 58], [4, 5], [5, 5], [0, 0]])},
    "future candidates": {
        "query_ranges": torch.tensor([[51, 60], [0, 5], [22, 23], [0, 1]]),
        "candidate_ranges": torch.tensor([[55, 58], [2, 4], [0, 23], [0, 1]]),
    },
}


def score_case(**sizes: Any) -> Case:
    """The four requests, in three heads."""
    small: dict[str, Any] = {"query_lens": QUERIES, "context_lens": CONTEXTS, "num_heads": 3, "history_chunk_size": 16}
    return mla_case(**small | sizes)


def request_of(name: str) -> dict[str, Any]:
    """The ranges and candidates of that name."""
    return {"query_ranges": WINDOW} | REQUESTS[name]


def oracle_scores(given: dict[str, Any], mode: str, request: dict[str, Any]) -> Tensor:
    """The oracle in float64 on the stored inputs."""
    named = {name: value for name, value in in_dtype(given, torch.float64).items() if name != "history_chunk_size"}
    return token_scores(**named, mode=mode, **request)


def plans(
    case: Case, given: dict[str, Any], mode: Any, request: dict[str, Any], *, implementation: str = "torch", **step: Any
) -> tuple[MlaPrefillPlan, TokenScoresPlan]:
    """A plan of the step and one of its scores."""
    plan = planned(case, given, **step)
    return plan, plan_token_scores(plan, mode=mode, implementation=implementation, **request)


def fused(
    given: dict[str, Any], plan: MlaPrefillPlan, score_plan: TokenScoresPlan, scores: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, scores)`` of one prefill with scores, in a buffer full of ones unless one is given."""
    if scores is None:
        scores = torch.ones(score_plan.score_shape, dtype=score_plan.score_dtype, device=plan.device)
    out, lse = mla_prefill(
        *(given[name] for name in MLA_TENSORS),
        softmax_scale=given["softmax_scale"],
        plan=plan,
        scores=scores,
        score_plan=score_plan,
    )
    assert lse is not None
    return out, lse, scores


def alone(given: dict[str, Any], plan: TokenScoresPlan, **options: Any) -> Tensor:
    """The twin beside any attention."""
    return twin(*(given[name] for name in MLA_TENSORS), softmax_scale=given["softmax_scale"], plan=plan, **options)


def score_bounds(given: dict[str, Any], mode: str, request: dict[str, Any]) -> Tensor:
    """Largest error of each score that the declared precision allows, by the rules of ``docs/method.md``.

    Keys, or for ``probability`` absorbed queries, are rounded once to the dtype of ``q``; all sums are in float32. The
    deterministic form of the bound of a sum is taken. A maximum errs no more than the worst of its candidates.
    """
    wide, dtype = in_dtype(given, torch.float64), given["q"].dtype
    u, u_sum = ROUNDOFF[dtype], 2.0**-53 if dtype == torch.float64 else 2.0**-24
    d_nope = wide["q"].shape[-1] - wide["k_pe"].shape[-1]
    w_uk, w_uv = wide["kv_b_proj"][:, :d_nope], wide["kv_b_proj"][:, d_nope:]
    bounds = torch.zeros(len(wide["context_lens"]), wide["slot_table"].shape[1], dtype=torch.float64)
    bounds = bounds.to(wide["q"].device)
    for index, (queries, slots, positions) in enumerate(requests(*(given[name] for name in MLA_INDICES))):
        start, stop = request["query_ranges"][index].tolist()
        if start == stop:
            continue
        seen = ((positions >= start) & (positions < stop)).nonzero()[:, 0]
        ranges = request.get("candidate_ranges")
        outer = request.get("candidate_start", 0), len(slots) - request.get("recent_keep_tokens", 0)
        candidates = outer if ranges is None else tuple(ranges[index].tolist())
        q, (c, r) = wide["q"][queries][seen], (wide[name][slots] for name in ("kv_c", "k_pe"))
        lengths = torch.einsum("thd,hdr,sr->ths", q[..., :d_nope].abs(), w_uk.abs(), c.abs())
        rope = torch.einsum("thd,sd->ths", q[..., d_nope:].abs(), r.abs())
        k, _ = expand_latent(c, r, w_uk, w_uv)
        depth = sum(given["kv_b_proj"].shape[1:]) + q.shape[-1]
        if mode == "logits":
            rounded = torch.einsum("thd,shd->ths", q[..., :d_nope].abs(), k[..., :d_nope].abs())
        else:
            absorbed = torch.einsum("thd,hdr->thr", q[..., :d_nope], w_uk)
            rounded = torch.einsum("thr,sr->ths", absorbed.abs(), c.abs())
        eta = u * rounded + depth * u_sum * (lengths + rope)
        reach = eligible_logits(q, k, positions[seen], candidates, softmax_scale=1.0) > -INF
        eta = eta.masked_fill(~reach, 0.0)
        if mode == "logits":
            bounds[index, : len(slots)] = eta.amax((0, 1))
            continue
        scale = abs(given["softmax_scale"])
        z = eligible_logits(q, k, positions[seen], candidates, softmax_scale=given["softmax_scale"])
        lse = torch.logsumexp(z, -1, keepdim=True)
        p = torch.exp(z - lse).nan_to_num(0.0)
        # the denominator errs by the worst logit that it sums; a full one comes from attention, whose keys are rounded
        causal = masked_logits(q, k, positions[seen], softmax_scale=1.0) > -INF
        keys = torch.einsum("thd,shd->ths", q[..., :d_nope].abs(), k[..., :d_nope].abs())
        eta_all = (u * torch.maximum(keys, rounded) + depth * u_sum * (lengths + rope)).masked_fill(~causal, 0.0)
        height = z.masked_fill(z == -INF, 0.0).abs().amax(-1, keepdim=True) + lse.abs().nan_to_num(0.0, posinf=0.0)
        sums = 8 * len(slots) * u_sum + 8 * u_sum * height + 2.0**-20
        error = torch.expm1(scale * (eta + eta_all.amax(-1, keepdim=True)) + sums)
        bounds[index, : len(slots)] = (p * error).mean(0).amax(0)
    return bounds


def check(scores: Tensor, given: dict[str, Any], mode: str, request: dict[str, Any]) -> None:
    """Where nothing may look exactly the identity, everything else finite and within its bound."""
    expected = oracle_scores(given, mode, request)
    assert scores.shape == expected.shape
    assert scores.dtype == torch.promote_types(given["q"].dtype, torch.float32)
    blind = expected == IDENTITIES[mode]
    assert torch.equal(scores == IDENTITIES[mode], blind)
    error = torch.where(blind, 0.0, (scores.double() - expected).abs())
    assert torch.isfinite(error).all()
    excess = error / score_bounds(given, mode, request).clamp(min=2.0**-140)
    assert excess.max() <= 1.0, f"{excess.max():.3g} of the bound at {divmod(int(excess.argmax()), scores.shape[1])}"
