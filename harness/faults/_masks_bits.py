"""Faults of ``topk_mask`` between an entry and its bit: signs, padding, repeated and far entries. And variants."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..record import Verdict
from . import planted, variant
from ._masks import Returned, answered, keys, mask_twin, signed, weighted, words, words_of

OP = "topk_mask"
NUMERIC = Verdict.NUMERIC


@planted(OP, NUMERIC, rows=("F13",))
def bit_31_lost(**arguments: Any) -> Returned:
    """The sign bit of a word is never set."""
    return mask_twin(arguments, signed=lambda found: signed(found & 0x7FFFFFFF))


@planted(OP, NUMERIC, rows=("F13",), source="half words joined as signed numbers")
def low_half_sign_extended(**arguments: Any) -> Returned:
    """Bit 15 of a word fills its upper half."""

    def joined(found: Tensor) -> Tensor:
        low = found & 0xFFFF
        return signed(found | torch.where(low >> 15 == 1, 0xFFFF0000, 0))

    return mask_twin(arguments, signed=joined)


@planted(OP, NUMERIC, source="a float32 accumulator of words")
def words_summed_in_float32(**arguments: Any) -> Returned:
    """A word of more than 24 bits' span loses its lowest ones."""
    return mask_twin(arguments, signed=lambda found: signed(found.float().double().long()))


@planted(OP, NUMERIC, source="most significant bit first")
def bits_in_reverse(**arguments: Any) -> Returned:
    """Key 0 is bit 31."""
    return mask_twin(arguments, words=lambda found, count: words(torch.where(found < 0, found, found ^ 31), count))


@planted(OP, NUMERIC, source="bytes of a word swapped")
def bytes_in_reverse(**arguments: Any) -> Returned:
    """A word's bytes come in the other order."""
    return mask_twin(arguments, words=lambda found, count: words(torch.where(found < 0, found, found ^ 24), count))


@planted(OP, NUMERIC, rows=("F15",), source="a negative index wraps as in Python")
def minus_one_wraps_to_the_last_key(**arguments: Any) -> Returned:
    """Padding of -1 stands for the last key."""

    def wrapped(entries: Tensor, first: int, count: int) -> Tensor:
        return keys(torch.where(entries == -1, first + count - 1, entries), first, count)

    return mask_twin(arguments, keys=wrapped)


@planted(OP, NUMERIC, rows=("F15",), source="shifted before it is compared")
def minus_one_sets_the_row_before(**arguments: Any) -> Returned:
    """-1 sets bit 31 of the word before the row."""
    answer = mask_twin(arguments)
    mask = answer if isinstance(answer, Tensor) else answer[0]
    padded = (arguments["indices"] == -1).any(1)[1:]
    if mask.shape[1]:
        mask[:-1, -1] |= torch.where(padded, torch.iinfo(torch.int32).min, 0).int()
    return answered(mask, arguments)


@planted(OP, NUMERIC, source="FC-096 in the mask: an invalid index replaced by 0")
def padding_stands_for_the_first_key(**arguments: Any) -> Returned:
    """Whatever is not valid becomes key 0."""

    def replaced(entries: Tensor, first: int, count: int) -> Tensor:
        found = keys(entries, first, count)
        return torch.where(found < 0, 0, found) if count else found

    return mask_twin(arguments, keys=replaced)


@planted(OP, NUMERIC, source="FC-098 in the mask: padding between entries ends the list")
def first_padding_ends_the_list(**arguments: Any) -> Returned:
    """Entries behind a -1 are not looked at."""

    def ended(entries: Tensor, first: int, count: int) -> Tensor:
        return keys(entries.masked_fill((entries == -1).cumsum(1) > 0, -1), first, count)

    return mask_twin(arguments, keys=ended)


@planted(OP, NUMERIC, rows=("F17", "FC-073"))
def repeated_keys_added(**arguments: Any) -> Returned:
    """Bits are summed, so that a key listed twice carries into the next one."""

    def summed(found: Tensor, count: int) -> Tensor:
        return weighted(_counts(found, count))

    return mask_twin(arguments, words=summed)


@planted(OP, NUMERIC, rows=("F17",), source="exclusive or for or")
def repeated_keys_cancel(**arguments: Any) -> Returned:
    """A key that is listed twice is not selected."""
    return mask_twin(arguments, words=lambda found, count: weighted(_counts(found, count) & 1))


def _counts(found: Tensor, num_words: int) -> Tensor:
    places = found.masked_fill(found < 0, 32 * num_words)
    counts = torch.zeros(len(found), 32 * num_words + 1, dtype=torch.int64, device=found.device)
    return counts.scatter_add_(1, places, torch.ones_like(places))[:, :-1]


@planted(OP, NUMERIC, source="words stored without an atomic operation")
def last_writer_of_a_word_wins(**arguments: Any) -> Returned:
    """Of the keys of a word only the one listed last has its bit."""

    def stored(found: Tensor, count: int) -> Tensor:
        row = torch.zeros(len(found), count + 1, dtype=torch.int64, device=found.device)
        for entry in found.T:
            word = torch.where(entry < 0, count, entry >> 5)
            row.scatter_(1, word[:, None], (1 << (entry & 31))[:, None])
        return row[:, :-1]

    return mask_twin(arguments, words=stored)


@planted(OP, NUMERIC, rows=("F16",))
def bits_behind_the_last_key(**arguments: Any) -> Returned:
    """What lies behind the keys of a request is written as long as the row has a bit for it."""

    def unbounded(entries: Tensor, first: int, count: int) -> Tensor:
        key = entries - first
        return key.masked_fill(key < 0, -1)

    return mask_twin(arguments, keys=unbounded)


@planted(OP, NUMERIC, rows=("F16",), source="a position past the row lands in the next one")
def far_entries_wrap_around_the_row(**arguments: Any) -> Returned:
    """Positions count modulo the bits of a row."""
    width = max(1, 32 * words_of(arguments))

    def modulo(entries: Tensor, first: int, count: int) -> Tensor:
        return torch.where(entries - first < 0, -1, (entries - first) % width)

    return mask_twin(arguments, keys=modulo)


@planted(OP, NUMERIC, source="positions clamped instead of dropped")
def far_entries_clamped(**arguments: Any) -> Returned:
    """What lies behind the last key stands for it."""
    return mask_twin(arguments, keys=lambda e, first, count: keys(e.clamp(max=first + count - 1), first, count))


@planted(OP, NUMERIC, source="unsigned comparison of a difference that wrapped")
def difference_compared_after_it_wrapped(**arguments: Any) -> Returned:
    """The smallest number minus the first key is a large one, modulo 2^16 a key."""

    def narrow(entries: Tensor, first: int, count: int) -> Tensor:
        return keys((entries - first) & 0xFFFF, 0, count)

    return mask_twin(arguments, keys=narrow)


@planted(OP, NUMERIC, source="positions kept in 16 bits")
def positions_of_16_bits(**arguments: Any) -> Returned:
    """Keys from 2^15 on are negative."""
    return mask_twin(arguments, keys=lambda e, first, count: keys(e.to(torch.int16).long(), first, count))


@planted(OP, NUMERIC, source="last key excluded")
def last_key_lost(**arguments: Any) -> Returned:
    """The end of the keys is one too early."""
    return mask_twin(arguments, keys=lambda entries, first, count: keys(entries, first, count - 1))


@planted(OP, NUMERIC, source="a length of at least 1, so that there is something to launch")
def a_key_where_there_is_none(**arguments: Any) -> Returned:
    """A request without keys is taken to have one."""
    return mask_twin(arguments, keys=lambda entries, first, count: keys(entries, first, max(1, count)))


@planted(OP, NUMERIC, source="0 taken for padding")
def first_key_lost(**arguments: Any) -> Returned:
    """Positions must be above 0."""
    return mask_twin(arguments, keys=lambda e, first, count: keys(torch.where(e == 0, -1, e), first, count))


@planted(OP, NUMERIC, source="whole words alone")
def last_partial_word_dropped(**arguments: Any) -> Returned:
    """Keys behind the last whole word have no bit."""
    return mask_twin(arguments, keys=lambda entries, first, count: keys(entries, first, count // 32 * 32))


@planted(OP, NUMERIC, source="blocks of entries without a tail")
def last_partial_block_of_entries_dropped(**arguments: Any) -> Returned:
    """Entries are read sixteen at a time."""
    return mask_twin(arguments, keys=lambda e, first, count: keys(e[:, : e.shape[1] // 16 * 16], first, count))


@planted(OP, NUMERIC, source="one block of threads for a list")
def entries_past_1024_dropped(**arguments: Any) -> Returned:
    """Only 1024 entries of a list are looked at."""
    return mask_twin(arguments, keys=lambda e, first, count: keys(e[:, :1024], first, count))


@planted(OP, NUMERIC, source="causality in the mask")
def future_cut_off(**arguments: Any) -> Returned:
    """Keys after a query are left out, though the mask says nothing of causality."""

    def causal(entries: Tensor, first: int, count: int) -> Tensor:
        last = torch.arange(len(entries), device=entries.device)[:, None] + first + count - len(entries)
        return keys(entries.masked_fill(entries > last, -1), first, count)

    return mask_twin(arguments, keys=causal)


@variant(OP)
def request_by_request(**arguments: Any) -> Returned:
    """The clean twin."""
    return mask_twin(arguments)


@variant(OP)
def without_repetition_then_summed(**arguments: Any) -> Returned:
    """Each list is sorted, repeated entries are dropped, and the bits of the rest added."""

    def distinct(found: Tensor, count: int) -> Tensor:
        ordered = found.sort(dim=1).values
        again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        return weighted(_counts(ordered.masked_fill(again, -1), count))

    return mask_twin(arguments, words=distinct)


@variant(OP)
def packed_by_bytes(**arguments: Any) -> Returned:
    """Booleans packed to bytes, four of which are a word of this machine."""

    def packed(found: Tensor, count: int) -> Tensor:
        some = (_counts(found, count) > 0).cpu().numpy()
        flat = np.packbits(some, axis=1, bitorder="little")
        return torch.from_numpy(flat.view("<u4").astype(np.int64)).to(found.device)

    return mask_twin(arguments, words=packed)


@variant(OP)
def bit_by_bit(**arguments: Any) -> Returned:
    """One entry of every list at a time, or-ed to its word."""

    def ored(found: Tensor, count: int) -> Tensor:
        row, at = torch.zeros(len(found), count + 1, dtype=torch.int64, device=found.device), None
        for entry in found.T:
            at = torch.where(entry < 0, count, entry >> 5)[:, None]
            row.scatter_(1, at, row.gather(1, at) | (1 << (entry & 31))[:, None])
        return row[:, :-1]

    return mask_twin(arguments, words=ored)
