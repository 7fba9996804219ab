"""``check``: judge a kernel from a test of one's own, in one line.

Torch is imported when a kernel is judged, not when this module is.
"""

import io
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .outcome import NOT_JUDGED, CaseNotInPlanError, KernelRejected, NothingJudged, Summary
from .plugin import declaration_of
from .record import Record, Verdict
from .waivers import apply, findings, load_waivers

if TYPE_CHECKING:
    import torch

    from .case import Case
    from .operation import Kernel, Operation

HARMLESS = (Verdict.PASS, Verdict.WAIVED, *NOT_JUDGED)
# a kernel that is wrong everywhere is told so often enough
MOST_FAILURES_SHOWN = 10
REPORT_WIDTH = 120


def check(
    fn: Callable[..., Any] | str,
    op: str | None = None,
    tier: str = "smoke",
    device: str = "auto",
    dtypes: Iterable[str] | None = None,
    seed: int | None = None,
    families: Iterable[str] | None = None,
    max_seconds: float | None = None,
    *,
    case: str | None = None,
    captured: Path | str | None = None,
    waivers: Path | str | None = None,
    strict_skips: bool = False,
) -> Summary:
    """Judge a kernel against its oracle within this process; raise unless it passes.

    Args:
        fn: A function that takes the operation's arguments by name, or a name as ``assay check --kernel`` takes it.
        op: The operation that it computes; None for the one that its ``@kernel`` declares.
        tier: ``smoke``, ``full`` or ``nightly``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtypes: Of the inputs; all if None.
        seed: Of the draw of cases and tensors; None for 0, in the nightly tier for a fresh one, which the report names.
        families: Only these; all if None.
        max_seconds: Start no case after so long; what is left is counted in the summary.
        case: Only the case whose id ends so.
        captured: Folder of ``assay eval capture``, whose calls are judged instead of the tier's cases.
        waivers: TOML file of known faults; see ``harness.waivers``.
        strict_skips: Whether a case that the kernel does not serve is a failure.

    Returns:
        The records and the report of a run in which every judged case passed or was waived.

    Raises:
        KernelRejected: If a verdict failed, or a waiver is expired or no longer needed.
        NothingJudged: If no case was judged.
        CaseNotInPlanError: If there is no case of that id.
        ValueError: If an argument cannot be served.
        RuntimeError: If the judge itself failed; that says nothing about the kernel.
    """
    __tracebackhide__ = True
    run = _Run(
        fn,
        op,
        tier=tier,
        device=device,
        dtypes=dtypes,
        seed=seed,
        families=families,
        case=case,
        captured=captured,
    )
    known, today = [] if waivers is None else load_waivers(Path(waivers)), datetime.now(UTC).date()
    originals = run.judge(max_seconds)
    records = [apply(record, known, today) for record in originals]
    notes = findings(originals, known, today, complete=run.everything and len(originals) == run.size)
    verdicts = {record.verdict for record in records}
    if strict_skips and Verdict.UNSUPPORTED in verdicts:
        notes.append("UNSUPPORTED is a failure here: strict skips are on")
    summary = run.summary(records, notes)
    if Verdict.HARNESS_ERROR in verdicts:
        raise RuntimeError(f"the judge failed, which says nothing about the kernel\n{summary.report}")
    if notes or verdicts - set(HARMLESS):
        raise KernelRejected(summary.report, summary)
    if not verdicts & {Verdict.PASS, Verdict.WAIVED}:
        raise NothingJudged(summary.report, summary)
    return summary


class _Run:
    """The plan of one ``check`` and the kernels to judge by it; arguments as there."""

    def __init__(
        self,
        fn: Callable[..., Any] | str,
        op: str | None,
        *,
        tier: str,
        device: str,
        dtypes: Iterable[str] | None,
        seed: int | None,
        families: Iterable[str] | None,
        case: str | None,
        captured: Path | str | None,
    ) -> None:
        from .discovery import load_operation
        from .options import resolve_device, seed_of

        self._fn, self._tier, self._device_name, self._case = fn, tier, device, case
        self._captured = None if captured is None else Path(captured)
        self._seed = seed_of(tier, seed)
        self._dtypes, self._families = _texts("dtypes", dtypes), _texts("families", families)
        self._op = _operation_name(fn, op)
        self._device: torch.device = resolve_device(device)
        self._operation: Operation = load_operation(self._op)
        # as on the command line: the cases are fixed before a kernel named by a text is imported
        self._cases = self._plan()
        self._kernels = _kernels(fn, self._operation)

    @property
    def everything(self) -> bool:
        """Whether all cases of the tier are planned."""
        narrowed = (self._dtypes, self._families, self._case, self._captured)
        return all(one is None for one in narrowed)

    @property
    def size(self) -> int:
        """How many judgements are planned."""
        return len(self._kernels) * len(self._cases)

    def judge(self, max_seconds: float | None) -> list[Record]:
        """A record per kernel and case, as far as the time allows."""
        from .runner import ExamRoom, run_case

        start, records, room = time.monotonic(), [], ExamRoom()
        with _own_matmul_precision():
            # case by case: the kernels share its inputs and its oracle
            for case, kernel in itertools.product(self._cases, self._kernels):
                if max_seconds is not None and time.monotonic() - start > max_seconds:
                    break
                records.append(run_case(self._operation, kernel, case, self._device, room=room))
        return records

    def summary(self, records: list[Record], notes: list[str]) -> Summary:
        """The records with the report that a terminal would show; ``notes`` are its faults beside the verdicts."""
        from .plan import describe

        return Summary(
            op=self._op,
            kernel=", ".join(kernel.name for kernel in self._kernels),
            seed=self._seed,
            plan=describe(self._cases),
            records=tuple(records),
            not_started=self.size - len(records),
            report=self._report(records, notes),
        )

    def _report(self, records: list[Record], notes: list[str]) -> str:
        from rich.console import Console
        from rich.text import Text

        from .plan import describe
        from .report.terminal import failure_lines, print_run

        stream = io.StringIO()
        console = Console(file=stream, width=REPORT_WIDTH, color_system=None, highlight=False)
        failures = [record for record in records if record.verdict not in HARMLESS]
        lines = [failure_lines(record, self._again(record)) for record in failures[:MOST_FAILURES_SHOWN]]
        if len(failures) > MOST_FAILURES_SHOWN:
            lines.append(f"and {len(failures) - MOST_FAILURES_SHOWN} more failures")
        if len(records) < self.size:
            lines.append(f"{self.size - len(records)} of {self.size} judgements not started")
        for line in (*lines, *notes):
            # whole lines: the call that judges again is there to be copied
            console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)
        where = "CPU" if self._device.type == "cpu" else str(self._device)
        console.print()
        console.print(Text(f"{self._op}, seed {self._seed}, {describe(self._cases)}, {where}"))
        print_run(console, records, title=f"check, tier {self._tier}")
        return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())

    def _again(self, record: Record) -> str:
        """The call that judges one case again."""
        options = {"case": record.case["id"], "tier": self._tier, "seed": self._seed, "device": self._device_name}
        if self._dtypes is not None:
            options["dtypes"] = list(self._dtypes)
        if self._captured is not None:
            options["captured"] = str(self._captured)
        fn = repr(self._fn) if isinstance(self._fn, str) else declaration_of(self._fn).name
        return f"check({fn}, {self._op!r}, {', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def _plan(self) -> "list[Case]":
        from .operation import CaseRequest
        from .plan import DTYPES, TIERS, Selection, plan_cases

        if self._tier not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, got {self._tier!r}")
        dtypes = DTYPES if self._dtypes is None else self._dtypes
        unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
        if unknown:
            raise ValueError(f"dtypes must be among {', '.join(DTYPES)}, got {unknown[0]!r}")
        request = CaseRequest(tier=self._tier, seed=self._seed, dtypes=dtypes)
        selection = Selection(captured=self._captured, captured_dtypes=self._dtypes or ())
        cases = plan_cases([self._operation], request, selection)
        if self._families is not None:
            known = sorted({case.family for case in cases})
            unknown = [family for family in self._families if family not in known]
            if unknown:
                raise ValueError(f"families must be among {', '.join(known)}, got {unknown[0]!r}")
            cases = [case for case in cases if case.family in self._families]
        if self._case is not None:
            cases = [case for case in cases if case.id.endswith(self._case)]
            if not cases:
                plan = f"{self._op}, tier {self._tier} and seed {self._seed}"
                raise CaseNotInPlanError(f"case must end the id of a case of {plan}, got {self._case!r}")
        return cases


def _kernels(fn: Callable[..., Any] | str, operation: "Operation") -> "list[Kernel]":
    from .kernels import find_kernels, wrap_function

    return find_kernels(operation, fn) if isinstance(fn, str) else [wrap_function(fn, operation)]


def _operation_name(fn: Callable[..., Any] | str, op: str | None) -> str:
    if not (callable(fn) or isinstance(fn, str)):
        raise TypeError(f"fn must be a function or the name of a kernel, got {type(fn).__name__}")
    declared = None if isinstance(fn, str) else declaration_of(fn).op
    name = op or declared
    if name is None:
        raise ValueError("op must be given for a kernel that declares none")
    return name


def _texts(name: str, values: Iterable[str] | None) -> tuple[str, ...] | None:
    """The values as a tuple; one text is the mistake of leaving the brackets out."""
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list of texts, got {values!r}")
    return None if values is None else tuple(values)


@contextmanager
def _own_matmul_precision() -> Iterator[None]:
    """Undo what the judge sets for all of torch: products that are not cut to tf32."""
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
