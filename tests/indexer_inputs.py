"""Inputs of the indexer, the oracle on them, and what a selection in float32 may confuse."""

import itertools
from typing import Any

import torch
from mask_inputs import offsets
from torch import Tensor

from assay.optimized.indexer import IndexerPlan, IndexerShape, plan_indexer
from assay.reference.indexer import index_scores, indexer

INF = float("inf")

Given = dict[str, Any]


def indexer_inputs(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    *,
    heads: int = 3,
    width: int = 24,
    topk: int = 8,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Given:
    """With ``whole`` small whole numbers: every score is exact in any precision, and many are equal."""
    g = torch.Generator().manual_seed(seed)
    sizes = (sum(query_lens), heads, width), (sum(key_lens), width), (sum(query_lens), heads)
    q, k, w = (
        torch.randint(-1, 2, size, generator=g).float() if whole else torch.randn(size, generator=g) for size in sizes
    )
    return {
        "q": q.to(dtype).to(device),
        "k": k.to(dtype).to(device),
        "weights": w.to(torch.promote_types(dtype, torch.float32)).to(device),
        "topk": topk,
        "cu_seqlens_q": offsets(query_lens),
        "cu_seqlens_k": offsets(key_lens),
    }


def planned(given: Given, **options: Any) -> IndexerPlan:
    q = given["q"]
    shape = IndexerShape(device=q.device, dtype=q.dtype, num_heads=q.shape[1], head_dim=q.shape[2], topk=given["topk"])
    return plan_indexer(given["cu_seqlens_q"], given["cu_seqlens_k"], shape=shape, **options)


def by_oracle(given: Given) -> tuple[Tensor, Tensor]:
    """The oracle in float64 on the stored inputs."""
    return indexer(**{name: t.double() if name in ("q", "k", "weights") else t for name, t in given.items()})


def check(indices: Tensor, scores: Tensor, given: Given) -> None:
    """Scores within their bound, and no key before or left out for another that scores lower by more than the bound.

    The order is checked of what the answer says itself: by its own scores, and of equal ones by position.
    """
    topk, width = given["topk"], given["q"].shape[2]
    u = 2.0**-53 if given["q"].dtype == torch.float64 else 2.0**-24
    assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (len(given["q"]), topk))
    assert (scores.dtype, scores.shape) == (given["weights"].dtype, indices.shape)
    cu_q, cu_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        q, k, w = given["q"][q0:q1].double(), given["k"][k0:k1].double(), given["weights"][q0:q1].double()
        last_key = torch.arange(q1 - q0, device=q.device) + (k1 - k0) - (q1 - q0)
        truth = index_scores(q, k, w, last_key)
        magnitude = torch.einsum("th,ths->ts", w.abs(), torch.einsum("thd,sd->ths", q.abs(), k.abs()))
        bound = (width + q.shape[1] + 4) * u * magnitude
        for row in range(q1 - q0):
            check_row(indices[q0 + row], scores[q0 + row], truth[row], bound[row], topk)


def check_row(indices: Tensor, scores: Tensor, truth: Tensor, bound: Tensor, topk: int) -> None:
    """One query; ``truth`` and ``bound`` of all its keys."""
    count = min(topk, int((truth > -INF).sum()))
    chosen, kept = indices[:count].long(), scores[:count].double()
    assert (indices[count:] == -1).all()
    assert (scores[count:] == -INF).all()
    assert (chosen >= 0).all()
    assert len(chosen.unique()) == count, "a key is listed twice"
    assert ((kept - truth[chosen]).abs() <= bound[chosen]).all()
    descending = (kept[:-1] > kept[1:]) | ((kept[:-1] == kept[1:]) & (chosen[:-1] < chosen[1:]))
    assert descending.all(), "not ordered by score, then by position"
    left = torch.ones_like(truth, dtype=torch.bool)
    left[chosen] = False
    left &= truth > -INF
    if count and left.any():
        worst = (truth[chosen] + bound[chosen]).min()
        assert ((truth - bound)[left] <= worst).all(), "a better key was left out"
