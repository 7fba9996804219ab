"""Attention of each query to the keys that its bits select, as far as it may look."""

import torch
from torch import Tensor

from .attention import masked_logits, softmax_with_lse
from .topk_mask import selected_keys


def masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within each request to the selected keys of the past; return ``(out, lse)``.

    Of request ``r``, query ``i`` has position ``query_starts[r] + i`` and key ``s`` has position
    ``key_starts[r] + s``, both counted from the key of bit 0. A query sees a key if its bit is set and it is not in the
    query's future::

        z[i, h, s] = softmax_scale * q[i, h] . k[s, h // group]    if mask[i] has bit key_starts[r] + s,
                                                                   and key_starts[r] + s <= query_starts[r] + i
        z[i, h, s] = -inf                                          otherwise
        lse[i, h]  = ln sum_s exp(z[i, h, s])
        out[i, h]  = sum_s exp(z[i, h, s] - lse[i, h]) v[s, h // group]

    A key is seen once or not at all, however often it was selected (a set). Results for the chunks of a request's keys
    merge to that of all its keys (``reference.attention.merge_states``).

    Args:
        q: ``[T, H, Dq]``, floating, the queries of all requests one after the other.
        k: ``[S, H_kv, Dq]``, dtype of ``q``.
        v: ``[S, H_kv, Dv]``, dtype of ``q``, finite also where no bit selects it.
        mask: ``[T, W]``, int32, of ``reference.topk_mask.topk_mask``; wide enough for the position of every key.
        softmax_scale: Factor on the logits.
        cu_seqlens_q: ``[N + 1]``, integer; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``, and ``cu[N] = T``.
        cu_seqlens_k: ``[N + 1]``, integer; the same for keys and values.
        query_starts: ``[N]``, integer, of each request's first query; if None the last query has the last key's
            position.
        key_starts: ``[N]``, integer, of each request's first key, not negative; 0 if None.

    Returns:
        ``out``, ``[T, H, Dv]``, and ``lse``, ``[T, H]``, natural log of the scaled logits; ``(0, -inf)`` in a row that
        sees no key. Both have the dtype of ``q``.

    Raises:
        ValueError: If a request's keys start before bit 0.
        IndexError: If the mask has no bit for the position of a key.
    """
    outs, lses = [], []
    for request in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[request], cu_seqlens_q[request + 1])
        keys = slice(cu_seqlens_k[request], cu_seqlens_k[request + 1])
        n, m = q[queries].shape[0], k[keys].shape[0]
        first_key = 0 if key_starts is None else int(key_starts[request])
        first_query = first_key + m - n if query_starts is None else int(query_starts[request])
        last_key = torch.arange(n, device=q.device) + first_query - first_key
        logits = masked_logits(q[queries], k[keys], last_key, softmax_scale=softmax_scale)
        selected = selected_keys(mask[queries], m, first_key)
        out, lse = softmax_with_lse(logits.masked_fill(~selected[:, None], float("-inf")), v[keys])
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
