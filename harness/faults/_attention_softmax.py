"""Faults of ``attention`` in the softmax beyond those of every operation, see ``_common_softmax``."""

from typing import Any

import torch

from ..record import Verdict
from . import _softmax, planted
from ._chunked import State, attention_twin

OP = "attention"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="scale derived from the padded head dimension")
def scale_of_padded_width(**arguments: Any) -> State:
    """The scale of the next multiple of 16 dimensions."""
    width = arguments["q"].shape[2]
    scale = arguments["softmax_scale"] * (width / (-(-width // 16) * 16)) ** 0.5
    return attention_twin({**arguments, "softmax_scale": scale})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-014",))
def sentinel_in_empty_rows(**arguments: Any) -> State:
    """Hidden logits are a large negative number: a row without keys averages all values, its lse is finite."""
    return attention_twin(arguments, softmax=_softmax.leaked_sentinel)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-033",))
def nan_swallowed(**arguments: Any) -> State:
    """Undefined logits become 0, so that a broken input looks like a result."""
    return attention_twin(arguments, softmax=_softmax.numbers_for_nan)


@planted(OP, NONFINITE, source="undefined values cleaned when they are loaded")
def nan_in_values_swallowed(**arguments: Any) -> State:
    """A value that is NaN counts as 0."""
    v = arguments["v"]
    return attention_twin({**arguments, "v": torch.where(v.isnan(), 0.0, v)})


@planted(OP, NONFINITE, source="operands split into a high and a low part")
def infinite_value_gives_nan(**arguments: Any) -> State:
    """Values meet the weights as two parts; of an infinite one the low part is undefined."""
    v = arguments["v"]
    high = v.bfloat16().to(v.dtype)
    return attention_twin({**arguments, "v": high + (v - high)})


@planted(OP, NUMERIC, rows=("F1",))
def base_2_lse_returned(**arguments: Any) -> State:
    """The log-sum-exp is in base 2."""
    return attention_twin(arguments, softmax=_softmax.base_2_lse)


@planted(OP, NUMERIC, source="log-sum-exp stored through a half-precision buffer")
def lse_rounded_to_input_dtype(**arguments: Any) -> State:
    """The log-sum-exp passes through the dtype of the queries."""
    out, lse = attention_twin(arguments)
    return out, lse.to(out.dtype).float()
