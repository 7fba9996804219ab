"""``assay list``: what can be judged by name."""

import inspect

from rich.table import Table

from . import operations
from .providers import available_providers


def operations_table() -> Table:
    """One line per operation: its oracle, its arguments, the kernels of the house and of libraries found here."""
    table = Table(title="operations", title_justify="left")
    for column in ("operation", "what it is", "arguments of a kernel", "kernels here"):
        table.add_column(column, overflow="fold")
    for name in operations.NAMES:
        operation = operations.load(name)
        oracle = inspect.getdoc(_oracle(name)) or ""
        optional = operation.optional_arguments
        arguments = ", ".join(f"[{item}]" if item in optional else item for item in operation.arguments)
        kernels = ", ".join(f"{name}[{provider}]" for provider in available_providers())
        table.add_row(name, oracle.partition("\n")[0], arguments.replace("[", r"\["), kernels.replace("[", r"\["))
    return table


def _oracle(name: str) -> object:
    from importlib import import_module

    return getattr(import_module(f"assay.reference.{name}"), name)
