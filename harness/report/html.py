"""A run as one HTML page that needs nothing else: tables, pictures, failures with their places."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..families import EXACT_FAMILIES
from ..gates import FEWEST_KEYS_FOR_RMS, MEDIAN_RMS_LIMIT, ROW_RMS_LIMIT, ROWS_KEPT
from ..mutation.kill_table import KillRow, KillTable
from ..record import GateResult, Record, Verdict
from . import charts
from .compare_runs import CHANGED, FIXED, LOST, MISSING, NEW, REGRESSED, Comparison
from .row_grid import row_grid
from .run_folder import SET_ASIDE, Run, failed
from .run_summary import (
    KernelSummary,
    dtypes,
    failing_gates,
    kernel_summaries,
    ratio_text,
    said,
    set_aside,
    settings,
    verdict_rows,
    worst_records,
)

MOST_CASES, MOST_KERNELS, MOST_FAILURES, MOST_CHANGES = 6, 8, 100, 25
GATES_IN_FULL = 3
CHANGE_KINDS = {REGRESSED: "bad", LOST: "bad", MISSING: "aside", CHANGED: "aside", NEW: "", FIXED: "good"}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An SVG picture with its words."""

    svg: Markup
    label: str
    title: str
    caption: str


def html_report(run: Run, comparison: Comparison | None = None) -> str:
    """The page.

    Args:
        run: What to show; its failures and pictures are limited in number, its counts are not.
        comparison: Against an earlier run.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summaries = kernel_summaries(run)
    shown = sorted(summaries, key=lambda one: (-one.failed, -_size(one.nearest)))[:MOST_KERNELS]
    drawn = [one for one in summaries if one in shown]
    failures = [_failure(at, record) for at, record in enumerate(run.failures[:MOST_FAILURES])]
    worst = worst_records(run, MOST_CASES)
    return environment.get_template("report.html.j2").render(
        headline=_headline(run),
        lead=f"{', '.join(dict.fromkeys(one.op for one in summaries)) or 'nothing'} on {_device(run)}",
        tiles=_tiles(run, summaries),
        settings=settings(run),
        notes=run.notes,
        set_aside=set_aside(run),
        dtypes=dtypes(run),
        verdict_rows=verdict_rows(run),
        first_failure=_first_failures(failures),
        comparison=comparison,
        change_kinds=CHANGE_KINDS,
        most_changes=MOST_CHANGES,
        kernels=[kernel for kernel in (_kernel(run, one) for one in drawn) if kernel["figures"] or kernel["exact"]],
        kernels_left=len(summaries) - len(drawn),
        cases=[_case(at, record) for at, record in enumerate(worst)],
        cases_title="Worst cases" if run.failures else "Cases nearest to a limit",
        rows_kept=ROWS_KEPT,
        failures=failures,
        failures_left=len(run.failures) - len(failures),
        kill_tables=[_kill_table(table) for table in run.kill_tables],
        folder=str(run.folder),
        kind_of=_kind,
        mark_of=lambda verdict: {"good": "✓", "bad": "✗", "aside": "–"}[_kind(verdict)],  # noqa: RUF001
        ratio=ratio_text,
        number=_number,
    )


def _headline(run: Run) -> str:
    if not run.records:
        return "Nothing was judged"
    if run.failures:
        return f"{len(run.failures)} of {len(run.records)} judgements failed"
    passed = sum(record.verdict is Verdict.PASS for record in run.records)
    return f"{passed} of {len(run.records)} judgements passed, none failed" if passed else "Nothing was judged"


def _device(run: Run) -> str:
    return str(run.header.get("device", "an unnamed device"))


def _tiles(run: Run, summaries: list[KernelSummary]) -> list[tuple[str, str, str]]:
    bad, aside = sum(one.failed for one in summaries), sum(one.set_aside for one in summaries)
    seconds = sum(one.seconds for one in summaries)
    return [
        (str(len(summaries)), "kernels", ""),
        (str(len({record.case["id"] for record in run.records})), "cases", ""),
        (str(sum(one.passed for one in summaries)), "passed", "good"),
        (str(bad), "failed", "bad" if bad else ""),
        (str(aside), "not judged", "aside" if aside else ""),
        (f"{sum(one.rows_judged for one in summaries):,}", "rows judged", ""),
        (f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min", "judging", ""),
    ]


def _kind(verdict: Verdict) -> str:
    return "good" if verdict is Verdict.PASS else "aside" if verdict in SET_ASIDE else "bad"


def _kernel(run: Run, summary: KernelSummary) -> Row:
    """The pictures of one kernel."""
    mine = [record for record in run.of_kernel(summary.kernel) if record.gates]
    by_gate: dict[str, list[float]] = {}
    for gate in (gate for record in mine for gate in record.gates):
        by_gate.setdefault(gate.gate, []).append(gate.ratio)
    exact = {name: ratios for name, ratios in by_gate.items() if set(ratios) <= {0.0, math.inf}}
    measured = {name: by_gate[name] for name in sorted(by_gate) if name not in exact}
    figures = []
    if measured:
        figures.append(_margins(summary.kernel, measured))
    figures += _row_pictures(summary.kernel, mine)
    counts = [(name, ratios.count(0.0), ratios.count(math.inf)) for name, ratios in sorted(exact.items())]
    return {"name": summary.kernel, "figures": figures, "exact": counts}


def _margins(kernel: str, measured: Mapping[str, list[float]]) -> Picture:
    label, most = f"Margins of {kernel}", max(len(ratios) for ratios in measured.values())
    caption = (
        f"Each dot is the worst error of a case under a gate, the bar the median of up to {most} cases. "
        "What lies beyond the axis is drawn at its end."
    )
    return _picture(charts.margin_chart(measured, label), label, "Margin of each gate", caption)


def _row_pictures(kernel: str, records: list[Record]) -> Iterable[Picture]:
    """The distribution of row errors against the bound, and the errors against position."""
    # rows of an exact family are equal in every head and request: their statistics mean nothing
    records = [record for record in records if record.case["family"] not in EXACT_FAMILIES]
    spread, judged = _by_dtype(records, lambda r: r.rows.rms), sum(r.rows_judged for r in records)
    if spread:
        label = f"Distribution of row errors of {kernel}"
        drawing = charts.rms_histogram(spread, row_limit=ROW_RMS_LIMIT, median_limit=MEDIAN_RMS_LIMIT, label=label)
        caption = (
            f"{sum(map(len, spread.values())):,} rows kept of {judged:,} judged, exact families aside. The limits are "
            "the lowest ones: a row whose errors have few directions is allowed more, and one with fewer than "
            f"{FEWEST_KEYS_FOR_RMS} effective keys is left to G4."
        )
        yield _picture(drawing, label, "Distribution of row errors against the bound", caption)
    positions, errors = _by_dtype(records, lambda r: r.rows.position), _by_dtype(records, lambda r: r.rows.envelope)
    if errors:
        label = f"Error against position of {kernel}"
        drawing = charts.position_chart({dtype: (positions[dtype], errors[dtype]) for dtype in errors}, label)
        caption = "Largest element error of a row ÷ its hard envelope (G4), all cases but those of exact families."
        yield _picture(drawing, label, "Error against position", caption)


def _by_dtype(records: Iterable[Record], column: Callable[[Record], list[Any]]) -> dict[str, list[Any]]:
    """One column of the rows of all records, by dtype; without the dtypes that have none."""
    found: dict[str, list[Any]] = {}
    for record in records:
        if column(record):
            found.setdefault(str(record.case["dtype"]), []).extend(column(record))
    return found


def _case(at: int, record: Record) -> Picture:
    """One case with its place in the batch."""
    kept, worst = len(record.rows.token), record.worst
    gate = "" if worst is None else f"{worst.gate} at {ratio_text(worst.ratio)} its limit."
    label = f"Rows of case {at + 1}, {record.kernel} on {record.case['id']}"
    title = f"{record.verdict.value}: {record.kernel} on {record.case['id']}"
    drawing = charts.case_chart(row_grid(record, row_limit=ROW_RMS_LIMIT), label)
    return _picture(drawing, label, title, f"{gate} {kept:,} rows kept of {record.rows_judged:,} judged.".strip())


def _picture(svg: str, label: str, title: str, caption: str) -> Picture:
    # drawn by us, and its texts were escaped when they became SVG
    return Picture(svg=Markup(svg), label=label, title=title, caption=caption)


def _failure(at: int, record: Record) -> Row:
    gates, sizes = failing_gates(record), json.dumps(record.case["sizes"])
    parts: Row = {"gates": gates[:GATES_IN_FULL], "others": gates[GATES_IN_FULL:], "sizes": sizes, "text": said(record)}
    return {"anchor": f"failure-{at + 1}", "record": record, **parts}


def _first_failures(failures: list[Row]) -> dict[tuple[str, str, str], str]:
    """Anchor of the first failure of each kernel, family and dtype."""
    anchors: dict[tuple[str, str, str], str] = {}
    for failure in failures:
        case = failure["record"].case
        anchors.setdefault((failure["record"].kernel, case["family"], case["dtype"]), failure["anchor"])
    return anchors


def _kill_table(table: KillTable) -> Row:
    """Lines and cells, what got away first."""
    rows = sorted(table.rows, key=lambda row: (row.right_reason, row.killed, row.fault))
    return {
        "op": table.op,
        "families": table.families,
        "rows": [_kill_row(row, table.families) for row in rows],
        "killed": sum(row.right_reason for row in rows),
        "variants": sorted(table.variants, key=lambda variant: variant.accepted),
        "accepted": sum(variant.accepted for variant in table.variants),
        "left_out": table.left_out,
    }


def _kill_row(row: KillRow, families: list[str]) -> Row:
    cells = []
    for family in families:
        verdicts = row.families.get(family, [])
        killed = sum(verdict in row.expects for verdict in verdicts)
        by = " ".join(row.gates.get(family, []))
        other = sorted({verdict for verdict in verdicts if verdict not in row.expects and failed(Verdict(verdict))})
        text = " ".join(filter(None, (f"{killed}/{len(verdicts)}", by, *other))) if verdicts else ""
        cells.append({"text": text, "kind": "good" if killed else "aside" if other else "muted"})
    status = row.status or ("killed" if row.right_reason else "wrong reason" if row.killed else "survived")
    kind = "good" if row.right_reason else "aside" if status == "not judged" else "bad"
    return {"fault": row.fault, "status": status, "kind": kind, "expects": row.expects, "cells": cells}


def _size(gate: GateResult | None) -> float:
    return 0.0 if gate is None else math.inf if math.isnan(gate.ratio) else gate.ratio


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"
