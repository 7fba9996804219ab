"""A run read back from its folder: the header, the records, and what an interruption left out."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..mutation.kill_table import KillTable, read_kill_tables
from ..record import GateResult, Location, Record, RowErrors, Verdict
from ..shard import Shard

RECORDS, KILL_MATRIX = "records.jsonl", "kill_matrix.json"
NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.INVALID_CASE})
# neither a pass nor a failure, each for a reason that the record gives
SET_ASIDE = NOT_JUDGED | {Verdict.WAIVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What ``assay check --out`` left behind.

    Attributes:
        folder: Where it was read.
        header: The first line of the records file: versions, device, seed, digest of the plan and more.
        records: One per kernel and case, in the order of judging.
        kill_tables: Of ``assay mutate``, one per operation; empty where the folder has none.
        notes: What is missing or could not be understood, for every reader to see.
    """

    folder: Path
    header: dict[str, Any]
    records: tuple[Record, ...]
    kill_tables: tuple[KillTable, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> list[Record]:
        """Records that blame a kernel, or the judge itself."""
        return [record for record in self.records if failed(record.verdict)]

    @property
    def kernels(self) -> list[str]:
        """Names, in the order of judging."""
        return list(dict.fromkeys(record.kernel for record in self.records))

    def of_kernel(self, kernel: str) -> list[Record]:
        """Its records."""
        return [record for record in self.records if record.kernel == kernel]


def failed(verdict: Verdict) -> bool:
    """Whether a verdict is neither a pass nor set aside."""
    return verdict is not Verdict.PASS and verdict not in SET_ASIDE


def read_run(path: Path, *, rows: bool = True) -> Run:
    """Read a run folder; an interrupted run is read up to its last whole line, and says so.

    Args:
        path: The folder that ``assay check --out`` wrote.
        rows: Whether to keep the errors of single rows, which only pictures need.

    Raises:
        ValueError: If it is no such folder, or a line other than an unfinished last one is no record.
    """
    file = path / RECORDS
    if not file.is_file():
        found = "a file" if path.is_file() else "a folder without it" if path.is_dir() else "nothing"
        raise ValueError(f"a run must be a folder with {RECORDS}, got {found} at {path}")
    unknown: set[str] = set()
    records, notes = [], []
    # a byte that is no text cannot come from us: it is kept visible, and ends no line
    with file.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        header = _header(stream.readline(), file)
        for number, line in enumerate(stream, start=2):
            if not line.endswith("\n") and not _is_json(line):
                notes.append(f"The run was interrupted while writing: line {number} is cut off and was left out.")
                break
            records.append(_record(line, f"{file}:{number}", unknown, rows=rows))
    # a verdict that is reached over the whole run is written again, after all others
    records = list({(record.op, record.kernel, record.case["id"]): record for record in records}.values())
    if unknown:
        notes.append(f"Written by another version: fields {', '.join(sorted(unknown))} were left out.")
    notes += unfinished(header, records)
    matrix = path / KILL_MATRIX
    tables = read_kill_tables(matrix) if matrix.is_file() else ()
    return Run(folder=path, header=header, records=tuple(records), kill_tables=tables, notes=tuple(notes))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _header(line: str, file: Path) -> dict[str, Any]:
    content = json.loads(line) if _is_json(line) else None
    if not (isinstance(content, dict) and isinstance(content.get("run"), dict)):
        raise ValueError(f"{file} must begin with the header of a run, got {line[:60]!r}")
    header: dict[str, Any] = content["run"]
    return header


def unfinished(header: dict[str, Any], records: list[Record]) -> list[str]:
    """Cases that were planned and not started, for any kernel and for one that came after another."""
    notes = []
    seen = {record.case["id"]: record.op for record in records}
    planned = header.get("cases")
    if isinstance(planned, int) and isinstance(header.get("shard"), str):
        planned = len(Shard.parse(header["shard"]).of(range(planned)))
    if isinstance(planned, int) and planned > len(seen):
        notes.append(f"{planned - len(seen)} of {planned} planned cases were not started.")
    done: dict[tuple[str, str], set[str]] = {}
    for record in records:
        done.setdefault((record.op, record.kernel), set()).add(record.case["id"])
    for (op, kernel), ids in done.items():
        left = sum(of == op for of in seen.values()) - len(ids)
        if left:
            notes.append(f"{kernel} was not started on {left} cases that another kernel was judged on.")
    return notes


def _record(line: str, place: str, unknown: set[str], *, rows: bool) -> Record:
    try:
        content = json.loads(line)
        fields = _known(Record, content, unknown)
        fields["verdict"] = Verdict(fields["verdict"])
        fields["gates"] = [_gate(gate, unknown) for gate in fields.get("gates", ())]
        fields["rows"] = _rows(fields.get("rows", {}), unknown) if rows else RowErrors()
        if not isinstance(fields["case"].get("id"), str):
            raise TypeError(f"a case must have an id, got {fields['case']!r}")
        return Record(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{place} must be a record, got {line[:60]!r}: {error}") from error


def _gate(content: dict[str, Any], unknown: set[str]) -> GateResult:
    fields = _known(GateResult, content, unknown)
    fields["ratio"] = float(fields["ratio"])
    where = fields.get("where")
    if where is not None:
        where = _known(Location, where, unknown)
        # numbers that JSON lacks were written as text
        where |= {name: float(where[name]) for name in ("got", "expected") if where.get(name) is not None}
        fields["where"] = Location(**where)
    return GateResult(**fields)


def _rows(content: dict[str, Any], unknown: set[str]) -> RowErrors:
    columns = _known(RowErrors, content, unknown)
    for name in ("envelope", "rms", "alpha"):
        columns[name] = [float(value) for value in columns.get(name, ())]
    rows = RowErrors(**columns)
    if len({len(getattr(rows, field.name)) for field in dataclasses.fields(RowErrors)}) > 1:
        raise ValueError("the lists of rows must be equally long")
    return rows


def _known(kind: type[Any], content: dict[str, Any], unknown: set[str]) -> dict[str, Any]:
    """The fields that ``kind`` has; the names of others are added to ``unknown``."""
    names = {field.name for field in dataclasses.fields(kind)}
    unknown |= {f"{kind.__name__}.{name}" for name in content if name not in names}
    return {name: value for name, value in content.items() if name in names}
