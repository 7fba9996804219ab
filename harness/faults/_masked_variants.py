"""Correct forms of ``masked_mha`` that compute in another order or another way; none may be rejected."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..contract import Contract, default_contract
from ..plugin import kernel
from . import _softmax, variant
from ._attention_variants import stored_in_parts
from ._chunked import NEVER, State, softmax
from ._masked import Span, masked_twin, word_by_word, words
from ._masked_memory import skipping, tiles_with_bits
from ._softmax import Online, even_tiles

OP = "masked_mha"


@variant(OP)
def clean(**arguments: Any) -> State:
    """The clean twin, from which every fault differs by one step."""
    return masked_twin(arguments)


@variant(OP)
def tiles_of_13(**arguments: Any) -> State:
    """Online softmax over a tile size that divides nothing."""
    return masked_twin(arguments, softmax=Online(tiles=even_tiles(13)))


@variant(OP)
def tiles_from_last_to_first(**arguments: Any) -> State:
    """Online softmax from the diagonal backwards."""
    return masked_twin(arguments, softmax=Online(tiles=lambda keys: reversed(even_tiles(16)(keys))))


@variant(OP)
def words_joined_across_a_shift(**arguments: Any) -> State:
    """32 bits from the chunk's first key on: the end of one word and the beginning of the next."""
    return masked_twin(arguments, bits=word_by_word)


@variant(OP)
def read_byte_by_byte(**arguments: Any) -> State:
    """The mask as bytes, in the order in which they lie in memory."""

    def bytewise(words: Tensor, first_key: int, num_keys: int) -> Tensor:
        octets = words.contiguous().view(torch.uint8)
        key = torch.arange(first_key, first_key + num_keys, device=words.device)
        return (octets[:, key >> 3] >> (key & 7)) & 1 == 1

    return masked_twin(arguments, bits=bytewise)


@variant(OP)
def causality_in_the_words(**arguments: Any) -> State:
    """Bits of the future are cleared in a copy of the words, and the bits alone decide."""

    def cleared(mask: Tensor, span: Span) -> Tensor:
        own = words(mask, span)
        start = 32 * torch.arange(own.shape[1], device=own.device)
        kept = (torch.arange(span.num_queries, device=own.device)[:, None] + span.first_query + 1 - start).clamp(0, 32)
        ones = torch.where(kept == 32, -1, (1 << kept) - 1)
        return own & ones.int()

    return masked_twin(arguments, words=cleared, past=lambda span: torch.ones(1, 1, dtype=torch.bool))


@variant(OP)
def empty_tiles_skipped(**arguments: Any) -> State:
    """Tiles without a bit are not looked at."""
    return skipping(arguments, tiles_with_bits)


@variant(OP)
def every_other_empty_tile_skipped(**arguments: Any) -> State:
    """A map may say of a tile without a bit that it has one."""

    def generous(mask: Tensor, span: Span) -> Tensor:
        held = tiles_with_bits(mask, span)
        return held | (torch.arange(held.shape[1], device=held.device) % 2 == 0)

    return skipping(arguments, generous)


@variant(OP)
def selected_keys_gathered(**arguments: Any) -> State:
    """Each query attends to a list of the keys that it sees, the last one first."""

    def gathered(logits: Tensor, v: Tensor) -> State:
        out, lse = logits.new_zeros(*logits.shape[:2], v.shape[2]), logits.new_full(logits.shape[:2], NEVER)
        for query, row in enumerate(logits):
            listed = (row > NEVER).any(0).nonzero()[:, 0].flip(0)
            if bool(row.isnan().any()):
                listed = torch.arange(row.shape[1], device=row.device)
            part, part_lse = softmax(row[None, :, listed], v[listed])
            out[query], lse[query] = part[0], part_lse[0]
        return out, lse

    return masked_twin(arguments, softmax=gathered)


@variant(OP)
def finite_sentinel_with_a_rule(**arguments: Any) -> State:
    """Hidden logits are -1e30, and a row of nothing else is told apart by a rule of its own."""

    def ruled(logits: Tensor, v: Tensor) -> State:
        out, lse = softmax(logits.clamp(min=-1e30), v)
        empty = (logits == NEVER).all(-1)
        return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, NEVER)

    return masked_twin(arguments, softmax=ruled)


@variant(OP)
def base_2(**arguments: Any) -> State:
    """``exp2`` with the scale folded in."""
    return masked_twin(arguments, softmax=_softmax.from_base_2)


@variant(OP)
def weights_normalised_first(**arguments: Any) -> State:
    """Weights are divided by the denominator before they are rounded."""
    return masked_twin(arguments, softmax=_softmax.normalised_first)


@variant(OP)
def weights_from_lse(**arguments: Any) -> State:
    """Normalised weights are ``exp(z - lse)``."""
    return masked_twin(arguments, softmax=_softmax.weights_from_lse)


@variant(OP)
def heads_first_layout(**arguments: Any) -> State:
    """Both results are transposed views of ``[H, T, ...]`` buffers."""
    out, lse = masked_twin(arguments)
    return out.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T


def _promising(*, merges: bool = False, **promises: Any) -> Callable[[Case], Contract]:
    """The contract of a kernel that declares none, with other promises; partial results in the dtype of the inputs."""
    return lambda case: default_contract(case.dtype, projected=False, splits=merges).promising(**promises)


@variant(OP)
@kernel(contract=_promising(merges=True, splits_store="fp32", splits=3))
def split_keys(**arguments: Any) -> State:
    """Three stretches of keys, their float32 results merged; any of them may be empty for a query."""
    return masked_twin(arguments, softmax=_softmax.split_in_parts(3))


@variant(OP)
@kernel(contract=_promising(merges=True, splits=3))
def split_keys_stored(**arguments: Any) -> State:
    """Three partial results in the dtype of the inputs, and a contract that says how many."""
    return masked_twin(arguments, softmax=stored_in_parts(3))


@variant(OP)
@kernel(contract=_promising(merges=True))
def split_keys_as_planned(**arguments: Any) -> State:
    """The same with as many partial results as a scheduler likes, which its contract leaves open."""
    return masked_twin(arguments, softmax=stored_in_parts(7))


@variant(OP)
@kernel(contract=_promising(l="from_p"))
def total_of_rounded(**arguments: Any) -> State:
    """The denominator sums the rounded weights."""
    return masked_twin(arguments, softmax=_softmax.total_of_rounded)
