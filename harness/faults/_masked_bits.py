"""Faults of ``masked_mha`` in how the bits of the mask are found and read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import State
from ._masked import Span, bits, masked_twin, spans, unpacked, words

OP = "masked_mha"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, NONFINITE, rows=("F12",), source="vllm-project/vllm#50906: suffix of a context of 31 tokens")
def next_word_never_read(**arguments: Any) -> State:
    """32 bits from the chunk's first key on are one word, shifted: what lies in the next word is lost."""

    def one_word(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        count = -(-num_keys // 32)
        wide = torch.nn.functional.pad(words, (0, 1)).long() & 0xFFFFFFFF
        return unpacked(wide[:, first_key >> 5 :][:, :count] >> (first_key & 31), num_keys)

    return masked_twin(arguments, bits=one_word)


@planted(OP, NUMERIC, NONFINITE, rows=("F12",), source="chunk offset kept in words")
def chunk_offset_in_whole_words(**arguments: Any) -> State:
    """The bits of a chunk are read from the beginning of its first word."""
    return masked_twin(arguments, bits=lambda words, first_key, num_keys: bits(words, first_key & ~31, num_keys))


@planted(OP, NUMERIC, NONFINITE, source="chunk offset not passed on")
def chunk_offset_ignored(**arguments: Any) -> State:
    """The bits of a chunk are read from bit 0."""
    return masked_twin(arguments, bits=lambda words, first_key, num_keys: bits(words, 0, num_keys))


@planted(OP, NUMERIC, NONFINITE, rows=("F13",), source="funnel shift of signed words")
def sign_fills_the_shift(**arguments: Any) -> State:
    """A word with bit 31 is shifted as a negative number: the keys after its own are all selected."""

    def signed(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        shift, first, count = first_key & 31, first_key >> 5, -(-num_keys // 32)
        wide = torch.nn.functional.pad(words, (0, 2)).long()
        low, high = wide[:, first : first + count], wide[:, first + 1 : first + 1 + count]
        return unpacked((low >> shift) | (high << (32 - shift)), num_keys)

    return masked_twin(arguments, bits=signed)


@planted(OP, NUMERIC, NONFINITE, rows=("F13",), source="mask words taken for positive numbers")
def bit_31_lost(**arguments: Any) -> State:
    """The sign bit selects nothing."""
    return masked_twin(arguments, words=lambda mask, span: words(mask, span) & 0x7FFFFFFF)


@planted(OP, NUMERIC, NONFINITE, source="bit 31 first, as big-endian masks have it")
def bits_in_reverse_order(**arguments: Any) -> State:
    """Key ``s`` has bit ``31 - s`` of its word."""

    def reversed_bits(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        key = torch.arange(first_key, first_key + num_keys, device=words.device)
        return (words[:, key >> 5] >> (31 - (key & 31))) & 1 == 1

    return masked_twin(arguments, bits=reversed_bits)


@planted(OP, NUMERIC, NONFINITE, source="packed by bytes on one side, by words on the other")
def bytes_of_a_word_swapped(**arguments: Any) -> State:
    """The bytes of each word come in the other order."""

    def swapped(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        key = torch.arange(first_key, first_key + num_keys, device=words.device)
        return (words[:, key >> 5] >> ((key & 31) ^ 24)) & 1 == 1

    return masked_twin(arguments, bits=swapped)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-071",))
def first_word_of_the_tile_for_all(**arguments: Any) -> State:
    """Each tile of 64 keys is masked by its first word alone."""

    def narrow(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        key = torch.arange(first_key, first_key + num_keys, device=words.device)
        return (words[:, key >> 5 & ~1] >> (key & 31)) & 1 == 1

    return masked_twin(arguments, bits=narrow)


@planted(OP, NUMERIC, NONFINITE, source="keys // 32 words instead of the ceiling")
def bits_of_the_last_word_lost(**arguments: Any) -> State:
    """What a word holds that is not full of keys is not read."""

    def whole_words(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        found = bits(words, first_key, num_keys)
        found[:, (num_keys // 32) * 32 :] = False
        return found

    return masked_twin(arguments, bits=whole_words)


@planted(OP, NUMERIC, NONFINITE, source="one off in the position of a bit")
def bits_shifted_by_one(**arguments: Any) -> State:
    """Key ``s`` has the bit of key ``s + 1``; the last one has none."""

    def next_bit(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        return bits(torch.nn.functional.pad(words, (0, 1)), first_key + 1, num_keys)

    return masked_twin(arguments, bits=next_bit)


@planted(OP, NUMERIC, NONFINITE, source="byte masks of another library")
def any_bit_selects_its_byte(**arguments: Any) -> State:
    """8 keys share a flag: one is selected if any of them is."""

    def bytewise(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        key = torch.arange(first_key, first_key + num_keys, device=words.device)
        return (words[:, key >> 5] >> (key & 24)) & 0xFF != 0

    return masked_twin(arguments, bits=bytewise)


@planted(OP, NUMERIC, NONFINITE, rows=("F6", "F14"), source="row of the mask counted within the request")
def rows_of_the_first_request(**arguments: Any) -> State:
    """Query ``i`` of every request takes row ``i`` of the mask."""
    return masked_twin(arguments, words=lambda mask, span: mask[: span.num_queries])


@planted(OP, NUMERIC, NONFINITE, source="queries of a tile of requests without queries counted")
def rows_of_the_next_query(**arguments: Any) -> State:
    """Each query takes the row of the one after it, whoever that is."""
    return masked_twin(arguments, words=lambda mask, span: words(mask.roll(-1, 0), span))


@planted(OP, NUMERIC, NONFINITE, source="one mask for a tile of queries")
def first_query_masks_its_tile(**arguments: Any) -> State:
    """16 queries share the row of the first of them."""

    def shared(mask: Tensor, span: Span) -> Tensor:
        own = words(mask, span)
        return own[torch.arange(len(own)) // 16 * 16]

    return masked_twin(arguments, words=shared)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-056",))
def offset_of_rows_in_bits(**arguments: Any) -> State:
    """Later requests look for their first word as many words along as there are bits before it."""

    def far(mask: Tensor, span: Span) -> Tensor:
        flat = mask.flatten()
        index = torch.arange(span.num_queries * mask.shape[1]) + span.queries.start * mask.shape[1] * 32
        return flat[index % max(1, len(flat))].view(span.num_queries, mask.shape[1])

    return masked_twin(arguments, words=far)


@planted(OP, NUMERIC, NONFINITE, rows=("F14",), source="a reserved word at the end of each row")
def mask_read_as_contiguous(**arguments: Any) -> State:
    """Rows of the mask are addressed as if nothing lay between them."""
    mask = arguments["mask"]
    return masked_twin({**arguments, "mask": mask.as_strided(mask.shape, (mask.shape[1], 1))})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-065",))
def rows_as_wide_as_the_keys(**arguments: Any) -> State:
    """Rows are taken to have as many words as the longest request has keys for, not as many as they have."""
    mask, ends = arguments["mask"], arguments["key_starts"] + arguments["cu_seqlens_k"].diff()
    width = max(1, -(-int(ends.max()) // 32))
    return masked_twin({**arguments, "mask": mask.flatten()[: len(mask) * width].view(len(mask), width)})


class _Workspace:
    """A bitmap that is only ever added to: what an earlier call had selected stays selected."""

    def __init__(self) -> None:
        """Nothing is selected yet."""
        self._bits = torch.zeros(0, 0, dtype=torch.int32)

    def words(self, mask: Tensor, span: Span) -> Tensor:
        """The words of the request with what lies at their place in the workspace."""
        rows, columns = max(len(self._bits), len(mask)), max(self._bits.shape[1], mask.shape[1])
        grown = self._bits.new_zeros(rows, columns)
        grown[: len(self._bits), : self._bits.shape[1]] = self._bits
        grown[span.queries, : mask.shape[1]] |= mask[span.queries].cpu()
        self._bits = grown
        return grown[span.queries, : mask.shape[1]].to(mask.device)


_workspace = _Workspace()


@planted(OP, NUMERIC, NONFINITE, Verdict.NONDETERMINISTIC, Verdict.METAMORPHIC, rows=("FC-069",))
def bits_of_earlier_calls_left(**arguments: Any) -> State:
    """The workspace of the mask is not cleared between calls."""
    return masked_twin(arguments, words=_workspace.words)


_copies: dict[tuple[int, ...], Tensor] = {}


@planted(OP, NUMERIC, NONFINITE, Verdict.NONDETERMINISTIC, source="plan that holds a copy of the mask")
def mask_of_the_first_call(**arguments: Any) -> State:
    """The mask at an address is copied when it is first seen there."""
    mask = arguments["mask"]
    mine = _copies.setdefault((mask.data_ptr(), *mask.shape), mask.clone())
    return masked_twin({**arguments, "mask": mine})


@planted(OP, NUMERIC, NONFINITE, source="requests without queries left out of one list only")
def positions_of_another_request(**arguments: Any) -> State:
    """The chunk offset of a request is that of the one before."""

    def mixed(given: Mapping[str, Any]) -> list[Span]:
        found = spans(given)
        return [replace(span, first_key=found[at - 1].first_key) for at, span in enumerate(found)]

    def within(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        missing = max(0, -(-(first_key + num_keys) // 32) - words.shape[1])
        return bits(torch.nn.functional.pad(words, (0, missing)), first_key, num_keys)

    return masked_twin(arguments, spans=mixed, bits=within)
