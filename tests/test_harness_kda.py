"""The gates of the gated delta rule: what trips each of them, and what must not; its cases and its questions."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import in_dtype
from torch import Tensor

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.faults import load
from assay.harness.faults._kda_twin import kda_twin, token_step
from assay.harness.faults._kda_variants import single, subtracting_step
from assay.harness.kernels import wrap_function
from assay.harness.operation import CaseRequest, Inputs, Judged
from assay.harness.operations import kda as judged_kda
from assay.harness.operations._kda_cases import Form
from assay.harness.operations._kda_gates import NAMES, KdaOracle, judge_kda
from assay.harness.operations._kda_inputs import FAMILIES, TOKENS, drawn_tokens
from assay.harness.operations._kda_recurrence import kda_recurrence, sites_of
from assay.harness.operations.kda import OPERATION, checkpoints_of, judged_heads
from assay.harness.plan import DTYPES
from assay.harness.plugin import kernel
from assay.harness.record import Verdict
from assay.harness.replays import _change_contents as change_contents
from assay.harness.runner import run_case
from assay.harness.shrink import shrink
from assay.harness.snippet import snippet
from assay.reference.kda import kda as reference

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_heads": 1, "num_v_heads": 2, "head_dim_k": 8, "head_dim_v": 12, "scale": 0.25}
PLAIN = {name: Form.__dataclass_fields__[name].default for name in Form.__dataclass_fields__}


def case_of(family: str = "diffuse", dtype: str = "float32", **sizes: Any) -> Case:
    lens = {"seq_lens": [5, 0, 9, 17], "checkpoints": "some"}
    return Case(op="kda", family=family, dtype=dtype, seed=3, sizes=SMALL | PLAIN | lens | sizes)


def smoke() -> list[Case]:
    return OPERATION.cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))


def held(case: Case) -> tuple[KdaOracle, Contract, Inputs]:
    inputs = OPERATION.inputs(case, CPU)
    return OPERATION.oracle(case, inputs.arguments), OPERATION.default_contract(case), inputs


def exact_answer(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, in the dtypes of a kernel."""
    given = {name: value for name, value in arguments.items() if name not in OPERATION.optional_arguments}
    out, *states = reference(**in_dtype(given, torch.float64))
    final, kept = (state.to(arguments["state_dtype"]) for state in states)
    return out.to(arguments["q"].dtype), final, kept


def failed(judged: Judged) -> list[str]:
    return [gate.gate for gate in judged.gates if not gate.passed]


def judged(case: Case, change: Callable[[tuple[Tensor, ...]], object] = lambda answer: None) -> list[str]:
    """Gates that the reference's answer fails after a change."""
    oracle, contract, inputs = held(case)
    answer = tuple(one.clone() for one in exact_answer(case, inputs.arguments))
    change(answer)
    return failed(judge_kda(oracle, answer, contract))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"gate": "softplus", "initial": False, "checkpoints": "none"},
        {"gate": "log", "beta_is_logits": False, "qk_l2norm": False, "state_layout": "VK"},
        {"num_heads": 2, "num_v_heads": 6, "amplitude": False, "bound": 1.5, "layout": "projection"},
    ],
)
def test_the_recurrence_without_noise_is_the_oracle(sizes: dict[str, Any]) -> None:
    case = case_of(**sizes)
    oracle, _, inputs = held(case)
    found = kda_recurrence(oracle.tokens, lambda site, value: value, 1)
    arguments = inputs.arguments | {"state_dtype": torch.float64}
    arguments |= {name: arguments[name].double() for name in TOKENS}
    for name, expected in zip(NAMES, exact_answer(case, arguments), strict=True):
        end = oracle.tokens.bounds[-1] if name == "out" else len(expected)
        torch.testing.assert_close(found[name][0], expected[:end], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "poisoned"])
def test_the_exact_answer_passes(family: str) -> None:
    gate = "log" if family in ("forgetting", "exact-one-hot") else "bounded"
    own: dict[str, Any] = {"beta_is_logits": False, "qk_l2norm": False} if family == "exact-one-hot" else {}
    assert judged(case_of(family, gate=gate, **own)) == []


def put(which: int, place: tuple[int, ...], value: float) -> Callable[[tuple[Tensor, ...]], None]:
    def change(answer: tuple[Tensor, ...]) -> None:
        answer[which][place] = value

    return change


def test_each_gate_has_what_trips_it() -> None:
    case = case_of()
    assert "G1 out" in judged(case, put(0, (3, 1, 2), math.nan))
    assert "G1 final state" in judged(case, put(1, (2, 0, 1, 1), math.inf))
    assert judged(case, put(0, (31, 0, 0), 1e-30)) == ["G3 rows of no sequence"]
    assert "G4 envelope out" in judged(case, put(0, (3, 1, 2), 9.0))
    assert "G4 envelope checkpoints" in judged(case, put(2, (0, 1, 2, 3), 9.0))
    # the second sequence has no tokens, and the fourth checkpoint is before any
    assert "G3 final state handed on" in judged(case, lambda answer: answer[1][1].mul_(1 + 2.0**-20))
    assert "G3 checkpoints handed on" in judged(case, lambda answer: answer[2][3].mul_(1 + 2.0**-20))
    assert checkpoints_of(case) == [(3, 8), (3, 17), (3, 17), (1, 0), (3, 17), (3, 8)]


# where an inverse slips most, all columns of a row err alike: its root mean square says less
@pytest.mark.parametrize(("family", "size"), [("diffuse", 4.0), ("u01", 5.0)])
def test_an_error_of_every_element_that_no_envelope_sees_is_seen_by_rows(family: str, size: float) -> None:
    oracle, contract, inputs = held(case_of(family, seq_lens=[40], num_v_heads=1, num_heads=1, head_dim_v=64))
    answer, contract = exact_answer(case_of(), inputs.arguments), contract.promising(p="bf16")
    assert failed(judge_kda(oracle, answer, contract)) == []
    spread = oracle.spreads(contract)["out"]
    # so many standard deviations everywhere, one way and the other
    sign = torch.where(torch.arange(64) % 2 == 0, size, -size)
    answer[0][:40] = (spread.exact + sign * (spread.sigma.square() + (2.0**-24 * spread.exact).square()).sqrt()).float()
    assert {"G5 row rms out", "G5 median rms out"} <= set(failed(judge_kda(oracle, answer, contract)))
    assert "G4 envelope out" not in failed(judge_kda(oracle, answer, contract))


def test_integers_are_compared_bit_for_bit_and_last_bits_only_where_a_norm_makes_them() -> None:
    own: dict[str, Any] = {"gate": "log", "beta_is_logits": False, "qk_l2norm": False}
    exact, near = case_of("exact-one-hot", **own), case_of("near-one-hot")
    assert judged(exact, lambda answer: answer[1][0, 0].add_(2.0**-18)) == ["G3 exact final state"]
    assert "G3 exact final state" not in judged(near, lambda answer: answer[1][0, 0].add_(2.0**-18))
    assert "G3 exact final state" in judged(near, lambda answer: answer[1][0, 0].add_(2.0**-5))
    assert "G3 exact out" in judged(near, lambda answer: answer[0][0].add_(0.25))


def test_what_follows_from_nan_is_nan_and_all_else_is_judged() -> None:
    case = case_of("poisoned", seq_lens=[5, 9, 0, 17], checkpoints="some")
    assert judged(case) == []
    for which, place in ((0, (6, 0, 0)), (1, (1, 0, 0, 0)), (2, (0, 0, 0, 0))):
        seen = judged(case, put(which, place, 0.0))
        assert [gate for gate in seen if gate.endswith("of NaN")] == [f"G1 {NAMES[which]} of NaN"]
    assert "G1 out" in judged(case, put(0, (2, 0, 0), math.nan))


def test_a_contract_says_where_a_kernel_may_round() -> None:
    contract = Contract(p="tf32", out="fp16", state="bf16", logits="fp16", state_store="fp32")
    sites = sites_of(contract, "fp16")
    assert (sites["key"], sites["inverse"], sites["gate"], sites["state"], sites["sum"]) == (
        "tf32",
        "tf32",
        "fp16",
        "bf16",
        "fp32",
    )
    # values are stored as the operands are, or finer: nothing is lost on their way in
    assert sites["value"] == "fp64"
    assert sites_of(contract, "fp32")["value"] == "tf32"
    assert sites_of(contract.promising(inputs="bf16"), "fp32")["value"] == "bf16"


def test_a_product_may_be_subtracted_from_the_value_channel_by_channel() -> None:
    # the partial sums of many channels are as large as the value, and states far smaller
    wide: dict[str, Any] = {"head_dim_k": 128, "head_dim_v": 128, "num_v_heads": 1, "scale": 0.7}
    case = case_of("slow", seq_lens=[16] * 3, amplitude=False, **wide)
    oracle, contract, inputs = held(case)
    answer = kda_twin(inputs.arguments, step=subtracting_step)
    gates = {gate.gate: gate.ratio for gate in judge_kda(oracle, answer, contract).gates}
    assert max(gates.values()) < 0.5
    assert gates["G4 envelope final state"] > 0.3
    # an accumulator of fewer bits is found out
    assert "G4 envelope final state" in failed(judge_kda(oracle, summed_in_half(inputs.arguments), contract))


def summed_in_half(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The same with an accumulator of float16."""

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = subtracting_step(q, k, v.half(), g, beta, state)
        return out.float(), after.float()

    return kda_twin(arguments, step=step)


def test_a_state_in_bfloat16_fails_unless_it_is_said() -> None:
    case = next(case for case in smoke() if case.family == "hold" and case.sizes["seq_lens"] == [350])

    def rounded(**arguments: Any) -> Any:
        return kda_twin(arguments, carry=lambda state: state.bfloat16().float())

    unsaid = kernel(contract=single)(lambda **a: rounded(**a))
    said = kernel(contract=lambda one: single(one, state="bf16"))(lambda **a: rounded(**a))
    assert run_case(OPERATION, wrap_function(unsaid, OPERATION), case, CPU).verdict is Verdict.NUMERIC
    assert run_case(OPERATION, wrap_function(said, OPERATION), case, CPU).verdict is Verdict.PASS


def other_order(**arguments: Any) -> Any:
    """Chunks for the first sequence, tokens for others: right, but its bits depend on the order."""
    first = {int(arguments["cu_seqlens"][1])}

    def step(*tokens: Tensor) -> tuple[Tensor, Tensor]:
        from assay.harness.faults._kda_twin import chunk_step

        return (chunk_step if tokens[0].shape[1] in first else token_step)(*tokens)

    return kda_twin(arguments, chunk=1 << 20, step=step)


def wrong_when(wrong: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    def answer(**arguments: Any) -> Any:
        found = kda_twin(arguments)
        if wrong(arguments):
            found[0].mul_(1.5)
        return found

    return answer


def zeros(state: Tensor | None) -> bool:
    return state is not None and not bool(state.any())


def changed(v: Tensor) -> bool:
    return v.shape == FIRST.shape and not torch.equal(v, FIRST)


QUESTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "order": (other_order, {"batch_invariant": True}, "bits depend on the order of the sequences"),
    "reversed": (wrong_when(lambda a: int(a["cu_seqlens"][1]) == 17), {}, "permute sequences: G"),
    "split": (wrong_when(lambda a: len(a["q"]) < 30), {}, "split sequences: G"),
    "zeros": (wrong_when(lambda a: zeros(a["initial_state"])), {}, "zero state: G"),
    "later": (wrong_when(lambda a: changed(a["v"][:31])), {}, "depends on tokens that follow"),
}
FIRST = OPERATION.inputs(case_of(initial=False), CPU).arguments["v"][:31].clone()


@pytest.mark.parametrize("name", QUESTIONS)
def test_another_form_of_the_question_gets_another_answer(name: str) -> None:
    function, promises, text = QUESTIONS[name]
    case = case_of(initial=False)
    wrong = kernel(contract=lambda one: single(one, **promises))(lambda **a: function(**a))
    record = run_case(OPERATION, wrap_function(wrong, OPERATION), case, CPU)
    assert record.verdict is Verdict.METAMORPHIC
    assert text in record.text


def test_tokens_of_a_projection_are_views_between_columns_of_nan() -> None:
    inputs = OPERATION.inputs(case_of(layout="projection", dtype="float16"), CPU)
    a = inputs.arguments
    assert len({a[name].untyped_storage().data_ptr() for name in TOKENS}) == 1
    assert {a[name].stride(0) for name in TOKENS} == {a["q"].stride(0)}
    buffer = inputs.ledger.buffers["projection"]
    assert a["q"].stride(0) > sum(a[name][0].numel() for name in TOKENS)
    given = sum(int(a[name][:31].numel()) for name in TOKENS)
    # all of the buffer but the tokens: guard bands, columns beside, rows past the last sequence
    assert int((~buffer.isnan()).sum()) == given


def test_states_lie_as_the_case_says_and_are_seen_keys_first() -> None:
    drawn = {
        layout: OPERATION.inputs(case_of(state_layout=layout, state_dtype="bfloat16"), CPU).arguments
        for layout in ("KV", "VK")
    }
    kv, vk = (drawn[layout]["initial_state"] for layout in ("KV", "VK"))
    assert torch.equal(kv, vk)
    assert kv.is_contiguous()
    assert vk.mT.is_contiguous()
    assert drawn["KV"]["state_dtype"] is torch.bfloat16


def test_families_look_as_they_say() -> None:
    runs, alternating = drawn_tokens(case_of("runs", seq_lens=[40])), drawn_tokens(case_of("alternating"))
    assert torch.equal(runs["k"][0], runs["k"][15])
    assert not torch.equal(runs["k"][15], runs["k"][16])
    assert torch.equal(alternating["k"][4], -alternating["k"][5])
    tiny = drawn_tokens(case_of("tiny", seq_lens=[40]))
    assert bool((tiny["k"] == 0).flatten(1).all(1).any())
    case = case_of("converged", seq_lens=[9], num_v_heads=1)
    found = drawn_tokens(case)
    keys = torch.nn.functional.normalize(found["k"][:, 0], dim=-1)
    left = found["v"][:, 0] - keys @ found["initial"][0, 0]
    assert float(left.abs().max()) < 0.01 * float(found["v"].abs().max())


def test_the_smoke_cases_hold_every_family_and_every_form() -> None:
    cases = smoke()
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.dtype for case in cases} == set(DTYPES)
    for name in ("gate", "amplitude", "beta_is_logits", "qk_l2norm", "initial", "checkpoints", "state_dtype"):
        assert len({case.sizes[name] for case in cases}) >= 2, name
    for name in ("state_layout", "offsets", "layout", "tail", "bound"):
        assert len({case.sizes[name] for case in cases}) >= 2, name
    lens = {length for case in cases for length in case.sizes["seq_lens"]}
    assert {0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129} <= lens
    assert any(sum(case.sizes["seq_lens"]) == 0 for case in cases)
    assert any(case.sizes["num_heads"] < case.sizes["num_v_heads"] for case in cases)


def test_impossible_cases_are_refused() -> None:
    for case, text in (
        (case_of("usual"), "family must be one of diffuse, slow"),
        (case_of(num_heads=2, num_v_heads=3), "num_v_heads must be a multiple of num_heads 2, got 3"),
    ):
        record = run_case(OPERATION, OPERATION.kernels()[0], case, CPU)
        assert record.verdict is Verdict.INVALID_CASE
        assert text in record.text


def test_heads_are_sampled_where_states_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(num_heads=1, num_v_heads=8)
    assert judged_heads(case, CPU) == list(range(8))
    monkeypatch.setitem(judged_kda.STATE_BYTES, "cpu", 8 * 33 * 4 * 8 * 12 * 3)
    heads = judged_heads(case, CPU)
    assert len(heads) == 3
    assert heads[0] == 0
    assert heads[-1] == 7
    oracle, contract, inputs = held(case)
    answer = exact_answer(case, inputs.arguments)
    assert failed(judge_kda(oracle, answer, contract)) == []
    answer[0][4, 7, 3] = 9.0
    gates = {gate.gate: gate for gate in judge_kda(oracle, answer, contract).gates}
    where = gates["G4 envelope out"].where
    assert where is not None
    assert (where.token, where.head, where.dim) == (4, 7, 3)


def test_kernels_say_what_they_serve_and_promise() -> None:
    kernels = {one.name: one for one in OPERATION.kernels()}
    assert list(kernels) == [f"kda[{name}]" for name in ("torch", "triton", "flash", "fla", "flashkda")]
    assert [one.name for one in kernels.values() if one.by_name] == ["kda[fla]", "kda[flashkda]"]
    half, single_case = case_of(dtype="bfloat16"), case_of()
    assert kernels["kda[torch]"].contract(half).p == "fp32"
    assert kernels["kda[triton]"].contract(half).p == "tf32"
    assert kernels["kda[triton]"].contract(single_case).p == "fp32"
    assert kernels["kda[flash]"].contract(half).logits == "fp16"
    assert kernels["kda[flashkda]"].contract(half).state == "bf16"
    assert kernels["kda[flash]"].unsupported(single_case, CPU) is not None
    many = replace(single_case, sizes=single_case.sizes | {"seq_lens": [65]})
    assert "needs a device" in str(kernels["kda[triton]"].unsupported(many, CPU))
    assert "the interpreter computes bfloat16 wrongly" in str(kernels["kda[triton]"].unsupported(half, CPU))


def test_a_kernel_that_knows_offsets_by_their_address_is_found_out() -> None:
    (fault,) = (one for one in load("kda")[0] if one.name == "offsets_known_by_address")
    record = run_case(OPERATION, wrap_function(fault.function, OPERATION), case_of(), CPU)
    assert record.verdict is Verdict.METAMORPHIC
    assert [gate.gate for gate in record.gates if not gate.passed] == ["G8 permute sequences"]


def test_a_fault_shrinks_and_its_program_shows_it(tmp_path: Path) -> None:
    case = case_of(seq_lens=[20, 0, 33])
    (fault,) = (one for one in load("kda")[0] if one.name == "output_before_the_write")
    wrong = wrap_function(fault.function, OPERATION)
    record = run_case(OPERATION, wrong, case, CPU)
    assert record.verdict is Verdict.NUMERIC
    small = shrink(case, record.verdict, lambda one: run_case(OPERATION, wrong, one, CPU), max_runs=50)
    assert sum(small.sizes["seq_lens"]) < 5
    assert small.sizes["head_dim_k"] * small.sizes["head_dim_v"] < 8 * 12
    place = next(gate.where for gate in run_case(OPERATION, wrong, small, CPU).gates if not gate.passed)
    program = tmp_path / "show.py"
    program.write_text(snippet(OPERATION, small, "assay.harness.faults.kda:output_before_the_write", place))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert "worst: out" in done.stdout


def test_other_contents_let_no_state_grow() -> None:
    case = case_of(gate="log", beta_is_logits=False)
    outline, inputs = OPERATION.outline(case), OPERATION.inputs(case, CPU)
    assert outline.signed == ("g", "beta")
    assert OPERATION.outline(case_of()).signed == ()
    before = {name: inputs.arguments[name].clone() for name in TOKENS}
    change_contents(inputs.arguments, outline)
    for name, factor in (("g", 0.5), ("beta", 0.5), ("k", -0.5)):
        assert torch.equal(inputs.arguments[name][:31], factor * before[name][:31])
