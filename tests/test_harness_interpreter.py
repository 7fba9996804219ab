"""An interpreted Triton kernel never sees bfloat16, whoever wrote it, and other dtypes run as always."""

from typing import Any

import pytest
import torch
import triton.language as tl
from builders import Answer, attention_case, honest_attention, judged
from torch import Tensor

from assay.harness.interpreter import InterpretedBfloat16Error, no_interpreted_bfloat16

triton = pytest.importorskip("triton")
tensor_descriptor = pytest.importorskip("triton.tools.tensor_descriptor")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton compiles here", allow_module_level=True)


@triton.jit  # type: ignore[untyped-decorator]
def _double_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < count), mask=at < count)


def doubled(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    _double_kernel[(1,)](x, y, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_other_dtypes_run(dtype: torch.dtype) -> None:
    with no_interpreted_bfloat16():
        assert doubled(torch.arange(5).to(dtype)).tolist() == [0, 2, 4, 6, 8]


def test_bfloat16_is_refused_before_the_launch() -> None:
    x, y = torch.ones(5, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)
    with (
        no_interpreted_bfloat16(),
        pytest.raises(InterpretedBfloat16Error, match="a Triton kernel on bfloat16 tensors needs a GPU"),
    ):
        _double_kernel[(1,)](x, y, 5, BLOCK=8)
    assert y.tolist() == [0.0] * 5


@pytest.mark.parametrize("form", ["keyword", "reinterpreted", "descriptor"])
def test_bfloat16_is_refused_however_it_is_passed(form: str) -> None:
    x, y = torch.ones(5), torch.zeros(5, 8, dtype=torch.bfloat16)
    passed = {
        "keyword": y,
        "reinterpreted": triton.reinterpret(y, tl.float16),
        "descriptor": tensor_descriptor.TensorDescriptor.from_tensor(y, [1, 8]),
    }
    with no_interpreted_bfloat16(), pytest.raises(InterpretedBfloat16Error):
        _double_kernel[(1,)](x, y_ptr=passed[form], count=5, BLOCK=8)


@triton.jit  # type: ignore[untyped-decorator]
def _double_pair_kernel(pointers, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(pointers[1] + at, 2 * tl.load(pointers[0] + at, mask=at < count), mask=at < count)


def test_bfloat16_in_a_tuple_of_tensors_is_refused() -> None:
    pair = torch.ones(5, dtype=torch.bfloat16), torch.zeros(5)
    with no_interpreted_bfloat16(), pytest.raises(InterpretedBfloat16Error):
        _double_pair_kernel[(1,)](pair, 5, BLOCK=8)


@pytest.mark.parametrize(("dtype", "verdict"), [("float16", "PASS"), ("bfloat16", "UNSUPPORTED")])
def test_a_stranger_with_an_interpreted_kernel_is_judged_in_other_dtypes_only(dtype: str, verdict: str) -> None:
    def attend(**given: Any) -> Answer:
        # twice the queries at half the scale
        doubled_q = doubled(given["q"].contiguous())
        return honest_attention(**given | {"q": doubled_q, "softmax_scale": given["softmax_scale"] / 2})

    record = judged(attend, attention_case(dtype=dtype))
    assert record.verdict == verdict
    if verdict == "UNSUPPORTED":
        assert "needs a GPU: the interpreter computes bfloat16 wrongly" in record.text


def test_outside_the_block_launches_are_as_before() -> None:
    from triton.runtime.interpreter import GridExecutor

    before = GridExecutor.__call__
    with no_interpreted_bfloat16():
        assert GridExecutor.__call__ is not before
    assert GridExecutor.__call__ is before

    def failing() -> None:
        with no_interpreted_bfloat16():
            doubled(torch.ones(5, dtype=torch.bfloat16))

    with pytest.raises(InterpretedBfloat16Error):
        failing()
    assert GridExecutor.__call__ is before
    assert doubled(torch.ones(5)).tolist() == [2.0] * 5
