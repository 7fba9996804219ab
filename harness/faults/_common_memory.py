"""Faults of any attention in memory, in repeatability and in the form of the answer; planted in a clean twin."""

from typing import Any

import torch

from ..answers import Answer
from ..record import Verdict
from . import _memory, common
from ._memory import Twin
from ._softmax import Online, even_tiles

STRUCTURE, WRITE_SCOPE = Verdict.STRUCTURE, Verdict.WRITE_SCOPE

_workspace, _memo, _previous = _memory.Workspace(), _memory.Memo(), _memory.Previous()
_arrivals = _memory.CallCounter()


@common(WRITE_SCOPE, source="odd head counts and tiles of two heads")
def last_head_unwritten(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The last head is never stored."""
    return _memory.unwritten(twin, arguments, slice(None), slice(-1, None))


@common(WRITE_SCOPE, source="rows // tile programs")
def last_queries_unwritten(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Rows past the last multiple of 8 of the batch are never stored."""
    rows = len(arguments["q"])
    return _memory.unwritten(twin, arguments, slice(rows // 8 * 8, None), slice(None))


@common(Verdict.NUMERIC, Verdict.NONFINITE, source="tables sized for a fixed number of requests")
def requests_past_the_sixteenth_left_out(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Rows of later requests are 0; of later queries where lists are all that is told."""
    offsets = arguments.get("cu_seqlens_q", arguments.get("cu_seqlens"))
    single = torch.arange(len(arguments["q"]) + 1)
    return _memory.sixteen_requests(twin(arguments), single if offsets is None else offsets)


@common(WRITE_SCOPE, source="store without a mask")
def row_past_the_end_written(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """One row more than there is."""
    return _memory.past_the_end(twin, arguments)


@common(Verdict.NONFINITE, WRITE_SCOPE, source="torch.empty taken for torch.zeros")
def accumulator_not_cleared(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The result is added to fresh memory."""
    return _memory.uninitialised_accumulator(twin, arguments)


@common(Verdict.MUTATED_INPUT, source="scale folded in place")
def queries_scaled_in_place(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The caller's queries are overwritten."""
    return _memory.scaled_in_place(twin, arguments)


@common(STRUCTURE, WRITE_SCOPE, Verdict.METAMORPHIC, Verdict.NONDETERMINISTIC, rows=("FC-018",))
def output_is_a_workspace(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Results of all calls share one buffer: a result that is kept changes with the next call."""
    return _workspace(twin, arguments)


@common(Verdict.NUMERIC, Verdict.NONDETERMINISTIC, Verdict.METAMORPHIC, source="plan cached without the values")
def answer_of_last_call_for_same_shapes(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The cache key holds shapes and an address, not the contents."""
    return _memo(twin, arguments)


@common(Verdict.NONFINITE, WRITE_SCOPE, Verdict.NUMERIC, source="double buffer read before it is filled")
def output_of_previous_call(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Each call returns what the one before computed."""
    return _previous(twin, arguments)


@common(Verdict.NONDETERMINISTIC, source="splits added by atomics")
def keys_summed_in_order_of_arrival(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Each call visits the tiles in another order."""
    order = torch.Generator().manual_seed(_arrivals.next())

    def shuffled(keys: int) -> list[slice]:
        tiles = even_tiles(4)(keys)
        return [tiles[at] for at in torch.randperm(len(tiles), generator=order).tolist()]

    return twin(arguments, softmax=Online(tiles=shuffled))


@common(STRUCTURE, source="output left in the accumulator's dtype")
def output_in_float32(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The output is not rounded to the dtype of the queries."""
    out, *others = twin(arguments)
    return out.float(), *others


@common(STRUCTURE, Verdict.NUMERIC, source="library layout handed through")
def lse_with_heads_first(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The log-sum-exp comes as ``[H, T]``."""
    out, lse, *others = twin(arguments)
    return out, lse.T, *others
