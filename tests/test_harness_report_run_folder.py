"""A run is read back as it was written, up to the last whole line, and a folder that is no run says so."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import cases, failing, mixed, passing, refused, rows, write_run

from assay.harness.faults import Fault, NotApplicable, Variant
from assay.harness.mutation.kill_table import KillRow, KillTable, KillVariant, read_kill_tables, write_kill_tables
from assay.harness.mutation.mutate import FaultResult, KillMatrix, Outcome, VariantResult
from assay.harness.record import GateResult, Location, RowErrors, Verdict
from assay.harness.report.run_folder import failed, read_run


def test_what_was_written_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, mixed(), device="H200"))
    assert list(run.records) == mixed()
    assert (run.header["seed"], run.header["device"], run.header["cases"]) == (3, "H200", 6)
    assert run.notes == ()
    assert run.kernels == ["mla_prefill[torch]", "attend"]
    assert [record.verdict for record in run.failures] == [Verdict.NUMERIC, Verdict.CRASH, Verdict.HARNESS_ERROR]


def test_numbers_that_json_lacks_are_numbers_again(tmp_path: Path) -> None:
    where = Location(token=0, got=math.nan, expected=-math.inf)
    gates = [GateResult(gate="G1 lse", ratio=math.inf, where=where), GateResult(gate="G4", ratio=math.nan)]
    broken = replace(rows(2), rms=[math.inf, math.nan])
    (record,) = read_run(write_run(tmp_path, [failing(cases()[0], gates=gates, rows=broken)])).records
    assert record.gates[0].ratio == math.inf
    assert math.isnan(record.gates[1].ratio)
    assert record.gates[0].where is not None
    assert record.gates[0].where.expected == -math.inf
    assert record.rows.rms[0] == math.inf
    assert math.isnan(record.rows.rms[1])


def test_rows_are_left_out_where_nobody_draws_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, mixed()), rows=False)
    assert all(record.rows == RowErrors() for record in run.records)
    assert [record.gates for record in run.records] == [record.gates for record in mixed()]


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_run_cut_short_is_read_up_to_its_last_whole_line(tmp_path: Path, kept: int) -> None:
    file = write_run(tmp_path, mixed()) / "records.jsonl"
    *whole, last = file.read_text().splitlines()
    file.write_text("\n".join([*whole, last[:kept]]))
    run = read_run(tmp_path)
    assert list(run.records) == mixed()[:-1]
    assert run.notes[0] == f"The run was interrupted while writing: line {len(whole) + 1} is cut off and was left out."


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    file = write_run(tmp_path, mixed()) / "records.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    run = read_run(tmp_path)
    assert (len(run.records), run.notes) == (len(mixed()), ())


def test_cases_that_were_not_started_are_counted(tmp_path: Path) -> None:
    six = cases()
    assert read_run(write_run(tmp_path, [passing(case) for case in six[:4]], cases=6)).notes == (
        "2 of 6 planned cases were not started.",
    )
    records = [passing(case) for case in six] + [passing(six[0], "attend")]
    note = "attend was not started on 5 cases that another kernel was judged on."
    assert read_run(write_run(tmp_path, records)).notes == (note,)


def test_fields_of_another_version_are_named(tmp_path: Path) -> None:
    file = write_run(tmp_path, [passing(cases()[0])]) / "records.jsonl"
    head, line = file.read_text().splitlines()
    content = json.loads(line)
    content["mood"], content["gates"][0]["colour"] = "good", "blue"
    file.write_text(f"{head}\n{json.dumps(content)}\n")
    run = read_run(tmp_path)
    assert list(run.records) == [passing(cases()[0])]
    assert run.notes == ("Written by another version: fields GateResult.colour, Record.mood were left out.",)


NO_RUNS = {
    "nothing": (None, "a run must be a folder with records.jsonl, got nothing at"),
    "empty": ("", "must begin with the header of a run, got ''"),
    "no header": ('{"verdict": "PASS"}\n', 'must begin with the header of a run, got \'{"verdict"'),
    "cut header": ('{"run": {"se', "must begin with the header of a run"),
    "no record": ('{"run": {}}\n{"verdict": "PASS"}\n', "records.jsonl:2 must be a record, got"),
    "no verdict": ('{"run": {}}\n{"verdict": "FINE"}\n', "'FINE' is not a valid Verdict"),
    "broken line": ('{"run": {}}\n{"verd\n{}\n', "records.jsonl:2 must be a record, got '{\"verd"),
    "blank line": ('{"run": {}}\n\n', "records.jsonl:2 must be a record, got"),
}


@pytest.mark.parametrize("which", NO_RUNS)
def test_what_is_no_run_says_why(which: str, tmp_path: Path) -> None:
    content, text = NO_RUNS[which]
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        read_run(tmp_path if content is not None else tmp_path / "nowhere")
    assert text in str(caught.value)


def test_a_file_and_an_empty_folder_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a folder without it"):
        read_run(tmp_path)
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ValueError, match="got a file"):
        read_run(tmp_path / "file")


def test_rows_of_unequal_length_are_refused(tmp_path: Path) -> None:
    uneven = replace(rows(4), token=[0, 1])
    with pytest.raises(ValueError, match="the lists of rows must be equally long"):
        read_run(write_run(tmp_path, [passing(cases()[0], rows=uneven)]))


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_a_pass_a_failure_or_set_aside(verdict: Verdict) -> None:
    neither = {Verdict.PASS, Verdict.UNSUPPORTED, Verdict.INVALID_CASE, Verdict.WAIVED}
    assert failed(verdict) is (verdict not in neither)


def outcome(case_id: str, verdict: Verdict, gate: str = "", ratio: float = 0.0) -> Outcome:
    family, dtype = case_id.split("-")[:2]
    return Outcome(
        case_id=case_id, family=family, dtype=dtype, verdict=verdict, gate=gate, ratio=ratio, text="", seconds=0.1
    )


def matrix() -> KillMatrix:
    """One fault found on one of three cases, one on a case where a variant was rejected, too, and one found nowhere."""

    def fault(name: str, *outcomes: Outcome) -> FaultResult:
        expects = frozenset({Verdict.NUMERIC})
        made = Fault(name=name, op="attention", function=len, expects=expects, rows=("FC-001",))
        return FaultResult(fault=made, outcomes=outcomes, sound=frozenset({"diffuse-float32-1", "peaked-float32-2"}))

    def variant(name: str, *outcomes: Outcome) -> VariantResult:
        return VariantResult(variant=Variant(name=name, op="attention", function=len), outcomes=outcomes)

    one, two, three = "diffuse-float32-1", "peaked-float32-2", "peaked-float32-3"
    return KillMatrix(
        op="attention",
        faults=(
            fault("found", outcome(one, Verdict.NUMERIC, "G4 envelope", 2.0), outcome(two, Verdict.PASS, "G4", 0.5)),
            fault("not proved", outcome(two, Verdict.CRASH), outcome(three, Verdict.NUMERIC, "G5 row rms", 3.0)),
            fault("survivor", outcome(one, Verdict.PASS), outcome(two, Verdict.UNSUPPORTED)),
        ),
        variants=(variant("fine", outcome(one, Verdict.PASS)), variant("blamed", outcome(three, Verdict.NUMERIC))),
        not_applicable=(NotApplicable(row="FC-009", reason="no such feature"),),
        cases=3,
        seconds=1.0,
    )


def test_a_kill_matrix_is_kept_as_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "kill_matrix.json"
    write_kill_tables(path, [matrix()])
    (table,) = read_kill_tables(path)
    assert table == KillTable.of(matrix())
    found, unproved, survivor = table.rows
    assert found == KillRow(
        fault="found",
        expects=["NUMERIC"],
        families={"diffuse": ["NUMERIC"], "peaked": ["PASS"]},
        killed=True,
        right_reason=True,
        gates={"diffuse": ["G4"]},
        status="killed",
        rows=["FC-001"],
    )
    # the case on which a correct variant was rejected proves nothing, which leaves a crash that was not expected
    assert (unproved.killed, unproved.right_reason, unproved.families) == (True, False, {"peaked": ["CRASH"]})
    assert (survivor.killed, survivor.right_reason, survivor.status) == (False, False, "survived")
    assert table.families == ["diffuse", "peaked"]
    assert [(variant.name, variant.accepted) for variant in table.variants] == [("fine", True), ("blamed", False)]
    assert table.variants[1].rejections == ["peaked-float32-3 NUMERIC"]
    assert table.left_out == [("FC-009", "no such feature")]


def test_a_run_has_the_kill_matrix_of_its_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [refused(cases()[0])])
    row: dict[str, Any] = {
        "fault": "f",
        "expects": ["NUMERIC"],
        "families": {"diffuse": ["PASS"]},
        "killed": False,
        "right_reason": False,
    }
    single = {"op": "attention", "rows": [row], "variants": [{"name": "v", "accepted": True}]}
    (folder / "kill_matrix.json").write_text(json.dumps(single))
    (table,) = read_run(folder).kill_tables
    assert table == KillTable(
        op="attention",
        rows=[KillRow(**row)],
        variants=[KillVariant(name="v", accepted=True)],
    )


@pytest.mark.parametrize("content", ["{", '{"op": "attention"}', "[1]", '[{"op": "a", "rows": [{}], "variants": []}]'])
def test_what_is_no_kill_matrix_is_refused(content: str, tmp_path: Path) -> None:
    (write_run(tmp_path, []) / "kill_matrix.json").write_text(content)
    with pytest.raises(ValueError, match=r"kill_matrix\.json must hold a kill matrix, got"):
        read_run(tmp_path)
