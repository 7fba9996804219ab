"""Means over tasks, as LongBench publishes them: of tasks, and of categories; families are never mixed."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from .tasks import find_task

# the published tables count the code tasks in both languages
GROUPS = {"all": ("en", "zh", "code"), "English": ("en", "code"), "Chinese": ("zh", "code")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """Means over the tasks of one family and one group of languages.

    Attributes:
        family: Such as ``longbench``; synthetic tasks are a family of their own.
        group: ``all``, ``English`` or ``Chinese``.
        tasks: Which tasks.
        task_mean: Every task alike.
        categories: Mean of each category.
        category_mean: Every category alike, the published overall score.
    """

    family: str
    group: str
    tasks: tuple[str, ...]
    task_mean: float
    categories: dict[str, float]
    category_mean: float


def averages(scores: Iterable[tuple[str, float]]) -> list[Average]:
    """The averages of task scores; groups of one language are left out where there is but one language."""
    by_family: dict[str, list[tuple[str, float]]] = {}
    for name, score in scores:
        by_family.setdefault(find_task(name).family, []).append((name, score))
    found = []
    for family, rows in by_family.items():
        languages = {find_task(name).language for name, _ in rows}
        for group, spoken in GROUPS.items():
            mine = [(name, score) for name, score in rows if find_task(name).language in spoken]
            if mine and (group == "all" or {"en", "zh"} <= languages):
                found.append(_average(family, group, mine))
    return found


def _average(family: str, group: str, rows: list[tuple[str, float]]) -> Average:
    by_category: dict[str, list[float]] = {}
    for name, score in rows:
        by_category.setdefault(find_task(name).category, []).append(score)
    categories = {category: fmean(scores) for category, scores in by_category.items()}
    return Average(
        family=family,
        group=group,
        tasks=tuple(name for name, _ in rows),
        task_mean=fmean(score for _, score in rows),
        categories=categories,
        category_mean=fmean(categories.values()),
    )
