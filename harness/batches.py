"""Batches as serving engines see them: uneven lengths, one giant among many small, with and without history."""

from dataclasses import dataclass

import numpy as np


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
