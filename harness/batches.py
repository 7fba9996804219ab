"""Batches as serving engines see them: uneven lengths, one giant among many small, with and without history.

Beside them what a kernel may have a path of its own for: decoding, single requests, lengths around tile edges. And the
scales, which are drawn as well.
"""

from dataclasses import dataclass

import numpy as np

# lengths at which kernels change their path
TILES = (16, 32, 64, 128)
# requests of a batch that is about nothing but their number: more than a warp has threads
MANY = 35


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of each request: the current ones, and all of them with the history."""

    query_lens: list[int]
    context_lens: list[int]


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer between ``low`` and ``high``, both included, small ones as likely as large ones."""
    return int(np.floor(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def uneven_batch(rng: np.random.Generator, *, requests: int, longest: int, most_queries: int, chunk: int) -> Batch:
    """One request of ``longest`` tokens among smaller ones, in random order.

    Of the others one has no history, one has a history of whole chunks where that fits, and the rest are drawn
    log-uniformly.
    """
    most_queries = min(most_queries, longest)
    giant = log_uniform(rng, 1, most_queries)
    pairs = [(giant, longest)]
    fresh = log_uniform(rng, 1, min(most_queries, max(1, longest // 4)))
    pairs.append((fresh, fresh))
    whole = chunk * max(1, longest // (4 * chunk))
    if whole < longest:
        queries = log_uniform(rng, 1, min(most_queries, longest - whole))
        pairs.append((queries, whole + queries))
    while len(pairs) < requests:
        context = log_uniform(rng, 1, max(1, longest // 3))
        pairs.append((log_uniform(rng, 1, min(context, most_queries)), context))
    order = rng.permutation(len(pairs[:requests]))
    return Batch(query_lens=[pairs[i][0] for i in order], context_lens=[pairs[i][1] for i in order])


def crowd(requests: int) -> Batch:
    """Requests of next to nothing, every fifth without a query: more of them than a table or a warp may have places."""
    queries = [(1, 2, 1, 0, 1)[at % 5] for at in range(requests)]
    histories = [(2, 3, 0, 4, 1, 0, 7)[at % 7] for at in range(requests)]
    return Batch(query_lens=queries, context_lens=[n + m for n, m in zip(queries, histories, strict=True)])


def decode_batch(rng: np.random.Generator, *, requests: int, longest: int) -> Batch:
    """One query per request; contexts log-uniform from 1, the longest among them, in random order."""
    contexts = [longest, *(log_uniform(rng, 1, longest) for _ in range(requests - 1))]
    return Batch(query_lens=[1] * requests, context_lens=[contexts[i] for i in rng.permutation(requests)])


def edge_batch(rng: np.random.Generator, *, requests: int, most_queries: int, longest: int) -> Batch:
    """Queries and contexts at a tile edge or one beside it, each drawn for itself, no query outside its context."""
    pairs = []
    for _ in range(requests):
        context = at_edge(rng, longest)
        pairs.append((min(at_edge(rng, most_queries), context), context))
    return Batch(query_lens=[n for n, _ in pairs], context_lens=[c for _, c in pairs])


def at_edge(rng: np.random.Generator, most: int) -> int:
    """A length that is a tile edge or one beside it, or 1; at most ``most``."""
    edges = [1, *(edge + off for edge in TILES for off in (-1, 0, 1))]
    fitting = [edge for edge in edges if edge <= most]
    return int(fitting[int(rng.integers(len(fitting)))])


def draw_scale(rng: np.random.Generator, width: int) -> float:
    """A factor on the logits, log-uniform around the usual ``width ** -0.5``, every fourth time above 1.

    Never within a fifth of the usual one, which a kernel takes that ignores the argument, nor of 1, which a square
    leaves as it is.
    """
    usual = float(width) ** -0.5
    while True:
        low, high = (1.25, 4.0) if rng.integers(4) == 0 else (usual / 4, usual * 4)
        scale = float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.4g}")
        if min(abs(np.log(scale / usual)), abs(np.log(scale))) > np.log(1.2):
            return scale
