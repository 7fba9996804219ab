"""Clean twins of both operations in plain torch, made of small steps that a fault replaces one at a time.

Precision of both: logits and softmax in float32; weights, projected keys and values and partial results rounded to the
dtype of the queries; sums in float32. Slow and simple on purpose, with nothing in common with the kernels to be judged.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, Tensor]
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Tokens ``keys`` of a request, attended at once; ``causal`` when the queries are the last of them."""

    keys: slice
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One function per step, in the order in which they run.

    Attributes:
        segments: ``(cu_seqlens_q, cu_seqlens_k)`` to the queries and keys of each request; ``attention`` only.
        heads: ``([m, H_kv, D], H)`` to ``[m, H, D]``, the keys or values of each query head; ``attention`` only.
        slots: ``(slot_table, row, count)`` to the slots of a request's first ``count`` tokens; this step and the four
            below are of ``mla_prefill`` only.
        passes: ``(history, current, chunk, longest)`` to the passes of a request: its tokens before and among the
            queries, the chunk length, and the longest history of the batch.
        gather: ``(kv_c, k_pe, slots)`` to their rows.
        expand: ``(latent, rope, kv_b_proj, d_nope)`` to ``k``, ``[m, H, Dq]``, and ``v``, ``[m, H, Dv]``.
        logits: ``(q, k, softmax_scale)`` to ``[n, H, m]``, float32.
        mask: ``(logits, causal)`` to the logits with ``-inf`` where a query must not look.
        softmax: ``(logits, v)`` to ``out``, ``[n, H, Dv]``, and ``lse``, ``[n, H]``, both float32.
        store: ``(out, lse, dtype)`` to what is kept of a pass.
        merge: ``(out_a, lse_a, out_b, lse_b)`` to both results as one, float32; ``mla_prefill`` only.
        finish: ``(out, lse, dtype)`` to what is returned for a request.
    """

    segments: Callable[[Tensor, Tensor], list[tuple[slice, slice]]]
    heads: Callable[[Tensor, int], Tensor]
    slots: Callable[[Tensor, int, int], Tensor]
    passes: Callable[[int, int, int, int], list[Pass]]
    gather: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    expand: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    logits: Callable[[Tensor, Tensor, float], Tensor]
    mask: Callable[[Tensor, bool], Tensor]
    softmax: Callable[[Tensor, Tensor], State]
    store: Callable[[Tensor, Tensor, torch.dtype], State]
    merge: Callable[[Tensor, Tensor, Tensor, Tensor], State]
    finish: Callable[[Tensor, Tensor, torch.dtype], State]


def segments(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each request."""
    pairs = (itertools.starmap(slice, itertools.pairwise(ends.tolist())) for ends in (cu_seqlens_q, cu_seqlens_k))
    return list(zip(*pairs, strict=True))


def heads(kv: Tensor, num_heads: int) -> Tensor:
    """Consecutive query heads share a key head."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)


def slots(slot_table: Tensor, row: int, count: int) -> Tensor:
    """The first ``count`` entries of a row."""
    return slot_table[row, :count].long()


def passes(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
    """The current tokens, then the history chunk by chunk."""
    chunks = [Pass(keys=slice(at, min(at + chunk, history))) for at in range(0, history, chunk)]
    return [Pass(keys=slice(history, history + current), causal=True), *chunks]


def gather(kv_c: Tensor, k_pe: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The latent and the rope row of each slot."""
    return kv_c[slots], k_pe[slots]


def expand(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
    """Project in float32, round once, share the rope part among the heads."""
    projected = torch.einsum("sr,hdr->shd", latent.float(), kv_b_proj.float()).to(latent.dtype)
    shared = rope[:, None, :].expand(-1, kv_b_proj.shape[0], -1)
    return torch.cat([projected[..., :d_nope], shared], dim=-1), projected[..., d_nope:]


def logits(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Scaled products, float32."""
    return softmax_scale * torch.einsum("nhd,mhd->nhm", q.float(), k.float())


def hide_after(logits: Tensor, last_key: Tensor) -> Tensor:
    """``-inf`` for every key after ``last_key``, ``[n]``."""
    hidden = torch.arange(logits.shape[2], device=logits.device) > last_key[:, None]
    return logits.masked_fill(hidden[:, None, :], NEVER)


def mask(logits: Tensor, causal: bool) -> Tensor:
    """Aligned to the last key: query ``i`` of ``n`` sees keys ``0 .. i + m - n``."""
    n, m = logits.shape[0], logits.shape[2]
    return hide_after(logits, torch.arange(n, device=logits.device) + m - n) if causal else logits


def finite_shift(logits: Tensor) -> Tensor:
    """``[n, H, 1]``: the largest logit of each row, 0 where it sees no key."""
    highest = logits.amax(-1, keepdim=True) if logits.shape[2] else logits.new_full((*logits.shape[:2], 1), NEVER)
    return highest.masked_fill(highest == NEVER, 0.0)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """``[n, H, m]`` times ``[m, H, Dv]``; the weights are rounded to the dtype of ``v`` first."""
    return torch.einsum("nhm,mhd->nhd", weights.to(v.dtype).float(), v.float())


def normalised(mixed: Tensor, total: Tensor, shift: Tensor) -> State:
    """Divide by the denominator; ``(0, -inf)`` where it is 0. ``total`` and ``shift`` are ``[n, H, 1]``."""
    return mixed / total.masked_fill(total == 0, 1.0), (shift + torch.log(total))[..., 0]


def softmax(logits: Tensor, v: Tensor) -> State:
    """All keys at once; the denominator sums the weights before they are rounded."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)


def store(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
    """Round the partial output; keep the log-sum-exp."""
    return out.to(dtype), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
    """Weight both sides by their share of the denominator; an empty side takes no part, whatever it holds."""
    highest = torch.maximum(lse_a, lse_b)
    shift = highest.masked_fill(highest == NEVER, 0.0)
    weights = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    sides = zip((out_a, out_b), (lse_a, lse_b), weights, strict=True)
    mixed = sum(
        torch.where(lse[..., None] == NEVER, 0.0, weight[..., None] * out.float()) for out, lse, weight in sides
    )
    total = weights[0] + weights[1]
    return mixed / total.masked_fill(total == 0, 1.0)[..., None], shift + torch.log(total)


def finish(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
    """Round the merged output."""
    return out.to(dtype), lse


CLEAN = Steps(
    segments=segments,
    heads=heads,
    slots=slots,
    passes=passes,
    gather=gather,
    expand=expand,
    logits=logits,
    mask=mask,
    softmax=softmax,
    store=store,
    merge=merge,
    finish=finish,
)


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, *, causal: bool, steps: Steps) -> State:
    """One pass over the keys of one request; ``k`` and ``v`` have the heads of ``q``."""
    scores = steps.mask(steps.logits(q, k, softmax_scale), causal)
    return steps.store(*steps.softmax(scores, v), q.dtype)


def attention_twin(arguments: Mapping[str, Any], **changes: Any) -> State:
    """``attention`` with some steps changed.

    Args:
        arguments: Of the operation, by name.
        changes: Steps by name, see ``Steps``.
    """
    steps, a = replace(CLEAN, **changes), arguments
    q, k, v = a["q"], a["k"], a["v"]
    num_heads = q.shape[1]
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for queries, keys in steps.segments(a["cu_seqlens_q"], a["cu_seqlens_k"]):
        own_k, own_v = steps.heads(k[keys], num_heads), steps.heads(v[keys], num_heads)
        part = attend(q[queries], own_k, own_v, a["softmax_scale"], causal=a["causal"], steps=steps)
        out[queries], lse[queries] = steps.finish(*part, q.dtype)
    return out, lse


def mla_prefill_twin(arguments: Mapping[str, Any], **changes: Any) -> State:
    """``mla_prefill``, history in chunks, with some steps changed; arguments as in ``attention_twin``."""
    steps, a = replace(CLEAN, **changes), arguments
    q, weight = a["q"], a["kv_b_proj"]
    d_nope = q.shape[2] - a["k_pe"].shape[1]
    starts, rows, contexts = (a[name].tolist() for name in ("cu_seqlens", "request_rows", "context_lens"))
    out = q.new_empty(*q.shape[:2], weight.shape[1] - d_nope)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    requests = list(zip(itertools.pairwise(starts), rows, contexts, strict=True))
    longest = max(context - (stop - start) for (start, stop), _, context in requests)
    for (start, stop), row, context in requests:
        queries, history = slice(start, stop), context - (stop - start)
        own_slots = steps.slots(a["slot_table"], row, context)
        merged: State | None = None
        for one in steps.passes(history, stop - start, a["history_chunk_size"], longest):
            latent, rope = steps.gather(a["kv_c"], a["k_pe"], own_slots[one.keys])
            k, v = steps.expand(latent, rope, weight, d_nope)
            part = attend(q[queries], k, v, a["softmax_scale"], causal=one.causal, steps=steps)
            merged = part if merged is None else steps.merge(*merged, *part)
        if merged is None:
            raise ValueError(f"passes must give a request at least one pass, got none for history {history}")
        out[queries], lse[queries] = steps.finish(*merged, q.dtype)
    return out, lse
