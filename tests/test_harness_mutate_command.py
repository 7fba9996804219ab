"""``assay mutate``: admission, the bound on false rejections, what it leaves behind, and that it can fail."""

import json
import pickle
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import attention_case, operation_of
from rich.console import Console
from typer.testing import CliRunner

from assay.harness import operations
from assay.harness.cli import app
from assay.harness.faults import Variant, load
from assay.harness.mutation import command, mutate
from assay.harness.mutation.admission import NULL_KERNELS, admissions, null_kernel
from assay.harness.mutation.command import MutateOptions, run_mutate, zero_event_bound
from assay.harness.mutation.mutate import Status, kill_matrix
from assay.harness.operation import CaseRequest
from assay.harness.plan import DTYPES, UsageError
from assay.harness.record import ExitCode, Verdict
from assay.harness.runner import run_case

CPU = torch.device("cpu")
SMOKE = CaseRequest(tier="smoke", seed=0, dtypes=DTYPES)


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    cases = [attention_case("diffuse", "bfloat16"), attention_case("peaked", "float16", seed=1)]
    monkeypatch.setattr(command, "_cases", lambda operation, seed: cases)
    return cases


def run(**options: Any) -> tuple[int, str]:
    console = Console(record=True, width=200)
    return run_mutate(MutateOptions(ops=("attention",), device="cpu", **options), console), console.export_text()


@pytest.mark.parametrize("null", NULL_KERNELS, ids=lambda null: null.__name__)
@pytest.mark.parametrize("op", operations.NAMES)
def test_a_null_kernel_passes_nothing(op: str, null: Any) -> None:
    operation = operations.load(op)
    # a case in which something is to be seen and chosen; "diffuse" asks kda in other shapes too, which these have not
    family = "hold" if op == "kda" else "diffuse"
    case = next(one for one in operation.cases(SMOKE) if one.family == family and one.dtype == "float32")
    record = run_case(operation, null_kernel(null, operation, case), case, CPU)
    assert record.verdict in (Verdict.NUMERIC, Verdict.NONFINITE)


def test_a_case_without_kills_is_not_admitted() -> None:
    case = attention_case()
    operation = operation_of(case)
    matrix = kill_matrix("attention", [case], CPU)
    (found,) = admissions(operation, [case], matrix, CPU)
    assert found.admitted
    assert found.kills > 20
    assert found.judged == len(matrix.faults)
    # the same judgements of another case say nothing about this one
    (stranger,) = admissions(operation, [attention_case(seed=9)], matrix, CPU)
    assert (stranger.judged, stranger.kills) == (0, 0)


@pytest.mark.parametrize("stop", [False, True])
def test_a_fault_is_looked_at_over_all_cases_as_a_kernel_is(stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a lower precision explains is called so, one that is wrong is not."""
    names = ("weights_in_e4m3", "light_tiles_skipped")
    expects = frozenset({Verdict.PRECISION_DOWNGRADE})
    faults = [replace(fault, expects=expects) for fault in load("attention")[0] if fault.name in names]
    monkeypatch.setattr(mutate, "load", lambda op: (faults, []))
    cases = operations.load("attention").cases(CaseRequest(tier="smoke", seed=0, dtypes=("bfloat16",)))
    matrix = kill_matrix("attention", cases, CPU, stop_when_killed=stop)
    found = {result.fault.name: result for result in matrix.faults}
    assert found["weights_in_e4m3"].status is Status.KILLED
    texts = {one.text.partition(";")[0] for one in found["weights_in_e4m3"].kills}
    assert texts == {"p: declared bf16, fits e4m3"}
    assert found["light_tiles_skipped"].status is Status.WRONG_REASON
    assert Verdict.NUMERIC in {one.verdict for one in found["light_tiles_skipped"].judged}


@pytest.mark.parametrize(("trials", "bound"), [(1, 0.95), (2, 1 - 0.05**0.5), (20, 0.1391), (6000, 4.9916e-4)])
def test_the_bound_of_clopper_and_pearson(trials: int, bound: float) -> None:
    assert zero_event_bound(trials) == pytest.approx(bound, rel=1e-3)
    # no event in n trials at the bound has the probability that the confidence leaves
    assert (1 - zero_event_bound(trials)) ** trials == pytest.approx(0.05, rel=1e-9)


def test_the_bound_needs_a_trial() -> None:
    with pytest.raises(ValueError, match="trials must be at least 1, got 0"):
        zero_event_bound(0)


def test_survivors_fail_the_run_and_are_written(two_cases: list[Any], tmp_path: Path) -> None:
    code, text = run(out=tmp_path)
    # two cases cannot find everything
    assert code == 1
    assert "survived" in text
    (table,) = json.loads((tmp_path / "kill_matrix.json").read_text())
    survivors = [row["fault"] for row in table["rows"] if not row["right_reason"]]
    assert survivors
    assert len(survivors) < len(table["rows"]) / 2
    page = (tmp_path / "kill-matrix.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **`")]
    assert [line.split("`")[1] for line in rows] == sorted(survivors)


def test_a_rejected_variant_is_named_and_fails_the_run(two_cases: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(fresh_seeds=2)
    assert "variants over 2 fresh seeds: 0 of" in text
    assert "at 95 %" in text

    def hasty(**arguments: Any) -> Any:
        out, lse = load("attention")[1][0].function(**arguments)
        return out * 1.05, lse

    faults, variants = load("attention")
    planted = (*variants, Variant(name="hasty", op="attention", function=hasty))
    monkeypatch.setattr(command, "load", lambda op: (faults, planted))
    code, text = run(fresh_seeds=1)
    assert code == 1
    assert "REJECTED hasty on attention-diffuse-bfloat16-" in text


def test_side_by_side_it_finds_what_it_finds_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_cases", lambda operation, seed: operation.cases(SMOKE)[:1])
    asked: list[int] = []

    def across(prepare: Any, items: list[str], jobs: int) -> Any:
        """As processes do it: everything goes there and back as bytes."""
        asked.append(jobs)
        work = pickle.loads(pickle.dumps(prepare))()
        return (pickle.loads(pickle.dumps(work(item))) for item in items)

    monkeypatch.setattr(command, "side_by_side", across)
    found = []
    for jobs in (1, 7):
        out, console = tmp_path / str(jobs), Console(record=True, width=200)
        given: dict[str, Any] = {"admission": True, "fresh_seeds": 1, "out": out, "jobs": jobs}
        run_mutate(MutateOptions(ops=("topk_mask", "token_selection"), device="cpu", **given), console)
        text = console.export_text()
        # in the order in which they were named
        assert text.index("topk_mask: correct variants") < text.index("token_selection: correct variants")
        lines = [line for line in text.splitlines() if "over 1 fresh seeds: 0 of" in line]
        assert len(lines) == 2
        tables = json.loads((out / "kill_matrix.json").read_text())
        # what a fault that reads memory of others meets there is another thing each time
        names = [(table["op"], table["cases"], [row["fault"] for row in table["rows"]]) for table in tables]
        found.append((lines, names, [table["variants"] for table in tables]))
    assert asked == [2]
    assert found[0] == found[1]


def test_a_process_that_dies_ends_the_exam_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(prepare: Any, items: list[str], jobs: int) -> Any:
        raise BrokenProcessPool
        yield

    monkeypatch.setattr(command, "side_by_side", dying)
    console = Console(record=True, width=200)
    options = MutateOptions(ops=("topk_mask", "token_selection"), device="cpu", jobs=2)
    assert run_mutate(options, console) == ExitCode.HARNESS_ERROR
    assert "a process that examined topk_mask or a later operation died; --jobs 1 shows which" in console.export_text()


def test_an_entry_keeps_what_it_is_between_processes() -> None:
    for op in operations.NAMES:
        for entry in (one for some in load(op) for one in some):
            assert pickle.loads(pickle.dumps(entry)).function.__qualname__ == entry.function.__qualname__


def test_usage() -> None:
    with pytest.raises(UsageError, match=f"an operation must be one of {', '.join(operations.NAMES)}, got 'conv'"):
        run_mutate(MutateOptions(ops=("conv",)), Console())
    assert CliRunner().invoke(app, ["mutate", "conv"]).exit_code == 2
