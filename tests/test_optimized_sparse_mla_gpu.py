"""Sparse MLA on a CUDA device: bfloat16 at model sizes, equal bits, capture, offsets, compilations, what auto takes."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_inputs import answered, check, neighbouring_indices, planned, sampled, sparse_inputs
from torch import Tensor

from assay.optimized import _sparse_mla_lists_kernel, _sparse_mla_triton_kernel
from assay.optimized._sparse_mla_plan import refusal
from assay.optimized.external._partial_state import find
from assay.optimized.sparse_mla import SparseMlaShape, plan_sparse_mla

pytestmark = pytest.mark.gpu

OURS = ("triton", "padded", "gluon", "gluon-union")
FEW_HEADS = ("triton", "gluon", "gluon-union")
TOPK = (512, 640, 1024, 2048, 2176)
SENTINEL = 7.0


def on_gpu(**sizes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"h_q": 8, "d_qk": 576, "d_v": 512, "s_q": 301, "s_kv": 3001, "topk": 512}
    return sparse_inputs(dtype=torch.bfloat16, device="cuda", **given | sizes)


def serving(implementation: str, given: dict[str, Any]) -> str:
    """The implementation, or a skip that says why it does not serve these inputs."""
    shape = planned(given, "torch").shape
    reason = refusal(implementation, shape)
    if reason is not None:
        pytest.skip(f"{implementation}: {reason}")
    return implementation


@pytest.mark.parametrize(("h_q", "d_qk"), list(itertools.product((1, 5, 8, 13, 16, 17, 32, 33, 64, 128), (512, 576))))
@pytest.mark.parametrize("implementation", [*OURS, "flashmla"])
def test_any_number_of_heads(implementation: str, h_q: int, d_qk: int) -> None:
    given = on_gpu(h_q=h_q, d_qk=d_qk, topk=TOPK[h_q % 2], seed=h_q, lengths=h_q != 16, sinks=h_q != 13)
    # FlashMLA documents that a NaN past the length may reach the output
    if implementation == "flashmla":
        given["kv"].nan_to_num_(0.0)
    plan = planned(given, serving(implementation, given))
    check(answered(given, plan), given, sampled(301))


@pytest.mark.parametrize(("topk", "d_qk", "h_q"), list(itertools.product(TOPK, (512, 576), (8, 16))))
@pytest.mark.parametrize("implementation", OURS)
def test_any_length_of_list(implementation: str, topk: int, d_qk: int, h_q: int) -> None:
    given = on_gpu(h_q=h_q, d_qk=d_qk, topk=topk, seed=topk + h_q)
    plan = planned(given, serving(implementation, given))
    check(answered(given, plan), given, sampled(301))


@pytest.mark.parametrize("s_q", [12, 63, 64, 65, 129, 1003])
@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_any_number_of_queries(implementation: str, d_qk: int, s_q: int) -> None:
    given = on_gpu(d_qk=d_qk, s_q=s_q, seed=s_q)
    check(answered(given, planned(given, serving(implementation, given))), given, sampled(s_q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("implementation", ["triton", "padded"])
def test_other_dtypes_and_widths(implementation: str, dtype: torch.dtype) -> None:
    shapes: list[dict[str, Any]] = [{"h_q": 8, "d_qk": 576, "d_v": 512}]
    # padded widths, whose rows do not lie multiples of 16 bytes apart
    shapes += [{"h_q": h_q, "d_qk": d_qk, "d_v": 12} for h_q in (3, 64, 100) for d_qk in (44, 72, 76)]
    for sizes in shapes:
        given = sparse_inputs(dtype=dtype, device="cuda", s_q=65, s_kv=900, topk=300, seed=3, **sizes)
        check(answered(given, planned(given, serving(implementation, given))), given)


@pytest.mark.parametrize("h_q", [8, 16])
@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_uneven_lists_give_the_same_bits_every_time(implementation: str, d_qk: int, h_q: int) -> None:
    """Far more queries than programs, a fifth of them empty, a fifth with three rows, rows repeated."""
    s_q = 4099
    given = on_gpu(h_q=h_q, d_qk=d_qk, s_q=s_q, s_kv=8192, topk=640, seed=h_q)
    generator = torch.Generator(device="cuda").manual_seed(1)
    kind = torch.randint(5, (s_q,), device="cuda", generator=generator)
    given["topk_length"] = torch.where(kind == 0, 0, torch.where(kind == 1, 3, given["topk_length"])).int()
    plan = planned(given, serving(implementation, given))
    first = [result.clone() for result in answered(given, plan)]
    check((first[0], first[1], first[2]), given, sampled(s_q))
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(answered(given, plan), first, strict=True))


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_heads_and_rows_beside_the_view_stay_as_they_are(implementation: str, d_qk: int) -> None:
    given = on_gpu(d_qk=d_qk, s_q=130, seed=4)
    plan = planned(given, serving(implementation, given))
    expected = answered(given, plan)
    noise = torch.randn(140, 64, 512, device="cuda").bfloat16()
    buffer = noise.clone()
    view = buffer[5:135, 8:16]
    results = answered(given, plan, out=view)
    assert results[0].data_ptr() == view.data_ptr()
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    view.copy_(noise[5:135, 8:16])
    assert torch.equal(buffer, noise)


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_a_nan_is_seen_by_those_who_list_it_and_by_no_other(implementation: str, d_qk: int) -> None:
    given = on_gpu(d_qk=d_qk, s_q=203, seed=5, sinks=False)
    plan = planned(given, serving(implementation, given))
    before = [result.clone() for result in answered(given, plan)]
    given["kv"][20] = torch.nan
    listed = torch.arange(512, device="cuda") < given["topk_length"][:, None]
    sees = ((given["indices"] == 20) & listed).any(1)
    assert 0 < int(sees.sum()) < 203
    results = answered(given, plan)
    for ours, old in zip(results, before, strict=True):
        assert torch.equal(ours.isnan().flatten(1).any(1), sees)
        assert ours[sees].isnan().all()
        if implementation != "gluon-union":
            assert torch.equal(ours[~sees], old[~sees])
    check(results, given, (~sees).nonzero()[:, 0])


def test_neighbours_of_a_nan_are_attended_alone() -> None:
    given = on_gpu(s_q=1003, seed=6, lengths=False, sinks=False)
    plan = planned(given, serving("gluon-union", given))
    given["indices"][given["indices"] == 20] = 5
    given["indices"][801, 100] = 20
    given["kv"][20] = torch.nan
    results = answered(given, plan)
    for result in results:
        assert result.isnan().flatten(1).any(1).nonzero()[:, 0].tolist() == [801]
    # without the repair the seven others of the group would be NaN as well
    check(results, given, torch.tensor([800, 802, 803, 804, 805, 806, 807, 808], device="cuda"))


@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_more_queries_than_a_grid_has_rows(implementation: str) -> None:
    given = on_gpu(d_qk=512, s_q=70000, topk=512, seed=7)
    plan = planned(given, serving(implementation, given))
    check(answered(given, plan), given, sampled(70000, 96))


def far_apart(shape: tuple[int, ...], fill: float) -> tuple[Tensor, Tensor]:
    """A view whose rows lie 2^28 elements apart, in front of it as much as 32-bit offsets reach back; and all of it."""
    apart = 2**28
    memory = torch.full((2**31 + shape[0] * apart,), fill, dtype=torch.bfloat16, device="cuda")
    return memory.as_strided(shape, (apart, *torch.empty(shape[1:], device="meta").stride()), 2**31), memory


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_offsets_past_two_to_the_31st_element(implementation: str, d_qk: int) -> None:
    """Where a 32-bit offset would land there are other values, no fault."""
    given = on_gpu(d_qk=d_qk, s_q=12, s_kv=12, seed=8, sinks=False, lengths=False)
    given["kv"].nan_to_num_(0.0)
    near = answered(given, planned(given, serving(implementation, given)))
    far = dict(given)
    for name in ("q", "kv"):
        far[name], _ = far_apart(tuple(given[name].shape), 9.0)
        far[name].copy_(given[name])
    out, memory = far_apart((12, 8, 512), SENTINEL)
    results = answered(far, planned(far, implementation), out=out)
    assert all(torch.equal(*pair) for pair in zip(results, near, strict=True))
    out.fill_(SENTINEL)
    assert bool((memory == SENTINEL).all())


@pytest.mark.parametrize("implementation", FEW_HEADS)
def test_a_captured_call_follows_new_contents(implementation: str) -> None:
    given = on_gpu(s_q=300, seed=9)
    plan = planned(given, serving(implementation, given))
    out = torch.empty(300, 8, 512, dtype=torch.bfloat16, device="cuda")
    answered(given, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse, max_logits = answered(given, plan, out=out)
    given["q"].mul_(-1.0)
    given["kv"].mul_(0.5)
    listed = (given["indices"] > 0) & (given["indices"] < 3000)
    given["indices"].copy_(torch.where(listed, given["indices"].flip(0) * 0 + 5, given["indices"]))
    out.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = answered(given, plan)
    assert all(torch.equal(*pair) for pair in zip((out, lse, max_logits), expected, strict=True))
    check((out, lse, max_logits), given, sampled(300))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", [*OURS, "torch"])
def test_a_call_never_synchronises(implementation: str) -> None:
    given = on_gpu(s_q=65)
    plan = planned(given, serving(implementation, given))
    answered(given, plan)
    try:
        torch.cuda.set_sync_debug_mode("error")
        answered(given, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_counter() -> Callable[[], int]:
    """How many variants of the kernels of the operation this process has compiled."""
    from assay.optimized._sparse_mla_gluon_split import split_kernel
    from assay.optimized._sparse_mla_gluon_swap import swap_kernel
    from assay.optimized._sparse_mla_gluon_union import union_kernel

    kernels: list[Any] = [split_kernel, swap_kernel, union_kernel]
    kernels += [getattr(_sparse_mla_triton_kernel, name) for name in ("sparse_mla_kernel", "flagged_kernel")]
    kernels += [getattr(_sparse_mla_lists_kernel, name) for name in ("mark_kernel", "compact_kernel")]
    device = torch.cuda.current_device()
    return lambda: sum(len(kernel.device_caches[device][0]) for kernel in kernels)


@pytest.mark.parametrize("d_qk", [512, 576])
def test_fifty_lengths_compile_nothing(d_qk: int) -> None:
    compiled = compiled_counter()
    seen = [name for name in FEW_HEADS if refusal(name, planned(on_gpu(d_qk=d_qk)).shape) is None]

    def call(s_q: int, s_kv: int) -> None:
        given = on_gpu(d_qk=d_qk, s_q=s_q, s_kv=s_kv, topk=640)
        for implementation in seen:
            answered(given, planned(given, implementation))

    call(130, 1000)
    before = compiled()
    assert before >= len(seen)
    for index in range(50):
        call(12 + 31 * index + index % 16, 701 + 211 * index + index % 5)
    assert compiled() == before


@pytest.mark.parametrize(
    ("shared", "h_q", "d_qk", "expected"),
    [(0.97, 8, 512, "gluon-union"), (0.97, 16, 576, "gluon-union"), (0.9, 8, 576, "gluon-union"),
     (0.5, 8, 576, "gluon"), (None, 8, 512, "gluon"), (None, 16, 576, "gluon"), (0.97, 64, 576, "triton")],
)  # fmt: skip
def test_auto_takes_united_lists_where_these_pay(shared: float | None, h_q: int, d_qk: int, expected: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("auto takes triton on this device")
    s_q, s_kv, topk = 8192, 32768, 640 if d_qk == 512 else 2048
    live = 512 if d_qk == 512 else 2048
    shape = SparseMlaShape(
        device=torch.device("cuda", 0), dtype=torch.bfloat16, s_q=s_q, s_kv=s_kv, h_q=h_q, d_qk=d_qk, topk=topk
    )
    indices = neighbouring_indices(s_q, s_kv, topk, live=live, shared=shared, device="cuda:0")
    plan = plan_sparse_mla(shape, indices=indices)
    assert plan.implementation == expected, plan.choice
    assert plan.choice.startswith(f"auto took {expected}")
    unknown = plan_sparse_mla(shape)
    assert unknown.implementation == ("triton" if h_q == 64 else "gluon")
    assert "the overlap of neighbouring queries is not known" in unknown.choice or h_q == 64


def test_united_lists_leave_their_scratch_clean_and_hold_what_was_foreseen() -> None:
    given = on_gpu(s_q=1000, s_kv=20000, topk=640, seed=12)
    plan = planned(given, serving("gluon-union", given))
    lists: Any = plan.prepared
    answered(given, plan)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = answered(given, plan)
    torch.cuda.synchronize()
    assert not lists.words.any()
    assert not lists.num_repeats.any()
    held = sum(result.nbytes for result in results)
    assert torch.cuda.max_memory_allocated() - before <= held + (1 << 20)


@pytest.mark.parametrize("d_qk", [512, 576])
def test_flashmla_says_the_same(d_qk: int) -> None:
    if isinstance(find("flash_mla", "flash_mla_sparse_fwd"), str):
        pytest.skip("FlashMLA is not installed")
    given = on_gpu(d_qk=d_qk, s_q=1000, topk=640, seed=13)
    given["kv"].nan_to_num_(0.0)
    peer = answered(given, planned(given, serving("flashmla", given)))
    for implementation in FEW_HEADS:
        ours = answered(given, planned(given, serving(implementation, given)))
        difference = (ours[0].float() - peer[0].float()).norm() / peer[0].float().norm()
        print(f"{implementation}, width {d_qk}: relative difference to FlashMLA {difference:.2e}")
        assert difference < 4e-3
        assert torch.equal(ours[1] == -torch.inf, peer[1] == -torch.inf)
        torch.testing.assert_close(ours[1], peer[1], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(ours[2], peer[2], rtol=1e-5, atol=1e-4)
