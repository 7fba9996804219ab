"""What happens before a command runs: Triton's interpreter is chosen, and heavy libraries are imported under Ctrl-C."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def starting(*, device: str) -> Iterator[None]:
    """Import what a command needs in this block, in which Ctrl-C ends the process at once.

    There is nothing yet to be left whole, and a library may lose the exception in the C code of its own import.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        _prepare(device=device)
        yield
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        _prepare(device=device)
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(*_: object) -> NoReturn:
    os.write(2, b"interrupted before anything was judged\n")
    os._exit(130)


def _prepare(*, device: str) -> None:
    """Choose Triton's interpreter before anything imports triton, where there is no GPU to compile for."""
    if device == "cpu" or (device == "auto" and not _has_cuda()):
        os.environ["TRITON_INTERPRET"] = "1"
        # an interpreted program is many small products, which threads only slow down
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def _has_cuda() -> bool:
    # asked of the driver rather than of torch, which would fix the number of its threads when imported
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()
