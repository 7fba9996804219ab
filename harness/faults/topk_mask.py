"""The planted faults and the variants of ``topk_mask``; each is a function of this module, by its name."""

from collections.abc import Callable
from typing import Any

from . import NotApplicable, _masks_bits, _masks_rows, _masks_tiles, named

PARTS = (_masks_bits, _masks_rows, _masks_tiles)

_OF_ATTENTION = "of masked_mha, which reads a mask"
NOT_APPLICABLE = (
    NotApplicable(row="FC-065", reason="a mask is built here, whose shape follows from the lengths"),
    NotApplicable(row="FC-067", reason="of indexer, where it is planted"),
    NotApplicable(row="FC-068", reason="of indexer, where it is planted"),
    *(
        NotApplicable(row=row, reason=_OF_ATTENTION)
        for row in ("FC-059", "FC-060", "FC-061", "FC-062", "FC-063", "FC-072")
    ),
)


def __getattr__(name: str) -> Callable[..., Any]:
    """What ``assay check topk_mask --kernel assay.harness.faults.topk_mask:NAME`` asks for."""
    return named(PARTS, name)
