"""Which rows the oracle answers for when a case is too large to answer for all: never the easy ones only."""

import itertools

import numpy as np
import torch
from torch import Tensor

TILE_EDGES = (15, 16, 63, 64, 127, 128, 255, 256)
MAX_REQUESTS, MAX_HEADS, MAX_DRAWN = 12, 4, 16


def sample_requests(costs: list[int], *, budget: int, rng: np.random.Generator) -> list[int]:
    """All requests, or, above the budget, the first, the last, the dearest and a draw of the others."""
    if sum(costs) <= budget:
        return list(range(len(costs)))
    always = {0, len(costs) - 1, int(np.argmax(costs))}
    drawn = rng.permutation(len(costs))[: max(0, MAX_REQUESTS - len(always))]
    return sorted(always | {int(request) for request in drawn})


def sample_heads(num_heads: int, *, everything: bool, rng: np.random.Generator) -> Tensor:
    """All heads, or the first, the last and a draw of the others."""
    if everything or num_heads <= MAX_HEADS:
        return torch.arange(num_heads)
    drawn = rng.permutation(np.arange(1, num_heads - 1))[: MAX_HEADS - 2]
    return torch.from_numpy(np.sort(np.concatenate([[0, num_heads - 1], drawn])))


def sample_queries(
    count: int, *, first_position: int, chunk: int, everything: bool, rng: np.random.Generator
) -> Tensor:
    """All queries of a request, or its first, last, tile-edge and chunk-edge ones and a stratified draw.

    Args:
        count: Queries of the request.
        first_position: Position of its first query among its tokens.
        chunk: Length whose multiples are edges of passes over the history.
        everything: Whether to take all.
        rng: Of the draw.
    """
    if everything:
        return torch.arange(count)
    edges = {0, count - 1, *TILE_EDGES, *(count - 1 - edge for edge in TILE_EDGES)}
    to_chunk_edge = -first_position % chunk
    edges |= {to_chunk_edge - 1, to_chunk_edge}
    strata = np.linspace(0, count, MAX_DRAWN + 1).astype(int)
    drawn = {int(rng.integers(low, high)) for low, high in itertools.pairwise(strata.tolist()) if high > low}
    return torch.tensor(sorted(index for index in edges | drawn if 0 <= index < count))
