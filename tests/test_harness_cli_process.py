"""The command line as a process: help imports nothing heavy, one case is quick, Ctrl-C ends it at any moment."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assay.harness.report.run_folder import read_run

HEAVY = ("torch", "triton", "numpy")


def run_app(*arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh interpreter, and ``after`` in the same one."""
    code = f"import sys; from assay.harness.cli import app; app({arguments!r}, standalone_mode=False); {after}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A process that is started where Ctrl-C is ignored, as in the background of a shell, ignores it as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


KERNEL = """
from assay.reference.attention import attention

def attend(**given):
    return tuple(part.float() for part in attention(**given))
"""
RUN = "from assay.harness.cli import main; main()"


def children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def wait_until(come: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Look until something is so; fail if the process ends before."""
    end = time.monotonic() + 60
    while not come():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("moment", ["imports", "worker starts", "worker is up", "judging"])
def test_ctrl_c_ends_a_run_at_any_moment(moment: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    records = tmp_path / "run" / "records.jsonl"
    options = ["attention", "--kernel", f"{tmp_path / 'kernel.py'}:attend", "--dtype", "float32", "--device", "cpu"]
    command = [sys.executable, "-c", RUN, "check", *options, "--out", str(records.parent)]
    # a session is what a terminal is to its processes: Ctrl-C goes to all of them
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        come: dict[str, Callable[[], object]] = {
            "imports": lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text(),
            "worker starts": lambda: children(process.pid),
            "worker is up": records.exists,
            "judging": lambda: records.exists() and len(records.read_text().splitlines()) > 2,
        }
        wait_until(come[moment], process)
        started = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    # one whose start was interrupted sees for itself that its parent is gone
    end = time.monotonic() + 20
    while (left := [child for child in started if Path(f"/proc/{child}").exists()]) and time.monotonic() < end:
        time.sleep(0.01)
    assert left == []
    if moment == "judging":
        run = read_run(records.parent)
        assert len(run.records) >= 2
        assert any("planned cases were not started" in note for note in run.notes)


def test_an_interrupt_that_a_library_swallows_while_it_is_imported_still_counts() -> None:
    code = """
import os, signal
from assay.harness.startup import starting

def interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("swallowed")

interrupt()
with starting(device="cpu"):
    interrupt()
print("went on")
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, timeout=60)
    # before the imports it was an exception like any other
    assert (done.returncode, done.stdout) == (130, "swallowed\n")
    assert done.stderr == "interrupted before anything was judged\n"
