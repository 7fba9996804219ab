"""Where the time of a judgement goes: drawing inputs, the kernel, the oracle; what is left is the judge's own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch

Phase = Literal["inputs", "kernel", "oracle"]


@dataclass(slots=True)
class Spent:
    """Seconds by phase; a phase that was never entered has none."""

    seconds: dict[str, float] = field(default_factory=dict)


_CURRENT: ContextVar[Spent | None] = ContextVar("spent", default=None)


@contextmanager
def accounted() -> Iterator[Spent]:
    """Add up the phases of the block."""
    spent = Spent()
    token = _CURRENT.set(spent)
    try:
        yield spent
    finally:
        _CURRENT.reset(token)


def count(name: str, seconds: float) -> None:
    """Count what another process spent on a phase while this one waited for it."""
    spent = _CURRENT.get()
    if spent is not None:
        spent.seconds[name] = spent.seconds.get(name, 0.0) + seconds


@contextmanager
def phase(name: Phase, device: torch.device | None = None) -> Iterator[None]:
    """Count the block towards ``name``; phases do not nest.

    Args:
        name: What is going on.
        device: Waited for at the end, so that work that was only enqueued counts here; None if the block itself waits.
    """
    spent, start = _CURRENT.get(), time.perf_counter()
    try:
        yield
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        if spent is not None:
            count(name, time.perf_counter() - start)
