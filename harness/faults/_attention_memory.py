"""Faults of ``attention`` in memory, in repeatability and in the form of the answer."""

from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import _memory, planted
from ._chunked import State, attention_twin, segments, softmax
from ._softmax import Online, even_tiles

OP = "attention"
STRUCTURE, WRITE_SCOPE = Verdict.STRUCTURE, Verdict.WRITE_SCOPE

_workspace, _memo, _previous = _memory.Workspace(), _memory.Memo(), _memory.Previous()
_arrivals, _compiled = _memory.CallCounter(), _memory.Baked()


@planted(OP, WRITE_SCOPE, source="odd head counts and tiles of two heads")
def last_head_unwritten(**arguments: Any) -> State:
    """The last head is never stored."""
    return _memory.unwritten(attention_twin, arguments, slice(None), slice(-1, None))


@planted(OP, WRITE_SCOPE, source="rows // tile programs")
def last_queries_unwritten(**arguments: Any) -> State:
    """Rows past the last multiple of 8 of the batch are never stored."""
    rows = len(arguments["q"])
    return _memory.unwritten(attention_twin, arguments, slice(rows // 8 * 8, None), slice(None))


@planted(OP, WRITE_SCOPE, source="store without a mask")
def row_past_the_end_written(**arguments: Any) -> State:
    """One row more than there is."""
    return _memory.past_the_end(attention_twin, arguments)


@planted(OP, Verdict.NONFINITE, WRITE_SCOPE, source="torch.empty taken for torch.zeros")
def accumulator_not_cleared(**arguments: Any) -> State:
    """The result is added to fresh memory."""
    return _memory.uninitialised_accumulator(attention_twin, arguments)


@planted(OP, Verdict.MUTATED_INPUT, source="scale folded in place")
def queries_scaled_in_place(**arguments: Any) -> State:
    """The caller's queries are overwritten."""
    return _memory.scaled_in_place(attention_twin, arguments)


@planted(OP, STRUCTURE, WRITE_SCOPE, Verdict.METAMORPHIC, Verdict.NONDETERMINISTIC, rows=("FC-018",))
def output_is_a_workspace(**arguments: Any) -> State:
    """Results of all calls share one buffer: a result that is kept changes with the next call."""
    return _workspace(attention_twin, arguments)


@planted(OP, Verdict.NUMERIC, Verdict.NONDETERMINISTIC, Verdict.METAMORPHIC, source="plan cached without the values")
def answer_of_last_call_for_same_shapes(**arguments: Any) -> State:
    """The cache key holds shapes and an address, not the contents."""
    return _memo(attention_twin, arguments)


@planted(OP, Verdict.NONFINITE, WRITE_SCOPE, Verdict.NUMERIC, source="double buffer read before it is filled")
def output_of_previous_call(**arguments: Any) -> State:
    """Each call returns what the one before computed."""
    return _previous(attention_twin, arguments)


@planted(OP, Verdict.NUMERIC, Verdict.NONFINITE, WRITE_SCOPE, rows=("FC-023",))
def number_of_requests_baked_in(**arguments: Any) -> State:
    """Compiled for the requests of the first call of its class; later batches of the class run with that number."""
    count = len(arguments["cu_seqlens_q"]) - 1
    baked = _compiled(count % 2, count)
    return attention_twin(arguments, segments=lambda q, k: segments(q, k)[:baked])


@planted(OP, Verdict.NONDETERMINISTIC, source="splits added by atomics")
def keys_summed_in_order_of_arrival(**arguments: Any) -> State:
    """Each call visits the tiles in another order."""
    order = torch.Generator().manual_seed(_arrivals.next())

    def shuffled(keys: int) -> list[slice]:
        tiles = even_tiles(4)(keys)
        return [tiles[at] for at in torch.randperm(len(tiles), generator=order).tolist()]

    return attention_twin(arguments, softmax=Online(tiles=shuffled))


@planted(OP, Verdict.CRASH, source="maximum over no keys")
def crash_without_keys(**arguments: Any) -> State:
    """A request without keys raises."""

    def unguarded(scores: Tensor, v: Tensor) -> State:
        # torch has no maximum of nothing
        scores.amax(dim=-1)
        return softmax(scores, v)

    return attention_twin(arguments, softmax=unguarded)


@planted(OP, STRUCTURE, source="output left in the accumulator's dtype")
def output_in_float32(**arguments: Any) -> State:
    """The output is not rounded to the dtype of the queries."""
    out, lse = attention_twin(arguments)
    return out.float(), lse


@planted(OP, STRUCTURE, Verdict.NUMERIC, source="library layout handed through")
def lse_with_heads_first(**arguments: Any) -> State:
    """The log-sum-exp comes as ``[H, T]``."""
    out, lse = attention_twin(arguments)
    return out, lse.T


@planted(OP, Verdict.NUMERIC, Verdict.NONFINITE, rows=("FC-031",))
def lse_stored_with_heads_first(**arguments: Any) -> State:
    """The log-sum-exp is stored as ``[H, T]`` in a buffer that is read as ``[T, H]``."""
    out, lse = attention_twin(arguments)
    return out, lse.T.contiguous().view(lse.shape)


@planted(OP, STRUCTURE, source="result written over the queries' memory")
def output_in_the_memory_of_the_queries(**arguments: Any) -> State:
    """The output is a view of an input."""
    out, lse = attention_twin(arguments)
    return arguments["q"][..., : out.shape[2]], lse
