"""The lists of ``topk_mask``: selections as they come, and whatever a buffer of indices may hold beside them."""

from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..topk_indices import CLUSTERED, Pattern, drawn_indices, topk_indices

# of random order; neighbours alike; a real selection; few keys many times; padding between them; all that lies outside;
# the first and last bit of each word; nothing in the first entries and of the first keys; every key
FAMILIES = ("diffuse", "clustered", "indexed", "duplicates", "holes", "outside", "signs", "late", "full")
# contexts whose neighbours share sinks and recent tokens in numbers of their own
SHORT_CONTEXT = 4096
SHORT_CLUSTERS = Pattern(overlap=0.9, cluster=8, sinks=4, recent=16)
# entries, or keys, of which a list of the family ``late`` has none
FIRST = 64
PADDING = (-1, -123456, torch.iinfo(torch.int32).min)
FAR = (2147480000, torch.iinfo(torch.int32).max)


def drawn_lists(case: Case, device: torch.device) -> Tensor:
    """``[T, topk]``, int32: the lists of all queries, positions in the sequence of their own request.

    Raises:
        ValueError: If there is no such family.
    """
    if case.family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {case.family!r}")
    sizes, generator = case.sizes, torch.Generator().manual_seed(case.seed)
    query_lens, context_lens, topk = sizes["query_lens"], sizes["context_lens"], sizes["topk"]
    if case.family == "indexed":
        return topk_indices("indexer", query_lens, context_lens, topk, seed=case.seed, device="cpu")
    parts = [torch.empty(0, topk, dtype=torch.int32)]
    for request, (n, m) in enumerate(zip(query_lens, context_lens, strict=True)):
        if case.family in ("diffuse", "clustered"):
            own_seed = case.seed + 7919 * request
            parts.append(_selected(case.family, n, m, topk, own_seed, device).cpu())
        else:
            parts.append(_DRAWN[case.family](n, m, topk, generator).int())
    lists = torch.cat(parts)
    if case.family == "outside":
        others = torch.tensor(context_lens)[torch.randint(len(context_lens), lists.shape, generator=generator)]
        # beyond one's own end, within another's, and the other way round
        lists = torch.where(torch.rand(lists.shape, generator=generator) < 0.15, others.int(), lists)
    return lists


def _selected(family: str, n: int, m: int, topk: int, seed: int, device: torch.device) -> Tensor:
    """Different positions, up to each query where neighbours are alike, anywhere otherwise; then -1."""
    last_keys = torch.arange(n, device=device) + m - n
    if family == "diffuse":
        return drawn_indices(Pattern(), torch.full_like(last_keys, m - 1), topk, seed=seed)
    pattern = CLUSTERED if m > SHORT_CONTEXT else SHORT_CLUSTERS
    return drawn_indices(pattern, last_keys, topk, seed=seed)


def _anywhere(n: int, m: int, topk: int, generator: torch.Generator, low: int = 0) -> Tensor:
    """Any of the keys from ``low`` on, with repetitions; padding where there are none."""
    if m <= low:
        return torch.full((n, topk), -1)
    return torch.randint(low, m, (n, topk), generator=generator)


def _duplicates(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """A few keys of each query, over and over."""
    few = _anywhere(n, m, max(1, topk // 6), generator)
    return few.gather(1, torch.randint(few.shape[1], (n, topk), generator=generator))


def _holes(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """Padding of each kind in a third of the places, and no key at all for every fifth query."""
    lists = _anywhere(n, m, topk, generator)
    kinds = torch.randint(3 * len(PADDING), lists.shape, generator=generator)
    for kind, value in enumerate(PADDING):
        lists[kinds == kind] = value
    lists[::5] = -1
    return lists


def _outside(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """Behind the last key, in the last word, in the next row, far away; and below 0."""
    lists, behind = _anywhere(n, m, topk, generator), 32 * -(-m // 32)
    places = (m, m + 1, behind - 1, behind, behind + 31, 2 * behind + 5, *FAR, *PADDING)
    kinds = torch.randint(2 * len(places), lists.shape, generator=generator)
    for kind, value in enumerate(places):
        lists[kinds == kind] = value
    return lists


def _signs(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """The last bit of some words, of every eighth word the first as well: most words are negative and nothing else."""
    words = torch.randint(max(1, -(-m // 32)), (n, topk), generator=generator)
    lists = 32 * words + 31
    first = (words % 8 == 0) & (torch.rand(lists.shape, generator=generator) < 0.25)
    lists = torch.where(first, 32 * words, lists)
    return torch.where(torch.rand(lists.shape, generator=generator) < 0.4, -1, lists.clamp(max=m - 1))


def _late(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """Nothing in the first entries, and none of the first keys where there are others."""
    lists = _anywhere(n, m, topk, generator, low=min(FIRST, max(0, m - 1)))
    lists[:, : min(FIRST, topk - 1)] = -1
    return lists


def _full(n: int, m: int, topk: int, generator: torch.Generator) -> Tensor:
    """Every key, in another order for each query, as far as the list goes."""
    order = torch.rand(n, m, generator=generator).argsort(dim=1)[:, :topk]
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1)


_DRAWN: dict[str, Any] = {
    "duplicates": _duplicates,
    "holes": _holes,
    "outside": _outside,
    "signs": _signs,
    "late": _late,
    "full": _full,
}
