"""Faults of ``topk_mask`` in the map of the tiles that hold a bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._masks import Returned, bounds, columns_of, mapped, mask_twin, query_tiles

OP = "topk_mask"
NUMERIC, STRUCTURE = Verdict.NUMERIC, Verdict.STRUCTURE


def _held_by(look: Any) -> Any:
    """A map by another look at each tile."""
    return lambda mask, a: mapped(mask, a, query_tiles(a), lambda part: bool(look(part)))


@planted(OP, NUMERIC, source="a tile seen through its first query")
def map_of_first_queries(**arguments: Any) -> Returned:
    """Only the first query of a tile is looked at."""
    return mask_twin(arguments, held=_held_by(lambda part: (part[:1] != 0).any()))


@planted(OP, NUMERIC, rows=("FC-071",))
def map_of_first_words(**arguments: Any) -> Returned:
    """Only the first word of a tile is looked at."""
    return mask_twin(arguments, held=_held_by(lambda part: (part[:, :1] != 0).any()))


@planted(OP, NUMERIC, rows=("F13",), source="a negative word taken for none")
def map_of_positive_words(**arguments: Any) -> Returned:
    """A word counts if it is above 0."""
    return mask_twin(arguments, held=_held_by(lambda part: (part > 0).any()))


@planted(OP, NUMERIC, rows=("F13",), source="words added instead of or-ed")
def map_by_the_sum_of_words(**arguments: Any) -> Returned:
    """A tile whose words sum to 0 in 32 bits holds none: two sign bits do."""
    return mask_twin(arguments, held=_held_by(lambda part: part.sum(dtype=torch.int32) != 0))


@planted(OP, NUMERIC, source="tiles counted through the packed queries")
def tiles_across_requests(**arguments: Any) -> Returned:
    """A tile may begin in one request and end in the next."""

    def packed(mask: Tensor, a: Mapping[str, Any]) -> Tensor:
        count, step = len(query_tiles(a)), a["tile"][0]
        ranges = [(step * at, step * (at + 1)) for at in range(count)]
        return mapped(mask, a, ranges, lambda part: bool((part != 0).any()))

    return mask_twin(arguments, held=packed)


@planted(OP, NUMERIC, STRUCTURE, source="tile of the other kernel")
def tiles_half_as_wide(**arguments: Any) -> Returned:
    """Tiles of keys are half as wide as asked for, as many as there should be."""

    def narrow(mask: Tensor, a: Mapping[str, Any]) -> Tensor:
        wanted = -(-mask.shape[1] // (a["tile"][1] // 32))
        half = {**a, "tile": (a["tile"][0], max(32, a["tile"][1] // 2))}
        return mapped(mask, half, query_tiles(a), lambda part: bool((part != 0).any()))[:, :wanted].contiguous()

    return mask_twin(arguments, held=narrow)


@planted(OP, NUMERIC, source="a map that skips nothing")
def map_says_everything(**arguments: Any) -> Returned:
    """Every tile is said to hold a bit, which costs time alone, until a reader trusts it."""
    return mask_twin(arguments, held=_held_by(lambda part: True))


@planted(OP, NUMERIC, source="the last tile of keys not looked at")
def map_without_the_last_tile(**arguments: Any) -> Returned:
    """A tile that the keys do not fill is left out."""

    def whole(mask: Tensor, a: Mapping[str, Any]) -> Tensor:
        words = a["tile"][1] // 32
        return mapped(mask, a, query_tiles(a), lambda part: part.shape[1] == words and bool((part != 0).any()))

    return mask_twin(arguments, held=whole)


@planted(OP, NUMERIC, source="as many queries looked at as one block of threads has")
def map_of_the_first_64_queries(**arguments: Any) -> Returned:
    """Queries of a tile past the 64th are not looked at."""
    return mask_twin(arguments, held=_held_by(lambda part: (part[:64] != 0).any()))


@planted(OP, NUMERIC, source="columns of the map counted from the first key of the sequence")
def map_of_a_chunk_from_position_0(**arguments: Any) -> Returned:
    """Tiles of keys begin at multiples of their size in the sequence, not in the chunk."""

    def absolute(mask: Tensor, a: Mapping[str, Any]) -> Tensor:
        wide, tiles = a["tile"][1] // 32, query_tiles(a)
        columns, cu = len(columns_of(mask, wide)), a["cu_seqlens_q"]
        held = torch.zeros(len(tiles), columns, dtype=torch.bool, device=mask.device)
        for row, (start, stop) in enumerate(tiles):
            request = int(torch.searchsorted(cu, start, right=True)) - 1
            before = bounds(a, request)[0] // 32 % wide
            moved = torch.nn.functional.pad(mask[start:stop], (before, 0))
            parts = columns_of(moved, wide)[:columns]
            held[row] = torch.stack([(part != 0).any() for part in parts])
        return held

    return mask_twin(arguments, held=absolute)
