"""Faults of ``attention`` in memory and in the form of the answer beyond those of ``_common_memory``."""

from typing import Any

from torch import Tensor

from ..record import Verdict
from . import _memory, planted
from ._chunked import State, attention_twin, segments, softmax

OP = "attention"
STRUCTURE, WRITE_SCOPE = Verdict.STRUCTURE, Verdict.WRITE_SCOPE

_compiled = _memory.Baked()


@planted(OP, Verdict.NUMERIC, Verdict.NONFINITE, WRITE_SCOPE, rows=("FC-023",))
def number_of_requests_baked_in(**arguments: Any) -> State:
    """Compiled for the requests of the first call of its class; later batches of the class run with that number."""
    count = len(arguments["cu_seqlens_q"]) - 1
    baked = _compiled(count % 2, count)
    return attention_twin(arguments, segments=lambda q, k: segments(q, k)[:baked])


@planted(OP, Verdict.CRASH, source="maximum over no keys")
def crash_without_keys(**arguments: Any) -> State:
    """A request without keys raises."""

    def unguarded(scores: Tensor, v: Tensor) -> State:
        # torch has no maximum of nothing
        scores.amax(dim=-1)
        return softmax(scores, v)

    return attention_twin(arguments, softmax=unguarded)


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
