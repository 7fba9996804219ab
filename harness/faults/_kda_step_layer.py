"""Faults of ``kda_step`` before the recurrence: of scales and gates."""

from typing import Any

from ..record import Verdict
from . import planted
from ._kda_layer import clamped_decay, scale_under_a_norm
from ._kda_step_twin import Answer, step_twin

OP = "kda_step"
NUMERIC = Verdict.NUMERIC


@planted(OP, NUMERIC, source="a scale that goes with the norm")
def scale_of_normalised_rows(**arguments: Any) -> Answer:
    """Where rows are normalised the scale is taken from the width of a key."""
    return step_twin(arguments | {"scale": scale_under_a_norm(arguments)})


@planted(OP, NUMERIC, source="a softplus of clamped logits")
def softplus_of_clamped_logits(**arguments: Any) -> Answer:
    """Logits above 10 count as 10."""
    return step_twin(arguments, decay=clamped_decay)
