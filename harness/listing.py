"""``assay list``: what can be judged by name."""

import inspect

from rich.markup import escape
from rich.table import Table

from . import operations
from .discovery import GROUPS, plugins


def operations_table() -> Table:
    """One line per operation: its oracle, its arguments, the kernels of the house and of libraries found here.

    A kernel that a run of the whole house leaves out is marked as judged by name.
    """
    table = Table(title="operations", title_justify="left")
    for column in ("operation", "what it is", "arguments of a kernel", "kernels here"):
        table.add_column(column, overflow="fold")
    for name in operations.NAMES:
        operation = operations.load(name)
        oracle = inspect.getdoc(_oracle(name)) or ""
        optional = operation.optional_arguments
        arguments = ", ".join(f"[{item}]" if item in optional else item for item in operation.arguments)
        kernels = ", ".join(
            f"{kernel.name} (by name)" if kernel.by_name else kernel.name for kernel in operation.kernels()
        )
        table.add_row(name, oracle.partition("\n")[0], arguments.replace("[", r"\["), kernels.replace("[", r"\["))
    return table


def plugins_table() -> Table | None:
    """One line per entry point of an installed package, from its metadata: nothing of it is imported. None if none."""
    found = [plugin for group in GROUPS for plugin in plugins(group)]
    if not found:
        return None
    table = Table(title="installed plug-ins, not imported", title_justify="left")
    for column in ("kind", "name", "leads to", "package"):
        table.add_column(column, overflow="fold")
    for plugin in found:
        kind = plugin.group.removeprefix("assay.")
        table.add_row(*map(escape, (kind, plugin.name, plugin.value, plugin.distribution)))
    return table


def _oracle(name: str) -> object:
    from importlib import import_module

    return getattr(import_module(f"assay.reference.{name}"), name)
