"""Which tokens of a request stay in the cache: what published methods score them by, and the choice within a budget.

The methods differ in what a softmax is taken over, how queries and heads are reduced, and in the pooling. Each name
says whose rule it is; ``w`` queries observe ``S`` keys, the last of which are their own:

=========================  ====================  ====================  ====================  =====================
function                   weights               over queries          over heads            pooled
=========================  ====================  ====================  ====================  =====================
snapkv_scores              softmax, all keys     sum                   none: a row a head    avg or max, 5
kvpress_snapkv_scores      softmax, all keys     mean                  mean of a KV group    avg, 5
sparse_vllm_snapkv_scores  of ``token_scores``   of ``token_scores``   of ``token_scores``   max, 1, of candidates
h2o_scores                 softmax, all keys     sum, of the batch too none: a row a head    no
sparse_vllm_h2o_step       of ``token_scores``   of ``token_scores``   of ``token_scores``   no
observed_attention_scores  softmax, all keys     mean of those that    mean of a KV group    no
                                                 see the key
tova_scores                softmax, all keys     the last query        mean of all           no
=========================  ====================  ====================  ====================  =====================
"""

import torch
from torch import Tensor

from .attention import masked_logits


def observation_weights(q: Tensor, k: Tensor, *, softmax_scale: float) -> Tensor:
    """Attention weights of the last queries of a request over all of its keys.

    ::

        p[h, t, s] = softmax_s(softmax_scale * q[t, h] . k[s, h // group]),  s <= S - w + t

    Args:
        q: ``[w, H, D]``, the last ``w`` queries.
        k: ``[S, H_kv, D]``, ``S >= w``.
        softmax_scale: Factor on the logits.

    Returns:
        ``[H, w, S]``, dtype of ``q``.
    """
    last_key = torch.arange(len(q), device=q.device) + len(k) - len(q)
    return torch.softmax(masked_logits(q, k, last_key, softmax_scale=softmax_scale), dim=-1).transpose(0, 1)


def pool_scores(scores: Tensor, *, kernel_size: int, pooling: str) -> Tensor:
    """Mean (``avg``) or maximum (``max``) of each score and its ``kernel_size // 2`` neighbours on either side.

    Past the ends lie zeros for the mean, which count, and ``-inf`` for the maximum.

    Args:
        scores: ``[..., S]``.
        kernel_size: Odd.
        pooling: ``avg`` or ``max``.

    Returns:
        ``[..., S]``.
    """
    if scores.shape[-1] == 0:
        return scores
    outside = 0.0 if pooling == "avg" else float("-inf")
    half = scores.new_full((*scores.shape[:-1], kernel_size // 2), outside)
    windows = torch.cat([half, scores, half], dim=-1).unfold(-1, kernel_size, 1)
    return windows.mean(-1) if pooling == "avg" else windows.amax(-1)


def snapkv_scores(weights: Tensor, *, kernel_size: int = 5, pooling: str = "avg") -> Tensor:
    """SnapKV: the summed weight of each key before the window, in each query head, pooled.

    Keep by ``token_selection`` with the heads as rows and the window as ``recent``.

    Args:
        weights: ``[H, w, S]``, of ``observation_weights``.
        kernel_size: Of the pooling, odd.
        pooling: ``avg`` or ``max``.

    Returns:
        ``[H, S - w]``.

    Source: arXiv 2404.14469 and FasterDecoding/SnapKV.
    """
    return pool_scores(_before_window(weights).sum(1), kernel_size=kernel_size, pooling=pooling)


def kvpress_snapkv_scores(weights: Tensor, *, num_kv_heads: int, kernel_size: int = 5) -> Tensor:
    """SnapKV as kvpress has it: the mean weight of each key before the window, pooled, then the mean of each KV group.

    Args:
        weights: ``[H, w, S]``, of ``observation_weights``.
        num_kv_heads: ``H_kv``, divides ``H``.
        kernel_size: Of the mean that pools, odd.

    Returns:
        ``[H_kv, S - w]``.
    """
    pooled = pool_scores(_before_window(weights).mean(1), kernel_size=kernel_size, pooling="avg")
    groups: Tensor = pooled.unflatten(0, (num_kv_heads, -1))
    return groups.mean(1)


def sparse_vllm_snapkv_scores(
    scores: Tensor, context_lens: Tensor, *, sink: int, recent: int, kernel_size: int = 1
) -> Tensor:
    """SnapKV as Sparse-vLLM has it: token scores, joined over steps by ``accumulate_max``, pooled among candidates.

    Args:
        scores: ``[N, S]``, of ``token_scores`` under either mode.
        context_lens: ``[N]``, integer.
        sink: Tokens at the start of a request that are no candidates.
        recent: Tokens at its end that are none.
        kernel_size: Of the maximum that pools, odd.

    Returns:
        ``[N, S]``, ``-inf`` outside the candidates.
    """
    pooled = torch.full_like(scores, float("-inf"))
    for request, context in enumerate(context_lens.tolist()):
        candidates = slice(sink, max(sink, context - recent))
        pooled[request, candidates] = pool_scores(scores[request, candidates], kernel_size=kernel_size, pooling="max")
    return pooled


def h2o_scores(weights: Tensor) -> Tensor:
    """H2O: the weight of each key, summed over all queries of a batch of requests of one length, in each head.

    Args:
        weights: ``[B, H, T, S]``.

    Returns:
        ``[H, S]``; joined over steps by ``accumulate_h2o``.

    Source: arXiv 2306.14048 and FMInference/H2O.
    """
    return weights.sum(dim=(0, 2))


def accumulate_h2o(total: Tensor, step: Tensor) -> Tensor:
    """Add what the keys of before had gathered; keys that are new to the step come after them.

    Args:
        total: ``[H, S]``, or compacted to the keys that were kept.
        step: ``[H, S + new]``.

    Returns:
        ``[H, S + new]``.
    """
    before = torch.zeros_like(step)
    before[:, : total.shape[1]] = total
    return step + before


def sparse_vllm_h2o_step(scores: Tensor, context_lens: Tensor, *, mode: str) -> Tensor:
    """What one step adds to H2O's total as Sparse-vLLM has it, before its weight: see ``accumulate_weighted``.

    Raw logits are first turned into weights by a softmax over the tokens of the request, unscaled.

    Args:
        scores: ``[N, S]``, of ``token_scores`` with every token a candidate.
        context_lens: ``[N]``, integer.
        mode: Of the scores, ``logits`` or ``probability``.

    Returns:
        ``[N, S]``, 0 past the context.
    """
    step = torch.zeros_like(scores)
    for request, context in enumerate(context_lens.tolist()):
        tokens = scores[request, :context]
        step[request, :context] = torch.softmax(tokens, dim=0) if mode == "logits" else tokens
    return step


def observed_attention_scores(weights: Tensor, *, num_kv_heads: int) -> Tensor:
    """Observed attention of kvpress: the mean weight that a key gets from queries that see it, then of each KV group.

    Args:
        weights: ``[H, T, S]``, of the last ``T`` queries.
        num_kv_heads: ``H_kv``, divides ``H``.

    Returns:
        ``[H_kv, S]``.
    """
    _, num_queries, num_keys = weights.shape
    # key s is seen by the queries at s and later, of which there are at most T
    observers = torch.arange(num_keys, 0, -1, device=weights.device).clamp(max=num_queries)
    groups: Tensor = (weights.sum(1) / observers).unflatten(0, (num_kv_heads, -1))
    return groups.mean(1)


def tova_scores(weights: Tensor) -> Tensor:
    """TOVA: the weight of each key for the last query, the mean over the heads; one row for all heads.

    Args:
        weights: ``[H, T, S]``.

    Returns:
        ``[S]``.

    Source: arXiv 2401.06104.
    """
    return weights[:, -1].mean(0)


def accumulate_max(total: Tensor, step: Tensor) -> Tensor:
    """Join the scores of the steps of a chunked prefill by their maximum, as Sparse-vLLM's SnapKV does.

    Exact for ``logits``. Of ``probability`` it is what that method uses, not the score of the whole window.
    """
    return torch.maximum(total, step)


def accumulate_weighted(total: Tensor, step: Tensor, num_observed: Tensor) -> Tensor:
    """Add the scores of a step, each request weighted by the queries that it observed, as Sparse-vLLM's H2O does.

    Args:
        total: ``[N, S]``.
        step: ``[N, S]``, 0 where nothing was observed.
        num_observed: ``[N]``, integer.
    """
    return total + num_observed[:, None] * step


def kvpress_budgets(context_lens: Tensor, *, compression_ratio: float) -> Tensor:
    """Tokens that are left of each context, a fraction ``1 - compression_ratio`` rounded down, and at least one.

    Args:
        context_lens: ``[N]``, integer, positive.
        compression_ratio: In ``[0, 1)``.

    Returns:
        ``[N]``, dtype of ``context_lens``.
    """
    kept = [max(1, int(context * (1 - compression_ratio))) for context in context_lens.tolist()]
    return torch.tensor(kept, dtype=context_lens.dtype, device=context_lens.device)


def compact_scores(scores: Tensor, kept: Tensor) -> Tensor:
    """The scores of the tokens that were kept, in their order, 0 where ``kept`` is -1.

    Args:
        scores: ``[N, S]``.
        kept: ``[N, C]``, of ``token_selection``.

    Returns:
        ``[N, C]``.
    """
    compacted = scores.new_zeros(kept.shape)
    for request, tokens in enumerate(kept.tolist()):
        for place, token in enumerate(tokens):
            if token >= 0:
                compacted[request, place] = scores[request, token]
    return compacted


def token_selection(
    scores: Tensor,
    *,
    context_lens: Tensor,
    budgets: Tensor,
    sink: int = 0,
    recent: int = 0,
    kernel_size: int = 1,
    pooling: str = "max",
) -> Tensor:
    """Choose the tokens of each request that stay: its first, its last, and the best scored between them.

    A request of ``c`` tokens within its budget keeps them all. Of any other the ``sink`` first and ``recent`` last
    stay; the rest of the budget goes to the candidates between with the highest score, which is pooled among them alone
    first. Of equal scores the earlier token is taken; ``-inf`` is a score like any other, below all.

    Args:
        scores: ``[N, S]``; what lies outside the candidates is not looked at, so ``S`` may be ``c - recent``.
        context_lens: ``[N]``, integer.
        budgets: ``[N]``, integer, tokens that each request may keep, at least ``sink + recent``.
        sink: Tokens at the start that always stay.
        recent: Tokens at the end that always stay.
        kernel_size: Of the pooling, odd.
        pooling: ``avg`` or ``max``, as in ``pool_scores``.

    Returns:
        ``[N, max(budgets)]``, int32, the positions that stay in ascending order, then -1.
    """
    kept = torch.full((len(budgets), int(budgets.max())), -1, dtype=torch.int32, device=scores.device)
    for request, (context, budget) in enumerate(zip(context_lens.tolist(), budgets.tolist(), strict=True)):
        chosen = list(range(context))
        if context > budget:
            candidates = range(sink, context - recent)
            pooled = pool_scores(scores[request, sink : context - recent], kernel_size=kernel_size, pooling=pooling)
            ranked = sorted(candidates, key=lambda token: (-pooled[token - sink].item(), token))
            best = sorted(ranked[: budget - sink - recent])
            chosen = [*range(sink), *best, *range(context - recent, context)]
        kept[request, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return kept


def _before_window(weights: Tensor) -> Tensor:
    """Weights on the keys that come before the ``w`` observing tokens' own."""
    return weights[..., : weights.shape[2] - weights.shape[1]]
