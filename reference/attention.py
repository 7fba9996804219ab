"""Softmax attention with its log-sum-exp, and the merge of partial results: the mathematics, nothing else."""

import torch
from torch import Tensor


def masked_logits(q: Tensor, k: Tensor, last_key: Tensor, *, softmax_scale: float) -> Tensor:
    """Scaled logits of one request, ``-inf`` where a query may not look.

    For query ``t``, head ``h`` and key ``s``::

        z[t, h, s] = softmax_scale * q[t, h] . k[s, h // group]    if s <= last_key[t]
        z[t, h, s] = -inf                                          otherwise

    Args:
        q: ``[T, H, Dq]``.
        k: ``[S, H_kv, Dq]``; ``H`` is a multiple of ``H_kv``, ``group = H // H_kv``.
        last_key: ``[T]``, integer; the last key that each query sees, -1 for none.
        softmax_scale: Factor on the logits.

    Returns:
        ``[T, H, S]``, dtype of ``q``, natural-log units.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = softmax_scale * torch.einsum("thd,shd->ths", q, k)
    hidden = torch.arange(k.shape[0], device=q.device) > last_key[:, None]
    return logits.masked_fill(hidden[:, None, :], float("-inf"))


def softmax_with_lse(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Average the values under the softmax of the logits; return ``(out, lse)``.

    ::

        lse[t, h] = ln sum_s exp(z[t, h, s])
        out[t, h] = sum_s exp(z[t, h, s] - lse[t, h]) v[s, h // group]

    A query that sees no key has ``out = 0`` and ``lse = -inf``: the identity of ``merge_states``.

    Args:
        logits: ``[T, H, S]``, ``-inf`` where hidden.
        v: ``[S, H_kv, Dv]``.

    Returns:
        ``out``, ``[T, H, Dv]``, and ``lse``, ``[T, H]``, natural log.
    """
    v = v.repeat_interleave(logits.shape[1] // v.shape[1], dim=1)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None]).masked_fill(lse[..., None] == float("-inf"), 0.0)
    return torch.einsum("ths,shd->thd", weights, v), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend within each request of a packed batch; return ``(out, lse)``.

    ::

        out = softmax(softmax_scale * q k^T + mask) v        one request at a time

    With ``causal`` the mask is aligned to the end (bottom right): of ``n`` queries and ``m`` keys,
    query ``i`` sees keys ``0 .. i + m - n``. Queries or keys of length zero are legal.

    Args:
        q: ``[T, H, Dq]``, the queries of all requests one after the other.
        k: ``[S, H_kv, Dq]``.
        v: ``[S, H_kv, Dv]``; ``Dv`` may differ from ``Dq``.
        softmax_scale: Factor on the logits.
        causal: Whether a query is barred from later keys.
        cu_seqlens_q: ``[N + 1]``, integer; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        cu_seqlens_k: ``[N + 1]``, integer; the same for keys and values.

    Returns:
        ``out``, ``[T, H, Dv]``, and ``lse``, ``[T, H]``, natural log of the scaled logits; ``(0, -inf)`` in a row
        without keys. Both have the dtype of ``q``.
    """
    outs, lses = [], []
    for request in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[request], cu_seqlens_q[request + 1])
        keys = slice(cu_seqlens_k[request], cu_seqlens_k[request + 1])
        n, m = q[queries].shape[0], k[keys].shape[0]
        last_key = torch.arange(n, device=q.device) + m - n if causal else torch.full((n,), m - 1, device=q.device)
        logits = masked_logits(q[queries], k[keys], last_key, softmax_scale=softmax_scale)
        out, lse = softmax_with_lse(logits, v[keys])
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint sets of keys; return ``(out, lse)``.

    ::

        lse = ln(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    ``(0, -inf)`` is the identity. A side whose ``lse`` is ``-inf`` takes no part, whatever its ``out`` holds.

    Args:
        out_a: ``[T, H, Dv]``, normalised.
        lse_a: ``[T, H]``, natural log of the scaled logits.
        out_b: As ``out_a``.
        lse_b: As ``lse_a``.

    Returns:
        ``out``, ``[T, H, Dv]``, and ``lse``, ``[T, H]``.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - lse)[..., None]
        out = out + torch.where(part_lse[..., None] == float("-inf"), torch.zeros_like(part), weight * part)
    return out, lse
