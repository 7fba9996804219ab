"""The planted faults and the variants of ``kda_step``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _kda_step_layer, _kda_step_slots, named

PARTS = (_kda_step_layer, _kda_step_slots)

_OF_SEQUENCES = "of kda, where it is planted"
NOT_APPLICABLE = (
    NotApplicable(row="FC-104", reason="sequences are given by offsets: there is no order of decoding and prefill"),
    NotApplicable(row="FC-118", reason="log decays are at most 0, and a step takes them one by one"),
    NotApplicable(row="FC-125", reason="a hang; that no state is a state of zeros is asked of every kernel of kda"),
    NotApplicable(
        row="FC-126", reason="of mixed steps, which are no operation of their own: the tests of their room judge them"
    ),
    *(
        NotApplicable(row=row, reason=_OF_SEQUENCES)
        for row in (
            "FC-102",
            "FC-105",
            "FC-106",
            "FC-108",
            "FC-109",
            "FC-110",
            "FC-111",
            "FC-113",
            "FC-114",
            "FC-120",
            "FC-123",
            "FC-129",
            "FC-131",
            "FC-132",
        )
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check kda_step --kernel assay.harness.faults.kda_step:NAME`` asks for."""
    return named(PARTS, name)
