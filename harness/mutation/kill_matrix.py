"""What is kept of a run of faults and variants. Part of ``mutate.py``."""

from dataclasses import dataclass
from enum import StrEnum

from ..faults import Fault, NotApplicable, Variant
from ..record import Record, Verdict

NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.INVALID_CASE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A fault or variant on one case; ``gate`` decided or came nearest, ``ratio`` is its worst value over its limit."""

    case_id: str
    family: str
    dtype: str
    verdict: Verdict
    gate: str
    ratio: float
    text: str
    seconds: float

    @classmethod
    def of(cls, record: Record) -> "Outcome":
        """What the matrix keeps of a record."""
        worst = record.worst
        return cls(
            case_id=record.case["id"],
            family=record.case["family"],
            dtype=record.case["dtype"],
            verdict=record.verdict,
            gate="" if worst is None else worst.gate,
            ratio=0.0 if worst is None else worst.ratio,
            text=record.text,
            seconds=record.seconds,
        )

    @property
    def reason(self) -> str:
        """Number of the gate that decided, or the verdict where none did."""
        return self.gate.split()[0] if self.gate and self.ratio > 1 else self.verdict.value


class Status(StrEnum):
    """What became of a fault, the worst first."""

    SURVIVED = "survived"
    WRONG_REASON = "wrong reason"
    NOT_JUDGED = "not judged"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """A fault on the cases; ``sound`` are the ids of those that no correct variant failed: no other proves a kill."""

    fault: Fault
    outcomes: tuple[Outcome, ...]
    sound: frozenset[str]

    @property
    def judged(self) -> list[Outcome]:
        """Outcomes that say anything about the fault."""
        return [one for one in self.outcomes if one.verdict not in NOT_JUDGED and one.case_id in self.sound]

    @property
    def kills(self) -> list[Outcome]:
        """Outcomes with an expected verdict."""
        return [one for one in self.judged if one.verdict in self.fault.expects]

    @property
    def status(self) -> Status:
        """Killed for the right reason somewhere, or how it got away."""
        if self.kills:
            return Status.KILLED
        if not self.judged:
            return Status.NOT_JUDGED
        found = any(one.verdict is not Verdict.PASS for one in self.judged)
        return Status.WRONG_REASON if found else Status.SURVIVED

    @property
    def nearest(self) -> Outcome | None:
        """The judged outcome with the largest ratio."""
        return max(self.judged, key=lambda one: one.ratio, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """A correct variant on the cases."""

    variant: Variant
    outcomes: tuple[Outcome, ...]

    @property
    def judged(self) -> list[Outcome]:
        """Outcomes that say anything about the variant."""
        return [one for one in self.outcomes if one.verdict not in NOT_JUDGED]

    @property
    def rejections(self) -> list[Outcome]:
        """Outcomes that blame a correct kernel."""
        return [one for one in self.judged if one.verdict is not Verdict.PASS]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMatrix:
    """Every fault and every variant of an operation against the cases."""

    op: str
    faults: tuple[FaultResult, ...]
    variants: tuple[VariantResult, ...]
    not_applicable: tuple[NotApplicable, ...]
    cases: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every fault that can be judged here was killed for its reason, and every variant passed."""
        faults = all(result.status in (Status.KILLED, Status.NOT_JUDGED) for result in self.faults)
        variants = all(result.judged and not result.rejections for result in self.variants)
        return faults and variants and any(result.status is Status.KILLED for result in self.faults)
