"""Faults of ``kda`` about whose state goes where: sequences, initial and final states, layouts, memory, neighbours."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ..plugin import kernel
from ..record import Verdict
from . import planted
from ._kda_twin import Answer, Arguments, chunk_step, cut_off, empty_answer, initial_state, kda_twin
from ._kda_variants import single
from ._memory import TableByAddress, sixteen_requests

OP = "kda"
NUMERIC, NONFINITE, METAMORPHIC = Verdict.NUMERIC, Verdict.NONFINITE, Verdict.METAMORPHIC
WRITE_SCOPE, MUTATED_INPUT, STRUCTURE = Verdict.WRITE_SCOPE, Verdict.MUTATED_INPUT, Verdict.STRUCTURE


@planted(OP, NUMERIC, rows=("FC-114",))
def initial_state_ignored(**arguments: Any) -> Answer:
    """Every sequence begins with nothing."""
    return kda_twin(arguments | {"initial_state": None})


@planted(OP, NUMERIC, source="the slot of the first sequence for all")
def first_initial_state_for_all(**arguments: Any) -> Answer:
    """Every sequence begins with the state of the first."""
    return kda_twin(arguments, enter=lambda a, sequence: initial_state(a, 0))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-102",))
def state_of_the_sequence_before(**arguments: Any) -> Answer:
    """A sequence without an initial state goes on with what the one before it left."""
    left: list[Tensor] = []

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = chunk_step(q, k, v, g, beta, state)
        left[:] = [after]
        return out, after

    def enter(a: Arguments, sequence: int) -> Tensor:
        return left[0] if left and a["initial_state"] is None else initial_state(a, sequence)

    return kda_twin(arguments, step=step, enter=enter)


@planted(OP, NUMERIC, source="final states of the sequence before")
def final_states_one_late(**arguments: Any) -> Answer:
    """Each sequence gets the final state of the one before it."""
    out, final, kept = kda_twin(arguments)
    return out, final.roll(1, 0), kept


_OFFSETS = TableByAddress()


@planted(OP, METAMORPHIC, NUMERIC, source="plans kept by the address of the lengths")
def offsets_known_by_address(**arguments: Any) -> Answer:
    """Offsets are read once for every place in memory."""
    offsets = arguments["cu_seqlens"]
    return kda_twin(arguments | {"cu_seqlens": _OFFSETS(offsets, offsets.diff())})


@planted(OP, NUMERIC, source="a store that drops the low bits")
@kernel(contract=single)
def outputs_cut_off(**arguments: Any) -> Answer:
    """Outputs in half precision are cut off, not rounded."""
    out, final, kept = kda_twin(arguments | {"v": arguments["v"].float()})
    dtype = arguments["v"].dtype
    return out if dtype == torch.float32 else cut_off(out, dtype), final, kept


@planted(OP, NUMERIC, source="a store that drops the low bits")
@kernel(contract=single)
def states_cut_off(**arguments: Any) -> Answer:
    """States in half precision are cut off, not rounded."""
    dtype = arguments["state_dtype"]
    out, final, kept = kda_twin(arguments | {"state_dtype": torch.float32})
    return (out, final, kept) if dtype == torch.float32 else (out, cut_off(final, dtype), cut_off(kept, dtype))


@planted(OP, STRUCTURE, source="states that follow the initial ones, float32 where there are none")
@kernel(contract=single)
def states_in_the_format_of_the_initial_ones(**arguments: Any) -> Answer:
    """States are handed out in the format in which initial ones came, not in the one asked for."""
    initial = arguments["initial_state"]
    return kda_twin(arguments | {"state_dtype": torch.float32 if initial is None else initial.dtype})


@planted(OP, NUMERIC, rows=("FC-111",))
def states_stored_value_columns_first(**arguments: Any) -> Answer:
    """States are stored ``[V, K]`` where they are read ``[K, V]``."""
    out, *states = kda_twin(arguments)
    final, kept = (state.mT.contiguous().view(state.shape) for state in states)
    return out, final, kept


@planted(OP, NUMERIC, rows=("FC-121",), source="views of pools")
def pitch_of_states_assumed(**arguments: Any) -> Answer:
    """Initial states are read as if they were contiguous."""
    given = arguments["initial_state"]
    if given is not None:
        packed = torch.empty(given.shape, dtype=given.dtype, device="meta")
        given = given.as_strided(given.shape, packed.stride(), given.storage_offset())
    return kda_twin(arguments | {"initial_state": given})


@planted(OP, NUMERIC, NONFINITE, source="rows of a projection")
def pitch_of_tokens_assumed(**arguments: Any) -> Answer:
    """Values are read as if their rows lay side by side."""
    v = arguments["v"]
    packed = torch.empty(v.shape, dtype=v.dtype, device="meta")
    return kda_twin(arguments | {"v": v.as_strided(v.shape, packed.stride(), v.storage_offset())})


@planted(OP, NUMERIC, NONFINITE, WRITE_SCOPE, rows=("FC-132",))
def empty_sequences_skipped(**arguments: Any) -> Answer:
    """A sequence without tokens leaves its final state as the memory came."""
    out, final, kept = kda_twin(arguments)
    written = torch.empty_like(final)
    filled = arguments["cu_seqlens"].diff() > 0
    written[filled] = final[filled]
    return out, written, kept


@planted(OP, NUMERIC, source="zeros for a sequence without tokens")
def empty_sequences_begin_anew(**arguments: Any) -> Answer:
    """A sequence without tokens leaves zeros."""
    out, final, kept = kda_twin(arguments)
    final[arguments["cu_seqlens"].diff() == 0] = 0.0
    return out, final, kept


@planted(OP, NONFINITE, WRITE_SCOPE, rows=("FC-131",))
def final_states_added_to_memory(**arguments: Any) -> Answer:
    """Final states are added to what the memory holds."""
    out, final, kept = kda_twin(arguments)
    return out, torch.empty_like(final).add_(final), kept


@planted(OP, WRITE_SCOPE, NUMERIC, rows=("FC-120",))
def padded_rows_stored(**arguments: Any) -> Answer:
    """One row more than the last chunk has is stored."""
    out, final, kept = kda_twin(arguments)
    mine = torch.empty_like(out)
    mine.copy_(out)
    row, end = out.shape[1] * out.shape[2], int(arguments["cu_seqlens"][-1])
    torch.as_strided(mine, (row,), (1,), mine.storage_offset() + end * row).fill_(1.0)
    return mine, final, kept


@planted(OP, WRITE_SCOPE, source="rows past the last sequence left as they come")
def rows_of_no_sequence_left(**arguments: Any) -> Answer:
    """Rows past the last sequence are not written."""
    out, final, kept = kda_twin(arguments)
    mine, end = torch.empty_like(out), int(arguments["cu_seqlens"][-1])
    mine[:end] = out[:end]
    return mine, final, kept


@planted(OP, NUMERIC, source="tables sized for a fixed number of requests")
def sequences_past_the_sixteenth_left_out(**arguments: Any) -> Answer:
    """Later sequences have outputs and states of 0."""
    out, final, kept = kda_twin(arguments)
    sixteen_requests((out,), arguments["cu_seqlens"])
    final[16:] = 0.0
    return out, final, kept


@planted(OP, NONFINITE, NUMERIC, rows=("FC-129",))
def gate_read_past_its_channels(**arguments: Any) -> Answer:
    """A gate is read in tiles of 16 channels, without a mask; queries and keys are padded with zeros."""
    q, k, g = (arguments[name] for name in ("q", "k", "g"))
    more = 16 - g.shape[2] % 16
    wide = g.as_strided((*g.shape[:2], g.shape[2] + more), g.stride(), g.storage_offset())
    padded: dict[str, Any] = {name: torch.nn.functional.pad(x.float(), (0, more)) for name, x in (("q", q), ("k", k))}
    bias = arguments["dt_bias"]
    padded["dt_bias"] = None if bias is None else torch.nn.functional.pad(bias, (0, more))

    def enter(a: Arguments, sequence: int) -> Tensor:
        return torch.nn.functional.pad(initial_state(arguments, sequence), (0, 0, 0, more))

    answer = kda_twin(arguments | padded | {"g": wide}, enter=enter)
    out, final, kept = (one.to(was.dtype) for one, was in zip(answer, empty_answer(arguments), strict=True))
    return out, final[:, :, : g.shape[2]], kept[:, :, : g.shape[2]]


@planted(OP, NONFINITE, source="FlashKDA: values of the next sequence in the last tile, times keys of 0")
def next_sequence_multiplied_by_zero(**arguments: Any) -> Answer:
    """The last chunk of a sequence takes rows of the next one along, with keys of 0."""
    bounds = arguments["cu_seqlens"].tolist()
    out, final, kept = kda_twin(arguments)
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        beyond = min(stop + -(stop - start) % 16, len(arguments["v"]))
        if beyond > stop > start:
            leak = (0.0 * arguments["v"][stop:beyond].float()).sum(0)
            final[sequence] += leak[:, None].to(final.dtype)
    return out, final, kept


@planted(OP, NUMERIC, source="offsets of the batch in another order")
def sequences_one_token_late(**arguments: Any) -> Answer:
    """The second and later sequences begin one token late."""
    a = dict(arguments)
    offsets = a["cu_seqlens"].clone()
    ends = offsets[-1:].clone()
    offsets[1:-1] += 1
    a["cu_seqlens"] = torch.minimum(offsets, ends)
    return kda_twin(a)


@planted(OP, NUMERIC, source="sequences taken for one")
def sequences_taken_for_one(**arguments: Any) -> Answer:
    """Outputs go on through all sequences."""
    _, final, kept = kda_twin(arguments)
    whole = arguments["cu_seqlens"][[0, -1]]
    initial = arguments["initial_state"]
    first = None if initial is None else initial[:1]
    return kda_twin(arguments | {"cu_seqlens": whole, "checkpoints": None, "initial_state": first})[0], final, kept


@planted(OP, NUMERIC, source="checkpoints before instead of after the token")
def checkpoints_one_token_early(**arguments: Any) -> Answer:
    """The state before the wanted token is kept."""
    wanted = arguments["checkpoints"]
    if wanted is not None:
        wanted = wanted.clone()
        wanted[:, 1] = (wanted[:, 1] - 1).clamp(min=0)
    return kda_twin(arguments | {"checkpoints": wanted})


@planted(OP, NUMERIC, source="FlashKDA fork: checkpoints at multiples of 16 alone")
def checkpoints_at_the_chunk_before(**arguments: Any) -> Answer:
    """The state of the last full chunk is kept."""
    wanted = arguments["checkpoints"]
    if wanted is not None:
        wanted = wanted.clone()
        wanted[:, 1] = wanted[:, 1] // 16 * 16
    return kda_twin(arguments | {"checkpoints": wanted})


@planted(OP, MUTATED_INPUT, source="FlashInfer: the initial state updated in place")
def initial_state_overwritten(**arguments: Any) -> Answer:
    """Final states are also left where the initial ones were."""
    out, final, kept = kda_twin(arguments)
    if arguments["initial_state"] is not None:
        arguments["initial_state"].copy_(final)
    return out, final, kept


@planted(OP, STRUCTURE, source="FlashInfer: the initial state handed out")
def initial_state_handed_out(**arguments: Any) -> Answer:
    """Where nothing was computed the caller's own state is the result."""
    out, final, kept = kda_twin(arguments)
    initial = arguments["initial_state"]
    return out, final if initial is None else initial, kept


@planted(OP, NONFINITE, source="the NaN of a sequence hidden")
def nan_hidden(**arguments: Any) -> Answer:
    """What is no number is taken for 0."""
    out, final, kept = kda_twin(arguments)
    return out.nan_to_num(nan=0.0), final.nan_to_num(nan=0.0), kept.nan_to_num(nan=0.0)
