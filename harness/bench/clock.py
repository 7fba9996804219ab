"""What the engine asks of a machine: marks on the stream it times, a cold cache, and a wait for everything else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Clock(Protocol):
    """Times device work; ``cuda.CudaClock`` is the real one."""

    def flush(self) -> None:
        """Put a write on the stream that turns everything else out of the cache."""
        ...

    def record(self) -> Any:
        """Mark this point of the current stream."""
        ...

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks of the stream; waits for the later one."""
        ...

    def drain(self) -> float:
        """Wait for the whole device, whatever the stream; return the milliseconds that took."""
        ...

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Warm ``run`` up and record its device work; return what repeats it, and the results it writes each time.

        Raises:
            RuntimeError: If it cannot be recorded.
        """
        ...

    def peak_bytes(self, run: Callable[[], Any]) -> int | None:
        """Most memory that a call takes beside what is there already; None where nobody counts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One timed run.

    Attributes:
        ms: Between the marks around it, on the stream of the caller.
        late_ms: From the second mark until the whole device was idle.
    """

    ms: float
    late_ms: float


def time_once(call: Callable[[], object], clock: Clock) -> tuple[Tick, object]:
    """Time one call from a cold cache; return the tick and what the call returned."""
    clock.flush()
    start = clock.record()
    result = call()
    end = clock.record()
    ms = clock.elapsed(start, end)
    return Tick(ms=ms, late_ms=clock.drain()), result
