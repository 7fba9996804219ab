"""Twins of steps on a state pool: within float32 of the oracle, untouched slots untouched, bad tables refused."""

from typing import Any

import pytest
import torch
from builders import in_dtype
from kda_bounds import TOKENS, shape_of
from kda_inputs import GATES, kda_inputs, offsets
from torch import Tensor

from assay.optimized.kda import KdaShape, kda, plan_kda
from assay.optimized.kda_step import (
    KdaStepPlan,
    kda_mixed_step,
    kda_step,
    plan_kda_mixed_step,
    plan_kda_step,
    refill_kda_step,
)
from assay.reference import kda_step as reference

IMPLEMENTATIONS = ("torch", "triton")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SLOTS = 12

# three drafts from the second column, an empty sequence, padding, a start outside the row's tokens with a dropped state
LENGTHS = [3, 0, 2, 1]
TABLE = torch.tensor([[4, 6, 2], [8, 1, 3], [-1, -1, -1], [-1, 9, 0]])
ACCEPTED = torch.tensor([2, 3, 1, 2])
WRITTEN = [4, 6, 2]


def step_inputs(lengths: list[int] | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of the oracle without tables; the pool has NaN in the slots that no sequence of ``TABLE`` reads."""
    usual: dict[str, Any] = {"heads": (1, 2), "dims": (20, 24), "tail": 2}
    given = kda_inputs(LENGTHS if lengths is None else lengths, **usual | options)
    state = given.pop("initial_state")
    pool = torch.randn(SLOTS, *state.shape[1:], generator=torch.Generator().manual_seed(5)).to(state.dtype)
    if lengths is None:
        pool[[slot for slot in range(SLOTS) if slot not in (6, 9)]] = torch.nan
    return given | {"state_pool": pool}


def step_shape(given: dict[str, Any], **options: Any) -> KdaShape:
    return shape_of(given | {"initial_state": given["state_pool"]}, **options)


def planned(given: dict[str, Any], implementation: str, **options: Any) -> KdaStepPlan:
    tables = {"cu_seqlens": given["cu_seqlens"], "slot_table": TABLE, "num_accepted": ACCEPTED} | options
    return plan_kda_step(**tables, shape=step_shape(given), num_slots=SLOTS, implementation=implementation)


def stepped(given: dict[str, Any], plan: KdaStepPlan, **options: Any) -> tuple[Tensor, Tensor]:
    named: dict[str, Any] = {name: given.get(name) for name in (*TOKENS, "scale", "A_log", "dt_bias", "state_pool")}
    return kda_step(**named | options, plan=plan)


def expected(given: dict[str, Any], table: Tensor = TABLE, accepted: Tensor | None = ACCEPTED) -> tuple[Tensor, Tensor]:
    return reference.kda_step(**in_dtype(given, torch.float64), slot_table=table, num_accepted=accepted)


def check(got: Tensor, answer: Tensor, size: float) -> None:
    """Rounded once on storing, after some tens of float32 roundings of terms that are at most ``size`` large.

    A token costs the state a decay, a sum of K products of which each rounds twice, and a write; elementary functions
    err by 4 roundoffs. 32 float32 roundoffs a token, of three tokens, cover them in the worst case for K = 20.
    """
    finite = torch.isfinite(answer)
    assert torch.equal(torch.isfinite(got), finite)
    limit = ROUNDOFF[got.dtype] * answer.abs() + 3 * 32 * 2.0**-24 * size + 2.0**-25 * (got.dtype == torch.float16)
    assert bool(((got.double() - answer).abs() <= limit)[finite].all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "gate"), [*(("float32", gate) for gate in GATES), ("float16", "bounded"), ("bfloat16", "log")]
)
def test_twins_are_the_oracle(dtype: str, gate: str, implementation: str) -> None:
    given = step_inputs(gate=gate, dtype=DTYPES[dtype], seed=1)
    out, pool = expected(given)
    before = given["state_pool"].clone()
    plan = planned(given, implementation)
    got, after = stepped(given, plan)
    assert after is given["state_pool"]
    size = float(given["v"][:5].abs().max() + before[[6, 9]].abs().max())
    check(got, out, size)
    check(after[WRITTEN], pool[WRITTEN], size)
    others = [slot for slot in range(SLOTS) if slot not in WRITTEN]
    assert torch.equal(bits(after[others]), bits(before[others]))
    assert not got[3:5].any()
    assert not got[6:].any()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_every_count_of_accepted_tokens(accepted: int, implementation: str) -> None:
    given = step_inputs([4], dtype=torch.float32, seed=2, tail=0)
    tables = {"slot_table": torch.tensor([[7, 2, 9, 4]]), "num_accepted": torch.tensor([accepted])}
    out, pool = expected(given, *tables.values())
    got, after = stepped(given, planned(given, implementation, **tables))
    check(got, out, 8.0)
    check(after, pool, 8.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pools_of_other_layouts_and_strides_in_bfloat16(implementation: str) -> None:
    given = step_inputs(dtype=torch.bfloat16, state_dtype=torch.bfloat16, seed=3)
    shape = step_shape(given)
    first = stepped(given | {"state_pool": given["state_pool"].clone()}, planned(given, implementation))
    storage = torch.full((2, SLOTS, 24, 20), 3.0, dtype=torch.bfloat16)
    # heads before slots, value columns first
    pool = storage.permute(1, 0, 2, 3)
    pool.copy_(given["state_pool"].transpose(2, 3))
    plan = plan_kda_step(
        given["cu_seqlens"],
        TABLE,
        ACCEPTED,
        shape=step_shape(given, state_layout="VK"),
        num_slots=SLOTS,
        implementation=implementation,
    )
    rows = torch.full((len(given["v"]), 2, 40), torch.nan, dtype=torch.bfloat16)
    out, _ = stepped(given, plan, state_pool=pool, out=rows[..., 8:32])
    assert shape.state_size(1) == (1, 2, 20, 24)
    assert torch.equal(out, first[0])
    assert torch.equal(bits(pool.transpose(2, 3)), bits(first[1]))
    assert rows[..., :8].isnan().all()
    assert rows[..., 32:].isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_later_step_is_written_into_the_tables_of_the_first(implementation: str) -> None:
    given = step_inputs(dtype=torch.float32, seed=4)
    given["state_pool"] = torch.randn(given["state_pool"].shape, generator=torch.Generator().manual_seed(6))
    plan = planned(given, implementation)
    later = {
        "cu_seqlens": offsets([1, 2, 0, 3]),
        "slot_table": TABLE.flip(1),
        "num_accepted": torch.tensor([1, 2, 2, 3]),
    }
    again = refill_kda_step(plan, **later)
    assert again.slots is plan.slots
    moved = given | {"cu_seqlens": later["cu_seqlens"]}
    out, pool = expected(moved, later["slot_table"], later["num_accepted"])
    got, after = stepped(given, again)
    check(got, out, 8.0)
    check(after, pool, 8.0)
    with pytest.raises(ValueError, match=r"slot_table must have shape \(4, 3\), got \(4, 2\)"):
        refill_kda_step(again, later["cu_seqlens"], TABLE[:, :2])
    before = again.slots.clone()
    with pytest.raises(ValueError, match="num_accepted must be 1 to 3, got 0"):
        refill_kda_step(again, later["cu_seqlens"], TABLE, torch.tensor([1, 0, 1, 1]))
    assert torch.equal(again.slots, before)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cu_seqlens": torch.tensor([1, 3, 3, 5, 6])}, ValueError, "cu_seqlens must start at 0, got 1"),
        ({"cu_seqlens": offsets([4, 0, 2, 1])}, ValueError, "at most 3 tokens, got 4 at sequence 0"),
        ({"slot_table": TABLE[:3]}, ValueError, r"slot_table must have shape \[4, C\] with C >= 1, got \(3, 3\)"),
        ({"slot_table": TABLE.float()}, TypeError, "slot_table must be int32 or int64, got torch.float32"),
        ({"slot_table": TABLE.where(TABLE != 8, 12)}, ValueError, "hold -1 .. 11, got 12 at sequence 1"),
        ({"slot_table": TABLE.where(TABLE != 8, -2)}, ValueError, "hold -1 .. 11, got -2 at sequence 1"),
        (
            {"slot_table": TABLE.where(TABLE != 9, 4)},
            ValueError,
            "slots must belong to one sequence each, got 4 in two",
        ),
        ({"num_accepted": torch.tensor([0, 1, 1, 1])}, ValueError, "num_accepted must be 1 to 3, got 0 at sequence 0"),
        ({"num_accepted": torch.tensor([1, 1, 1, 4])}, ValueError, "num_accepted must be 1 to 3, got 4 at sequence 3"),
        ({"num_accepted": torch.tensor([1, 1])}, ValueError, r"num_accepted must have shape \(4,\), got \(2,\)"),
        ({"num_accepted": torch.ones(4)}, TypeError, "num_accepted must be int32 or int64"),
        ({"implementation": "flash"}, ValueError, "implementation must be 'auto' or one of torch, triton, got 'flash'"),
    ],
)
def test_tables_that_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    given = step_inputs(dtype=torch.float32)
    with pytest.raises(error, match=text):
        planned(given, **{"implementation": "torch"} | options)


def test_padding_and_empty_sequences_may_share_slots() -> None:
    given = step_inputs(dtype=torch.float32)
    shared = TABLE.clone()
    shared[1] = shared[0]
    assert planned(given, "torch", slot_table=shared).starts.tolist() == [6, 2, -1, 9]


def test_pools_that_are_refused_stay_as_they_are() -> None:
    given = step_inputs(dtype=torch.float32, dims=(24, 24))
    plan = planned(given, "torch")
    pool = given["state_pool"]
    flat = pool.view(-1)[: len(given["v"]) * 48].view(-1, 2, 24)
    for changed, error, text in (
        ({"state_pool": pool[1:]}, ValueError, r"state_pool must have shape \(12, 2, 24, 24\), got \(11, 2, 24, 24\)"),
        ({"state_pool": pool.bfloat16()}, TypeError, "state_pool must be float32, got torch.bfloat16"),
        ({"state_pool": pool[:1].expand(12, -1, -1, -1)}, ValueError, "state_pool must not overlap itself"),
        ({"v": flat}, ValueError, "state_pool must not share memory with v"),
        ({"out": flat}, ValueError, "state_pool must not share memory with out"),
    ):
        before = bits(pool).clone()
        with pytest.raises(error, match=text):
            stepped(given, plan, **changed)
        assert torch.equal(bits(pool), before)


def test_auto_on_the_cpu_is_torch_and_float64_is_not_for_kernels() -> None:
    given = step_inputs(dtype=torch.float64, seed=8)
    plan = planned(given, "auto")
    assert (plan.implementation, plan.choice) == ("torch", "auto took torch")
    out, pool = expected(given)
    got, after = stepped(given, plan)
    torch.testing.assert_close(got, out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(after, pool, rtol=1e-13, atol=1e-13, equal_nan=True)
    with pytest.raises(NotImplementedError, match="'triton' cannot serve this shape; triton: float64 is not served"):
        planned(given, "triton")


MIXED: dict[str, Any] = {
    # a plain row before the drafts of a speculative sequence, others between; row 10 is nobody's
    "spec_tokens": torch.tensor([1, 2, 4, 8, 9]),
    "spec_cu_seqlens": offsets([3, 2]),
    "spec_slots": torch.tensor([[2, 5, 7], [1, 10, 11]]),
    "num_accepted": torch.tensor([2, 1]),
    "plain_tokens": torch.tensor([0, 3, 5, 6, 7]),
    "plain_cu_seqlens": offsets([1, 0, 4]),
    "plain_slots": torch.tensor([4, 6, 8]),
    "has_initial_state": torch.tensor([True, False, False]),
}
NOBODY: dict[str, Any] = {"tokens": torch.tensor([], dtype=torch.int32), "cu_seqlens": offsets([0])}
STEPS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "drafts alone": MIXED
    | {"spec_tokens": torch.arange(5), "plain_tokens": NOBODY["tokens"], "plain_cu_seqlens": offsets([0, 0, 0])},
    "no drafts": MIXED
    | {
        "spec_tokens": NOBODY["tokens"],
        "spec_cu_seqlens": offsets([0, 0]),
        "plain_tokens": torch.arange(5),
    },
}


def mixed(given: dict[str, Any], tables: dict[str, Any], implementation: str, **options: Any) -> tuple[Tensor, Tensor]:
    plan = plan_kda(step_shape(given), max_tokens=11, max_sequences=3, implementation=implementation)
    step = plan_kda_mixed_step(num_rows=11, **tables, plan=plan, num_slots=SLOTS, implementation=implementation)
    named: dict[str, Any] = {name: given.get(name) for name in (*TOKENS, "scale", "A_log", "dt_bias", "state_pool")}
    return kda_mixed_step(**named | options, plan=step)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", STEPS)
def test_mixed_steps_are_the_oracle(name: str, implementation: str) -> None:
    given = step_inputs([11], dtype=torch.float32, seed=9, tail=0)
    del given["cu_seqlens"]
    # what a former request left must not matter to one that starts afresh
    given["state_pool"][8] = torch.nan
    wide = in_dtype(given, torch.float64)
    out, pool = reference.kda_mixed_step(
        **wide, **{key: x.long() if x.dtype == torch.int32 else x for key, x in STEPS[name].items()}
    )
    before = given["state_pool"].clone()
    got, after = mixed(given, STEPS[name], implementation)
    check(got, out, 8.0)
    check(after, pool, 8.0)
    same = [slot for slot in range(SLOTS) if torch.equal(bits(pool[slot]), bits(wide["state_pool"][slot]))]
    assert len(same) >= 4
    assert torch.equal(bits(after[same]), bits(before[same]))


def test_a_step_without_drafts_is_computed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step_inputs([11], dtype=torch.float32, seed=10, tail=0)
    buffer = torch.full((11, 2, 24), torch.nan)
    seen: dict[str, Any] = {}

    def watched(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return kda(*args, **options)

    monkeypatch.setattr("assay.optimized.kda_step.kda", watched)
    out, _ = mixed(given, STEPS["no drafts"], "torch", out=buffer)
    assert out is buffer
    assert seen["out"].data_ptr() == buffer.data_ptr()
    assert seen["g"].data_ptr() == given["g"].data_ptr()
    mixed(given, MIXED, "torch", out=buffer)
    assert seen["out"].data_ptr() != buffer.data_ptr()
    assert torch.equal(seen["beta"], given["beta"][MIXED["plain_tokens"]])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"spec_tokens": torch.tensor([1, 2, 4, 8, 0])}, ValueError, "must name each row once, got 1 again"),
        ({"spec_tokens": torch.tensor([1, 2, 4, 8, 11])}, ValueError, r"must hold rows 0 .. 10, got 0 .. 11"),
        ({"spec_tokens": torch.tensor([1, 2, 4, 8])}, ValueError, "spec_cu_seqlens must end at the 4 of spec_tokens"),
        ({"spec_tokens": torch.ones(5)}, TypeError, "spec_tokens must be int32 or int64"),
        ({"plain_tokens": torch.zeros(5, 1).int()}, ValueError, "plain_tokens must have one dimension"),
        ({"plain_slots": torch.tensor([4, 6, 12])}, ValueError, "plain_slots must hold 0 .. 11, got 12"),
        ({"plain_slots": torch.tensor([5, 6, 8])}, ValueError, "slots must belong to one sequence each, got 5 in two"),
        ({"plain_slots": torch.tensor([4, 8])}, ValueError, r"plain_slots must have shape \(3,\), got \(2,\)"),
        ({"has_initial_state": torch.ones(3)}, TypeError, "has_initial_state must be bool"),
        ({"num_accepted": torch.tensor([2, 0])}, ValueError, "num_accepted must be 1 to 3, got 0 at sequence 1"),
        ({"plain_tokens": torch.arange(5, 11), "plain_cu_seqlens": offsets([1] * 6)}, ValueError, "name each row once"),
    ],
)
def test_mixed_tables_that_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    given = step_inputs([11], dtype=torch.float32, tail=0)
    before = bits(given["state_pool"]).clone()
    with pytest.raises(error, match=text):
        mixed(given, MIXED | options, "torch")
    assert torch.equal(bits(given["state_pool"]), before)


def test_a_mixed_step_of_other_rows_is_refused() -> None:
    given = step_inputs([11], dtype=torch.float32, tail=0)
    before = bits(given["state_pool"]).clone()
    with pytest.raises(ValueError, match="g must have 11 rows as planned, got 10"):
        mixed(given | {"g": given["g"][:10]}, MIXED, "torch")
    with pytest.raises(TypeError, match=r"beta must be float32, got torch.float16"):
        mixed(given | {"beta": given["beta"].half()}, MIXED, "torch")
    assert torch.equal(bits(given["state_pool"]), before)
