"""Needles in a haystack: a grid of lengths and depths, one or several keys, and chains of variables.

The forms follow RULER (Hsieh et al. 2024): sentences that tell the number of a key are hidden among filler, and the
question names one key or several. All is generated, and labelled synthetic.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ._synthetic_text import Writer
from .task import SYNTHETIC, Sample, Task

QUESTION_ONE = "What is the secret number of {}?"
QUESTION_MANY = "What are the secret numbers of {}?"
MOST_CHAIN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The cells, each with as many samples.

    Attributes:
        lengths: Of the haystack, in words.
        depths: Of the needle that is asked for, in percent of the haystack: 0 is its beginning.
        samples: Per cell.
        seed: Of the random stream, which also depends on the cell.
    """

    lengths: tuple[int, ...] = (500, 1000, 2000)
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    samples: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a grid without cells, and depths outside the haystack."""
        if not self.lengths or not self.depths or min(self.lengths) < 1 or self.samples < 1:
            raise ValueError("a grid must have lengths, depths and samples of at least 1")
        if not all(0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths must be between 0 and 100 percent, got {self.depths}")

    def cells(self) -> Iterator[tuple[int, int, int]]:
        """Length, depth and number of the sample within the cell."""
        for length in self.lengths:
            for depth in self.depths:
                for at in range(self.samples):
                    yield length, depth, at


def needle_tasks() -> dict[str, Task]:
    """``needle`` hides one key, ``needle_multikey`` asks for one of four, ``needle_multivalue`` for all of four."""
    return {name: _task(name) for name in ("needle", "needle_multikey", "needle_multivalue", "variable_tracking")}


def _task(name: str) -> Task:
    return Task(
        name=name,
        family="needle",
        category="needle",
        language="en",
        scorers=("string_match_all",),
        max_new_tokens=64 if name in ("needle_multivalue", "variable_tracking") else 32,
        origin=SYNTHETIC,
    )


def needle_samples(task: Task, grid: Grid) -> list[Sample]:
    """One sample per cell and repetition; its stratum is the cell."""
    samples = []
    for index, (length, depth, at) in enumerate(grid.cells()):
        writer = Writer(random.Random(f"{grid.seed} {task.name} {length} {depth} {at}"), zh=False)
        make = _chain if task.name == "variable_tracking" else _keys
        context, question, answers = make(task.name, writer, length, depth / 100)
        lead = "Some facts are hidden within the following text. Remember them.\n\n"
        stratum = f"{length} words, {depth} %"
        samples.append(
            Sample(
                task=task.name,
                id=f"{length}/{depth}/{at}",
                index=index,
                prompt=f"{lead}{context}\n\n{question}\nAnswer:",
                answers=tuple(answers),
                target=", ".join(answers),
                cluster=f"{task.name}/{length}/{depth}/{at}",
                length=writer.measure(context),
                stratum=stratum,
            )
        )
    return samples


def _keys(name: str, writer: Writer, length: int, depth: float) -> tuple[str, str, list[str]]:
    count = 1 if name == "needle" else 4
    # two keys of one name would have two numbers
    keys: dict[str, str] = {}
    while len(keys) < count:
        keys[writer.name()] = writer.number()
    filler = writer.filler(length)
    asked = list(keys) if name == "needle_multivalue" else list(keys)[:1]
    others = [key for key in keys if key not in asked]
    hay = writer.hide(filler, [_fact(key, keys[key]) for key in others])
    sentences = _at_depth(hay, depth, [_fact(key, keys[key]) for key in asked])
    question = (QUESTION_MANY if len(asked) > 1 else QUESTION_ONE).format(", ".join(asked))
    return writer.join(sentences), question, [keys[key] for key in asked]


def _chain(_: str, writer: Writer, length: int, depth: float) -> tuple[str, str, list[str]]:
    """Variables that are assigned from one another; the question asks for all that hold the first one's number."""
    value, names = writer.number(), [f"VAR{at}" for at in writer.rng.sample(range(100, 1000), MOST_CHAIN)]
    lines = [f"Assign {names[0]} = {value}."]
    lines += [f"Assign {after} = {before}." for before, after in pairwise(names)]
    sentences = _at_depth(writer.filler(length), depth, lines)
    return writer.join(sentences), f"Which variables hold the number {value}?", names


def _at_depth(sentences: list[str], depth: float, planted: list[str]) -> list[str]:
    place = round(depth * len(sentences))
    return [*sentences[:place], *planted, *sentences[place:]]


def _fact(key: str, number: str) -> str:
    return f"The secret number of {key} is {number}."
