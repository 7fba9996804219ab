"""``assay compile``: every Triton kernel of the house, compiled for GPUs that need not be there, held to what it was.

Triton's own compiler and the ptxas that it brings make the machine code. What is counted in it is compared with the
committed file, which has a table for each pair of versions. No kernel runs.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..plan import UsageError
from ._compile_coverage import uncovered_kernels
from ._compile_variants import ARCHITECTURES, Build, builds
from .baseline import Comparison, accept, compare, conclude
from .standin_device import SHARED_MEMORY

COMMITTED = Path(__file__).with_name("compile_gate.json")
KERNEL_FOLDER = Path(__file__).parents[2] / "optimized"

# another assembler is the user's choice, and another version; all other settings would change the code unseen
_KEPT_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")

# fields of a build that are shown, and what they are called there
_COLUMNS = {
    "registers": "regs",
    "spill_stores": "spills",
    "shared_bytes": "shared",
    "wgmma": "wgmma",
    "tma_loads": "TMA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The options of ``assay compile``."""

    ops: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    accept: bool = False
    out: Path | None = None


def run_compile(options: CompileOptions, console: Console, committed: Path = COMMITTED) -> int:
    """Compile, compare with the committed file, or commit; return the exit code.

    Raises:
        UsageError: If an operation or an architecture does not exist.
    """
    chosen, started = _chosen(options), time.monotonic()
    found = compile_builds(chosen)
    fields = {name: subject for subjects in found.values() for name, subject in subjects.items()}
    console.print(_table(chosen, fields))
    specialized = Counter(one.get("warp_specialization", "does not build") for one in fields.values())
    console.print("warp specialization: " + ", ".join(f"{state}: {count}" for state, count in specialized.items()))
    uncovered = uncovered_kernels(KERNEL_FOLDER, {build.kernel for build in builds()})
    faults = [f"{name}: no build compiles it" for name in uncovered]
    faults += [fault for build in chosen for fault in build_faults(build, fields[build.name])]
    left_out = {build.name for build in builds()} - fields.keys()
    comparison = Comparison()
    if options.accept:
        accept(committed, found, left_out=left_out.__contains__)
        console.print(f"wrote {committed}", soft_wrap=True)
    else:
        comparison = compare(committed, found, left_out=left_out.__contains__)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"found": found, "changes": [*map(str, comparison.changes)], "faults": faults}
        (options.out / "compile.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    code = conclude(console, comparison, faults)
    console.print(f"{len(chosen)} builds in {time.monotonic() - started:.0f} s with {'; '.join(found)}")
    return code


def compile_builds(chosen: Sequence[Build]) -> dict[str, dict[str, dict[str, Any]]]:
    """Compile in fresh processes; return the fields of each build by its name, by the versions that made them.

    Raises:
        RuntimeError: If the worker fails as a whole; a build that fails is an answer, with its reason.
    """
    request = {"processes": min(8, _processors()), "builds": [_request(build) for build in chosen]}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_") or name in _KEPT_VARIABLES
    }
    worker = subprocess.run(
        [sys.executable, "-m", "assay.harness.counts._compile_worker"],
        input=json.dumps(request),
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if worker.returncode:
        raise RuntimeError(f"the compile worker must end with 0, got {worker.returncode}: {worker.stderr[-2000:]}")
    head, *lines = (json.loads(line) for line in worker.stdout.splitlines())
    outcomes = {line["name"]: line["fields"] for line in lines}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for build in chosen:
        found.setdefault(head["versions"][build.arch], {})[build.name] = outcomes[build.name]
    return found


def build_faults(build: Build, fields: dict[str, Any]) -> list[str]:
    """What no kernel may do, committed or not: ask for more than the GPU has, or lose its warp specialisation."""
    faults, limit = [], SHARED_MEMORY[ARCHITECTURES[build.arch]]
    if fields.get("shared_bytes", 0) > limit:
        faults.append(f"{build.name}: shared_bytes must be at most {limit}, got {fields['shared_bytes']}")
    if fields.get("warp_specialization") == "asked for, not on":
        faults.append(f"{build.name}: warp specialization was asked for, and the compiler left it out without a word")
    return faults


def _chosen(options: CompileOptions) -> list[Build]:
    """The builds of the named operations and architectures; all if none is named."""
    every = builds()
    ops = list(dict.fromkeys(op for build in every for op in build.ops))
    for what, names, known in (("an operation", options.ops, ops), ("--arch", options.archs, list(ARCHITECTURES))):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"{what} must be one of {', '.join(known)}, got {unknown[0]!r}")
    ops, archs = list(options.ops) or ops, list(options.archs) or list(ARCHITECTURES)
    return [build for build in every if build.arch in archs and set(build.ops) & set(ops)]


def _request(build: Build) -> dict[str, Any]:
    return {
        "name": build.name,
        "arch": build.arch,
        "capability": ARCHITECTURES[build.arch],
        "kernel": build.kernel,
        "call": build.call,
        "arguments": build.arguments,
    }


def _processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _table(chosen: Sequence[Build], fields: dict[str, dict[str, Any]]) -> Table:
    """One section an architecture and kernel, one row a build."""
    table = Table(title="builds without a GPU", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("build")
    for column in _COLUMNS.values():
        table.add_column(column, justify="right")
    headings = set[tuple[str, str]]()
    for build in sorted(chosen, key=lambda one: (one.arch, one.kernel), reverse=True):
        if (build.arch, build.kernel) not in headings:
            headings.add((build.arch, build.kernel))
            table.add_row(f"[bold]{build.arch} {build.kernel.partition('.')[2]}[/]")
        found = fields[build.name]
        table.add_row(f"  {build.variant}", *[str(found[column]) for column in _COLUMNS if found["builds"]])
        if not found["builds"]:
            table.add_row(f"    does not build: {escape(found['why'])}")
    return table
