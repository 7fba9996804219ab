"""Attention and its merge on a CUDA device: bfloat16, strides, capture, and no compilation for new lengths."""

import itertools

import pytest
import torch
from attention_inputs import Inputs, check, make_inputs, make_plan, offsets
from torch import Tensor

from assay.optimized import _attention_triton as host
from assay.optimized import attention as optimized
from assay.optimized._attention_triton_kernel import attention_kernel
from assay.optimized.attention import AttentionPlan, attention, merge_into, merge_states

pytestmark = pytest.mark.gpu

INF = float("inf")
# heads whose rows do not lie multiples of 16 bytes apart; the last two were read wrongly by 64 queries and more at once
UNALIGNED = [(17, 5), (44, 12), (76, 12)]
DIMS = [(192, 128), (256, 256), (128, 128), (64, 64), (80, 96), (576, 512), *UNALIGNED]
LENGTHS = (1, 17, 300, 0, 129, 2), (5, 0, 517, 64, 129, 1)


def on_gpu(query_lens: tuple[int, ...], key_lens: tuple[int, ...], dtype: torch.dtype, dims: tuple[int, int]) -> Inputs:
    q, k, kv = make_inputs(
        sum(query_lens), sum(key_lens), heads=(4, 2), dims=(dims[0], dims[1] + 64), dtype=dtype, device="cuda"
    )
    # the value is the end of a wider row, as in MLA
    return q, k, kv[..., 64:]


def launched(inputs: Inputs, plan: AttentionPlan, scale: float, *, descriptors: bool) -> tuple[Tensor, Tensor]:
    tile = host.choose_tile(plan.shape, pointers=not descriptors)
    assert tile is not None
    q, k, v = inputs
    return host.launch(q, k, v, scale, plan, tile=tile, descriptors=descriptors)


CASES = [
    *((dims, torch.bfloat16) for dims in DIMS),
    *itertools.product([(192, 128), (17, 5)], [torch.float16, torch.float32]),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("dims", "dtype"), CASES, ids=str)
def test_triton_within_its_bounds(dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    inputs = on_gpu(*LENGTHS, dtype, dims)
    plan = make_plan(*LENGTHS, inputs, causal=causal, provider="triton")
    scale = dims[0] ** -0.5
    assert host.takes_descriptors(*inputs) == (dims not in UNALIGNED and dtype != torch.float32)
    check(attention(*inputs, softmax_scale=scale, plan=plan), inputs, plan, scale)
    check(launched(inputs, plan, scale, descriptors=False), inputs, plan, scale)


@pytest.mark.parametrize("scale", [-0.07, 0.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_triton_at_any_scale(scale: float, causal: bool) -> None:
    inputs = on_gpu(*LENGTHS, torch.bfloat16, (192, 128))
    plan = make_plan(*LENGTHS, inputs, causal=causal, provider="triton")
    check(attention(*inputs, softmax_scale=scale, plan=plan), inputs, plan, scale)


@pytest.mark.parametrize("provider", ["triton", "sdpa"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_long_requests(provider: str, dims: tuple[int, int], causal: bool) -> None:
    lengths = (1000, 25)
    inputs = on_gpu(lengths, lengths, torch.bfloat16, dims)
    plan = make_plan(lengths, lengths, inputs, causal=causal, provider=provider)
    first = attention(*inputs, softmax_scale=0.08, plan=plan)
    check(first, inputs, plan, 0.08)
    for _ in range(5):
        again = attention(*inputs, softmax_scale=0.08, plan=plan)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("length", [1, 15, 17, 129])
def test_sdpa_at_short_lengths(length: int) -> None:
    inputs = on_gpu((length, 2), (33, 0), torch.bfloat16, (192, 128))
    plan = make_plan((length, 2), (33, 0), inputs, provider="sdpa")
    check(attention(*inputs, softmax_scale=0.08, plan=plan), inputs, plan, 0.08)


def test_sdpa_refuses_what_cudnn_gets_wrong() -> None:
    q, k, v = on_gpu((9,), (33,), torch.bfloat16, (192, 128))
    plan = make_plan((9,), (33,), (q, k, v), provider="sdpa")
    shifted = torch.zeros(33, 2, 136, device="cuda", dtype=torch.bfloat16)[..., 1:129]
    with pytest.raises(NotImplementedError, match="sdpa: v must start at a multiple of 16 bytes"):
        attention(q, k, shifted, softmax_scale=0.1, plan=plan)
    with pytest.raises(NotImplementedError, match="needs a positive softmax_scale"):
        attention(q, k, v, softmax_scale=-0.1, plan=plan)
    with pytest.raises(NotImplementedError, match="multiples of 8, got 20 and 128"):
        make_plan((9,), (33,), (q[..., :20], k[..., :20], v), provider="sdpa")


@pytest.mark.parametrize("descriptors", [False, True])
def test_nan_neighbours(descriptors: bool) -> None:
    lengths = (40, 70), (100, 200)
    q, k, v = on_gpu(*lengths, torch.bfloat16, (192, 128))
    plan = make_plan(*lengths, (q, k, v), provider="triton")
    expected, expected_lse = launched((q, k, v), plan, 0.08, descriptors=descriptors)
    q[40:] = k[100:] = v[100:] = float("nan")
    out, lse = launched((q, k, v), plan, 0.08, descriptors=descriptors)
    assert torch.equal(out[:40], expected[:40])
    assert torch.equal(lse[:40], expected_lse[:40])
    assert out[40:].isnan().all()


@pytest.mark.parametrize("descriptors", [False, True])
def test_every_element_is_written(descriptors: bool) -> None:
    inputs = on_gpu(*LENGTHS, torch.bfloat16, (192, 128))
    plan = make_plan(*LENGTHS, inputs, causal=True, provider="triton")
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out, lse = launched(inputs, plan, 0.08, descriptors=descriptors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("provider", ["triton", "sdpa"])
def test_a_captured_call_follows_new_contents(provider: str) -> None:
    lengths = (300, 5), (300, 5)
    inputs = on_gpu(*lengths, torch.bfloat16, (192, 128))
    plan = make_plan(*lengths, inputs, causal=True, provider=provider)
    running, running_lse = torch.zeros(305, 4, 128, device="cuda"), torch.full((305, 4), -INF, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        out, lse = attention(*inputs, softmax_scale=0.08, plan=plan)
        merge_into(running, running_lse, out, lse)
        return out, lse

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for tensor in inputs:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor))
    out.fill_(float("nan"))
    running.zero_()
    running_lse.fill_(-INF)
    graph.replay()
    torch.cuda.synchronize()
    expected = attention(*inputs, softmax_scale=0.08, plan=plan)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert torch.equal(running, expected[0].float())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_forward_never_synchronises() -> None:
    inputs = on_gpu((300, 5), (517, 9), torch.bfloat16, (192, 128))
    for provider in ("triton", "sdpa", "torch"):
        plan = make_plan((300, 5), (517, 9), inputs, provider=provider)
        attention(*inputs, softmax_scale=0.08, plan=plan)
        try:
            torch.cuda.set_sync_debug_mode("error")
            out, lse = attention(*inputs, softmax_scale=0.08, plan=plan)
            merge_into(out.float(), lse.clone(), out, lse)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_compile_nothing() -> None:
    def call(n: int, m: int) -> None:
        inputs = on_gpu((n, 3), (m, 4), torch.bfloat16, (192, 128))
        attention(*inputs, softmax_scale=0.08, plan=make_plan((n, 3), (m, 4), inputs, provider="triton"))

    def compiled() -> int:
        return len(attention_kernel.device_caches[torch.cuda.current_device()][0])

    call(2, 5)
    before = compiled()
    for n, m in itertools.product((1, 2, 15, 16, 17, 64, 65, 127, 128, 1024), (0, 1, 2, 15, 16, 17, 64, 100, 1024)):
        call(n, m)
    assert compiled() == before


def test_rows_past_two_to_the_31st_element() -> None:
    """Tokens 2^30 elements apart; where a 32-bit offset would land there are other values, no fault."""
    memory = torch.full((2**32 + 2**12,), 9.0, dtype=torch.bfloat16, device="cuda")
    q, k, v = make_inputs(2, 3, heads=(1, 1), dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    far_k = memory.as_strided((3, 1, 64), (2**30, 64, 1), 2**31)
    far_v = memory.as_strided((3, 1, 64), (2**30, 64, 1), 2**31 + 64)
    far_k.copy_(k)
    far_v.copy_(v)
    plan = make_plan((2,), (3,), (q, k, v), provider="triton")
    for descriptors in (False, True):
        expected = launched((q, k, v), plan, 0.125, descriptors=descriptors)
        got = launched((q, far_k, far_v), plan, 0.125, descriptors=descriptors)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("part_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_merge_equals_the_torch_form(part_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    out, part = (torch.randn(1000, 16, 128, generator=g).cuda() for _ in range(2))
    lse, part_lse = (4 * torch.randn(1000, 16, generator=g).cuda() for _ in range(2))
    part, lse[3:5], part_lse[4:7] = part.to(part_dtype), -INF, -INF
    out[3:5], part[4:7] = float("nan"), float("nan")
    expected, expected_lse = merge_states(out, lse, part, part_lse)
    strided_lse = torch.empty(16, 1000, device="cuda").t().copy_(lse)
    merge_into(out, strided_lse, part, part_lse)
    assert torch.allclose(out, expected, rtol=0, atol=2.0**-20)
    assert torch.allclose(strided_lse, expected_lse, rtol=0, atol=2.0**-20)
    assert torch.equal(out[4], torch.zeros_like(out[4]))


def test_auto_goes_by_size() -> None:
    inputs = on_gpu((8,), (16,), torch.bfloat16, (192, 128))
    assert make_plan((8,), (16,), inputs, provider="auto").choice == "auto took triton of triton, sdpa, torch"
    shape = make_plan((8,), (16,), inputs).shape
    large = optimized.plan_attention(offsets((60000,)), offsets((60000,)), causal=False, shape=shape)
    assert large.choice == "auto took sdpa of sdpa, triton, torch"
