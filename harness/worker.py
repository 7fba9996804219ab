"""A kernel in a process of its own: what it breaks there is a verdict, and the run goes on.

The parent and the worker draw the same inputs from the case. The worker runs the kernel and sends back its answer; the
parent alone consults the oracle. Messages are JSON with tensors as safetensors, never pickle.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .case import Case
from .discovery import load_operation
from .execution import Execution, Stop, execute
from .kernels import KernelNotFoundError, find_kernels
from .messages import decode, encode, receive, send
from .operation import Kernel, Operation
from .record import Record, Verdict
from .runner import NEEDS_DEVICE, Exam, ExamRoom, Finding, assess, make_record, refuse, sit

# an interpreter starts, imports torch and the kernel's module, and maybe opens a device
START_SECONDS = 120.0


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
        self._process: subprocess.Popen[bytes] | None = None
        self.name = self._start()

    def run_case(self, case: Case) -> Record:
        """Judge one case; a crash, a hang or a lost process is its verdict."""
        start = time.perf_counter()
        finding = self._find(case)
        seconds = time.perf_counter() - start
        return make_record(self._operation, self.name, case, self._device, finding, seconds=seconds)

    def ask(self, exam: Exam) -> Execution | Stop:
        """What the kernel answers to a case, without a judgement."""
        return self._execute(exam.case)

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _start(self) -> str:
        command = [sys.executable, "-m", "assay.harness.worker", self._operation.name, self._spec, str(self._device)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            ready, _ = receive(self._process.stdout, START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self.close()
            raise KernelNotFoundError(
                f"--kernel {self._spec} must be importable, its process never answered"
            ) from error
        if "error" in ready:
            self.close()
            raise KernelNotFoundError(ready["error"])
        return str(ready["name"])

    def _find(self, case: Case) -> Finding:
        if case.needs_device and self._device.type == "cpu":
            return Finding(verdict=Verdict.UNSUPPORTED, text=NEEDS_DEVICE)
        exam = sit(self._operation, case, self._device, self._room)
        if isinstance(exam, Finding):
            return exam
        return assess(exam, self._execute(case))

    def _execute(self, case: Case) -> Execution | Stop:
        if self._process is None:
            self._start()
        process = self._process
        if process is None:
            raise RuntimeError("the worker must be running after its start")
        try:
            send(process.stdin, {"case": case.to_json()}, {})
            content, tensors = receive(process.stdout, self._timeout)
        except TimeoutError:
            self.close()
            return Stop(verdict=Verdict.TIMEOUT, text=f"no answer within {self._timeout:g} s")
        except (EOFError, BrokenPipeError):
            code = process.wait()
            self.close()
            return Stop(verdict=Verdict.CRASH, text=f"the kernel's process ended: {_exit_text(code)}")
        if content.get("lost"):
            self.close()
        return decode(content, tensors, self._device)


@contextmanager
def isolated(operation: Operation, spec: str, device: torch.device, *, timeout: float) -> Iterator[Worker]:
    """A worker that is ended with the block, however it is left."""
    worker = Worker(operation, spec, device, timeout=timeout)
    try:
        yield worker
    finally:
        worker.close()


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(op: str, spec: str, device_name: str) -> None:
    """The child: answer each case until the parent is gone."""
    # a kernel that prints must not write into the messages
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Ctrl-C is the parent's to handle: it ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    operation, device = load_operation(op), torch.device(device_name)
    try:
        kernel = find_kernels(operation, spec)[0]
    except Exception as error:
        expected = isinstance(error, KernelNotFoundError | TypeError)
        text = str(error) if expected else f"--kernel {spec} cannot be imported: {type(error).__name__}: {error}"
        send(answers, {"error": text}, {})
        return
    send(answers, {"name": kernel.name}, {})
    while True:
        try:
            content, _ = receive(sys.stdin.buffer, None)
        except EOFError:
            return
        case = Case.from_json(content["case"])
        send(answers, *encode(_run(operation, kernel, case, device)))


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
