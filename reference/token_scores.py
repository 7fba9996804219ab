"""How much the queries of an observation window look at each earlier token of their request: one row of scores each."""

import torch
from torch import Tensor

from .attention import masked_logits
from .mla_prefill import expand_latent, requests

# what a token scores that no observed query may look at
IDENTITIES = {"logits": float("-inf"), "probability": 0.0}


def eligible_logits(
    q: Tensor, k: Tensor, positions: Tensor, candidates: tuple[int, int], *, softmax_scale: float
) -> Tensor:
    """Logits of the observed queries of one request, ``-inf`` outside its candidates and in a query's future.

    ::

        z[t, h, s] = softmax_scale * q[t, h] . k[s, h]    if start <= s < stop and s <= positions[t]
        z[t, h, s] = -inf                                 otherwise

    Args:
        q: ``[w, H, Dq]``, the observed queries.
        k: ``[S, H, Dq]``, keys of all tokens of the request.
        positions: ``[w]``, integer, position of each observed query among those tokens.
        candidates: ``(start, stop)``, half open, the tokens that may be scored.
        softmax_scale: Factor on the logits.

    Returns:
        ``[w, H, S]``, dtype of ``q``.
    """
    tokens = torch.arange(k.shape[0], device=q.device)
    outside = (tokens < candidates[0]) | (tokens >= candidates[1])
    return masked_logits(q, k, positions, softmax_scale=softmax_scale).masked_fill(outside, float("-inf"))


def highest_logit(logits: Tensor) -> Tensor:
    """``[S]``, the highest of ``[w, H, S]`` over queries and heads."""
    return logits.amax(dim=(0, 1))


def mean_probability(logits: Tensor) -> Tensor:
    """The mean weight over the queries, then its maximum over the heads.

    ::

        p[t, h, s] = exp(z[t, h, s] - ln sum_j exp(z[t, h, j]))
        score[s]   = max_h (1 / w) sum_t p[t, h, s]

    A query that may look at nothing adds nothing and counts in ``w`` all the same.

    Args:
        logits: ``[w, H, S]``, ``-inf`` where not eligible; the softmax is over what is left.

    Returns:
        ``[S]``.
    """
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    weights = torch.exp(logits - lse).masked_fill(lse == float("-inf"), 0.0)
    return weights.mean(dim=0).amax(dim=0)


def token_scores(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    mode: str,
    softmax_scale: float,
    cu_seqlens: Tensor,
    slot_table: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    query_ranges: Tensor,
    candidate_start: int = 0,
    recent_keep_tokens: int = 0,
    candidate_ranges: Tensor | None = None,
) -> Tensor:
    """Score the tokens of each request by what a range of its current queries sees of them.

    Of request ``r`` with ``c`` tokens, the queries at positions ``query_ranges[r]`` are observed, and the tokens
    ``candidate_start .. c - recent_keep_tokens - 1``, or ``candidate_ranges[r]``, are candidates. A query may look at
    the candidates up to itself; what a token scores is, over the observed queries ``t`` and heads ``h`` that may look
    at it::

        logits       max_t max_h  q[t, h] . k[s, h]                                raw: no scale, no softmax
        probability  max_h mean_t softmax_s(softmax_scale * q[t, h] . k[s, h])     over the candidates alone

    The mean counts every observed query. A token that none may look at scores ``-inf`` or 0, as do columns past the
    context and requests whose range is ``(0, 0)``.

    Args:
        q: ``[T, H, Dn + Dr]``, packed current tokens; the part without RoPE first, then the rotated part.
        kv_c: ``[slots, R]``, the latent cache; rows that no request owns are never read.
        k_pe: ``[slots, Dr]``, the rope cache; ``Dr`` may be 0.
        kv_b_proj: ``[H, Dn + Dv, R]``, ``W_UK`` above ``W_UV`` per head.
        mode: ``logits`` or ``probability``.
        softmax_scale: Factor on the logits under ``probability``.
        cu_seqlens: ``[N + 1]``, integer; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``, its last tokens.
        slot_table: ``[rows, max_context]``, integer, token position to slot; -1 where unused.
        request_rows: ``[N]``, integer, the row of ``slot_table`` of each request.
        context_lens: ``[N]``, integer, tokens of each request, the current ones included.
        query_ranges: ``[N, 2]``, integer, half-open ranges of positions among the current tokens; ``(0, 0)`` for none.
        candidate_start: Tokens at the start of each request that are no candidates, such as attention sinks.
        recent_keep_tokens: Tokens at its end that are none.
        candidate_ranges: ``[N, 2]``, integer, half-open ranges of positions instead of the last two.

    Returns:
        ``[N, max_context]``, dtype of ``q``.

    Source: the observation window of SnapKV (arXiv 2404.14469), as Sparse-vLLM scores MLA prefill.
    """
    d_nope = q.shape[-1] - k_pe.shape[-1]
    w_uk, w_uv = kv_b_proj[:, :d_nope], kv_b_proj[:, d_nope:]
    scores = q.new_full((len(context_lens), slot_table.shape[1]), IDENTITIES[mode])
    parts = requests(cu_seqlens, slot_table, request_rows, context_lens)
    for request, (queries, slots, positions) in enumerate(parts):
        start, stop = query_ranges[request].tolist()
        if start == stop:
            continue
        observed = (positions >= start) & (positions < stop)
        if candidate_ranges is None:
            candidates = candidate_start, len(slots) - recent_keep_tokens
        else:
            candidates = int(candidate_ranges[request, 0]), int(candidate_ranges[request, 1])
        k, _ = expand_latent(kv_c[slots], k_pe[slots], w_uk, w_uv)
        scale = softmax_scale if mode == "probability" else 1.0
        logits = eligible_logits(q[queries][observed], k, positions[observed], candidates, softmax_scale=scale)
        reduce = mean_probability if mode == "probability" else highest_logit
        scores[request, : len(slots)] = reduce(logits)
    return scores
