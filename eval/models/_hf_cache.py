"""A cache of transformers that does not copy itself for every token that is decoded.

Its own layers join what they hold and what comes to a new tensor, which reads and writes the whole cache once a step.
These leave room behind a token and write the next ones there.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..extras import require

# columns of room for tokens to come
SPARE = 128


def new_cache(config: Any) -> Any:
    """An empty cache for a model; layers that hold every token leave room, others are as transformers has them."""
    utilities = require("transformers.cache_utils", extra="model")
    cache = utilities.DynamicCache(config=config)
    roomy = _roomy_layer()
    cache.layers = [roomy() if type(layer) is utilities.DynamicLayer else layer for layer in cache.layers]
    return cache


def forget(cache: Any, rows: Sequence[int]) -> None:
    """Put the states of linear layers back to zero for rows that have not begun.

    transformers takes a step of one column for decoding and masks nothing in it, so that a column without a token moves
    them; in wider steps they stay zero.
    """
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            for state in getattr(layer, name, {}).values():
                if state is not None:
                    state[list(rows)] = 0


@functools.cache
def _roomy_layer() -> Any:
    # transformers is imported when it is needed
    plain = require("transformers.cache_utils", extra="model").DynamicLayer

    class RoomyLayer(plain):  # type: ignore[valid-type, misc]
        """Keys and values ``[B, H, S, D]``, the beginning of longer tensors once a token was decoded."""

        keys: Tensor
        values: Tensor

        def __init__(self) -> None:
            super().__init__()
            self._rooms = Room(), Room()

        def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            """Take a step; what is returned is overwritten by nothing that follows."""
            if not self.is_initialized or key_states.shape[-2] > 1:
                joined: tuple[Tensor, Tensor] = super().update(key_states, value_states, *rest, **options)
                return joined
            keys, values = self._rooms
            self.keys, self.values = keys.joined(self.keys, key_states), values.joined(self.values, value_states)
            return self.keys, self.values

    return RoomyLayer


class Room:
    """Memory that is longer than what it holds."""

    def __init__(self) -> None:
        """Nothing is held."""
        self._memory = self._held = torch.empty(0)

    def joined(self, held: Tensor, column: Tensor) -> Tensor:
        """``[B, H, S, D]`` and one more column; copied where the first is not the last result, or has no room left."""
        length = held.shape[-2]
        if held is not self._held or length == self._memory.shape[-2]:
            self._memory = held.new_empty(*held.shape[:-2], length + SPARE, held.shape[-1])
            self._memory[..., :length, :] = held
        self._memory[..., length : length + 1, :] = column
        self._held = self._memory[..., : length + 1, :]
        return self._held
