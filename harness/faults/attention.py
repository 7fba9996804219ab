"""The planted faults and the variants of ``attention``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import (
    NotApplicable,
    _attention_memory,
    _attention_packing,
    _attention_softmax,
    _attention_variants,
    _common_memory,
    _common_softmax,
    named,
    planted_in,
)
from ._chunked import attention_twin

_SOFTMAX, _MEMORY = (planted_in("attention", attention_twin, part) for part in (_common_softmax, _common_memory))
PARTS = (_attention_packing, _attention_softmax, _SOFTMAX, _attention_memory, _MEMORY, _attention_variants)

# the catalogue files its rows about dense attention under mla_prefill
NOT_APPLICABLE: tuple[NotApplicable, ...] = ()


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check attention --kernel assay.harness.faults.attention:NAME`` asks for."""
    return named(PARTS, name)
