"""``assay report``: a run in the terminal and in files, alone or against an earlier one."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan import UsageError
from ..record import ExitCode
from .compare_runs import Comparison, compare_runs
from .junit import junit_report
from .markdown import markdown_report
from .merge_runs import merge_runs, write_merged
from .run_folder import Run, read_run
from .run_summary import ratio_text
from .terminal import print_run

FORMATS = {"html": "report.html", "markdown": "report.md", "junit": "junit.xml"}
MOST_LINES = 20


def run_report(
    run: Path,
    against: Path | None,
    out: Path | None,
    formats: tuple[str, ...],
    console: Console,
    *,
    others: Sequence[Path] = (),
) -> int:
    """Show a run and write its reports; return the exit code.

    Args:
        run: Folder that ``assay check --out`` wrote.
        against: Such a folder of an earlier run of the same plan.
        out: Folder for the reports; None for the run's own.
        formats: Some of ``FORMATS``; all if empty.
        console: For the summary.
        others: Further runs of the same plan, which are merged with the first into one in ``out``.

    Returns:
        0 without an earlier run; else that of the comparison, see ``compare_runs.Comparison``.

    Raises:
        UsageError: If a folder holds no run, a format is unknown, or the libraries of one are not installed.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise UsageError(f"--format must be one of {', '.join(FORMATS)}, got {unknown[0]!r}")
    chosen = tuple(dict.fromkeys(formats)) or tuple(FORMATS)
    try:
        here = _merged([run, *others], out) if others else read_run(run, rows="html" in chosen)
        comparison = None if against is None else compare_runs(here, read_run(against, rows=False))
    except ValueError as error:
        raise UsageError(str(error)) from error
    _print(console, here, comparison)
    texts = {FORMATS[name]: _text(name, here, comparison) for name in chosen}
    folder = run if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        console.print(f"wrote {folder / name}", highlight=False)
    return ExitCode.PASSED if comparison is None else comparison.exit_code


def _merged(paths: Sequence[Path], out: Path | None) -> Run:
    """Several runs as one, left in ``out`` as a run of its own."""
    if out is None or out.resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"--out must be a folder of its own for the merged run, got {out or 'none'}")
    merged = merge_runs([read_run(path) for path in paths], out)
    write_merged(merged)
    return merged


def _text(form: str, run: Run, comparison: Comparison | None) -> str:
    if form == "junit":
        return junit_report(run)
    if form == "markdown":
        return markdown_report(run, comparison)
    try:
        from .html import html_report
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("jinja2", "markupsafe", "matplotlib"):
            raise
        text = f"the HTML report must have {library}, got none: pip install 'kernel-assay[report]'"
        raise UsageError(f"{text}, or choose --format markdown or junit") from error
    return html_report(run, comparison)


def _print(console: Console, run: Run, comparison: Comparison | None) -> None:
    print_run(console, list(run.records), title=f"assay report, {run.folder}")
    for note in run.notes:
        console.print(Text(note, style="yellow"))
    if comparison is None:
        return
    style = "green" if comparison.exit_code == ExitCode.PASSED else "red"
    console.print(Text(f"against {comparison.against}: {comparison.summary}", style=style))
    for name, before, now in comparison.settings:
        console.print(Text(f"  {name}: {before} -> {now}", style="dim"))
    if comparison.changes:
        console.print(_changes(comparison))
    if comparison.margins:
        console.print(_margins(comparison))


def _changes(comparison: Comparison) -> Table:
    left = len(comparison.changes) - MOST_LINES
    table = _table("verdicts" + (f", {left} more not shown" if left > 0 else ""), "", "kernel", "case", "before", "now")
    for change in comparison.changes[:MOST_LINES]:
        table.add_row(change.kind, Text(change.kernel), change.case_id, change.before, change.after)
    return table


def _margins(comparison: Comparison) -> Table:
    left = len(comparison.margins) - MOST_LINES
    title = "error over limit, worst of each gate" + (f", {left} more not shown" if left > 0 else "")
    table = _table(title, "kernel", "gate", "before", "now", "moved most")
    for margin in comparison.margins[:MOST_LINES]:
        ratios = ratio_text(margin.before), ratio_text(margin.after)
        table.add_row(Text(margin.kernel), margin.gate, *ratios, margin.case_id)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
