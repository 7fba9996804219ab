"""What a run says while it goes and when it ends."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .asking import Clock

# between two lines where there is no terminal to draw a bar in
LINE_SECONDS = 30.0


class Reporter:
    """A bar in a terminal, a line now and then elsewhere: samples, failures so far, and the time that is left."""

    def __init__(self, console: Console, total: int, clock: Clock) -> None:
        """For ``total`` samples."""
        self._console, self._total, self._clock = console, total, clock
        self._began = self._spoke = clock()
        self._done = 0
        columns = (TextColumn("asking"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("asking", total=total, state="")

    def __enter__(self) -> "Reporter":
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def advance(self, tokens: int, samples: int, failed: int) -> None:
        """A batch is done."""
        self._done += samples
        now = self._clock()
        state = f"{failed} failed, {duration(self._left(now))} left"
        self._bar.update(self._task, completed=self._done, state=state)
        if not self._console.is_terminal and now - self._spoke >= LINE_SECONDS:
            self._spoke = now
            self._console.print(f"{self._done} of {self._total}, {state}", highlight=False)

    def _left(self, now: float) -> float:
        # the longest come first, so this is more than it will take
        return (now - self._began) / self._done * (self._total - self._done) if self._done else 0.0


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def print_summary(console: Console, summary: Mapping[str, Any], path: Path) -> None:
    """Scores by task, averages, and everything that did not go as planned."""
    table = Table(title=Text(f"{summary['label']}: {summary['suite']}"), title_justify="left", box=SIMPLE)
    for column in ("task", "answered", "score", "gold nats", "answers cut", "prompts cut"):
        table.add_column(column, justify="left" if column == "task" else "right", overflow="fold")
    for name, one in summary["tasks"].items():
        total, good = sum(one["counts"].values()), one["counts"].get("ok", 0)
        score, loss = next(iter(one["scores"].values()), None), one["gold_nll"]
        table.add_row(
            name,
            str(total) if good == total else f"{good} of {total}",
            "" if score is None else f"{score:.2f}",
            "" if loss is None else f"{loss:.4f}",
            str(one["cut_answers"] or ""),
            str(one["truncated_prompts"] or ""),
        )
    console.print(table)
    for one in summary["averages"]:
        if len(one["tasks"]) > 1:
            means = f"every task alike {one['task_mean']:.2f}, every category alike {one['category_mean']:.2f}"
            console.print(f"{one['family']}, {one['group']}, {len(one['tasks'])} tasks: {means}", highlight=False)
    for name, one in summary["tasks"].items():
        for reason in one["failures"]:
            console.print(Text(f"{name} {reason}", style="yellow"), soft_wrap=True)
        if one["failures_left"]:
            console.print(Text(f"{name}: {one['failures_left']} more", style="yellow"))
    for note in summary["notes"]:
        console.print(Text(note, style="dim"), soft_wrap=True)
    own = summary["wall_s"] - summary["model_s"]
    share = f", of which the runner itself {own / summary['wall_s']:.1%}" if summary["wall_s"] > 0 else ""
    console.print(f"{duration(summary['wall_s'])}{share}; written to {path}", highlight=False, soft_wrap=True)
