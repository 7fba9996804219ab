"""The planted faults and the variants of ``token_scores``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _scores_reduction, _scores_window, named

PARTS = (_scores_window, _scores_reduction)

NOT_APPLICABLE = (
    NotApplicable(row="FC-134", reason="of token_selection, where it is planted"),
    NotApplicable(row="FC-135", reason="of token_selection, where it is planted"),
    NotApplicable(row="FC-139", reason="positions after eviction are those of a cache that no operation has"),
    NotApplicable(row="FC-140", reason="requests are packed: there is no padding, and so no mask for it"),
    NotApplicable(row="FC-151", reason="of token_selection, where it is planted"),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check token_scores --kernel assay.harness.faults.token_scores:NAME`` asks for."""
    return named(PARTS, name)
