"""Counts that are committed and may not change unseen: a JSON file, one table for each set of versions that made it.

A table maps a subject (a build of a kernel, a step of an operation) to its fields. Counts repeat to the digit, so any
difference is a change, for better or worse, and stays one until it is accepted.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..record import ExitCode

Fields = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Fields]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field of one subject that is not what was committed, None where it is missing; or no field: the subject."""

    subject: str
    field: str | None = None
    was: Any = None
    now: Any = None

    def __str__(self) -> str:
        """One line that names the subject, the field and both values."""
        if self.field is None:
            return f"{self.subject}: {'no longer found' if self.was else 'found, and not committed'}"
        was, now = ("missing" if value is None else value for value in (self.was, self.now))
        return f"{self.subject}: {self.field} was {was}, is {now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found beside what is committed; ``unknown`` are the versions that have no table."""

    changes: tuple[Change, ...] = ()
    unknown: tuple[str, ...] = ()


def read_tables(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The tables of a file by the versions that made them; none if there is no file."""
    if not path.is_file():
        return {}
    tables: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return tables


def compare(path: Path, found: Tables, *, left_out: Callable[[str], bool]) -> Comparison:
    """Hold what was found against the file.

    Args:
        path: The committed file.
        found: Fields by subject, by versions.
        left_out: Tells the committed subjects that nobody asked for; others that were not found are a change.
    """
    tables, differences, unknown = read_tables(path), list[Change](), []
    for versions, subjects in found.items():
        if versions not in tables:
            unknown.append(versions)
            continue
        asked = {name: was for name, was in tables[versions].items() if not left_out(name)}
        differences += _changes(asked, subjects)
    return Comparison(changes=tuple(differences), unknown=tuple(unknown))


def accept(path: Path, found: Tables, *, left_out: Callable[[str], bool]) -> None:
    """Commit what was found, in place of all that is committed for these versions but the subjects left out."""
    tables = read_tables(path)
    for versions, subjects in found.items():
        kept = {name: fields for name, fields in tables.get(versions, {}).items() if left_out(name)}
        tables[versions] = {name: dict(fields) for name, fields in sorted((kept | dict(subjects)).items())}
    path.write_text(json.dumps(dict(sorted(tables.items())), indent=1) + "\n", encoding="utf-8")


def conclude(console: Console, comparison: Comparison, faults: Collection[str]) -> int:
    """Print each fault and change on a line, and what has no table; return the exit code."""
    lines = [*(f"[red]FAULT[/] {escape(fault)}" for fault in faults)]
    lines += [f"[red]CHANGED[/] {escape(str(change))}" for change in comparison.changes]
    lines += [f"[yellow]no baseline[/] for {escape(versions)}: --accept makes one" for versions in comparison.unknown]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if faults or comparison.changes:
        return ExitCode.FAILED
    return ExitCode.NOTHING_JUDGED if comparison.unknown else ExitCode.PASSED


def _changes(committed: Mapping[str, Fields], found: Mapping[str, Fields]) -> list[Change]:
    """Differences field by field; a subject that only one side has is one difference."""
    differences = []
    for subject in dict.fromkeys([*found, *committed]):
        was, now = committed.get(subject), found.get(subject)
        if was is None or now is None:
            differences.append(Change(subject=subject, was=was, now=now))
            continue
        for field in dict.fromkeys([*now, *was]):
            if now.get(field) != was.get(field):
                differences.append(Change(subject=subject, field=field, was=was.get(field), now=now.get(field)))
    return differences
