"""A clock and kernels for benchmarks without a device: time passes only where a kernel says so."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.harness.bench.ceilings import Ceilings
from assay.harness.bench.lineup import Participant, Role
from assay.harness.bench.session import Setting
from assay.harness.bench.shapes import Shape
from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.discovery import load_operation
from assay.harness.operation import Kernel

CPU = torch.device("cpu")
SIZES = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "d_qk": 24,
    "d_v": 16,
    "query_lens": [9, 5],
    "key_lens": [9, 5],
    "causal": True,
    "softmax_scale": 0.2,
    "layout": "packed",
}
SHAPE = Shape(name="tiny", op="attention", source="a test", dtype="float32", sizes=SIZES)
ATTENTION = load_operation("attention")


@dataclass
class FakeClock:
    """Milliseconds of a stream, and of work on another stream that nobody has waited for."""

    graphs: bool = False
    now: float = 0.0
    aside: float = 0.0
    # what happened, in order
    log: list[str] = field(default_factory=list)

    @property
    def timing(self) -> bool:
        """Whether the timed part has begun."""
        return "flush" in self.log

    def work(self, ms: float) -> None:
        self.log.append("work")
        self.now += ms

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 0.1

    def record(self) -> float:
        self.log.append("mark")
        return self.now

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def drain(self) -> float:
        late, self.aside = 0.01 + self.aside, 0.0
        return late

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        if not self.graphs:
            raise RuntimeError("this clock records nothing")
        results = run()

        def replay() -> None:
            for held, new in zip(results, run(), strict=True):
                held.copy_(new)

        return replay, results

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        run()
        return 3 << 20


@dataclass
class FakeAnchor:
    """A product of a known size; ``drift`` gives the factor on its time, round by round."""

    clock: FakeClock
    flop: int = 10**9
    ms: float = 1.0
    drift: Callable[[int], float] = lambda at: 1.0
    rounds: int = 0

    def __call__(self) -> None:
        self.clock.work(self.ms * self.drift(self.rounds))
        self.rounds += 1


def honest(name: str, clock: FakeClock, ms: float, *, jitter: float = 0.0, **promises: Any) -> Kernel:
    """Clean torch that takes ``ms``, give or take ``jitter`` of it, normally distributed."""
    draw = random.Random(name)

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        return after(lambda: clock.work(ms * math.exp(draw.gauss(0, jitter))), run)

    return around(name, wrap, **promises)


def after(first: Callable[[], None], run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` after ``first``."""

    def call() -> Any:
        first()
        return run()

    return call


def around(name: str, wrap: Callable[[Callable[[], Any]], Callable[[], Any]], **promises: Any) -> Kernel:
    """A kernel of another name, its forward wrapped around that of clean torch."""
    clean = next(kernel for kernel in ATTENTION.kernels() if kernel.name == "attention[torch]")

    def contract(case: Case) -> Contract:
        return clean.contract(case).promising(**promises)

    return Kernel(name=name, contract=contract, bind=lambda arguments: wrap(clean.bind(arguments)))


def participant(kernel: Kernel, role: Role = "ours") -> Participant:
    return Participant(kernel=kernel, role=role)


def setting(clock: FakeClock, **changes: Any) -> Setting:
    """Ceilings that no fake kernel comes near unless a test changes them."""
    known: dict[str, Any] = {
        "device": CPU,
        "clock": clock,
        "ceilings": Ceilings(gemm_tflops=1000.0, copy_tb_s=1000.0),
        "anchor": FakeAnchor(clock),
        "rounds": 10,
    }
    return Setting(**known | changes)
