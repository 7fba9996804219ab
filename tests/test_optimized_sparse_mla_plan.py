"""Planning sparse MLA: lengths, refusals, and what neighbouring queries share against the runs it was fitted to."""

from typing import Any

import pytest
import torch
from sparse_inputs import planned, sparse_inputs

from assay.optimized._sparse_mla_overlap import Overlap, measure_overlap, union_group, union_verdict
from assay.optimized._sparse_mla_plan import refusal
from assay.optimized.sparse_mla import SparseMlaShape, plan_sparse_mla

SHAPE: dict[str, Any] = {
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "s_q": 5,
    "s_kv": 100,
    "h_q": 8,
    "d_qk": 576,
    "topk": 64,
}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"h_q": 0}, ValueError, "h_q must be at least 1, got 0"),
        ({"h_q": 129}, ValueError, "h_q must be at most 128, got 129"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"d_v": 577}, ValueError, "d_v must be at most d_qk, got 577 and 576"),
        ({"s_kv": 2**31}, ValueError, "s_kv must be below 2"),
        ({"dtype": torch.int8}, TypeError, "dtype must be bfloat16, float16, float32 or float64, got torch.int8"),
    ],
)
def test_sizes_that_no_tensors_have_are_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SparseMlaShape(**SHAPE | change)


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        ([1, 2, 65, 4, 5], ValueError, "topk_length must be 0 to topk = 64, got 65, first at query 2"),
        ([1, 2, 3, -1, 5], ValueError, "topk_length must be 0 to topk = 64, got -1, first at query 3"),
        ([1, 2, 3], ValueError, r"topk_length must have shape \[s_q\] = \(5,\), got \(3,\)"),
        ([1.0] * 5, TypeError, "topk_length must be int32, got torch.float32"),
    ],
)
def test_lengths_outside_the_list_are_refused(length: list[Any], error: type[Exception], text: str) -> None:
    values = torch.tensor(length)
    with pytest.raises(error, match=text):
        plan_sparse_mla(SparseMlaShape(**SHAPE), topk_length=values if values.is_floating_point() else values.int())


def test_the_plan_keeps_a_copy_of_the_lengths() -> None:
    length = torch.tensor([0, 64, 3, 4, 5]).int()
    plan = plan_sparse_mla(SparseMlaShape(**SHAPE), topk_length=length)
    length.fill_(9)
    assert plan.topk_length is not None
    assert plan.topk_length.tolist() == [0, 64, 3, 4, 5]


def test_an_unknown_implementation_and_one_without_its_device_are_refused() -> None:
    shape = SparseMlaShape(**SHAPE)
    with pytest.raises(ValueError, match="implementation must be 'auto' or one of torch, triton"):
        plan_sparse_mla(shape, implementation="fast")
    for name in ("gluon", "gluon-union", "flashmla"):
        with pytest.raises(
            NotImplementedError, match=f"implementation '{name}' cannot serve this shape; .*CUDA device"
        ):
            plan_sparse_mla(shape, implementation=name)
    assert "d_v = 513" in str(refusal("triton", SparseMlaShape(**SHAPE | {"d_v": 513, "dtype": torch.float16})))


def counted(indices: list[list[int]], group: int, s_kv: int) -> tuple[float, float]:
    """Entries a query, and a group, with Python's own counters."""
    valid = [[row for row in listed if 0 <= row < s_kv] for listed in indices]
    united = 0
    groups = [valid[start : start + group] for start in range(0, len(valid), group)]
    for members in groups:
        united += len({row for listed in members for row in listed})
        united += sum(len(listed) - len(set(listed)) for listed in members)
    return sum(map(len, valid)) / len(valid), united / len(groups)


@pytest.mark.parametrize(("s_q", "h_q"), [(37, 8), (24, 16), (3, 8), (1, 1), (9, 64), (250, 8)])
@pytest.mark.parametrize("lengths", [True, False])
def test_the_overlap_is_what_a_count_says(lengths: bool, s_q: int, h_q: int) -> None:
    generator = torch.Generator().manual_seed(s_q)
    indices = torch.randint(-3, 44, (s_q, 30), generator=generator, dtype=torch.int32)
    length = torch.randint(0, 31, (s_q,), generator=generator, dtype=torch.int32) if lengths else None
    overlap = measure_overlap(indices, s_kv=40, h_q=h_q, topk_length=length)
    assert overlap.group == union_group(h_q) == {8: 8, 16: 4, 1: 8, 64: 1}[h_q]
    seen = indices.masked_fill(torch.arange(30) >= length[:, None], -1) if length is not None else indices
    expected = counted(seen.tolist(), overlap.group, 40)
    assert (overlap.listed, overlap.united) == pytest.approx(expected, rel=1e-6)


# heads, width, entries of a query, queries, rows, entries of a group over those of a query, milliseconds of both ways
MEASURED = [
    (8, 512, 512, 8192, 8192, 1.64, 0.419, 0.550),
    (8, 512, 512, 8192, 32768, 4.37, 1.004, 0.557),
    (8, 512, 512, 8192, 32768, 3.04, 0.760, 0.550),
    (8, 512, 512, 8192, 32768, 1.69, 0.511, 0.537),
    (8, 512, 512, 8192, 32768, 1.21, 0.418, 0.532),
    (8, 512, 512, 8192, 131072, 1.70, 0.733, 0.543),
    (16, 512, 512, 8192, 32768, 2.47, 1.141, 0.726),
    (16, 512, 512, 8192, 32768, 1.88, 0.954, 0.716),
    (16, 512, 512, 8192, 32768, 1.30, 0.764, 0.704),
    (16, 512, 512, 8192, 32768, 1.09, 0.677, 0.701),
    (16, 512, 512, 8192, 131072, 1.30, 1.186, 0.706),
    (8, 576, 2048, 8192, 32768, 3.99, 3.402, 2.448),
    (8, 576, 2048, 8192, 32768, 2.86, 2.571, 2.433),
    (8, 576, 2048, 8192, 32768, 1.64, 1.636, 2.363),
    (8, 576, 2048, 8192, 32768, 1.20, 1.321, 2.410),
    (8, 576, 2048, 2048, 32768, 1.64, 0.429, 0.612),
    (8, 576, 2048, 8192, 131072, 1.68, 1.919, 2.392),
    (16, 576, 2048, 8192, 32768, 2.36, 3.971, 3.125),
    (16, 576, 2048, 8192, 32768, 1.83, 3.195, 3.104),
    (16, 576, 2048, 8192, 32768, 1.28, 2.397, 2.998),
    (16, 576, 2048, 8192, 32768, 1.08, 2.094, 2.930),
    (16, 576, 2048, 2048, 32768, 1.28, 0.601, 0.742),
    (16, 576, 2048, 8192, 131072, 1.29, 2.860, 2.982),
]


@pytest.mark.parametrize("run", MEASURED, ids=str)
def test_the_choice_is_the_faster_of_the_measured_runs(run: tuple[Any, ...]) -> None:
    h_q, d_qk, listed, s_q, s_kv, united, together, alone = run
    overlap = Overlap(group=union_group(h_q), listed=listed, united=united * listed)
    verdict = union_verdict(overlap, s_q=s_q, s_kv=s_kv, h_q=h_q, d_qk=d_qk)
    chosen = together if verdict is None else alone
    assert chosen <= 1.02 * min(together, alone), verdict


def test_what_was_not_measured_is_not_taken() -> None:
    overlap = Overlap(group=2, listed=512.0, united=512.0)
    assert union_verdict(overlap, s_q=8192, s_kv=8192, h_q=32, d_qk=512) == (
        "its gain is not measured for 32 heads of width 512"
    )


def test_planned_indices_are_checked() -> None:
    given = sparse_inputs(s_q=12)
    with pytest.raises(ValueError, match="indices must have shape"):
        planned(given, "auto", indices=given["indices"][:, 1:])
