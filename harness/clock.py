"""Device time of several calls, interleaved, each from a cold cache: what every speed claim rests on."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# larger than the last-level cache of any GPU at hand
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of each round of one call."""

    name: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds)

    def ratio_to(self, other: "Timing") -> float:
        """Median over rounds of own time over the other's of the same round, which cancels drift of the clocks."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, other.rounds, strict=True))


def time_interleaved(calls: dict[str, Callable[[], Any]], *, rounds: int = 20, warmup: int = 3) -> dict[str, Timing]:
    """Time calls with CUDA events, in the order A B, B A, A B ...; the cache is flushed outside the timed region.

    Args:
        calls: By name; each runs on the current stream.
        rounds: Timed runs of each.
        warmup: Runs of each before the first timed one.

    Raises:
        ValueError: If there is nothing to time, or no round.
        RuntimeError: If there is no CUDA device.
    """
    if not calls or rounds < 1:
        raise ValueError(f"calls and rounds must not be empty, got {len(calls)} calls and {rounds} rounds")
    if not torch.cuda.is_available():
        raise RuntimeError("device time needs a CUDA device, found none")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(warmup):
        for call in calls.values():
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for at in range(rounds):
        order = list(calls) if at % 2 == 0 else list(reversed(calls))
        for name in order:
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: Timing(name=name, rounds=tuple(start.elapsed_time(end) for start, end in pairs))
        for name, pairs in events.items()
    }


def gemm_tflops(size: int = 8192, *, dtype: torch.dtype = torch.bfloat16) -> float:
    """Rate of a square matrix product on random data: the ceiling that this run is measured against."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    a, b = (torch.randn(size, size, dtype=dtype, device="cuda", generator=generator) for _ in range(2))
    milliseconds = time_interleaved({"gemm": lambda: a @ b})["gemm"].median
    return 2 * size**3 / milliseconds / 1e9
