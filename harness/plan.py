"""From command-line options to a frozen list of cases."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .captures import CaptureError, captured_cases
from .case import Case, plan_digest
from .discovery import PluginError, load_cases, operation_names
from .operation import CaseRequest, Operation
from .operations._sizes import checked_family, checked_sizes

TIERS = ("smoke", "full", "nightly")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cases of a tier are wanted; None everywhere means all.

    Attributes:
        case_id: The end of the id of one case.
        family: One family.
        shapes: A TOML file of cases instead of the tier's.
        plugin: The entry point of further cases.
        captured: A folder of captured calls instead of the tier's cases.
        captured_dtypes: Their tensors are rounded to each of these; empty for their own dtype.
    """

    case_id: str | None = None
    family: str | None = None
    shapes: Path | None = None
    plugin: str | None = None
    captured: Path | None = None
    captured_dtypes: tuple[str, ...] = ()


class UsageError(ValueError):
    """Options that cannot be served; the command line exits with 2."""


def plan_cases(operations: list[Operation], request: CaseRequest, selection: Selection) -> list[Case]:
    """Draw the cases of all operations, add those of a shapes file, keep the selected ones.

    Raises:
        UsageError: If nothing is left, or the shapes file is not understood.
    """
    if selection.shapes is not None and (request.geometry or request.heads):
        raise UsageError("--shapes must stand alone: --geometry and --heads would change nothing beside it")
    if selection.captured is not None and (request.geometry or request.heads or selection.shapes):
        raise UsageError("--captured must stand alone: --geometry, --heads and --shapes would change nothing beside it")
    cases = []
    for operation in operations:
        if selection.plugin is not None:
            cases += _plugged_cases(selection.plugin, operation, request)
        cases += _own_cases(operation, request, selection)
    if selection.captured is not None and not cases:
        names = ", ".join(operation.name for operation in operations)
        raise UsageError(f"--captured must hold calls that {names} can be judged on, got none in {selection.captured}")
    if selection.family is not None:
        known = sorted({case.family for case in cases})
        cases = [case for case in cases if case.family == selection.family]
        if not cases:
            raise UsageError(f"--family must be one of {', '.join(known)}, got {selection.family!r}")
    if selection.case_id is not None:
        cases = [case for case in cases if selection.case_id and case.id.endswith(selection.case_id)]
        if not cases:
            plan = f"tier {request.tier} and seed {request.seed}"
            raise UsageError(f"--case must be the id of a case of {plan}, got {selection.case_id!r}")
    if not cases:
        raise UsageError("--dtype and --shapes must leave at least one case")
    return cases


def describe(cases: list[Case]) -> str:
    """Count and digest of the frozen plan."""
    return f"{len(cases)} cases, plan {plan_digest(cases)}"


def _own_cases(operation: Operation, request: CaseRequest, selection: Selection) -> list[Case]:
    """Those of a file or folder where one is given, or else of the tier."""
    if selection.shapes is not None:
        return _shape_cases(operation, request, selection.shapes)
    if selection.captured is None:
        return operation.cases(request)
    try:
        return captured_cases(operation, selection.captured, selection.captured_dtypes, request.seed)
    except CaptureError as error:
        raise UsageError(f"--captured: {error}") from error


def _plugged_cases(name: str, operation: Operation, request: CaseRequest) -> list[Case]:
    """The cases of an installed package, asked for by name so that installing one never changes a plan."""
    try:
        return load_cases(name, operation, request)
    except PluginError as error:
        raise UsageError(str(error)) from error


def _shape_cases(operation: Operation, request: CaseRequest, path: Path) -> list[Case]:
    """The cases of a TOML file: one table ``[[case]]`` each, with ``op``, ``family`` and the sizes of the operation."""
    if not path.is_file():
        raise UsageError(f"--shapes must be a TOML file, got {path}")
    with path.open("rb") as stream:
        try:
            content = tomllib.load(stream)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--shapes must be valid TOML, got {path}: {error}") from error
    tables = content.get("case", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"--shapes must hold a list of tables [[case]], got {type(tables).__name__} in {path}")
    # what a size may be must not depend on the seed
    known, own_cases = operation_names(), operation.cases(replace(request, tier="full", seed=0))
    cases = []
    for number, table in enumerate(tables, start=1):
        if table.get("op") not in known:
            place = f"--shapes {path}, table {number}"
            raise UsageError(f"{place}: op must be one of {', '.join(known)}, got {table.get('op')!r}")
        if table["op"] == operation.name:
            try:
                cases += _cases_of_table(table, request, own_cases)
            except ValueError as error:
                raise UsageError(f"--shapes {path}, table {number}: {error}") from error
    return cases


def _cases_of_table(table: dict[str, Any], request: CaseRequest, own_cases: list[Case]) -> list[Case]:
    """One of each dtype."""
    family = checked_family(table.get("family", "diffuse"), own_cases)
    sizes = checked_sizes({name: table[name] for name in table if name not in ("op", "family")}, own_cases)
    op = str(table["op"])
    return [Case(op=op, family=family, dtype=dtype, seed=request.seed, sizes=sizes) for dtype in request.dtypes]
