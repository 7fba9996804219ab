"""Kernels by name: the twins of the house, plug-ins, and functions of a stranger from a module or a file."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .case import Case
from .contract import Contract
from .conventions import argument_names
from .discovery import KERNELS, Plugin, PluginError, find_plugin, load_kernel, name_matches, plugins
from .layouts import DESTINATION, tokens_first
from .operation import Kernel, Operation
from .plan import UsageError
from .plugin import Declaration, Unsupported, declaration_of


class KernelNotFoundError(UsageError):
    """The name leads to no kernel; the text says how far it led."""


def find_kernels(operation: Operation, name: str | None) -> list[Kernel]:
    """The kernels that ``name`` stands for.

    Args:
        operation: What they must compute.
        name: ``module:function``, ``path/to/file.py:function``, a provider such as ``triton``, a pattern over the names
            of the house such as ``mla_prefill[*]``, the entry point of an installed kernel, or None for all of the
            house but those that are judged only by name.

    Raises:
        KernelNotFoundError: If it stands for none, or for one of another operation.
        TypeError: If the function cannot be called with the operation's arguments.
    """
    if name is not None and ":" in name:
        return [wrap_function(_load_function(name), operation)]
    house = operation.kernels()
    if name is None:
        return [kernel for kernel in house if not kernel.by_name]
    wanted = [kernel for kernel in house if name in (kernel.name, _provider(kernel)) or name_matches(kernel.name, name)]
    plugin = _find_plugin(name)
    if wanted and plugin is not None:
        raise KernelNotFoundError(f"--kernel {name} is both a kernel of the house and {plugin}, use {plugin.value}")
    if plugin is not None:
        return [_plugged(plugin, operation)]
    if not wanted:
        known = ", ".join([*(kernel.name for kernel in house), *(plugin.name for plugin in plugins(KERNELS))])
        raise KernelNotFoundError(f"--kernel must be module:function, file.py:function or one of {known}, got {name!r}")
    return wanted


def is_strange(name: str | None) -> bool:
    """Whether ``name`` leads to code from outside the house; nothing is imported to tell."""
    return name is not None and (":" in name or _find_plugin(name) is not None)


def wrap_function(function: Callable[..., Any], operation: Operation) -> Kernel:
    """Make a kernel of a function that takes the operation's arguments by name.

    Raises:
        KernelNotFoundError: If it is declared for another operation.
        TypeError: If it lacks one of the arguments, needs one that the operation does not give, or has conventions that
            speak of one.
    """
    declared = declaration_of(function)
    if declared.op not in (None, operation.name):
        raise KernelNotFoundError(f"{declared.name} must be declared for {operation.name}, got op {declared.op!r}")
    taken = _accepted_arguments(function, operation, declared)

    def contract(case: Case) -> Contract:
        # here, where the judge guards the kernel, whatever `supports` raises becomes a verdict
        _refusal(declared, case)
        return _contract(declared, operation, case)

    def unsupported(case: Case, device: torch.device) -> str | None:
        try:
            return _refusal(declared, case)
        except (Exception, SystemExit):
            return None

    return Kernel(
        name=declared.name,
        contract=contract,
        bind=_bind_destination(function, taken) if declared.style == "dps" else _bind(function, taken, declared),
        unsupported=unsupported,
        conventions=declared.conventions,
        style=declared.style,
    )


def _bind(
    function: Callable[..., Any], taken: list[str], declared: Declaration
) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        given = {name: arguments[name] for name in taken}
        return lambda: tokens_first(function(**given), declared.conventions)

    return bind


def _bind_destination(function: Callable[..., Any], taken: list[str]) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    conventions = declaration_of(function).conventions

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        given, destination = {name: arguments[name] for name in taken}, arguments[DESTINATION]

        def run() -> Any:
            results = destination.allocate()
            # only what was written counts: a caller of this kernel looks at nothing else
            function(**given, **results)
            return tokens_first(tuple(results.values()), conventions)

        return run

    return bind


def _contract(declared: Declaration, operation: Operation, case: Case) -> Contract:
    promised = declared.contract
    if promised is None:
        promised = operation.default_contract(case)
    elif not isinstance(promised, Contract):
        promised = promised(case)
        if not isinstance(promised, Contract):
            raise TypeError(f"contract of {declared.name} must give a Contract, got {type(promised).__name__}")
    return promised.promising(mutates=tuple(dict.fromkeys((*promised.mutates, *declared.mutates))))


def _refusal(declared: Declaration, case: Case) -> str | None:
    """Why the kernel itself does not serve a case, or None."""
    answer = True if declared.supports is None else declared.supports(case)
    if isinstance(answer, Unsupported):
        return answer.reason
    if answer is not True:
        raise TypeError(f"supports of {declared.name} must return True or Unsupported(reason), got {answer!r}")
    return None


def _accepted_arguments(function: Callable[..., Any], operation: Operation, declared: Declaration) -> list[str]:
    """Arguments to pass; optional ones only where the signature names them."""
    optional = operation.optional_arguments
    required = tuple(name for name in operation.arguments if name not in optional)
    try:
        required, optional = argument_names(required, optional, declared.conventions)
    except ValueError as error:
        raise TypeError(f"conventions of {declared.name} do not fit {operation.name}: {error}") from error
    destinations = operation.results if declared.style == "dps" else ()
    strange = [name for name in declared.mutates if name not in (*required, *optional, *destinations)]
    if strange:
        raise TypeError(f"mutates must name arguments of {operation.name}, got {', '.join(strange)}")
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = {name for name, parameter in parameters.items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    if takes_all:
        by_name |= {*required, *optional, *destinations} - set(parameters)
    missing = [name for name in (*required, *destinations) if name not in by_name]
    if missing:
        raise TypeError(
            f"a kernel for {operation.name} must take {', '.join((*required, *destinations))} by name, "
            f"{declared.name} lacks {', '.join(missing)}"
        )
    known = {*required, *optional, *destinations}
    extra = [name for name, parameter in parameters.items() if name not in known and _must_be_given(parameter)]
    if extra:
        raise TypeError(
            f"a kernel for {operation.name} must need only {', '.join((*required, *optional, *destinations))}, "
            f"{declared.name} also needs {', '.join(extra)}"
        )
    return [name for name in (*required, *optional) if name in by_name]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (ValueError, TypeError) as error:
        name = declaration_of(function).name
        raise TypeError(f"a kernel must have a signature that Python can read, wrap {name} in a function") from error


def _must_be_given(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _find_plugin(name: str) -> Plugin | None:
    try:
        return find_plugin(KERNELS, name)
    except PluginError as error:
        raise KernelNotFoundError(f"--kernel: {error}") from error


def _plugged(plugin: Plugin, operation: Operation) -> Kernel:
    try:
        return wrap_function(load_kernel(plugin), operation)
    except PluginError as error:
        raise KernelNotFoundError(f"--kernel: {error}") from error


def _load_function(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise KernelNotFoundError(f"--kernel must name a function of {place}, got {attribute!r}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise KernelNotFoundError(f"--kernel must name an existing file, got {path}")
    name = f"assay_kernel_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelNotFoundError(f"--kernel must name a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    # triton reads the source of its kernels through this table
    sys.modules[name] = module
    # a kernel file may import its neighbours, as it could when run as a script
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise KernelNotFoundError(f"--kernel must name a file that can be imported, but {path} exits") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise KernelNotFoundError(f"--kernel must name an importable module, got {name!r}") from error


def _provider(kernel: Kernel) -> str:
    return kernel.name.partition("[")[2].rstrip("]")
