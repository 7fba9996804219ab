"""Code to complete: files of Python's own standard library, which is wherever Python is."""

import sysconfig
from functools import cache
from pathlib import Path

# pure Python, old and calm, so that they are there in every version
MODULES = ("argparse", "ast", "bisect", "calendar", "configparser", "csv", "difflib", "fractions", "heapq", "textwrap")
FEWEST_LINES = 40


@cache
def code_files() -> list[list[str]]:
    """The lines of each file, in the order of ``MODULES``.

    Raises:
        ValueError: If this Python ships no sources of its library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text(encoding="utf-8") for name in MODULES if (path := folder / f"{name}.py").is_file()]
    found = [lines for text in texts if len(lines := text.splitlines()) >= FEWEST_LINES]
    if not found:
        raise ValueError(f"the sources of Python's library must be in {folder}, got none of {', '.join(MODULES)}")
    return found
