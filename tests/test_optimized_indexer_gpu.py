"""The indexer on a CUDA device: bfloat16 at model sizes, exact ties, capture, memory, compilations."""

import pytest
import torch
from indexer_inputs import by_oracle, check, indexer_inputs, planned
from torch import Tensor

from assay.optimized._indexer_triton import score_kernel
from assay.optimized.indexer import IndexerPlan, best_keys, indexer

pytestmark = pytest.mark.gpu

LENGTHS = (65, 1, 0, 130), (65, 300, 7, 517)


def answered(given: dict[str, Tensor], plan: IndexerPlan) -> tuple[Tensor, Tensor]:
    return indexer(given["q"], given["k"], given["weights"], plan=plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (32, 128), (5, 17), (2, 256)])
def test_within_its_bounds(heads: int, width: int, dtype: torch.dtype) -> None:
    given = indexer_inputs(*LENGTHS, heads=heads, width=width, topk=64, dtype=dtype, device="cuda")
    plan = planned(given)
    assert plan.choice == "auto took triton"
    first = answered(given, plan)
    check(*first, given)
    for _ in range(5):
        again = answered(given, plan)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("topk", [1, 64, 512, 600])
def test_exact_scores_give_the_list_of_the_oracle(topk: int, implementation: str) -> None:
    given = indexer_inputs(*LENGTHS, heads=8, width=64, topk=topk, whole=True, dtype=torch.bfloat16, device="cuda")
    indices, scores = answered(given, planned(given, implementation=implementation))
    expected, expected_scores = by_oracle(given)
    assert torch.equal(indices, expected)
    assert torch.equal(scores.double(), expected_scores)


def test_long_rows_of_ties() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    scores = torch.randint(-3, 4, (64, 40000), generator=generator, device="cuda").float()
    keys, best = best_keys(scores, 2048)
    expected, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(keys.long(), order[:, :2048])
    assert torch.equal(best, expected[:, :2048])


def test_a_captured_call_follows_new_contents_in_bounded_memory() -> None:
    given = indexer_inputs((700,), (3000,), heads=8, width=64, topk=512, dtype=torch.bfloat16, device="cuda")
    plan = planned(given, workspace_bytes=8 << 20)
    assert len(plan.blocks) > 4
    answered(given, plan)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answered(given, plan)
    torch.cuda.synchronize()
    # the answer, and a few numbers a score: keys of 64 bits, what torch's selection takes
    assert torch.cuda.max_memory_allocated() - before <= 700 * 512 * 8 + (24 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, scores = answered(given, plan)
    given["q"].mul_(-1.0)
    given["weights"].mul_(0.5)
    indices.fill_(-7)
    graph.replay()
    torch.cuda.synchronize()
    expected = answered(given, plan)
    assert torch.equal(indices, expected[0])
    assert torch.equal(scores, expected[1])


def test_new_lengths_compile_nothing() -> None:
    def call(n: int, m: int) -> None:
        given = indexer_inputs((n, 2), (m, 4), heads=4, width=64, dtype=torch.bfloat16, device="cuda")
        answered(given, planned(given))

    def compiled() -> int:
        return len(score_kernel.device_caches[torch.cuda.current_device()][0])

    call(3, 7)
    before = compiled()
    for n in (1, 2, 16, 17, 64, 65):
        for m in (1, 2, 16, 17, 128, 1024):
            call(n, m)
    assert compiled() == before


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_call_never_synchronises() -> None:
    given = indexer_inputs((65, 3), (300, 9), heads=4, width=64, dtype=torch.bfloat16, device="cuda")
    for implementation in ("torch", "triton"):
        plan = planned(given, implementation=implementation)
        answered(given, plan)
        try:
            torch.cuda.set_sync_debug_mode("error")
            answered(given, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_keys_and_scores_past_two_to_the_31st_element() -> None:
    memory = torch.full((2**32 + 4096,), 9.0, dtype=torch.bfloat16, device="cuda")
    given = indexer_inputs((3,), (3,), heads=2, width=64, whole=True, dtype=torch.bfloat16, device="cuda")
    expected = answered(given, planned(given))
    far = given | {"k": memory.as_strided((3, 64), (2**30, 1), 2**31).copy_(given["k"])}
    assert torch.equal(answered(far, planned(far))[0], expected[0])
    del memory, far
    # 70000 queries of 40000 keys in one block: the last scores lie past 2^31
    from assay.optimized import _indexer_triton as kernel

    few = indexer_inputs((70000,), (70000,), heads=1, width=16, whole=True, dtype=torch.bfloat16, device="cuda")
    scores = kernel.score(few["q"], few["k"][:40000], few["weights"], 0)
    tail = kernel.score(few["q"][-100:], few["k"][:40000], few["weights"][-100:], 69900)
    assert torch.equal(scores[-100:], tail)
