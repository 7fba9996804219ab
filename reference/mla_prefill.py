"""MLA prefill over a slot-mapped latent history: one full softmax per query, in two independent forms."""

import torch
from torch import Tensor

from .attention import masked_logits, softmax_with_lse


def expand_latent(kv_c: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latent rows to the keys and values of every head; return ``(k, v)``.

    ::

        k[s, h] = [W_UK[h] kv_c[s], k_pe[s]]
        v[s, h] = W_UV[h] kv_c[s]

    Args:
        kv_c: ``[S, R]``, normalised latent rows.
        k_pe: ``[S, Dr]``, already rotated, shared by all heads; ``Dr`` may be 0.
        w_uk: ``[H, Dn, R]``.
        w_uv: ``[H, Dv, R]``.

    Returns:
        ``k``, ``[S, H, Dn + Dr]``, and ``v``, ``[S, H, Dv]``.
    """
    k_nope = torch.einsum("hdr,sr->shd", w_uk, kv_c)
    k_rope = k_pe[:, None, :].expand(-1, w_uk.shape[0], -1)
    return torch.cat([k_nope, k_rope], dim=-1), torch.einsum("hdr,sr->shd", w_uv, kv_c)


def mla_prefill(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    softmax_scale: float,
    cu_seqlens: Tensor,
    slot_table: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend the current tokens of each request to its whole history and to themselves; return ``(out, lse)``.

    Request ``r`` owns the queries ``cu_seqlens[r] .. cu_seqlens[r + 1] - 1``: the last ``n`` of its tokens, of which it
    has ``c = context_lens[r]``. Token ``s`` lies in slot ``slot_table[request_rows[r], s]`` of the cache. Query ``i``
    sees tokens ``0 .. c - n + i``, in one softmax::

        k, v = expand(kv_c[slots], k_pe[slots])
        out  = softmax(softmax_scale * q k^T + causal mask) v

    Args:
        q: ``[T, H, Dn + Dr]``, packed current tokens; the part without RoPE first, then the rotated part.
        kv_c: ``[slots, R]``, the latent cache; rows that no request owns are never read.
        k_pe: ``[slots, Dr]``, the rope cache; ``Dr`` may be 0.
        kv_b_proj: ``[H, Dn + Dv, R]``, ``W_UK`` above ``W_UV`` per head.
        softmax_scale: Factor on the logits, usually ``(Dn + Dr) ** -0.5``; never derived from ``R``.
        cu_seqlens: ``[N + 1]``, integer.
        slot_table: ``[rows, max_context]``, integer, token position to slot; -1 where unused.
        request_rows: ``[N]``, integer, the row of ``slot_table`` of each request.
        context_lens: ``[N]``, integer, tokens of each request, the current ones included.

    Returns:
        ``out``, ``[T, H, Dv]``, and ``lse``, ``[T, H]``, natural log of the scaled logits; dtype of ``q``.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; slot-mapped history as in Sparse-vLLM.
    """
    d_nope = q.shape[-1] - k_pe.shape[-1]
    w_uk, w_uv = kv_b_proj[:, :d_nope], kv_b_proj[:, d_nope:]
    outs, lses = [], []
    for queries, slots, last_key in requests(cu_seqlens, slot_table, request_rows, context_lens):
        k, v = expand_latent(kv_c[slots], k_pe[slots], w_uk, w_uv)
        logits = masked_logits(q[queries], k, last_key, softmax_scale=softmax_scale)
        out, lse = softmax_with_lse(logits, v)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def mla_prefill_absorbed(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    softmax_scale: float,
    cu_seqlens: Tensor,
    slot_table: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same function in absorbed (multi-query) form: heads share the latent rows, nothing is expanded.

    ::

        qa[h]  = W_UK[h]^T q_nope[h]
        z[s]   = softmax_scale * (qa[h] . kv_c[s] + q_rope[h] . k_pe[s])
        out[h] = W_UV[h] (sum_s softmax(z)[s] kv_c[s])

    Arguments and results as in ``mla_prefill``. Equal to it in exact arithmetic, by another order of products.
    """
    d_nope = q.shape[-1] - k_pe.shape[-1]
    w_uk, w_uv = kv_b_proj[:, :d_nope], kv_b_proj[:, d_nope:]
    absorbed = torch.cat([torch.einsum("thd,hdr->thr", q[..., :d_nope], w_uk), q[..., d_nope:]], dim=-1)
    outs, lses = [], []
    for queries, slots, last_key in requests(cu_seqlens, slot_table, request_rows, context_lens):
        rows = torch.cat([kv_c[slots], k_pe[slots]], dim=-1)[:, None, :]
        logits = masked_logits(absorbed[queries], rows, last_key, softmax_scale=softmax_scale)
        latent, lse = softmax_with_lse(logits, rows[..., : kv_c.shape[1]])
        outs.append(torch.einsum("thr,hdr->thd", latent, w_uv))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def requests(
    cu_seqlens: Tensor, slot_table: Tensor, request_rows: Tensor, context_lens: Tensor
) -> list[tuple[slice, Tensor, Tensor]]:
    """The queries, the slots of all tokens and the last visible token per query, request by request.

    Query ``i`` of ``n`` sits at position ``c - n + i`` of its ``c`` tokens, and sees up to itself.
    """
    parts = []
    for request in range(len(context_lens)):
        queries = slice(int(cu_seqlens[request]), int(cu_seqlens[request + 1]))
        n, c = queries.stop - queries.start, int(context_lens[request])
        slots = slot_table[request_rows[request], :c].long()
        parts.append((queries, slots, torch.arange(c - n, c, device=slots.device)))
    return parts
