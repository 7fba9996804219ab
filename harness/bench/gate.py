"""Committed ratios of a GPU model, and whether a run holds them. Ratios, for they cancel what the clocks do."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..plan import UsageError
from ..record import ExitCode, Verdict
from .results import BOUND, BenchRun, Ratio, ShapeResult
from .statistics import Interval

SCHEMA = "assay.bench.ratios/1"
FOLDER = Path(__file__).with_name("baselines")
COMMITTED = "committed"
# a slow-down below either cannot be told from none
LEAST_LIMIT, NOISES = 0.02, 3

Status = Literal["held", "regressed", "faster", "lost", "absent", "new"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """One accepted ratio."""

    shape: str
    digest: str
    kernel: str
    other: str
    ratio: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is the ratio of; the digest stands for the sizes."""
        return (self.shape, self.digest, self.kernel, self.other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The accepted ratios of one GPU model."""

    gpu: str
    versions: dict[str, Any]
    ratios: tuple[Committed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One ratio against the accepted one.

    Attributes:
        status: ``regressed``: slower beyond the limit; ``lost``: accepted once, and now our kernel has no time;
            ``absent``: now the peer has none; ``new``: never accepted.
        shape: Name of the shape.
        kernel: Whose time.
        other: Over whose.
        committed: The accepted ratio, or None.
        now: The ratio of this run, or None.
        limit: Most that it may be above the accepted one.
    """

    status: Status
    shape: str
    kernel: str
    other: str
    committed: float | None
    now: Interval | None
    limit: float

    def __str__(self) -> str:
        """Which shape, and by how much."""
        what = f"{self.shape}: {self.kernel} over {self.other}"
        if self.committed is None:
            return f"{what} is {self.now}, with no committed ratio"
        if self.now is None:
            return f"{what} was {self.committed:.3f} when committed, and has no time now"
        change, least = self.now.value / self.committed - 1, self.now.low / self.committed - 1
        moved = f"{what} is {self.now}, {change:+.1%} against the committed {self.committed:.3f}"
        return f"{moved}, at least {least:+.1%} where {self.limit:.1%} is the limit" if least > self.limit else moved


def baseline_path(gpu: str) -> Path:
    """Where the accepted ratios of a GPU model lie in the package."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def read_baseline(path: Path) -> Baseline:
    """Read accepted ratios.

    Raises:
        UsageError: If the file holds none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}, got {content['schema']!r}")
        ratios = tuple(Committed(**one) for one in content["ratios"])
        return Baseline(gpu=content["gpu"], versions=content["versions"], ratios=ratios)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--against must be a file that --accept wrote, got {path}: {error}") from error


def compare(run: BenchRun, baseline: Baseline) -> list[Line]:
    """Every ratio of ours in the run against the accepted one, and the accepted ones that the run lost.

    What the run did not try (other shapes, peers that are not there) is left out.
    """
    accepted = {one.key: one for one in baseline.ratios}
    lines = []
    for shape in run.shapes:
        limit = limit_of(shape)
        for ratio in _ours(shape):
            one = accepted.pop((shape.shape, shape.digest, ratio.kernel, ratio.other), None)
            lines.append(_line(shape, ratio, one, limit))
        lines += [_missing(shape, one, limit) for one in accepted.values() if _tried(shape, one)]
    return lines


def limit_of(shape: ShapeResult) -> float:
    """How much slower counts as slower: two per cent, or three times what two lanes of one kernel differ."""
    return max(LEAST_LIMIT, NOISES * shape.noise.reach) if shape.noise is not None else LEAST_LIMIT


def exit_code(lines: list[Line]) -> int:
    """1 if anything regressed or was lost, 3 if there was nothing to compare with, else 0."""
    statuses = {line.status for line in lines}
    if statuses & {"regressed", "lost"}:
        return ExitCode.FAILED
    return ExitCode.PASSED if statuses & {"held", "faster"} else ExitCode.NOTHING_JUDGED


def accept(run: BenchRun, path: Path) -> int:
    """Write the ratios of a run; those of shapes that it did not time are kept. Returns how many were written.

    Raises:
        UsageError: If the file there holds the ratios of another GPU, or none.
    """
    gpu, kept = str(run.device["name"]), tuple[Committed, ...]()
    timed = {(shape.shape, shape.digest) for shape in run.shapes if shape.ratios}
    if path.is_file():
        before = read_baseline(path)
        if before.gpu != gpu:
            raise UsageError(f"--accept must go to a file of {gpu}, got one of {before.gpu}: {path}")
        names = {name for name, _ in timed}
        kept = tuple(one for one in before.ratios if one.shape not in names)
    new = [
        Committed(
            shape=shape.shape,
            digest=shape.digest,
            kernel=ratio.kernel,
            other=ratio.other,
            ratio=float(f"{ratio.interval.value:.5g}"),
        )
        for shape in run.shapes
        for ratio in _ours(shape)
    ]
    ratios = sorted((*kept, *new), key=lambda one: one.key)
    rows = [{name: getattr(one, name) for name in ("shape", "digest", "kernel", "other", "ratio")} for one in ratios]
    content = {"schema": SCHEMA, "gpu": gpu, "versions": run.versions, "ratios": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return len(new)


def _ours(shape: ShapeResult) -> list[Ratio]:
    ours = {kernel.kernel for kernel in shape.kernels if kernel.role == "ours"}
    return [ratio for ratio in shape.ratios if ratio.kernel in ours]


def _tried(shape: ShapeResult, one: Committed) -> bool:
    """Whether the run had a go at an accepted ratio, of which it has none."""
    names = {kernel.kernel for kernel in shape.kernels}
    return (one.shape, one.digest) == (shape.shape, shape.digest) and {one.kernel, one.other} <= {BOUND, *names}


def _missing(shape: ShapeResult, one: Committed, limit: float) -> Line:
    timed = {kernel.kernel for kernel in shape.kernels if kernel.verdict is Verdict.PASS}
    return Line(
        status="absent" if one.kernel in timed else "lost",
        shape=one.shape,
        kernel=one.kernel,
        other=one.other,
        committed=one.ratio,
        now=None,
        limit=limit,
    )


def _line(shape: ShapeResult, ratio: Ratio, accepted: Committed | None, limit: float) -> Line:
    status: Status = "new"
    if accepted is not None:
        status = "held"
        if ratio.interval.low / accepted.ratio > 1 + limit:
            status = "regressed"
        elif ratio.interval.high / accepted.ratio < 1 - limit:
            status = "faster"
    return Line(
        status=status,
        shape=shape.shape,
        kernel=ratio.kernel,
        other=ratio.other,
        committed=None if accepted is None else accepted.ratio,
        now=ratio.interval,
        limit=limit,
    )
