"""The command line as a process: help imports nothing heavy, and one case is quick."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "numpy")


def run_app(*arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh interpreter, and ``after`` in the same one."""
    code = f"import sys; from assay.harness.cli import app; app({arguments!r}, standalone_mode=False); {after}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run_app(*arguments, after=f"print([name for name in {HEAVY} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_one_case_takes_less_than_five_seconds() -> None:
    # of the processor: the wall clock would measure the machine's other work as well
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = ["--device", "cpu", "--kernel", "torch", "--family", "peaked", "--dtype", "float32"]
    done = run_app("check", "mla_prefill", *options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "1 cases" in done.stdout
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 5.0
