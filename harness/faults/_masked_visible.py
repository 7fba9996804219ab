"""Faults of ``masked_mha`` in what is hidden from whom, and how: causality, tiles, rows that see nothing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import _softmax, planted
from ._chunked import NEVER, State, finite_shift, normalised, softmax, weighted
from ._masked import Span, bits, hide, masked_twin, past, spans
from ._softmax import Online, even_tiles

OP = "masked_mha"
NUMERIC, NONFINITE, WRITE_SCOPE = Verdict.NUMERIC, Verdict.NONFINITE, Verdict.WRITE_SCOPE


@planted(OP, NUMERIC, NONFINITE, source="deepseek-ai/DeepSeek-V3.2-Exp: short rows list keys of the future")
def causality_left_to_the_bits(**arguments: Any) -> State:
    """What is selected is seen, past or future."""
    return masked_twin(arguments, past=lambda span: torch.ones_like(past(span)))


@planted(OP, NUMERIC, NONFINITE, source="mask argument not passed on")
def mask_ignored(**arguments: Any) -> State:
    """Every key of the past is seen."""
    return masked_twin(arguments, bits=lambda words, first_key, num_keys: _all(words, num_keys))


@planted(OP, NUMERIC, NONFINITE, source="two masks joined by the wrong operator")
def mask_or_causality(**arguments: Any) -> State:
    """A key is seen if it is selected or in the past."""
    return masked_twin(arguments, hide=lambda logits, selected, own: hide(logits, selected | own, selected | own))


@planted(OP, NUMERIC, NONFINITE, source="True for what is hidden, as some masks have it")
def mask_inverted(**arguments: Any) -> State:
    """What is not selected is seen."""
    return masked_twin(arguments, hide=lambda logits, selected, own: hide(logits, ~selected, own))


@planted(OP, NUMERIC, NONFINITE, source="stride of the head axis of the mask is 0 for the first head only")
def first_head_masked_only(**arguments: Any) -> State:
    """The bits hold for head 0; the others see all of the past."""

    def first(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        rest = hide(logits[:, 1:], torch.ones_like(selected), own)
        return torch.cat([hide(logits[:, :1], selected, own), rest], dim=1)

    return masked_twin(arguments, hide=first)


@planted(OP, NUMERIC, NONFINITE, source="diagonal tile taken for one in the past")
def diagonal_tile_not_masked_by_causality(**arguments: Any) -> State:
    """A query sees what is selected in all of its tile of 16 keys."""
    return masked_twin(arguments, past=lambda span: _past_by(span, lambda query: query | 15))


@planted(OP, NUMERIC, NONFINITE, source="FlexAttention: full blocks go without the mask function")
def full_tiles_without_causality(**arguments: Any) -> State:
    """A tile of 16 queries and 32 keys whose bits are all set is taken to need no mask at all."""

    def full(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        seen = selected & own
        for queries in range(0, selected.shape[0], 16):
            for keys in range(0, selected.shape[1], 32):
                tile = slice(queries, queries + 16), slice(keys, keys + 32)
                seen[tile] |= selected[tile].all()
        return hide(logits, seen, seen)

    return masked_twin(arguments, hide=full)


@planted(OP, NUMERIC, NONFINITE, source="full blocks go without the mask of the tail")
def full_tiles_without_bounds(**arguments: Any) -> State:
    """Tiles of 32 keys whose bits are all set for 16 queries are read to their end, past the last key of a chunk."""
    own, most, bits_there = spans(arguments), len(arguments["k"]), 32 * arguments["mask"].shape[1]

    def longer(a: Mapping[str, Any]) -> list[Span]:
        ends = [min(most, s.keys.stop + min(-s.num_keys % 32, bits_there - s.first_key - s.num_keys)) for s in own]
        return [replace(span, keys=slice(span.keys.start, end)) for span, end in zip(own, ends, strict=True)]

    def bounded(span: Span) -> Tensor:
        count = own[span.request].num_keys
        selected = bits(arguments["mask"][span.queries], span.first_key, span.num_keys)
        inside = (torch.arange(span.num_keys) < count).repeat(span.num_queries, 1)
        for query in range(0, span.num_queries, 16):
            tile = slice(query, query + 16), slice(count // 32 * 32, None)
            inside[tile] |= selected[tile].all()
        return past(span) & inside

    return masked_twin(arguments, spans=longer, past=bounded)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-009",))
def sees_one_future_key(**arguments: Any) -> State:
    """The causal limit lies one key too far."""
    return masked_twin(arguments, past=lambda span: _past_by(span, lambda query: query + 1))


@planted(OP, NUMERIC, NONFINITE, source="< for <=")
def misses_its_own_key(**arguments: Any) -> State:
    """The causal limit lies one key too early."""
    return masked_twin(arguments, past=lambda span: _past_by(span, lambda query: query - 1))


@planted(OP, NUMERIC, NONFINITE, rows=("F3",), source="causal mask aligned to the last key of every chunk")
def query_positions_ignored(**arguments: Any) -> State:
    """The last query is taken to stand at the last key, also in a chunk of the history."""

    def aligned(span: Span) -> Tensor:
        return past(replace(span, first_query=span.first_key + span.num_keys - span.num_queries))

    return masked_twin(arguments, past=aligned)


@planted(OP, NUMERIC, NONFINITE, rows=("F4", "FC-060"))
def first_query_at_the_first_key(**arguments: Any) -> State:
    """Positions of queries are counted from the first key."""
    return masked_twin(arguments, past=lambda span: past(replace(span, first_query=span.first_key)))


@planted(OP, NUMERIC, NONFINITE, source="key index compared with a position")
def chunk_offset_missing_in_causality(**arguments: Any) -> State:
    """Keys are numbered from 0 where they are compared with positions of queries."""
    return masked_twin(arguments, past=lambda span: past(replace(span, first_key=0)))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-062",))
def nan_in_rows_that_see_nothing(**arguments: Any) -> State:
    """A row that sees no key is shifted by ``-inf``."""

    def plain(logits: Tensor, v: Tensor) -> State:
        if not logits.shape[2]:
            return softmax(logits, v)
        shift = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - shift)
        total = weights.sum(-1, keepdim=True)
        return weighted(weights, v) / total, (shift + torch.log(total))[..., 0]

    return masked_twin(arguments, softmax=plain)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-062", "FC-014"), source="finite stand-in for -inf")
def mean_in_rows_that_see_nothing(**arguments: Any) -> State:
    """Hidden logits are a large negative number: a row that sees no key averages all values, its lse is finite."""
    return masked_twin(arguments, hide=lambda *given: hide(*given).clamp(min=-1e30))


@planted(OP, NONFINITE, source="NaN cleaned by a maximum")
def zero_lse_in_rows_that_see_nothing(**arguments: Any) -> State:
    """The log of a denominator of 0 is taken as 0."""
    return masked_twin(arguments, finish=lambda out, lse, dtype: (out.to(dtype), lse.masked_fill(lse == NEVER, 0.0)))


@planted(OP, NONFINITE, rows=("F8",), source="FlashMLA's value, in an operation whose value is -inf")
def infinite_lse_in_rows_that_see_nothing(**arguments: Any) -> State:
    """The log-sum-exp of no key is ``+inf``."""
    return masked_twin(arguments, finish=lambda out, lse, dtype: (out.to(dtype), lse.masked_fill(lse == NEVER, -NEVER)))


@planted(OP, NONFINITE, WRITE_SCOPE, rows=("F9",), source="tiles without a bit leave before they store")
def rows_that_see_nothing_unwritten(**arguments: Any) -> State:
    """Nothing is stored for a row that sees no key."""
    out, lse = masked_twin(arguments)
    lazy_out, lazy_lse, seen = torch.empty_like(out), torch.empty_like(lse), lse > NEVER
    lazy_out[seen | lse.isnan()], lazy_lse[seen | lse.isnan()] = out[seen | lse.isnan()], lse[seen | lse.isnan()]
    return lazy_out, lazy_lse


@planted(OP, NONFINITE, rows=("F31", "FC-063"))
def first_tile_hidden_gives_nan(**arguments: Any) -> State:
    """A row whose tiles so far are all hidden is shifted by its maximum, ``-inf``."""
    return masked_twin(arguments, softmax=Online(tiles=even_tiles(16), guarded=False))


@planted(OP, NONFINITE, rows=("F7",), source="partial results of chunks merged")
def parts_without_keys_merge_to_nan(**arguments: Any) -> State:
    """Two parts of a row that see nothing are shifted by ``-inf``."""

    def merged(logits: Tensor, v: Tensor) -> State:
        halves = zip(logits.tensor_split(2, dim=2), v.tensor_split(2), strict=True)
        (out, lse), (other, other_lse) = (softmax(*half) for half in halves)
        highest = torch.maximum(lse, other_lse)
        one, two = torch.exp(lse - highest), torch.exp(other_lse - highest)
        mixed = one[..., None] * out + two[..., None] * other
        return mixed / (one + two)[..., None], highest + torch.log(one + two)

    return masked_twin(arguments, softmax=merged)


@planted(OP, NUMERIC, NONFINITE, source="additive mask of a finite number")
def hidden_by_adding_a_number(**arguments: Any) -> State:
    """-1e4 is added to hidden logits, which is not below every visible one."""

    def added(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        seen = (selected & own)[:, None]
        return torch.where(seen, logits, logits - 1e4).masked_fill(~seen.any(-1, keepdim=True), NEVER)

    return masked_twin(arguments, hide=added)


@planted(OP, NUMERIC, NONFINITE, source="mask filled with a number of half precision")
def hidden_logits_are_a_number(**arguments: Any) -> State:
    """A hidden logit is -1e4, which is not below every visible one."""

    def filled(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        seen = (selected & own)[:, None]
        return torch.where(seen, logits, -1e4).masked_fill(~seen.any(-1, keepdim=True), NEVER)

    return masked_twin(arguments, hide=filled)


@planted(OP, NONFINITE, rows=("FC-033",), source="mask added to the logits")
def hidden_by_a_sum(**arguments: Any) -> State:
    """``-inf`` is added to hidden logits, which hides all but the undefined ones."""

    def added(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        return logits + torch.zeros_like(logits).masked_fill(~(selected & own)[:, None], NEVER)

    return masked_twin(arguments, hide=added)


@planted(OP, NUMERIC, NONFINITE, source="mask multiplied into the weights")
def weights_masked_after_the_sum(**arguments: Any) -> State:
    """Hidden weights are made 0 when the denominator has been summed."""
    return _with_all_logits(arguments, _denominator_of_all)


@planted(OP, NUMERIC, NONFINITE, source="maximum taken before the mask")
def maximum_of_hidden_logits(**arguments: Any) -> State:
    """The shift is the largest logit of all keys: where that is far above the visible ones, nothing is left."""
    return _with_all_logits(arguments, _shifted_by_all)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-072",), source="soft cap after the mask")
def capped_after_the_mask(**arguments: Any) -> State:
    """Logits are held within +-80 after they have been hidden, so that hidden ones are finite again."""

    def capped(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        hidden = hide(logits, selected, own)
        return hidden.clamp(min=-80.0).masked_fill(~(hidden > NEVER).any(-1, keepdim=True), NEVER)

    return masked_twin(arguments, hide=capped)


@planted(OP, NONFINITE, rows=("FC-033",), source="undefined logits cleaned")
def nan_swallowed(**arguments: Any) -> State:
    """Undefined logits become 0, so that a broken input looks like a result."""
    return masked_twin(arguments, softmax=_softmax.numbers_for_nan)


@planted(OP, NUMERIC, rows=("F1",))
def base_2_lse_returned(**arguments: Any) -> State:
    """The log-sum-exp is in base 2."""
    return masked_twin(arguments, softmax=_softmax.base_2_lse)


@planted(OP, NUMERIC, rows=("FC-061",))
def maximum_scaled_twice(**arguments: Any) -> State:
    """The largest logit is scaled once more where the log-sum-exp is made."""

    def twice(logits: Tensor, v: Tensor) -> State:
        out, lse = softmax(logits, v)
        return out, lse + (arguments["softmax_scale"] - 1) * finite_shift(logits)[..., 0]

    return masked_twin(arguments, softmax=twice)


def _all(words: Tensor, num_keys: int) -> Tensor:
    return torch.ones(len(words), num_keys, dtype=torch.bool, device=words.device)


def _past_by(span: Span, limit: Callable[[Tensor], Tensor]) -> Tensor:
    """Causality with another last key, of the position of each query."""
    key = torch.arange(span.num_keys) + span.first_key
    return key <= limit(torch.arange(span.num_queries) + span.first_query)[:, None]


def _with_all_logits(arguments: Mapping[str, Any], wrong: Callable[[Tensor, Tensor, Tensor], State]) -> State:
    """A softmax that knows what was hidden: ``(hidden logits, all logits, v)``."""
    seen = torch.empty(0)

    def remember(logits: Tensor, selected: Tensor, own: Tensor) -> Tensor:
        nonlocal seen
        seen = logits
        return hide(logits, selected, own)

    return masked_twin(arguments, hide=remember, softmax=lambda logits, v: wrong(logits, seen, v))


def _denominator_of_all(logits: Tensor, everything: Tensor, v: Tensor) -> State:
    shift = finite_shift(logits)
    total = torch.exp(everything - shift).sum(-1, keepdim=True)
    return normalised(weighted(torch.exp(logits - shift), v), total, shift)


def _shifted_by_all(logits: Tensor, everything: Tensor, v: Tensor) -> State:
    shift = finite_shift(everything)
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)
