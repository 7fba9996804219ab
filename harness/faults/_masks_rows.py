"""Faults of ``topk_mask`` in rows, chunks and memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._masks import (
    Returned,
    answered,
    bounds,
    entries,
    mask_of,
    mask_twin,
    rows,
    words_of,
)
from ._memory import CallCounter, TableByAddress, sixteen_requests

OP = "topk_mask"
NUMERIC, STRUCTURE, NONDETERMINISTIC = Verdict.NUMERIC, Verdict.STRUCTURE, Verdict.NONDETERMINISTIC


@planted(OP, NUMERIC, source="chunk offsets in whole words", rows=("F12",))
def first_key_rounded_to_a_word(**arguments: Any) -> Returned:
    """A chunk begins at the word in which its first key lies."""

    def rounded(a: Mapping[str, Any], request: int) -> tuple[int, int]:
        first, count = bounds(a, request)
        return first & ~31, count

    return mask_twin(arguments, bounds=rounded)


@planted(OP, NUMERIC, rows=("F12",), source="one word shifted, the next one's bits never joined")
def single_word_shift(**arguments: Any) -> Returned:
    """A chunk is cut out of a mask of all keys, word by word, without what the next word has of it."""
    starts = arguments["key_starts"]
    if starts is None:
        return mask_twin(arguments)
    ends = starts + arguments["key_lens"]
    everything = mask_of(mask_twin({**arguments, "key_starts": None, "key_lens": ends, "tile": None}))
    num_words, mask = words_of(arguments), mask_of(mask_twin({**arguments, "tile": None}))
    for request, start in enumerate(starts.tolist()):
        first, stop = rows(arguments, request)
        wide = torch.nn.functional.pad(everything[first:stop].long() & 0xFFFFFFFF, (0, num_words + 1))
        cut = wide[:, start // 32 : start // 32 + num_words] >> (start % 32)
        mask[first:stop] &= torch.where(cut >> 31 == 1, cut - (1 << 32), cut).int()
    return answered(mask, arguments)


@planted(OP, NUMERIC, source="indices of a chunk not remapped")
def first_key_ignored(**arguments: Any) -> Returned:
    """Bit 0 stands for position 0, whatever the chunk."""
    return mask_twin(arguments, bounds=lambda a, request: (0, sum(bounds(a, request))))


@planted(OP, NUMERIC, source="a chunk bounded by its length alone")
def chunk_ends_at_its_length(**arguments: Any) -> Returned:
    """The number of keys is taken for the position behind the last."""

    def shorter(a: Mapping[str, Any], request: int) -> tuple[int, int]:
        first, count = bounds(a, request)
        return first, max(0, count - first)

    return mask_twin(arguments, bounds=shorter)


@planted(OP, NUMERIC, source="bounds of the first request for all")
def first_bounds_for_all(**arguments: Any) -> Returned:
    """Every request has the keys of the first."""
    return mask_twin(arguments, bounds=lambda a, request: bounds(a, 0))


@planted(OP, NUMERIC, source="searched in the offsets from the other side")
def last_query_of_a_request_in_the_next(**arguments: Any) -> Returned:
    """The boundaries between requests lie a query too early."""
    last = len(arguments["key_lens"]) - 1

    def early(a: Mapping[str, Any], request: int) -> tuple[int, int]:
        start, stop = rows(a, request)
        return max(0, start - (request > 0)), max(0, stop - (request < last))

    return mask_twin(arguments, rows=early)


@planted(OP, NUMERIC, rows=("F14",))
def row_stride_with_a_reserved_word(**arguments: Any) -> Returned:
    """Rows are written a word further apart than they are read."""
    mask = mask_of(mask_twin(arguments))
    apart = torch.nn.functional.pad(mask, (0, 1)).flatten()[: mask.numel()].view(mask.shape)
    return answered(apart, arguments)


@planted(OP, NUMERIC, rows=("FC-056",))
def offset_of_later_requests_in_bits(**arguments: Any) -> Returned:
    """Rows of a request begin where its bits would if there were no words."""
    mask = mask_of(mask_twin(arguments))
    lens = arguments["key_lens"].tolist()
    moved = torch.zeros_like(mask)
    for request, count in enumerate(lens):
        start, stop = rows(arguments, request)
        flat = (start * count + 31) // 32
        part = mask[start:stop].flatten()
        room = moved.flatten()[flat : flat + len(part)]
        room.copy_(part[: len(room)])
    return answered(moved, arguments)


@planted(OP, NUMERIC, source="row stride of the lists ignored")
def lists_taken_for_contiguous(**arguments: Any) -> Returned:
    """Lists are read one after the other in memory, whatever lies between them."""
    indices = arguments["indices"]
    count, topk = indices.shape
    flat = torch.as_strided(indices, (count, topk), (topk, 1), indices.storage_offset())
    return mask_twin({**arguments, "indices": flat})


@planted(OP, NUMERIC, source="width rounded up in the row loop")
def lists_read_past_their_end(**arguments: Any) -> Returned:
    """An entry behind each list is read as part of it."""

    def longer(a: Mapping[str, Any], start: int, stop: int) -> Tensor:
        indices = a["indices"]
        shape = indices.shape[0], indices.shape[1] + 1
        return torch.as_strided(indices, shape, indices.stride(), indices.storage_offset())[start:stop].long()

    return mask_twin(arguments, entries=longer)


@planted(OP, NUMERIC, source="lists of the first query for a tile of queries")
def neighbours_share_a_list(**arguments: Any) -> Returned:
    """Queries are marked two at a time, from the first one's list."""

    def shared(a: Mapping[str, Any], start: int, stop: int) -> Tensor:
        lists = entries(a, start, stop)
        return lists[torch.arange(len(lists), device=lists.device) // 2 * 2]

    return mask_twin(arguments, entries=shared)


_LEFT: dict[tuple[int, ...], Tensor] = {}


@planted(OP, NUMERIC, rows=("F30", "FC-069"))
def bits_of_the_last_call_stay(**arguments: Any) -> Returned:
    """A mask of one shape is kept and only gains bits."""
    indices = arguments["indices"]
    shape = len(indices), words_of(arguments)
    kept = _LEFT.setdefault(shape, torch.zeros(shape, dtype=torch.int32)).to(indices.device)
    kept |= mask_of(mask_twin({**arguments, "tile": None}))
    _LEFT[shape] = kept.cpu()
    return answered(kept.clone(), arguments)


@planted(OP, NUMERIC, Verdict.WRITE_SCOPE, source="words not cleared")
def words_not_cleared(**arguments: Any) -> Returned:
    """Bits are added to memory as it comes."""
    indices = arguments["indices"]
    fresh = torch.empty(len(indices), words_of(arguments), dtype=torch.int32, device=indices.device)
    return mask_twin(arguments, buffer=fresh)


@planted(OP, Verdict.WRITE_SCOPE, NUMERIC, source="rows without a key skipped")
def empty_rows_left_as_they_were(**arguments: Any) -> Returned:
    """A query that selects nothing has no row written."""
    mask = mask_of(mask_twin(arguments))
    lazy = torch.empty_like(mask)
    some = (mask != 0).any(1)
    lazy[some] = mask[some]
    return answered(lazy, arguments)


_CALLS = CallCounter()


@planted(OP, NONDETERMINISTIC, NUMERIC, source="clearing and marking of one launch without a barrier between them")
def clearing_races_with_marking(**arguments: Any) -> Returned:
    """Every other call a word is cleared after it was marked."""
    mask = mask_of(mask_twin(arguments))
    if _CALLS.next() % 2 == 0 and mask.numel():
        mask[-1] = 0
    return answered(mask, arguments)


class _ByAddress:
    """The answer of the last call, given again when the lists lie where they lay."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._answer: Returned | None = None

    def __call__(self, arguments: Mapping[str, Any]) -> Returned:
        """Compute once for each place, which knows nothing of the lists."""
        indices = arguments["indices"]
        key = indices.data_ptr(), tuple(indices.shape), arguments["tile"], tuple(arguments["key_lens"].tolist())
        if key != self._key or self._answer is None:
            self._key, self._answer = key, mask_twin(arguments)
        if isinstance(self._answer, Tensor):
            return self._answer.clone()
        return self._answer[0].clone(), self._answer[1].clone()


_REMEMBERED = _ByAddress()


@planted(OP, NONDETERMINISTIC, source="a mask cached by the address of the lists")
def lists_remembered_by_address(**arguments: Any) -> Returned:
    """Lists that changed in place give the mask of the old ones."""
    return _REMEMBERED(arguments)


_OFFSETS, _COUNTS, _STARTS = TableByAddress(), TableByAddress(), TableByAddress()


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the offsets")
def offsets_known_by_address(**arguments: Any) -> Returned:
    """Offsets of queries are read once for every place in memory."""
    offsets = arguments["cu_seqlens_q"]
    return mask_twin({**arguments, "cu_seqlens_q": _OFFSETS(offsets, offsets.diff(), arguments["key_lens"])})


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def lengths_known_by_address(**arguments: Any) -> Returned:
    """Numbers of keys are read once for every place in memory."""
    lens = arguments["key_lens"]
    return mask_twin({**arguments, "key_lens": _COUNTS(lens, lens, arguments["cu_seqlens_q"].diff())})


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the first keys")
def first_keys_known_by_address(**arguments: Any) -> Returned:
    """The keys with which chunks begin are read once for every place in memory."""
    starts = arguments["key_starts"]
    if starts is None:
        return mask_twin(arguments)
    return mask_twin({**arguments, "key_starts": _STARTS(starts, starts, arguments["key_lens"])})


@planted(OP, NUMERIC, source="tables sized for a fixed number of requests")
def requests_past_the_sixteenth_left_out(**arguments: Any) -> Returned:
    """Rows of later requests have no bit, and their tiles hold none."""
    (mask,) = sixteen_requests((mask_of(mask_twin(arguments)),), arguments["cu_seqlens_q"], 0)
    return answered(mask, arguments)


@planted(OP, Verdict.MUTATED_INPUT, source="padding replaced in place")
def padding_replaced_in_place(**arguments: Any) -> Returned:
    """What is not valid becomes -1 in the caller's lists."""
    indices = arguments["indices"]
    indices.masked_fill_(indices < 0, -2)
    return mask_twin(arguments)


@planted(OP, STRUCTURE, source="rows rounded up to the query tile")
def rows_padded_to_the_tile(**arguments: Any) -> Returned:
    """The mask has as many rows as whole tiles of queries."""
    answer = mask_twin(arguments)
    mask = mask_of(answer)
    padded = torch.nn.functional.pad(mask, (0, 0, 0, -len(mask) % 128))
    return padded if isinstance(answer, Tensor) else (padded, answer[1])


@planted(OP, STRUCTURE, source="words of 64 bits")
def words_of_64_bits(**arguments: Any) -> Returned:
    """Words come as int64."""
    answer = mask_twin(arguments)
    return answer.long() if isinstance(answer, Tensor) else (answer[0].long(), answer[1])


@planted(OP, Verdict.CRASH, rows=("FC-075",))
def cap_counted_as_too_much(**arguments: Any) -> Returned:
    """A mask that takes exactly what it may is refused."""
    size = 4 * len(arguments["indices"]) * words_of(arguments)
    if size >= arguments["max_bytes"]:
        raise ValueError(f"the mask must take less than {arguments['max_bytes']} bytes, got {size}")
    return mask_twin(arguments)
