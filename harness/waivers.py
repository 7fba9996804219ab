"""Known faults: a file that lets a run with them pass, says why, and for how long.

A waived case still runs and is shown as WAIVED. A waiver that is over, or that nothing needs any more, fails the run,
so the file cannot outlive its reasons.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

from .discovery import name_matches
from .record import Record, Verdict

NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.INVALID_CASE, Verdict.HARNESS_ERROR)
NOT_FAULTS = (Verdict.PASS, Verdict.WAIVED, *NOT_JUDGED)
WAIVABLE = tuple(verdict for verdict in Verdict if verdict not in NOT_FAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """One known fault.

    Attributes:
        kernel: Pattern over names of kernels.
        case: Pattern over ids of cases, or over families.
        verdict: The one that is expected; any other stays a failure.
        reason: What is wrong, for readers.
        link: Where it is tracked, http or https.
        expires: Last day on which it holds.
    """

    kernel: str
    case: str
    verdict: Verdict
    reason: str
    link: str
    expires: date

    def covers(self, record: Record) -> bool:
        """Whether the record is of a kernel and case that the waiver speaks of, whatever its verdict."""
        names = (record.case["id"], record.case["family"])
        return name_matches(record.kernel, self.kernel) and any(name_matches(name, self.case) for name in names)

    def __str__(self) -> str:
        """For findings: what it waives, and where."""
        return f"waiver of {self.verdict} for kernel {self.kernel!r}, case {self.case!r} ({self.link})"


def load_waivers(path: Path) -> list[Waiver]:
    """Read the tables ``[[waiver]]`` of a TOML file.

    Raises:
        ValueError: If the file is none, or a waiver lacks a field or has a wrong one.
    """
    if not path.is_file():
        raise ValueError(f"waivers must be a TOML file, got {path}")
    with path.open("rb") as stream:
        try:
            content = tomllib.load(stream)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"waivers must be valid TOML, got {path}: {error}") from error
    unknown = sorted(set(content) - {"waiver"})
    tables = content.get("waiver", [])
    if unknown or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"{path} must hold tables [[waiver]] only, got {', '.join(unknown) or 'waiver of another kind'}"
        )
    return [_waiver(table, f"waiver {at} of {path}") for at, table in enumerate(tables, start=1)]


def apply(record: Record, waivers: list[Waiver], today: date) -> Record:
    """The record, as WAIVED if it failed in the way that a waiver in force expects; else unchanged."""
    for waiver in waivers:
        if waiver.verdict is record.verdict and today <= waiver.expires and waiver.covers(record):
            text = f"{record.verdict}: {record.text}; waived until {waiver.expires}: {waiver.reason} ({waiver.link})"
            return replace(record, verdict=Verdict.WAIVED, text=text)
    return record


def findings(records: list[Record], waivers: list[Waiver], today: date, *, complete: bool) -> list[str]:
    """Why the file itself fails the run: one line per waiver that is over or no longer needed.

    Args:
        records: As the judge made them, before ``apply``.
        waivers: Of the file.
        today: For the expiry; a waiver holds through its last day.
        complete: Whether every case of the tier was judged, so that a waiver can be found unnecessary. One whose cases
            are not of this tier, or were not judged, is left alone.
    """
    lines = []
    for waiver in waivers:
        covered = [record for record in records if waiver.covers(record) and record.verdict not in NOT_JUDGED]
        needed = any(record.verdict is waiver.verdict for record in covered)
        if today > waiver.expires:
            lines.append(f"EXPIRED {waiver}: it ended on {waiver.expires}")
        elif complete and covered and not needed:
            lines.append(f"UNNEEDED {waiver}: none of the {len(covered)} cases judged ended so")
    return lines


def _waiver(table: dict[str, Any], place: str) -> Waiver:
    names = [field.name for field in fields(Waiver)]
    missing = [name for name in names if table.get(name) in (None, "")]
    unknown = [name for name in table if name not in names]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise ValueError(f"{place} must have {', '.join(names)}: it {' and '.join(problems)}")
    for name in ("kernel", "case", "verdict", "reason", "link"):
        if not isinstance(table[name], str) or not table[name].strip():
            raise ValueError(f"{name} of {place} must be a text, got {table[name]!r}")
    if table["verdict"] not in WAIVABLE:
        raise ValueError(f"verdict of {place} must be one of {', '.join(WAIVABLE)}, got {table['verdict']!r}")
    if not table["link"].startswith(("http://", "https://")):
        raise ValueError(f"link of {place} must be an address, got {table['link']!r}")
    if not isinstance(table["expires"], date) or isinstance(table["expires"], datetime):
        raise ValueError(f"expires of {place} must be a date such as 2027-01-31, got {table['expires']!r}")
    return Waiver(**{**table, "verdict": Verdict(table["verdict"])})
