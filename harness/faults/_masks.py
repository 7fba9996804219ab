"""A clean twin of ``topk_mask`` in plain torch, made of small steps that a fault replaces one at a time."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Returned = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One function per step, in the order in which they run.

    Attributes:
        rows: ``(arguments, request)`` to the half-open range of its rows.
        bounds: ``(arguments, request)`` to the first key and the number of keys.
        entries: ``(arguments, start, stop)`` to the lists of some rows, int64.
        keys: ``(entries, first, count)`` to the bit of each entry, -1 for none.
        words: ``(keys, num_words)`` to ``[n, num_words]``, int64, numbers without sign.
        signed: Those numbers as int32.
        held: ``(mask, arguments)`` to the map.
    """

    rows: Callable[[Mapping[str, Any], int], tuple[int, int]]
    bounds: Callable[[Mapping[str, Any], int], tuple[int, int]]
    entries: Callable[[Mapping[str, Any], int, int], Tensor]
    keys: Callable[[Tensor, int, int], Tensor]
    words: Callable[[Tensor, int], Tensor]
    signed: Callable[[Tensor], Tensor]
    held: Callable[[Tensor, Mapping[str, Any]], Tensor]


def rows(arguments: Mapping[str, Any], request: int) -> tuple[int, int]:
    """Of packed queries."""
    cu = arguments["cu_seqlens_q"]
    return int(cu[request]), int(cu[request + 1])


def bounds(arguments: Mapping[str, Any], request: int) -> tuple[int, int]:
    """Of its own."""
    starts = arguments["key_starts"]
    return 0 if starts is None else int(starts[request]), int(arguments["key_lens"][request])


def entries(arguments: Mapping[str, Any], start: int, stop: int) -> Tensor:
    """All of them."""
    lists: Tensor = arguments["indices"][start:stop].long()
    return lists


def keys(entries: Tensor, first: int, count: int) -> Tensor:
    """Counted from the first key; nothing outside of the keys."""
    key = entries - first
    return key.masked_fill((key < 0) | (key >= count), -1)


def words(keys: Tensor, num_words: int) -> Tensor:
    """A key that is listed twice has one bit; what no row can hold has none."""
    # one place behind the last for what is not there
    places = keys.masked_fill((keys < 0) | (keys >= 32 * num_words), 32 * num_words)
    selected = torch.zeros(len(keys), 32 * num_words + 1, dtype=torch.int64, device=keys.device)
    selected.scatter_(1, places, 1)
    return weighted(selected[:, :-1])


def weighted(selected: Tensor) -> Tensor:
    """Columns of bits, or of counts, summed to words."""
    shifts = torch.arange(32, device=selected.device)
    summed: Tensor = (selected.unflatten(1, (-1, 32)) << shifts).sum(-1)
    return summed


def signed(words: Tensor) -> Tensor:
    """The upper half of the numbers is negative."""
    low = words & 0xFFFFFFFF
    return torch.where(low >> 31 == 1, low - (1 << 32), low).int()


def query_tiles(arguments: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Rows of each tile of the map; each request begins a tile of its own."""
    cu, step = arguments["cu_seqlens_q"].tolist(), arguments["tile"][0]
    return [
        (first, min(first + step, stop)) for start, stop in itertools.pairwise(cu) for first in range(start, stop, step)
    ]


def columns_of(mask: Tensor, tile_words: int) -> list[Tensor]:
    """The words of each tile of keys."""
    return list(mask.split(tile_words, dim=1)) if mask.shape[1] else []


def held(mask: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Whether a tile has any bit."""
    return mapped(mask, arguments, query_tiles(arguments), lambda part: bool((part != 0).any()))


def mapped(
    mask: Tensor, arguments: Mapping[str, Any], ranges: list[tuple[int, int]], look: Callable[[Tensor], bool]
) -> Tensor:
    """A map of these ranges of rows, by what is seen of each tile."""
    columns = columns_of(mask, arguments["tile"][1] // 32)
    found = [[look(column[start:stop]) for column in columns] for start, stop in ranges]
    return torch.tensor(found, dtype=torch.bool, device=mask.device).reshape(len(ranges), len(columns))


CLEAN = Steps(rows=rows, bounds=bounds, entries=entries, keys=keys, words=words, signed=signed, held=held)


def words_of(arguments: Mapping[str, Any]) -> int:
    """What the longest request needs."""
    return -(-int(arguments["key_lens"].max()) // 32)


def mask_twin(arguments: Mapping[str, Any], *, buffer: Tensor | None = None, **changes: Any) -> Returned:
    """``topk_mask`` with some steps changed.

    Args:
        arguments: Of the operation, by name.
        buffer: A mask to which the bits are added, as it is; one of zeros if None.
        changes: Steps by name, see ``Steps``.
    """
    steps, num_words = replace(CLEAN, **changes), words_of(arguments)
    indices = arguments["indices"]
    mask = buffer
    if mask is None:
        mask = torch.zeros(len(indices), num_words, dtype=torch.int32, device=indices.device)
    for request in range(len(arguments["key_lens"])):
        start, stop = steps.rows(arguments, request)
        first, count = steps.bounds(arguments, request)
        found = steps.keys(steps.entries(arguments, start, stop), first, count)
        mask[start:stop] |= steps.signed(steps.words(found, num_words))
    return answered(mask, arguments, steps.held)


def answered(
    mask: Tensor, arguments: Mapping[str, Any], look: Callable[[Tensor, Mapping[str, Any]], Tensor] = held
) -> Returned:
    """The mask, with its map where tiles are given."""
    return mask if arguments["tile"] is None else (mask, look(mask, arguments))


def mask_of(returned: Returned) -> Tensor:
    """The mask of an answer."""
    return returned if isinstance(returned, Tensor) else returned[0]
