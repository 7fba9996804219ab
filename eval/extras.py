"""Optional libraries: imported when first needed, and named with their extra where they are missing."""

import importlib
from typing import Any


def require(module: str, *, extra: str) -> Any:
    """Import an optional module.

    Raises:
        ModuleNotFoundError: If it is not installed, naming the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"{module} must be installed for this command: pip install 'kernel-assay[{extra}]'"
        raise ModuleNotFoundError(message, name=module) from error
