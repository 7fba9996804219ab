"""Sparse MLA: each implementation within the derived bounds, written where it belongs and nowhere else; refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_inputs import INF, answered, bounds, check, of_queries, planned, sparse_inputs
from torch import Tensor

from assay.optimized import sparse_mla as public
from assay.optimized._sparse_mla_overlap import padded_heads
from assay.reference.sparse_mla import sparse_mla

# what runs on a CPU
IMPLEMENTATIONS = ("torch", "triton", "padded")
SENTINEL = 7.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"d_qk": 32, "lengths": False}, {"h_q": 1, "sinks": False}], ids=str)
def test_the_torch_twin_is_within_its_bounds(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    given = sparse_inputs(dtype=dtype, seed=1, **sizes)
    check(answered(given, planned(given)), given)


@pytest.mark.parametrize(
    ("implementation", "dtype", "sizes"),
    [
        ("triton", torch.float32, {}),
        ("triton", torch.float16, {}),
        ("triton", torch.float32, {"d_qk": 32, "lengths": False}),
        ("triton", torch.float32, {"h_q": 1, "d_v": 17, "s_q": 12}),
        ("triton", torch.float16, {"h_q": 67, "sinks": False, "s_q": 12}),
        ("triton", torch.float16, {"d_qk": 576, "d_v": 512, "s_q": 12}),
        ("padded", torch.float32, {"s_q": 12}),
        ("padded", torch.float16, {"h_q": 65, "lengths": False, "s_q": 12}),
    ],
    ids=str,
)
def test_the_kernels_are_within_their_bounds(implementation: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    given = sparse_inputs(dtype=dtype, seed=2, **sizes)
    check(answered(given, planned(given, implementation)), given)


def one_tile_fewer(given: dict[str, Any]) -> dict[str, Any]:
    length = given["topk_length"].clone()
    length[4:] = (length[4:] - 32).clamp(min=0)
    return given | {"topk_length": length}


def each_row_once(given: dict[str, Any]) -> dict[str, Any]:
    indices = given["indices"].clone()
    for row in indices:
        first = torch.ones_like(row, dtype=torch.bool)
        ordered, order = row.sort(stable=True)
        first[order[1:]] = ordered[1:] != ordered[:-1]
        row[~first] = -1
    return given | {"indices": indices}


DEFECTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lengths forgotten": lambda given: given | {"topk_length": None},
    "sinks forgotten": lambda given: given | {"attn_sink": None},
    "one sink wrong by 1 %": lambda given: given | {"attn_sink": given["attn_sink"] * torch.tensor([1.01] + [1.0] * 7)},
    "a tile of the list forgotten": one_tile_fewer,
    "a set instead of a multiset": each_row_once,
    "a scale of the padded width": lambda given: given | {"softmax_scale": given["softmax_scale"] * (40 / 64) ** 0.5},
    "the last row of the cache for -1": lambda given: given | {"indices": given["indices"].where(
        given["indices"] != -1, 5)},
    "an index past the cache wrapped": lambda given: given | {"indices": given["indices"].where(
        given["indices"] != 97, 2)},
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_breaks_a_bound(name: str) -> None:
    given = sparse_inputs(seed=3)
    check(answered(given, planned(given)), given)
    wrong = DEFECTS[name](given)
    with pytest.raises(AssertionError, match=r"of the bound|not finite|without keys"):
        check(answered(wrong, planned(wrong)), given)


def test_the_bounds_are_near_what_roundings_cost() -> None:
    given = sparse_inputs(seed=4, dtype=torch.bfloat16, sinks=False, lengths=False)
    asked = of_queries(given, torch.arange(12, 23))
    truth, limit = sparse_mla(**asked)[0], bounds(asked, torch.bfloat16)[0]
    # a rounding of the answer, and one of each weight that nothing averages
    assert 2.0**-8 <= float((limit / truth.abs()).min()) <= 2.0**-6.5
    assert float((limit / truth.abs()).median()) <= 2.0**-4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_out_may_be_a_view_whose_surroundings_stay(implementation: str) -> None:
    given = sparse_inputs(s_q=13, h_q=3, seed=5)
    plan = planned(given, implementation)
    expected = answered(given, plan)
    for dimension in (1, 2):
        buffer = torch.full((20, 8, 2 * 32) if dimension == 2 else (20, 8, 32), SENTINEL)
        view = buffer[4:17, 2:5, ::2] if dimension == 2 else buffer[4:17, 2:5]
        results = answered(given, plan, out=view)
        assert results[0].data_ptr() == view.data_ptr()
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        view.fill_(SENTINEL)
        assert bool((buffer == SENTINEL).all())


def strided(tensor: Tensor) -> Tensor:
    """The same values with every other element of a larger buffer, between NaN or huge numbers."""
    filler = torch.nan if tensor.is_floating_point() else 2**30
    wide = torch.full([2 * size + 1 for size in tensor.shape], filler, dtype=tensor.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_are_followed(implementation: str) -> None:
    given = sparse_inputs(s_q=12, h_q=3, seed=6)
    expected = answered(given, planned(given, implementation))
    moved = given | {name: strided(given[name]) for name in ("q", "kv", "indices", "topk_length", "attn_sink")}
    results = answered(moved, planned(moved, implementation))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_is_seen_by_those_who_list_it_and_by_no_other(implementation: str) -> None:
    given = sparse_inputs(s_q=14, h_q=2, seed=7, sinks=False)
    before = answered(given, planned(given, implementation))
    given["kv"][20] = torch.nan
    listed = torch.arange(50) < given["topk_length"][:, None]
    sees = ((given["indices"] == 20) & listed).any(1)
    assert 0 < int(sees.sum()) < 14
    for ours, old in zip(answered(given, planned(given, implementation)), before, strict=True):
        assert torch.equal(ours.isnan().flatten(1).any(1), sees)
        assert ours[sees].isnan().all()
        assert torch.equal(ours[~sees], old[~sees])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale_is_served(scale: float, implementation: str) -> None:
    given = sparse_inputs(s_q=12, h_q=2, seed=8) | {"softmax_scale": scale}
    check(answered(given, planned(given, implementation)), given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_far_from_zero_neither_overflow_nor_vanish(implementation: str) -> None:
    given = sparse_inputs(s_q=12, h_q=2, seed=9, sinks=False)
    for scale in (3e3, -3e3):
        far = given | {"softmax_scale": scale}
        results = answered(far, planned(far, implementation))
        check(results, far)
        assert results[1][2:5].abs().min() > 1e3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_to_do_and_nothing_to_see(implementation: str) -> None:
    given = sparse_inputs(h_q=2, s_q=12)
    none = given | {"q": given["q"][:0], "indices": given["indices"][:0], "topk_length": None}
    assert [tuple(result.shape) for result in answered(none, planned(none, implementation))] == [(0, 2, 32)] + [
        (0, 2)
    ] * 2
    blind = given | {"kv": given["kv"][:0]}
    out, lse, max_logits = answered(blind, planned(blind, implementation))
    assert not out.any()
    assert bool((lse == -INF).all())
    assert bool((max_logits == -INF).all())


def test_auto_takes_torch_on_a_cpu() -> None:
    given = sparse_inputs(s_q=12)
    plan = planned(given, "auto", indices=given["indices"])
    assert (plan.implementation, plan.choice) == ("torch", "auto took torch")


def wrong_call(name: str, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    given = sparse_inputs(s_q=12, h_q=4)
    return given | {name: change(given[name])}


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("q", lambda q: q[:, :3], ValueError, r"q must have shape \(12, 4, 40\) as planned, got \(12, 3, 40\)"),
        ("q", lambda q: q.half(), TypeError, "q must be torch.float32 as planned, got torch.float16"),
        ("kv", lambda kv: kv[:, None], ValueError, r"kv must have shape \(97, 40\) as planned, got \(97, 1, 40\)"),
        ("kv", lambda kv: kv.double(), TypeError, "kv must be torch.float32 as planned, got torch.float64"),
        ("kv", lambda kv: kv.to(torch.float8_e4m3fn), NotImplementedError, "kv must be dequantised to torch.float32"),
        ("indices", lambda i: i.long(), TypeError, "indices must be int32, got torch.int64"),
        ("indices", lambda i: i[:, None], ValueError, r"indices must have shape \[s_q, topk\] = \(12, 50\)"),
        ("attn_sink", lambda s: s.double(), TypeError, "attn_sink must be torch.float32, got torch.float64"),
        ("attn_sink", lambda s: s[:2], ValueError, r"attn_sink must have shape \[h_q\] = \(4,\), got \(2,\)"),
        ("softmax_scale", lambda s: torch.tensor(s), TypeError, "softmax_scale must be a number"),
        ("softmax_scale", lambda s: INF, ValueError, "softmax_scale must be finite"),
    ],
)
def test_a_wrong_call_is_refused_and_writes_nothing(
    name: str, change: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    plan = planned(sparse_inputs(s_q=12, h_q=4))
    out = torch.full((12, 4, 32), SENTINEL)
    with pytest.raises(error, match=text):
        answered(wrong_call(name, change), plan, out=out)
    assert bool((out == SENTINEL).all())


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda given: torch.empty(12, 4, 31), ValueError, r"out must have shape \[s_q, h_q, d_v\] = \(12, 4, 32\)"),
        (lambda given: torch.empty(12, 4, 32).double(), TypeError, "out must be torch.float32 as planned"),
        (lambda given: given["q"][..., :32], ValueError, "out must not lie over an input, .* that of q"),
        (lambda given: given["kv"].flatten()[: 12 * 128].view(12, 4, 32), ValueError, "that of kv"),
        (lambda given: torch.empty(12, 1, 32).expand(12, 4, 32), ValueError, "out must not overlap itself"),
        (lambda given: torch.empty(5000).as_strided((12, 4, 32), (64, 16, 1)), ValueError, "out must not overlap"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(make: Callable[[Any], Tensor], error: type[Exception], text: str) -> None:
    given = sparse_inputs(s_q=12, h_q=4)
    before = [given[name].clone() for name in ("q", "kv")]
    with pytest.raises(error, match=text):
        answered(given, planned(given), out=make(given))
    for old, name in zip(before, ("q", "kv"), strict=True):
        torch.testing.assert_close(given[name], old, rtol=0, atol=0, equal_nan=True)


def test_heads_of_one_buffer_beside_each_other_are_no_overlap() -> None:
    given = sparse_inputs(s_q=12, h_q=4)
    buffer = torch.full((12, 8, 32), SENTINEL)
    # heads whose strides interleave: rows of the buffer hold first all even, then all odd columns of two heads
    answered(given, planned(given), out=buffer.view(12, 4, 64)[..., ::2])
    assert bool((buffer.view(12, 4, 32, 2)[..., 1] == SENTINEL).all())


def test_named_implementations_are_listed() -> None:
    assert public.IMPLEMENTATIONS == ("torch", "triton", "padded", "gluon", "gluon-union", "flashmla")
    assert [padded_heads(h_q) for h_q in (1, 8, 9, 16, 17, 33, 128)] == [8, 8, 16, 16, 32, 64, 128]
