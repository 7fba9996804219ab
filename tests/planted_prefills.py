"""Kernels of ``mla_prefill`` to be given to a model: ``-o kernel=planted_prefills.py:NAME``; one right, three wrong.

All attend the current tokens first, then the history chunk by chunk, and merge by log-sum-exp.
"""

import math
from typing import Any

import torch
from torch import Tensor

STALE_TOKENS = 16


def right(**arguments: Any) -> tuple[Tensor, Tensor]:
    """As the house does it, in another order: the oldest chunk first."""
    return _chunked(**arguments)


def mask_shifted(**arguments: Any) -> tuple[Tensor, Tensor]:
    """A query is barred from its own token."""
    return _chunked(**arguments, shift=1)


def lse_base_two(**arguments: Any) -> tuple[Tensor, Tensor]:
    """The kernel's log-sum-exp is to base 2, and the merge takes it for a natural one."""
    return _chunked(**arguments, base=2.0)


def stale_block(**arguments: Any) -> tuple[Tensor, Tensor]:
    """The last tokens of a history are those that lay there before: the block before them."""
    return _chunked(**arguments, stale=True)


def _chunked(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    softmax_scale: float,
    cu_seqlens: Tensor,
    slot_table: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    history_chunk_size: int = 256,
    *,
    shift: int = 0,
    base: float = math.e,
    stale: bool = False,
) -> tuple[Tensor, Tensor]:
    d_nope = q.shape[2] - k_pe.shape[1]
    w_uk, w_uv = kv_b_proj.float().split([d_nope, kv_b_proj.shape[1] - d_nope], dim=1)
    ends, outs, lses = cu_seqlens.tolist(), [], []
    for request, context in enumerate(context_lens.tolist()):
        queries = q[ends[request] : ends[request + 1]].float()
        slots = slot_table[int(request_rows[request]), :context].long()
        history = context - len(queries)
        if stale and history >= 2 * STALE_TOKENS:
            block = slice(history - STALE_TOKENS, history)
            slots[block] = slots[history - 2 * STALE_TOKENS : history - STALE_TOKENS].clone()
        rows = torch.cat([kv_c[slots], k_pe[slots]], dim=1).float()
        places = torch.arange(context, device=q.device)
        last = places[history:, None] - shift
        starts = range(0, history, history_chunk_size)
        parts = [slice(start, min(start + history_chunk_size, history)) for start in starts]
        states = [
            _partial(queries, rows[part], w_uk, w_uv, softmax_scale, places[part] <= last, base)
            for part in [*parts, slice(history, context)]
        ]
        out, lse = states[0]
        for state in states[1:]:
            out, lse = _merged(out, lse, *state)
        outs.append(out.to(q.dtype))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _partial(
    q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float, seen: Tensor, base: float
) -> tuple[Tensor, Tensor]:
    """Output ``[n, H, Dv]`` and log-sum-exp ``[n, H]`` of some keys; ``seen`` is ``[n, S]``."""
    rank = w_uk.shape[2]
    latent, k_pe = rows[:, :rank], rows[:, rank:]
    d_nope = w_uk.shape[1]
    logits = torch.einsum("nhd,hdr,sr->nhs", q[..., :d_nope], w_uk, latent)
    logits = scale * (logits + torch.einsum("nhd,sd->nhs", q[..., d_nope:], k_pe))
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    lse = logits.logsumexp(dim=2)
    weights = (logits - lse[..., None]).exp().nan_to_num(nan=0.0)
    return torch.einsum("nhs,sr,hdr->nhd", weights, latent, w_uv), lse / math.log(base)


def _merged(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((one - lse).exp().nan_to_num(nan=0.0)[..., None] for one in (lse_a, lse_b))
    return share_a * a + share_b * b, lse
