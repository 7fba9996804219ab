"""Runs read for a comparison, and the refusal to compare what does not pair."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .run_folder import OK, SKIPPED, Item, RunFolder
from .scorers import find_scorer
from .scoring import scores_of
from .settings import differences
from .suite import Gate, Suite, parse_suite
from .tasks import find_task

MOST_LISTED = 10


class NotComparableError(ValueError):
    """Runs that must not be compared; ``reasons`` lists what differs."""

    def __init__(self, reasons: Sequence[str]) -> None:
        """Keep the reasons."""
        super().__init__("; ".join(reasons))
        self.reasons = list(reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run.

    Attributes:
        label: As reports call it.
        path: Its folder.
        manifest: What it was made with.
        items: The plan by task and sample.
        records: The last good attempt of each sample, or else its last one.
        scores: By task and sample, by each task's own scorer; good answers alone.
    """

    label: str
    path: Path
    manifest: dict[str, Any]
    items: dict[str, dict[str, Item]]
    records: dict[str, dict[str, dict[str, Any]]]
    scores: dict[str, dict[str, float]]

    @property
    def tasks(self) -> list[str]:
        """Names, in the order of the suite."""
        return list(self.items)

    @property
    def factors(self) -> dict[str, str]:
        """Named factors, such as ``kernel`` and ``scores``."""
        return dict(self.manifest.get("factors", {}))

    @property
    def suite(self) -> Suite:
        """The suite it ran."""
        return parse_suite(self.manifest["suite"])

    def status(self, task: str, sample: str) -> str:
        """``ok``, ``error``, ``timeout``, ``oom`` or ``skipped``; empty while it was not asked."""
        record = self.records[task].get(sample)
        return "" if record is None else str(record["status"])

    def counts(self) -> Counter[str]:
        """Samples of each status."""
        return Counter(
            self.status(task, sample) or "not asked" for task, items in self.items.items() for sample in items
        )


def read_arm(path: Path) -> Arm:
    """Read a run.

    Raises:
        RunFolderError: If the folder is no run.
        ModuleNotFoundError: If it must be scored and a scorer's library is not installed.
    """
    folder = RunFolder(path)
    manifest = folder.manifest()
    items, records, scores = {}, {}, {}
    for name in manifest["tasks"]:
        task, plan, latest = find_task(name), folder.items(name), folder.latest(name)
        items[name] = {item.id: item for item in plan}
        # a record that cannot be asked has no attempt: it is skipped in every run
        broken = {item.id: {"status": SKIPPED, "error": item.broken} for item in plan if item.broken}
        records[name] = broken | latest
        scores[name] = scores_of(folder, task, find_scorer(task.scored_by), plan, latest)
    label = str(manifest.get("label") or path.name)
    return Arm(label=label, path=path, manifest=manifest, items=items, records=records, scores=scores)


def check_comparable(arms: Sequence[Arm]) -> None:
    """Pair every run with the first one: the same settings, samples, prompts and gold answers.

    Raises:
        NotComparableError: If anything differs, or a run was not finished; the reasons name it.
    """
    reasons: list[str] = []
    first = arms[0]
    for arm in arms:
        unasked = arm.counts()["not asked"]
        if unasked:
            reasons.append(f"{arm.label}: {unasked} samples were not asked yet; the same `assay eval run` goes on")
    for other in arms[1:]:
        names = f"{first.label} and {other.label}"
        found = differences(first.manifest["comparable"], other.manifest["comparable"])
        reasons += [f"{names}: {one}" for one in found]
        if not found:
            reasons += [f"{names}: {one}" for one in _unpaired(first, other)]
    if reasons:
        raise NotComparableError(reasons)


def check_repetition(first: Arm, repeated: Arm) -> None:
    """Refuse what is no repetition of a run: another model, kernel or factor. Batches and order may be others.

    Raises:
        NotComparableError: If it is none; the reasons name what differs.
    """
    here, there = (
        {"model": arm.manifest["model"], "factors": arm.factors, "kernels": arm.manifest["settings"]["kernels"]}
        for arm in (first, repeated)
    )
    found = differences(here, there)
    if found:
        raise NotComparableError([f"{repeated.label} must repeat {first.label}: {one}" for one in found])


def _unpaired(first: Arm, other: Arm) -> list[str]:
    """Samples that are not the same in both plans, the first few by name."""
    found = []
    for task in first.tasks:
        here, there = first.items[task], other.items[task]
        for label, missing in ((other.label, here.keys() - there.keys()), (first.label, there.keys() - here.keys())):
            if missing:
                found.append(f"{task}: {len(missing)} samples are not in {label}: {_listed(sorted(missing))}")
        for field in ("prompt_sha256", "prompt_tokens", "truncated", "gold_sha256", "cluster", "broken"):
            unequal = [one for one in here if one in there and getattr(here[one], field) != getattr(there[one], field)]
            if unequal:
                found.append(f"{task}: {field} differs for {len(unequal)} samples: {_listed(unequal)}")
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def both_ok(first: Arm, second: Arm, task: str) -> list[str]:
    """Samples that both runs answered, in the order of the plan."""
    return [one for one in first.items[task] if first.status(task, one) == OK and second.status(task, one) == OK]


def gates_of(arms: Sequence[Arm]) -> tuple[Gate, ...]:
    """The gates of the suite, which all runs have in common."""
    return arms[0].suite.gates
