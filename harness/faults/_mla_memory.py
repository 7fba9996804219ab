"""Faults of ``mla_prefill`` in memory, in repeatability and in the form of the answer."""

from typing import Any

import torch

from ..record import Verdict
from . import _memory, planted
from ._chunked import Pass, State, mla_prefill_twin, passes
from ._softmax import Online, even_tiles

OP = "mla_prefill"
STRUCTURE, WRITE_SCOPE = Verdict.STRUCTURE, Verdict.WRITE_SCOPE

_workspace, _memo, _previous = _memory.Workspace(), _memory.Memo(), _memory.Previous()
_arrivals, _compiled = _memory.CallCounter(), _memory.Baked()


@planted(OP, WRITE_SCOPE, source="odd head counts and tiles of two heads")
def last_head_unwritten(**arguments: Any) -> State:
    """The last head is never stored."""
    return _memory.unwritten(mla_prefill_twin, arguments, slice(None), slice(-1, None))


@planted(OP, WRITE_SCOPE, source="rows // tile programs")
def last_queries_unwritten(**arguments: Any) -> State:
    """Rows past the last multiple of 8 of the batch are never stored."""
    rows = len(arguments["q"])
    return _memory.unwritten(mla_prefill_twin, arguments, slice(rows // 8 * 8, None), slice(None))


@planted(OP, WRITE_SCOPE, source="store without a mask")
def row_past_the_end_written(**arguments: Any) -> State:
    """One row more than there is."""
    return _memory.past_the_end(mla_prefill_twin, arguments)


@planted(OP, WRITE_SCOPE, source="workspace sized for the chunk, filled for the tile")
def chunk_workspace_overrun(**arguments: Any) -> State:
    """The gathered rows of a chunk are padded to a tile in a workspace of the chunk's own length."""

    def padded(kv_c: torch.Tensor, k_pe: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.empty(len(own), kv_c.shape[1], dtype=kv_c.dtype, device=kv_c.device)
        rows.copy_(kv_c[own])
        rows.as_strided((8,), (1,), rows.storage_offset() + rows.numel()).zero_()
        return rows, k_pe[own]

    return mla_prefill_twin(arguments, gather=padded)


@planted(OP, Verdict.NONFINITE, WRITE_SCOPE, source="torch.empty taken for torch.zeros")
def accumulator_not_cleared(**arguments: Any) -> State:
    """The result is added to fresh memory."""
    return _memory.uninitialised_accumulator(mla_prefill_twin, arguments)


@planted(OP, Verdict.MUTATED_INPUT, source="scale folded in place")
def queries_scaled_in_place(**arguments: Any) -> State:
    """The caller's queries are overwritten."""
    return _memory.scaled_in_place(mla_prefill_twin, arguments)


@planted(OP, STRUCTURE, WRITE_SCOPE, Verdict.METAMORPHIC, Verdict.NONDETERMINISTIC, rows=("FC-018",))
def output_is_a_workspace(**arguments: Any) -> State:
    """Results of all calls share one buffer: a result that is kept changes with the next call."""
    return _workspace(mla_prefill_twin, arguments)


@planted(OP, Verdict.NUMERIC, Verdict.NONDETERMINISTIC, Verdict.METAMORPHIC, source="plan cached without the values")
def answer_of_last_call_for_same_shapes(**arguments: Any) -> State:
    """The cache key holds shapes and an address, not the contents."""
    return _memo(mla_prefill_twin, arguments)


@planted(OP, Verdict.NONFINITE, WRITE_SCOPE, Verdict.NUMERIC, source="double buffer read before it is filled")
def output_of_previous_call(**arguments: Any) -> State:
    """Each call returns what the one before computed."""
    return _previous(mla_prefill_twin, arguments)


@planted(OP, Verdict.NUMERIC, rows=("FC-023",))
def number_of_chunks_baked_in(**arguments: Any) -> State:
    """Compiled for the longest history of the first call of its class; later batches get that number of chunks."""

    def baked(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        count = _compiled(len(arguments["context_lens"]) % 2, -(-longest // chunk))
        return passes(history, current, chunk, longest)[: 1 + count]

    return mla_prefill_twin(arguments, passes=baked)


@planted(OP, Verdict.NONDETERMINISTIC, source="splits added by atomics")
def keys_summed_in_order_of_arrival(**arguments: Any) -> State:
    """Each call visits the tiles of a pass in another order."""
    order = torch.Generator().manual_seed(_arrivals.next())

    def shuffled(keys: int) -> list[slice]:
        tiles = even_tiles(4)(keys)
        return [tiles[at] for at in torch.randperm(len(tiles), generator=order).tolist()]

    return mla_prefill_twin(arguments, softmax=Online(tiles=shuffled))


@planted(OP, Verdict.CRASH, source="results of chunks stacked")
def crash_without_history(**arguments: Any) -> State:
    """A request without history raises."""

    def stacked(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        pair = passes(history, current, chunk, longest)[:2]
        return [pair[0], pair[1], *passes(history, current, chunk, longest)[2:]]

    return mla_prefill_twin(arguments, passes=stacked)


@planted(OP, STRUCTURE, source="output left in the accumulator's dtype")
def output_in_float32(**arguments: Any) -> State:
    """The output is not rounded to the dtype of the queries."""
    out, lse = mla_prefill_twin(arguments)
    return out.float(), lse


@planted(OP, STRUCTURE, Verdict.NUMERIC, source="library layout handed through")
def lse_with_heads_first(**arguments: Any) -> State:
    """The log-sum-exp comes as ``[H, T]``."""
    out, lse = mla_prefill_twin(arguments)
    return out, lse.T


@planted(OP, STRUCTURE, source="output written over the queries")
def output_in_the_memory_of_the_queries(**arguments: Any) -> State:
    """The output is a view of an input."""
    _, lse = mla_prefill_twin(arguments)
    d_v = arguments["kv_b_proj"].shape[1] - arguments["q"].shape[2] + arguments["k_pe"].shape[1]
    return arguments["q"][..., :d_v], lse
