"""Verdicts, records and the run folder: what a judgement leaves behind."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any


class Verdict(StrEnum):
    """The closed list of outcomes of a kernel on a case."""

    PASS = "PASS"
    STRUCTURE = "STRUCTURE"
    NUMERIC = "NUMERIC"
    PRECISION_DOWNGRADE = "PRECISION_DOWNGRADE"
    NONFINITE = "NONFINITE"
    WRITE_SCOPE = "WRITE_SCOPE"
    MUTATED_INPUT = "MUTATED_INPUT"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    METAMORPHIC = "METAMORPHIC"
    NOT_REFUSED = "NOT_REFUSED"
    UNSUPPORTED = "UNSUPPORTED"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    IMPOSSIBLE_TIME = "IMPOSSIBLE_TIME"
    INVALID_CASE = "INVALID_CASE"
    WAIVED = "WAIVED"
    HARNESS_ERROR = "HARNESS_ERROR"


class ExitCode:
    """Exit codes of the command line."""

    PASSED = 0
    FAILED = 1
    USAGE = 2
    NOTHING_JUDGED = 3
    SETTINGS_DIFFER = 4
    INCONCLUSIVE = 6
    HARNESS_ERROR = 7
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the worst error of a gate lies; None where an index does not apply.

    A value that is ``got`` without one that is ``expected`` must be finite.
    """

    request: int | None = None
    token: int | None = None
    position: int | None = None
    head: int | None = None
    dim: int | None = None
    slot: int | None = None
    got: float | None = None
    expected: float | None = None
    # of a state, its row
    channel: int | None = None

    def __str__(self) -> str:
        """One line for the terminal: indices, the logical position with its physical slot, both values."""
        names = ("request", "token", "head", "channel", "dim")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None]
        if self.position is None and self.slot is not None:
            parts.insert(0, f"slot {self.slot}")
        if self.position is not None:
            parts.append(f"position {self.position}" + (f" -> slot {self.slot}" if self.slot is not None else ""))
        if self.got is not None:
            wanted = "finite" if self.expected is None else f"{self.expected:.6g}"
            parts.append(f"got {self.got:.6g}, must be {wanted}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What one gate found: ``ratio`` is the worst value over its limit, so above 1 is a failure."""

    gate: str
    ratio: float
    where: Location | None = None
    text: str = ""

    @property
    def passed(self) -> bool:
        """Whether the gate holds; a ratio that is not a number does not."""
        return self.ratio <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """Errors of judged rows for the pictures of a report: equally long lists, one entry per (token, head).

    Attributes:
        token: Row of ``out``.
        head: Query head.
        position: Position of the token in its request.
        envelope: Largest error of the row over its hard envelope (G4).
        rms: Root mean square of the row over what the contract predicts (G5).
        alpha: Relative error of the row's scale (G6).
    """

    token: list[int] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    envelope: list[float] = field(default_factory=list)
    rms: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One kernel on one case: a line of the records file; ``command`` judges it again, if the caller knows how.

    ``spent`` divides ``seconds`` into inputs, kernel and oracle; what they leave is the judge's own work.
    """

    op: str
    kernel: str
    case: dict[str, Any]
    device: str
    verdict: Verdict
    text: str = ""
    gates: list[GateResult] = field(default_factory=list)
    rows: RowErrors = field(default_factory=RowErrors)
    rows_judged: int = 0
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    command: str = ""

    @property
    def worst(self) -> GateResult | None:
        """The failing gate that decided the verdict, else the one nearest to its limit."""
        failed = [gate for gate in self.gates if not gate.passed]
        return failed[0] if failed else max(self.gates, key=lambda gate: gate.ratio, default=None)

    def to_json(self) -> str:
        """One line of JSON; infinite and undefined numbers become strings, which every reader accepts."""
        # the case keeps every digit: its id is made from them
        return json.dumps(_plain(asdict(self)) | {"case": self.case}, sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    """The value with the numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


class RecordWriter:
    """Appends records to a JSON-lines file, each flushed at once, so an interrupted run leaves whole lines."""

    def __init__(self, stream: IO[str] | None) -> None:
        """Write to ``stream``; with None nothing is kept."""
        self._stream = stream

    def write(self, line: str) -> None:
        """Append one line of JSON."""
        if self._stream is not None:
            self._stream.write(line + "\n")
            self._stream.flush()


@contextmanager
def open_records(folder: Path | None, header: dict[str, Any]) -> Iterator[RecordWriter]:
    """A writer for ``folder/records.jsonl`` whose first line describes the run (versions, seed, plan digest)."""
    if folder is None:
        yield RecordWriter(None)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "records.jsonl").open("w", encoding="utf-8") as stream:
        writer = RecordWriter(stream)
        writer.write(json.dumps({"run": header}, sort_keys=True))
        yield writer
