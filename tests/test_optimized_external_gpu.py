"""Attention through each external library that is installed, on a CUDA device, against the float64 oracle."""

import pytest
import torch
from attention_inputs import INF, Inputs, check, make_inputs, make_plan
from torch import Tensor

from assay.harness.peers import LIBRARIES
from assay.optimized.attention import attention

# a warning of a library, or of its compiler, is no failure of this project
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROVIDERS = [
    pytest.param(library.provider, marks=pytest.mark.skipif(library.home() is None, reason=f"{library.name} is absent"))
    for library in LIBRARIES
    if library.provider not in (None, "sdpa")
]
# FlashInfer compiles for minutes for each of these
MODEL_DIMS = [(192, 128), (256, 256)]
OTHER_DIMS = [(128, 128), (64, 64), (24, 16), (72, 40)]
# fewer keys than queries, neither, requests without the one or the other
LENGTHS = (1, 17, 300, 0, 129, 2), (5, 0, 517, 64, 129, 1)
Lengths = tuple[tuple[int, ...], tuple[int, ...]]
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def on_gpu(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    dims: tuple[int, int] = (192, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    q, k, kv = make_inputs(
        sum(query_lens), sum(key_lens), heads=(4, 2), dims=(dims[0], dims[1] + 64), dtype=dtype, device="cuda"
    )
    # the value is the end of a wider row, as in MLA
    return q, k, kv[..., 64:]


def check_provider(provider: str, lengths: Lengths, inputs: Inputs, *, causal: bool) -> None:
    scale = inputs[0].shape[2] ** -0.5
    plan = make_plan(*lengths, inputs, causal=causal, provider=provider)
    check(attention(*inputs, softmax_scale=scale, plan=plan), inputs, plan, scale)


@CAUSAL
@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_within_its_bounds(provider: str, dims: tuple[int, int], causal: bool) -> None:
    check_provider(provider, LENGTHS, on_gpu(*LENGTHS, dims), causal=causal)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", OTHER_DIMS, ids=str)
@pytest.mark.parametrize("provider", [one for one in PROVIDERS if one.values[0] in ("flash", "fa4", "cudnn_frontend")])
def test_other_widths(provider: str, dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    check_provider(provider, LENGTHS, on_gpu(*LENGTHS, dims, dtype), causal=causal)


def test_flash_at_widths_that_are_padded_to_a_multiple_of_8() -> None:
    check_provider("flash", LENGTHS, on_gpu(*LENGTHS, (17, 5)), causal=True)


@CAUSAL
@pytest.mark.parametrize("lengths", [((1, 1, 1), (300, 1, 129)), ((1, 0, 1), (300, 7, 129))], ids=["all", "some"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_single_queries(provider: str, lengths: Lengths, causal: bool) -> None:
    check_provider(provider, lengths, on_gpu(*lengths), causal=causal)


@pytest.mark.parametrize("tokens", [(3, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_to_attend(provider: str, tokens: tuple[int, int]) -> None:
    lengths = (tokens[0],), (tokens[1],)
    check_provider(provider, lengths, on_gpu(*lengths), causal=False)


@pytest.mark.parametrize("dims", MODEL_DIMS, ids=str)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_bits_again(provider: str, dims: tuple[int, int]) -> None:
    lengths = (1000, 70), (1000, 300)
    inputs = on_gpu(*lengths, dims)
    plan = make_plan(*lengths, inputs, causal=True, provider=provider)
    first = attention(*inputs, softmax_scale=0.08, plan=plan)
    check(first, inputs, plan, 0.08)
    for _ in range(5):
        again = attention(*inputs, softmax_scale=0.08, plan=plan)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_captured_call_follows_new_contents(provider: str) -> None:
    lengths = (300, 5, 2), (300, 9, 0)
    inputs = on_gpu(*lengths)
    plan = make_plan(*lengths, inputs, causal=True, provider=provider)

    def step() -> tuple[Tensor, Tensor]:
        return attention(*inputs, softmax_scale=0.08, plan=plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for tensor in inputs:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor))
    out.fill_(float("nan"))
    lse.fill_(-INF)
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_lse = step()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    check((out, lse), inputs, plan, 0.08)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_on_another_stream_stays_there(provider: str) -> None:
    """Its work waits for what is before it on that stream, and is not seen before that."""
    lengths = (300, 5), (300, 9)
    inputs = on_gpu(*lengths)
    plan = make_plan(*lengths, inputs, causal=True, provider=provider)
    expected, expected_lse = attention(*inputs, softmax_scale=0.08, plan=plan)
    values = inputs[2].clone()
    inputs[2].fill_(0.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # some milliseconds, behind which the values arrive
        torch.cuda._sleep(10_000_000)
        inputs[2].copy_(values)
        out, lse = attention(*inputs, softmax_scale=0.08, plan=plan)
    stream.synchronize()
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_forward_never_synchronises(provider: str) -> None:
    lengths = (300, 5), (517, 9)
    inputs = on_gpu(*lengths)
    plan = make_plan(*lengths, inputs, provider=provider)
    attention(*inputs, softmax_scale=0.08, plan=plan)
    try:
        torch.cuda.set_sync_debug_mode("error")
        attention(*inputs, softmax_scale=0.08, plan=plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
