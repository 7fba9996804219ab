"""Instructions of a function, counted by callgrind: the process that runs under valgrind, and the one that starts it.

``python -m assay.harness.counts._callgrind`` under valgrind plans each step of the operations named on its command
line, and asks callgrind to count from the start of the planning to its end.
"""

import ctypes
import functools
import gc
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# the requests of valgrind/callgrind.h; its tools share one numbering, in which "CT" is callgrind
_CALLGRIND = (ord("C") << 24) | (ord("T") << 16)
_ZERO, _DUMP, _START, _STOP = _CALLGRIND + 1, _CALLGRIND + 3, _CALLGRIND + 4, _CALLGRIND + 5

# a request is a sequence of rotations that change nothing, which valgrind knows; rax holds the address of arguments:
# mov rax, rdi; mov rdx, rsi; rol rdi, 3; rol rdi, 13; rol rdi, 61; rol rdi, 51; xchg rbx, rbx; mov rax, rdx; ret
_REQUEST = bytes.fromhex("4889f8 4889f2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")

SECONDS = 600.0

# calls that warm up, and calls that are counted, of which the fewest instructions hold: in some the allocator or a
# table grows, and which ones depends on where the process lies in memory (10 % of a short plan)
_WARM_UP, _CALLS = 9, 4


class _Callgrind:
    """Asks the callgrind that this process runs under; without one, a request does nothing."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._page.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._ask = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)(address)

    def count(self, name: str, function: Callable[[], Any]) -> None:
        """Count the instructions of one call, under that name."""
        label = ctypes.create_string_buffer(name.encode())
        start, stop, zero, dump = (
            (ctypes.c_uint64 * 6)(request, ctypes.addressof(label)) for request in (_START, _STOP, _ZERO, _DUMP)
        )
        self._ask(ctypes.addressof(zero), 0)
        self._ask(ctypes.addressof(start), 0)
        function()
        self._ask(ctypes.addressof(stop), 0)
        self._ask(ctypes.addressof(dump), 0)


def count_instructions(functions: dict[str, Callable[[], Any]]) -> None:
    """Count a few calls of each function, once they are warm; in a process that ``instructions_of`` starts."""
    callgrind = _Callgrind()
    # a collection in the middle would be counted
    gc.disable()
    for name, function in functions.items():
        for _ in range(_WARM_UP):
            function()
        for _ in range(_CALLS):
            callgrind.count(name, function)


def why_not() -> str | None:
    """Why instructions cannot be counted here, or None."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    if platform.machine() != "x86_64":
        return f"the request to callgrind is written for x86_64, got {platform.machine()}"
    return None


def instructions_of(command: Sequence[str]) -> dict[str, int]:
    """Run a Python command whose process calls ``count_instructions``; return the fewest of each name.

    Raises:
        RuntimeError: If it fails, or counts nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        pattern = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={pattern}"]
        done = subprocess.run(
            [*valgrind, sys.executable, *command],
            env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        found = dict[str, int]()
        for path in Path(folder).iterdir():
            if (pair := _named_total(path.read_text())) is not None:
                name, total = pair
                found[name] = min(total, found.get(name, total))
    if done.returncode or not found:
        raise RuntimeError(f"callgrind must count something, got exit {done.returncode}: {done.stderr[-2000:]}")
    return found


def environment() -> str:
    """All that instruction counts depend on, as far as it can be named."""
    version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    libc, python = " ".join(platform.libc_ver()), " ".join(sys.version.split())
    return f"{platform.machine()}, {libc}, {version}, Python {python}, torch {metadata.version('torch')}"


def _named_total(text: str) -> tuple[str, int] | None:
    """The name and the instructions of one dump; None for the last one, which has no name."""
    name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, flags=re.MULTILINE)
    total = re.search(r"^totals: (\d+)$", text, flags=re.MULTILINE)
    return (name.group(1), int(total.group(1))) if name and total else None


def main() -> None:
    """Count the planning of each step of the operations named on the command line, by the torch twin on the CPU."""
    import torch

    from .. import operations
    from ..kernels import find_kernels
    from ._host_steps import host_steps

    functions: dict[str, Callable[[], Any]] = {}
    for op in sys.argv[1:]:
        operation = operations.load(op)
        (kernel,) = find_kernels(operation, "torch")
        for name, case in host_steps(op).items():
            arguments = operation.inputs(case, torch.device("cpu")).arguments
            functions[f"{kernel.name} {name}: plan"] = functools.partial(kernel.bind, arguments)
    count_instructions(functions)


if __name__ == "__main__":
    main()
