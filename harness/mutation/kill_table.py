"""The kill matrix as plain JSON: what ``assay mutate`` found, kept for a report."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..record import Verdict

if TYPE_CHECKING:
    from .mutate import FaultResult, KillMatrix, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRow:
    """One planted fault.

    Attributes:
        fault: Its name.
        expects: Verdicts that name what is wrong with it.
        families: Verdicts of its judged cases, by family.
        killed: Whether any case rejected it.
        right_reason: Whether one did so with an expected verdict.
        gates: Numbers of the gates, or the verdicts, that decided, by family.
        status: In a word, such as ``survived``.
        rows: Rows of the fault catalogue that it stands for.
    """

    fault: str
    expects: list[str]
    families: dict[str, list[str]]
    killed: bool
    right_reason: bool
    gates: dict[str, list[str]] = field(default_factory=dict)
    status: str = ""
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillVariant:
    """One correct variant; ``rejections`` are the cases, with their verdicts, that blame it."""

    name: str
    accepted: bool
    rejections: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTable:
    """Every fault and every variant of an operation; ``left_out`` gives catalogue rows and why they are not planted."""

    op: str
    rows: list[KillRow]
    variants: list[KillVariant]
    cases: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @property
    def families(self) -> list[str]:
        """Of all cases, in order of name."""
        return sorted({family for row in self.rows for family in row.families})

    @classmethod
    def of(cls, matrix: "KillMatrix") -> "KillTable":
        """The plain form of a kill matrix."""
        return cls(
            op=matrix.op,
            rows=[_row(result) for result in matrix.faults],
            variants=[
                KillVariant(
                    name=result.variant.name,
                    accepted=bool(result.judged) and not result.rejections,
                    rejections=[f"{one.case_id} {one.verdict}" for one in result.rejections],
                )
                for result in matrix.variants
            ],
            cases=matrix.cases,
            left_out=[(one.row, one.reason) for one in matrix.not_applicable],
        )


def write_kill_tables(path: Path, matrices: "Iterable[KillMatrix]") -> None:
    """Write the kill matrices of some operations to one JSON file, for ``read_kill_tables`` and ``assay report``."""
    tables = [asdict(KillTable.of(matrix)) for matrix in matrices]
    path.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_kill_tables(path: Path) -> tuple[KillTable, ...]:
    """Read them back; a file with a single table that is not in a list is read, too.

    Raises:
        ValueError: If the file is no kill matrix.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = content if isinstance(content, list) else [content]
        return tuple(_table(table) for table in tables)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} must hold a kill matrix, got {type(error).__name__}: {error}") from error


def _table(content: dict[str, Any]) -> KillTable:
    fields = content | {
        "rows": [KillRow(**row) for row in content["rows"]],
        "variants": [KillVariant(**variant) for variant in content["variants"]],
        "left_out": [(str(row), str(reason)) for row, reason in content.get("left_out", ())],
    }
    return KillTable(**fields)


def _row(result: "FaultResult") -> KillRow:
    return KillRow(
        fault=result.fault.name,
        expects=sorted(result.fault.expects),
        families=_by_family(result.judged, lambda one: one.verdict.value),
        killed=any(one.verdict is not Verdict.PASS for one in result.judged),
        right_reason=bool(result.kills),
        gates={
            family: sorted(set(found)) for family, found in _by_family(result.kills, lambda one: one.reason).items()
        },
        status=result.status.value,
        rows=list(result.fault.rows),
    )


def _by_family(outcomes: "list[Outcome]", what: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in outcomes:
        found.setdefault(one.family, []).append(what(one))
    return found
