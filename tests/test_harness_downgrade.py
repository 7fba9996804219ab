"""A kernel that is right in a lower precision is named; a kernel that is wrong never is, whatever families it meets."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU, Answer, attention_case, operation_of, ranges
from torch import Tensor

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.downgrade import (
    MOST_BIAS,
    NEEDED_FAMILIES,
    STEPS,
    Evidence,
    Fit,
    case_evidence,
    downgraded,
    name_downgrade,
    reassess,
)
from assay.harness.execution import Execution, execute
from assay.harness.families import EXACT_FAMILIES, FAMILIES
from assay.harness.faults import _scores
from assay.harness.faults._chunked import attention_twin
from assay.harness.kernels import wrap_function
from assay.harness.record import Record, Verdict
from assay.harness.runner import Exam, run_case

# longer than the smallest case, so that a dozen keys share the weight in each family but the peaked one
SIZES = {"query_lens": [9, 17, 5], "key_lens": [70, 33, 90], "causal": False}
E4M3_P = "p: declared bf16, fits e4m3"


def cases_of(dtype: str, seed: int = 0) -> list[Case]:
    made = [attention_case(family, dtype, seed=seed + at, **SIZES) for at, family in enumerate(FAMILIES)]
    uniform = {"key_lens": [64, 32, 128]}
    return [replace(case, sizes=case.sizes | uniform) if case.family == "exact-uniform" else case for case in made]


def kernel(
    *,
    weights: Callable[[Tensor], Tensor] | None = None,
    logits: Callable[[Tensor], Tensor] | None = None,
    running: torch.dtype | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
    drop_key: int | None = None,
    out_factor: float = 1.0,
) -> Callable[..., Answer]:
    """Attention in float32 whose weights are rounded to the dtype of the inputs, with one step changed.

    Args:
        weights: Rounds the unnormalised weights that meet the values.
        logits: Rounds the logits.
        running: Dtype of the output between tiles of 16 keys.
        total: Changes the denominator.
        drop_key: Key of each request that is left out.
        out_factor: Of the output.
    """

    def run(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    ) -> Answer:
        outs, lses = [], []
        lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        for queries, keys in zip(ranges(lens[0]), ranges(lens[1]), strict=True):
            own_k, own_v = (tensor[keys].float().repeat_interleave(2, dim=1).transpose(0, 1) for tensor in (k, v))
            z = softmax_scale * q[queries].float().transpose(0, 1) @ own_k.transpose(1, 2)
            if drop_key is not None:
                z[..., drop_key] = -math.inf
            z = z if logits is None else logits(z)
            top = z.amax(-1, keepdim=True)
            p = torch.exp(z - top)
            sums = p.sum(-1, keepdim=True)
            p = p.to(q.dtype).float() if weights is None else weights(p)
            mixed = torch.zeros(*p.shape[:2], v.shape[2])
            for start, stop in itertools.pairwise([*range(0, p.shape[2], 16), p.shape[2]]):
                mixed = mixed + p[..., start:stop] @ own_v[:, start:stop]
                mixed = mixed if running is None else mixed.to(running).float()
            out = out_factor * mixed / (sums if total is None else total(sums))
            outs.append(out.transpose(0, 1).to(q.dtype))
            lses.append((top + torch.log(sums))[..., 0].T)
        return torch.cat(outs), torch.cat(lses)

    return run


def e4m3(weights: Tensor) -> Tensor:
    return weights.to(torch.float8_e4m3fn).float()


def half(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda values: values.to(dtype).float()


def run_of(function: Callable[..., Answer], cases: list[Case]) -> list[Record]:
    """The records of a run, reassessed."""
    operation = operation_of(cases[0])
    candidate = wrap_function(function, operation)
    records = [run_case(operation, candidate, case, CPU) for case in cases]
    return reassess(operation, candidate, cases, records, CPU)


def evidence_of(function: Callable[..., Answer], cases: list[Case]) -> dict[str, list[Evidence]]:
    operation, found = operation_of(cases[0]), {}
    for case in cases:
        exam = Exam(operation, case, CPU)
        execution = execute(operation, wrap_function(function, operation), case, exam.inputs, CPU)
        assert isinstance(execution, Execution)
        found[case.family] = [case_evidence(exam, execution)]
    return found


def downgrades(records: list[Record]) -> set[str]:
    return {record.text.partition(";")[0] for record in records if record.verdict is Verdict.PRECISION_DOWNGRADE}


@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_weights_in_e4m3_are_named(seed: int) -> None:
    records = run_of(kernel(weights=e4m3), cases_of("bfloat16", seed))
    assert downgrades(records) == {E4M3_P}
    # where the exact families pass they pass, and no failure keeps its old name
    assert {record.verdict for record in records} == {Verdict.PASS, Verdict.PRECISION_DOWNGRADE}


@pytest.mark.parametrize(
    ("function", "dtype", "name"),
    [
        (kernel(weights=e4m3), "float16", "p: declared fp16, fits e4m3"),
        (kernel(weights=half(torch.bfloat16)), "float16", "p: declared fp16, fits bf16"),
        (kernel(weights=half(torch.bfloat16)), "float32", "p: declared fp32, fits bf16"),
        (kernel(logits=half(torch.bfloat16)), "bfloat16", "logits: declared fp32, fits bf16"),
        (kernel(logits=half(torch.float16)), "float32", "logits: declared fp32, fits fp16"),
    ],
    ids=["e4m3 weights", "bf16 weights", "bf16 weights of fp32", "bf16 logits", "fp16 logits"],
)
def test_other_downgrades_are_named_by_their_field(function: Callable[..., Answer], dtype: str, name: str) -> None:
    assert downgrades(run_of(function, cases_of(dtype, seed=40))) == {name}


def test_an_accumulator_in_bf16_is_named_or_not_but_never_taken_for_another_field() -> None:
    named = downgrades(run_of(kernel(running=torch.bfloat16), cases_of("float32")))
    assert named <= {"pv_acc: declared fp32, fits bf16", "pv_acc: declared fp32, fits fp16"}


def cut_to_tf32(**arguments: Any) -> Answer:
    return attention_twin(arguments, logits=_scores.cut_to_tf32)


def fit_of(function: Callable[..., Answer], case: Case, label: str) -> Fit:
    operation = operation_of(case)
    exam = Exam(operation, case, CPU)
    execution = execute(operation, wrap_function(function, operation), case, exam.inputs, CPU)
    assert isinstance(execution, Execution)
    return case_evidence(exam, execution, [label]).lower[label]


MANY_ROWS: dict[str, Any] = {"query_lens": [80], "key_lens": [200], "num_heads": 6, "num_kv_heads": 3, "causal": False}
TF32_PRODUCTS = "qk_acc: declared fp32, fits tf32"


@pytest.mark.parametrize("seed", range(3))
def test_what_a_format_does_in_one_direction_is_no_bias(seed: int) -> None:
    """Over hundreds of rows truncated logits, and weights rounded to nearest, are off by more than noise."""
    wide = MANY_ROWS | {"d_qk": 64, "d_v": 64}
    truncated = fit_of(cut_to_tf32, attention_case("diffuse", "float32", seed=seed, **wide), TF32_PRODUCTS)
    assert truncated.passed
    assert truncated.bias < MOST_BIAS
    case = attention_case("constant-v", "bfloat16", seed=seed, **wide)
    rounded = fit_of(kernel(weights=e4m3), case, E4M3_P)
    assert rounded.passed
    assert rounded.bias < MOST_BIAS
    # a wrong denominator is more than that
    for wrong in (kernel(weights=e4m3, out_factor=1.004), kernel(out_factor=1.004)):
        assert fit_of(wrong, case, E4M3_P).bias > 2 * MOST_BIAS


def test_a_prediction_beyond_the_values_themselves_is_none() -> None:
    """Logits near -60000 in bfloat16 may err by 100, of which no output shows more than other weights."""
    rounded, label = kernel(logits=half(torch.bfloat16)), "logits: declared fp32, fits bf16"
    assert fit_of(rounded, attention_case("sunken", "bfloat16", **MANY_ROWS), label).rms is None
    measured = fit_of(rounded, attention_case("shifted", "bfloat16", **MANY_ROWS), label)
    assert measured.sensitive
    assert measured.rms is not None
    assert 0.3 < measured.rms < 1.1


WRONG = {
    "a missing key": kernel(drop_key=-1),
    "a missing first key": kernel(drop_key=0),
    "a sink of weight e^-1 that is not asked for": kernel(total=lambda total: total + math.exp(-1)),
    "a missing unit in the denominator": kernel(total=lambda total: (total - 0.05).clamp(min=0.5)),
    "a denominator 0.4 % off": kernel(out_factor=1.004),
    "a denominator 1 % off": kernel(out_factor=1.01),
    "a denominator 1 % off in e4m3": kernel(weights=e4m3, out_factor=1.01),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_stays_numeric_on_every_set_of_families(name: str, dtype: str) -> None:
    evidence = evidence_of(WRONG[name], cases_of(dtype, seed=70))
    assert not all(one.declared for cases in evidence.values() for one in cases)
    for count in range(1, len(FAMILIES) + 1):
        for chosen in itertools.combinations(FAMILIES, count):
            assert name_downgrade({family: evidence[family] for family in chosen}) is None, chosen


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_keeps_its_records(name: str) -> None:
    cases = cases_of("bfloat16", seed=70)
    operation, candidate = operation_of(cases[0]), wrap_function(WRONG[name], operation_of(cases[0]))
    records = [run_case(operation, candidate, case, CPU) for case in cases]
    assert Verdict.NUMERIC in {record.verdict for record in records}
    assert reassess(operation, candidate, cases, records, CPU) == records


def test_a_downgrade_needs_the_families_that_tell_it_from_a_fault() -> None:
    evidence = evidence_of(kernel(weights=e4m3), cases_of("bfloat16"))
    assert name_downgrade(evidence) == E4M3_P
    for family in NEEDED_FAMILIES:
        assert name_downgrade({name: cases for name, cases in evidence.items() if name != family}) is None
    needed = {name: cases for name, cases in evidence.items() if name in NEEDED_FAMILIES}
    assert name_downgrade(needed) == E4M3_P
    assert name_downgrade({}) is None


def test_an_honest_kernel_is_not_asked_again() -> None:
    cases = cases_of("bfloat16")
    operation, candidate = operation_of(cases[0]), wrap_function(kernel(), operation_of(cases[0]))
    records = [run_case(operation, candidate, case, CPU) for case in cases]
    assert {record.verdict for record in records} == {Verdict.PASS}

    def refuses(arguments: dict[str, Any]) -> Callable[[], Any]:
        raise AssertionError("asked again")

    assert reassess(operation, replace(candidate, bind=refuses), cases, records, CPU) == records


def test_another_failure_rules_a_downgrade_out() -> None:
    """A kernel that also writes NaN somewhere is wrong, whatever its precision."""

    def broken(**arguments: Any) -> Answer:
        out, lse = kernel(weights=e4m3)(**arguments)
        if arguments["v"].abs().max() == 7:
            out[0] = math.nan
        return out, lse

    records = run_of(broken, cases_of("bfloat16"))
    assert Verdict.NONFINITE in {record.verdict for record in records}
    assert downgrades(records) == set()


def test_each_dtype_is_reassessed_by_itself_and_other_kernels_are_left_alone() -> None:
    def only_bfloat16(**arguments: Any) -> Answer:
        weights = e4m3 if arguments["q"].dtype == torch.bfloat16 else None
        return kernel(weights=weights)(**arguments)

    cases = [*cases_of("bfloat16"), *cases_of("float16")]
    operation, candidate = operation_of(cases[0]), wrap_function(only_bfloat16, operation_of(cases[0]))
    records = [run_case(operation, candidate, case, CPU) for case in cases]
    stranger = replace(records[0], kernel="stranger")
    found = reassess(operation, candidate, cases, [*records, stranger], CPU)
    assert found[-1] is stranger
    changed = [new for old, new in zip(records, found, strict=False) if new is not old]
    assert {record.case["dtype"] for record in changed} == {"bfloat16"}
    assert all(record.text.startswith(f"{E4M3_P}; ") for record in changed)


def fit(passed: bool = True, rms: float | None = 0.7, *, sensitive: bool = True, bias: float = 0.5) -> Fit:
    return Fit(passed=passed, rms=rms, sensitive=sensitive, bias=bias)


def judged(**fits: Fit) -> Evidence:
    return Evidence(declared=False, lower=fits)


def by_family(*evidence: Evidence) -> dict[str, list[Evidence]]:
    """The same for each family that is needed, the given ones first."""
    families = sorted(NEEDED_FAMILIES)
    return {family: [evidence[min(at, len(evidence) - 1)]] for at, family in enumerate(families)}


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (fit(), "a"),
        (fit(passed=False), None),
        (fit(bias=3.1), None),
        (fit(rms=None), "a"),
        (fit(rms=0.01), "a"),
        (fit(rms=0.01, sensitive=False), "a"),
    ],
)
def test_one_odd_family_among_fitting_ones(odd: Fit, named: str | None) -> None:
    assert name_downgrade(by_family(judged(a=odd), judged(a=fit()))) == named


@pytest.mark.parametrize(("rms", "named"), [(0.29, None), (0.31, "a"), (1.1, "a"), (1.11, None), (None, None)])
def test_the_errors_must_use_up_what_the_lower_contract_allows(rms: float | None, named: str | None) -> None:
    assert name_downgrade(by_family(judged(a=fit(rms=rms)))) == named


def test_a_family_that_is_not_sensitive_proves_nothing() -> None:
    assert name_downgrade(by_family(judged(a=fit(sensitive=False)))) is None


def test_a_kernel_that_fails_nothing_is_no_downgrade() -> None:
    assert name_downgrade(by_family(Evidence(declared=True, lower={"a": fit()}))) is None


def test_of_two_that_fit_the_one_with_the_even_prediction_is_named() -> None:
    uneven = by_family(judged(a=fit(rms=0.9), b=fit(rms=0.5)), judged(a=fit(rms=0.4), b=fit(rms=0.5)))
    assert name_downgrade(uneven) == "b"


def test_the_lower_contracts_of_each_precision() -> None:
    half_precision = Contract(p="bf16", out="bf16", projected="bf16", splits_store="bf16")
    assert [label for label, _ in downgraded(half_precision)] == [
        "p: declared bf16, fits e4m3",
        "logits: declared fp32, fits fp16",
        "logits: declared fp32, fits bf16",
        "pv_acc: declared fp32, fits fp16",
        "pv_acc: declared fp32, fits bf16",
        "projected: declared bf16, fits e4m3",
    ]
    single = dict(downgraded(Contract(p="fp32", out="fp32")))
    assert single["qk_acc: declared fp32, fits tf32"].qk_acc == "tf32"
    assert single["qk_acc and p: declared fp32, fit tf32"].promising(p="fp32", qk_acc="fp32") == Contract(
        p="fp32", out="fp32"
    )
    for label, lower in single.items():
        assert lower != Contract(p="fp32", out="fp32"), label
        assert lower.out == "fp32"
    assert set(STEPS) == {"p", "logits", "qk_acc", "pv_acc", "projected", "splits_store"}


def test_exact_families_measure_no_precision() -> None:
    evidence = evidence_of(kernel(weights=e4m3), cases_of("bfloat16"))
    for family in EXACT_FAMILIES:
        assert evidence[family][0].declared
        assert all(one.rms is None and one.bias == 0 for one in evidence[family][0].lower.values())
