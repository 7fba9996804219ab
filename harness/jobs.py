"""Cases judged side by side, each process taking whole cases: the kernels of a case share its inputs and its oracle."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from .case import Case
from .record import Record

Judge = Callable[[Case], list[Record]]

# what a production case holds on a device at its peak, the kernel's own process included
CASE_BYTES = 16 << 30
CORES_EACH = 4
MOST_JOBS = 4
THREADS_EACH = 2

_judge: Judge | None = None


def default_jobs(device: torch.device) -> int:
    """One on a CPU, which a single interpreter fills; on a GPU as many as its memory and the cores beside it feed."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) // CORES_EACH, int(free // CASE_BYTES)))


def side_by_side(prepare: Callable[[], Judge], cases: list[Case], jobs: int) -> Iterator[list[Record]]:
    """The records of each case, in the order of the cases whichever is done first.

    Args:
        prepare: Called once in each process, and picklable: makes what judges a case there.
        cases: To judge.
        jobs: Processes.

    Raises:
        BrokenProcessPool: If a process died; its case has no verdict, so there is nothing to go on with.
    """
    executor = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(prepare,)
    )
    try:
        yield from executor.map(_judge_case, cases)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        # a case under way may take long, and nobody waits for its verdict any more
        for process in multiprocessing.active_children():
            process.terminate()


def _begin(prepare: Callable[[], Judge]) -> None:
    global _judge
    # Ctrl-C is the parent's to handle: it ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # each process would otherwise take all cores for every small step, and wait for the others at its end
    torch.set_num_threads(min(torch.get_num_threads(), THREADS_EACH))
    _judge = prepare()


def _judge_case(case: Case) -> list[Record]:
    if _judge is None:
        raise RuntimeError("the process must have been prepared")
    try:
        return _judge(case)
    finally:
        # what the allocator keeps for its next case, a process beside this one lacks
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
