"""The planted faults and the variants of ``mla_prefill``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import (
    NotApplicable,
    _common_memory,
    _common_softmax,
    _mla_absorbed,
    _mla_history,
    _mla_memory,
    _mla_merge,
    _mla_projection,
    _mla_slots,
    _mla_softmax,
    _mla_variants,
    named,
    planted_in,
)
from ._chunked import mla_prefill_twin

_SOFTMAX, _MEMORY = (planted_in("mla_prefill", mla_prefill_twin, part) for part in (_common_softmax, _common_memory))
PARTS = (
    *(_mla_slots, _mla_history, _mla_projection, _mla_softmax, _SOFTMAX, _mla_merge, _mla_memory, _MEMORY),
    *(_mla_absorbed, _mla_variants),
)

NOT_APPLICABLE = (
    NotApplicable(row="FC-005", reason="no operation has a sliding window"),
    NotApplicable(row="FC-006", reason="no operation has a quantised cache, and so no per-group scales"),
    NotApplicable(row="FC-008", reason="no operation has a quantised cache or query, and so no k_scale"),
    NotApplicable(row="FC-012", reason="no operation has a quantised cache, and so no k_scale to apply again"),
    NotApplicable(
        row="FC-029",
        reason="the answer is right, only its peak memory is not: no gate measures memory, and no verdict names it; "
        "tests/test_optimized_mla_prefill_memory.py measures the twin of the house",
    ),
    NotApplicable(row="FC-042", reason="the cache is mapped slot by slot: there is no page, and so no two page sizes"),
    NotApplicable(row="FC-043", reason="the answer is right, only compilations are too many: no gate counts them"),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check mla_prefill --kernel assay.harness.faults.mla_prefill:NAME`` asks for."""
    return named(PARTS, name)
