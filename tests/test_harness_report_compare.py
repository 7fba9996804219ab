"""Two runs side by side: what got worse decides the exit code, and what differs is said."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import cases, failing, passing, refused, write_run
from rich.console import Console

from assay.harness.record import GateResult, Record, Verdict
from assay.harness.report.command import run_report
from assay.harness.report.compare_runs import Comparison, compare_runs
from assay.harness.report.markdown import markdown_report
from assay.harness.report.run_folder import read_run

SIX = cases()
MINE = "attend"


def compared(tmp_path: Path, before: list[Record], after: list[Record], **fields: object) -> Comparison:
    """The comparison of two runs of the same plan, unless ``fields`` of the later header say otherwise."""
    same = {"plan": "p1", "cases": len(SIX)}
    earlier, later = (
        write_run(tmp_path / "before", before, **same),
        write_run(tmp_path / "after", after, **same | fields),
    )
    return compare_runs(read_run(later), read_run(earlier))


def test_equal_runs_have_nothing_to_tell(tmp_path: Path) -> None:
    records = [failing(SIX[0]), *map(passing, SIX[1:])]
    comparison = compared(tmp_path, records, records)
    assert (comparison.exit_code, comparison.common) == (0, 6)
    assert (comparison.changes, comparison.margins, comparison.settings) == ((), (), ())
    assert comparison.summary == "6 judgements in common: no verdict changed."


VERDICTS = [
    (Verdict.PASS, Verdict.NUMERIC, "regressed", 1),
    (Verdict.UNSUPPORTED, Verdict.CRASH, "regressed", 1),
    (Verdict.PASS, Verdict.UNSUPPORTED, "no longer judged", 1),
    (Verdict.PASS, Verdict.INVALID_CASE, "no longer judged", 1),
    (Verdict.PASS, Verdict.WAIVED, "changed", 0),
    (Verdict.NUMERIC, Verdict.NONFINITE, "changed", 0),
    (Verdict.NUMERIC, Verdict.UNSUPPORTED, "changed", 0),
    (Verdict.NUMERIC, Verdict.PASS, "fixed", 0),
    (Verdict.UNSUPPORTED, Verdict.PASS, "changed", 0),
]


@pytest.mark.parametrize(("before", "after", "kind", "code"), VERDICTS)
def test_a_changed_verdict(tmp_path: Path, before: Verdict, after: Verdict, kind: str, code: int) -> None:
    others = [passing(case) for case in SIX[1:]]
    runs = [[passing(SIX[0], verdict=verdict), *others] for verdict in (before, after)]
    comparison = compared(tmp_path, *runs)
    (change,) = comparison.changes
    assert (change.kernel, change.case_id) == ("mla_prefill[torch]", SIX[0].id)
    assert (change.before, change.after, change.kind) == (before.value, after.value, kind)
    assert comparison.exit_code == code
    assert comparison.summary == f"6 judgements in common: 1 {kind}."


def test_a_missing_judgement_leaves_the_question_open_and_a_new_one_does_not(tmp_path: Path) -> None:
    five, six = [passing(case) for case in SIX[:5]], [passing(case) for case in SIX]
    missing = compared(tmp_path, six, five)
    assert [(change.kind, change.case_id, change.after) for change in missing.changes] == [("missing", SIX[5].id, "")]
    assert missing.exit_code == 6
    new = compared(tmp_path, five, six)
    assert [(change.kind, change.case_id, change.before) for change in new.changes] == [("new", SIX[5].id, "")]
    assert new.exit_code == 0


def test_regressions_come_first_and_decide(tmp_path: Path) -> None:
    before = [failing(SIX[0]), passing(SIX[1]), passing(SIX[2])]
    after = [passing(SIX[0]), failing(SIX[1]), passing(SIX[3])]
    comparison = compared(tmp_path, before, after)
    assert [change.kind for change in comparison.changes] == ["regressed", "missing", "new", "fixed"]
    assert comparison.exit_code == 1
    assert comparison.summary == "2 judgements in common: 1 regressed, 1 missing, 1 new, 1 fixed."


def test_other_plans_are_not_compared(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [passing(SIX[0])], [failing(SIX[0])], plan="p2", seed=4)
    assert comparison.exit_code == 4
    assert (comparison.changes, comparison.margins) == ((), ())
    assert comparison.summary == "Not comparable: the plans must be equal, got p1 before and p2 now"
    assert set(comparison.settings) == {("plan", "p1", "p2"), ("seed", "3", "4")}


def test_runs_without_a_judgement_in_common_are_not_compared(tmp_path: Path) -> None:
    two = [passing(SIX[0], "a"), passing(SIX[0], "b")]
    comparison = compared(tmp_path, two, [passing(SIX[0], MINE)])
    assert comparison.exit_code == 3
    assert comparison.summary == "Not comparable: no judgement in common; kernels before: a, b; now: attend"


def test_the_only_kernel_of_each_run_is_compared_whatever_its_name(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [passing(SIX[0], "old")], [failing(SIX[0], MINE)])
    (change,) = comparison.changes
    assert (change.kernel, change.kind, comparison.exit_code) == (MINE, "regressed", 1)
    assert comparison.summary.endswith("1 regressed. attend stands against old.")


def test_other_versions_are_compared_and_named(tmp_path: Path) -> None:
    versions = {"torch": "2.14.0", "triton": None}
    comparison = compared(tmp_path, [passing(SIX[0])], [passing(SIX[0])], versions=versions)
    assert comparison.exit_code == 0
    assert comparison.settings == (("torch", "2.13.0", "2.14.0"),)


def with_gates(case_at: int, **ratios: float) -> Record:
    gates = [GateResult(gate=name, ratio=ratio) for name, ratio in ratios.items()]
    return passing(SIX[case_at], gates=gates)


def test_margins_tell_the_worst_of_each_gate_and_the_case_that_moved_most(tmp_path: Path) -> None:
    before = [with_gates(0, G4=0.4, G5=0.2), with_gates(1, G4=0.1, G5=0.2)]
    after = [with_gates(0, G4=0.5, G5=0.201), with_gates(1, G4=0.3, G5=0.2)]
    (margin,) = compared(tmp_path, before, after).margins
    # half a per cent of G5 is nothing to tell
    assert (margin.gate, margin.before, margin.after) == ("G4", 0.4, 0.5)
    assert (margin.case_id, margin.case_before, margin.case_after) == (SIX[1].id, 0.1, 0.3)


def test_margins_far_below_a_limit_do_not_move(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [with_gates(0, G4=1e-9, G6=0.0)], [with_gates(0, G4=9e-4, G6=1e-5)])
    assert comparison.margins == ()


def test_a_margin_lost_without_bound_comes_first(tmp_path: Path) -> None:
    before = [with_gates(0, G3=0.0, G4=0.1, G5=0.1, G6=math.inf)]
    after = [with_gates(0, G3=math.inf, G4=0.2, G5=math.nan, G6=0.5)]
    margins = compared(tmp_path, before, after).margins
    assert [margin.gate for margin in margins] == ["G3", "G5", "G4", "G6"]
    assert (margins[1].before, margins[1].after) == (0.1, math.inf)


def test_the_command_prints_and_writes_the_comparison(tmp_path: Path) -> None:
    before, after = [passing(case) for case in SIX], [failing(SIX[0]), *map(passing, SIX[1:])]
    folders = [write_run(tmp_path / name, records) for name, records in (("old", before), ("new", after))]
    page = io.StringIO()
    code = run_report(folders[1], folders[0], tmp_path / "out", ("markdown",), Console(width=200, file=page))
    assert code == 1
    assert "6 judgements in common: 1 regressed." in page.getvalue()
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"| mla_prefill[torch] | `{SIX[0].id}` | PASS | NUMERIC | regressed |" in text
    assert "| mla_prefill[torch] | G4 envelope | 0.4× | 12.5× |" in text  # noqa: RUF001
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]


def test_the_command_says_why_runs_are_not_comparable(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [passing(SIX[at])]) for at, name in enumerate(("old", "new"))]
    page = io.StringIO()
    code = run_report(folders[1], folders[0], None, ("markdown",), Console(width=200, file=page))
    assert code == 4
    assert "Not comparable: the plans must be equal" in page.getvalue()
    assert "Not comparable: the plans must be equal" in (folders[1] / "report.md").read_text()


def test_long_comparisons_are_cut_and_say_so(tmp_path: Path) -> None:
    many = cases(60)
    runs = [[make(case) for case in many] for make in (passing, failing)]
    comparison = replace(compared(tmp_path, *runs), against="old")
    text = markdown_report(read_run(tmp_path / "after"), comparison)
    assert "… and 40 more changes of verdict." in text
    assert "… and 40 more failures." in text
    assert len(text) < 65536


def test_a_refusal_that_stays_one_is_no_change(tmp_path: Path) -> None:
    assert compared(tmp_path, [refused(SIX[0])], [refused(SIX[0])]).changes == ()
