"""Planted faults and correct-but-different kernels, one module per operation.

A fault is a kernel with one wrong step; the judge must find it, and for the right reason. A variant is a kernel that is
right in another order or another form; the judge must not reject it. ``catalogue.json`` lists faults of public kernels;
each of its rows for an operation here is either planted or has a reason why it is not.
"""

import functools
import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

from ..record import Verdict

Function = TypeVar("Function", bound=Callable[..., Any])

# attributes by which a module's faults and variants are told from its other functions
_FAULT, _VARIANT, _COMMON = "assay_fault", "assay_variant", "assay_common_fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kernel with one wrong step.

    Attributes:
        name: Of the function.
        op: Operation that it gets wrong.
        function: Takes the operation's arguments by name.
        expects: Verdicts that name what is wrong with it; any other one is a kill for the wrong reason.
        rows: Rows of ``catalogue.json``, such as ``FC-014``, or names of a specification, such as ``F4``.
        source: Where such a fault was seen, beyond the rows.
        device_only: Whether a CPU cannot show it.
    """

    name: str
    op: str
    function: Callable[..., Any]
    expects: frozenset[Verdict]
    rows: tuple[str, ...] = ()
    source: str = ""
    device_only: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes it goes by its name: functions that were planted in a twin have no place of their own."""
        return _planted, (self.op, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A correct kernel of another form.

    Attributes:
        name: Of the function.
        op: Operation that it computes.
        function: Takes the operation's arguments by name; may carry a contract, see ``harness.plugin.kernel``.
    """

    name: str
    op: str
    function: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """As of a fault."""
        return _planted, (self.op, self.name)


# a module of marked functions, or faults that were planted in a twin
Part: TypeAlias = ModuleType | Sequence[Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotApplicable:
    """A row of the catalogue that is not planted, and why."""

    row: str
    reason: str


def planted(
    op: str, *expects: Verdict, rows: tuple[str, ...] = (), source: str = "", device_only: bool = False
) -> Callable[[Function], Function]:
    """Mark a function as a fault; the arguments are those of ``Fault``.

    Raises:
        ValueError: If no verdict, or ``PASS``, is expected.
    """
    if not expects or Verdict.PASS in expects:
        raise ValueError(f"expects must be failing verdicts, got {', '.join(expects) or 'none'}")

    def attach(function: Function) -> Function:
        function.__dict__[_FAULT] = Fault(
            name=function.__name__,
            op=op,
            function=function,
            expects=frozenset(expects),
            rows=rows,
            source=source,
            device_only=device_only,
        )
        return function

    return attach


def common(*expects: Verdict, rows: tuple[str, ...] = (), source: str = "") -> Callable[[Function], Function]:
    """Mark ``function(twin, arguments)`` as a fault that any clean twin can have; see ``planted_in``."""

    def attach(function: Function) -> Function:
        function.__dict__[_COMMON] = {"expects": expects, "rows": rows, "source": source}
        return function

    return attach


def planted_in(op: str, twin: Callable[..., Any], part: ModuleType) -> tuple[Fault, ...]:
    """The common faults of a module, planted in the clean twin of an operation.

    Args:
        op: Operation.
        twin: Takes the operation's arguments as a mapping, and steps to be changed by name.
        part: Module whose functions ``common`` marks.
    """

    def plant(function: Callable[..., Any]) -> Fault:
        mark = function.__dict__[_COMMON]

        @functools.wraps(function)
        def kernel(**arguments: Any) -> Any:
            return function(twin, arguments)

        # the signature is the operation's, not that of the fault before it is planted
        del kernel.__wrapped__
        planted(op, *mark["expects"], rows=mark["rows"], source=mark["source"])(kernel)
        fault: Fault = kernel.__dict__[_FAULT]
        return fault

    return tuple(plant(function) for function in _functions(part) if _COMMON in getattr(function, "__dict__", {}))


def variant(op: str) -> Callable[[Function], Function]:
    """Mark a function as a correct variant; the arguments are those of ``Variant``."""

    def attach(function: Function) -> Function:
        function.__dict__[_VARIANT] = Variant(name=function.__name__, op=op, function=function)
        return function

    return attach


def load(op: str) -> tuple[list[Fault], list[Variant]]:
    """The faults and the variants of an operation, in the order of their files.

    Raises:
        ValueError: If the operation has no module of faults.
    """
    entries = _entries(_face(op).PARTS)
    faults = [entry for entry in entries if isinstance(entry, Fault)]
    return faults, [entry for entry in entries if isinstance(entry, Variant)]


@functools.cache
def _by_name(op: str) -> dict[str, Fault | Variant]:
    faults, variants = load(op)
    entries: list[Fault | Variant] = [*faults, *variants]
    return {entry.name: entry for entry in entries}


def _planted(op: str, name: str) -> Fault | Variant:
    return _by_name(op)[name]


def not_applicable(op: str) -> tuple[NotApplicable, ...]:
    """The rows of the catalogue that belong to the operation and are not planted."""
    rows: tuple[NotApplicable, ...] = _face(op).NOT_APPLICABLE
    return rows


def named(parts: Iterable[Part], name: str) -> Callable[..., Any]:
    """The fault or variant of that name.

    Raises:
        AttributeError: If there is none, as a module says it.
    """
    for entry in _entries(parts):
        if entry.name == name:
            return entry.function
    raise AttributeError(f"no fault or variant is called {name!r}")


@functools.cache
def catalogue() -> tuple[dict[str, str], ...]:
    """The rows of ``catalogue.json``: faults of public kernels, each with its trigger and its mutant."""
    return tuple(json.loads((Path(__file__).parent / "catalogue.json").read_text(encoding="utf-8")))


def _face(op: str) -> ModuleType:
    if not (Path(__file__).parent / f"{op}.py").is_file():
        raise ValueError(f"op must be an operation with planted faults, got {op!r}")
    return importlib.import_module(f".{op}", __name__)


def _entries(parts: Iterable[Part]) -> list[Fault | Variant]:
    """The faults and variants of some parts, in order; an import is listed where it was defined only."""
    entries: list[Fault | Variant] = []
    for part in parts:
        if isinstance(part, ModuleType):
            marks = (getattr(function, "__dict__", {}) for function in _functions(part))
            entries += [mark[kind] for mark in marks for kind in (_FAULT, _VARIANT) if kind in mark]
        else:
            entries += part
    return entries


def _functions(part: ModuleType) -> list[Any]:
    return [value for value in vars(part).values() if getattr(value, "__module__", None) == part.__name__]
