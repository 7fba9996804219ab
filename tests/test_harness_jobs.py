"""Cases judged by several processes: the same records in the same order, and no silence when a process dies."""

import io
import json
import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.harness import jobs, session
from assay.harness.case import Case
from assay.harness.jobs import default_jobs, side_by_side
from assay.harness.options import CheckOptions
from assay.harness.record import ExitCode, Record, Verdict
from assay.harness.session import run_check

Judge = Callable[[Case], list[Record]]
CASES = [Case(op="attention", family="diffuse", dtype="float32", seed=seed) for seed in range(5)]


def counting() -> Judge:
    """Two kernels that pass everything."""
    return lambda case: [_record(case, name) for name in ("a", "b")]


def dying() -> Judge:
    """Ends its process at the third case."""

    def judge(case: Case) -> list[Record]:
        if case.seed == 2:
            os._exit(1)
        return [_record(case, "a")]

    return judge


def gone() -> Judge:
    """Ends its process at once."""
    return lambda case: os._exit(1)


def _record(case: Case, kernel: str) -> Record:
    return Record(op=case.op, kernel=kernel, case=case.to_json(), device="cpu", verdict=Verdict.PASS)


def test_records_come_in_the_order_of_the_cases() -> None:
    found = list(side_by_side(counting, CASES, 2))
    assert [[(record.case["seed"], record.kernel) for record in records] for records in found] == [
        [(seed, "a"), (seed, "b")] for seed in range(5)
    ]


def test_a_process_that_dies_is_not_passed_over() -> None:
    with pytest.raises(BrokenProcessPool):
        list(side_by_side(dying, CASES, 1))


def broken(case: Case) -> list[Record]:
    """A judge that does not get to a verdict."""
    raise RuntimeError(case.family)


@pytest.mark.parametrize("started", [False, True])
def test_memory_of_a_device_is_given_back_after_each_case(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    given: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    monkeypatch.setattr(jobs, "_work", counting())
    jobs._work_on(CASES[0])
    monkeypatch.setattr(jobs, "_work", broken)
    with pytest.raises(RuntimeError, match="diffuse"):
        jobs._work_on(CASES[0])
    assert given == [True, True] * started


def lines(folder: Path) -> list[tuple[Any, ...]]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()[1:]]
    return [(record["kernel"], record["case"]["id"], record["verdict"], record["gates"]) for record in records]


def check(out: Path, **options: Any) -> int:
    console = Console(file=io.StringIO(), width=200)
    return run_check(CheckOptions(device="cpu", dtypes=("float16",), out=out, **options), console)


def test_side_by_side_a_run_judges_as_one_by_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ops": ("attention",), "family": "peaked", "kernel": "torch"}
    assert check(tmp_path / "one", jobs=1, **options) == check(tmp_path / "two", jobs=2, **options) == ExitCode.PASSED
    assert lines(tmp_path / "one") == lines(tmp_path / "two") != []


def test_a_strange_kernel_is_found_out_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def run(q, k, v, **rest):\n    return q[..., :1] * 0, q[..., 0].float()\n")
    options: dict[str, Any] = {"ops": ("attention",), "family": "peaked", "kernel": f"{file}:run"}
    assert check(tmp_path / "out", jobs=2, **options) == ExitCode.FAILED
    assert {verdict for _, _, verdict, _ in lines(tmp_path / "out")} == {"STRUCTURE"}


def test_a_run_whose_process_died_ends_as_an_error_of_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "side_by_side", lambda prepare, cases, count: side_by_side(gone, cases, count))
    output = io.StringIO()
    options = CheckOptions(ops=("attention",), device="cpu", family="peaked", dtypes=("float16",), jobs=2)
    assert run_check(options, Console(file=output, width=200)) == ExitCode.HARNESS_ERROR
    assert "a process that judged our own kernels died" in output.getvalue()


@pytest.mark.parametrize(("options", "expected"), [({}, [2]), ({"in_process": True}, []), ({"jobs": 1}, [])])
def test_a_debugger_is_not_sent_elsewhere(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[int]
) -> None:
    asked: list[int] = []

    def across(prepare: Any, cases: list[Case], jobs: int) -> Any:
        asked.append(jobs)
        work = prepare()
        return map(work, cases)

    monkeypatch.setattr(session, "default_jobs", lambda device, cases: 3)
    monkeypatch.setattr(session, "side_by_side", across)
    given: dict[str, Any] = {"ops": ("attention",), "family": "peaked", "kernel": "torch", "dtypes": ("float16",)}
    assert run_check(CheckOptions(device="cpu", **given, **options), Console(file=io.StringIO())) == ExitCode.PASSED
    assert asked == expected


def test_how_many_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for cases, cores, expected in ((99, 2, 1), (100, 2, 2), (100, 1, 1), (1000, 2, 2), (1000, 64, 4), (0, 8, 1)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert default_jobs(torch.device("cpu"), cases) == expected
    for free, cores, expected in ((140 << 30, 16, 4), (140 << 30, 8, 2), (24 << 30, 64, 1), (8 << 30, 2, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert default_jobs(torch.device("cuda", 0), 1) == expected
