"""The lightning indexer of DeepSeek Sparse Attention: a score for each query and key, and the best keys of a query."""

import torch
from torch import Tensor


def index_scores(q: Tensor, k: Tensor, weights: Tensor, last_key: Tensor) -> Tensor:
    """Score the keys of one request, ``-inf`` where a query may not look.

    For query ``t`` and key ``s``, over the index heads ``h``::

        score[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s])    if s <= last_key[t]
        score[t, s] = -inf                                        otherwise

    A weight may be negative, and so may a score.

    Args:
        q: ``[T, H, D]``, floating, index queries.
        k: ``[S, D]``, dtype of ``q``; index keys, one for all heads. A scale of each key, as of a quantised one, must
            be folded into them: the weights have no place for it.
        weights: ``[T, H]``, dtype of ``q``, with every other factor in them: that of the heads, of the head size, of
            quantised queries.
        last_key: ``[T]``, integer; the last key that each query sees, -1 for none.

    Returns:
        ``[T, S]``, dtype of ``q``.
    """
    scores = torch.einsum("th,ths->ts", weights, torch.relu(torch.einsum("thd,sd->ths", q, k)))
    hidden = torch.arange(k.shape[0], device=q.device) > last_key[:, None]
    return scores.masked_fill(hidden, float("-inf"))


def best_keys(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The ``topk`` keys of the highest scores; return ``(topk_indices, topk_scores)``.

    The highest score comes first; of equal scores, the key of the lower position comes first and is kept first. A query
    with fewer visible keys has all of them, then -1 with a score of ``-inf``.

    Args:
        scores: ``[T, S]``, floating, ``-inf`` where hidden, never NaN.
        topk: Entries of a list, at least 1.

    Returns:
        ``topk_indices``, ``[T, topk]``, int32, and ``topk_scores``, ``[T, topk]``, dtype of the scores.

    Raises:
        ValueError: If ``topk`` is not positive.
    """
    if topk < 1:
        raise ValueError(f"topk must be positive, got {topk}")
    ordered, keys = torch.sort(scores, dim=-1, descending=True, stable=True)
    missing = max(0, topk - scores.shape[1])
    ordered = torch.nn.functional.pad(ordered[:, :topk], (0, missing), value=float("-inf"))
    keys = torch.nn.functional.pad(keys[:, :topk], (0, missing), value=-1)
    return keys.masked_fill(ordered == float("-inf"), -1).int(), ordered


def indexer(
    q: Tensor, k: Tensor, weights: Tensor, *, topk: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose for each query the keys that attention will look at; return ``(topk_indices, topk_scores)``.

    ::

        score[t, s]  = sum_h weights[t, h] relu(q[t, h] . k[s])        for keys s up to the query's own position
        topk_indices = the topk keys of the highest scores, the best first; of equal ones the lower position first

    Of ``n`` queries and ``m`` keys of a request, query ``i`` sees keys ``0 .. i + m - n`` (aligned to the end).

    Args:
        q: ``[T, H, D]``, floating, the index queries of all requests one after the other.
        k: ``[S, D]``, dtype of ``q``; index keys, one for all heads, with the scale of each folded in.
        weights: ``[T, H]``, dtype of ``q``, with every other factor in them, see ``index_scores``.
        topk: Entries of a list, at least 1.
        cu_seqlens_q: ``[N + 1]``, integer; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``, and ``cu[N] = T``.
        cu_seqlens_k: ``[N + 1]``, integer; the same for keys.

    Returns:
        ``topk_indices``, ``[T, topk]``, int32, positions among the keys of the query's own request, -1 where no key
        is left; and ``topk_scores``, ``[T, topk]``, dtype of ``q``, ``-inf`` there.

    Raises:
        ValueError: If ``topk`` is not positive.

    Source: the indexer of DeepSeek-V3.2-Exp, which rotates and quantises ``q`` and ``k`` before.
    """
    indices, scores = [], []
    for request in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[request], cu_seqlens_q[request + 1])
        keys = slice(cu_seqlens_k[request], cu_seqlens_k[request + 1])
        n, m = q[queries].shape[0], k[keys].shape[0]
        last_key = torch.arange(n, device=q.device) + m - n
        best, best_scores = best_keys(index_scores(q[queries], k[keys], weights[queries], last_key), topk)
        indices.append(best)
        scores.append(best_scores)
    return torch.cat(indices), torch.cat(scores)
