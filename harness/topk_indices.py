"""Selections as inputs: uniform, clustered as sparse attention makes them, and chosen by a real indexer.

Everything is drawn by integer arithmetic from a seed, so that uniform and clustered lists are the same on any device.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..optimized.indexer import IndexerShape, indexer, plan_indexer

Order = Literal["shuffled", "ascending"]

# numbers that are ranked at once
_CELLS = 1 << 24
# the most that a draw gives, and what ranks above every draw
_DRAW_BITS = 30
_ALWAYS = 1 << _DRAW_BITS
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How the selections of neighbouring queries of a request hang together.

    Attributes:
        overlap: Share of the drawn clusters that the next query does not draw again, 0 to 1. Those drawn again may be
            the same, so that neighbours share a little more.
        cluster: Neighbouring keys that are drawn together.
        sinks: First keys, which every query selects.
        recent: Last keys before a query, which it selects, itself included.
    """

    overlap: float = 0.0
    cluster: int = 1
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        """Refuse shares and sizes that are none."""
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"overlap must be between 0 and 1, got {self.overlap}")
        if self.cluster < 1 or self.sinks < 0 or self.recent < 0:
            raise ValueError(
                f"cluster must be at least 1, sinks and recent at least 0, "
                f"got {self.cluster}, {self.sinks} and {self.recent}"
            )


UNIFORM = Pattern()
CLUSTERED = Pattern(overlap=0.9, cluster=16, sinks=64, recent=512)
PATTERNS = {"uniform": UNIFORM, "clustered": CLUSTERED}


def topk_indices(
    source: str | Pattern,
    query_lens: list[int],
    context_lens: list[int],
    topk: int,
    *,
    order: Order = "shuffled",
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Lists for the current tokens of each request, over the positions up to each of them.

    Args:
        source: A pattern or the name of one in ``PATTERNS``, or ``indexer``, which chooses by ``optimized.indexer``
            from queries and keys that drift along the sequence.
        query_lens: Current tokens of each request.
        context_lens: Tokens of each request, the current ones included.
        topk: Entries of a list.
        order: Of the entries; those of a real selection may come in any.
        seed: Of all draws.
        device: Where the lists are made.

    Returns:
        ``[T, topk]``, int32, different positions below ``context_lens``; a query that sees fewer has all of them, then
        -1.
    """
    pattern = PATTERNS.get(source) if isinstance(source, str) else source
    if pattern is None and source != "indexer":
        raise ValueError(f"source must be a pattern, 'indexer' or one of {', '.join(PATTERNS)}, got {source!r}")
    parts = [torch.empty(0, topk, dtype=torch.int32, device=device)]
    for request, (n, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if context < n:
            raise ValueError(f"context_lens must include the {n} current tokens of request {request}, got {context}")
        own_seed = seed + 7919 * request
        if pattern is not None:
            last_keys = torch.arange(context - n, context, device=device)
            chosen = drawn_indices(pattern, last_keys, topk, seed=own_seed)
        else:
            chosen = indexed_indices(n, context, topk, seed=own_seed, device=device)
        parts.append(_ordered(chosen, order, own_seed))
    return torch.cat(parts)


def drawn_indices(pattern: Pattern, last_keys: Tensor, topk: int, *, seed: int = 0) -> Tensor:
    """Draw the lists of neighbouring queries of one request, whatever comes first.

    Each query ranks the clusters by a number of its own for each; the next query keeps those numbers but for a share
    of ``1 - overlap`` of the clusters, whose turn to be drawn anew it is.

    Args:
        pattern: How lists hang together.
        last_keys: ``[n]``, integer; the last position that each query sees, -1 for none.
        topk: Entries of a list.
        seed: Of all draws.

    Returns:
        ``[n, topk]``, int32, -1 behind what a query sees.
    """
    n, num_keys = len(last_keys), int(last_keys.max()) + 1 if len(last_keys) else 0
    device = last_keys.device
    indices = torch.full((n, topk), -1, dtype=torch.int32, device=device)
    key = torch.arange(num_keys, device=device)
    cluster = key // pattern.cluster
    phase = _draw(cluster, torch.zeros_like(cluster), seed).double() / 2.0**_DRAW_BITS
    rows = max(1, _CELLS // max(num_keys, 1))
    for first in range(0, n if num_keys else 0, rows):
        last = last_keys[first : first + rows, None]
        query = torch.arange(first, first + len(last), device=device)[:, None]
        times = torch.floor(query * (1.0 - pattern.overlap) + phase).long() + 1
        rank = _draw(cluster, times, seed)
        always = (key < pattern.sinks) | (key > last - pattern.recent)
        rank = torch.where(always, _ALWAYS, rank)
        # of one cluster the first keys; a number below 0 for what is not seen
        joined = ((rank << 31) | (_INT32_MAX - key)).masked_fill(key > last, -1)
        best = joined.topk(min(topk, num_keys), dim=-1).values
        chosen = (_INT32_MAX - (best & _INT32_MAX)).masked_fill(best < 0, -1)
        indices[first : first + rows, : chosen.shape[1]] = chosen.int()
    return indices


def indexed_indices(
    num_queries: int, num_keys: int, topk: int, *, seed: int = 0, device: str | torch.device = "cpu"
) -> Tensor:
    """What an indexer chooses for the last ``num_queries`` tokens of ``num_keys``, the best first."""
    heads, width = 8, 64
    generator = torch.Generator().manual_seed(seed)
    q = _drifting(num_keys, heads * width, 64, generator).unflatten(1, (heads, width))[num_keys - num_queries :]
    k = _drifting(num_keys, width, 16, generator)
    weights = _drifting(num_keys, heads, 64, generator)[num_keys - num_queries :] * (heads * width) ** -0.5
    device = torch.device(device)
    shape = IndexerShape(device=device, dtype=torch.float32, num_heads=heads, head_dim=width, topk=topk)
    plan = plan_indexer(torch.tensor([0, num_queries]), torch.tensor([0, num_keys]), shape=shape)
    return indexer(q.to(device), k.to(device), weights.to(device), plan=plan)[0]


def neighbour_overlap(indices: Tensor) -> float:
    """The share of a query's list that is in the list of the query before it, over all pairs of neighbours."""
    shared = total = 0
    for before, after in itertools.pairwise(indices):
        own = after[after >= 0]
        shared += int(torch.isin(own, before).sum())
        total += len(own)
    return shared / max(total, 1)


def with_overlap(overlap: float) -> Pattern:
    """The clustered pattern, its neighbours alike to another degree."""
    return replace(CLUSTERED, overlap=overlap)


def _drifting(length: int, width: int, period: int, generator: torch.Generator) -> Tensor:
    """Random rows of unit variance that turn from one to an independent one within ``period`` rows."""
    anchors = torch.randn(length // period + 2, width, generator=generator)
    at = torch.arange(length)
    angle = (at % period / period * (torch.pi / 2))[:, None]
    return torch.cos(angle) * anchors[at // period] + torch.sin(angle) * anchors[at // period + 1]


def _draw(a: Tensor, b: Tensor, seed: int) -> Tensor:
    """A number of ``_DRAW_BITS`` bits for each pair, by mixing 64 bits; products wrap."""
    mixed = a * 0x2545F4914F6CDD1D + b * 0x369DEA0F31A53F85 + (seed + 1) * 0x1B03738712FAD5C9 % (1 << 62)
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x1CE4E5B9BF58476D), (33, 0x44A0A1D5B8D51BD7)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed >> 17) & ((1 << _DRAW_BITS) - 1)


def _ordered(indices: Tensor, order: Order, seed: int) -> Tensor:
    """The entries of each list in another order; padding stays behind them."""
    if order == "ascending":
        by = indices.long()
    elif order == "shuffled":
        row = torch.arange(len(indices), device=indices.device)[:, None]
        # an entry's own number in the low bits, so that no two are equal
        by = (_draw(indices.long(), row, seed + 1) << 31) | indices.long().clamp(min=0)
    else:
        raise ValueError(f"order must be 'shuffled' or 'ascending', got {order!r}")
    by = by.masked_fill(indices < 0, torch.iinfo(torch.int64).max)
    return indices.gather(1, by.argsort(dim=-1, stable=True))
