"""Generated selections: what a query may see, how alike neighbours are, how keys are spread, the same from a seed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness import topk_indices as module
from assay.harness.topk_indices import (
    CLUSTERED,
    PATTERNS,
    Pattern,
    drawn_indices,
    indexed_indices,
    neighbour_overlap,
    topk_indices,
    with_overlap,
)
from assay.optimized._sparse_mla_overlap import measure_overlap
from assay.optimized.indexer import indexer as twin
from assay.reference.indexer import indexer

SMALL = Pattern(overlap=0.9, cluster=4, sinks=6, recent=9)
SOURCES: list[str | Pattern] = [*PATTERNS, "indexer", SMALL]


def assert_legal(indices: Tensor, last_keys: list[int], topk: int) -> None:
    """Different visible positions, all of them if they are few, padding behind."""
    for row, last in zip(indices.tolist(), last_keys, strict=True):
        count = min(topk, last + 1)
        assert len(set(row[:count])) == count
        assert all(0 <= key <= last for key in row[:count])
        assert row[count:] == [-1] * (topk - count)


@pytest.mark.parametrize("order", ["shuffled", "ascending"])
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_lists_are_of_visible_keys(source: Any, order: Any) -> None:
    queries, contexts, topk = [20, 0, 3, 7], [90, 5, 3, 40], 33
    indices = topk_indices(source, queries, contexts, topk, order=order)
    assert (indices.dtype, tuple(indices.shape)) == (torch.int32, (30, topk))
    last = [c - n + i for n, c in zip(queries, contexts, strict=True) for i in range(n)]
    assert_legal(indices, last, topk)
    kept = [[key for key in row if key >= 0] for row in indices.tolist()]
    in_order = [keys == sorted(keys) for keys in kept if len(keys) > 20]
    assert len(in_order) >= 20
    assert all(in_order) if order == "ascending" else not any(in_order)
    again = topk_indices(source, queries, contexts, topk, order=order)
    assert torch.equal(again, indices)
    # of 64 sinks and 512 recent keys nothing is left to draw
    if source != "clustered":
        assert not torch.equal(topk_indices(source, queries, contexts, topk, order=order, seed=1), indices)


def test_requests_are_drawn_apart() -> None:
    indices = topk_indices("uniform", [5, 5], [200, 200], 20, order="ascending")
    assert not torch.equal(indices[:5], indices[5:])


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.7, 0.9, 0.97, 1.0])
def test_neighbours_share_what_was_asked_for(overlap: float) -> None:
    last = torch.full((60,), 4095)
    indices = drawn_indices(Pattern(overlap=overlap, cluster=4), last, 512)
    # of what is drawn again, an eighth is drawn again as it was
    assert neighbour_overlap(indices) == pytest.approx(overlap + (1 - overlap) / 8, abs=0.02)
    # two steps apart
    assert neighbour_overlap(indices[::2]) == pytest.approx(
        max(0.0, 2 * overlap - 1) * 7 / 8 + 1 / 8 if overlap >= 0.5 else 1 / 8, abs=0.03
    )


def test_sinks_and_recent_keys_are_always_there() -> None:
    last = torch.arange(900, 1000)
    indices = drawn_indices(CLUSTERED, last, 700)
    for row, end in zip(indices.tolist(), last.tolist(), strict=True):
        assert set(range(64)) <= set(row)
        assert set(range(end - 511, end + 1)) <= set(row)
    assert neighbour_overlap(indices) > 0.95


def test_keys_of_a_cluster_come_together() -> None:
    indices = drawn_indices(Pattern(cluster=8), torch.full((50,), 1023), 128)
    for row in indices.tolist():
        assert len({key // 8 for key in row}) == 16


def test_uniform_keys_are_spread_evenly() -> None:
    indices = drawn_indices(Pattern(), torch.full((400,), 511), 64)
    counts = indices.long().flatten().bincount(minlength=512).double()
    # 50 +- 6.6 a key by the binomial law: the sum of squares is that of 511 degrees of freedom
    chi = ((counts - 50) ** 2 / (50 * (1 - 64 / 512))).sum()
    assert 511 - 5 * 32 < chi < 511 + 5 * 32
    # and so are the shared ones of two queries
    shared = [len(set(a) & set(b)) for a, b in zip(indices[:-1].tolist(), indices[1:].tolist(), strict=True)]
    assert sum(shared) / len(shared) == pytest.approx(8.0, abs=0.5)


def test_the_measure_of_sparse_attention_agrees() -> None:
    last = torch.full((256,), 4095)
    united = []
    for overlap in (0.0, 0.5, 0.9, 1.0):
        indices = drawn_indices(Pattern(overlap=overlap), last, 256)
        united.append(measure_overlap(indices, s_kv=4096, h_q=8).united)
    assert united[3] == 256
    assert united == sorted(united, reverse=True)
    assert united[0] == pytest.approx(4096 * (1 - (1 - 1 / 16) ** 8), rel=0.03)


def test_parts_of_the_queries_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    last = torch.arange(50, 90)
    whole = drawn_indices(SMALL, last, 20)
    monkeypatch.setattr(module, "_CELLS", 90 * 7)
    assert torch.equal(drawn_indices(SMALL, last, 20), whole)


def test_an_indexer_chooses_neighbouring_keys_for_neighbouring_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Tensor] = {}
    real = twin

    def recorded(q: Tensor, k: Tensor, weights: Tensor, *, plan: Any) -> tuple[Tensor, Tensor]:
        seen.update(q=q, k=k, weights=weights)
        return real(q, k, weights, plan=plan)

    monkeypatch.setattr(module, "indexer", recorded)
    indices = indexed_indices(40, 600, 64)
    wide = {name: tensor.double() for name, tensor in seen.items()}
    expected, _ = indexer(**wide, topk=64, cu_seqlens_q=torch.tensor([0, 40]), cu_seqlens_k=torch.tensor([0, 600]))
    # float32 may swap two scores that are nearly equal
    assert (indices == expected).double().mean() > 0.95
    assert_legal(indices, list(range(560, 600)), 64)
    # of random lists neighbours would share a ninth
    assert 0.6 < neighbour_overlap(indices) < 0.99
    gaps = indices.sort(dim=-1).values.diff(dim=-1)
    assert (gaps == 1).double().mean() > 0.5


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"overlap": 1.1}, "overlap must be between 0 and 1, got 1.1"),
        ({"cluster": 0}, "cluster must be at least 1"),
        ({"sinks": -1}, "sinks and recent at least 0, got 1, -1 and 0"),
    ],
)
def test_a_pattern_refuses(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pattern(**changed)


def test_a_call_refuses() -> None:
    with pytest.raises(ValueError, match="source must be a pattern, 'indexer' or one of uniform, clustered, got 'x'"):
        topk_indices("x", [1], [2], 3)
    with pytest.raises(ValueError, match="context_lens must include the 3 current tokens of request 0, got 2"):
        topk_indices("uniform", [3], [2], 3)
    with pytest.raises(ValueError, match="order must be 'shuffled' or 'ascending', got 'down'"):
        topk_indices("uniform", [3], [9], 3, order="down")  # type: ignore[arg-type]
    assert with_overlap(0.5) == Pattern(overlap=0.5, cluster=16, sinks=64, recent=512)


@pytest.mark.gpu
def test_the_same_on_a_device() -> None:
    for source in PATTERNS:
        on_cpu = topk_indices(source, [70, 5], [3000, 40], 700)
        assert torch.equal(topk_indices(source, [70, 5], [3000, 40], 700, device="cuda").cpu(), on_cpu)
