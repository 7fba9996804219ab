"""The planted faults and the variants of ``kda``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _kda_chunks, _kda_layer, _kda_states, _kda_variants, named

PARTS = (_kda_layer, _kda_chunks, _kda_states, _kda_variants)

_OF_STEPS = "of kda_step, where it is planted"
NOT_APPLICABLE = (
    NotApplicable(row="FC-104", reason="sequences are given by offsets: there is no order of decoding and prefill"),
    NotApplicable(row="FC-117", reason=_OF_STEPS),
    NotApplicable(row="FC-118", reason="log decays are at most 0; one anchor for 64 tokens overflows the other way"),
    NotApplicable(row="FC-125", reason="a hang; that no state is a state of zeros is asked of every kernel"),
    NotApplicable(
        row="FC-126", reason="of mixed steps, which are no operation of their own: the tests of their room judge them"
    ),
    NotApplicable(row="FC-128", reason=_OF_STEPS),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check kda --kernel assay.harness.faults.kda:NAME`` asks for."""
    return named(PARTS, name)
