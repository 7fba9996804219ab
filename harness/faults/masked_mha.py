"""The planted faults and the variants of ``masked_mha``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import (
    NotApplicable,
    _common_memory,
    _common_softmax,
    _masked_bits,
    _masked_memory,
    _masked_variants,
    _masked_visible,
    named,
    planted_in,
)
from ._masked import masked_twin

_SOFTMAX, _MEMORY = (planted_in("masked_mha", masked_twin, part) for part in (_common_softmax, _common_memory))
PARTS = (_masked_bits, _masked_visible, _SOFTMAX, _masked_memory, _MEMORY, _masked_variants)

NOT_APPLICABLE: tuple[NotApplicable, ...] = (
    NotApplicable(row="FC-059", reason="no launch of ours shares a scheduler's packed words between stages"),
    NotApplicable(row="FC-067", reason="of the list of a query, which the indexer makes; the mask has no width of k"),
    NotApplicable(row="FC-068", reason="of the list of a query, which the indexer makes; the mask has no tail"),
    NotApplicable(row="FC-073", reason="bits hold no key twice; of topk_mask, whose lists do"),
    NotApplicable(row="FC-075", reason="a capacity check refuses before there is a mask to judge; tested in topk_mask"),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check masked_mha --kernel assay.harness.faults.masked_mha:NAME`` asks for."""
    return named(PARTS, name)
