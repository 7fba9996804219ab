"""Planted faults are found for their reason, correct variants are not rejected, and the catalogue is accounted for.

They run on smoke cases of seed 0, the plan of ``assay check``: all in bfloat16, which every kind of fault but those of
one dtype shows in, and the first of each family in float32 and float16. To stay within a minute a fault stops at its
first kill for the right reason, the cheapest families first; a survivor and a variant see every case.
"""

import importlib
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.harness import faults, operations
from assay.harness.case import Case
from assay.harness.faults import Fault, Variant, load
from assay.harness.faults._chunked import attention_twin, mla_prefill_twin
from assay.harness.kernels import find_kernels, wrap_function
from assay.harness.mutation import mutate
from assay.harness.mutation.mutate import FaultResult, KillMatrix, Outcome, Status, VariantResult, kill_matrix, render
from assay.harness.operation import CaseRequest
from assay.harness.plan import DTYPES
from assay.harness.poison import same_bits
from assay.harness.record import Verdict
from assay.harness.runner import run_case

CPU = torch.device("cpu")
OPS = ("attention", "mla_prefill")
# by family of the catalogue, which files dense attention under mla_prefill
FAMILIES = {
    "mla_prefill": OPS,
    "snapkv_h2o": ("token_scores", "token_selection"),
    "kda": ("kda", "kda_step"),
    "masked_mha": ("masked_mha", "topk_mask", "indexer"),
    "sparse_mla": ("sparse_mla",),
}
EVERY_OP = tuple(op for ops in FAMILIES.values() for op in ops)
TWINS = {"attention": attention_twin, "mla_prefill": mla_prefill_twin}

SURVIVORS: dict[tuple[str, str], str] = {}
# families of the specification's list that speak of these two operations
SPEC_NAMES = {f"F{number}" for number in (*range(1, 12), *range(23, 27), 31, 32)}


def smoke_cases(op: str) -> list[Case]:
    return operations.load(op).cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))


# what cases of the gated delta rule cost beyond what they show here: others kill the same faults
COSTLY = ([129, 3], [127, 0, 128], [63, 1, 64, 0], [0, 31, 33, 0], [350], [260, 5], [16, 0, 3])


def subset(cases: list[Case]) -> list[Case]:
    if cases[0].op == "kda":
        return [case for case in cases if not case.needs_device and case.sizes["seq_lens"] not in COSTLY]
    if cases[0].op not in (*OPS, "sparse_mla", "masked_mha"):
        # few enough, and of one dtype each
        return cases
    first = {(case.family, case.dtype): case.id for case in reversed(cases)}
    # a step without any entry is in the dtype of interpreted kernels
    telling = {case.id for case in cases if case.sizes.get("holes") == "all"} | set(first.values())
    return [case for case in cases if case.dtype == "bfloat16" or case.id in telling]


@pytest.fixture(scope="module")
def matrices() -> dict[str, KillMatrix]:
    return {op: kill_matrix(op, subset(smoke_cases(op)), CPU, stop_when_killed=True) for op in EVERY_OP}


def entries(kind: int, known: dict[tuple[str, str], str]) -> list[Any]:
    """All faults (0) or variants (1), those of ``known`` as strict expected failures."""
    pairs = [(op, entry.name) for op in EVERY_OP for entry in load(op)[kind]]
    marks = {pair: pytest.mark.xfail(strict=True, reason=reason) for pair, reason in known.items()}
    return [pytest.param(*pair, marks=marks.get(pair, ()), id=f"{pair[0]}-{pair[1]}") for pair in pairs]


@pytest.mark.parametrize(("op", "name"), entries(0, SURVIVORS))
def test_fault_is_killed_for_its_reason(op: str, name: str, matrices: dict[str, KillMatrix]) -> None:
    (result,) = (result for result in matrices[op].faults if result.fault.name == name)
    seen = Counter(outcome.verdict for outcome in result.judged)
    assert result.status is Status.KILLED, f"{result.status}: {dict(seen)}, nearest {result.nearest}"


@pytest.mark.parametrize(("op", "name"), entries(1, {}))
def test_variant_passes(op: str, name: str, matrices: dict[str, KillMatrix]) -> None:
    (result,) = (result for result in matrices[op].variants if result.variant.name == name)
    assert result.judged, "no case was judged"
    assert [(one.case_id, one.gate, one.ratio) for one in result.rejections] == []


@pytest.mark.parametrize("op", EVERY_OP)
def test_known_survivors_exist(op: str) -> None:
    assert {name for known, name in SURVIVORS if known == op} <= {fault.name for fault in load(op)[0]}


def case_of(op: str, family: str, dtype: str = "bfloat16", **changes: Any) -> Case:
    """The first smoke case of a family, with other sizes."""
    case = next(case for case in smoke_cases(op) if case.family == family and case.dtype == dtype)
    return replace(case, sizes=case.sizes | changes)


# the smallest cases that kill faults of long requests and passes
TELLING_CASES = {
    ("attention", "second_query_tile_sees_one_more"): case_of(
        "attention", "diffuse", query_lens=[70], key_lens=[70], causal=True
    ),
    ("mla_prefill", "second_query_tile_sees_one_more"): case_of(
        "mla_prefill", "diffuse", query_lens=[70], context_lens=[90]
    ),
    ("mla_prefill", "denominator_in_input_dtype"): case_of(
        "mla_prefill", "exact-uniform", query_lens=[1], context_lens=[304], history_chunk_size=4096
    ),
    ("mla_prefill", "output_accumulated_in_input_dtype"): case_of(
        "mla_prefill", "ramp-v", query_lens=[8], context_lens=[700], history_chunk_size=4096
    ),
}


@pytest.mark.parametrize(("op", "name"), TELLING_CASES, ids=lambda value: value)
def test_fault_is_killed_by_its_telling_case(op: str, name: str) -> None:
    operation, case = operations.load(op), TELLING_CASES[op, name]
    (fault,) = (fault for fault in load(op)[0] if fault.name == name)
    (clean,) = (variant for variant in load(op)[1] if variant.name == "clean")
    assert run_case(operation, wrap_function(clean.function, operation), case, CPU).verdict is Verdict.PASS
    assert run_case(operation, wrap_function(fault.function, operation), case, CPU).verdict in fault.expects


def arguments_of(op: str) -> dict[str, Any]:
    """Inputs of a causal batch with history, float32, contiguous."""
    lens = {"attention": {"key_lens": [9, 70], "causal": True, "layout": "packed"}}
    lens["mla_prefill"] = {"context_lens": [9, 70], "layout": "split"}
    case = case_of(op, "diffuse", "float32", query_lens=[3, 20], **lens[op])
    return operations.load(op).inputs(case, CPU).arguments


def answers(op: str, name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` of the clean twin and of a fault."""
    clean, _ = TWINS[op](arguments)
    (fault,) = (fault for fault in load(op)[0] if fault.name == name)
    wrong, _ = fault.function(**arguments)
    return clean, wrong


@pytest.mark.parametrize("op", OPS)
def test_a_visible_nan_is_swallowed(op: str) -> None:
    arguments = arguments_of(op)
    key = ("k", 0) if op == "attention" else ("kv_c", int(arguments["slot_table"][arguments["request_rows"][0], 0]))
    arguments[key[0]][key[1]] = torch.nan
    clean, wrong = answers(op, "nan_swallowed", arguments)
    assert clean[:3].isnan().all()
    assert not wrong.isnan().any()


@pytest.mark.parametrize("op", OPS)
def test_a_held_result_changes_with_the_next_call(op: str) -> None:
    arguments = arguments_of(op)
    (fault,) = (fault for fault in load(op)[0] if fault.name == "output_is_a_workspace")
    held, _ = fault.function(**arguments)
    kept = held.clone()
    fault.function(**{**arguments, "q": -arguments["q"]})
    assert not torch.equal(held, kept)


def test_a_token_in_slot_0_is_lost() -> None:
    arguments = arguments_of("mla_prefill")
    row = int(arguments["request_rows"][1])
    slot = int(arguments["slot_table"][row, 5])
    for name in ("kv_c", "k_pe"):
        arguments[name][0] = arguments[name][slot]
    arguments["slot_table"][row, 5] = 0
    clean, wrong = answers("mla_prefill", "slot_0_taken_for_padding", arguments)
    assert torch.isfinite(clean).all()
    assert not torch.allclose(clean, wrong, atol=1e-3)


@pytest.mark.parametrize("op", OPS)
def test_clean_twin_agrees_with_the_oracle(op: str) -> None:
    arguments = arguments_of(op)
    oracle = getattr(importlib.import_module(f"assay.reference.{op}"), op)
    wide = {
        key: value.double() if key in ("q", "k", "v", "kv_c", "k_pe", "kv_b_proj") else value
        for key, value in arguments.items()
        if key != "history_chunk_size"
    }
    out, lse = TWINS[op](arguments)
    expected, expected_lse = oracle(**wide)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize("op", EVERY_OP)
def test_every_fault_and_variant_is_found_as_a_stranger_finds_it(op: str) -> None:
    operation = operations.load(op)
    found, right = load(op)
    everything: list[Fault | Variant] = [*found, *right]
    names = Counter(entry.name for entry in everything)
    assert [name for name, count in names.items() if count > 1] == []
    for entry in everything:
        (kernel,) = find_kernels(operation, f"assay.harness.faults.{op}:{entry.name}")
        assert kernel.name == entry.name
        assert entry.op == op
        assert entry.function.__doc__
    assert len(right) >= (6 if op in OPS else 3)


def test_every_fault_has_an_origin() -> None:
    assert [fault.name for op in EVERY_OP for fault in load(op)[0] if not (fault.rows or fault.source)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_the_catalogue_is_planted_or_left_out_with_a_reason(family: str) -> None:
    rows = {row["id"] for row in faults.catalogue() if row["family"] == family}
    planted = {op: {row for fault in load(op)[0] for row in fault.rows if row.startswith("FC-")} for op in EVERY_OP}
    left_out = {op: {entry.row: entry.reason for entry in faults.not_applicable(op)} for op in EVERY_OP}
    covered = set().union(*(planted[op] for op in FAMILIES[family]))
    excused = set().union(*(left_out[op] for op in FAMILIES[family]))
    assert rows
    assert excused <= rows <= covered | excused
    # faults of any attention are filed under mla_prefill, wherever they are planted
    assert covered <= {row["id"] for row in faults.catalogue()}
    for op in FAMILIES[family]:
        assert planted[op] & set(left_out[op]) == set()
        assert all(left_out[op].values())
        # what is said to be planted elsewhere is
        elsewhere = {row for row, reason in left_out[op].items() if reason.endswith("where it is planted")}
        assert elsewhere <= covered


def test_each_name_of_the_specification_is_planted() -> None:
    covered = {
        row for op in OPS for fault in load(op)[0] for row in fault.rows if row.startswith("F") and "-" not in row
    }
    assert covered == SPEC_NAMES


def test_rows_of_the_catalogue_are_complete() -> None:
    path = Path(faults.__file__).parent / "catalogue.json"
    rows = json.loads(path.read_text())
    assert len({row["id"] for row in rows}) == len(rows)
    assert [row for row in rows if not all(row[key] for key in ("id", "family", "trigger", "right", "mutant"))] == []


def test_a_fault_must_expect_a_failure() -> None:
    with pytest.raises(ValueError, match="expects must be failing verdicts, got none"):
        faults.planted("attention")
    with pytest.raises(ValueError, match="expects must be failing verdicts, got PASS"):
        faults.planted("attention", Verdict.PASS)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="op must be an operation with planted faults, got 'conv'"):
        load("conv")
    with pytest.raises(AttributeError, match="no fault or variant is called 'absent'"):
        getattr(importlib.import_module("assay.harness.faults.attention"), "absent")  # noqa: B009


def outcome(verdict: Verdict, case_id: str = "a", **values: Any) -> Outcome:
    plain: dict[str, Any] = {
        "family": "diffuse",
        "dtype": "float32",
        "gate": "",
        "ratio": 0.0,
        "text": "",
        "seconds": 0.0,
    }
    return Outcome(case_id=case_id, verdict=verdict, **(plain | values))


def fault_result(*outcomes: Outcome, sound: frozenset[str] = frozenset("a")) -> FaultResult:
    fault = Fault(name="planted", op="attention", function=print, expects=frozenset({Verdict.NONFINITE}))
    return FaultResult(fault=fault, outcomes=outcomes, sound=sound)


def variant_result(*outcomes: Outcome) -> VariantResult:
    return VariantResult(variant=Variant(name="right", op="attention", function=print), outcomes=outcomes)


def matrix_of(*results: FaultResult, variant: VariantResult) -> KillMatrix:
    return KillMatrix(op="attention", faults=results, variants=(variant,), not_applicable=(), cases=1, seconds=1.0)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([], Status.NOT_JUDGED),
        ([Verdict.UNSUPPORTED], Status.NOT_JUDGED),
        ([Verdict.PASS], Status.SURVIVED),
        ([Verdict.PASS, Verdict.NUMERIC], Status.WRONG_REASON),
        ([Verdict.NUMERIC, Verdict.NONFINITE], Status.KILLED),
    ],
)
def test_status_of_a_fault(verdicts: list[Verdict], status: Status) -> None:
    assert fault_result(*map(outcome, verdicts)).status is status


def test_a_case_that_a_variant_fails_proves_no_kill() -> None:
    assert fault_result(outcome(Verdict.NONFINITE, "b"), outcome(Verdict.PASS)).status is Status.SURVIVED


def test_a_matrix_passes_only_without_survivors_and_rejections() -> None:
    killed, survivor = fault_result(outcome(Verdict.NONFINITE)), fault_result(outcome(Verdict.PASS))
    right, rejected = variant_result(outcome(Verdict.PASS)), variant_result(outcome(Verdict.NUMERIC))
    assert matrix_of(killed, variant=right).passed
    assert not matrix_of(killed, survivor, variant=right).passed
    assert not matrix_of(killed, variant=rejected).passed
    assert not matrix_of(killed, variant=variant_result()).passed
    assert not matrix_of(fault_result(), variant=right).passed


def test_survivors_are_shown_first() -> None:
    killed = fault_result(outcome(Verdict.NONFINITE, gate="G1 out", ratio=float("inf")))
    survivor = fault_result(outcome(Verdict.PASS, gate="G4 envelope", ratio=0.5))
    console = Console(width=160, file=io.StringIO())
    console.print(render(matrix_of(killed, survivor, variant=variant_result(outcome(Verdict.PASS)))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("faults that got away") < text.index("kills of cases") < text.index("correct variants")
    assert "G4 envelope 0.5 x, diffuse float32" in text
    assert "1/1 G1" in text
    assert "attention: 2 faults (1 survived, 1 killed), 1 variants (0 rejected), 1 cases" in text


def test_the_cheapest_family_runs_first() -> None:
    def case(family: str, queries: int) -> Case:
        return Case(op="attention", family=family, dtype="float32", seed=0, sizes={"query_lens": [queries], "heads": 2})

    cases = [case("wide", 9), case("wide", 2), case("small", 4), case("small", 3)]
    order = [(case.family, case.sizes["query_lens"]) for case in mutate.cheapest_first(cases)]
    assert order == [("small", [3]), ("small", [4]), ("wide", [2]), ("wide", [9])]


def test_progress_is_told_and_a_foreign_plan_is_refused() -> None:
    told: list[tuple[int, int, str]] = []
    cases = [case for case in smoke_cases("attention") if case.dtype == "bfloat16"][:1]
    matrix = kill_matrix("attention", cases, CPU, progress=lambda *step: told.append(step))
    found, right = load("attention")
    names = [*(entry.name for entry in right), *(entry.name for entry in found)]
    assert told[: len(names)] == [(at, len(names), name) for at, name in enumerate(names)]
    # then each fault is looked at over all cases, which is no judgement of its own
    assert {step[:2] for step in told[len(names) :]} == {(len(names), len(names))}
    assert {step[2] for step in told[len(names) :]} <= {entry.name for entry in found}
    assert {len(result.outcomes) for result in matrix.variants} == {1}
    assert {len(result.outcomes) for result in matrix.faults} == {1}
    with pytest.raises(ValueError, match="cases must hold at least one of mla_prefill, got none among 1"):
        kill_matrix("mla_prefill", cases, CPU)


def test_a_fault_in_company_gets_the_verdict_that_it_gets_alone() -> None:
    operation, case = operations.load("mla_prefill"), smoke_cases("mla_prefill")[1]
    matrix = kill_matrix("mla_prefill", [case], CPU)
    together = {result.fault.name: result.outcomes[0] for result in matrix.faults}
    for fault in load("mla_prefill")[0][::5]:
        # those of a workspace or counter depend on earlier calls
        if fault.function.__module__.endswith(("_mla_memory", "_common_memory")):
            continue
        alone = Outcome.of(run_case(operation, wrap_function(fault.function, operation), case, CPU))
        assert replace(alone, seconds=0.0) == replace(together[fault.name], seconds=0.0)


def test_a_killed_fault_runs_no_further() -> None:
    cases = smoke_cases("attention")[:3]
    matrix = kill_matrix("attention", cases, CPU, stop_when_killed=True)
    for result in matrix.faults:
        # a downgrade is named over all cases
        if result.status is Status.KILLED and result.fault.expects != {Verdict.PRECISION_DOWNGRADE}:
            assert len(result.kills) == 1
            assert result.outcomes[-1] is result.kills[0]
        else:
            assert len(result.outcomes) == 3


def test_faults_of_repeatability_keep_their_reason() -> None:
    # the same seed twice would make this fault right by chance
    arguments = arguments_of("attention")
    (fault,) = (fault for fault in load("attention")[0] if fault.name == "keys_summed_in_order_of_arrival")
    answers = [fault.function(**arguments)[0] for _ in range(4)]
    assert not all(same_bits(answers[0], other) for other in answers[1:])
