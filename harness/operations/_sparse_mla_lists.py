"""What the queries of ``sparse_mla`` list: selections as engines make them, then everything that a list may hold.

Every query has ``topk`` entries. Of those that count, some may be padding, at the front, in between, or as numbers that
name no row; some may be repeated. What lies behind the entries that count is nobody's to read.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..topk_indices import topk_indices
from ._mla_prefill_layout import slots_of

SOURCES = ("uniform", "clustered", "indexer")
ORDERS = ("shuffled", "ascending")
HOLES = ("none", "front", "between", "wild")
# every query of every other request lists nothing that there is, or that of all of them
EMPTY = ("requests", "all")
REPEATS = ("none", "some", "one")
LENGTHS = ("all", "ragged")
TAILS = ("padding", "rows", "huge", "nan")
INT32 = torch.iinfo(torch.int32)
# entries of a tile of any kernel, at most: the first of them may hold nothing
TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """The lists of a case, CPU.

    Attributes:
        indices: ``[T, topk]``, int32, rows of the cache.
        topk_length: ``[T]``, int32, or None.
        valid: ``[T, topk]``, entries that count.
        tokens: ``[T, topk]``, packed token of each valid entry, 0 elsewhere.
        slots: ``[S]``, row of each packed token.
        num_slots: Rows of the cache; a fifth belongs to nobody.
        targets: ``[T]``, one token that a query lists, the last entry that counts for every other one; -1 for none.
        poisoned: Token that holds NaN in ``visible-nan``, that the fewest queries list; None otherwise.
    """

    indices: Tensor
    topk_length: Tensor | None
    valid: Tensor
    tokens: Tensor
    slots: Tensor
    num_slots: int
    targets: Tensor
    poisoned: int | None

    @property
    def empty(self) -> Tensor:
        """``[T]``, queries that list nothing."""
        return ~self.valid.any(1)

    @property
    def undefined(self) -> Tensor:
        """``[T]``, queries that list the NaN."""
        if self.poisoned is None:
            return torch.zeros_like(self.empty)
        return (self.valid & (self.tokens == self.poisoned)).any(1)


def lists_of(case: Case) -> Lists:
    """The same for whoever asks.

    Raises:
        ValueError: If the case asks for lists that there are not.
    """
    return _lists_of(json.dumps(case.to_json()))


@lru_cache(maxsize=2)
def _lists_of(content: str) -> Lists:
    case = Case.from_json(json.loads(content))
    sizes, generator = case.sizes, torch.Generator().manual_seed(case.seed)
    for name, known in (("holes", HOLES + EMPTY), ("repeats", REPEATS), ("lengths", LENGTHS), ("tail", TAILS)):
        if sizes[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {sizes[name]!r}")
    context_lens = sizes["context_lens"]
    total = sum(context_lens)
    slots = slots_of(context_lens, torch.arange(total), generator)[0]
    num_slots = total + total // 4 + 2
    tokens = _selected(sizes, slots, seed=case.seed)
    repeated = _repeated(tokens, sizes["repeats"], generator)
    holes = _emptied(repeated, sizes) if sizes["holes"] in EMPTY else _holes(repeated, sizes["holes"], generator)
    length = _lengths(len(tokens), sizes, generator)
    counts = torch.arange(sizes["topk"]) < length[:, None]
    valid = (repeated >= 0) & ~holes & counts
    if case.family == "exact-uniform":
        valid &= _leading_power_of_two(valid)
    indices = slots[repeated.clamp(min=0)].int().masked_fill(~valid, -1)
    if sizes["holes"] in ("wild", *EMPTY):
        indices = torch.where(valid, indices, _no_rows(indices.shape, num_slots, generator))
    indices = _tailed(indices, counts, sizes["tail"], repeated, slots, num_slots)
    tokens = repeated.masked_fill(~valid, 0)
    return Lists(
        indices=indices,
        topk_length=None if sizes["lengths"] == "all" else length,
        valid=valid,
        tokens=tokens,
        slots=slots,
        num_slots=num_slots,
        targets=_targets(tokens, valid, generator),
        poisoned=_least_listed(tokens, valid) if case.family == "visible-nan" else None,
    )


def _selected(sizes: dict[str, Any], slots: Tensor, *, seed: int) -> Tensor:
    """``[T, topk]``, int64: packed tokens, -1 behind them; ascending lists are so in the cache."""
    query_lens, context_lens, order = sizes["query_lens"], sizes["context_lens"], sizes["order"]
    positions = topk_indices(sizes["source"], query_lens, context_lens, sizes["topk"], order=order, seed=seed).long()
    starts = torch.tensor([sum(context_lens[:request]) for request in range(len(context_lens))])
    first = starts.repeat_interleave(torch.tensor(query_lens))[:, None]
    tokens = torch.where(positions < 0, -1, positions + first)
    if order == "ascending":
        places = torch.where(tokens < 0, len(slots) * 2, slots[tokens.clamp(min=0)])
        tokens = tokens.gather(1, places.argsort(dim=1, stable=True))
    return tokens


def _repeated(tokens: Tensor, repeats: str, generator: torch.Generator) -> Tensor:
    """Some entries are those of another place of their list; of ``one`` all are the first in every third query."""
    if repeats == "none" or not tokens.numel():
        return tokens
    count = (tokens >= 0).sum(1, keepdim=True)
    place = (torch.rand(tokens.shape, generator=generator) * count).long()
    chosen = torch.rand(tokens.shape, generator=generator) < 0.25
    # the best entry is the one most often repeated
    place = torch.where(torch.rand(tokens.shape, generator=generator) < 0.5, 0, place)
    if repeats == "one":
        chosen[::3], place[::3] = True, 0
    copied = tokens.gather(1, place)
    return torch.where(chosen & (tokens >= 0), copied, tokens)


def _holes(tokens: Tensor, holes: str, generator: torch.Generator) -> Tensor:
    """``[T, topk]``: entries that are padding amid the others; in every fourth query there are none."""
    at = torch.arange(tokens.shape[1])
    found = torch.zeros_like(tokens, dtype=torch.bool)
    if holes == "front":
        # whole tiles of 16 to 128, of which some queries list nothing else
        front = torch.tensor([16, 32, 64, TILE])[torch.randint(4, (len(tokens), 1), generator=generator)]
        found = at < front.clamp(max=max(1, tokens.shape[1] - 1))
    elif holes == "between":
        found = (at % 3 == 1).expand_as(tokens).clone()
    elif holes == "wild":
        found = torch.rand(tokens.shape, generator=generator) < 0.4
    found[3::4] = False
    if holes != "none" and len(found) > 4:
        # and a query whose every entry is
        found[4] = True
    return found


def _emptied(tokens: Tensor, sizes: dict[str, Any]) -> Tensor:
    """``[T, topk]``: all entries of the queries of every other request, or of all."""
    lens = torch.tensor(sizes["query_lens"])
    owners = torch.arange(len(lens)).repeat_interleave(lens)
    empty: Tensor = (owners % 2 == 1) | (sizes["holes"] == "all")
    return empty[:, None].expand_as(tokens)


def _lengths(num_queries: int, sizes: dict[str, Any], generator: torch.Generator) -> Tensor:
    """``[T]``, int32: all, none, one, tile edges, and whatever else."""
    topk = sizes["topk"]
    if sizes["lengths"] == "all":
        return torch.full((num_queries,), topk, dtype=torch.int32)
    edges = [topk, 0, 1, topk - 1, *(edge + off for edge in (16, 32, 64, TILE) for off in (-1, 0, 1))]
    fitting = torch.tensor([edge for edge in edges if 0 <= edge <= topk], dtype=torch.int32)
    drawn = torch.randint(topk + 1, (num_queries,), generator=generator, dtype=torch.int32)
    at_edge = fitting[torch.randint(len(fitting), (num_queries,), generator=generator)]
    length = torch.where(torch.arange(num_queries) % 2 == 0, at_edge, drawn)
    # the first queries are those of which one is in the smallest case, too
    length[: min(3, num_queries)] = torch.tensor([max(1, topk // 2), 0, topk], dtype=torch.int32)[:num_queries]
    return length


def _leading_power_of_two(valid: Tensor) -> Tensor:
    """As many of the first entries as ``2^k`` goes into."""
    rank, count = valid.cumsum(1), valid.sum(1, keepdim=True)
    return rank <= torch.exp2(count.clamp(min=1).double().log2().floor())


def _no_rows(shape: torch.Size, num_slots: int, generator: torch.Generator) -> Tensor:
    """Numbers that name no row."""
    wild = torch.tensor([INT32.min, -123456, -2, -1, num_slots, num_slots + 5, 2147480000, INT32.max])
    return wild[torch.randint(len(wild), shape, generator=generator)].int()


def _tailed(indices: Tensor, counts: Tensor, tail: str, tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Entries past the lengths: padding, rows that others list, numbers beyond the cache, or rows that are NaN."""
    if tail == "padding":
        return indices
    if tail == "rows":
        # what the list would go on with, or a row of somebody else
        other = slots[torch.where(tokens >= 0, tokens, torch.arange(tokens.shape[1]) % len(slots))].int()
    elif tail == "huge":
        other = (INT32.max - torch.arange(tokens.shape[1], dtype=torch.int32) % 7).expand_as(indices)
    else:
        unused = ~torch.isin(torch.arange(num_slots), slots)
        free = unused.nonzero()[:, 0]
        other = free[torch.arange(tokens.shape[1]) % len(free)].int().expand_as(indices)
    return torch.where(counts, indices, other)


def _targets(tokens: Tensor, valid: Tensor, generator: torch.Generator) -> Tensor:
    count = valid.sum(1)
    drawn = (torch.rand(len(tokens), generator=generator) * count).long()
    rank = torch.where(torch.arange(len(tokens)) % 2 == 0, count - 1, drawn)
    hit = valid & (valid.cumsum(1) - 1 == rank[:, None])
    return torch.where(count > 0, (tokens * hit).sum(1), -1)


def _least_listed(tokens: Tensor, valid: Tensor) -> int | None:
    """The listed token that the fewest queries list; None if none is."""
    owners = torch.arange(len(tokens))[:, None].expand_as(tokens)[valid]
    pairs = torch.stack([tokens[valid], owners], dim=1).unique(dim=0)
    if not len(pairs):
        return None
    found, times = pairs[:, 0].unique(return_counts=True)
    return int(found[times.argmin()])
