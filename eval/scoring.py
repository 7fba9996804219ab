"""Scores of a run: derived from its samples, kept beside them, and made anew wherever they do not fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .run_folder import OK, SCORES, Item, RunFolder
from .scorers import Scorer, find_scorer
from .settings import text_digest
from .tasks import Task, find_task


def score_run(folder: RunFolder, scorers: Sequence[str] | None = None) -> None:
    """Write the scores of every task.

    Args:
        folder: The run.
        scorers: Names; None for those of each task.

    Raises:
        ModuleNotFoundError: If a scorer needs a library that is not installed.
    """
    for name in folder.tasks():
        task, items, records = find_task(name), folder.items(name), folder.latest(name)
        for scorer in scorers or task.scorers:
            rows = _rows(task, find_scorer(scorer), items, records)
            folder.write_lines(_path(task, scorer), rows)


def scores_of(
    folder: RunFolder, task: Task, scorer: Scorer, items: Sequence[Item], records: Mapping[str, Any]
) -> dict[str, float]:
    """Scores by sample, of the good answers alone: read where they were made from these very answers, else made now."""
    stored = folder.read_lines(_path(task, scorer.name))
    fit = {row["id"]: row["output_sha256"] for row in stored if row["scorer"] == scorer.id}
    wanted = {item.id: _digest(records[item.id]) for item in items if _is_answered(records.get(item.id))}
    rows = stored if fit == wanted else _rows(task, scorer, items, records)
    return {row["id"]: float(row["score"]) for row in rows}


def _rows(task: Task, scorer: Scorer, items: Sequence[Item], records: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for item in items:
        record = records.get(item.id)
        if record is not None and _is_answered(record):
            score = scorer.score(task.answer(record["output_text"]), item.answers, item.classes)
            rows.append({"id": item.id, "score": score, "scorer": scorer.id, "output_sha256": _digest(record)})
    return rows


def _is_answered(record: Any) -> bool:
    return record is not None and record["status"] == OK and record.get("output_text") is not None


def _digest(record: Mapping[str, Any]) -> str:
    return text_digest(record["output_text"])


def _path(task: Task, scorer: str) -> Path:
    return Path(SCORES) / f"{task.name}.{scorer}.jsonl"
