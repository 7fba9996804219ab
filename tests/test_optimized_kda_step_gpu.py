"""Steps on a state pool on a CUDA device: the oracle, capture, memory, large pools, mixed steps."""

from typing import Any

import pytest
import torch
from builders import in_dtype
from kda_bounds import TOKENS, shape_of
from kda_inputs import kda_inputs, offsets

from assay.optimized import _kda_step_triton_kernel as kernels
from assay.optimized.kda import plan_kda
from assay.optimized.kda_step import (
    KdaStepPlan,
    kda_mixed_step,
    kda_step,
    plan_kda_mixed_step,
    plan_kda_step,
    refill_kda_step,
)
from assay.reference import kda_step as reference

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SLOTS = 40
LENGTHS = [4, 1, 0, 4, 2]
TABLE = torch.arange(20).view(5, 4) + 3
ACCEPTED = torch.tensor([4, 1, 2, 3, 2])


def step_inputs(lengths: list[int], **options: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"heads": (4, 8), "dims": (128, 128), "dtype": torch.bfloat16, "device": "cuda", "tail": 2}
    given = kda_inputs(lengths, **sizes | options)
    state = given.pop("initial_state")
    generator = torch.Generator("cuda").manual_seed(5)
    pool = torch.randn(SLOTS, *state.shape[1:], generator=generator, device="cuda").to(state.dtype)
    return given | {"state_pool": pool}


def planned(given: dict[str, Any], implementation: str = "triton") -> KdaStepPlan:
    shape = shape_of(given | {"initial_state": given["state_pool"]})
    tables = (given["cu_seqlens"], TABLE, ACCEPTED)
    return plan_kda_step(*tables, shape=shape, num_slots=SLOTS, implementation=implementation)


def stepped(given: dict[str, Any], plan: KdaStepPlan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    named: dict[str, Any] = {name: given.get(name) for name in (*TOKENS, "scale", "A_log", "dt_bias", "state_pool")}
    return kda_step(**named | options, plan=plan)


def check(got: torch.Tensor, answer: torch.Tensor, size: float) -> None:
    """As on the CPU, for K = 128: rounded once, after 4 (8 + sqrt(K)) float32 roundings a token of terms to ``size``.

    A sum of K products errs like a random walk, by 4 sqrt(K) roundoffs at most; a token has two, and elementary steps.
    """
    limit = ROUNDOFF[got.dtype] * answer.abs() + 4 * 4 * 20 * 2.0**-24 * size + 2.0**-25 * (got.dtype == torch.float16)
    assert bool(((got.double() - answer).abs() <= limit).all())


@pytest.mark.parametrize("gate", ["bounded", "softplus", "log"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["triton", "torch"])
def test_twins_are_the_oracle(implementation: str, dtype: str, gate: str) -> None:
    given = step_inputs(LENGTHS, dtype=DTYPES[dtype], gate=gate, seed=1)
    wide = in_dtype(given, torch.float64)
    expected, pool = reference.kda_step(**wide, slot_table=TABLE, num_accepted=ACCEPTED)
    before = given["state_pool"].clone()
    out, after = stepped(given, planned(given, implementation))
    check(out, expected, 10.0)
    check(after, pool, 10.0)
    written = [slot for row, length in zip(TABLE.tolist(), LENGTHS, strict=True) for slot in row[:length]]
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(after[others], before[others])
    assert not out[sum(LENGTHS) :].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_captured_step_follows_later_tables() -> None:
    given = step_inputs(LENGTHS, seed=2, state_dtype=torch.bfloat16)
    plan, out = planned(given), torch.empty_like(given["v"])
    pool = given["state_pool"].clone()
    stepped(given, plan, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stepped(given, plan, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stepped(given, plan, out=out)
    tables = offsets([1, 2, 4, 0, 3]), TABLE.flip(0), torch.tensor([1, 2, 3, 4, 1])
    later = refill_kda_step(plan, *tables)
    given["state_pool"].copy_(pool)
    graph.replay()
    torch.cuda.synchronize()
    replayed = out.clone(), given["state_pool"].clone()
    given["state_pool"].copy_(pool)
    expected = stepped(given, later)
    assert torch.equal(replayed[0], expected[0])
    assert torch.equal(replayed[1], expected[1])


def test_steps_of_other_sizes_compile_nothing() -> None:
    def compiled() -> int:
        return len(kernels.step_kernel.device_caches[torch.cuda.current_device()][0])

    def every(lengths: list[int], columns: int) -> None:
        given = step_inputs(lengths, seed=3)
        shape = shape_of(given | {"initial_state": given["state_pool"]})
        table = torch.arange(len(lengths) * columns).view(-1, columns)
        stepped(given, plan_kda_step(given["cu_seqlens"], table, shape=shape, num_slots=SLOTS))

    every([1, 1], 1)
    before = compiled()
    for index in range(20):
        every([1 + index % 2] * (1 + index % 7), 2 + index % 3)
    assert compiled() == before


def test_slots_past_two_to_the_31st_element() -> None:
    """Slots 2^28 elements apart; where a 32-bit offset would land there are other values, no fault."""
    given = step_inputs([2, 1], seed=4, heads=(1, 1))
    shape = shape_of(given | {"initial_state": given["state_pool"]})
    table = torch.tensor([[8, 9], [2, 0]])
    near = given["state_pool"][:10].clone()
    plan = plan_kda_step(given["cu_seqlens"], table, shape=shape, num_slots=10)
    expected = stepped(given, plan, state_pool=near)
    storage = torch.full((9 * 2**28 + 128 * 128,), 9.0, device="cuda")
    pool = storage.as_strided((10, 1, 128, 128), (2**28, 128 * 128, 128, 1))
    pool.copy_(given["state_pool"][:10])
    got = stepped(given, plan, state_pool=pool)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("implementation", ["flash", "triton"])
def test_a_mixed_step_at_model_size(implementation: str) -> None:
    given = step_inputs([100], seed=6, tail=0)
    del given["cu_seqlens"]
    given["state_pool"][8] = torch.nan
    tables: dict[str, Any] = {
        "spec_tokens": torch.tensor([1, 2, 4, 98, 99]),
        "spec_cu_seqlens": offsets([3, 2]),
        "spec_slots": torch.tensor([[2, 5, 7], [1, 10, 11]]),
        "num_accepted": torch.tensor([2, 1]),
        "plain_tokens": torch.tensor([0, 3, *range(5, 97)]),
        "plain_cu_seqlens": offsets([1, 0, 93]),
        "plain_slots": torch.tensor([4, 6, 8]),
        "has_initial_state": torch.tensor([True, False, False]),
    }
    on_device = {name: x.cuda() for name, x in tables.items()}
    expected, pool = reference.kda_mixed_step(**in_dtype(given, torch.float64), **on_device)
    shape = shape_of(given | {"initial_state": given["state_pool"]})
    plan = plan_kda(shape, max_tokens=100, max_sequences=3, implementation=implementation)
    step = plan_kda_mixed_step(num_rows=100, **tables, plan=plan, num_slots=SLOTS)
    named: dict[str, Any] = {name: given.get(name) for name in (*TOKENS, "scale", "A_log", "dt_bias", "state_pool")}
    out, after = kda_mixed_step(**named, plan=step)
    for got, exact in ((out, expected), (after[:9], pool[:9])):
        error = (got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        # the bar of the fused kernels, see test_optimized_kda_flash
        assert float(error) <= 3.5e-3
    assert torch.equal(after[12:], given["state_pool"][12:])
    assert not out[97].any()
