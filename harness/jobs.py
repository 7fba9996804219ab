"""Cases judged side by side, each process taking whole cases: the kernels of a case share its inputs and its oracle.

Planted faults are judged so, too, each process taking whole operations.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

# what a production case holds on a device at its peak, the kernel's own process included
CASE_BYTES = 16 << 30
CORES_EACH = 4
MOST_JOBS = 4
THREADS_EACH = 2
# on a CPU, so that few cases do not wait for a process that starts
CASES_EACH = 50

_work: Callable[[Any], Any] | None = None


def default_jobs(device: torch.device, cases: int) -> int:
    """One a core on a CPU, each with enough cases; on a GPU as many as its memory and the cores beside it feed."""
    cores = os.cpu_count() or 1
    if device.type != "cuda":
        return max(1, min(MOST_JOBS, cores, cases // CASES_EACH))
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_JOBS, cores // CORES_EACH, int(free // CASE_BYTES)))


def side_by_side(prepare: Callable[[], Callable[[Item], Result]], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """What comes of each item, in the order of the items whichever is done first.

    Args:
        prepare: Called once in each process, and picklable: makes what works on an item there, such as the judge of a
            case.
        items: To work on, picklable as the results are.
        jobs: Processes.

    Raises:
        BrokenProcessPool: If a process died; its item has no result, so there is nothing to go on with.
    """
    executor = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(prepare, jobs)
    )
    try:
        yield from executor.map(_work_on, items)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        # an item under way may take long, and nobody waits for its result any more
        for process in multiprocessing.active_children():
            process.terminate()


def _begin(prepare: Callable[[], Callable[[Any], Any]], jobs: int) -> None:
    global _work
    # Ctrl-C is the parent's to handle: it ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # each process would otherwise take all cores for every small step, and wait for the others at its end
    share = max(1, (os.cpu_count() or 1) // jobs)
    torch.set_num_threads(min(torch.get_num_threads(), THREADS_EACH, share))
    _work = prepare()


def _work_on(item: Any) -> Any:
    if _work is None:
        raise RuntimeError("the process must have been prepared")
    try:
        return _work(item)
    finally:
        # what the allocator keeps for its next item, a process beside this one lacks
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
