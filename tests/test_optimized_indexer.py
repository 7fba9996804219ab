"""The indexer in torch and Triton against the oracle: scores within bounds, exact ties, blocks and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from indexer_inputs import INF, by_oracle, check, indexer_inputs, planned
from mask_inputs import offsets

from assay.optimized import _indexer_triton as kernel
from assay.optimized.indexer import IndexerShape, best_keys, find_implementation, indexer, plan_indexer
from assay.reference.indexer import best_keys as oracle_best_keys

IMPLEMENTATIONS = ["torch", "triton"]
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one request": ((33,), (70,)),
    "requests": ((5, 0, 17, 3), (5, 4, 65, 40)),
    "fewer keys than entries": ((4, 2), (6, 3)),
    "queries before the first key": ((9,), (4,)),
    "no keys": ((3,), (0,)),
    "nobody": ((0,), (9,)),
}


def answered(given: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return indexer(given["q"], given["k"], given["weights"], plan=planned(given, **options))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_within_its_bounds(implementation: str, batch: str) -> None:
    given = indexer_inputs(*BATCHES[batch])
    check(*answered(given, implementation=implementation), given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("topk", [1, 7, 64, 100])
def test_exact_scores_give_the_list_of_the_oracle(topk: int, implementation: str) -> None:
    given = indexer_inputs((33, 4), (70, 40), topk=topk, whole=True)
    indices, scores = answered(given, implementation=implementation)
    expected, expected_scores = by_oracle(given)
    assert torch.equal(indices, expected)
    assert torch.equal(scores.double(), expected_scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    given = indexer_inputs((20, 3), (40, 9), dtype=dtype)
    check(*answered(given), given)
    exact = indexer_inputs((20, 3), (40, 9), dtype=dtype, whole=True)
    assert torch.equal(answered(exact)[0], by_oracle(exact)[0])
    if dtype == torch.float16:
        check(*answered(given, implementation="triton"), given)


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (5, 17), (2, 128)])
def test_sizes(heads: int, width: int) -> None:
    given = indexer_inputs((20,), (40,), heads=heads, width=width)
    for implementation in IMPLEMENTATIONS:
        check(*answered(given, implementation=implementation), given)


def test_blocks_change_nothing() -> None:
    given = indexer_inputs((20, 3), (40, 9), topk=50)
    whole = answered(given)
    plan = planned(given, workspace_bytes=20 * 50 * 7)
    assert [(b[0].stop - b[0].start, b[2]) for b in plan.blocks] == [(7, 20), (7, 27), (6, 34), (3, 6)]
    least = planned(given, workspace_bytes=1)
    assert len(least.blocks) == 23
    for one in (plan, least):
        got = indexer(given["q"], given["k"], given["weights"], plan=one)
        assert torch.equal(got[0], whole[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_change_nothing(implementation: str) -> None:
    given = indexer_inputs((20, 3), (40, 9), whole=True)
    expected = answered(given, implementation=implementation)
    other = dict(given)
    other["q"] = given["q"].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    other["weights"] = given["weights"].t().contiguous().t()
    other["k"] = torch.full((49, 40), torch.nan)[:, 8:32].copy_(given["k"])
    assert torch.equal(answered(other, implementation=implementation)[0], expected[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_requests_and_the_future_may_hold_anything(implementation: str) -> None:
    given = indexer_inputs((5, 4), (30, 20))
    expected = answered(given, implementation=implementation)
    for name, rows in (("q", slice(5, 9)), ("k", slice(30, 50)), ("weights", slice(5, 9))):
        given[name][rows] = torch.nan
    # the last query alone sees this key
    given["k"][29] = torch.nan
    got = answered(given, implementation=implementation)
    assert torch.equal(got[0][:4], expected[0][:4])
    assert torch.equal(got[1][:4], expected[1][:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ties_are_decided_as_the_oracle_does(dtype: torch.dtype) -> None:
    special = [-INF, -3.5, -1e-42, -0.0, 0.0, 1e-42, 1.0, torch.finfo(torch.float32).max]
    g = torch.Generator().manual_seed(0)
    scores = torch.tensor(special, dtype=dtype)[torch.randint(0, len(special), (40, 60), generator=g)]
    for topk in (1, 5, 59, 60, 70):
        indices, best = best_keys(scores, topk)
        expected, expected_best = oracle_best_keys(scores, topk)
        assert torch.equal(indices, expected)
        assert torch.equal(best, expected_best)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "q": (lambda g: {"q": g["q"][:, :2]}, ValueError, r"q must have shape \(5, 3, 24\) as planned, got \(5, 2, 24\)"),
    "k": (lambda g: {"k": g["k"].half()}, TypeError, "k must be torch.float32 as planned, got torch.float16"),
    "weights": (lambda g: {"weights": g["weights"].half()}, TypeError, "weights must be torch.float32 as planned, got"),
    "weights shape": (lambda g: {"weights": g["weights"][:4]}, ValueError, r"weights must have shape \(5, 3\)"),
    "device": (lambda g: {"k": g["k"].to("meta")}, ValueError, "k must be on cpu as planned, got meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_refuses(name: str) -> None:
    change, error, text = BAD[name]
    given = indexer_inputs((3, 2), (9, 8))
    tensors = {key: given[key] for key in ("q", "k", "weights")}
    with pytest.raises(error, match=text):
        indexer(**tensors | change(given), plan=planned(given))


def test_a_plan_refuses() -> None:
    shape = IndexerShape(device=torch.device("cpu"), dtype=torch.float32, num_heads=2, head_dim=8, topk=4)
    with pytest.raises(ValueError, match="must count the same requests, got 1 and 2"):
        plan_indexer(offsets((3,)), offsets((3, 4)), shape=shape)
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32 or int64"):
        plan_indexer(torch.tensor([0.0, 3.0]), offsets((3,)), shape=shape)
    with pytest.raises(ValueError, match="must be 'auto' or one of torch, triton, got 'cuda'"):
        plan_indexer(offsets((3,)), offsets((3,)), shape=shape, implementation="cuda")
    with pytest.raises(NotImplementedError, match="'triton' cannot serve this shape; float64 is not served"):
        plan_indexer(offsets((3,)), offsets((3,)), shape=replace(shape, dtype=torch.float64), implementation="triton")
    with pytest.raises(ValueError, match="topk must be positive, got 0"):
        replace(shape, topk=0)
    with pytest.raises(TypeError, match="dtype must be bfloat16"):
        replace(shape, dtype=torch.int8)
    assert plan_indexer(offsets((3,)), offsets((3,)), shape=shape).choice == "auto took torch"


def test_triton_says_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = IndexerShape(device=torch.device("cpu"), dtype=torch.float32, num_heads=2, head_dim=8, topk=4)
    assert kernel.refusal(shape) is None
    assert "interpreter" in str(kernel.refusal(replace(shape, dtype=torch.bfloat16)))
    assert "at most 256 wide, got 257" in str(kernel.refusal(replace(shape, head_dim=257)))
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    assert "CUDA device" in str(kernel.refusal(shape))


# what ports of the indexer got wrong: planted into the clean scores
FAULTS: dict[str, Any] = {
    "no relu": lambda q, k, w: torch.einsum("th,thd,sd->ts", w, q, k),
    "relu of the sum": lambda q, k, w: torch.relu(torch.einsum("th,thd,sd->ts", w, q, k)),
    "maximum over the heads": lambda q, k, w: (w[..., None] * torch.relu(torch.einsum("thd,sd->ths", q, k))).amax(1),
    "weights ignored": lambda q, k, w: torch.relu(torch.einsum("thd,sd->ths", q, k)).sum(1),
}


@pytest.mark.parametrize("name", [*FAULTS, "no causality", "causality from the top left"])
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = indexer_inputs((20, 3), (40, 9))
    clean = find_implementation("torch")
    honest = clean.score

    def planted(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, first: int) -> Any:
        if name == "no causality":
            return honest(q, k, weights, len(k))
        if name == "causality from the top left":
            return honest(q, k, weights, 0)
        hidden = honest(q, k, weights, first) == -INF
        return FAULTS[name](q, k, weights).masked_fill(hidden, -INF)

    check(*answered(given), given)
    monkeypatch.setattr(clean, "score", planted)
    with pytest.raises(AssertionError):
        check(*answered(given), given)
