"""A comparison in the terminal, and all its files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import report_text as text
from .comparison import Comparison, GateResult, Pair
from .report_json import json_report
from .report_junit import junit_report
from .report_markdown import markdown_report
from .run_folder import RunFolder
from .statistics import Verdict

STYLES = {
    Verdict.EQUIVALENT: "green",
    Verdict.IMPROVED: "green",
    Verdict.NON_INFERIOR: "green",
    Verdict.REGRESSED: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
}
MOST_FLIPS = 5


def print_comparison(console: Console, comparison: Comparison) -> None:
    """The verdict last, where a terminal shows it."""
    for pair in comparison.pairs:
        _print_pair(console, pair)
    for effect in comparison.effects:
        before, after = effect.levels
        console.print(Text(f"factor {effect.factor}: {before} → {after}, averaged over the others", style="bold"))
        _print_gates(console, effect.gates)
    for note in comparison.notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    style = "bold green" if comparison.exit_code == 0 else "bold red" if comparison.exit_code != 6 else "bold yellow"
    console.print(Text(comparison.headline, style=style))


def _print_pair(console: Console, pair: Pair) -> None:
    if pair.tasks:
        # a narrow terminal has no room for scorers and kinds of intervals
        rows = [
            (task, n, first, second, gain, interval.partition("]")[0] + "]", *rest)
            for task, _, n, first, second, gain, interval, *rest in map(text.task_cells, pair.tasks)
        ]
        columns = [column for column in text.TASK_COLUMNS if column != "scorer"]
        console.print(_table("tasks", columns, rows))
    for name, first, second, tasks in text.average_rows(pair):
        console.print(Text(f"{name}: {first} → {second} ({tasks})"), soft_wrap=True)
    if pair.probes:
        columns = ["context", "tokens", "first", "second", "mean |d|", "largest", "repeated"]
        console.print(_table("log-probabilities of prompt tokens", columns, text.probe_rows(pair)))
    if pair.kernels:
        console.print(_table("kernel calls", ["kernel", "first", "second"], text.kernel_rows(pair)))
    if pair.failures.table:
        console.print(_table("not answered", ["task", "first", "second", "samples"], text.failure_rows(pair)))
    lines = [
        *text.task_lines(pair),
        *text.divergence_lines(pair),
        *text.noise_lines(pair),
        *text.speed_lines(pair),
        *text.failure_lines(pair),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for flip in pair.flips[:MOST_FLIPS]:
        console.print(Text(f"{flip.task} {flip.id}: {flip.first:.2f} → {flip.second:.2f}", style="dim"))
    console.print()
    console.print(Text(text.title(pair), style="bold"))
    _print_gates(console, pair.gates)


def _print_gates(console: Console, results: Sequence[GateResult]) -> None:
    for result in results:
        name, first, second, gain, interval, p, margin, verdict = text.gate_cells(result)
        console.print(Text.assemble((verdict.upper(), STYLES[result.verdict]), "  ", name), soft_wrap=True)
        if result.estimate is not None:
            numbers = f"{first} → {second}, gain {gain} {interval}, p {p}, accepted loss {margin}"
            console.print(Text(f"  {numbers}"), soft_wrap=True)
        console.print(Text(f"  {text.explanation(result)}"), soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0, 0, 1))
    for at, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if at == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def write_reports(comparison: Comparison, folder: Path) -> list[Path]:
    """Write JSON, Markdown, JUnit, the changed samples, and the HTML page where its libraries are installed."""
    files = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json("report.json", json_report(comparison))
    flips = [
        {"first_run": pair.first, "second_run": pair.second, **dataclasses.asdict(flip)}
        for pair in comparison.pairs
        for flip in pair.flips
    ]
    files.write_lines(Path("flips.jsonl"), flips)
    (folder / "report.md").write_text(markdown_report(comparison), encoding="utf-8")
    (folder / "junit.xml").write_text(junit_report(comparison), encoding="utf-8")
    written = [folder / name for name in ("report.md", "report.json", "junit.xml", "flips.jsonl")]
    try:
        # matplotlib and jinja2 are imported for the page alone
        from .report_html import html_report
    except ModuleNotFoundError:
        return written
    (folder / "report.html").write_text(html_report(comparison), encoding="utf-8")
    return [folder / "report.html", *written]
