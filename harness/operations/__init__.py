"""The operations of the house: an explicit list; nothing registers itself."""

import importlib
from typing import cast

from ..operation import Operation

NAMES = (
    "attention",
    "mla_prefill",
    "token_scores",
    "token_selection",
    "topk_mask",
    "indexer",
    "sparse_mla",
    "masked_mha",
    "kda",
    "kda_step",
)


def load(name: str) -> Operation:
    """The operation called ``name``.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in NAMES:
        raise ValueError(f"op must be one of {', '.join(NAMES)}, got {name!r}")
    return cast(Operation, importlib.import_module(f".{name}", __name__).OPERATION)
