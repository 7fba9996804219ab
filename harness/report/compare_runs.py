"""Two runs of the same plan side by side: verdicts that changed, and how far each gate moved from its limit."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..record import ExitCode, Record, Verdict
from .run_folder import NOT_JUDGED, Run, failed
from .run_summary import settings

REGRESSED, LOST, MISSING, CHANGED, NEW, FIXED = "regressed", "no longer judged", "missing", "changed", "new", "fixed"
KINDS = (REGRESSED, LOST, MISSING, CHANGED, NEW, FIXED)
# a smaller share of its limit is nothing to compare, and a smaller change nothing to tell
SMALLEST_RATIO, SMALLEST_GROWTH = 1e-3, 1.01

# kernel and case
Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictChange:
    """A kernel on a case whose verdict is not what it was; an empty verdict is that of a run that lacks the case."""

    kernel: str
    case_id: str
    before: str
    after: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginChange:
    """The worst ratio of a gate over the cases that both runs judged; ``case_id`` is the one that moved most."""

    kernel: str
    gate: str
    before: float
    after: float
    case_id: str
    case_before: float
    case_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a run says against an earlier one.

    Attributes:
        against: Folder of the earlier run.
        obstacle: Why they cannot be compared; empty if they can.
        exit_code: 0 nothing got worse, 1 a verdict did, 3 no judgement in common, 4 the plans differ, 6 something that
            was judged before is missing.
        settings: Name, before and now of every setting that differs.
        changes: Verdicts, regressions first.
        margins: By kernel and gate, those that moved, the largest growth first.
        common: Judgements that both runs hold.
        renamed: Kernel before and kernel now, where two names are compared.
    """

    against: str
    obstacle: str = ""
    exit_code: int = ExitCode.PASSED
    settings: tuple[tuple[str, str, str], ...] = ()
    changes: tuple[VerdictChange, ...] = ()
    margins: tuple[MarginChange, ...] = ()
    common: int = 0
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def summary(self) -> str:
        """One sentence."""
        if self.obstacle:
            return f"Not comparable: {self.obstacle}"
        counts = Counter(change.kind for change in self.changes)
        said = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]) or "no verdict changed"
        pairs = "".join(f" {now} stands against {before}." for before, now in self.renamed)
        return f"{self.common} judgements in common: {said}.{pairs}"


def compare_runs(run: Run, against: Run) -> Comparison:
    """Hold ``run`` against an earlier one.

    Runs of different plans judged different cases, and are not compared. Where the only kernel of an operation has
    another name in each run, these two are compared.

    Args:
        run: The later run.
        against: The earlier one.
    """
    comparison = Comparison(against=str(against.folder), settings=_different_settings(run, against))
    plans = against.header.get("plan"), run.header.get("plan")
    if None in plans or plans[0] != plans[1]:
        text = f"the plans must be equal, got {plans[0]} before and {plans[1]} now"
        return replace(comparison, obstacle=text, exit_code=ExitCode.SETTINGS_DIFFER)
    renamed = _renamed(run, against)
    before, after = _judgements(against, renamed), _judgements(run, {})
    both = [key for key in after if key in before]
    if not both:
        names = [", ".join(one.kernels) or "none" for one in (against, run)]
        text = f"no judgement in common; kernels before: {names[0]}; now: {names[1]}"
        return replace(comparison, obstacle=text, exit_code=ExitCode.NOTHING_JUDGED)
    changes = sorted(_changes(before, after), key=lambda change: KINDS.index(change.kind))
    return replace(
        comparison,
        exit_code=_exit_code({change.kind for change in changes}),
        changes=tuple(changes),
        margins=tuple(_margins(before, after, both)),
        common=len(both),
        renamed=tuple(renamed.items()),
    )


def _exit_code(kinds: set[str]) -> int:
    if kinds & {REGRESSED, LOST}:
        return ExitCode.FAILED
    return ExitCode.INCONCLUSIVE if MISSING in kinds else ExitCode.PASSED


def _different_settings(run: Run, against: Run) -> tuple[tuple[str, str, str], ...]:
    before, now = dict(settings(against)), dict(settings(run))
    names = dict.fromkeys([*before, *now])
    pairs = ((name, before.get(name, "none"), now.get(name, "none")) for name in names)
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def _renamed(run: Run, against: Run) -> dict[str, str]:
    """Kernel of the earlier run -> the kernel that took its place, where each run has one for the operation."""
    names = {}
    for op in {record.op for record in run.records}:
        now, before = ({r.kernel for r in one.records if r.op == op} for one in (run, against))
        if len(now) == len(before) == 1 and now != before:
            names[before.pop()] = now.pop()
    return names


def _judgements(run: Run, renamed: Mapping[str, str]) -> dict[Key, Record]:
    return {(renamed.get(record.kernel, record.kernel), record.case["id"]): record for record in run.records}


def _changes(before: Mapping[Key, Record], after: Mapping[Key, Record]) -> Iterable[VerdictChange]:
    for key in dict.fromkeys([*after, *before]):
        old, new = (records[key].verdict if key in records else None for records in (before, after))
        kind = _kind(old, new)
        if kind is not None:
            yield VerdictChange(kernel=key[0], case_id=key[1], before=old or "", after=new or "", kind=kind)


def _kind(before: Verdict | None, after: Verdict | None) -> str | None:
    if before is after:
        return None
    if before is None:
        return NEW
    if after is None:
        return MISSING
    if failed(after) and not failed(before):
        return REGRESSED
    if after in NOT_JUDGED and before is Verdict.PASS:
        return LOST
    return FIXED if failed(before) and after is Verdict.PASS else CHANGED


def _margins(before: Mapping[Key, Record], after: Mapping[Key, Record], both: Iterable[Key]) -> list[MarginChange]:
    """Per kernel and gate, over the cases in which both runs have the gate."""
    moves: dict[Key, list[tuple[str, float, float]]] = {}
    for kernel, case_id in both:
        old, new = (_ratios(records[kernel, case_id]) for records in (before, after))
        for gate in old.keys() & new.keys():
            moves.setdefault((kernel, gate), []).append((case_id, old[gate], new[gate]))
    changes = []
    for (kernel, gate), found in moves.items():
        case_id, old_ratio, new_ratio = max(found, key=lambda move: abs(_growth(*move[1:])))
        if abs(_growth(old_ratio, new_ratio)) > math.log(SMALLEST_GROWTH):
            change = MarginChange(
                kernel=kernel,
                gate=gate,
                before=max(ratio for _, ratio, _ in found),
                after=max(ratio for *_, ratio in found),
                case_id=case_id,
                case_before=old_ratio,
                case_after=new_ratio,
            )
            changes.append(change)
    return sorted(changes, key=lambda change: (-_growth(change.before, change.after), change.kernel, change.gate))


def _growth(before: float, after: float) -> float:
    """Logarithm of the growth of a ratio; infinite from or to an infinite one."""
    if before == after:
        return 0.0
    small = (max(ratio, SMALLEST_RATIO) for ratio in (before, after))
    old, new = (math.log(ratio) if ratio < math.inf else math.inf for ratio in small)
    return new - old


def _ratios(record: Record) -> dict[str, float]:
    """Worst ratio of each gate; one without a number is beyond every limit."""
    ratios: dict[str, float] = {}
    for gate in record.gates:
        ratio = math.inf if math.isnan(gate.ratio) else gate.ratio
        ratios[gate.gate] = max(ratio, ratios.get(gate.gate, 0.0))
    return ratios
