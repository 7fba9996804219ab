"""Kernels by name: the twins of the house, and functions of a stranger from a module or a file."""

import fnmatch
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .case import Case
from .contract import Contract
from .operation import Kernel, Operation


class KernelNotFoundError(ValueError):
    """The name leads to no kernel; the text says how far it led."""


def find_kernels(operation: Operation, name: str | None) -> list[Kernel]:
    """The kernels that ``name`` stands for.

    Args:
        operation: What they must compute.
        name: ``module:function``, ``path/to/file.py:function``, a provider such as ``triton``, a pattern over the names
            of the house such as ``mla_prefill[*]``, or None for all of the house.

    Raises:
        KernelNotFoundError: If it stands for none.
        TypeError: If the function cannot be called with the operation's arguments.
    """
    if name is not None and ":" in name:
        return [wrap_function(_load_function(name), operation)]
    house = operation.kernels()
    if name is None:
        return house
    wanted = [kernel for kernel in house if name in (kernel.name, _provider(kernel)) or _matches(kernel.name, name)]
    if not wanted:
        known = ", ".join(kernel.name for kernel in house)
        raise KernelNotFoundError(f"--kernel must be module:function, file.py:function or one of {known}, got {name!r}")
    return wanted


def wrap_function(function: Callable[..., Any], operation: Operation) -> Kernel:
    """Make a kernel of a function that takes the operation's arguments by name and returns ``(out, lse)``.

    Raises:
        TypeError: If it lacks one of the arguments.
    """
    taken = _accepted_arguments(function, operation)
    declared: Contract | None = getattr(function, "assay_contract", None)

    def contract(case: Case) -> Contract:
        return declared or operation.default_contract(case)

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        return lambda: function(**{name: arguments[name] for name in taken})

    return Kernel(name=getattr(function, "assay_name", function.__name__), contract=contract, bind=bind)


def _accepted_arguments(function: Callable[..., Any], operation: Operation) -> list[str]:
    """Arguments to pass; optional ones only where the signature names them."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(operation.arguments)
    missing = [
        name for name in operation.arguments if name not in parameters and name not in operation.optional_arguments
    ]
    if missing:
        raise TypeError(
            f"a kernel for {operation.name} must take {', '.join(operation.arguments)} by name, "
            f"{getattr(function, '__name__', function)} lacks {', '.join(missing)}"
        )
    return [name for name in operation.arguments if name in parameters]


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


def _matches(name: str, pattern: str) -> bool:
    # brackets are part of the names here, not character sets
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
