"""Which tokens stay in the cache: the choice within a budget, all requests at once, and scores of published methods."""

import torch
from torch import Tensor

from ._token_selection_checks import check_choice, check_finite
from ._token_selection_methods import (
    NEVER,
    Pooling,
    accumulate_h2o,
    accumulate_max,
    accumulate_weighted,
    candidates_of,
    compact_scores,
    h2o_scores,
    kvpress_budgets,
    kvpress_snapkv_scores,
    observation_weights,
    observed_attention_scores,
    pool_candidates,
    pool_scores,
    snapkv_scores,
    sparse_vllm_h2o_step,
    sparse_vllm_snapkv_scores,
    tova_scores,
)

__all__ = [
    "Pooling",
    "accumulate_h2o",
    "accumulate_max",
    "accumulate_weighted",
    "compact_scores",
    "h2o_scores",
    "kvpress_budgets",
    "kvpress_snapkv_scores",
    "observation_weights",
    "observed_attention_scores",
    "pool_scores",
    "snapkv_scores",
    "sparse_vllm_h2o_step",
    "sparse_vllm_snapkv_scores",
    "token_selection",
    "tova_scores",
]

_PAST_ALL = torch.iinfo(torch.int32).max


def token_selection(
    scores: Tensor,
    *,
    context_lens: Tensor,
    budgets: Tensor,
    sink: int = 0,
    recent: int = 0,
    kernel_size: int = 1,
    pooling: Pooling = "max",
) -> Tensor:
    """Choose the tokens of each request that stay: its first, its last, and the best scored between them.

    A request of ``c`` tokens within its budget keeps them all. Of any other the ``sink`` first and ``recent`` last
    stay; the rest of the budget goes to the candidates between with the highest score, which is pooled among them alone
    first. Of equal scores the earlier token is taken; ``-inf`` is a score like any other, below all.

    Reads lengths, budgets and the check of the scores back to the host, so it synchronises.

    Args:
        scores: ``[N, S]``, floating, any strides; what lies outside the candidates is not looked at, so ``S`` may be
            ``c - recent``.
        context_lens: ``[N]``, int32 or int64.
        budgets: ``[N]``, int32 or int64, tokens that each request may keep, at least ``sink + recent``.
        sink: Tokens at the start that always stay.
        recent: Tokens at the end that always stay.
        kernel_size: Of the pooling, odd.
        pooling: ``avg`` or ``max``, as in ``pool_scores``.

    Returns:
        ``[N, max(budgets)]``, int32, the positions that stay in ascending order, then -1.

    Raises:
        ValueError: If a budget is smaller than what always stays, the kernel is even, a candidate scores NaN or
            ``+inf``, or a shape or value is out of range.
        TypeError: If an argument has the wrong type or dtype.

    Precision: pooled in the dtype of the scores; compared without rounding. Oracle:
    ``reference.token_selection.token_selection``.
    """
    contexts, capacity = check_choice(scores, context_lens, budgets, sink, recent)
    length = max(contexts, default=0)
    scores = torch.nn.functional.pad(scores, (0, max(0, length - scores.shape[1])))[:, :length]
    context_lens, budgets = (tensor.to(scores.device)[:, None] for tensor in (context_lens, budgets))
    candidate = candidates_of(length, context_lens[:, 0], sink, recent)
    check_finite(scores, candidate, needed=False)
    pooled = pool_candidates(scores, candidate, kernel_size, pooling)

    # by class and then by score: what always stays, candidates, what lies past the context; both sorts are stable, so
    # that of equal tokens the earlier comes first
    positions = torch.arange(length, device=scores.device)
    rank = torch.where(positions >= context_lens, 2, candidate.long())
    order = pooled.masked_fill(~candidate, NEVER).sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, rank.gather(1, order).sort(dim=1, stable=True).indices)
    real = torch.arange(length, device=scores.device) < torch.minimum(budgets, context_lens)
    kept = order.int().masked_fill(~real, _PAST_ALL).sort(dim=1).values[:, :capacity]
    kept = torch.nn.functional.pad(kept, (0, capacity - kept.shape[1]), value=_PAST_ALL)
    return kept.masked_fill(kept == _PAST_ALL, -1)
