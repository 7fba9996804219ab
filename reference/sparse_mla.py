"""Attention of each query to the latent rows that were selected for it, with repeated rows and an attention sink."""

import torch
from torch import Tensor


def selected_rows(kv: Tensor, indices: Tensor, topk_length: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gather what each query has selected; return ``(rows, valid)``.

    ::

        valid[s, j] = 0 <= indices[s, j] < s_kv and j < topk_length[s]
        rows[s, j]  = kv[indices[s, j]]    if valid[s, j], else zeros

    Args:
        kv: ``[s_kv, d_qk]``; rows that nobody selects are never read.
        indices: ``[s_q, topk]``, integer.
        topk_length: ``[s_q]``, integer; all of ``topk`` if None.

    Returns:
        ``rows``, ``[s_q, topk, d_qk]``, dtype of ``kv``, and ``valid``, ``[s_q, topk]``, bool.
    """
    s_kv, topk = kv.shape[0], indices.shape[1]
    valid = (indices >= 0) & (indices < s_kv)
    if topk_length is not None:
        valid &= torch.arange(topk, device=indices.device) < topk_length[:, None]
    # what is not valid reads a row of zeros behind the last
    behind = torch.cat([kv, kv.new_zeros(1, kv.shape[1])])
    return behind[indices.long().masked_fill(~valid, s_kv)], valid


def selected_logits(q: Tensor, rows: Tensor, valid: Tensor, *, softmax_scale: float) -> Tensor:
    """Scaled logits of the selected rows, ``-inf`` where an entry is padding.

    ::

        z[s, h, j] = softmax_scale * q[s, h] . rows[s, j]    if valid[s, j]
        z[s, h, j] = -inf                                    otherwise

    Args:
        q: ``[s_q, h_q, d_qk]``.
        rows: ``[s_q, topk, d_qk]``, dtype of ``q``.
        valid: ``[s_q, topk]``, bool.
        softmax_scale: Factor on the logits.

    Returns:
        ``[s_q, h_q, topk]``, dtype of ``q``, natural-log units.
    """
    logits = softmax_scale * torch.einsum("shd,sjd->shj", q, rows)
    return logits.masked_fill(~valid[:, None], float("-inf"))


def softmax_over_selection(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Average the values of each query's own rows under the softmax of its logits; return ``(out, lse)``.

    ::

        lse[s, h] = ln sum_j exp(z[s, h, j])
        out[s, h] = sum_j exp(z[s, h, j] - lse[s, h]) values[s, j]

    A query without a valid entry has ``out = 0`` and ``lse = -inf``.

    Args:
        logits: ``z``, ``[s_q, h_q, topk]``, ``-inf`` where padding.
        values: ``[s_q, topk, d_v]``, dtype of the logits.

    Returns:
        ``out``, ``[s_q, h_q, d_v]``, and ``lse``, ``[s_q, h_q]``, natural log; dtype of the logits.
    """
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None]).masked_fill(lse[..., None] == float("-inf"), 0.0)
    return torch.einsum("shj,sjd->shd", weights, values), lse


def share_beside_sink(lse: Tensor, attn_sink: Tensor) -> Tensor:
    """What a sink leaves of the weight, ``e^lse / (e^lse + e^attn_sink)``; 1 for a sink of ``-inf``, 0 for ``+inf``.

    Args:
        lse: ``[s_q, h_q]``, natural log. Where it is ``-inf`` there is no weight to share, and the answer is 0.
        attn_sink: ``[h_q]``, dtype of ``lse``.

    Returns:
        ``[s_q, h_q]``, dtype of ``lse``.
    """
    # masked before the sigmoid: inf - inf is NaN, which a mask behind it would leave in the gradient of the sink
    return torch.sigmoid((lse - attn_sink).masked_fill(lse == float("-inf"), float("-inf")))


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    d_v: int,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend each query to its selected rows of the latent cache; return ``(out, lse, max_logits)``.

    For query ``s`` and head ``h``, over the valid entries ``j < topk_length[s]``, with ``t = indices[s, j]``::

        z[j]       = softmax_scale * q[s, h] . kv[t]
        out[s, h]  = sum_j exp(z[j]) kv[t, :d_v] / (sum_j exp(z[j]) + exp(attn_sink[h]))
        lse[s, h]  = ln sum_j exp(z[j])                                                    without the sink

    All heads share one latent row per token, whose first ``d_v`` columns are its value. A row that is listed twice
    counts twice (a multiset); the order of the list means nothing. A query without a valid entry gives ``out = 0`` and
    ``lse = max_logits = -inf``, whatever the sink; a sink of ``+inf`` takes all the weight, one of ``-inf`` none.

    Args:
        q: ``[s_q, h_q, d_qk]``, floating, absorbed queries, or those of a unified head.
        kv: ``[s_kv, d_qk]``, dtype of ``q``.
        indices: ``[s_q, topk]``, integer; negative values and values of at least ``s_kv`` are padding. ``topk`` may be
            0: no query has a valid entry then.
        softmax_scale: Factor on the logits; of the head size before absorption.
        d_v: Leading columns of ``kv`` that act as the value, 1 to ``d_qk``.
        topk_length: ``[s_q]``, integer, entries of each list that count; the others are never looked at. All if None.
        attn_sink: ``[h_q]``, dtype of ``q``, a logit that takes weight and has no value.

    Returns:
        ``out``, ``[s_q, h_q, d_v]``; ``lse``, ``[s_q, h_q]``, natural log of the scaled logits; ``max_logits``,
        ``[s_q, h_q]``, the highest of them. All have the dtype of ``q``.

    Raises:
        ValueError: If ``kv`` has no ``d_v`` columns.

    Source: sparse prefill of FlashMLA, which gives ``lse = +inf`` in a row without keys.
    """
    if not 1 <= d_v <= kv.shape[1]:
        raise ValueError(f"d_v must be 1 to {kv.shape[1]}, got {d_v}")
    rows, valid = selected_rows(kv, indices, topk_length)
    logits = selected_logits(q, rows, valid, softmax_scale=softmax_scale)
    out, lse = softmax_over_selection(logits, rows[..., :d_v])
    if attn_sink is not None:
        out = out * share_beside_sink(lse, attn_sink)[..., None]
    # amax refuses an empty axis, where both are -inf
    return out, lse, logits.amax(dim=-1) if indices.shape[1] else lse
