"""What ``check`` hands back: a summary, or an exception that holds one."""

from collections import Counter
from dataclasses import dataclass

from .record import Record, Verdict

NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.INVALID_CASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of judging a kernel.

    Attributes:
        op: Name of the operation.
        kernel: Name of the kernel, or of the kernels that a pattern stood for.
        seed: Of the draw of cases and tensors.
        plan: Count and digest of the cases.
        records: One per kernel and case.
        not_started: Cases left when the time was over.
        report: What a terminal would show.
    """

    op: str
    kernel: str
    seed: int
    plan: str
    records: tuple[Record, ...]
    not_started: int
    report: str

    @property
    def verdicts(self) -> dict[str, int]:
        """How many cases ended with each verdict."""
        return dict(Counter(record.verdict.value for record in self.records))

    @property
    def not_judged(self) -> dict[str, int]:
        """Reasons for which cases were not judged, counted."""
        reasons = dict(Counter(record.text for record in self.records if record.verdict in NOT_JUDGED))
        return reasons | ({"no time left to start them": self.not_started} if self.not_started else {})

    def __str__(self) -> str:
        """One line: verdicts, then what was not judged."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        left = f", {self.not_started} not started" if self.not_started else ""
        return f"{self.op}  {self.kernel}: {counts or 'nothing'}{left} (seed {self.seed}, {self.plan})"


class _Unsuccessful(AssertionError):
    """Holds the summary beside the report that is its text."""

    def __init__(self, text: str, summary: Summary) -> None:
        super().__init__(text)
        self.summary = summary


class KernelRejected(_Unsuccessful):
    """At least one verdict failed; the text is the report, ``summary`` the records."""


class NothingJudged(_Unsuccessful):
    """No case was judged, so nothing is known; the text says why not."""


class CaseNotInPlanError(ValueError):
    """The case asked for is not among those of this operation, tier, seed and dtypes."""
