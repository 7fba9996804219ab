"""Masked attention on a CUDA device: bfloat16 at model sizes, chunks at any place, capture, no compilation."""

import itertools
from typing import Any

import pytest
import torch
from mask_inputs import offsets, selection
from masked_inputs import INF, answered, by_oracle, check, launched, map_of, masked_inputs, planned, shape_of
from torch import Tensor

from assay.optimized._attention_triton import takes_descriptors
from assay.optimized._masked_mha_triton_kernel import list_kernel, masked_mha_kernel
from assay.optimized.attention import attention, plan_attention
from assay.optimized.masked_mha import KeyChunk, masked_mha_in_chunks, plan_masked_chunks, plan_masked_mha
from assay.optimized.sparse_mla import SparseMlaShape, plan_sparse_mla, sparse_mla
from assay.optimized.topk_mask import mask_bytes
from assay.reference.topk_mask import selected_keys

pytestmark = pytest.mark.gpu

DIMS = [(192, 128), (256, 256), (128, 128), (64, 64), (80, 96), (17, 5), (576, 512)]
# queries at the edges of tiles; chunks that begin within a word, within a tile, and past every query
LENGTHS: dict[str, Any] = {
    "query_lens": (63, 64, 65, 129, 1, 0, 300),
    "key_lens": (63, 200, 65, 517, 3, 7, 129),
    "first_keys": (0, 33, 127, 64, 1000, 5, 31),
    "first_queries": (0, 150, 127, 500, 1001, 0, 20),
}
CASES = [
    *((dims, torch.bfloat16) for dims in DIMS),
    *itertools.product([(192, 128), (17, 5)], [torch.float16, torch.float32]),
]


@pytest.mark.parametrize("topk", [3, 64, 640])
@pytest.mark.parametrize(("dims", "dtype"), CASES, ids=str)
def test_within_its_bounds_in_every_form(dims: tuple[int, int], dtype: torch.dtype, topk: int) -> None:
    given = masked_inputs(**LENGTHS, topk=topk, heads=(4, 2), dims=dims, dtype=dtype, device="cuda")
    # the value is the end of a wider row, as in MLA
    wide = torch.full((*given["v"].shape[:2], dims[1] + 64), torch.nan, dtype=dtype, device="cuda")
    given["v"] = wide[..., 64:].copy_(given["v"])
    plan = planned(given, "triton")
    held = map_of(given, plan, "triton")
    state = answered(given, plan)
    check(state, given, plan)
    for tile_map, descriptors in itertools.product((None, held), (False, True)):
        if descriptors and not takes_descriptors(given["q"], given["k"], given["v"]):
            continue
        other = launched(given, plan, tile_map, descriptors=descriptors)
        check(other, given, plan)
        if tile_map is not None:
            # skipping tiles changes no bit
            without = launched(given, plan, None, descriptors=descriptors)
            assert torch.equal(other[0], without[0])
            assert torch.equal(other[1], without[1])


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)], ids=str)
def test_model_sizes_and_equal_bits_again(dims: tuple[int, int]) -> None:
    given = masked_inputs(
        (1000, 25), (1500, 70), topk=512, heads=(4, 4), dims=dims, dtype=torch.bfloat16, device="cuda"
    )
    plan = planned(given, "triton")
    held = map_of(given, plan, "triton")
    first = answered(given, plan, held)
    check(first, given, plan)
    for _ in range(10):
        again = answered(given, plan, held)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_all_bits_are_dense_causal_attention() -> None:
    given = masked_inputs((700,), (900,), heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    given["mask"].fill_(-1)
    out, lse = answered(given, planned(given, "triton"))
    shape = shape_of(given)
    plan = plan_attention(offsets((700,)), offsets((900,)), causal=True, shape=shape, provider="triton")
    dense = attention(given["q"], given["k"], given["v"], softmax_scale=given["softmax_scale"], plan=plan)
    assert torch.allclose(out.float(), dense[0].float(), rtol=2.0**-7, atol=2.0**-7)
    assert torch.allclose(lse, dense[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("first_key", [1, 16, 31, 32, 33, 63, 64, 127, 129])
def test_no_key_is_lost_wherever_the_chunk_begins(first_key: int) -> None:
    """With equal logits the log-sum-exp counts the keys that are seen."""
    given = masked_inputs(
        (130,),
        (300,),
        first_keys=(first_key,),
        first_queries=(first_key + 100,),
        heads=(2, 2),
        dims=(192, 128),
        dtype=torch.bfloat16,
        device="cuda",
    )
    given["mask"].fill_(-1)
    given["q"].zero_()
    plan = planned(given, "triton")
    counts = torch.arange(101, 231, device="cuda")
    for descriptors in (False, True):
        lse = launched(given, plan, None, descriptors=descriptors)[1]
        assert torch.equal(lse.exp().round().long(), counts[:, None].expand(-1, 2))


@pytest.mark.parametrize("descriptors", [False, True])
def test_nan_in_hidden_keys_and_in_other_requests(descriptors: bool) -> None:
    given = masked_inputs(
        (40, 70),
        (100, 200),
        first_keys=(33, 7),
        first_queries=(93, 130),
        dims=(192, 128),
        dtype=torch.bfloat16,
        device="cuda",
    )
    # nobody selects these, slot 0 and the last among them
    never = torch.zeros(100, dtype=torch.bool, device="cuda")
    never[::3] = never[-1] = True
    for position in (33 + never.nonzero()[:, 0]).tolist():
        bit = -(2**31) if position % 32 == 31 else 1 << position % 32
        given["mask"][:, position // 32] &= ~bit
    plan = planned(given, "triton")
    expected = launched(given, plan, None, descriptors=descriptors)
    check(expected, given, plan)
    given["k"][:100][never] = torch.nan
    given["q"][40:] = given["k"][100:] = given["v"][100:] = torch.nan
    out, lse = launched(given, plan, None, descriptors=descriptors)
    assert torch.equal(out[:40], expected[0][:40])
    assert torch.equal(lse[:40], expected[1][:40])


@pytest.mark.parametrize("descriptors", [False, True])
def test_every_element_is_written(descriptors: bool) -> None:
    given = masked_inputs(**LENGTHS, topk=3, dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    plan = planned(given, "triton")
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out, lse = launched(given, plan, None, descriptors=descriptors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_a_first_tile_without_a_bit() -> None:
    given = masked_inputs((129,), (500,), topk=64, dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    given["mask"][:, :8] = 0
    given["mask"][64:] = 0
    given["indices"][given["indices"] < 256] = -1
    given["indices"][64:] = -1
    plan = planned(given, "triton")
    for held in (None, map_of(given, plan, "triton")):
        out, lse = answered(given, plan, held)
        check((out, lse), given, plan)
        assert (lse[64:] == -INF).all()
        assert not out[64:].any()


def test_a_captured_call_follows_new_contents() -> None:
    given = masked_inputs((300, 5), (300, 90), heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    plan = planned(given, "triton")
    held = map_of(given, plan, "triton")
    assert held is not None
    answered(given, plan, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = answered(given, plan, held)
    other = masked_inputs(
        (300, 5), (300, 90), heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, device="cuda", seed=1
    )
    for name in ("q", "k", "v", "mask"):
        given[name].copy_(other[name])
    changed = map_of(other, plan, "triton")
    assert changed is not None
    held.copy_(changed)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected = answered(other, plan, changed)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_call_never_synchronises() -> None:
    given = masked_inputs((300, 5), (517, 9), dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    for implementation in ("triton", "torch"):
        plan = planned(given, implementation)
        held = map_of(given, plan, "triton")
        answered(given, plan, held)
        try:
            torch.cuda.set_sync_debug_mode("error")
            answered(given, plan, held)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_and_masks_compile_nothing() -> None:
    def call(n: int, m: int, first_key: int) -> None:
        given = masked_inputs(
            (n, 3),
            (m, 4),
            first_keys=(first_key, 0),
            first_queries=(first_key, 0),
            dims=(192, 128),
            dtype=torch.bfloat16,
            device="cuda",
        )
        plan = planned(given, "triton")
        answered(given, plan)
        answered(given, plan, map_of(given, plan, "triton"))

    def compiled() -> int:
        kernels = masked_mha_kernel, list_kernel
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    call(2, 5, 0)
    before = compiled()
    for n, m, first in itertools.product((1, 2, 15, 16, 17, 128, 129), (0, 1, 16, 17, 64, 1024), (0, 1, 31, 64, 4096)):
        call(n, m, first)
    assert compiled() == before


def test_keys_and_rows_of_the_mask_past_two_to_the_31st_element() -> None:
    memory = torch.full((2**32 + 2**12,), 9.0, dtype=torch.bfloat16, device="cuda")
    given = masked_inputs((2,), (3,), heads=(1, 1), dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    given["mask"].fill_(-1)
    far = dict(given)
    for name, start in (("k", 2**31), ("v", 2**31 + 64)):
        far[name] = memory.as_strided((3, 1, 64), (2**30, 64, 1), start).copy_(given[name])
    plan = planned(given, "triton")
    for descriptors in (False, True):
        expected = launched(given, plan, None, descriptors=descriptors)
        got = launched(far, plan, None, descriptors=descriptors)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    del memory, far
    words = torch.zeros(2**31 + 4096, dtype=torch.int32, device="cuda")
    mask = words.as_strided((2, 1), (2**31 + 64, 1)).copy_(given["mask"])
    got = answered(given | {"mask": mask}, plan)
    expected = answered(given, plan)
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("whole", [True, False])
def test_chunks_of_a_long_context(whole: bool) -> None:
    queries, context, topk = 300, 3001, 512
    given = masked_inputs(
        (queries,), (context,), topk=topk, heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, device="cuda"
    )
    cap = mask_bytes(queries, context) - (0 if whole else 1)
    plan = plan_masked_chunks(
        given["cu_seqlens_q"],
        torch.tensor([context]),
        shape=shape_of(given),
        topk=topk,
        history_chunk_size=1000,
        max_mask_bytes=cap,
    )
    assert (plan.mask is not None) == whole

    def expand(chunk: KeyChunk) -> tuple[Tensor, Tensor]:
        _, start, stop = chunk.spans[0]
        return given["k"][start:stop], given["v"][start:stop]

    def call() -> tuple[Tensor, Tensor]:
        return masked_mha_in_chunks(
            given["q"], given["indices"], expand, softmax_scale=given["softmax_scale"], plan=plan
        )

    out, lse = call()
    expected, expected_lse = by_oracle(given)
    # each of four partial results is rounded once, and the whole
    scale = given["v"].abs().max().double()
    assert ((out.double() - expected).abs() <= 2.0**-7 * scale).all()
    assert torch.allclose(lse.double(), expected_lse, rtol=0, atol=1e-3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = call()
    given["indices"].copy_(selection((queries,), (context,), topk, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, call()[0])
    assert not torch.equal(captured, out)


@pytest.mark.parametrize("implementation", ["triton", "gluon", "gluon-union"])
def test_sparse_attention_to_lists_without_repetition_is_within_the_same_bounds(implementation: str) -> None:
    """Latent rows as keys, their first columns as values: the two kernels share nothing but the question."""
    n, m, topk = 70, 300, 384
    given = masked_inputs((n,), (m,), heads=(8, 1), dims=(576, 512), topk=128, dtype=torch.bfloat16, device="cuda")
    given["v"] = given["k"][..., :512]
    plan = planned(given, "triton")
    key = torch.arange(m, device="cuda")
    seen = selected_keys(given["mask"], m) & (key <= torch.arange(m - n, m, device="cuda")[:, None])
    lists = torch.nn.functional.pad(torch.where(seen, key, -1), (0, topk - m), value=-1).int()
    shape = SparseMlaShape(
        device=given["q"].device, dtype=torch.bfloat16, s_q=n, s_kv=m, h_q=8, d_qk=576, d_v=512, topk=topk
    )
    sparse_plan = plan_sparse_mla(shape, implementation=implementation)
    scale = given["softmax_scale"]
    out, lse, _ = sparse_mla(given["q"], given["k"][:, 0], lists, softmax_scale=scale, plan=sparse_plan)
    check((out, lse), given, plan)
    check(answered(given, plan), given, plan)


def test_auto_takes_triton() -> None:
    given = masked_inputs((3,), (9,), dims=(192, 128), dtype=torch.bfloat16, device="cuda")
    assert plan_masked_mha(offsets((3,)), offsets((9,)), shape=shape_of(given)).choice == "auto took triton"
    wide = given | {"q": given["q"].double(), "k": given["k"].double(), "v": given["v"].double()}
    choice = plan_masked_mha(offsets((3,)), offsets((9,)), shape=shape_of(wide)).choice
    assert choice.startswith("auto took torch; refused: triton: float64 is not served")
