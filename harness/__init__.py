"""The judge: decides whether a kernel computes what its oracle says, within what its contract promises.

Importing this package imports no torch: a kernel file may declare itself where none is installed, and the command line
and the pytest plugin start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checking import check
    from .contract import Contract
    from .conventions import Conventions
    from .outcome import KernelRejected, NothingJudged, Summary
    from .plugin import Unsupported, kernel

__all__ = ["Contract", "Conventions", "KernelRejected", "NothingJudged", "Summary", "Unsupported", "check", "kernel"]

_HOMES = {
    "Contract": "contract",
    "Conventions": "conventions",
    "KernelRejected": "outcome",
    "NothingJudged": "outcome",
    "Summary": "outcome",
    "Unsupported": "plugin",
    "check": "checking",
    "kernel": "plugin",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__})
