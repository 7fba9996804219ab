"""``check`` raises with the report unless a kernel passes, and never calls a run green that judged nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Answer, in_dtype

from assay.harness import KernelRejected, NothingJudged, Summary, Unsupported, check, kernel, operations
from assay.harness.case import plan_digest
from assay.harness.operation import CaseRequest
from assay.harness.outcome import CaseNotInPlanError
from assay.harness.record import Verdict
from assay.reference.attention import attention

ATTENTION = operations.load("attention")
ONE: dict[str, Any] = {"dtypes": ["float32"], "families": ["diffuse"]}


def right(**given: Any) -> Answer:
    """The oracle itself, rounded once."""
    out, lse = attention(**in_dtype(given, torch.float64))
    return out.to(given["q"].dtype), lse.float()


def wrong(**given: Any) -> Answer:
    out, lse = right(**given)
    out[2, 1] *= 1.01
    return out, lse


def planned(**request: Any) -> list[str]:
    options: dict[str, Any] = {"tier": "smoke", "seed": 0, "dtypes": ("float32", "float16", "bfloat16")} | request
    return [case.id for case in ATTENTION.cases(CaseRequest(**options))]


def test_a_right_kernel_gives_a_summary_of_every_case() -> None:
    summary = check(right, op="attention")
    cases = ATTENTION.cases(CaseRequest(tier="smoke", seed=0, dtypes=("float32", "float16", "bfloat16")))
    assert [record.case["id"] for record in summary.records] == [case.id for case in cases]
    assert summary.verdicts == {"PASS": len(cases)}
    assert (summary.op, summary.kernel, summary.not_started, summary.not_judged) == ("attention", "right", 0, {})
    expected = f"attention  right: {len(cases)} PASS (seed 0, {len(cases)} cases, plan {plan_digest(cases)})"
    assert str(summary) == expected
    assert f"attention, seed 0, {len(cases)} cases, plan {plan_digest(cases)}, CPU" in summary.report


def test_a_selection_is_judged_alone() -> None:
    summary = check(right, "attention", seed=7, dtypes=["float16"], families=["ramp-v", "diffuse"])
    wanted = [case for case in planned(seed=7, dtypes=("float16",)) if "-ramp-v-" in case or "-diffuse-" in case]
    assert [record.case["id"] for record in summary.records] == wanted


def test_the_operation_may_be_declared() -> None:
    assert check(kernel("attention", name="mine")(lambda **given: right(**given)), **ONE).kernel == "mine"
    with pytest.raises(ValueError, match="op must be given for a kernel that declares none"):
        check(right)


def test_a_kernel_may_be_named_as_on_the_command_line() -> None:
    assert check("attention[torch]", "attention", **ONE).kernel == "attention[torch]"
    assert len(check("attention[*]", "attention", **ONE).records) == len(ATTENTION.kernels())


def test_a_wrong_kernel_is_rejected_with_the_report_as_text() -> None:
    with pytest.raises(KernelRejected) as caught:
        check(wrong, "attention", **ONE)
    text, (case,) = str(caught.value), [case for case in planned(dtypes=("float32",)) if "diffuse" in case]
    assert isinstance(caught.value, AssertionError)
    assert f"NUMERIC  wrong  {case}\n" in text
    assert "token 2, head 1" in text
    call = f"check(wrong, 'attention', case='{case}', tier='smoke', seed=0, device='auto', dtypes=['float32'])"
    assert call in text
    assert caught.value.summary.verdicts == {"NUMERIC": 1}
    assert text == caught.value.summary.report


def test_the_printed_call_judges_the_same_case_again() -> None:
    with pytest.raises(KernelRejected) as caught:
        check(wrong, "attention", **ONE)
    (call,) = [line.strip() for line in str(caught.value).splitlines() if line.strip().startswith("check(")]
    with pytest.raises(KernelRejected) as again:
        eval(call, {"check": check, "wrong": wrong})
    assert [r.case for r in again.value.summary.records] == [r.case for r in caught.value.summary.records]


def test_many_failures_are_counted_and_the_first_ones_shown() -> None:
    with pytest.raises(KernelRejected) as caught:
        check(lambda **given: tuple(2 * part for part in right(**given)), "attention")
    text, failed = str(caught.value), len(caught.value.summary.records)
    assert text.count("<lambda>  attention-") == 10
    assert f"and {failed - 10} more failures" in text


def test_the_call_that_failed_is_the_last_line_that_pytest_shows() -> None:
    with pytest.raises(KernelRejected) as caught:
        check(wrong, "attention", **ONE)
    hidden = [entry.locals.get("__tracebackhide__") for entry in caught.traceback]
    assert hidden[-1] is True


def unserved(**given: Any) -> Answer:
    raise NotImplementedError("heads of 128 only")


def test_nothing_judged_is_no_success() -> None:
    with pytest.raises(NothingJudged, match="heads of 128 only") as caught:
        check(unserved, "attention", **ONE)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.summary.not_judged == {"heads of 128 only": 1}


def half_only(**given: Any) -> Answer:
    if given["q"].dtype == torch.float32:
        raise NotImplementedError("half precision only")
    return right(**given)


def test_a_skip_is_counted_and_a_failure_only_if_that_is_asked() -> None:
    summary = check(half_only, "attention", families=["diffuse"])
    assert summary.verdicts == {"UNSUPPORTED": 1, "PASS": 2}
    assert summary.not_judged == {"half precision only": 1}
    with pytest.raises(KernelRejected, match="UNSUPPORTED is a failure here: strict skips are on"):
        check(half_only, "attention", families=["diffuse"], strict_skips=True)
    declared = kernel(supports=lambda case: case.dtype == "bfloat16" or Unsupported("bfloat16 only"))(half_only)
    assert check(declared, "attention", families=["diffuse"]).not_judged == {"bfloat16 only": 2}


def test_a_run_out_of_time_says_what_was_left() -> None:
    with pytest.raises(NothingJudged, match="38 of 38 judgements not started"):
        check(right, "attention", max_seconds=-1.0)


def test_a_run_stopped_in_between_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr("assay.harness.checking.time.monotonic", lambda: next(ticks, 9.0))
    summary = check(right, "attention", families=["diffuse"], max_seconds=5.0)
    assert (summary.verdicts, summary.not_started) == ({"PASS": 2}, 1)
    assert str(summary).startswith("attention  right: 2 PASS, 1 not started (seed 0")
    assert "1 of 3 judgements not started" in summary.report


def test_one_case_is_judged_by_the_end_of_its_id() -> None:
    wanted = planned()[5]
    summary = check(right, "attention", case=wanted[-8:])
    assert [record.case["id"] for record in summary.records] == [wanted]
    with pytest.raises(CaseNotInPlanError, match="must end the id of a case of attention, tier smoke and seed 1"):
        check(right, "attention", case=wanted[-8:], seed=1)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "op": (
        {"op": "conv"},
        ValueError,
        f"an operation must be one of {', '.join(operations.NAMES)}, got 'conv'",
    ),
    "tier": ({"tier": "huge"}, ValueError, "tier must be one of .*, got 'huge'"),
    "device": ({"device": "gpu"}, ValueError, "must be auto, cpu, cuda or cuda:N, got 'gpu'"),
    "dtype": ({"dtypes": ["float64"]}, ValueError, "dtypes must be among float32, float16, bfloat16, got 'float64'"),
    "one dtype": ({"dtypes": "float32"}, TypeError, "dtypes must be a list of texts, got 'float32'"),
    "family": ({"families": ["gaussian"]}, ValueError, "families must be among .*, got 'gaussian'"),
    "one family": ({"families": "diffuse"}, TypeError, "families must be a list of texts, got 'diffuse'"),
    "fn": ({"fn": 3}, TypeError, "fn must be a function or the name of a kernel, got int"),
    "name": ({"fn": "nothing"}, ValueError, "must be module:function, .*, got 'nothing'"),
    "arguments": ({"fn": lambda q: q}, TypeError, "<lambda> lacks k, v"),
    "waivers": ({"waivers": "nowhere.toml"}, ValueError, "waivers must be a TOML file, got nowhere.toml"),
}


@pytest.mark.parametrize("which", WRONG)
def test_arguments_that_cannot_be_served_are_refused(which: str) -> None:
    said, error, text = WRONG[which]
    with pytest.raises(error, match=text):
        check(**{"fn": right, "op": "attention", **said})


def test_a_fault_of_the_judge_is_not_the_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ArithmeticError("planted")

    monkeypatch.setattr("assay.harness.runner.assess", broken)
    with pytest.raises(
        RuntimeError, match=r"the judge failed, which says nothing about the kernel\nHARNESS_ERROR"
    ) as e:
        check(right, "attention", **ONE)
    assert not isinstance(e.value, AssertionError)


@pytest.mark.parametrize("fn", [right, wrong])
def test_torch_is_left_as_it_was(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(KernelRejected) if fn is wrong else pytest.MonkeyPatch.context():
            check(fn, "attention", **ONE)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


WAIVER = """
[[waiver]]
kernel = "{kernel}"
case = "{case}"
verdict = "NUMERIC"
reason = "scales one row"
link = "https://example.org/issues/1"
expires = {expires}
"""


def waivers(folder: Path, *, kernel: str = "wrong", case: str = "*", expires: str = "2999-01-01") -> Path:
    path = folder / "waivers.toml"
    path.write_text(WAIVER.format(kernel=kernel, case=case, expires=expires))
    return path


def test_a_known_fault_is_waived_and_shown(tmp_path: Path) -> None:
    summary: Summary = check(wrong, "attention", waivers=waivers(tmp_path), **ONE)
    assert summary.verdicts == {"WAIVED": 1}
    assert summary.records[0].verdict is Verdict.WAIVED
    assert summary.records[0].text.startswith("NUMERIC: ")
    with pytest.raises(KernelRejected):
        check(wrong, "attention", waivers=waivers(tmp_path, kernel="other"), **ONE)


def test_a_waiver_that_is_over_or_that_nothing_needs_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KernelRejected, match="EXPIRED waiver of NUMERIC for kernel 'right'"):
        check(right, "attention", waivers=waivers(tmp_path, kernel="right", expires="2020-01-01"), **ONE)
    unneeded = waivers(tmp_path, kernel="right", case="diffuse")
    with pytest.raises(KernelRejected, match="UNNEEDED waiver of NUMERIC for kernel 'right', case 'diffuse'"):
        check(right, "attention", waivers=unneeded)
    # a part of the cases is no evidence that nothing needs it
    assert check(right, "attention", waivers=unneeded, **ONE).verdicts == {"PASS": 1}
