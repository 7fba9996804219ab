"""What published methods score tokens by. Part of ``optimized/token_selection.py``; call it from there.

What each method takes a softmax over, and how it reduces queries and heads, is tabulated in
``reference/token_selection.py``; functions of the same name are the same function. None of them looks at one request,
or one head, when it scores another, except that H2O sums over its batch.
"""

from typing import Literal

import torch
from torch import Tensor

from ._token_selection_checks import (
    check_counts,
    check_finite,
    check_kernel_size,
    check_rows,
    check_same,
    check_weights,
)

Pooling = Literal["avg", "max"]

NEVER = float("-inf")


def observation_weights(q: Tensor, k: Tensor, *, softmax_scale: float) -> Tensor:
    """Attention weights of the last queries of a request over all of its keys.

    ::

        p[h, t, s] = softmax_s(softmax_scale * q[t, h] . k[s, h // group]),  s <= S - w + t

    Args:
        q: ``[w, H, D]``, the last ``w`` queries.
        k: ``[S, H_kv, D]``, dtype of ``q``; ``S >= w``, and ``H`` is a multiple of ``H_kv``.
        softmax_scale: Factor on the logits.

    Returns:
        ``[H, w, S]``, float32 (float64 for float64).

    Raises:
        ValueError: If the shapes disagree or the window is longer than the prompt.
        TypeError: If the dtypes disagree.

    Precision: float32 throughout; unlike the originals nothing is rounded to the dtype of the model.
    Oracle: ``reference.token_selection.observation_weights``.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q and k must have shapes [w, H, D] and [S, H_kv, D], H a multiple of H_kv, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    if q.dtype != k.dtype or not q.is_floating_point():
        raise TypeError(f"q and k must have one floating dtype, got {q.dtype} and {k.dtype}")
    if len(q) > len(k):
        raise ValueError(f"q must hold at most the {len(k)} queries of the prompt, got a window of {len(q)}")
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    logits = softmax_scale * torch.einsum("tkgd,skd->kgts", grouped, k.to(wide)).flatten(0, 1)
    last_key = torch.arange(len(q), device=q.device) + (len(k) - len(q))
    future = torch.arange(len(k), device=q.device) > last_key[:, None]
    return torch.softmax(logits.masked_fill(future, NEVER), dim=-1)


def pool_scores(scores: Tensor, *, kernel_size: int, pooling: Pooling) -> Tensor:
    """Mean (``avg``) or maximum (``max``) of each score and its ``kernel_size // 2`` neighbours on either side.

    Past the ends lie zeros for the mean, which count, and ``-inf`` for the maximum.

    Args:
        scores: ``[..., S]``, floating.
        kernel_size: Odd; an even one has no middle.
        pooling: ``avg`` or ``max``.

    Returns:
        ``[..., S]``.

    Raises:
        ValueError: If the kernel is even or not positive, or the pooling is neither.
        TypeError: If the kernel is no int.
    """
    check_kernel_size(kernel_size)
    if pooling not in ("avg", "max"):
        raise ValueError(f"pooling must be 'avg' or 'max', got {pooling!r}")
    if kernel_size == 1 or scores.shape[-1] == 0:
        return scores
    rows = scores.reshape(1, -1, scores.shape[-1])
    pool = torch.nn.functional.avg_pool1d if pooling == "avg" else torch.nn.functional.max_pool1d
    return pool(rows, kernel_size, stride=1, padding=kernel_size // 2).reshape(scores.shape)


def snapkv_scores(weights: Tensor, *, kernel_size: int = 5, pooling: Pooling = "avg") -> Tensor:
    """SnapKV: the summed weight of each key before the window, in each query head, pooled.

    Keep by ``token_selection`` with the heads as rows and the window as ``recent``.

    Args:
        weights: ``[H, w, S]``, of ``observation_weights``.
        kernel_size: Of the pooling, odd.
        pooling: ``avg`` or ``max``.

    Returns:
        ``[H, S - w]``.
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
    return _group_means(pooled, num_kv_heads)


def sparse_vllm_snapkv_scores(
    scores: Tensor, context_lens: Tensor, *, sink: int, recent: int, kernel_size: int = 1
) -> Tensor:
    """SnapKV as Sparse-vLLM has it: token scores, joined over steps by ``accumulate_max``, pooled among candidates.

    Args:
        scores: ``[N, S]``, of ``token_scores`` under either mode.
        context_lens: ``[N]``, int32 or int64.
        sink: Tokens at the start of a request that are no candidates.
        recent: Tokens at its end that are none.
        kernel_size: Of the maximum that pools, odd.

    Returns:
        ``[N, S]``, ``-inf`` outside the candidates.
    """
    check_rows(scores, context_lens)
    check_counts(sink=sink, recent=recent)
    candidate = candidates_of(scores.shape[1], context_lens.to(scores.device), sink, recent)
    return pool_candidates(scores, candidate, kernel_size, "max").masked_fill(~candidate, NEVER)


def h2o_scores(weights: Tensor) -> Tensor:
    """H2O: the weight of each key, summed over all queries of a batch of requests of one length, in each head.

    Args:
        weights: ``[B, H, T, S]``.

    Returns:
        ``[H, S]``; joined over steps by ``accumulate_h2o``.
    """
    if weights.dim() != 4:
        raise ValueError(f"weights must have shape [B, H, T, S], got {tuple(weights.shape)}")
    return weights.sum(dim=(0, 2))


def accumulate_h2o(total: Tensor, step: Tensor) -> Tensor:
    """Add what the keys of before had gathered; keys that are new to the step come after them.

    Args:
        total: ``[H, S]``, or compacted to the keys that were kept.
        step: ``[H, S + new]``.

    Returns:
        ``[H, S + new]``.
    """
    if total.dim() != 2 or step.dim() != 2 or len(total) != len(step) or total.shape[1] > step.shape[1]:
        raise ValueError(
            f"total and step must have shapes [H, S] and [H, S + new], got {tuple(total.shape)} and {tuple(step.shape)}"
        )
    return step + torch.nn.functional.pad(total, (0, step.shape[1] - total.shape[1]))


def sparse_vllm_h2o_step(scores: Tensor, context_lens: Tensor, *, mode: Literal["logits", "probability"]) -> Tensor:
    """What one step adds to H2O's total as Sparse-vLLM has it, before its weight: see ``accumulate_weighted``.

    Raw logits are first turned into weights by a softmax over the tokens of the request, unscaled. Reads values back to
    the host, to refuse what no softmax can digest.

    Args:
        scores: ``[N, S]``, of ``token_scores`` with every token a candidate.
        context_lens: ``[N]``, int32 or int64.
        mode: Of the scores, ``logits`` or ``probability``.

    Returns:
        ``[N, S]``, 0 past the context.

    Raises:
        ValueError: If a score within the context is NaN or ``+inf``, or a request has no finite one.
    """
    if mode not in ("logits", "probability"):
        raise ValueError(f"mode must be 'logits' or 'probability', got {mode!r}")
    check_rows(scores, context_lens)
    real = torch.arange(scores.shape[1], device=scores.device) < context_lens.to(scores.device)[:, None]
    check_finite(scores, real, needed=True)
    if mode == "probability":
        return scores.masked_fill(~real, 0.0)
    return torch.softmax(scores.masked_fill(~real, NEVER), dim=1)


def observed_attention_scores(weights: Tensor, *, num_kv_heads: int) -> Tensor:
    """Observed attention of kvpress: the mean weight that a key gets from queries that see it, then of each KV group.

    Args:
        weights: ``[H, T, S]``, of the last ``T`` queries.
        num_kv_heads: ``H_kv``, divides ``H``.

    Returns:
        ``[H_kv, S]``.
    """
    check_weights(weights)
    observers = torch.arange(weights.shape[2], 0, -1, device=weights.device).clamp(max=weights.shape[1])
    return _group_means(weights.sum(1) / observers, num_kv_heads)


def tova_scores(weights: Tensor) -> Tensor:
    """TOVA: the weight of each key for the last query, the mean over the heads; one row for all heads.

    Args:
        weights: ``[H, T, S]``.

    Returns:
        ``[S]``.
    """
    check_weights(weights)
    return weights[:, -1].mean(0)


def accumulate_max(total: Tensor, step: Tensor) -> Tensor:
    """Join the scores of the steps of a chunked prefill by their maximum, as Sparse-vLLM's SnapKV does.

    Exact for ``logits``. Of ``probability`` it is what that method uses, not the score of the whole window.
    """
    check_same(total, step)
    return torch.maximum(total, step)


def accumulate_weighted(total: Tensor, step: Tensor, num_observed: Tensor) -> Tensor:
    """Add the scores of a step, each request weighted by the queries that it observed, as Sparse-vLLM's H2O does.

    Args:
        total: ``[N, S]``.
        step: ``[N, S]``, 0 where nothing was observed.
        num_observed: ``[N]``, int32 or int64.
    """
    check_same(total, step)
    check_rows(total, num_observed, name="num_observed")
    return total + num_observed.to(total.device)[:, None] * step


def kvpress_budgets(context_lens: Tensor, *, compression_ratio: float) -> Tensor:
    """Tokens that are left of each context, a fraction ``1 - compression_ratio`` rounded down, and at least one.

    Args:
        context_lens: ``[N]``, int32 or int64, positive.
        compression_ratio: In ``[0, 1)``.

    Returns:
        ``[N]``, dtype and device of ``context_lens``.
    """
    if not 0 <= compression_ratio < 1:
        raise ValueError(f"compression_ratio must lie in [0, 1), got {compression_ratio}")
    kept = (context_lens.double() * (1 - compression_ratio)).to(context_lens.dtype)
    return kept.clamp(min=1)


def compact_scores(scores: Tensor, kept: Tensor) -> Tensor:
    """The scores of the tokens that were kept, in their order, 0 where ``kept`` is -1.

    Args:
        scores: ``[N, S]``.
        kept: ``[N, C]``, of ``token_selection``.

    Returns:
        ``[N, C]``.
    """
    return scores.gather(1, kept.clamp(min=0).long()).masked_fill(kept < 0, 0.0)


def candidates_of(width: int, context_lens: Tensor, sink: int, recent: int) -> Tensor:
    """``[N, width]``, True for tokens that may be chosen or not."""
    positions = torch.arange(width, device=context_lens.device)
    return (positions >= sink) & (positions < context_lens[:, None] - recent)


def pool_candidates(scores: Tensor, candidate: Tensor, kernel_size: int, pooling: Pooling) -> Tensor:
    """Pool as if the candidates of a request, which lie side by side, were all that there is."""
    outside = 0.0 if pooling == "avg" else NEVER
    return pool_scores(scores.masked_fill(~candidate, outside), kernel_size=kernel_size, pooling=pooling)


def _before_window(weights: Tensor) -> Tensor:
    """Weights on the keys that come before the ``w`` observing tokens' own."""
    check_weights(weights)
    return weights[..., : weights.shape[2] - weights.shape[1]]


def _group_means(scores: Tensor, num_kv_heads: int) -> Tensor:
    """The mean of each KV group of ``[H, S]``."""
    if type(num_kv_heads) is not int or num_kv_heads < 1 or len(scores) % num_kv_heads:
        raise ValueError(f"num_kv_heads must be a divisor of {len(scores)} heads, got {num_kv_heads!r}")
    groups: Tensor = scores.unflatten(0, (num_kv_heads, -1))
    return groups.mean(1)
