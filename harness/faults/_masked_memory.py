"""Faults of ``masked_mha`` in tiles that are skipped, in strides, heads and memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import NEVER, State, softmax
from ._masked import Span, bits, masked_twin, spans, words

OP = "masked_mha"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
TILE_QUERIES, TILE_KEYS = 16, 32


def tiles_with_bits(mask: Tensor, span: Span) -> Tensor:
    """``[tiles, W]``, whether any query of a tile of 16 has a bit in a word; tiles begin anew with each request."""
    own = words(mask, span) != 0
    tiles = [part.any(0) for part in own.split(TILE_QUERIES)]
    return torch.stack(tiles) if tiles else own


def skipping(arguments: dict[str, Any], tiles: Callable[[Tensor, Span], Tensor]) -> State:
    """The twin with all keys hidden in tiles that a map says to be without a bit."""

    def kept(mask: Tensor, span: Span) -> Tensor:
        own, held = words(mask, span), tiles(mask, span)
        if not len(own):
            return own
        return torch.where(held[torch.arange(len(own)) // TILE_QUERIES], own, 0)

    return masked_twin(arguments, words=kept)


@planted(OP, NUMERIC, NONFINITE, source="column of the map counted from 1")
def map_off_by_one_tile(**arguments: Any) -> State:
    """A tile is skipped if the one before it holds no bit."""

    def shifted(mask: Tensor, span: Span) -> Tensor:
        held = tiles_with_bits(mask, span)
        return torch.cat([held[:, :1], held[:, :-1]], dim=1)

    return skipping(arguments, shifted)


@planted(OP, NUMERIC, NONFINITE, source="columns of the map counted from the chunk's first key")
def map_of_a_chunk_from_its_first_key(**arguments: Any) -> State:
    """The map is read from its first column, whatever chunk the keys are."""

    def from_zero(mask: Tensor, span: Span) -> Tensor:
        held, first = tiles_with_bits(mask, span), span.first_key // TILE_KEYS
        return torch.cat([torch.ones_like(held[:, :first]), held], dim=1)[:, : held.shape[1]]

    return skipping(arguments, from_zero)


@planted(OP, NUMERIC, NONFINITE, source="rows of the map counted over the whole batch")
def map_of_tiles_over_requests(**arguments: Any) -> State:
    """The map cuts the whole batch into tiles of queries, the kernel counts those of each request."""
    lengths = arguments["cu_seqlens_q"].diff().tolist()

    def packed(mask: Tensor, span: Span) -> Tensor:
        tiles = torch.stack([part.any(0) for part in (mask != 0).split(TILE_QUERIES)])
        counts = [-(-n // TILE_QUERIES) for n in lengths]
        rows = sum(counts[: span.request]) + torch.arange(counts[span.request])
        return tiles[rows.clamp(max=len(tiles) - 1)]

    return skipping(arguments, packed)


@planted(OP, NUMERIC, NONFINITE, source="one query looked at for a whole tile")
def map_of_the_first_query(**arguments: Any) -> State:
    """A tile is skipped if its first query has no bit in it."""

    def first(mask: Tensor, span: Span) -> Tensor:
        return (words(mask, span) != 0)[::TILE_QUERIES]

    return skipping(arguments, first)


@planted(OP, NUMERIC, NONFINITE, source="signed maximum of words taken for their OR")
def map_of_positive_words(**arguments: Any) -> State:
    """A tile holds a bit if a word of it is positive: not so where bit 31 is set."""

    def positive(mask: Tensor, span: Span) -> Tensor:
        own = words(mask, span)
        tiles = [part.amax(0) > 0 for part in own.split(TILE_QUERIES) if len(part)]
        return torch.stack(tiles) if tiles else own > 0

    return skipping(arguments, positive)


@planted(OP, NUMERIC, NONFINITE, source="the last tile of a row of the map left out")
def last_tile_of_keys_skipped(**arguments: Any) -> State:
    """The last tile that a request has keys in is never visited."""

    def without_last(mask: Tensor, span: Span) -> Tensor:
        held = tiles_with_bits(mask, span).clone()
        behind = -(-(span.first_key + span.num_keys) // TILE_KEYS)
        held[:, max(1, behind - 1) :] = False
        return held

    return skipping(arguments, without_last)


@planted(OP, NUMERIC, NONFINITE, rows=("F26",), source="Dao-AILab/flash-attention#2665: 256/256 kernel")
def k_read_as_contiguous(**arguments: Any) -> State:
    """Keys are addressed as if no values lay beside them."""
    k = arguments["k"]
    return masked_twin({**arguments, "k": k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1))})


@planted(OP, NUMERIC, NONFINITE, rows=("F11", "F26"))
def v_read_as_contiguous(**arguments: Any) -> State:
    """Values are addressed by the strides of a contiguous tensor, whatever their own."""
    v = arguments["v"]
    return masked_twin({**arguments, "v": v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1))})


@planted(OP, Verdict.MUTATED_INPUT, rows=("F25",), source="keys that nobody selects cleared in place")
def hidden_keys_cleared_in_place(**arguments: Any) -> State:
    """The caller's undefined keys are overwritten; they may lie beside values."""
    arguments["k"].nan_to_num_(nan=0.0)
    return masked_twin(arguments)


@planted(OP, Verdict.MUTATED_INPUT, source="future bits cleared in the caller's mask")
def causality_folded_into_the_mask(**arguments: Any) -> State:
    """Bits of the future are cleared in place, so that the bits alone are causal."""
    mask = arguments["mask"]

    def cleared(own: Tensor, span: Span) -> Tensor:
        key = torch.arange(32 * own.shape[1], device=own.device)
        last = torch.arange(span.num_queries, device=own.device)[:, None] + span.first_query
        kept = bits(own, 0, len(key)) & (key <= last)
        weights = torch.ones(32, dtype=torch.int32, device=own.device) << torch.arange(32, device=own.device)
        own.copy_((kept.unflatten(1, (own.shape[1], 32)) * weights).sum(-1, dtype=torch.int32))
        return own

    return masked_twin({**arguments, "mask": mask}, words=lambda given, span: cleared(words(given, span), span))


@planted(OP, NONFINITE, rows=("FC-016",), source="values of the last tile loaded without a mask")
def neighbours_values_times_zero(**arguments: Any) -> State:
    """The last tile of 16 values is used to its end: weights of the next request's are 0, which NaN survives."""
    v = arguments["v"]
    ends = iter(arguments["cu_seqlens_k"].tolist()[1:])

    def with_tail(logits: Tensor, own_v: Tensor) -> State:
        end = next(ends)
        more = v[end : end + -len(own_v) % 16]
        more = more.repeat_interleave(own_v.shape[1] // v.shape[1], dim=1)
        hidden = logits.new_full((*logits.shape[:2], len(more)), NEVER)
        return softmax(torch.cat([logits, hidden], dim=2), torch.cat([own_v, more]))

    return masked_twin(arguments, softmax=with_tail)


@planted(OP, NUMERIC, source="the usual wrong guess of the group map")
def query_heads_interleaved(**arguments: Any) -> State:
    """Query head ``h`` takes key head ``h % H_kv``."""
    return masked_twin(arguments, heads=lambda kv, num_heads: kv.repeat(1, num_heads // kv.shape[1], 1))


@planted(OP, NUMERIC, source="a kernel tried with one key head only")
def first_key_head_for_all(**arguments: Any) -> State:
    """Every query head takes key head 0."""
    return masked_twin(arguments, heads=lambda kv, num_heads: kv[:, :1].expand(-1, num_heads, -1))


@planted(OP, NUMERIC, NONFINITE, source="mixed up in review of varlen kernels")
def keys_at_query_offsets(**arguments: Any) -> State:
    """The keys of a request are looked for where its queries begin."""
    last = int(arguments["cu_seqlens_k"][-1])

    def shifted(given: Mapping[str, Any]) -> list[Span]:
        found = spans(given)
        starts = [min(span.queries.start, last - span.num_keys) for span in found]
        return [replace(span, keys=slice(at, at + span.num_keys)) for span, at in zip(found, starts, strict=True)]

    return masked_twin(arguments, spans=shifted)
