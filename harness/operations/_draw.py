"""Draws the cases of an operation: each call takes from one generator, so that a seed names all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..batches import Batch, at_edge, decode_batch, edge_batch, log_uniform, uneven_batch
from ..case import Case
from ..operation import CaseRequest


class Draw:
    """The cases so far, and what the next one is drawn from."""

    def __init__(self, request: CaseRequest, op: str, stream: Sequence[int]) -> None:
        """Nothing is drawn yet.

        Args:
            request: What is asked for.
            op: Operation.
            stream: Tells the generator from those of other operations.
        """
        self.request, self.op = request, op
        self.cases: list[Case] = []
        self.rng = np.random.default_rng([request.seed, *stream])

    def dtype(self, turn: int) -> str:
        """One of the dtypes asked for, for cases that one is enough for."""
        return self.request.dtypes[turn % len(self.request.dtypes)]

    def batch(self, *, requests: int, longest: int, most_queries: int = 33, chunk: int = 17) -> Batch:
        """One long request among shorter ones, histories around multiples of ``chunk``."""
        return uneven_batch(self.rng, requests=requests, longest=longest, most_queries=most_queries, chunk=chunk)

    def append(self, family: str, dtype: str, sizes: dict[str, Any], *, needs_device: bool) -> None:
        """A case of these sizes, with a seed of its own."""
        seed = int(self.rng.integers(2**31))
        case = Case(op=self.op, family=family, dtype=dtype, seed=seed, sizes=sizes, needs_device=needs_device)
        self.cases.append(case)


class PackedDraw(Draw):
    """Batches of packed queries and keys."""

    def any_batch(self, most_keys: int) -> Batch:
        """One of which nothing is chosen but the longest that a request may be."""
        requests, longest = log_uniform(self.rng, 1, 32), log_uniform(self.rng, 32, most_keys)
        kind = int(self.rng.integers(3))
        if kind == 0:
            return decode_batch(self.rng, requests=requests, longest=longest)
        if kind == 1:
            return edge_batch(self.rng, requests=requests, most_queries=129, longest=129)
        return self.batch(requests=requests, longest=longest, most_queries=log_uniform(self.rng, 8, 512))

    def edges(self, requests: int) -> Batch:
        """Lengths around tile edges, among them queries past one tile and more queries than keys.

        When causal, the first queries of the latter see nothing.
        """
        rng, batch = self.rng, edge_batch(self.rng, requests=requests, most_queries=17, longest=65)
        keys = at_edge(rng, 17)
        pairs = [(65 + int(rng.integers(8)), 129 + int(rng.integers(8))), (keys + 1 + int(rng.integers(3)), keys)]
        pairs += list(zip(batch.query_lens, batch.context_lens, strict=True))
        order = rng.permutation(len(pairs))
        return Batch(query_lens=[pairs[i][0] for i in order], context_lens=[pairs[i][1] for i in order])

    def wide(self, queries: int) -> Batch:
        """More requests, queries and keys than one tile or warp counts; the first and the last have no query."""
        rng = self.rng
        long = [(queries + int(rng.integers(9)), 200 + int(rng.integers(9))), (1, 300 + int(rng.integers(9))), (64, 64)]
        short = [(log_uniform(rng, 1, keys), keys) for keys in (2, 17, 1, 5, 128, 9)]
        pairs = [(0, 0), *long, *short, (0, 3)]
        return Batch(query_lens=[n for n, _ in pairs], context_lens=[m for _, m in pairs])
