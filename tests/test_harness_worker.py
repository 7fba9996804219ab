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
import torch
from builders import CPU, attention_case, operation_of

from assay.harness.execution import Execution, Stop
from assay.harness.kernels import KernelNotFoundError
from assay.harness.messages import HEADER, MARK, MOST_TEXT, MessageError, Wait, decode, encode, receive, send
from assay.harness.record import GateResult, Location, Record, Verdict
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


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        # a test may have closed its own
        try:
            os.close(end)
        except OSError:
            continue


def wait(seconds: float = 60.0, *, gone: bool = False) -> Wait:
    return Wait(time.monotonic() + seconds, lambda: gone)


def test_a_message_arrives_as_it_was_sent(pipe: tuple[int, int]) -> None:
    tensors = {"out": torch.arange(6.0).view(2, 3), "lse": torch.tensor([1, 2], dtype=torch.int32)}
    send(pipe[1], {"case": [1, None, "x"]}, tensors, wait())
    content, received = receive(pipe[0], wait())
    assert content == {"case": [1, None, "x"]}
    assert {name: tensor.tolist() for name, tensor in received.items()} == {
        "out": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "lse": [1, 2],
    }


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"Traceback (most recent call last)", "a message must begin with"),
        (HEADER.pack(MARK, MOST_TEXT + 1, 0), "at most"),
        (HEADER.pack(MARK, 0, 1 << 63), f"got 0 \\+ {1 << 63}"),
        (HEADER.pack(MARK, 5, 0) + b'{"a":', "must be JSON and safetensors, got JSONDecodeError"),
        (HEADER.pack(MARK, 2, 0) + b"\xff\xff", "must be JSON and safetensors, got UnicodeDecodeError"),
        (HEADER.pack(MARK, 2, 4) + b"{}torn", "must be JSON and safetensors, got SafetensorError"),
        (HEADER.pack(MARK, 2, 0) + b"[]", "must be a JSON object, got list"),
    ],
    ids=["text", "much JSON", "many tensors", "torn JSON", "no text", "torn tensors", "list"],
)
def test_what_is_no_message_is_refused_at_once(sent: bytes, text: str, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], sent)
    with pytest.raises(MessageError, match=text):
        receive(pipe[0], wait())


def test_a_torn_message_waits_for_its_rest_only_while_its_sender_lives(pipe: tuple[int, int]) -> None:
    whole = HEADER.pack(MARK, 9, 0) + b'{"a": 12}'
    os.write(pipe[1], whole[:-1])
    with pytest.raises(TimeoutError):
        receive(pipe[0], wait(0.05))
    # this process holds the pipe open, as a copy of the sender would
    os.write(pipe[1], whole[:-1])
    with pytest.raises(EOFError):
        receive(pipe[0], wait(gone=True))
    os.write(pipe[1], whole)
    assert receive(pipe[0], wait(gone=True)) == ({"a": 12}, {})
    os.close(pipe[1])
    with pytest.raises(EOFError):
        receive(pipe[0], wait())


def test_an_answer_is_read_back_as_it_was() -> None:
    gate = GateResult(gate="G2 out written", ratio=float("inf"), where=Location(token=3, head=1), text="left unwritten")
    stop = Stop(verdict=Verdict.WRITE_SCOPE, text="1 of 9 elements", gates=(gate,))
    assert decode(*encode(stop), CPU) == stop


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({}, "KeyError: 'gates'"),
        ({"gates": None}, "TypeError"),
        ({"gates": [], "verdict": "FINE", "text": ""}, "ValueError: 'FINE' is not a valid Verdict"),
        ({"gates": [], "contract": {"p": "fp32", "mutates": []}, "conventions": {}}, "KeyError: 'empty_row'"),
        ({"gates": [], "contract": "bf16"}, "TypeError"),
    ],
)
def test_an_answer_with_a_part_missing_is_no_message(content: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=f"an answer must hold all its parts, got {text}"):
        decode(content, {}, CPU)


def test_an_answer_without_its_tensors_is_no_message(judge: Judge, worker: Worker, folder: Path) -> None:
    (folder / "behaviour").write_text("right")
    case = attention_case(seed=next(numbers))
    answer = worker._execute(case)
    assert isinstance(answer, Execution)
    content, tensors = encode(answer)
    whole = decode(content, tensors, CPU)
    assert isinstance(whole, Execution)
    assert whole.contract == answer.contract
    assert torch.equal(whole.last[0], answer.last[0])
    del tensors["last.lse"]
    with pytest.raises(MessageError, match=r"got KeyError: 'last\.lse'"):
        decode(content, tensors, CPU)


def test_a_request_that_nobody_takes_is_given_up(pipe: tuple[int, int]) -> None:
    big = {"case": "x" * (1 << 20)}
    with pytest.raises(TimeoutError):
        send(pipe[1], big, {}, wait(0.2))
    with pytest.raises(EOFError):
        send(pipe[1], big, {}, wait(gone=True))
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        send(pipe[1], big, {}, wait())
