"""The planted faults and the variants of ``indexer``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _indexes_lists, _indexes_places, _indexes_scores, named

PARTS = (_indexes_scores, _indexes_lists, _indexes_places)

NOT_APPLICABLE: tuple[NotApplicable, ...] = ()


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check indexer --kernel assay.harness.faults.indexer:NAME`` asks for."""
    return named(PARTS, name)
