"""LongBench version 1: its 21 tasks, and the 13 of LongBench-E, with the published prompts."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ..surrogates import check_whole
from .task import Sample, Task

VARIANTS = {
    "code_sim": ("code_sim_skip_blank", "code_sim_levenshtein"),
    "classification": ("classification_every_match",),
}
# the answer of these is a class, so a record without the list of classes cannot be scored
NEEDS_CLASSES = "classification"
# upper edges of the bins of LongBench-E, in words
BINS = (("0-4k", 4000), ("4-8k", 8000))
LAST_BIN = "8k+"


@cache
def published() -> dict[str, Any]:
    """The published prompts, lengths and metrics."""
    text = files(__package__).joinpath("longbench_prompts.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


@cache
def longbench_tasks() -> dict[str, Task]:
    """All tasks by name, those of LongBench-E with the ending ``_e``."""
    tasks = {name: _task(name, entry) for name, entry in published()["tasks"].items()}
    binned = (_task(name, published()["tasks"][name], bins=True) for name in published()["longbench_e"]["tasks"])
    return tasks | {task.name: task for task in binned}


def _task(name: str, entry: Mapping[str, Any], *, bins: bool = False) -> Task:
    metric = entry["metric"]
    return Task(
        name=f"{name}_e" if bins else name,
        family="longbench_e" if bins else "longbench",
        category=entry["category"],
        language=entry["language"],
        scorers=(metric, *VARIANTS.get(metric, ())),
        max_new_tokens=entry["max_new_tokens"],
        min_new_tokens=entry["min_new_tokens"],
        stop=tuple(entry["extra_stop"]),
        chat=not entry["chat_template_exempt"],
        first_line=entry["keep_first_line_before_scoring"],
        num_samples=sum(entry["longbench_e_bin_counts"].values()) if bins else entry["num_samples"],
    )


def template_of(task: Task) -> str:
    """The prompt of a task with the fields ``{context}`` and ``{input}``."""
    template: str = published()["tasks"][_base(task)]["prompt"]
    return template


def longbench_sample(task: Task, record: Mapping[str, Any], index: int) -> Sample:
    """One record as a sample.

    Raises:
        ValueError: If a field is missing or has another type; the text names it.
    """
    _check(task, record)
    return Sample(
        task=task.name,
        id=record["_id"],
        index=index,
        prompt=template_of(task).format(**record),
        answers=tuple(record["answers"]),
        target=record["answers"][0],
        cluster=hashlib.sha1(record["context"].encode(), usedforsecurity=False).hexdigest(),
        classes=tuple(record.get("all_classes") or ()),
        length=record["length"],
        stratum=length_bin(record["length"]) if task.family == "longbench_e" else "",
    )


def length_bin(length: int) -> str:
    """The bin of LongBench-E that a length in words falls into."""
    return next((name for name, edge in BINS if length < edge), LAST_BIN)


def _base(task: Task) -> str:
    return task.name.removeprefix("synthetic_").removesuffix("_e")


def _check(task: Task, record: Mapping[str, Any]) -> None:
    for name, kind in (("_id", str), ("input", str), ("context", str), ("answers", list), ("length", int)):
        if not isinstance(record.get(name), kind):
            raise ValueError(f"the field {name!r} must be {_WORDS[kind]}, got {_short(record.get(name))}")
    if not record["answers"] or not all(isinstance(answer, str) for answer in record["answers"]):
        raise ValueError(f"the field 'answers' must hold at least one text, got {_short(record['answers'])}")
    for text in (record["_id"], record["input"], record["context"], *record["answers"]):
        check_whole(text)
    classes = record.get("all_classes") or []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise ValueError(f"the field 'all_classes' must be a list of texts, got {_short(classes)}")
    if task.scored_by == NEEDS_CLASSES and not record.get("all_classes"):
        raise ValueError(f"the field 'all_classes' must list the classes, got {_short(record.get('all_classes'))}")


_WORDS = {str: "a text", list: "a list", int: "a whole number"}


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
