"""torch's FlexAttention as a provider: against the oracle on the CPU, its tables of blocks, how often it compiles."""

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_inputs import INF, check, make_inputs, make_plan
from mask_inputs import selection
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from assay.optimized import attention as optimized
from assay.optimized.attention import attention
from assay.optimized.external import flex
from assay.optimized.external._partial_state import Prepared
from assay.optimized.topk_mask import plan_topk_mask, topk_mask
from assay.reference.masked_mha import masked_mha

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
# every edge on each side, shorter and longer than the other, requests without queries, without keys, without both
BATCHES = {
    "edges": (EDGES, EDGES[::-1]),
    "chunked": ((1, 33, 128, 129), (300, 65, 256, 385)),
    "empty requests": ((3, 0, 2, 0, 4), (0, 5, 7, 0, 2)),
    "nothing": ((0, 0), (0, 0)),
    "no keys": ((3, 2), (0, 0)),
    "no queries": ((0, 0), (3, 2)),
}
PAIRS = [(1, 1), (1, 300), (300, 1), (127, 128), (128, 128), (129, 128), (128, 129), (256, 385), (300, 140), (2, 2000)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_against_the_oracle(dtype: torch.dtype, batch: str, causal: bool) -> None:
    query_lens, key_lens = BATCHES[batch]
    inputs = make_inputs(sum(query_lens), sum(key_lens), heads=(6, 2), dtype=dtype, seed=1)
    plan = make_plan(query_lens, key_lens, inputs, causal=causal, provider="flex")
    check(attention(*inputs, softmax_scale=0.3, plan=plan), inputs, plan, 0.3)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize(
    ("heads", "dims"), [((1, 1), (1, 1)), ((4, 1), (5, 3)), ((2, 2), (192, 128)), ((4, 2), (8, 40))]
)
def test_scales_heads_and_widths(heads: tuple[int, int], dims: tuple[int, int], scale: float) -> None:
    inputs = make_inputs(22, 40, heads=heads, dims=dims, seed=2)
    plan = make_plan((17, 5), (33, 7), inputs, causal=True, provider="flex")
    check(attention(*inputs, softmax_scale=scale, plan=plan), inputs, plan, scale)


def test_strided_inputs() -> None:
    q, _, v = make_inputs(20, 30, heads=(4, 2), dims=(48, 80), seed=3)
    # the layout of keys and values behind one projection, and every other column of the queries
    inputs = (q[..., ::2], v[..., :24], v[..., 40:])
    plan = make_plan((3, 17), (12, 18), inputs, causal=True, provider="flex")
    check(attention(*inputs, softmax_scale=0.3, plan=plan), inputs, plan, 0.3)


def test_garbage_in_one_request_stays_there() -> None:
    q, k, v = make_inputs(7, 9, seed=4)
    plan = make_plan((3, 4), (4, 5), (q, k, v), provider="flex")
    clean, clean_lse = attention(q, k, v, softmax_scale=0.3, plan=plan)
    k[1], v[2] = float("nan"), INF
    out, lse = attention(q, k, v, softmax_scale=0.3, plan=plan)
    assert not torch.isfinite(out[:3]).any()
    assert torch.isnan(lse[:3]).all()
    assert torch.equal(out[3:], clean[3:])
    assert torch.equal(lse[3:], clean_lse[3:])


def test_garbage_behind_empty_rows_is_not_seen() -> None:
    q, k, v = make_inputs(5, 2, seed=5)
    plan = make_plan((5,), (2,), (q, k, v), causal=True, provider="flex")
    v[:] = float("nan")
    out, lse = attention(q, k, v, softmax_scale=0.3, plan=plan)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert torch.equal(lse[:3], torch.full_like(lse[:3], -INF))
    assert torch.isnan(out[3:]).all()


@pytest.mark.parametrize(("n", "m"), PAIRS)
def test_the_tables_of_blocks_are_those_that_torch_finds_in_the_mask(n: int, m: int) -> None:
    ours = flex.causal_mask(n, m, torch.device("cpu"))
    theirs = create_block_mask(ours.mask_mod, None, None, n, m, device="cpu")
    assert ours.shape == theirs.shape
    for name in ("kv", "full_kv"):
        counts, expected = getattr(ours, f"{name}_num_blocks"), getattr(theirs, f"{name}_num_blocks")
        assert counts.dtype == expected.dtype == torch.int32
        assert torch.equal(counts, expected)
        indices, wanted = getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices")
        assert indices.is_contiguous()
        assert indices.shape == wanted.shape
        # what lies behind the count is not read, but must name a block
        read = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[read], wanted[read])
        assert 0 <= int(indices.min()) <= int(indices.max()) < indices.shape[-1]


def test_the_mask_ends_at_the_last_key() -> None:
    mask = flex.causal_mask(3, 5, torch.device("cpu"))
    rows, keys = torch.arange(3)[:, None], torch.arange(5)
    nothing = torch.zeros((), dtype=torch.int32)
    assert mask.mask_mod(nothing, nothing, rows, keys).int().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_the_same_call_gives_the_same_bits() -> None:
    inputs = make_inputs(200, 300, heads=(4, 2), dtype=torch.bfloat16, seed=6)
    plan = make_plan((70, 130), (100, 200), inputs, causal=True, provider="flex")
    (out, lse), (again, lse_again) = (attention(*inputs, softmax_scale=0.3, plan=plan) for _ in range(2))
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    flex._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_new_lengths_are_not_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # the path of the GPU, traced with symbolic lengths as there, with torch's reference form for its kernel
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex.attend_request, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "_attend_eager", flex._attend_compiled)
    inputs: Any
    counts = []
    sizes = [(5, 7), (33, 40), (1, 300), (130, 400), (7, 1), (1, 1), (257, 129), (128, 128)]
    later = [(6, 9), (34, 90), (1, 700), (300, 900), (9, 1), (1, 1), (600, 257), (127, 127), (64, 100), (1000, 1200)]
    for n, m in [*sizes, *later]:
        inputs = make_inputs(n, m, heads=(4, 2), seed=n)
        plan = make_plan((n,), (m,), inputs, causal=True, provider="flex")
        check(attention(*inputs, softmax_scale=0.3, plan=plan), inputs, plan, 0.3)
        counts.append(counter.frame_count)
    assert counts[len(sizes) - 1] <= len(sizes)
    assert set(counts[len(sizes) :]) == {counts[len(sizes) - 1]}


SHAPE = optimized.AttentionShape(
    device=torch.device("cuda:0"),
    dtype=torch.bfloat16,
    num_heads=4,
    num_kv_heads=2,
    head_dim_qk=192,
    head_dim_v=128,
)


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (9, 0), None),
        ({"dtype": torch.float32}, (8, 0), None),
        ({"dtype": torch.float64}, (9, 0), "no kernel for float64"),
        ({"head_dim_v": 8}, (9, 0), "serves head sizes 16 to 256 on CUDA, got 192 and 8"),
        ({"head_dim_qk": 576, "head_dim_v": 512}, (9, 0), "serves head sizes 16 to 256 on CUDA, got 576 and 512"),
        ({}, (7, 5), "needs compute capability 8.0, got 7.5"),
        ({"device": torch.device("meta")}, (9, 0), "needs a CUDA or CPU device, got meta"),
    ],
)
def test_what_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], capability: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    refusal = flex.refusal(replace(SHAPE, **change), True, (3,), (5,))
    assert refusal is None if reason is None else reason in str(refusal)


def test_without_triton_or_with_tf32_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    single = replace(SHAPE, dtype=torch.float32)
    assert flex.refusal(single, True, (3,), (5,)) is None
    monkeypatch.setattr(flex, "_is_tf32", lambda: True)
    assert "in TF32 here" in str(flex.refusal(single, True, (3,), (5,)))
    assert flex.refusal(SHAPE, True, (3,), (5,)) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton, which is not installed" in str(flex.refusal(SHAPE, True, (3,), (5,)))


@pytest.mark.parametrize(
    ("setting", "older", "tf32"),
    [("ieee", "high", False), ("tf32", "highest", True), ("none", "highest", False), ("none", "high", True)],
)
def test_tf32_is_read_as_torch_reads_it(monkeypatch: pytest.MonkeyPatch, setting: str, older: str, tf32: bool) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: older)
    assert flex._is_tf32() == tf32


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flex.refusal(SHAPE, True, (3,), (5,)) == "FlexAttention needs a CUDA or CPU device, got cuda:0"


def test_a_plan_of_another_provider_is_refused() -> None:
    inputs = make_inputs(3, 5)
    plan = make_plan((3,), (5,), inputs)
    with pytest.raises(TypeError, match="must be of this provider, got NoneType"):
        flex.attend(*inputs, 0.3, plan)
    with pytest.raises(TypeError, match="must be of this provider, got str"):
        flex.attend(*inputs, 0.3, replace(plan, prepared=Prepared(empty=None, wrapper="another")))


def test_auto_never_takes_it() -> None:
    for device, lens in itertools.product((torch.device("cpu"), torch.device("cuda:0")), (8, 40000)):
        order = optimized._auto_order(replace(SHAPE, device=device), True, (lens,), (lens,))
        assert "flex" not in order


@pytest.mark.parametrize(("n", "m"), [(1, 1), (130, 300), (300, 300), (128, 256)])
def test_bits_against_the_oracle(n: int, m: int) -> None:
    q, k, v = make_inputs(n, m, heads=(4, 2))
    indices = selection((n,), (m,), 9)
    options: dict[str, Any] = {"topk": 9, "device": torch.device("cpu"), "tile": (128, 128)}
    words, held = topk_mask(indices, plan=plan_topk_mask(torch.tensor([0, n]), torch.tensor([m]), **options))
    assert held is not None
    mask = flex.bit_mask(words, held, num_keys=m, query_start=m - n)
    out, lse = flex._attend_eager(q, k, v, 0.3, mask)
    expected, expected_lse = masked_mha(
        q.double(),
        k.double(),
        v.double(),
        words,
        softmax_scale=0.3,
        cu_seqlens_q=torch.tensor([0, n]),
        cu_seqlens_k=torch.tensor([0, m]),
    )
    seen = expected_lse > -INF
    torch.testing.assert_close(out.double()[seen], expected[seen], rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double()[seen], expected_lse[seen], rtol=0, atol=3e-6)
    # each listed block holds a bit of the past, and each such block is listed
    blocks, listed = mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist()
    for row, count in enumerate(blocks):
        assert listed[row][:count] == [
            j for j in range(len(held[row])) if held[row, j] and 128 * j < m - n + 128 * (row + 1)
        ]
