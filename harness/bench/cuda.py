"""The clock of a CUDA device: events, a flushed cache, captured graphs. Nothing here decides anything."""

import time
from collections.abc import Callable
from typing import Any

import torch

from ..cuda_graph import record_graph

# a write of this size, or of four caches, leaves nothing else in the cache; it takes some 0.1 ms, in which the host
# gets ahead, so that the timed call waits for no launch
FLUSH_BYTES = 512 << 20
WARMUP = 3


class CudaClock:
    """See ``clock.Clock``; everything runs on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        """Take the memory that is written to flush the cache.

        Raises:
            RuntimeError: If there is no such device.
        """
        if device.type != "cuda" or not torch.cuda.is_available():
            raise RuntimeError(f"device time needs a CUDA device, got {device}")
        self._device = device
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flushed = torch.empty(max(FLUSH_BYTES, 4 * self.cache_bytes), dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Overwrite more memory than the cache holds."""
        self._flushed.zero_()

    def record(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """By the device's own counter."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def drain(self) -> float:
        """Wait for all streams of the device."""
        start = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return (time.perf_counter() - start) * 1e3

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Record a CUDA graph, after calls on a side stream in which libraries make their plans and compile."""
        side, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                run()
        current.wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph, results = record_graph(run, self._device)
        # the first replay moves the graph to the device
        graph.replay()
        torch.cuda.synchronize(self._device)
        return graph.replay, results

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """As torch's allocator counts; memory that a library takes from the driver itself is not seen."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        results = run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del results
        return peak


class GpuTimer:
    """A timer for pytest-benchmark: seconds on the device's counter up to now, once all work before it is done."""

    def __init__(self) -> None:
        """Start at 0 when first called: there may be no device where a module is only imported."""
        self._last: torch.cuda.Event | None = None
        self._seconds = 0.0

    def __call__(self) -> float:
        """Seconds since the first call."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        if self._last is not None:
            # differences are added up here: the device gives a float32, which is coarse over minutes
            self._seconds += self._last.elapsed_time(event) / 1e3
        self._last = event
        return self._seconds
