"""Which keys each query has selected in the cases of ``masked_mha``: bits drawn query by query.

A row depends on the seed of its request and on the query's position alone. So a request keeps its selection in other
company, a query keeps its own without the others, and a chunk of keys has the bits that it has among all keys.
"""

import functools
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# bits of one query
Row: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
# what a query selects of its past, as likely as each other:
# ``none``    nothing                            ``half``    every other key
# ``one``     a single key                       ``all``     every key
# ``few``     any power of two of them           ``ends``    the first and the last bit of each word
# ``eighth``  every eighth key                   ``recent``  the last 16 and the first 4
KINDS = ("none", "one", "few", "eighth", "half", "all", "ends", "recent")
# those whose number of keys is a power of two, which gives exact means
COUNTED = ("none", "one", "few", "few")
SHARES = {"eighth": 0.125, "half": 0.5, "all": 1.0}
# the seed of a request whose queries select every key, past and future, as where no context is longer than a list
EVERY_KEY = 0
# share of the holes beyond the first one, and of those that neighbouring queries have beside them
HOLES, OWN_HOLES = 0.25, 0.5
NEIGHBOURS = 16
# positions may be negative, seeds may not
_ORIGIN = 1 << 30


@functools.lru_cache(maxsize=32)
def selected_bits(seed: int, first_query: int, queries: int, num_bits: int, *, hole: int, counted: bool) -> Tensor:
    """Bits of the neighbouring queries of one request, ``[queries, num_bits]``, bool; not to be written.

    Of its past a query selects what its kind says, of the future half of the keys. Some stretches are holes, of which
    no query of the request selects anything, the first one among them; neighbouring queries have more in common. With
    the seed ``EVERY_KEY`` every bit is set.

    Args:
        seed: Of the request.
        first_query: Position of the first query; bit ``s`` is the key of position ``s``.
        queries: How many.
        num_bits: Of a row.
        hole: Keys of a hole, 0 for none; holes begin at its multiples.
        counted: Whether every query selects ``2^k`` keys of its past, or none.
    """
    if seed == EVERY_KEY and not counted:
        return torch.ones(queries, num_bits, dtype=torch.bool)
    holes = _holes([seed], num_bits, hole, HOLES)
    holes[:hole] = True
    rows: list[Row] = []
    for position in range(first_query, first_query + queries):
        if position % NEIGHBOURS == 0 or not rows:
            own = _holes([seed, position // NEIGHBOURS + _ORIGIN], num_bits, hole, OWN_HOLES)
        rows.append(_row(seed, position, ~(holes | own), counted))
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, num_bits, dtype=torch.bool)


def visible_keys(sizes: dict[str, Any], request: int, *, counted: bool) -> Tensor:
    """``[n, m]``, bool: the keys that each query of a request sees, selected and not in its future."""
    n, m = sizes["query_lens"][request], sizes["key_lens"][request]
    first_query, first_key = sizes["query_starts"][request], sizes["key_starts"][request]
    bits = request_bits(sizes, request, counted=counted)[:, first_key : first_key + m]
    if bits.shape[1] < m:
        raise ValueError(f"mask_words must hold {first_key + m} bits, got {sizes['mask_words']} words")
    visible: Tensor = bits & (torch.arange(m) + first_key <= torch.arange(n)[:, None] + first_query)
    return visible


def request_bits(sizes: dict[str, Any], request: int, *, counted: bool) -> Tensor:
    """``[n, 32 W]``, bool: the rows of one request in the mask; not to be written."""
    return selected_bits(
        sizes["selection_seeds"][request],
        sizes["query_starts"][request],
        sizes["query_lens"][request],
        32 * sizes["mask_words"],
        hole=sizes["key_holes"][request],
        counted=counted,
    )


def packed(bits: Tensor) -> Tensor:
    """``[T, 32 W]``, bool, to ``[T, W]``, int32: bit 31 of a word is its sign."""
    weights = torch.ones(32, dtype=torch.int64) << torch.arange(32)
    words: Tensor = (bits.unflatten(1, (bits.shape[1] // 32, 32)) * weights).sum(-1)
    return (words - ((words >> 31) << 32)).int()


def _holes(seed: list[int], num_bits: int, hole: int, share: float) -> Row:
    if hole == 0:
        return np.zeros(num_bits, dtype=np.bool_)
    return (np.random.default_rng(seed).random(num_bits // hole + 1) < share).repeat(hole)[:num_bits]


def _row(seed: int, position: int, opened: Row, counted: bool) -> Row:
    rng = np.random.default_rng([seed, position + _ORIGIN, 1])
    kinds = COUNTED if counted else KINDS
    kind, part, draws = kinds[int(rng.integers(len(kinds)))], rng.random(), rng.random(len(opened))
    key = np.arange(len(opened))
    past = opened & (key <= position)
    if kind in ("one", "few"):
        row = np.zeros_like(past)
        most = int(past.sum())
        count = 2 ** int(part * most.bit_length()) if kind == "few" and most else min(1, most)
        row[np.argsort(np.where(past, draws, 2.0), kind="stable")[:count]] = True
    elif kind == "ends":
        row = past & ((key % 32 == 0) | (key % 32 == 31))
    elif kind == "recent":
        row = past & ((key > position - 16) | (key < 4))
    else:
        row = past & (draws < SHARES.get(kind, 0.0))
    return row | (opened & (key > position) & (draws < 0.5))
