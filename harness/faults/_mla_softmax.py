"""Faults of ``mla_prefill`` in the softmax of a pass beyond those of every operation, see ``_common_softmax``."""

from typing import Any

from ..record import Verdict
from . import planted
from ._chunked import State, mla_prefill_twin
from ._softmax import Online, overlapping, without_last_tile

OP = "mla_prefill"
NUMERIC = Verdict.NUMERIC


def _scaled(arguments: dict[str, Any], scale: float) -> State:
    return mla_prefill_twin({**arguments, "softmax_scale": scale})


@planted(OP, NUMERIC, rows=("F24",))
def scale_of_absorbed_width(**arguments: Any) -> State:
    """``(R + Dr) ** -0.5``: the width of the absorbed keys."""
    return _scaled(arguments, (arguments["kv_c"].shape[1] + arguments["k_pe"].shape[1]) ** -0.5)


@planted(OP, NUMERIC, source="rope part left out of the width")
def scale_of_nope_width(**arguments: Any) -> State:
    """The scale that would fit without the rope part."""
    width, d_rope = arguments["q"].shape[2], arguments["k_pe"].shape[1]
    return _scaled(arguments, arguments["softmax_scale"] * (width / (width - d_rope)) ** 0.5)


@planted(OP, NUMERIC, source="keys // tile instead of the ceiling")
def tail_tile_dropped(**arguments: Any) -> State:
    """A last tile of a pass that is not full is never visited."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=without_last_tile))


@planted(OP, NUMERIC, source="inclusive tile bounds")
def tiles_overlap_by_one(**arguments: Any) -> State:
    """The first key of each later tile is counted twice."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=overlapping))
