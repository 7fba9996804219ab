"""Which Triton kernels of a folder no build of the compile gate reaches, read from the source."""

import ast
from collections.abc import Collection
from pathlib import Path


def uncovered_kernels(folder: Path, entries: Collection[str]) -> list[str]:
    """The jitted functions below ``folder``, as ``file stem.function``, that no entry is or calls, even indirectly."""
    calls: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        calls |= _jitted_functions(path.stem, ast.parse(path.read_text(encoding="utf-8")))
    reached: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += calls.get(name, ())
    return sorted(set(calls) - reached)


def _jitted_functions(stem: str, tree: ast.Module) -> dict[str, set[str]]:
    """The jitted functions of a file, and what each of them may call, as ``file stem.function``."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    wrapped = {
        name for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_jit(node.func) for name in _names(node)
    }
    imported = {
        alias.asname or alias.name: f"{(node.module or '').rpartition('.')[2]}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = imported | {function.name: f"{stem}.{function.name}" for function in functions}
    return {
        homes[function.name]: {homes[name] for name in _names(function) if name in homes}
        for function in functions
        if function.name in wrapped or any(_is_jit(decorator) for decorator in function.decorator_list)
    }


def _is_jit(node: ast.expr) -> bool:
    """``triton.jit``, ``jit``, ``gluon.jit``, called or not."""
    if isinstance(node, ast.Call):
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "jit"


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
