"""A kernel in a process of its own: whatever it does to that process or to its pipes ends in a verdict of its case."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import CPU, attention_case, operation_of

from assay.harness.kernels import KernelNotFoundError
from assay.harness.messages import MOST_TEXT
from assay.harness.record import Record, Verdict
from assay.harness.worker import Worker, isolated

# each function is a behaviour; `attend` takes the one whose name stands in the file beside it
KERNELS = """
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from assay.harness.messages import HEADER, MARK, send
from assay.harness.worker import FIRST_DESCRIPTOR
from assay.reference.attention import attention

FOLDER = Path(__file__).parent
calls = []

def pipes():
    near = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + 10)
    return [fd for fd in near if Path(f"/proc/self/fd/{fd}").exists()]

def note(pid):
    # there as a whole or not at all
    (FOLDER / "written").write_text(str(pid))
    (FOLDER / "written").rename(FOLDER / "pid")

def right(given):
    widened = {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()}
    out, lse = attention(**widened)
    return out.to(given["q"].dtype), lse.float()

def reads(given):
    sys.stdin.read()
    os.read(0, 1 << 20)
    return right(given)

def prints(given):
    os.write(1, b"x" * (1 << 22))
    print("y" * (1 << 22), flush=True)
    return right(given)

def dawdles(given):
    time.sleep(0.1)
    return right(given)

def forks(given):
    # both copies go on; Python is not told of this fork
    ctypes.CDLL(None).fork()
    return right(given)

def dies_behind_a_copy(given):
    if ctypes.CDLL(None).fork():
        os.kill(os.getpid(), signal.SIGSEGV)
    note(os.getpid())
    time.sleep(600)

def leaves_the_answer_to_a_copy(given):
    if os.fork():
        os._exit(0)
    return right(given)

def leaves_a_program_behind(given):
    note(subprocess.Popen(["sleep", "600"], close_fds=False).pid)
    os.kill(os.getpid(), signal.SIGKILL)

def writes_into_the_pipes(given):
    for fd in pipes():
        try:
            os.write(fd, b"tile 3 done, tile 4 done\\n")
        except OSError:
            pass
    return right(given)

def announces_too_much(given):
    os.write(pipes()[1], HEADER.pack(MARK, 1 << 62, 0))
    return right(given)

def answers_something_else(given):
    send(pipes()[1], {"verdict": "UNSUPPORTED", "text": "", "gates": [], "request": "0" * 16}, {})
    return right(given)

def closes_everything(given):
    os.closerange(3, 1 << 12)
    return right(given)

def closes_everything_and_hangs(given):
    os.closerange(3, 1 << 12)
    time.sleep(600)

def hangs(given):
    note(os.getpid())
    time.sleep(600)

def attend(**given):
    return globals()[(FOLDER / "behaviour").read_text()](given)
"""

Judge = Callable[[str], Record]
numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of kernels, and what they leave."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.py").write_text(KERNELS)
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Worker]:
    operation = operation_of(attention_case())
    with isolated(operation, f"{folder / 'kernels.py'}:attend", CPU, timeout=60.0) as worker:
        yield worker


@pytest.fixture
def judge(worker: Worker, folder: Path) -> Judge:
    """The record of a case on which the kernel behaves as named."""

    def judge(behaviour: str) -> Record:
        (folder / "behaviour").write_text(behaviour)
        return worker.run_case(attention_case(seed=next(numbers)))

    return judge


def is_running(pid: int) -> bool:
    """Whether a process lives: one that nobody has waited for yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int) -> bool:
    """Whether a process is gone within seconds."""
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.parametrize("behaviour", ["right", "reads", "prints", "forks"])
def test_what_a_kernel_does_beside_its_work_is_no_fault(
    behaviour: str, judge: Judge, capfd: pytest.CaptureFixture[str]
) -> None:
    # the cases after it show that nothing was left in a pipe, or taken from one
    records = [judge(behaviour), judge("right"), judge("right")]
    assert [(record.verdict, record.text) for record in records] == [(Verdict.PASS, "")] * 3


CRASHES = {
    "dies_behind_a_copy": "the kernel's process ended: signal SIGSEGV",
    "leaves_the_answer_to_a_copy": "the kernel's process ended: exit code 0",
    "leaves_a_program_behind": "the kernel's process ended: signal SIGKILL",
    "writes_into_the_pipes": "the kernel's process garbled its answer: a message must begin with",
    "announces_too_much": f"garbled its answer: a message must have at most {MOST_TEXT} ",
    "answers_something_else": "the kernel's process garbled its answer: an answer must name request",
    "closes_everything": "the kernel's process ended: exit code 1",
    "closes_everything_and_hangs": "the kernel's process closed the pipe to the judge",
}


@pytest.mark.parametrize("behaviour", CRASHES)
def test_a_broken_process_or_pipe_is_a_crash_and_the_run_goes_on(
    behaviour: str, judge: Judge, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "pid").unlink(missing_ok=True)
    start = time.monotonic()
    record = judge(behaviour)
    assert record.verdict is Verdict.CRASH
    assert CRASHES[behaviour] in record.text
    # noticed, and not waited for until the time was over
    assert time.monotonic() - start < 30
    if (folder / "pid").exists():
        assert ends(int((folder / "pid").read_text()))
    assert judge("right").verdict is Verdict.PASS


def test_the_time_of_both_processes_is_accounted_for(judge: Judge) -> None:
    record = judge("dawdles")
    assert set(record.spent) == {"inputs", "kernel", "oracle"}
    # five runs and more, of a tenth of a second
    assert 0.5 <= record.spent["kernel"] <= record.seconds
    assert sum(record.spent.values()) <= record.seconds + 1e-3


def test_a_process_that_dies_between_cases_is_found_at_the_next(judge: Judge, worker: Worker, folder: Path) -> None:
    assert judge("right").verdict is Verdict.PASS
    process = worker._process
    assert process is not None
    os.kill(process._process.pid, signal.SIGBUS)
    assert judge("right").text == "the kernel's process ended: signal SIGBUS"
    assert judge("right").verdict is Verdict.PASS


def test_a_hang_is_ended_with_its_verdict(folder: Path) -> None:
    (folder / "behaviour").write_text("hangs")
    case = attention_case()
    with isolated(operation_of(case), f"{folder / 'kernels.py'}:attend", CPU, timeout=4.0) as worker:
        record = worker.run_case(case)
    assert (record.verdict, record.text) == (Verdict.TIMEOUT, "no answer within 4 s")
    assert ends(int((folder / "pid").read_text()))


def test_a_kernel_that_cannot_be_started_again_is_a_crash(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "behaviour").write_text("leaves_the_answer_to_a_copy")
    case = attention_case()
    with isolated(operation_of(case), f"{tmp_path / 'kernels.py'}:attend", CPU, timeout=60.0) as worker:
        assert worker.run_case(case).verdict is Verdict.CRASH
        (tmp_path / "kernels.py").unlink()
        record = worker.run_case(case)
    assert record.verdict is Verdict.CRASH
    assert "could not be started again: --kernel must name an existing file" in record.text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import os; os.abort()", "must be importable, its process ended: signal SIGABRT"),
        ("import os; os.write(FIRST_DESCRIPTOR + 1, b'?' * 99)", "must be importable, its process garbled its answer"),
    ],
    ids=["dies", "writes"],
)
def test_an_import_that_breaks_the_process_says_how(code: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"from assay.harness.worker import FIRST_DESCRIPTOR\n{code}\n")
    with pytest.raises(KernelNotFoundError, match=text):
        Worker(operation_of(attention_case()), f"{tmp_path / 'broken.py'}:attend", CPU, timeout=60.0)


def test_a_fault_of_the_judge_is_recorded_as_one(judge: Judge, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(exam: Any, execution: Any) -> None:
        raise RuntimeError("a gate fell over")

    monkeypatch.setattr("assay.harness.worker.assess", broken)
    record = judge("right")
    assert record.verdict is Verdict.HARNESS_ERROR
    assert record.text.startswith("RuntimeError: a gate fell over")


def test_a_worker_does_not_outlive_a_judge_that_is_killed(folder: Path) -> None:
    (folder / "behaviour").write_text("hangs")
    (folder / "pid").unlink(missing_ok=True)
    script = f"""
    import torch
    from assay.harness import operations
    from assay.harness.case import Case
    from assay.harness.worker import Worker
    case = Case.from_json({attention_case().to_json()!r})
    kernel = {str(folder / "kernels.py") + ":attend"!r}
    Worker(operations.load("attention"), kernel, torch.device("cpu"), timeout=600.0).run_case(case)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) as parent:
        end = time.monotonic() + 60
        while not (folder / "pid").exists() and time.monotonic() < end:
            time.sleep(0.05)
        parent.kill()
    assert ends(int((folder / "pid").read_text()))
