"""The builders of the bit-packed mask on a CUDA device: equal bits, int64 offsets, capture, no compilation."""

from typing import Any

import pytest
import torch
from mask_inputs import mask_plan, selection
from torch import Tensor

from assay.optimized import _topk_mask_triton as host
from assay.optimized._topk_mask_triton_kernel import mark_kernel, mark_single_kernel
from assay.optimized.topk_mask import TopkMaskPlan, topk_mask

pytestmark = pytest.mark.gpu

# queries, keys, first positions, entries of a list
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, int]] = {
    "one request": ((1000,), (16384,), None, 2048),
    "one short request": ((63,), (65,), None, 65),
    "one chunk": ((129,), (4000,), (4097,), 2176),
    "requests": ((300, 1, 0, 77), (2050, 31, 9, 4096), None, 512),
    "chunks": ((64, 65), (0, 1333), (31, 77), 640),
    "a row past shared memory": ((3,), (300000,), None, 2048),
    "a list past shared memory": ((5,), (999,), None, 20000),
}


def ways(plan: TopkMaskPlan) -> list[dict[str, bool]]:
    """Every way to build the mask of a plan."""
    singles = (False, True) if len(plan.query_lens) == 1 else (False,)
    shared = (False, True) if host.builds_in_shared(plan) else (False,)
    return [{"single": single, "in_shared": in_shared} for single in singles for in_shared in shared]


@pytest.mark.parametrize("batch", BATCHES)
def test_every_builder_gives_the_bits_of_the_torch_twin(batch: str) -> None:
    query_lens, key_lens, starts, topk = BATCHES[batch]
    far = tuple(m + (starts[0] + 50 if starts else 0) for m in key_lens)
    indices = selection(query_lens, far, topk, device="cuda")
    plan = mask_plan(indices, query_lens, key_lens, key_starts=starts, tile=(128, 64))
    assert plan.choice == "auto took triton"
    on_cpu = indices.cpu()
    options: dict[str, Any] = {"key_starts": starts, "tile": (128, 64)}
    truth, truth_map = topk_mask(on_cpu, plan=mask_plan(on_cpu, query_lens, key_lens, **options))
    mask, held = topk_mask(indices, plan=plan)
    assert held is not None
    assert truth_map is not None
    assert torch.equal(mask.cpu(), truth)
    assert torch.equal(held.cpu(), truth_map)
    assert host.builds_in_shared(plan) == ("past shared memory" not in batch)
    for way in ways(plan):
        for _ in range(10):
            assert torch.equal(host.launch(indices, plan, **way), mask), way


def test_a_large_mask_again_and_again() -> None:
    """Thousands of programs at once: a store that passes an atomic operation, or a missing barrier, loses bits."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    indices = torch.randint(-5, 8200, (8192, 2048), generator=generator, device="cuda", dtype=torch.int32)
    indices[:, ::3] = indices[:, :1]
    plan = mask_plan(indices, (8192,), (8192,))
    first = host.launch(indices, plan, single=True, in_shared=False)
    for way in ways(plan):
        for _ in range(20):
            assert torch.equal(host.launch(indices, plan, **way), first), way


def test_rows_past_two_to_the_31st_word() -> None:
    memory = torch.empty(2**31 + 4 * 1024, dtype=torch.int32, device="cuda")
    indices = memory.as_strided((3, 40), (2**30 + 512, 1))
    indices.copy_(selection((3,), (97,), 40))
    for way in ways(mask_plan(indices, (3,), (97,))):
        got = host.launch(indices, mask_plan(indices, (3,), (97,)), **way)
        near = indices.contiguous()
        assert torch.equal(got, host.launch(near, mask_plan(near, (3,), (97,)), **way))
    del memory
    # 70000 rows of 32768 words: the last lie past 2^31 words, which are 9.2 GB
    few = torch.full((70000, 1), 31, dtype=torch.int32, device="cuda")
    few[-1] = 32 * 32768 - 1
    plan = mask_plan(few, (70000,), (32 * 32768,), max_bytes=10 << 30, tile=(128, 64))
    mask, held = topk_mask(few, plan=plan)
    assert held is not None
    assert mask[-1, -1] == -(2**31)
    assert (mask[:-1, 0] == -(2**31)).all()
    assert int((mask[-1] != 0).sum()) == 1
    assert held[:, 0].all()
    assert held[-1, -1]
    assert int(held.sum()) == len(held) + 1


def test_a_captured_build_follows_new_indices() -> None:
    indices = selection((300, 20), (2050, 99), 512, device="cuda")
    plan = mask_plan(indices, (300, 20), (2050, 99), tile=(128, 64))
    topk_mask(indices, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask, held = topk_mask(indices, plan=plan)
    indices.copy_(selection((300, 20), (2050, 99), 512, seed=1))
    mask.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    expected = topk_mask(indices, plan=plan)
    assert torch.equal(mask, expected[0])
    assert held is not None
    assert expected[1] is not None
    assert torch.equal(held, expected[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_build_never_synchronises() -> None:
    indices = selection((30, 20), (205, 99), 64, device="cuda")
    for implementation in ("torch", "triton"):
        plan = mask_plan(indices, (30, 20), (205, 99), tile=(128, 64), implementation=implementation)
        topk_mask(indices, plan=plan)
        try:
            torch.cuda.set_sync_debug_mode("error")
            topk_mask(indices, plan=plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_of_a_class_compile_nothing() -> None:
    def call(*lens: int) -> Tensor:
        indices = selection((9,) * len(lens), lens, 2048, device="cuda")
        return topk_mask(indices, plan=mask_plan(indices, (9,) * len(lens), lens, tile=(128, 64)))[0]

    def compiled() -> int:
        caches = (kernel.device_caches[torch.cuda.current_device()][0] for kernel in (mark_kernel, mark_single_kernel))
        return sum(len(cache) for cache in caches)

    # rows of up to 2048 words, as many as a list has entries
    for lens in ((9000,), (9000, 5)):
        call(*lens)
    before = compiled()
    for length in (1, 33, 100, 4001, 8225, 10000, 16384, 65536):
        call(length)
        call(length, 1)
    assert compiled() == before
