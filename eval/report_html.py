"""A comparison as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import report_charts as charts
from . import report_text as text
from .comparison import Comparison, GateResult, Pair
from .exit_code import ExitCode
from .report_markdown import AVERAGE_COLUMNS, PROBE_COLUMNS
from .statistics import Verdict

MOST_FLIPS = 40
KINDS = {
    Verdict.EQUIVALENT: "good",
    Verdict.IMPROVED: "good",
    Verdict.NON_INFERIOR: "good",
    Verdict.REGRESSED: "bad",
    Verdict.INCONCLUSIVE: "aside",
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: its title, columns and rows of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def html_report(comparison: Comparison) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    code = comparison.exit_code
    return environment.get_template("comparison.html.j2").render(
        headline=comparison.headline,
        kind="good" if code == ExitCode.PASSED else "aside" if code == ExitCode.INCONCLUSIVE else "bad",
        suite=comparison.suite,
        notes=comparison.notes,
        arms=Sheet("Runs", ("run", "model", "samples", "folder", "settings"), list(text.arm_rows(comparison))),
        pairs=[_pair(at, pair) for at, pair in enumerate(comparison.pairs)],
        effects=[
            {"title": f"{effect.factor}: {effect.levels[0]} → {effect.levels[1]}", "gates": _gates(effect.gates)}
            for effect in comparison.effects
        ],
        gate_columns=text.GATE_COLUMNS,
        most_flips=MOST_FLIPS,
    )


def _pair(at: int, pair: Pair) -> dict[str, Any]:
    lines = [
        *text.failure_lines(pair),
        *text.task_lines(pair),
        *text.divergence_lines(pair),
        *text.noise_lines(pair),
        *text.speed_lines(pair),
    ]
    return {
        "title": text.title(pair),
        "gates": _gates(pair.gates),
        "lines": lines,
        "pictures": _pictures(at, pair),
        "sheets": [sheet for sheet in _sheets(pair) if sheet.rows],
        "flips": pair.flips[:MOST_FLIPS],
        "flips_left": max(0, len(pair.flips) - MOST_FLIPS),
    }


def _gates(results: Sequence[GateResult]) -> list[dict[str, Any]]:
    return [
        {"cells": text.gate_cells(result), "kind": KINDS[result.verdict], "explanation": text.explanation(result)}
        for result in results
    ]


def _pictures(at: int, pair: Pair) -> list[dict[str, Any]]:
    drawn = []
    if any(result.estimate for result in pair.gates):
        drawn.append(("Gain against the margin", charts.gate_chart(pair.gates, f"gates of pair {at}")))
    if pair.tasks:
        drawn.append(("Gain by task", charts.task_chart(pair.tasks, f"tasks of pair {at}")))
    if pair.divergence.positions:
        drawn.append(("First token that differs", charts.position_chart(pair, f"positions of pair {at}")))
    if pair.probes:
        drawn.append(("Prompt log-probabilities", charts.probe_chart(pair, f"probes of pair {at}")))
    # drawn by us, and its texts were escaped when they became SVG
    return [{"title": title, "svg": Markup(svg)} for title, svg in drawn]


def _sheets(pair: Pair) -> list[Sheet]:
    strata = [
        (result.task, label, str(n), f"{before:.2f}", f"{after:.2f}")
        for result in pair.tasks
        for label, (n, before, after) in result.strata.items()
    ]
    return [
        Sheet("Tasks", text.TASK_COLUMNS, [text.task_cells(result) for result in pair.tasks]),
        Sheet("Averages", AVERAGE_COLUMNS, text.average_rows(pair)),
        Sheet("Parts of tasks", ("task", "part", "pairs", "first", "second"), strata),
        Sheet("Log-probabilities of prompt tokens", PROBE_COLUMNS, text.probe_rows(pair)),
        Sheet("Kernel calls", ("kernel", "first", "second"), text.kernel_rows(pair)),
        Sheet("Not answered by both", ("task", "first", "second", "samples"), text.failure_rows(pair)),
    ]
