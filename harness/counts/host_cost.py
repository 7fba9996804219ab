"""``assay cost``: what a step costs the host, as counts that repeat to the digit, held to what they were.

Counted are kernel launches, allocations, waits for the device and Python calls, of making the plan and of the forward;
on a stand-in for a GPU, so that the code goes where it would go on one. Where valgrind is installed, the instructions
of making the plan as well.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..operations import NAMES
from ..plan import UsageError
from ._callgrind import environment, instructions_of, why_not
from .baseline import Comparison, accept, compare, conclude, read_tables

COMMITTED = Path(__file__).with_name("host_cost.json")
COMMITTED_INSTRUCTIONS = Path(__file__).with_name("host_instructions.json")

# share by which instructions may grow: the same code may be laid out in memory in another way
INSTRUCTION_GROWTH = 0.02

# fields of a step that are shown, and what they are called there
_COLUMNS = {
    "launches": "launches",
    "allocations": "allocs",
    "synchronisations": "waits",
    "host operations": "on host",
    "python calls": "calls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """The options of ``assay cost``."""

    ops: tuple[str, ...] = ()
    kernel: str | None = None
    baseline: Path | None = None
    accept: bool = False
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Fields of each step, by ``kernel step: plan`` and ``kernel step: forward``, and the versions that made them."""

    versions: str
    steps: dict[str, dict[str, Any]]


def run_cost(options: CostOptions, console: Console) -> int:
    """Count, compare with the committed file, or commit; return the exit code.

    Raises:
        UsageError: If an operation or the kernel does not exist, or a stranger's counts would go into our file.
    """
    ops = _chosen(options)
    costs = host_costs(ops, options.kernel)
    console.print(_table(costs))
    found, path = {costs.versions: costs.steps}, options.baseline or COMMITTED
    comparison, faults, instructions = Comparison(unknown=(costs.versions,)), list[str](), dict[str, dict[str, Any]]()

    def left_out(subject: str) -> bool:
        return subject.partition("[")[0] not in ops if options.kernel is None else subject not in costs.steps

    if options.baseline is None and options.kernel is None:
        instructions, faults = _judge_instructions(ops, console, wanted=options.accept)
    if options.accept:
        accept(path, found, left_out=left_out)
        console.print(f"wrote {path}", soft_wrap=True)
        comparison = Comparison()
    elif options.kernel is None or options.baseline is not None:
        comparison = compare(path, found, left_out=left_out)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"found": found, "instructions": instructions, "faults": faults}
        record["changes"] = [*map(str, comparison.changes)]
        (options.out / "cost.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return conclude(console, comparison, faults)


def host_costs(ops: Collection[str] = NAMES, kernel: str | None = None) -> HostCosts:
    """Count in a fresh process, with nothing in its environment that could change the way.

    Args:
        ops: Names of operations.
        kernel: Instead of the kernels of the house; any name that ``find_kernels`` takes.

    Raises:
        UsageError: If there is no such kernel.
        RuntimeError: If a step fails.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    worker = subprocess.run(
        [sys.executable, "-m", "assay.harness.counts._host_worker"],
        input=json.dumps({"ops": list(ops), "kernel": kernel}),
        env=environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if worker.returncode:
        raise RuntimeError(f"the counting process must end with 0, got {worker.returncode}: {worker.stderr[-2000:]}")
    answer = json.loads(worker.stdout)
    if "usage" in answer:
        raise UsageError(answer["usage"])
    return HostCosts(versions=answer["versions"], steps=answer["steps"])


def instruction_growth(committed: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The steps that take more instructions than are committed, by more than ``INSTRUCTION_GROWTH``."""
    grown = []
    for subject, fields in found.items():
        was, now = committed.get(subject, fields)["instructions"], fields["instructions"]
        if now > was * (1 + INSTRUCTION_GROWTH):
            grown.append(f"{subject}: instructions were {was}, are {now} ({now / was - 1:+.1%})")
    return grown


def _judge_instructions(
    ops: Collection[str], console: Console, *, wanted: bool
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The instructions of each plan and which of them grew; counted where they can be compared or are ``wanted``.

    With ``wanted`` they are committed instead of compared.
    """
    obstacle = why_not()
    here = environment() if obstacle is None else ""
    tables = read_tables(COMMITTED_INSTRUCTIONS)
    if obstacle is None and here not in tables and not wanted:
        obstacle = f"none are committed for {here}"
    if obstacle is not None:
        console.print(f"instructions: not counted, {obstacle}", soft_wrap=True, highlight=False)
        return {}, []
    counted = instructions_of(["-m", "assay.harness.counts._callgrind", *ops])
    found = {subject: {"instructions": count} for subject, count in sorted(counted.items())}
    for subject, count in sorted(counted.items()):
        console.print(f"instructions: {count:>10} {subject}", soft_wrap=True, highlight=False, markup=False)
    if wanted:
        accept(COMMITTED_INSTRUCTIONS, {here: found}, left_out=lambda subject: subject.partition("[")[0] not in ops)
        return found, []
    return found, instruction_growth(tables[here], found)


def _chosen(options: CostOptions) -> tuple[str, ...]:
    """The named operations, all if none is named."""
    unknown = [name for name in options.ops if name not in NAMES]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(NAMES)}, got {unknown[0]!r}")
    if options.kernel is not None and len(options.ops) != 1:
        raise UsageError(f"--kernel needs exactly one operation, got {', '.join(options.ops) or 'none'}")
    if options.kernel is not None and options.accept and options.baseline is None:
        raise UsageError("--accept of a kernel that is named needs --baseline, a file of yours")
    return options.ops or NAMES


def _table(costs: HostCosts) -> Table:
    """One section a kernel, one row a step."""
    table = Table(title="cost of a step on the host", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("step")
    for column in _COLUMNS.values():
        table.add_column(column, justify="right")
    heading = ""
    for subject, fields in costs.steps.items():
        kernel, _, step = subject.partition(" ")
        if kernel != heading:
            table.add_row(f"[bold]{escape(kernel)}[/]")
            heading = kernel
        refused = "refused" in fields
        table.add_row(f"  {step}", *([] if refused else [str(fields[column]) for column in _COLUMNS]))
        if refused:
            table.add_row(f"    {escape(fields['refused'])}")
    return table
