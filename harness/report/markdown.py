"""A run as Markdown, short enough for a comment on a pull request."""

from collections.abc import Sequence

from ..record import Record
from .compare_runs import Comparison
from .run_folder import Run
from .run_summary import failing_gates, kernel_summaries, ratio_text, said, set_aside, settings

MOST_FAILURES = 20
# a comment may hold 65536 characters; an error of a kernel may be longer than that
LONGEST_TEXT = 600


def markdown_report(run: Run, comparison: Comparison | None = None) -> str:
    """The text: one line per kernel, what was set aside, the failures with their places, the settings."""
    parts = [_headline(run), *_notes(run), _kernels(run)]
    if comparison is not None:
        parts.append(comparison_markdown(comparison))
    parts += [part for part in (_set_aside(run), _failures(run), _settings(run)) if part]
    return "\n\n".join(parts) + "\n"


def comparison_markdown(comparison: Comparison) -> str:
    """What changed against the other run."""
    parts = [f"### Against `{comparison.against}`", comparison.summary]
    if comparison.changes:
        rows = [
            (change.kernel, f"`{change.case_id}`", change.before, change.after, change.kind)
            for change in comparison.changes[:MOST_FAILURES]
        ]
        parts.append(_table(("kernel", "case", "before", "now", ""), rows))
        parts += _more(len(comparison.changes), "changes of verdict")
    if comparison.margins:
        rows = [
            (margin.kernel, margin.gate, ratio_text(margin.before), ratio_text(margin.after), margin.case_id)
            for margin in comparison.margins
        ]
        table = _table(("kernel", "gate", "worst before", "worst now", "case that moved most"), rows)
        parts.append(_folded("Margins", table))
    return "\n\n".join(parts)


def _headline(run: Run) -> str:
    failures = len(run.failures)
    said = f"{failures} of {len(run.records)} judgements failed" if failures else f"{len(run.records)} judgements"
    return f"## assay: {said if run.records else 'nothing was judged'}"


def _notes(run: Run) -> list[str]:
    return ["\n".join(f"> {note}" for note in run.notes)] if run.notes else []


def _kernels(run: Run) -> str:
    rows = []
    for kernel in kernel_summaries(run):
        gate, ratio = (kernel.nearest.gate, ratio_text(kernel.nearest.ratio)) if kernel.nearest else ("", "")
        mark = {"failed": "❌ failed", "passed": "✅ passed", "not judged": "⚪ not judged"}[kernel.word]
        counts = str(kernel.passed), str(kernel.failed), str(kernel.set_aside)
        rows.append((f"`{kernel.kernel}`", mark, *counts, gate, ratio))
    return _table(("kernel", "verdict", "pass", "fail", "set aside", "nearest gate", "of limit"), rows)


def _set_aside(run: Run) -> str:
    reasons = set_aside(run)
    if not reasons:
        return ""
    rows = [(f"`{kernel}`", verdict.value, str(count), _short(reason)) for kernel, verdict, reason, count in reasons]
    table = _table(("kernel", "verdict", "cases", "reason"), rows[:MOST_FAILURES])
    more = _more(len(rows), "reasons")
    return _folded(f"Not judged: {sum(count for *_, count in reasons)} cases", "\n\n".join([table, *more]))


def _failures(run: Run) -> str:
    if not run.failures:
        return ""
    blocks = [_failure(record) for record in run.failures[:MOST_FAILURES]]
    return _folded("Failures", "\n\n".join([*blocks, *_more(len(run.failures), "failures")]))


def _failure(record: Record) -> str:
    lines = [f"**{record.verdict.value}** `{record.kernel}` on `{record.case['id']}`"]
    if said(record):
        lines.append(f"- {_cell(_short(said(record)))}")
    for gate in failing_gates(record)[:3]:
        place = f": {gate.where}" if gate.where else ""
        lines.append(f"- {gate.gate} at {ratio_text(gate.ratio)} its limit{place}")
    if record.command:
        lines += ["", "```bash", record.command, "```"]
    return "\n".join(lines)


def _settings(run: Run) -> str:
    return _folded("Settings", _table(("setting", "value"), settings(run)))


def _more(count: int, what: str) -> list[str]:
    return [f"… and {count - MOST_FAILURES} more {what}."] if count > MOST_FAILURES else []


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for a tag."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
