"""A plan in parts: shards cover it once, are judged alone, and their runs are merged into the run of the whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import cases, failing, passing, write_run
from rich.console import Console
from typer.testing import CliRunner

from assay.harness import cli, operations, session
from assay.harness.case import plan_digest
from assay.harness.operation import CaseRequest, Operation
from assay.harness.options import CheckOptions
from assay.harness.record import Record
from assay.harness.report.merge_runs import merge_runs
from assay.harness.report.run_folder import read_run
from assay.harness.shard import Shard

SIX = cases()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "console", Console(width=300))
    monkeypatch.setattr(cli, "errors", Console(width=300, stderr=True))


def assay(*arguments: object) -> Any:
    """Run the command in this process."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def shard_run(folder: Path, part: str, records: list[Record], **fields: Any) -> Path:
    """The folder that the run of one shard of six cases left."""
    whole = {"plan": plan_digest(SIX), "cases": 6, "shard": part}
    return write_run(folder / part.replace("/", "of"), records, **whole | fields)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_shards_make_the_whole_without_an_overlap(count: int) -> None:
    parts = [Shard(number, count).of(range(13)) for number in range(1, count + 1)]
    assert sorted(case for part in parts for case in part) == list(range(13))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # neighbours in the plan are alike, and go to different parts
    assert parts[0][:2] == [0, count]


def test_a_shard_is_read_as_it_is_written() -> None:
    assert Shard.parse("2/8") == Shard(2, 8)
    assert str(Shard.parse("10/10")) == "10/10"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "2", "1/2/3", "-1/2", "a/b", "1/2 ", "", "1.0/2", "١/٢"])  # noqa: RUF001
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a shard must be i/n with 1 <= i <= n, such as 2/8, got"):
        Shard.parse(text)


def test_two_shards_judge_a_plan_and_are_reported_as_one(tmp_path: Path) -> None:
    options = ["--kernel", "torch", "--family", "exact-one-hot", "--device", "cpu"]
    whole = operations.load("attention").cases(
        CaseRequest(tier="smoke", seed=0, dtypes=("float32", "float16", "bfloat16"))
    )
    plan = [case for case in whole if case.family == "exact-one-hot"]
    assert len(plan) > 2
    for part in (1, 2):
        result = assay("check", "attention", *options, "--shard", f"{part}/2", "--out", tmp_path / str(part))
        assert result.exit_code == 0, result.output
        mine = plan[part - 1 :: 2]
        assert f"plan {plan_digest(plan)}, shard {part}/2: {len(mine)} cases" in result.stdout
        run = read_run(tmp_path / str(part))
        assert [record.case["id"] for record in run.records] == [case.id for case in mine]
        assert (run.header["plan"], run.header["cases"], run.header["shard"]) == (
            plan_digest(plan),
            len(plan),
            f"{part}/2",
        )
        assert run.notes == ()
    folders = [tmp_path / "1", tmp_path / "2"]
    result = assay("report", *folders, "--out", tmp_path / "both", "--format", "junit")
    assert result.exit_code == 0, result.output
    merged = read_run(tmp_path / "both")
    assert {record.case["id"] for record in merged.records} == {case.id for case in plan}
    assert (merged.notes, "shard" in merged.header) == ((), False)
    # what was merged is a run like any other
    result = assay("report", tmp_path / "both", "--against", tmp_path / "both", "--format", "junit")
    assert f"{len(plan)} judgements in common: no verdict changed." in result.stdout


def test_a_merged_run_keeps_what_was_judged_to_the_last_number(tmp_path: Path) -> None:
    records = [failing(SIX[0]), *map(passing, SIX[1:])]
    runs = [read_run(shard_run(tmp_path, f"{at + 1}/3", records[at::3])) for at in range(3)]
    merged = merge_runs(runs, tmp_path)
    assert sorted(merged.records, key=records.index) == records
    assert merged.notes == ()


def test_a_missing_shard_is_cases_that_were_not_started(tmp_path: Path) -> None:
    first = shard_run(tmp_path, "1/3", [passing(SIX[0]), passing(SIX[3])])
    second = shard_run(tmp_path, "2/3", [passing(SIX[1])])
    assert read_run(first).notes == ()
    assert read_run(second).notes == ("1 of 2 planned cases were not started.",)
    merged = merge_runs([read_run(first), read_run(second)], tmp_path)
    assert merged.notes == ("3 of 6 planned cases were not started.",)


def test_a_shard_that_was_cut_off_is_named(tmp_path: Path) -> None:
    folders = [shard_run(tmp_path, f"{at + 1}/2", [passing(case) for case in SIX[at::2]]) for at in range(2)]
    file = folders[0] / "records.jsonl"
    file.write_text(file.read_text()[:-40])
    merged = merge_runs([read_run(folder) for folder in folders], tmp_path)
    assert merged.notes == (
        f"{folders[0]}: The run was interrupted while writing: line 4 is cut off and was left out.",
        "1 of 6 planned cases were not started.",
    )


def test_what_differs_between_the_machines_is_listed(tmp_path: Path) -> None:
    versions = {"torch": "2.13.0", "triton": "3.7.1"}
    folders = [
        shard_run(tmp_path, "1/2", [passing(SIX[0])], device="H200", versions=versions),
        shard_run(tmp_path, "2/2", [passing(SIX[1])], device="B200", versions=versions | {"triton": None}),
    ]
    header = merge_runs([read_run(folder) for folder in folders], tmp_path).header
    assert header["device"] == "H200; B200"
    assert header["versions"] == {"torch": "2.13.0", "triton": "3.7.1; none"}


@pytest.mark.parametrize(("name", "value"), [("plan", "p2"), ("seed", 4), ("tier", "full"), ("cases", 7)])
def test_runs_of_different_plans_are_not_merged(name: str, value: object, tmp_path: Path) -> None:
    runs = [
        shard_run(tmp_path, "1/2", [passing(SIX[0])]),
        shard_run(tmp_path, "2/2", [passing(SIX[1])], **{name: value}),
    ]
    result = assay("report", *runs, "--out", tmp_path / "both")
    assert result.exit_code == 2
    assert f"runs to be merged must be of one {name}, got " in result.stderr
    assert not (tmp_path / "both").exists()


def test_a_judgement_in_two_runs_is_refused(tmp_path: Path) -> None:
    runs = [read_run(shard_run(tmp_path, f"{at}/2", [passing(SIX[0])])) for at in (1, 2)]
    with pytest.raises(
        ValueError, match=r"must hold each judgement once, got mla_prefill\[torch\] on mla_prefill-diff"
    ):
        merge_runs(runs, tmp_path)
    # another kernel on the same case is another judgement
    other = replace(runs[1], records=(replace(runs[1].records[0], kernel="attend"),))
    assert len(merge_runs([runs[0], other], tmp_path).records) == 2


def test_merged_records_never_take_the_place_of_a_shard(tmp_path: Path) -> None:
    folders = [shard_run(tmp_path, f"{at + 1}/2", [passing(SIX[at])]) for at in range(2)]
    before = [(folder / "records.jsonl").read_text() for folder in folders]
    for out in ([], ["--out", folders[0]], ["--out", folders[1] / ".." / folders[1].name]):
        result = assay("report", *folders, *out)
        assert result.exit_code == 2
        assert "--out must be a folder of its own for the merged run" in result.stderr
    assert [(folder / "records.jsonl").read_text() for folder in folders] == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shard", "3/2"], "--shard: a shard must be i/n with 1 <= i <= n, such as 2/8, got '3/2'"),
        (["--shard", "40/40", "--family", "diffuse"], "--shard must leave at least one of "),
        (["--shard", "1/2", "--tier", "nightly"], "--seed must be given with --shard in the nightly tier"),
    ],
)
def test_shards_that_cannot_be_served_exit_with_two(arguments: list[str], text: str) -> None:
    result = assay("check", "attention", "--device", "cpu", "--kernel", "torch", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_downgrade_is_named_over_the_whole_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reassess_answers(operation: Operation, name: str, ask: Any, cases: Any, records: list[Record], *_: Any) -> Any:
        asked.append(name)
        return records

    monkeypatch.setattr(session, "reassess_answers", reassess_answers)
    options = ["--kernel", "torch", "--family", "exact-one-hot", "--device", "cpu", "--dtype", "float32"]
    assert assay("check", "attention", *options, "--shard", "1/1").exit_code == 0
    assert asked == ["attention[torch]"]
    cases = operations.load("attention").cases(CaseRequest(tier="smoke", seed=0, dtypes=("float32", "float16")))
    assert len([case for case in cases if case.family == "exact-one-hot"]) >= 2
    assert assay("check", "attention", *options, "--dtype", "float16", "--shard", "1/2").exit_code == 0
    assert asked == ["attention[torch]"]


def test_a_waiver_that_a_shard_did_not_need_may_be_needed_in_another() -> None:
    assert CheckOptions().whole_tier
    assert not CheckOptions(shard="1/2").whole_tier
