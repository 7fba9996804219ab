"""What ``plan_attention`` and ``attention`` refuse, and what a plan says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import make_inputs, make_plan, offsets

from assay.optimized import _attention_triton as kernel
from assay.optimized import attention as optimized
from assay.optimized._layout import copy_engine_objection
from assay.optimized.attention import AttentionShape, attention, plan_attention


def test_the_plan_keeps_its_own_offsets() -> None:
    inputs = make_inputs(4, 6)
    cu_q, cu_k = offsets((1, 3)), offsets((4, 2))
    shape = make_plan((4,), (6,), inputs).shape
    plan = plan_attention(cu_q, cu_k.long(), causal=False, shape=shape)
    cu_q.fill_(0)
    assert plan.cu_seqlens_q.tolist() == [0, 1, 4]
    assert plan.cu_seqlens_k.dtype == torch.int32
    assert (plan.query_lens, plan.key_lens, plan.num_queries, plan.num_keys) == ((1, 3), (4, 2), 4, 6)


SHAPE = AttentionShape(
    device=torch.device("cpu"), dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim_qk=8, head_dim_v=8
)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"num_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v must be positive, got 0"),
        ({"dtype": torch.int32}, TypeError, "dtype must be bfloat16, float16, float32 or float64"),
    ],
)
def test_shapes_that_make_no_sense(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replace(SHAPE, **change)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "error", "text"),
    [
        ([0, 2], [0, 1, 2], ValueError, "must count the same requests, got 1 and 2"),
        ([1, 2], [0, 1], ValueError, "cu_seqlens_q must start at 0, got 1"),
        ([0, 1], [0, 3, 2], ValueError, "cu_seqlens_k must not decrease, got a step of -1 at request 1"),
        ([0], [0], ValueError, r"must have shape \[N \+ 1\] with N >= 1"),
        ([0.0, 1.0], [0, 1], TypeError, "cu_seqlens_q must be int32 or int64"),
        ([0, 2**31], [0, 1], ValueError, r"must end below 2\*\*31"),
    ],
)
def test_offsets_that_make_no_sense(cu_q: list[int], cu_k: list[int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan_attention(torch.tensor(cu_q), torch.tensor(cu_k), causal=False, shape=SHAPE)


def test_inputs_that_are_not_as_planned() -> None:
    q, k, v = make_inputs(3, 5)
    plan = make_plan((3,), (5,), (q, k, v))
    with pytest.raises(ValueError, match=r"k must have shape \(5, 1, 24\) as planned, got \(4, 1, 24\)"):
        attention(q, k[1:], v, softmax_scale=1.0, plan=plan)
    with pytest.raises(TypeError, match=r"v must be torch.float32 as planned, got torch.float16"):
        attention(q, k, v.half(), softmax_scale=1.0, plan=plan)
    with pytest.raises(ValueError, match="q must be on cpu as planned, got meta"):
        attention(q.to("meta"), k, v, softmax_scale=1.0, plan=plan)
    with pytest.raises(ValueError, match="softmax_scale must be finite, got nan"):
        attention(q, k, v, softmax_scale=math.nan, plan=plan)
    scale: Any = torch.tensor(1.0)
    with pytest.raises(TypeError, match="softmax_scale must be a number of the host, got Tensor"):
        attention(q, k, v, softmax_scale=scale, plan=plan)


def refused(provider: str, shape: AttentionShape, *, causal: bool = False, lengths: Any = ((3,), (5,))) -> str:
    with pytest.raises(NotImplementedError) as caught:
        optimized.resolve_provider(provider, shape, causal=causal, query_lens=lengths[0], key_lens=lengths[1])
    return str(caught.value)


def test_refusals_name_the_reason() -> None:
    assert "float64 is not served" in refused("triton", replace(SHAPE, dtype=torch.float64))
    assert "as many queries as keys" in refused("sdpa", SHAPE, causal=True)
    assert "a CUDA or CPU device is needed, got meta" in refused("sdpa", replace(SHAPE, device=torch.device("meta")))
    for name in ("fa3", "fa4", "flashinfer"):
        assert "needs a CUDA device, got cpu" in refused(name, SHAPE)
    with pytest.raises(ValueError, match="provider must be 'auto' or one of torch, sdpa, triton, fa3, fa4, flashinfer"):
        optimized.find_provider("fa2")


@pytest.mark.skipif(not kernel.INTERPRETED, reason="the kernels of this process are compiled")
def test_the_interpreter_is_not_given_bfloat16() -> None:
    assert "interpreter multiplies its bit patterns" in refused("triton", replace(SHAPE, dtype=torch.bfloat16))
    part, lse = torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1)
    with pytest.raises(NotImplementedError, match="does not serve bfloat16 under TRITON_INTERPRET"):
        optimized.merge_into(part.float(), lse, part, lse, implementation="triton")


def test_auto_says_what_it_took() -> None:
    _, choice = optimized.resolve_provider("auto", SHAPE, causal=False, query_lens=(3,), key_lens=(5,))
    assert choice == "auto took torch of torch"
    cuda = replace(SHAPE, device=torch.device("cuda"), dtype=torch.float64)
    provider, choice = optimized.resolve_provider("auto", cuda, causal=True, query_lens=(3,), key_lens=(5,))
    assert provider.name == "torch"
    assert choice.startswith("auto took torch of triton, sdpa, torch; refused: triton: float64 is not served")
    assert "sdpa: torch aligns the causal mask" in choice
    large = replace(cuda, num_heads=128, num_kv_heads=128, head_dim_qk=192, head_dim_v=128)
    _, choice = optimized.resolve_provider("auto", large, causal=True, query_lens=(8192,), key_lens=(16384,))
    assert choice.startswith("auto took torch of sdpa, triton, torch")


@pytest.mark.parametrize(
    ("dims", "expected"),
    [((192, 128), (128, 64, 128)), ((576, 512), (512, 64, 512)), ((256, 256), (256, 0, 256)), ((5, 3), (16, 0, 16)),
     ((17, 17), (16, 16, 32)), ((80, 96), (64, 16, 128)), ((127, 1), (64, 64, 16))],
)  # fmt: skip
def test_block_widths_cover_the_heads(dims: tuple[int, int], expected: tuple[int, int, int]) -> None:
    assert kernel.block_widths(*dims) == expected


def test_descriptors_are_refused_where_the_copy_engine_cannot_read() -> None:
    x = torch.zeros(4, 2, 16, dtype=torch.float16)
    objection = copy_engine_objection
    assert objection("x", x) is None
    assert objection("x", x[:, :, 8:]) is None
    assert "start at a multiple of 16 bytes" in str(objection("x", x[:, :, 1:9]))
    assert "contiguous in its last dimension" in str(objection("x", x[:, :, ::2]))
    assert "multiples of 16 bytes apart" in str(objection("x", torch.zeros(4, 2, 12, dtype=torch.float16)))
    assert "tokens that lie apart" in str(objection("x", x[:1].expand(4, -1, -1)))
    assert "tokens that lie apart" in str(objection("x", x[:0]))
