"""The process that compiles: ``python -m assay.harness.counts._compile_worker``.

It takes a request on stdin and answers with one JSON line a build. It imports torch and triton once, then forks for
each build, since an assertion inside the compiler ends its process. The request is ``{"processes": n, "builds":
[{"name", "arch", "capability", "call", "kernel", "arguments"}, ...]}``. The first line of the answer holds the versions
of the compilers of each architecture.
"""

import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

from .._doctor_machine import tool_version
from ._compile_binary import measure
from .standin_device import standin_device

SECONDS = 300.0

_RUN = triton.runtime.JITFunction.run


class _Compiler:
    """Compiles the one kernel that is wanted when it would be launched."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self.launched: list[str] = []
        self.fields: list[dict[str, Any]] = []

    def launch(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        self.launched.append(name)
        if name != self._wanted:
            return
        compiled = _RUN(kernel, *arguments, warmup=True, **options)
        constants = {name: value for name, value in options.items() if name.isupper()}
        configuration = ", ".join(f"{name} {value}" for name, value in sorted(constants.items()))
        fields = {"builds": True, "constants": configuration, **measure(compiled)}
        if fields not in self.fields:
            self.fields.append(fields)

    def operation(self, name: str) -> None:
        """Only Triton compiles here."""

    def transfer(self, direction: str, function: str) -> None:
        """No value is looked at here."""

    def wait(self, function: str) -> None:
        """Nothing runs here."""


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    # flushed before the first fork: a child would write whatever is still buffered once more
    print(json.dumps({"versions": _versions(request["builds"])}), flush=True)
    waiting, running = list(request["builds"]), dict[Any, _Child]()
    with tempfile.TemporaryDirectory() as cache:
        # nothing that an earlier run compiled is looked at
        os.environ["TRITON_CACHE_DIR"] = cache
        while waiting or running:
            while waiting and len(running) < request["processes"]:
                child = _Child(waiting.pop(0))
                running[child.process.sentinel] = child
            ended = wait(list(running), timeout=1.0)
            late = [sentinel for sentinel, child in running.items() if time.monotonic() > child.deadline]
            for sentinel in dict.fromkeys([*ended, *late]):
                print(json.dumps(running.pop(sentinel).outcome(ended=sentinel in ended)), flush=True)


def _versions(builds: list[dict[str, Any]]) -> dict[str, str]:
    """The compilers that make a build, by architecture."""
    found = {}
    for build in builds:
        major, minor = build["capability"]
        assembler = tool_version(get_ptxas(10 * major + minor).path)
        found[build["arch"]] = f"triton {triton.__version__}, ptxas {assembler}"
    return found


class _Child:
    """One build in a process of its own."""

    def __init__(self, build: dict[str, Any]) -> None:
        self.build = build
        self.deadline = time.monotonic() + SECONDS
        self._said = tempfile.TemporaryFile(mode="w+")
        context = multiprocessing.get_context("fork")
        self._answer, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_compile, args=(build, sender, self._said.fileno()))
        self.process.start()
        sender.close()

    def outcome(self, *, ended: bool) -> dict[str, Any]:
        """The fields of the build, or why there are none; a process that has not ended is late."""
        if not ended:
            self.process.kill()
        self.process.join()
        try:
            fields = self._answer.recv()
        except EOFError:
            self._said.seek(0)
            died = f"exit {self.process.exitcode}: {essence(self._said.read())}"
            fields = {"builds": False, "why": died if ended else f"not done after {SECONDS:.0f} s"}
        self._answer.close()
        self._said.close()
        return {"name": self.build["name"], "fields": fields}


def _compile(build: dict[str, Any], sender: Connection, said: int) -> None:
    """Take the host's way to the launch; send the fields of the one kernel that it would launch."""
    # what the compiler prints is kept for the reason, and out of the answers
    os.dup2(said, 1)
    os.dup2(said, 2)
    module, _, function = build["call"].partition(":")
    compiler = _Compiler(build["kernel"])
    try:
        with standin_device(compiler, tuple(build["capability"])):
            getattr(importlib.import_module(module), function)(**build["arguments"])
        sender.send(_only(compiler, build))
    except Exception as error:
        sender.send({"builds": False, "why": f"{type(error).__name__}: {essence(str(error))}"})


def _only(compiler: _Compiler, build: dict[str, Any]) -> dict[str, Any]:
    """The fields of the build; a call that would have several builds made of one kernel names none of them."""
    if len(compiler.fields) != 1:
        launched = ", ".join(compiler.launched) or "nothing"
        raise RuntimeError(
            f"must launch {build['kernel']} in one form, got {len(compiler.fields)} of them ({launched})"
        )
    return compiler.fields[0]


def essence(text: str) -> str:
    """The line of a compiler's complaint that names the error, without paths, line numbers and lengths of blanks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assembler = [line for line in lines if re.match(r"ptxas.*\b(error|fatal)\b", line)]
    telling = [line for line in lines if re.search(r"error|fatal|assert", line, flags=re.IGNORECASE)]
    line = (assembler or telling or lines or ["no reason given"])[0]
    line = re.sub(r"(?<!\w)/[\w./+-]*/", "", re.sub(r"^ptxas.*; ", "ptxas ", line))
    return re.sub(r"\s+", " ", line)[:300]


if __name__ == "__main__":
    main()
