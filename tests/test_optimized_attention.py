"""Every attention provider against the oracle, within bounds that follow from its declared precision."""

import math
from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, State, check, make_inputs, make_plan
from torch import Tensor

from assay.optimized import _attention_triton as kernel
from assay.optimized import attention as optimized
from assay.optimized.attention import AttentionPlan, attention

INTERPRETED_DTYPES = [torch.float32, torch.float16]


def run(provider: str, inputs: Inputs, plan: AttentionPlan, scale: float, *, descriptors: bool | None = None) -> State:
    """Call a provider; for the Triton kernel, optionally say how it loads its tiles."""
    chosen, _ = optimized.resolve_provider(
        provider, plan.shape, causal=plan.causal, query_lens=plan.query_lens, key_lens=plan.key_lens
    )
    if descriptors is None:
        return attention(*inputs, softmax_scale=scale, plan=replace(plan, provider=chosen))
    tile = kernel.choose_tile(plan.shape)
    assert tile is not None
    q, k, v = inputs
    return kernel.launch(q, k, v, scale, plan, tile=tile, descriptors=descriptors)


EDGES = (1, 15, 17, 63, 65, 129)
KERNELS = [("torch", None), ("triton", False), ("triton", True)]
KERNEL_IDS = ["torch", "triton-pointers", "triton-descriptors"]


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_lengths_at_the_edges_of_tiles(
    provider: str, descriptors: bool | None, causal: bool, dtype: torch.dtype
) -> None:
    key_lens = (17, 129, 65, 1, 63, 15)
    inputs = make_inputs(sum(EDGES), sum(key_lens), heads=(1, 1), dtype=dtype)
    plan = make_plan(EDGES, key_lens, inputs, causal=causal)
    check(run(provider, inputs, plan, 0.3, descriptors=descriptors), inputs, plan, 0.3)


@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_every_position_of_the_diagonal_in_a_tile(provider: str, descriptors: bool | None) -> None:
    key_lens = tuple(range(31, 67))
    query_lens = (32,) * len(key_lens)
    inputs = make_inputs(sum(query_lens), sum(key_lens), heads=(1, 1), dims=(16, 16))
    plan = make_plan(query_lens, key_lens, inputs, causal=True)
    check(run(provider, inputs, plan, 0.5, descriptors=descriptors), inputs, plan, 0.5)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(192, 128), (40, 24), (16, 16), (136, 200)], ids=str)
@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_head_sizes_and_grouped_heads(
    provider: str, descriptors: bool | None, dims: tuple[int, int], causal: bool
) -> None:
    inputs = make_inputs(21, 37, heads=(6, 2), dims=dims, dtype=torch.float16)
    plan = make_plan((21,), (37,), inputs, causal=causal)
    check(run(provider, inputs, plan, dims[0] ** -0.5, descriptors=descriptors), inputs, plan, dims[0] ** -0.5)


@pytest.mark.parametrize("dims", [(5, 3), (1, 1), (17, 33)], ids=str)
def test_odd_head_sizes(dims: tuple[int, int]) -> None:
    inputs = make_inputs(9, 40, dims=dims)
    plan = make_plan((9,), (40,), inputs, causal=True)
    for provider in ("torch", "triton"):
        check(run(provider, inputs, plan, 0.4), inputs, plan, 0.4)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_zero_lengths(provider: str, descriptors: bool | None, causal: bool) -> None:
    query_lens, key_lens = (0, 3, 5, 0, 2, 40, 0), (4, 0, 2, 0, 7, 33, 3)
    inputs = make_inputs(sum(query_lens), sum(key_lens))
    plan = make_plan(query_lens, key_lens, inputs, causal=causal)
    check(run(provider, inputs, plan, 0.3, descriptors=descriptors), inputs, plan, 0.3)


@pytest.mark.parametrize("provider", ["torch", "triton", "sdpa"])
@pytest.mark.parametrize(("query_lens", "key_lens"), [((0,), (3,)), ((3,), (0,)), ((0, 0), (0, 0))], ids=str)
def test_batches_without_queries_or_keys(provider: str, query_lens: tuple[int, ...], key_lens: tuple[int, ...]) -> None:
    inputs = make_inputs(sum(query_lens), sum(key_lens))
    plan = make_plan(query_lens, key_lens, inputs)
    check(run(provider, inputs, plan, 0.3), inputs, plan, 0.3)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 2.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_any_scale(provider: str, causal: bool, scale: float) -> None:
    inputs = make_inputs(35, 33)
    plan = make_plan((35,), (33,), inputs, causal=causal)
    check(run(provider, inputs, plan, scale), inputs, plan, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("provider", ["torch", "sdpa"])
def test_torch_providers_in_every_dtype(provider: str, causal: bool, dtype: torch.dtype) -> None:
    lengths = (5, 1, 0, 20)
    inputs = make_inputs(26, 26, heads=(4, 2), dtype=dtype)
    plan = make_plan(lengths, lengths, inputs, causal=causal)
    check(run(provider, inputs, plan, 0.3), inputs, plan, 0.3)


def strided(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout, everything around them NaN."""
    tokens, heads, width = tensor.shape
    wide = torch.full((tokens + 4, heads, width + 8), float("nan"), dtype=tensor.dtype)
    if layout == "columns of a wider tensor":
        view = wide[2:-2, :, 8:]
    elif layout == "head major":
        view = wide.transpose(0, 1).contiguous().transpose(0, 1)[2:-2, :, 8:]
    else:
        view = wide.transpose(1, 2).contiguous().transpose(1, 2)[2:-2, :, 8:]
    return view.copy_(tensor)


LAYOUTS = ["columns of a wider tensor", "head major", "last dimension strided"]


# descriptors need a contiguous last dimension, and are refused without
@pytest.mark.parametrize(
    ("provider", "descriptors", "layout"),
    [(*form, layout) for form in KERNELS for layout in LAYOUTS if not (form[1] and layout == LAYOUTS[2])],
)
def test_layout_and_nan_neighbours_change_nothing(provider: str, descriptors: bool | None, layout: str) -> None:
    inputs = make_inputs(20, 41, heads=(4, 2), dtype=torch.float16)
    plan = make_plan((3, 17), (34, 7), inputs, causal=True)
    expected = run(provider, inputs, plan, 0.3, descriptors=descriptors)
    q, k, v = (strided(tensor, layout) for tensor in inputs)
    got = run(provider, (q, k, v), plan, 0.3, descriptors=descriptors)
    check(got, inputs, plan, 0.3)
    # torch may choose another order of summation for another layout
    if provider == "triton":
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_a_request_of_nan_leaves_its_neighbours_alone(provider: str, descriptors: bool | None) -> None:
    q, k, v = make_inputs(24, 60)
    plan = make_plan((7, 9, 8), (20, 19, 21), (q, k, v))
    expected, expected_lse = run(provider, (q, k, v), plan, 0.3, descriptors=descriptors)
    q[7:16] = k[20:39] = v[20:39] = float("nan")
    out, lse = run(provider, (q, k, v), plan, 0.3, descriptors=descriptors)
    for rows in (slice(0, 7), slice(16, 24)):
        assert torch.equal(out[rows], expected[rows])
        assert torch.equal(lse[rows], expected_lse[rows])
    # what a query can see must not be hidden
    assert out[7:16].isnan().all()
    assert lse[7:16].isnan().all()


@pytest.mark.parametrize(("provider", "descriptors"), KERNELS, ids=KERNEL_IDS)
def test_a_request_alone_equals_itself_in_a_batch(provider: str, descriptors: bool | None) -> None:
    q, k, v = make_inputs(50, 90)
    plan = make_plan((13, 37), (40, 50), (q, k, v), causal=True)
    out, lse = run(provider, (q, k, v), plan, 0.3, descriptors=descriptors)
    alone = (q[13:], k[40:], v[40:])
    single = run(provider, alone, make_plan((37,), (50,), alone, causal=True), 0.3, descriptors=descriptors)
    assert torch.equal(out[13:], single[0])
    assert torch.equal(lse[13:], single[1])


@pytest.mark.parametrize("provider", ["torch", "sdpa", "triton"])
def test_equal_logits_give_the_mean_exactly(provider: str) -> None:
    q, k, _ = make_inputs(5, 64, dims=(16, 16))
    v = torch.arange(64.0)[:, None, None].expand(64, 1, 16) - 30
    inputs = torch.zeros_like(q), k, v
    out, lse = run(provider, inputs, make_plan((5,), (64,), inputs), 7.0)
    assert torch.equal(out, torch.full_like(out, 1.5))
    assert torch.allclose(lse, torch.full_like(lse, math.log(64)), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("provider", ["torch", "sdpa", "triton"])
@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES, ids=str)
def test_a_dominant_key_gives_its_value_exactly(provider: str, dtype: torch.dtype) -> None:
    keys = torch.eye(48, dtype=dtype)[:, None]
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    q = keys[order].expand(48, 2, 48)
    v = torch.randn(48, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, lse = run(provider, (q, keys, v), make_plan((48,), (48,), (q, keys, v)), 1024.0)
    assert torch.equal(out, v[order].expand_as(out))
    assert torch.equal(lse, torch.full_like(lse, 1024.0))


@pytest.mark.parametrize("shift", [-6e4, 6e4])
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_common_shift_of_the_logits_changes_only_the_lse(provider: str, shift: float) -> None:
    """Logits on a grid that float32 still resolves at 6e4 (1/256), so that the shifted ones are exact."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(-512, 512, (40,), generator=g) / 256
    v = torch.randn(40, 1, 4, generator=g)
    q, k = torch.ones(3, 1, 1), logits[:, None, None]
    out, lse = run(provider, (q, k, v), make_plan((3,), (40,), (q, k, v), causal=True), 1.0)
    shifted, shifted_lse = run(provider, (q, k + shift, v), make_plan((3,), (40,), (q, k, v), causal=True), 1.0)
    # in base 2 the shifted logits are rounded: half an ulp of 6e4 log2(e) on each
    slack = 2 * math.expm1(2.0**-8 * math.log(2.0))
    assert (shifted - out).abs().max() <= slack * v.abs().max()
    assert (shifted_lse - (lse + shift)).abs().max() <= 2.0**-7


@pytest.mark.parametrize(
    ("provider", "dtype"), [("torch", torch.bfloat16), ("torch", torch.float16), ("triton", torch.float16)]
)
def test_weights_are_rounded_and_the_row_sum_is_not(provider: str, dtype: torch.dtype) -> None:
    """Two keys with logits 0 and z < 0, values 0 and 1: the output shows one weight."""
    z = -torch.arange(1, 257) / 64
    q, k, v = (
        z.to(dtype)[:, None, None],
        torch.eye(2, dtype=dtype)[1:].t()[..., None],
        torch.eye(2, dtype=dtype)[1:].t(),
    )
    inputs = q, k, v[..., None]
    out, _ = run(provider, inputs, make_plan((256,), (2,), inputs), 1.0)
    weight = torch.exp(z.to(dtype).float())
    rounded, exact = ((w / (1 + weight)).to(dtype) for w in (weight.to(dtype).float(), weight))
    got = out[:, 0, 0]
    # another exponential moves a weight across a rounding boundary now and then
    assert (got == rounded).float().mean() > 0.98
    assert (got == exact).float().mean() < 0.9


@pytest.mark.parametrize("descriptors", [False, True])
def test_every_element_is_written(descriptors: bool) -> None:
    inputs = make_inputs(40, 40)
    plan = make_plan((0, 33, 7), (5, 30, 5), inputs, causal=True)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        assert torch.empty(3).isnan().all()
        out, lse = run("triton", inputs, plan, 0.3, descriptors=descriptors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("provider", ["torch", "sdpa", "triton"])
def test_inputs_are_not_touched_and_results_are_fresh(provider: str) -> None:
    inputs = make_inputs(33, 33)
    copies = [tensor.clone() for tensor in inputs]
    plan = make_plan((33,), (33,), inputs, causal=True)
    first = run(provider, inputs, plan, 0.3)
    kept = [tensor.clone() for tensor in first]
    again = run(provider, inputs, plan, 0.3)
    run(provider, (inputs[0] + 1, inputs[1], inputs[2]), plan, 0.3)
    for tensor, copy in zip((*inputs, *first, *again), (*copies, *kept, *kept), strict=True):
        assert torch.equal(tensor, copy)


def test_a_power_of_two_on_the_values_passes_through() -> None:
    q, k, v = make_inputs(17, 70, dtype=torch.float16)
    plan = make_plan((17,), (70,), (q, k, v))
    out, lse = run("triton", (q, k, v), plan, 0.3)
    doubled, same = run("triton", (q, k, 2 * v), plan, 0.3)
    assert torch.equal(doubled, 2 * out)
    assert torch.equal(same, lse)
