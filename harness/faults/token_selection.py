"""The planted faults and the variants of ``token_selection``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _selection, named

PARTS = (_selection,)

_OF_SCORES = "of token_scores, where it is planted"
NOT_APPLICABLE = (
    NotApplicable(row="FC-139", reason="positions after eviction are those of a cache that no operation has"),
    NotApplicable(row="FC-140", reason="requests are packed: there is no padding, and so no mask for it"),
    *(
        NotApplicable(row=row, reason=_OF_SCORES)
        for row in ("FC-142", "FC-144", "FC-145", "FC-146", "FC-155", "FC-156", "FC-157", "FC-159")
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check token_selection --kernel assay.harness.faults.token_selection:NAME`` asks for."""
    return named(PARTS, name)
