"""What this machine reaches today: a large product, a copy, gathers of rows; and what follows for a shape."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .clock import Clock, time_once
from .work import Work

GEMM_SIZE = 8192
COPY_BYTES = 2 << 30
GATHER_TABLES_MIB = (8, 32, 128)
# 1 KiB rows of bfloat16, as a latent of 512; enough of them that a table's first read from memory is a small part
ROW_WIDTH, GATHER_QUERIES, GATHER_KEYS = 512, 4096, 512
# a device that idled runs slowly at first
WARMUP, SAMPLES = 10, 10
# the fastest measured product is slower than the units: on an H200 zeros ran 14 % faster than random data, and its
# datasheet's bandwidth is 15 % above a copy's. What is faster than these did not do the work.
FLOP_SLACK, COPY_SLACK = 1.25, 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured in the run that they bound.

    Attributes:
        gemm_tflops: Of a bfloat16 product of ``GEMM_SIZE`` squared.
        copy_tb_s: Bytes read and written by a copy in memory.
        gather_tb_s: By table size in MiB, bytes of rows gathered.
        cache_bytes: Last-level cache.
    """

    gemm_tflops: float
    copy_tb_s: float
    gather_tb_s: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0

    def bound_ms(self, work: Work) -> tuple[float, str]:
        """The least time of ``work`` at these rates, and which of ``flop`` and ``bytes`` decides."""
        flop, moved = work.flop / self.gemm_tflops / 1e9, work.bytes / self.copy_tb_s / 1e9
        return (flop, "flop") if flop >= moved else (moved, "bytes")

    def floor_ms(self, work: Work) -> float:
        """Below this, work was left out: the rates with slack, and outputs may still lie in the cache."""
        flop = work.flop / (self.gemm_tflops * FLOP_SLACK) / 1e9
        moved = max(0, work.bytes - self.cache_bytes) / (self.copy_tb_s * COPY_SLACK) / 1e9
        return max(flop, moved)


class Gemm:
    """A square bfloat16 product on random data: the anchor of every round."""

    def __init__(self, device: torch.device, size: int = GEMM_SIZE) -> None:
        """Draw the operands."""
        generator = torch.Generator(device=device).manual_seed(0)
        self._a, self._b = (
            torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        self.flop = 2 * size**3

    def __call__(self) -> None:
        """Multiply."""
        torch.mm(self._a, self._b, out=self._c)


def measure_ceilings(clock: Clock, device: torch.device, gemm: Gemm, *, cache_bytes: int) -> Ceilings:
    """Time the product, the copy and the gathers, each from a cold cache."""
    return Ceilings(
        gemm_tflops=gemm.flop / _median_ms(gemm, clock) / 1e9,
        copy_tb_s=copy_rate(clock, device),
        gather_tb_s={f"{size}": gather_rate(clock, device, size << 20) for size in GATHER_TABLES_MIB},
        cache_bytes=cache_bytes,
    )


def copy_rate(clock: Clock, device: torch.device, size: int = COPY_BYTES) -> float:
    """TB/s of a copy of ``size`` bytes, read and written."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _median_ms(lambda: target.copy_(source), clock) / 1e9


def gather_rate(clock: Clock, device: torch.device, table_bytes: int, *, queries: int = GATHER_QUERIES) -> float:
    """TB/s of rows gathered by random indices from a table of ``table_bytes``."""
    from ._gather_kernel import gather_sum

    generator = torch.Generator(device=device).manual_seed(0)
    rows = table_bytes // (2 * ROW_WIDTH)
    table = torch.randn(rows, ROW_WIDTH, generator=generator, device=device).to(torch.bfloat16)
    indices = torch.randint(rows, (queries, GATHER_KEYS), generator=generator, device=device, dtype=torch.int32)
    out = torch.empty(queries, ROW_WIDTH, device=device)
    milliseconds = _median_ms(lambda: gather_sum(table, indices, out), clock)
    return queries * GATHER_KEYS * ROW_WIDTH * 2 / milliseconds / 1e9


def _median_ms(call: Callable[[], object], clock: Clock) -> float:
    for _ in range(WARMUP):
        call()
    return statistics.median(time_once(call, clock)[0].ms for _ in range(SAMPLES))
