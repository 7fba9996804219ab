"""A clean twin of ``indexer`` in plain torch, made of small steps that a fault replaces one at a time."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Lists = tuple[Tensor, Tensor]
NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One function per step, in the order in which they run.

    Attributes:
        products: ``(q, k)`` of a request to ``[n, H, m]``, float32.
        scores: ``(products, weights)`` to ``[n, m]``.
        last_key: ``(n, m)`` to ``[n]``, the last key that each query sees.
        hidden: ``(scores, last_key)`` to the scores with what is hidden out of the way.
        best: ``(scores, topk)`` to the keys and scores of the lists, ``[n, topk]``.
    """

    products: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor, Tensor], Tensor]
    last_key: Callable[[int, int], Tensor]
    hidden: Callable[[Tensor, Tensor], Tensor]
    best: Callable[[Tensor, int], Lists]


def products(q: Tensor, k: Tensor) -> Tensor:
    """In float32."""
    return torch.einsum("thd,sd->ths", q.float(), k.float())


def scores(products: Tensor, weights: Tensor) -> Tensor:
    """The sum over heads of the weights times what is above 0."""
    return torch.einsum("th,ths->ts", weights, products.relu())


def last_key(n: int, m: int) -> Tensor:
    """The last query sees the last key."""
    return torch.arange(n) + m - n


def hidden(scores: Tensor, last_key: Tensor) -> Tensor:
    """The future of a query is ``-inf``."""
    future = torch.arange(scores.shape[1], device=scores.device) > last_key.to(scores.device)[:, None]
    return scores.masked_fill(future, NEVER)


def ranked(scores: Tensor) -> Lists:
    """All keys, the highest score first, of equal ones the lower position."""
    ordered, keys = (scores + 0.0).sort(dim=-1, descending=True, stable=True)
    return keys, ordered


def padded(keys: Tensor, ordered: Tensor, topk: int) -> Lists:
    """The first of them; -1 and ``-inf`` where no key is left."""
    missing = max(0, topk - keys.shape[1])
    ordered = torch.nn.functional.pad(ordered[:, :topk], (0, missing), value=NEVER)
    keys = torch.nn.functional.pad(keys[:, :topk], (0, missing), value=-1)
    return keys.masked_fill(ordered == NEVER, -1), ordered


def best(scores: Tensor, topk: int) -> Lists:
    """The first of all."""
    return padded(*ranked(scores), topk)


CLEAN = Steps(products=products, scores=scores, last_key=last_key, hidden=hidden, best=best)


def requests(arguments: Mapping[str, Any]) -> list[tuple[slice, slice]]:
    """Queries and keys of each request."""
    pairs = (itertools.pairwise(arguments[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    return [(slice(*queries), slice(*keys)) for queries, keys in zip(*pairs, strict=True)]


def index_twin(arguments: Mapping[str, Any], **changes: Any) -> Lists:
    """``indexer`` with some steps changed; see ``Steps``."""
    steps, a = replace(CLEAN, **changes), arguments
    q, k, weights, topk = a["q"], a["k"], a["weights"], a["topk"]
    indices = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    best_scores = torch.full((len(q), topk), NEVER, device=q.device)
    for queries, keys in requests(a):
        found = steps.scores(steps.products(q[queries], k[keys]), weights[queries])
        found = steps.hidden(found, steps.last_key(*found.shape))
        listed, reported = steps.best(found, topk)
        indices[queries], best_scores[queries] = listed.int(), reported
    return indices, best_scores
