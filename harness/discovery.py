"""Kernels, operations and cases of installed packages: found in their metadata, imported only when one is selected."""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from .plugin import API, declaration_of, is_declared

if TYPE_CHECKING:
    from .case import Case
    from .operation import CaseRequest, Operation

KERNELS, OPERATIONS, CASES = "assay.kernels", "assay.operations", "assay.cases"
GROUPS = (KERNELS, OPERATIONS, CASES)


class PluginError(ValueError):
    """An entry point that cannot be served; the text names it and its distribution."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point, not imported.

    Attributes:
        group: One of ``GROUPS``.
        name: By which it is selected.
        value: ``module:object`` that it leads to.
        distribution: Name and version of the package that brings it; empty if unknown.
    """

    group: str
    name: str
    value: str
    distribution: str
    _point: EntryPoint

    def __str__(self) -> str:
        """For error texts: the name, then where it comes from."""
        return f"{self.group} {self.name!r}" + (f" ({self.distribution})" if self.distribution else "")

    def load(self) -> Any:
        """Import the module and return the object; what the import raises is not hidden."""
        return self._point.load()


def plugins(group: str) -> list[Plugin]:
    """The entry points of ``group`` by name, from the metadata of installed packages alone."""
    found = [_plugin(point) for point in entry_points(group=group)]
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def find_plugin(group: str, name: str) -> Plugin | None:
    """The entry point called ``name``, or None.

    Raises:
        PluginError: If several packages bring one of that name.
    """
    found = [plugin for plugin in plugins(group) if plugin.name == name]
    if len(found) > 1:
        places = " and ".join(f"{plugin.value} ({plugin.distribution})" for plugin in found)
        raise PluginError(f"{group} {name!r} must be brought by one package, got {places}")
    return found[0] if found else None


def load_kernel(plugin: Plugin) -> Callable[..., Any]:
    """The function of a kernel's entry point, imported now.

    Raises:
        PluginError: If it is not decorated with ``kernel`` of this version.
    """
    # decorating with another version raises, with a text of its own, while the module is imported
    function = plugin.load()
    if not is_declared(function):
        raise PluginError(f"{plugin} must lead to a function decorated with @kernel, got {plugin.value}")
    _check_version(plugin, declaration_of(function).api)
    return cast(Callable[..., Any], function)


def operation_names() -> list[str]:
    """Operations of the house, then those of installed packages, from their metadata."""
    from . import operations

    plugged = [plugin.name for plugin in plugins(OPERATIONS)]
    return [*operations.NAMES, *(name for name in dict.fromkeys(plugged) if name not in operations.NAMES)]


def load_operation(name: str) -> "Operation":
    """The operation called ``name``, of the house or of an installed package.

    Raises:
        PluginError: If an installed one takes a name of the house, or is none of this version.
        ValueError: If there is none.
    """
    from . import operations

    plugin = find_plugin(OPERATIONS, name)
    if plugin is None:
        if name not in operations.NAMES:
            raise ValueError(f"an operation must be one of {', '.join(operation_names())}, got {name!r}")
        return operations.load(name)
    if name in operations.NAMES:
        raise PluginError(f"{plugin} must not take the name of an operation of the house")
    operation = plugin.load()
    _check_version(plugin, getattr(operation, "api", None))
    if getattr(operation, "name", None) != name:
        raise PluginError(f"{plugin} must be called as its operation, got {getattr(operation, 'name', None)!r}")
    return cast("Operation", operation)


def load_cases(name: str, operation: "Operation", request: "CaseRequest") -> "list[Case]":
    """The cases that the entry point ``name`` adds to a plan.

    It leads to a function with the attribute ``api = 1`` that takes a ``CaseRequest`` and returns cases; those of other
    operations are left out.

    Raises:
        PluginError: If there is none of that name, or it gives something else than cases.
    """
    from .case import Case

    plugin = find_plugin(CASES, name)
    if plugin is None:
        known = ", ".join(plugin.name for plugin in plugins(CASES)) or "none are installed"
        raise PluginError(f"{CASES} must be one of {known}, got {name!r}")
    draw = plugin.load()
    _check_version(plugin, getattr(draw, "api", None))
    cases = draw(request)
    if not isinstance(cases, list) or not all(isinstance(case, Case) for case in cases):
        raise PluginError(f"{plugin} must return a list of cases, got {type(cases).__name__}")
    return [case for case in cases if case.op == operation.name]


def name_matches(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern with ``*`` and ``?``; brackets are part of names here, not character sets."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _plugin(point: EntryPoint) -> Plugin:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
    return Plugin(point.group, point.name, point.value, distribution, point)


def _check_version(plugin: Plugin, api: object) -> None:
    if api != API:
        raise PluginError(f"{plugin} must be written for api {API}, the version of this assay, got api {api!r}")
