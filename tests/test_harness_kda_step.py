"""Steps on a pool of states: results that are arguments, slots that nobody may touch, and what trips each gate."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import in_dtype
from torch import Tensor

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.faults import load
from assay.harness.faults._kda_step_slots import single
from assay.harness.faults._kda_step_twin import step_twin
from assay.harness.in_place import completing, is_argument, put_back
from assay.harness.kernels import wrap_function
from assay.harness.mutation.admission import NULL_KERNELS, null_kernel
from assay.harness.operation import CaseRequest
from assay.harness.operations._kda_step_cases import FAMILIES, StepForm
from assay.harness.operations._kda_step_gates import judge_step
from assay.harness.operations._kda_step_inputs import table_of
from assay.harness.operations._kda_step_relations import moved, next_columns, written_slots
from assay.harness.operations.kda_step import OPERATION
from assay.harness.plan import DTYPES
from assay.harness.plugin import kernel
from assay.harness.poison import Ledger
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case
from assay.reference.kda_step import kda_step as reference

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_heads": 1, "num_v_heads": 2, "head_dim_k": 8, "head_dim_v": 12, "scale": 0.25}
PLAIN = {name: StepForm.__dataclass_fields__[name].default for name in StepForm.__dataclass_fields__}


def case_of(family: str = "diffuse", dtype: str = "float32", **sizes: Any) -> Case:
    lens = {"seq_lens": [3, 0, 2, 1], "columns": 4}
    return Case(op="kda_step", family=family, dtype=dtype, seed=5, sizes=SMALL | PLAIN | lens | sizes)


def smoke() -> list[Case]:
    return OPERATION.cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))


def expected(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The reference, in the dtypes of a kernel."""
    given = {name: value for name, value in arguments.items() if name not in OPERATION.optional_arguments}
    out, pool = reference(**in_dtype(given, torch.float64))
    return out.to(arguments["q"].dtype), pool.to(arguments["state_pool"].dtype)


def judged(case: Case, change: Callable[[Tensor, Tensor], None] = lambda out, pool: None) -> list[str]:
    """Gates that the reference's answer fails after a change."""
    arguments = OPERATION.inputs(case, CPU).arguments
    oracle = OPERATION.oracle(case, arguments)
    out, pool = expected(arguments)
    untouched = torch.tensor([slot not in written_slots(case) for slot in range(len(pool))])
    # bits of NaN included
    pool[untouched] = arguments["state_pool"][untouched]
    change(out, pool)
    gates = judge_step(oracle, (out, pool), OPERATION.default_contract(case)).gates
    return [gate.gate for gate in gates if not gate.passed]


def verdict(function: Callable[..., Any], case: Case) -> tuple[Verdict, str]:
    record = run_case(OPERATION, wrap_function(kernel(contract=single)(function), OPERATION), case, CPU)
    return record.verdict, record.text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{}, {"padding": 3, "dropped": True, "accepted": "none", "state_layout": "VK"}])
def test_the_exact_answer_passes(family: str, sizes: dict[str, Any]) -> None:
    own: dict[str, Any] = {"gate": "log"} if family in ("forgetting", "exact-one-hot") else {}
    if family == "exact-one-hot":
        own |= {"beta_is_logits": False, "qk_l2norm": False}
    assert judged(case_of(family, **sizes | own)) == []


def test_each_gate_has_what_trips_it() -> None:
    case = case_of(padding=3)
    table = table_of(case)
    # the third sequence is padding, whose rows are 3 and 4
    written, free = written_slots(case), next(s for s in range(table.num_slots) if s not in written_slots(case))

    def put(place: tuple[int, ...], value: float, *, of_pool: bool) -> Callable[[Tensor, Tensor], None]:
        def change(out: Tensor, pool: Tensor) -> None:
            (pool if of_pool else out)[place] = value

        return change

    assert "G1 out" in judged(case, put((1, 0, 0), math.nan, of_pool=False))
    assert "G1 state_pool" in judged(case, put((written[0], 0, 0, 0), math.inf, of_pool=True))
    assert judged(case, put((free, 0, 0, 0), 1.0, of_pool=True)) == ["G2 other slots"]
    assert judged(case, put((3, 0, 0), 1.0, of_pool=False)) == ["G3 rows of no sequence"]
    assert judged(case, put((6, 0, 0), 1.0, of_pool=False)) == ["G3 rows of no sequence"]
    assert "G4 envelope out" in judged(case, put((1, 0, 0), 9.0, of_pool=False))
    assert "G4 envelope state_pool" in judged(case, put((written[1], 1, 2, 3), 9.0, of_pool=True))


def test_a_place_names_the_slot_and_the_row() -> None:
    case = case_of(padding=2)
    arguments = OPERATION.inputs(case, CPU).arguments
    oracle = OPERATION.oracle(case, arguments)
    out, pool = expected(arguments)
    slot = written_slots(case)[-1]
    pool[slot, 1, 2, 3], out[4, 1, 5] = 9.0, 9.0
    gates = {gate.gate: gate for gate in judge_step(oracle, (out, pool), OPERATION.default_contract(case)).gates}
    state, row = gates["G4 envelope state_pool"].where, gates["G4 envelope out"].where
    assert state is not None
    assert row is not None
    assert (state.slot, state.head, state.channel, state.dim) == (slot, 1, 2, 3)
    assert str(state).startswith(f"slot {slot}, head 1, channel 2, dim 3, got 9")
    assert (row.token, row.head, row.dim) == (4, 1, 5)


def test_tables_and_pools_are_what_a_step_may_meet() -> None:
    case = case_of(accepted="sweep", padding=4, dropped=True, pool="padded", seq_lens=[4, 1, 0, 2], offsets="int64")
    table, inputs = table_of(case), OPERATION.inputs(case, CPU)
    pool = inputs.arguments["state_pool"]
    assert table.accepted == (1, 2, 3, 4)
    assert table.rows[3] == (-1,) * 4
    owned = [slot for row in table.rows for slot in row if slot >= 0]
    assert len(owned) == len(set(owned)) == 9
    assert table.starts == [table.rows[0][0], table.rows[1][1], table.rows[2][2], -1]
    assert inputs.arguments["slot_table"].dtype == torch.int64
    finite = [slot for slot in range(len(pool)) if bool(torch.isfinite(pool[slot]).all())]
    assert sorted(finite) == sorted(slot for slot in table.starts if slot >= 0)
    assert pool.stride(0) > pool[0].numel()
    heads = OPERATION.inputs(case_of(pool="heads"), CPU).arguments["state_pool"]
    assert heads.stride(1) > heads.stride(0)


def test_the_pool_may_be_handed_out_or_left_out_but_not_replaced() -> None:
    case = case_of()
    assert verdict(lambda **a: step_twin(a), case)[0] is Verdict.PASS
    assert verdict(lambda **a: step_twin(a)[0], case)[0] is Verdict.PASS
    copy = verdict(lambda **a: (step_twin(a)[0], a["state_pool"].clone()), case)
    assert copy == (
        Verdict.STRUCTURE,
        "state_pool must be the given tensor, written in place, got another one",
    )
    assert verdict(lambda **a: (*step_twin(a), a["q"]), case)[0] is Verdict.STRUCTURE


def test_what_lies_beside_a_pool_is_nobodys() -> None:
    def beside(**a: Any) -> Tensor:
        out, pool = step_twin(a)
        torch.as_strided(pool, (1,), (1,), pool.storage_offset() + pool[0].numel()).fill_(1.0)
        return out

    assert verdict(beside, case_of(pool="padded")) == (Verdict.WRITE_SCOPE, "wrote beside state_pool")


def test_a_kernel_may_write_its_output_into_a_given_tensor() -> None:
    @kernel(style="dps", contract=single)
    def into(out: Tensor, state_pool: Tensor, **arguments: Any) -> None:
        out.copy_(step_twin(arguments | {"state_pool": state_pool})[0])

    assert run_case(OPERATION, wrap_function(into, OPERATION), case_of(), CPU).verdict is Verdict.PASS


def test_bits_that_depend_on_the_place_of_a_slot_are_seen() -> None:
    def placed(**a: Any) -> Any:
        out, pool = step_twin(a)
        # one roundoff more where the first slot of the table is odd
        return out * (1 + 2.0**-23 * (int(a["slot_table"][0, 0]) % 2)), pool

    found, text = verdict(placed, case_of())
    assert found is Verdict.METAMORPHIC
    assert text == "bits depend on where slots lie, or on what lies in those that are not read"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slots_known_by_address", "bits depend on where slots lie"),
        ("accepted_counts_known_by_address", "bits depend on the column from which a sequence starts"),
        ("offsets_known_by_address", "permute sequences: G"),
    ],
)
def test_a_kernel_that_knows_a_table_by_its_address_is_found_out(name: str, text: str) -> None:
    (fault,) = (fault for fault in load("kda_step")[0] if fault.name == name)
    record = run_case(OPERATION, wrap_function(fault.function, OPERATION), case_of(), CPU)
    assert record.verdict is Verdict.METAMORPHIC
    assert text in record.text


def test_a_promise_of_batch_invariance_is_held_in_bits() -> None:
    def placed(**a: Any) -> Any:
        out, pool = step_twin(a)
        # one roundoff more where the first sequence has three tokens
        return out * (1 + 2.0**-23 * (int(a["cu_seqlens"][1]) == 3)), pool

    invariant = kernel(contract=lambda case: single(case, batch_invariant=True))(lambda **a: placed(**a))
    record = run_case(OPERATION, wrap_function(invariant, OPERATION), case_of(), CPU)
    assert (record.verdict, record.text) == (Verdict.METAMORPHIC, "bits depend on the order of the sequences")
    assert verdict(placed, case_of())[0] is Verdict.PASS


def test_a_step_from_the_next_column_is_the_same_step() -> None:
    case = case_of(padding=4, seq_lens=[4, 2, 3, 1])
    arguments = OPERATION.inputs(case, CPU).arguments
    turned, table = next_columns(arguments), table_of(case)
    assert turned["num_accepted"].tolist() == [2, 3, 4, 1]
    starts = [row[count - 1] for row, count in zip(turned["slot_table"].tolist(), [2, 3, 4, 1], strict=True)]
    assert starts == table.starts
    out, pool = expected(arguments)
    turned_out, turned_pool = expected(turned)
    assert torch.equal(out, turned_out)
    # the second token of the first sequence leaves its state where the first one did, which started from there
    first, second = table.rows[0][:2]
    assert torch.equal(pool[second], turned_pool[first])
    assert not torch.equal(pool[first], turned_pool[first])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["bounded", "softplus", "log"])
def test_a_state_in_the_format_of_the_pool_is_found_among_operands_of_any(dtype: str, gate: str) -> None:
    case = case_of("fading", dtype, state_dtype="bfloat16", seq_lens=[9, 0, 3, 12], columns=12, gate=gate)

    def carried(promises: Callable[[Case], Contract]) -> Record:
        def step(**a: Any) -> Any:
            return step_twin(a, carry=lambda state: state.to(a["state_pool"].dtype).float())

        return run_case(OPERATION, wrap_function(kernel(contract=promises)(step), OPERATION), case, CPU)

    unsaid = carried(OPERATION.default_contract)
    assert unsaid.verdict is Verdict.NUMERIC
    bias = next(gate for gate in unsaid.gates if gate.gate == "G6 bias state_pool")
    assert bias.ratio > 3
    assert "lean away from zero" in bias.text
    # not a state that decays, but a state that is said to be rounded
    assert carried(lambda one: OPERATION.default_contract(one).promising(state="bf16")).verdict is Verdict.PASS


def test_the_smoke_cases_tell_a_state_from_its_pool_in_each_dtype() -> None:
    for dtypes in [DTYPES, *((dtype,) for dtype in DTYPES)]:
        cases = OPERATION.cases(CaseRequest(tier="smoke", seed=0, dtypes=dtypes))
        telling = [case for case in cases if case.family == "fading" and case.sizes["state_dtype"] == "bfloat16"]
        assert max(max(case.sizes["seq_lens"]) for case in telling) >= 9
    assert {case.dtype for case in smoke() if case.family == "fading"} == {"float32", "bfloat16"}


def test_moved_slots_hold_what_they_held() -> None:
    arguments = OPERATION.inputs(case_of(padding=2, state_layout="VK"), CPU).arguments
    pool, elsewhere = arguments["state_pool"], moved(arguments)
    start = table_of(case_of(padding=2, state_layout="VK")).starts[0]
    assert torch.equal(elsewhere["state_pool"][(start + 1) % len(pool)], pool[start])
    assert bool(torch.isfinite(elsewhere["state_pool"]).all())
    assert torch.equal(elsewhere["slot_table"] < 0, arguments["slot_table"] < 0)


def test_a_null_kernel_leaves_the_pool_alone_and_passes_nothing() -> None:
    for case in smoke():
        for null in NULL_KERNELS:
            record = run_case(OPERATION, null_kernel(null, OPERATION, case), case, CPU)
            if not case.needs_device:
                assert record.verdict in (Verdict.NUMERIC, Verdict.NONFINITE, Verdict.NONDETERMINISTIC)


def test_the_smoke_cases_hold_every_form() -> None:
    cases = smoke()
    assert {case.family for case in cases} == set(FAMILIES)
    for name in StepForm.__dataclass_fields__:
        assert len({case.sizes[name] for case in cases}) >= 2, name
    accepted = {count for case in cases for count in table_of(case).accepted or ()}
    assert {1, 2, 3, 4} <= accepted


def test_completing_adds_what_was_written_and_leaves_all_else() -> None:
    pool = torch.zeros(2)

    def bound(answer: Any) -> Any:
        return completing(lambda arguments: lambda: answer, ("out", "pool"), ("pool",))({"pool": pool})()

    out = torch.ones(3)
    assert bound(out) == (out, pool)
    assert bound((out,)) == (out, pool)
    assert bound((out, pool)) == (out, pool)
    assert bound("nothing") == "nothing"
    assert bound((out, pool, out)) == (out, pool, out)

    def plain(arguments: dict[str, Any]) -> Callable[[], Any]:
        return lambda: out

    assert completing(plain, ("out",), ()) is plain
    assert is_argument(pool[:], pool)
    assert not is_argument(pool.clone(), pool)
    assert not is_argument(pool[:1], pool)


def test_arguments_are_put_back_and_writes_beside_them_are_seen() -> None:
    ledger = Ledger()
    view = ledger.guarded_view("pool", torch.ones(3, 2), CPU, lambda buffer: buffer[:, 1:3], width=5)
    arguments = {"pool": view}
    with put_back(arguments, ("pool",)):
        view.fill_(7.0)
        assert ledger.written_beside(("pool",), arguments) == []
    assert torch.equal(view, torch.ones(3, 2))
    assert ledger.written() == []
    torch.as_strided(view, (1,), (1,), view.storage_offset() + 2).fill_(0.0)
    assert ledger.written_beside(("pool",), arguments) == ["pool"]
