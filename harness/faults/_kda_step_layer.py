"""Faults of ``kda_step`` before the recurrence: of scales and gates."""

from typing import Any

import torch
from torch import Tensor

from ..plugin import kernel
from ..record import Verdict
from . import planted
from ._kda_layer import clamped_decay, scale_under_a_norm
from ._kda_step_slots import single
from ._kda_step_twin import Answer, step_twin
from ._kda_twin import cut_off, same
from ._memory import TableByAddress, sixteen_requests

OP = "kda_step"
NUMERIC = Verdict.NUMERIC


@planted(OP, NUMERIC, source="a scale that goes with the norm")
def scale_of_normalised_rows(**arguments: Any) -> Answer:
    """Where rows are normalised the scale is taken from the width of a key."""
    return step_twin(arguments | {"scale": scale_under_a_norm(arguments)})


_seen_slots: dict[tuple[int, torch.Size], Tensor] = {}


@planted(OP, Verdict.METAMORPHIC, NUMERIC, Verdict.WRITE_SCOPE, source="plans kept by the address of the slots")
def slots_known_by_address(**arguments: Any) -> Answer:
    """Slots are read once for every place in memory."""
    table, size = arguments["slot_table"], len(arguments["state_pool"])
    key = table.data_ptr(), table.shape
    seen = _seen_slots.get(key, table)
    # what cannot be of this pool is forgotten: an earlier case that lay there must have no say
    fits = int(seen.max()) < size and torch.equal(seen < 0, table < 0)
    known = _seen_slots[key] = seen if fits and key in _seen_slots else table.clone()
    return step_twin(arguments | {"slot_table": known})


_seen_counts: dict[tuple[int, torch.Size], Tensor] = {}


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the counts")
def accepted_counts_known_by_address(**arguments: Any) -> Answer:
    """Counts of accepted tokens are read once for every place in memory."""
    counts, table = arguments["num_accepted"], arguments["slot_table"]
    if counts is None:
        return step_twin(arguments)
    key = counts.data_ptr(), counts.shape
    seen = _seen_counts.get(key, counts)
    # what cannot be of this step is forgotten
    fits = key in _seen_counts and int(seen.max()) <= table.shape[1]
    known = _seen_counts[key] = seen if fits else counts.clone()
    return step_twin(arguments | {"num_accepted": known})


_OFFSETS = TableByAddress()


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def offsets_known_by_address(**arguments: Any) -> Answer:
    """Offsets are read once for every place in memory."""
    offsets = arguments["cu_seqlens"]
    return step_twin(arguments | {"cu_seqlens": _OFFSETS(offsets, offsets.diff())})


@planted(OP, NUMERIC, source="tables sized for a fixed number of requests")
def sequences_past_the_sixteenth_left_out(**arguments: Any) -> Answer:
    """Later sequences have outputs of 0."""
    out, pool = step_twin(arguments)
    sixteen_requests((out,), arguments["cu_seqlens"])
    return out, pool


@planted(OP, NUMERIC, source="a store that drops the low bits")
@kernel(contract=single)
def outputs_cut_off(**arguments: Any) -> Answer:
    """Outputs in half precision are cut off, not rounded."""
    out, pool = step_twin(arguments | {"v": arguments["v"].float()})
    dtype = arguments["v"].dtype
    return out if dtype == torch.float32 else cut_off(out, dtype), pool


@planted(OP, NUMERIC, source="a store that drops the low bits")
@kernel(contract=single)
def states_cut_off(**arguments: Any) -> Answer:
    """States in half precision are cut off on their way to the pool, not rounded."""
    dtype = arguments["state_pool"].dtype
    return step_twin(arguments, store=same if dtype == torch.float32 else lambda state: cut_off(state, dtype))


@planted(OP, NUMERIC, source="a softplus of clamped logits")
def softplus_of_clamped_logits(**arguments: Any) -> Answer:
    """Logits above 10 count as 10."""
    return step_twin(arguments, decay=clamped_decay)
