"""The planted faults and the variants of ``sparse_mla``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import (
    NotApplicable,
    _common_memory,
    _common_softmax,
    _sparse_heads,
    _sparse_lists,
    _sparse_sinks,
    _sparse_variants,
    named,
    planted_in,
)
from ._sparse import sparse_twin

_SOFTMAX, _MEMORY = (planted_in("sparse_mla", sparse_twin, part) for part in (_common_softmax, _common_memory))
PARTS = (_sparse_lists, _sparse_sinks, _SOFTMAX, _sparse_heads, _MEMORY, _sparse_variants)

NOT_APPLICABLE: tuple[NotApplicable, ...] = (
    NotApplicable(row="FC-079", reason="no contract here promises that a query's bits do not depend on its company"),
    NotApplicable(row="FC-081", reason="no operation has a quantised cache, and so no scale of the values"),
    NotApplicable(row="FC-084", reason="all heads share one latent row: there are no groups of key heads"),
    NotApplicable(row="FC-093", reason="the operation writes no cache; a NaN in slot 0 is in its cases"),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check sparse_mla --kernel assay.harness.faults.sparse_mla:NAME`` asks for."""
    return named(PARTS, name)
