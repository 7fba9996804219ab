"""A session that was asked for a GPU and has none, or used none, is never green."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from conftest import GpuTests, why_no_gpu

TESTS = Path(__file__).parent


def exit_status(*, ran: int, status: int = pytest.ExitCode.OK) -> int:
    rules = GpuTests(required=True, obstacle=None)
    for _ in range(ran):
        rules.pytest_runtest_logreport(report("call", "passed"))
    session: Any = SimpleNamespace(exitstatus=status, config=SimpleNamespace())
    rules.pytest_sessionfinish(session)
    return int(session.exitstatus)


def report(when: Any, outcome: Any) -> pytest.TestReport:
    keywords: dict[str, Literal[1]] = {"gpu": 1}
    return pytest.TestReport("test", ("", 0, ""), keywords, outcome, None, when)


def test_a_required_gpu_that_no_test_used_fails_the_session() -> None:
    assert exit_status(ran=0) == pytest.ExitCode.TESTS_FAILED
    assert exit_status(ran=1) == pytest.ExitCode.OK
    assert exit_status(ran=0, status=pytest.ExitCode.INTERRUPTED) == pytest.ExitCode.INTERRUPTED


def test_each_gpu_test_is_counted_once() -> None:
    rules = GpuTests(required=False, obstacle="no CUDA device")
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed"), ("setup", "skipped")):
        rules.pytest_runtest_logreport(report(when, outcome))
    assert (rules.ran, rules.skipped) == (1, 1)


def test_interpreted_kernels_are_not_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert why_no_gpu() is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_gpu() == "TRITON_INTERPRET=1 keeps the kernels off the GPU"


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_a_required_gpu_that_is_not_there_fails_at_once() -> None:
    command = [sys.executable, "-m", "pytest", "--require-gpu", "-p", "no:cacheprovider", str(TESTS / "test_layout.py")]
    done = subprocess.run(
        command, cwd=TESTS.parent, capture_output=True, text=True, env=os.environ | {"PYTEST_ADDOPTS": ""}
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--require-gpu: {why_no_gpu()}" in done.stderr
    assert "passed" not in done.stdout
