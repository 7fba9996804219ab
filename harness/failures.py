"""What a failure leaves behind: a capsule that replays it, and the smallest case that still fails, as a program."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from . import operations
from .capsule import Origin, write_capsule
from .case import Case
from .contract import Contract
from .execution import Execution, Stop
from .kernels import is_strange
from .operation import Operation
from .options import CheckOptions
from .record import Record, Verdict
from .runner import Exam
from .shrink import fault_kind, shrink, shrunk_text
from .snippet import snippet

# verdicts that no smaller case explains better: a fault of the judge, or one whose every run costs its timeout
NOT_SHRUNK = (Verdict.HARNESS_ERROR, Verdict.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A kernel as a session sees it.

    Attributes:
        name: For reports.
        run_case: How a case is judged.
        operation: What it computes.
        ask: What it answers to a case, without a judgement.
        contract: What it promises; None where only its own process knows.
    """

    name: str
    run_case: Callable[[Case], Record]
    operation: Operation
    ask: Callable[[Exam], Execution | Stop]
    contract: Callable[[Case], Contract] | None = None


class FailureKeeper:
    """Writes capsules into ``capsules/`` of a run's folder, and shrinks the first failure of each kind."""

    def __init__(self, options: CheckOptions, out: Path, device: torch.device, console: Console) -> None:
        """Keep failures of a run with these options."""
        self._options, self._folder, self._device, self._console = options, out / "capsules", device, console
        self._kinds: set[tuple[str, tuple[Verdict, str]]] = set()

    def keep(self, candidate: Candidate, case: Case, record: Record) -> None:
        """Write the capsule of a failure and, for a new kind of it, those of the smallest case that fails so.

        An interruption keeps the smallest case found so far, and goes on upwards.
        """
        if record.verdict is Verdict.HARNESS_ERROR:
            return
        self._write(candidate, case, record)
        kind = candidate.name, fault_kind(record.verdict, record.worst, record.text)
        if kind in self._kinds or record.verdict in NOT_SHRUNK:
            return
        self._kinds.add(kind)
        smallest = record

        def step(_: Case, smaller: Record) -> None:
            nonlocal smallest
            smallest = smaller

        try:
            shrink(case, record.verdict, candidate.run_case, on_step=step)
        finally:
            self._show(candidate, case, smallest)

    def _show(self, candidate: Candidate, case: Case, smallest: Record) -> None:
        small = Case.from_json(smallest.case)
        path = self._write(candidate, small, smallest)
        lines = [f"  shrunk: {shrunk_text(case, small)}", f"  assay replay {shlex.quote(str(path))}"]
        if candidate.operation.name in operations.NAMES:
            spec, where = self._options.kernel, smallest.worst.where if smallest.worst else None
            text = snippet(candidate.operation, small, str(spec) if is_strange(spec) else candidate.name, where)
            path.with_suffix(".py").write_text(text, encoding="utf-8")
            lines.append(f"  python {shlex.quote(str(path.with_suffix('.py')))}")
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, candidate: Candidate, case: Case, record: Record) -> Path:
        origin = Origin(kernel=self._options.kernel, seed=self._options.seed, tier=self._options.tier)
        contract = None if candidate.contract is None else candidate.contract(case)
        return write_capsule(self._folder, record, candidate.operation, self._device, origin, contract)
