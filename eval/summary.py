"""What a run came to, counted from its files."""

from collections import Counter
from statistics import fmean
from typing import Any

from .averages import averages
from .run_folder import OK, SKIPPED, RunFolder
from .scorers import find_scorer
from .scoring import scores_of
from .tasks import find_task

MOST_FAILURES = 10


def summarize(folder: RunFolder) -> dict[str, Any]:
    """Counts, scores and averages of a run.

    Raises:
        ModuleNotFoundError: If a task must be scored and a scorer's library is not installed.
    """
    manifest = folder.manifest()
    tasks = {name: _task(folder, name) for name in manifest["tasks"]}
    counts: Counter[str] = Counter()
    for one in tasks.values():
        counts.update(one["counts"])
    scored = [(name, one["scores"][find_task(name).scored_by]) for name, one in tasks.items() if one["scores"]]
    return {
        "suite": manifest["suite"]["name"],
        "label": manifest["label"],
        "model": manifest["model"],
        "counts": dict(counts),
        "tasks": tasks,
        "averages": [
            {
                "family": one.family,
                "group": one.group,
                "tasks": list(one.tasks),
                "task_mean": round(one.task_mean, 2),
                "category_mean": round(one.category_mean, 2),
                "categories": {name: round(value, 2) for name, value in one.categories.items()},
            }
            for one in averages(scored)
        ],
        "unloaded": manifest["unloaded"],
        "notes": manifest["notes"],
    }


def _task(folder: RunFolder, name: str) -> dict[str, Any]:
    task, items, records = find_task(name), folder.items(name), folder.latest(name)
    statuses = {item.id: SKIPPED if item.broken else _status(records.get(item.id)) for item in items}
    good = [records[one] for one, status in statuses.items() if status == OK]
    losses = [record["gold_nll"] for record in good if record.get("gold_nll") is not None]
    answers = [record for record in good if record.get("output_text") is not None]
    scores: dict[str, float] = {}
    strata: dict[str, list[float]] = {}
    for scorer in task.scorers if answers else ():
        values = scores_of(folder, task, find_scorer(scorer), items, records)
        scores[scorer] = round(100 * fmean(values.values()), 2)
        for item in items if scorer == task.scored_by else ():
            if item.stratum and item.id in values:
                strata.setdefault(item.stratum, []).append(values[item.id])
    calls: Counter[str] = Counter()
    for record in good:
        calls.update(record.get("kernel_calls") or {})
    reasons = [f"{item.id}: {item.broken}" for item in items if item.broken]
    reasons += [
        f"{one}: {status}: {records[one]['error']}"
        for one, status in statuses.items()
        if status not in (OK, SKIPPED, "not asked")
    ]
    return {
        "counts": dict(Counter(statuses.values())),
        "scores": scores,
        "parts": {label: [len(found), round(100 * fmean(found), 2)] for label, found in strata.items()},
        "gold_nll": round(fmean(losses), 6) if losses else None,
        "cut_answers": sum(record["finish_reason"] == "length" for record in answers),
        "truncated_prompts": sum(item.truncated for item in items),
        "kernel_calls": dict(calls),
        "failures": reasons[:MOST_FAILURES],
        "failures_left": max(0, len(reasons) - MOST_FAILURES),
    }


def _status(record: dict[str, Any] | None) -> str:
    return "not asked" if record is None else str(record["status"])
