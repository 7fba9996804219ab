"""What a benchmark leaves behind: plain data with a version, as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..peers import Peer
from ..record import Verdict
from .lineup import Role
from .machine import Clocks
from .statistics import Interval, Spread

SCHEMA = "assay.bench/1"
BOUND = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """One kernel on one shape.

    Attributes:
        kernel: Its name.
        role: Whether it is ours or a peer's.
        verdict: Of the judge, and of what was found while timing; only PASS has times.
        text: Why not, or what to know of the times.
        captured: Whether a graph was replayed; else the times hold the gaps between launches.
        samples_ms: Every timed run of the kept rounds.
        ms: Their spread.
        late_ms: What ran on after the last mark, over what did after the anchor.
        tflops: Arithmetic of the shape over the median.
        gb_s: Compulsory bytes over the median.
        share: Of the bound: its time over the kernel's, in the median over rounds.
        peak_bytes: Most memory of a call.
        compilations: Triton kernels that its judging and binding made; None where nobody counts.
        seconds: That judging and binding took.
    """

    kernel: str
    role: Role
    verdict: Verdict
    text: str = ""
    captured: bool | None = None
    samples_ms: list[float] = field(default_factory=list)
    ms: Spread | None = None
    late_ms: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    share: float | None = None
    peak_bytes: int | None = None
    compilations: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time of ``kernel`` over that of ``other``, a kernel or ``bound``; below 1 it is the faster."""

    kernel: str
    other: str
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeResult:
    """All kernels on one shape.

    Attributes:
        shape: Its name.
        digest: Of its sizes.
        op: Of the operation.
        source: Whose geometry it is.
        dtype: Of the floating inputs.
        sizes: As in a case.
        flop: Of the shape; None where nobody counted.
        bytes: Likewise.
        bound_ms: The least time at this run's ceilings.
        bound: Which ceiling decides, ``flop`` or ``bytes``.
        ring: Sets of buffers.
        rounds: Planned.
        dropped: Rounds left out because the anchor was off.
        anchor_ms: The anchor, twice in every round.
        kernels: One per kernel.
        ratios: Ours over each peer, and over the bound.
        noise: The same kernel bound twice: the ratio of its two lanes.
        compiled_while_timed: Triton kernels made in the timed rounds, where none should be.
        clocks: Before and after the rounds.
        seconds: In all.
    """

    shape: str
    digest: str
    op: str
    source: str
    dtype: str
    sizes: dict[str, Any]
    flop: int | None = None
    bytes: int | None = None
    bound_ms: float | None = None
    bound: str | None = None
    ring: int = 0
    rounds: int = 0
    dropped: int = 0
    anchor_ms: list[float] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    noise: Interval | None = None
    compiled_while_timed: int | None = None
    clocks: list[Clocks] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class BenchRun:
    """A run of ``assay bench``.

    Attributes:
        device: See ``machine.describe_device``.
        versions: See ``machine.versions``.
        peers: By operation every library of other authors, with its version or why it is absent.
        seed: Of contents, of the checked runs, of the resampling.
        command: That gave it.
        ceilings: See ``ceilings.Ceilings``.
        clocks: Before and after everything.
        shapes: One per shape.
        not_started: Names of the shapes for which no time was left.
        seconds: In all.
    """

    device: dict[str, Any]
    versions: dict[str, str | None]
    peers: dict[str, list[Peer]]
    seed: int
    command: str = ""
    ceilings: dict[str, Any] = field(default_factory=dict)
    clocks: list[Clocks] = field(default_factory=list)
    shapes: list[ShapeResult] = field(default_factory=list)
    not_started: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        """As one JSON file."""
        content = {"schema": SCHEMA, **asdict(self)}
        path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
