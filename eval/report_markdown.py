"""A comparison as Markdown, ready for a comment on a pull request."""

from collections.abc import Sequence

from . import report_text as text
from .comparison import Comparison, GateResult, Pair

MOST_FLIPS = 10
AVERAGE_COLUMNS = ("average", "first", "second", "of")
PROBE_COLUMNS = ("context", "tokens", "first", "second", "mean |difference|", "largest", "repeated")


def markdown_report(comparison: Comparison) -> str:
    """The text: the verdict first, then what it rests on; details are folded."""
    parts = [f"## assay eval: {comparison.headline}", f"Suite `{comparison.suite}`."]
    parts += [part for pair in comparison.pairs for part in _pair(pair)]
    if comparison.effects:
        parts.append("### Factors, averaged over the others")
        for effect in comparison.effects:
            parts.append(f"`{effect.factor}`: {effect.levels[0]} → {effect.levels[1]}")
            parts.append(_gates(effect.gates))
    if comparison.notes:
        parts.append("\n".join(f"> {_cell(note)}" for note in comparison.notes))
    rows = [
        (f"`{label}`", model, counts, f"`{digest}`") for label, model, counts, _, digest in text.arm_rows(comparison)
    ]
    parts.append(_folded("Runs", _table(("run", "model", "samples", "settings"), rows)))
    return "\n\n".join(parts) + "\n"


def _pair(pair: Pair) -> list[str]:
    parts = [f"### {_cell(text.title(pair))}", _gates(pair.gates)]
    parts.append("\n".join(f"- {result.gate.name}: {text.explanation(result)}" for result in pair.gates))
    if pair.failures.table:
        rows = text.failure_rows(pair)
        parts += ["\n".join(text.failure_lines(pair)), _table(("task", "first", "second", "samples"), rows)]
    parts.append("\n".join([*text.task_lines(pair), *text.divergence_lines(pair)]))
    parts += ["\n".join(lines) for lines in (text.noise_lines(pair), text.speed_lines(pair)) if lines]
    if pair.tasks:
        tasks = _table(text.TASK_COLUMNS, [text.task_cells(result) for result in pair.tasks])
        parts.append(_folded("Tasks", f"{tasks}\n\n{_table(AVERAGE_COLUMNS, text.average_rows(pair))}"))
    strata = [
        (result.task, label, str(n), f"{before:.2f}", f"{after:.2f}")
        for result in pair.tasks
        for label, (n, before, after) in result.strata.items()
    ]
    if strata:
        parts.append(_folded("Parts of tasks", _table(("task", "part", "pairs", "first", "second"), strata)))
    if pair.probes:
        parts.append(_folded("Log-probabilities of prompt tokens", _table(PROBE_COLUMNS, text.probe_rows(pair))))
    if pair.kernels:
        parts.append(_folded("Kernel calls", _table(("kernel", "first", "second"), text.kernel_rows(pair))))
    if pair.flips:
        parts.append(_flips(pair))
    return parts


def _gates(results: Sequence[GateResult]) -> str:
    rows = []
    for result in results:
        *cells, verdict = text.gate_cells(result)
        rows.append((*cells, f"{text.MARKS[result.verdict]} {verdict}"))
    return _table(text.GATE_COLUMNS, rows)


def _flips(pair: Pair) -> str:
    rows = [
        (flip.task, flip.id, f"{flip.first:.2f}", f"{flip.second:.2f}", flip.first_text[:80], flip.second_text[:80])
        for flip in pair.flips[:MOST_FLIPS]
    ]
    table = _table(("task", "sample", "first", "second", "answer before", "answer after"), rows)
    more = len(pair.flips) - MOST_FLIPS
    return _folded(f"Changed scores: {len(pair.flips)}", table + (f"\n\n… and {more} more." if more > 0 else ""))


def _folded(name: str, body: str) -> str:
    return f"<details><summary>{name}</summary>\n\n{body}\n\n</details>"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: str) -> str:
    """Text that neither ends a cell nor is taken for a tag."""
    return " ".join(cell.replace("|", "\\|").replace("<", "&lt;").split())
