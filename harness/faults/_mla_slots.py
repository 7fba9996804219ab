"""Faults of ``mla_prefill`` in addressing: rows of the slot table, slots, strides of the caches."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import NEVER, Pass, State, gather, mask, mla_prefill_twin, passes, slots

OP = "mla_prefill"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
# a wrong slot holds another token or nothing
WRONG_SLOT = (NUMERIC, NONFINITE)


@planted(OP, *WRONG_SLOT, rows=("F6",))
def row_is_batch_index(**arguments: Any) -> State:
    """Request ``r`` reads row ``r`` of the slot table."""
    rows = torch.arange(len(arguments["request_rows"]))
    return mla_prefill_twin({**arguments, "request_rows": rows})


@planted(OP, *WRONG_SLOT, source="tried with an identity mapping only")
def slots_are_positions(**arguments: Any) -> State:
    """Token ``s`` lies in slot ``s``: the table is not read."""
    return mla_prefill_twin(arguments, slots=lambda table, row, count: torch.arange(count, device=table.device))


@planted(OP, *WRONG_SLOT, source="request index off by one in the gather")
def history_of_the_request_before(**arguments: Any) -> State:
    """The slots of each request are looked up in the row of its neighbour."""
    rows = arguments["request_rows"].roll(1)
    return mla_prefill_twin({**arguments, "request_rows": rows})


@planted(OP, *WRONG_SLOT, rows=("FC-044",))
def slots_from_chunk_local_index(**arguments: Any) -> State:
    """Each chunk reads the slots of the first one: its offset is not added."""
    return mla_prefill_twin(arguments, passes=lambda *lengths: [_from_zero(one) for one in passes(*lengths)])


def _from_zero(one: Pass) -> Pass:
    return one if one.causal else Pass(keys=slice(0, one.keys.stop - one.keys.start))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-046",))
def slot_0_taken_for_padding(**arguments: Any) -> State:
    """A token in slot 0 is left out of the history, as if the slot were a null block."""

    def without_zero(slot_table: Tensor, row: int, count: int) -> Tensor:
        own = slots(slot_table, row, count)
        return torch.where(own == 0, own[-1], own)

    return mla_prefill_twin(arguments, slots=without_zero)


def _tiles_of_slots(arguments: dict[str, Any], spare: int, *, hidden: bool) -> State:
    """Chunks padded to 8 rows with slot ``spare``, hidden by the mask or not."""
    padding = 0

    def padded(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal padding
        padding = -len(own) % 8
        return gather(kv_c, k_pe, torch.cat([own, own.new_full((padding,), spare)]))

    def own_mask(scores: Tensor, causal: bool) -> Tensor:
        own, rest = scores.split([scores.shape[2] - padding, padding], dim=2)
        return torch.cat([mask(own, causal), rest.new_full(rest.shape, NEVER) if hidden else rest], dim=2)

    return mla_prefill_twin(arguments, gather=padded, mask=own_mask)


@planted(OP, NONFINITE, rows=("FC-016", "F32"))
def padding_slots_weighted_by_zero(**arguments: Any) -> State:
    """Rows of a chunk past its end come from slot -1 and get weight 0; 0 times NaN is NaN."""
    return _tiles_of_slots(arguments, -1, hidden=True)


@planted(OP, NONFINITE, source="-1 wraps around to the last slot")
def padding_slots_wrap_around(**arguments: Any) -> State:
    """Rows of a chunk past its end come from slot -1 and count as keys."""
    return _tiles_of_slots(arguments, -1, hidden=False)


@planted(OP, NONFINITE, source="vllm-project/vllm#45324")
def padding_slots_clamped_to_0(**arguments: Any) -> State:
    """Rows of a chunk past its end come from slot 0 and count as keys."""
    return _tiles_of_slots(arguments, 0, hidden=False)


@planted(OP, *WRONG_SLOT, rows=("FC-049",))
def chunk_as_long_as_the_longest(**arguments: Any) -> State:
    """Every history is read to the length of the longest one of the batch."""

    def to_longest(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        return passes(history, current, chunk, longest)[:1] + passes(longest, 0, chunk, longest)[1:]

    def whole_row(slot_table: Tensor, row: int, count: int) -> Tensor:
        return slots(slot_table, row, slot_table.shape[1])

    return mla_prefill_twin(arguments, passes=to_longest, slots=whole_row)


@planted(OP, NONFINITE, source="context_lens taken for the history alone")
def context_without_current_tokens(**arguments: Any) -> State:
    """Current tokens are looked for behind the context, where the table holds -1."""
    ends = arguments["cu_seqlens"]
    return mla_prefill_twin({**arguments, "context_lens": arguments["context_lens"] + ends.diff()})


def _prefixes(arguments: dict[str, Any], *, later: bool) -> list[int]:
    """How many tokens of each request lie in slots of another one, or of a later one alone."""
    table, rows, lens = (arguments[name].tolist() for name in ("slot_table", "request_rows", "context_lens"))
    owned = [set(table[row][:length]) for row, length in zip(rows, lens, strict=True)]
    others = [owned[at + 1 :] if later else owned[:at] + owned[at + 1 :] for at in range(len(owned))]
    return [len(own & set().union(*rest)) for own, rest in zip(owned, others, strict=True)]


@planted(OP, NUMERIC, source="shared prefix attended once for all and once for each")
def shared_prefix_counted_twice(**arguments: Any) -> State:
    """Tokens whose slots two requests share are visited once more."""
    prefixes = iter(_prefixes(arguments, later=False))

    def once_more(*lengths: int) -> list[Pass]:
        prefix = next(prefixes)
        return [*passes(*lengths), *([Pass(keys=slice(0, prefix))] if prefix else [])]

    return mla_prefill_twin(arguments, passes=once_more)


@planted(OP, NUMERIC, source="map from slots to requests, which holds one request each")
def shared_prefix_left_to_its_last_owner(**arguments: Any) -> State:
    """A slot belongs to the last request that names it; earlier ones do not see its token."""
    prefixes = iter(_prefixes(arguments, later=True))

    def without(*lengths: int) -> list[Pass]:
        (current, *history), prefix = passes(*lengths), next(prefixes)
        left = [Pass(keys=slice(max(one.keys.start, prefix), one.keys.stop)) for one in history]
        return [current, *(one for one in left if one.keys.stop > one.keys.start)]

    return mla_prefill_twin(arguments, passes=without)


@planted(OP, *WRONG_SLOT, rows=("FC-041",))
def row_stride_from_width(**arguments: Any) -> State:
    """Rows of both caches are taken to follow each other without gaps."""
    caches = {name: _without_gaps(arguments[name]) for name in ("kv_c", "k_pe")}
    return mla_prefill_twin({**arguments, **caches})


def _without_gaps(cache: Tensor) -> Tensor:
    return cache.as_strided(cache.shape, (max(1, cache.shape[1]), 1))


@planted(OP, *WRONG_SLOT, rows=("FC-019", "F23"), source="scaled from 32 bits to 16, as caches for a CPU are small")
def slot_offset_in_16_bits(**arguments: Any) -> State:
    """``slot * stride`` wraps around, and the row is read somewhere else."""
    return mla_prefill_twin(arguments, gather=functools.partial(_narrow_gather, torch.int16))


def _narrow_gather(dtype: torch.dtype, kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at narrow offsets; a negative one reads before the buffer, here from its end."""

    def rows(cache: Tensor) -> Tensor:
        # a product of 64-bit numbers cut to the narrow dtype: what narrow arithmetic gives
        offsets = (own * cache.stride(0)).to(dtype).long()
        flat = cache.as_strided(((len(cache) - 1) * cache.stride(0) + cache.shape[1],), (1,))
        columns = torch.arange(cache.shape[1], device=cache.device)
        return flat[(offsets[:, None] + columns) % max(1, len(flat))]

    return rows(kv_c), rows(k_pe) if k_pe.shape[1] else k_pe[own]


@planted(OP, *WRONG_SLOT, rows=("FC-021",), source="scaled from 32 bits to 8, as tables for a CPU are small")
def table_offset_in_8_bits(**arguments: Any) -> State:
    """``row * stride`` of the slot table wraps around, and another row is read."""

    def narrow(slot_table: Tensor, row: int, count: int) -> Tensor:
        start = int(torch.tensor(row * slot_table.stride(0)).to(torch.int8))
        flat = slot_table.flatten()
        return flat[torch.arange(start, start + count, device=flat.device) % len(flat)].long()

    return mla_prefill_twin(arguments, slots=narrow)


@planted(OP, *WRONG_SLOT, source="table width taken for its longest row")
def table_stride_from_longest_context(**arguments: Any) -> State:
    """Rows of the slot table are taken to be as wide as the longest context, though they are wider."""
    table, width = arguments["slot_table"], int(arguments["context_lens"].max())
    return mla_prefill_twin({**arguments, "slot_table": table.as_strided((len(table), width), (width, 1))})


@planted(OP, *WRONG_SLOT, source="rope cache gathered with the wrong offsets")
def rope_of_the_first_tokens(**arguments: Any) -> State:
    """Rope rows are taken in the order of the cache, latent rows through the table."""

    def mixed(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return kv_c[own], k_pe[own.sort().values]

    return mla_prefill_twin(arguments, gather=mixed)


@planted(OP, Verdict.MUTATED_INPUT, source="garbage cleaned where it lies")
def unused_slots_cleared(**arguments: Any) -> State:
    """Undefined numbers in the caller's cache are overwritten by 0."""
    for name in ("kv_c", "k_pe"):
        arguments[name].nan_to_num_(nan=0.0)
    return mla_prefill_twin(arguments)


@planted(OP, NONFINITE, rows=("FC-033",))
def nan_swallowed(**arguments: Any) -> State:
    """Undefined latents count as 0, so that a broken cache looks like a result."""

    def cleaned(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = gather(kv_c, k_pe, own)
        return latent.nan_to_num(nan=0.0), rope.nan_to_num(nan=0.0)

    return mla_prefill_twin(arguments, gather=cleaned)
