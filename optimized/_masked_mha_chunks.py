"""Masked attention over a long context chunk by chunk of its keys, under one mask or, past a cap, one for each chunk.

Part of ``optimized/masked_mha.py``; call it from there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import check_scale, lengths
from ._masked_mha_plan import MaskedMhaPlan, check_call, plan_masked_mha
from .attention import AttentionShape, merge_into
from .topk_mask import MAX_MASK_BYTES, TopkMaskPlan, mask_bytes, plan_topk_mask, topk_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChunk:
    """Keys that are attended in one call, and the queries that look at them.

    Attributes:
        spans: ``(request, start, stop)`` of each request in the call: positions of its keys, which may be none.
        queries: Rows of the queries.
        tiles: Rows of the map of the whole mask.
        mask: Plan of this chunk's own mask, or None where one mask serves all chunks.
        plan: Of the attention.
    """

    spans: tuple[tuple[int, int, int], ...]
    queries: slice
    tiles: slice
    mask: TopkMaskPlan | None
    plan: MaskedMhaPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedMaskPlan:
    """What the host decides once a step.

    Attributes:
        mask: Plan of the mask over whole contexts, or None where it would pass the cap.
        chunks: The current tokens of all requests first, then each request's history in order.
    """

    mask: TopkMaskPlan | None
    chunks: tuple[KeyChunk, ...]


def plan_masked_chunks(
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    shape: AttentionShape,
    topk: int,
    history_chunk_size: int,
    max_mask_bytes: int = MAX_MASK_BYTES,
    implementation: str = "auto",
) -> ChunkedMaskPlan:
    """Cut the contexts into chunks of keys and choose the masks, once a step. This may synchronise.

    Args:
        cu_seqlens_q: ``[N + 1]``, int32 or int64, any device; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``,
            the last tokens of its context.
        context_lens: ``[N]``, int32 or int64; tokens of each request, the current ones included.
        shape: Of the tensors.
        topk: Entries of each query's list.
        history_chunk_size: Most history tokens whose keys are there at once.
        max_mask_bytes: What a mask may take. One mask over the whole contexts is built once for all chunks if it fits;
            otherwise each chunk has its own, of the positions in it alone.
        implementation: Of attention and mask; as in ``plan_masked_mha``.

    Returns:
        The plan.

    Raises:
        TypeError: If lengths are not int32 or int64.
        ValueError: If a length is out of range, or the mask of a chunk passes the cap as well.
        NotImplementedError: If the implementation does not serve the shape.
    """
    query_lens = lengths("cu_seqlens_q", cu_seqlens_q)
    contexts = _contexts(context_lens, query_lens)
    if history_chunk_size < 1:
        raise ValueError(f"history_chunk_size must be at least 1, got {history_chunk_size}")
    histories = [context - n for context, n in zip(contexts, query_lens, strict=True)]
    calls = [tuple((r, histories[r], contexts[r]) for r in range(len(contexts)))]
    for r, history in enumerate(histories):
        starts = range(0, history if query_lens[r] else 0, history_chunk_size)
        calls += [((r, start, min(start + history_chunk_size, history)),) for start in starts]
    whole = mask_bytes(sum(query_lens), max(contexts)) <= max_mask_bytes
    masks: dict[str, Any] = {"topk": topk, "device": shape.device, "max_bytes": max_mask_bytes}
    chunks = []
    for spans in calls:
        chunk = _chunk(spans, query_lens, histories, whole=whole, shape=shape, implementation=implementation)
        if not whole:
            lens, (first_keys, counts) = torch.tensor([query_lens[r] for r, _, _ in spans]), _keys(spans)
            own = plan_topk_mask(_offsets(lens), counts, key_starts=first_keys, **masks, **_tiles_of(chunk))
            chunk = replace(chunk, mask=own)
        chunks.append(chunk)
    if not whole:
        return ChunkedMaskPlan(mask=None, chunks=tuple(chunks))
    mask = plan_topk_mask(cu_seqlens_q, torch.tensor(contexts), **masks, **_tiles_of(chunks[0]))
    return ChunkedMaskPlan(mask=mask, chunks=tuple(chunks))


def masked_mha_in_chunks(
    q: Tensor,
    indices: Tensor,
    expand: Callable[[KeyChunk], tuple[Tensor, Tensor]],
    *,
    softmax_scale: float,
    plan: ChunkedMaskPlan,
) -> tuple[Tensor, Tensor]:
    """Attend each query to the keys that it has selected, a chunk of keys at a time; return ``(out, lse)``.

    ::

        for each chunk:  part, lse' = masked_mha(q[queries], k, v, mask)
                         out, lse   = merge((out, lse), (part, lse'))

    Args:
        q: ``[T, H, Dq]``, packed current tokens.
        indices: ``[T, topk]``, int32, positions in the sequence of the query's own request; negative ones and those
            past its context are padding, repeated ones count once.
        expand: Gives ``k``, ``[S, H_kv, Dq]``, and ``v``, ``[S, H_kv, Dv]``, of the positions in ``chunk.spans``, one
            span after the other. Called once for each chunk, in order; its tensors are released before the next.
        softmax_scale: Factor on the logits.
        plan: Of ``plan_masked_chunks``.

    Returns:
        ``out`` and ``lse``, as of ``masked_mha``.

    Precision: each partial result is rounded once to the dtype of ``q``; merging accumulates in float32 and rounds
    once, and only if there is history. One mask or several differ in where tiles are cut, and so by rounding.
    """
    check_scale(softmax_scale)
    mask, held = (None, None) if plan.mask is None else topk_mask(indices, plan=plan.mask)
    total, lse = q, q
    for number, chunk in enumerate(plan.chunks):
        if chunk.mask is not None:
            words, tile_map = topk_mask(indices[chunk.queries], plan=chunk.mask)
        elif mask is not None:
            words, tile_map = mask[chunk.queries], None if held is None else held[chunk.tiles]
        k, v = expand(chunk)
        rows = q[chunk.queries]
        check_call(rows, k, v, words, tile_map, chunk.plan)
        part, part_lse = chunk.plan.module.attend(rows, k, v, words, tile_map, float(softmax_scale), chunk.plan)
        del k, v
        if number == 0:
            total, lse = part if len(plan.chunks) == 1 else part.to(part_lse.dtype), part_lse
        else:
            merge_into(total[chunk.queries], lse[chunk.queries], part, part_lse)
    return total.to(q.dtype), lse


def _contexts(context_lens: Tensor, query_lens: tuple[int, ...]) -> tuple[int, ...]:
    """Read the contexts, each at least as long as its queries."""
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"context_lens must be int32 or int64, got {context_lens.dtype}")
    if tuple(context_lens.shape) != (len(query_lens),):
        raise ValueError(f"context_lens must have shape [N] = {(len(query_lens),)}, got {tuple(context_lens.shape)}")
    contexts = tuple(int(value) for value in context_lens.tolist())
    for request, (context, n) in enumerate(zip(contexts, query_lens, strict=True)):
        if context < n:
            raise ValueError(f"context_lens must include the {n} current tokens of request {request}, got {context}")
    return contexts


def _chunk(
    spans: tuple[tuple[int, int, int], ...],
    query_lens: tuple[int, ...],
    histories: list[int],
    *,
    whole: bool,
    shape: AttentionShape,
    implementation: str,
) -> KeyChunk:
    """Neighbouring requests and their keys as one call; with a mask of its own, bit 0 is the first of the keys."""
    first, behind = spans[0][0], spans[-1][0] + 1
    first_keys, counts = _keys(spans)
    origin = torch.zeros_like(first_keys) if whole else first_keys
    plan = plan_masked_mha(
        _offsets(torch.tensor(query_lens[first:behind])),
        _offsets(counts),
        shape=shape,
        query_starts=torch.tensor(histories[first:behind]) - origin,
        key_starts=first_keys - origin,
        implementation=implementation,
    )
    row, tile_row = sum(query_lens[:first]), _tiles(query_lens[:first], plan.tile)
    return KeyChunk(
        spans=spans,
        queries=slice(row, row + plan.num_queries),
        tiles=slice(tile_row, tile_row + plan.num_tiles),
        mask=None,
        plan=plan,
    )


def _tiles_of(chunk: KeyChunk) -> dict[str, Any]:
    """What a mask must have in common with the attention under it."""
    return {"tile": chunk.plan.tile, "implementation": chunk.plan.implementation}


def _keys(spans: tuple[tuple[int, int, int], ...]) -> tuple[Tensor, Tensor]:
    """Position of the first key of each span, and how many there are."""
    return torch.tensor([start for _, start, _ in spans]), torch.tensor([stop - start for _, start, stop in spans])


def _offsets(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])


def _tiles(query_lens: tuple[int, ...], tile: tuple[int, int] | None) -> int:
    """Rows of the map that some requests take."""
    return 0 if tile is None else sum(-(-length // tile[0]) for length in query_lens)
