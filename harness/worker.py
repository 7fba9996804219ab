"""A kernel in a process of its own: what it breaks there is a verdict, and the run goes on.

The parent and the worker draw the same inputs from the case. The worker runs the kernel and sends back its answer; the
parent alone consults the oracle. Messages are JSON with tensors as safetensors, never pickle, through pipes that are
undisturbed by a kernel that reads, prints or forks.
"""

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._worker_process import WorkerProcess
from .case import Case
from .discovery import load_operation
from .execution import Execution, Stop, describe, execute
from .kernels import KernelNotFoundError, find_kernels
from .messages import MessageError, decode, encode, receive, send, spent_on
from .operation import Kernel, Operation
from .phases import accounted, count
from .record import Record, Verdict
from .runner import NEEDS_DEVICE, Exam, ExamRoom, Finding, assess, make_record, refuse, sit

# an interpreter starts, imports torch and the kernel's module, and maybe opens a device
START_SECONDS = 120.0
# out of the way of a kernel that takes a descriptor's number for granted
FIRST_DESCRIPTOR = 200
# of prctl: the signal that a process gets when its parent dies
PR_SET_PDEATHSIG = 1


class Worker:
    """Judges one kernel that lives in a child process, which is started anew whenever it dies."""

    def __init__(
        self, operation: Operation, spec: str, device: torch.device, *, timeout: float, room: ExamRoom | None = None
    ) -> None:
        """Start the child, which imports the kernel; this process never does.

        Args:
            operation: What the kernel computes.
            spec: The kernel's name, as ``find_kernels`` takes it.
            device: Where the child runs it.
            timeout: Seconds that a case may take in the child.
            room: Of a run in which several kernels take the same cases.

        Raises:
            KernelNotFoundError: If the child finds no such kernel, cannot import it, or cannot call it so.
        """
        self._operation, self._spec, self._device, self._timeout = operation, spec, device, timeout
        self._room = room or ExamRoom()
        self._process: WorkerProcess | None = None
        self.name = self._start()

    def run_case(self, case: Case) -> Record:
        """Judge one case; a crash, a hang or a lost process is its verdict."""
        start = time.perf_counter()
        with accounted() as spent:
            try:
                finding = self._find(case)
            except Exception as error:
                # the kernel fails in its own process, so this is a fault of the judge, and is reported as one
                finding = Finding(verdict=Verdict.HARNESS_ERROR, text=describe(error))
        seconds = time.perf_counter() - start
        return make_record(self._operation, self.name, case, self._device, finding, seconds=seconds, spent=spent)

    def ask(self, exam: Exam) -> Execution | Stop:
        """What the kernel answers to a case, without a judgement."""
        return self._execute(exam.case)

    def close(self) -> None:
        """End the child and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _start(self) -> str:
        process = self._process = WorkerProcess(
            "assay.harness.worker", [self._operation.name, self._spec, str(self._device)]
        )
        try:
            return self._greeted(process)
        except BaseException:
            # an interrupt included: the caller does not have this worker yet
            self.close()
            raise

    def _greeted(self, process: WorkerProcess) -> str:
        try:
            ready, _ = process.hear(START_SECONDS)
        except TimeoutError as error:
            text = f"its process gave no sign within {START_SECONDS:g} s"
            raise KernelNotFoundError(f"--kernel {self._spec} must be importable, {text}") from error
        except (EOFError, MessageError) as error:
            text = f"its process {_what_it_did(process, error)}"
            raise KernelNotFoundError(f"--kernel {self._spec} must be importable, {text}") from error
        if "error" in ready:
            raise KernelNotFoundError(str(ready["error"]))
        return str(ready.get("name"))

    def _find(self, case: Case) -> Finding:
        if case.needs_device and self._device.type == "cpu":
            return Finding(verdict=Verdict.UNSUPPORTED, text=NEEDS_DEVICE)
        exam = sit(self._operation, case, self._device, self._room)
        if isinstance(exam, Finding):
            return exam
        return assess(exam, self._execute(case))

    def _execute(self, case: Case) -> Execution | Stop:
        if self._process is None:
            try:
                self._start()
            except KernelNotFoundError as error:
                return Stop(verdict=Verdict.CRASH, text=f"the kernel's process could not be started again: {error}")
        process = self._process
        if process is None:
            raise RuntimeError("the worker must be running after its start")
        try:
            content, tensors = process.ask({"case": case.to_json()}, self._timeout)
            result, spent = decode(content, tensors, self._device), spent_on(content)
        except TimeoutError:
            self.close()
            return Stop(verdict=Verdict.TIMEOUT, text=f"no answer within {self._timeout:g} s")
        except (EOFError, MessageError) as error:
            text = f"the kernel's process {_what_it_did(process, error)}"
            self.close()
            return Stop(verdict=Verdict.CRASH, text=text)
        except BaseException:
            # its answer would be taken for that to another question
            self.close()
            raise
        for name, seconds in spent.items():
            count(name, seconds)
        if content.get("lost"):
            self.close()
        return result


@contextmanager
def isolated(operation: Operation, spec: str, device: torch.device, *, timeout: float) -> Iterator[Worker]:
    """A worker that is ended with the block, however it is left."""
    worker = Worker(operation, spec, device, timeout=timeout)
    try:
        yield worker
    finally:
        worker.close()


def _what_it_did(process: WorkerProcess, error: EOFError | MessageError) -> str:
    return process.last_words() if isinstance(error, EOFError) else f"garbled its answer: {error}"


def serve(op: str, spec: str, device_name: str, parent: str, requests_name: str, answers_name: str) -> None:
    """The child: answer each case until the parent is gone."""
    _die_with(int(parent))
    requests, answers = _set_aside(int(requests_name)), _set_aside(int(answers_name))
    own = os.getpid()

    def answer(content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if os.getpid() != own:
            # a copy of this process, forked by the kernel, has no say
            os._exit(0)
        send(answers, content, tensors)

    operation, device = load_operation(op), torch.device(device_name)
    try:
        kernel = find_kernels(operation, spec)[0]
    except Exception as error:
        expected = isinstance(error, KernelNotFoundError | TypeError)
        text = str(error) if expected else f"--kernel {spec} cannot be imported: {type(error).__name__}: {error}"
        answer({"error": text}, {})
        return
    answer({"name": kernel.name}, {})
    while True:
        try:
            content, _ = receive(requests)
        except EOFError:
            return
        with accounted() as spent:
            result = _run(operation, kernel, Case.from_json(content["case"]), device)
        said, tensors = encode(result)
        answer({**said, "spent": spent.seconds, "request": content["request"]}, tensors)


def _die_with(parent: int) -> None:
    """A kernel that hangs must not outlive the judge, and in its own session no signal to the judge's reaches it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _set_aside(descriptor: int) -> int:
    """The same pipe under a high number, closed in every program that a kernel starts."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    os.close(descriptor)
    return high


def _run(operation: Operation, kernel: Kernel, case: Case, device: torch.device) -> Execution | Stop:
    refusal = refuse(kernel, case, device)
    if refusal is not None:
        return Stop(verdict=refusal.verdict, text=refusal.text)
    # what an imported kernel made the default must not change the inputs
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    exam = sit(operation, case, device, ExamRoom())
    if isinstance(exam, Finding):
        return Stop(verdict=exam.verdict, text=exam.text)
    return execute(operation, kernel, case, exam.inputs, device)


if __name__ == "__main__":
    serve(*sys.argv[1:])
