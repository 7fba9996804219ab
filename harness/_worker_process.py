"""The process of a worker as its parent holds it: two pipes, a session of its own, an end that takes all with it."""

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from torch import Tensor

from .messages import MessageError, Wait, receive, send

# a process whose pipes are closed needs a moment until its exit is known
END_SECONDS = 2.0
# a killed process may wait for a driver; it is left to itself then
REAP_SECONDS = 10.0

Message = tuple[dict[str, Any], dict[str, Tensor]]


class WorkerProcess:
    """Runs a Python module that takes requests from one pipe and puts answers into another.

    It reads nothing else: its standard input is empty, and what it prints goes where errors go. In a session of its own
    it gets no Ctrl-C of the terminal, and it is ended with every process that it started there.
    """

    def __init__(self, module: str, arguments: list[str]) -> None:
        """Start it; its parent's number and the descriptors of requests and answers follow the arguments."""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, str(os.getpid()), str(requests), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(requests, answers),
                start_new_session=True,
            )
        finally:
            os.close(requests)
            os.close(answers)

    def hear(self, seconds: float) -> Message:
        """The first message, which nobody asked for.

        Raises:
            TimeoutError: If there is none in time.
            EOFError: If the process ended, or closed its pipe.
            MessageError: If it wrote something else.
        """
        return receive(self._answers, Wait(time.monotonic() + seconds, self._has_ended))

    def ask(self, content: dict[str, Any], seconds: float) -> Message:
        """The answer to a request; errors are those of ``hear``."""
        # unguessable, so that only what has read this request can answer it
        request = secrets.token_hex(8)
        wait = Wait(time.monotonic() + seconds, self._has_ended)
        try:
            send(self._requests, {**content, "request": request}, {}, wait)
        except BrokenPipeError as error:
            raise EOFError from error
        answer, tensors = receive(self._answers, wait)
        if answer.get("request") != request:
            raise MessageError(f"an answer must name request {request}, got {answer.get('request')!r}")
        return answer, tensors

    def last_words(self) -> str:
        """How it ended, or that it lives on without its pipes."""
        end = time.monotonic() + END_SECONDS
        while not self._has_ended() and time.monotonic() < end:
            time.sleep(0.01)
        return f"ended: {self._exit_text()}" if self._has_ended() else "closed the pipe to the judge"

    def close(self) -> None:
        """End it and all that it started."""
        # before anybody waits for it: until then its number cannot be another's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        os.close(self._requests)
        os.close(self._answers)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)

    def _has_ended(self) -> bool:
        return self._exit_text() is not None

    def _exit_text(self) -> str | None:
        try:
            # leaves the process to be waited for
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "exit code unknown"
        if found is None:
            return None
        if found.si_code == os.CLD_EXITED:
            return f"exit code {found.si_status}"
        known = found.si_status in set(signal.Signals)
        return f"signal {signal.Signals(found.si_status).name if known else found.si_status}"
