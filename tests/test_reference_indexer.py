"""The oracle of the indexer against plain loops and sorted lists, its tie rule, and closed forms."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from assay.reference.indexer import best_keys, index_scores, indexer

INF = math.inf


def inputs(
    n: tuple[int, ...], m: tuple[int, ...], *, heads: int = 3, width: int = 4, whole: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Float64; with ``whole`` small whole numbers, of which many scores are equal."""
    g = torch.Generator().manual_seed(0)
    sizes = (sum(n), heads, width), (sum(m), width), (sum(n), heads)
    if whole:
        q, k, w = (torch.randint(-2, 3, size, generator=g).double() for size in sizes)
    else:
        q, k, w = (torch.randn(size, generator=g, dtype=torch.float64) for size in sizes)
    return q, k, w, torch.tensor([0, *itertools.accumulate(n)]), torch.tensor([0, *itertools.accumulate(m)])


def by_loops(
    q: Tensor, k: Tensor, w: Tensor, topk: int, cu_q: Tensor, cu_k: Tensor
) -> tuple[list[list[int]], list[list[float]]]:
    """One number at a time, and Python's sort of pairs."""
    lists, scores = [], []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        for i in range(q1 - q0):
            pairs = []
            for s in range(max(0, min(k1 - k0, i + (k1 - k0) - (q1 - q0) + 1))):
                terms = []
                for h in range(q.shape[1]):
                    dot = math.fsum(a * b for a, b in zip(q[q0 + i, h].tolist(), k[k0 + s].tolist(), strict=True))
                    terms.append(w[q0 + i, h].item() * max(dot, 0.0))
                pairs.append((-math.fsum(terms), s))
            best = sorted(pairs)[:topk]
            lists.append([s for _, s in best] + [-1] * (topk - len(best)))
            scores.append([-score for score, _ in best] + [-INF] * (topk - len(best)))
    return lists, scores


@pytest.mark.parametrize("topk", [1, 3, 7, 20])
@pytest.mark.parametrize("whole", [False, True], ids=["real", "whole"])
def test_equals_plain_loops(whole: bool, topk: int) -> None:
    q, k, w, cu_q, cu_k = inputs((4, 0, 6, 3, 2), (9, 2, 6, 0, 1), whole=whole)
    indices, scores = indexer(q, k, w, topk=topk, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    lists, expected = by_loops(q, k, w, topk, cu_q, cu_k)
    assert indices.dtype == torch.int32
    assert indices.tolist() == lists
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_whole_numbers_have_ties() -> None:
    q, k, w, cu_q, cu_k = inputs((4, 0, 6, 3, 2), (9, 2, 6, 0, 1), whole=True)
    scores = indexer(q, k, w, topk=9, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)[1]
    assert sum(len(row) - len(set(row)) for row in scores[:4].tolist()) >= 8


def test_of_equal_scores_the_lower_position_is_first_and_kept() -> None:
    scores = torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0, -2.0]])
    for topk, expected in ((1, [1]), (3, [1, 3, 0]), (4, [1, 3, 0, 2]), (6, [1, 3, 0, 2, 4, 5])):
        assert best_keys(scores, topk)[0].tolist() == [expected]
    # the two zeros are equal
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert best_keys(zeros, 3)[0].tolist() == [[0, 1, 2]]
    # six above a threshold, forty on it
    many = torch.ones(1, 46)
    many[0, [45, 3, 17, 20, 31, 8]] = 2.0
    assert best_keys(many, 8)[0].tolist() == [[3, 8, 17, 20, 31, 45, 0, 1]]


def test_fewer_keys_than_entries() -> None:
    scores = torch.tensor([[3.0, -INF, -INF], [1.0, 2.0, -INF]])
    indices, best = best_keys(scores, 5)
    assert indices.tolist() == [[0, -1, -1, -1, -1], [1, 0, -1, -1, -1]]
    assert best.tolist() == [[3.0, -INF, -INF, -INF, -INF], [2.0, 1.0, -INF, -INF, -INF]]
    assert best_keys(torch.zeros(2, 0), 2)[0].tolist() == [[-1, -1], [-1, -1]]


def test_scores_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    k = torch.tensor([[3.0, 1.0], [-3.0, 1.0], [3.0, -1.0], [-1.0, -1.0]])
    # relu before the sum: a head that disagrees takes nothing away
    weights = torch.tensor([[1.0, 10.0]])
    assert index_scores(q, k, weights, torch.tensor([3])).tolist() == [[23.0, 20.0, 3.0, 0.0]]
    assert index_scores(q, k, -weights, torch.tensor([1])).tolist() == [[-23.0, -20.0, -INF, -INF]]
    assert index_scores(q, k, weights, torch.tensor([-1])).tolist() == [[-INF] * 4]


def test_one_head_and_positive_products_rank_by_the_product() -> None:
    g = torch.Generator().manual_seed(1)
    q, k = torch.rand(6, 1, 8, generator=g).double(), torch.rand(20, 8, generator=g).double()
    indices, _ = indexer(
        q, k, torch.ones(6, 1).double(), topk=4, cu_seqlens_q=torch.tensor([0, 6]), cu_seqlens_k=torch.tensor([0, 20])
    )
    for i in range(6):
        products = (k @ q[i, 0])[: 15 + i]
        assert indices[i].tolist() == products.topk(4).indices.tolist()


def test_a_scale_of_each_key_belongs_into_the_keys() -> None:
    """Folded in it multiplies the scores of its key, as a positive factor of a query's heads does those of a query."""
    q, k, w, _, _ = inputs((4,), (6,))
    seen, scale = torch.full((4,), 5), torch.rand(6, generator=torch.Generator().manual_seed(2)).double() + 0.5
    folded = index_scores(q, k * scale[:, None], w, seen)
    torch.testing.assert_close(folded, index_scores(q, k, w, seen) * scale, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("topk", [0, -1])
def test_a_list_has_entries(topk: int) -> None:
    with pytest.raises(ValueError, match=f"topk must be positive, got {topk}"):
        best_keys(torch.zeros(2, 3), topk)
