"""What a run looks like in a terminal: the failures with their place, then one line per kernel."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..case import Case
from ..record import GateResult, Record, Verdict

STYLES = {
    Verdict.PASS: "green",
    Verdict.UNSUPPORTED: "yellow",
    Verdict.INVALID_CASE: "yellow",
    Verdict.WAIVED: "yellow",
}


def failure_lines(record: Record, command: str) -> RenderableType:
    """One failed record: verdict, case, deciding gate, worst element with its slot, the command to run it again."""
    worst = record.worst
    lines = [Text(f"{record.verdict.value}  {record.kernel}  {record.case['id']}", style="bold red")]
    if record.text:
        lines.append(Text(f"  {record.text}"))
    if worst is not None and not worst.passed:
        lines.append(Text(f"  {worst.gate} at {_ratio(worst)} its limit" + (f": {worst.where}" if worst.where else "")))
    lines.append(Text(f"  {command}", style="dim"))
    return Group(*lines)


def summary_table(records: list[Record], title: str) -> Table:
    """One line per kernel: how many cases of each verdict, and the gate that came nearest to its limit."""
    rows = sum(record.rows_judged for record in records)
    table = Table(title=f"{title}: {rows} rows, {spent_text(records)}", title_justify="left")
    for column in ("kernel", "verdict", "nearest gate"):
        table.add_column(column, no_wrap=column == "kernel")
    for column in ("pass", "fail", "skip", "of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in dict.fromkeys(record.kernel for record in records):
        mine = [record for record in records if record.kernel == kernel]
        counts = Counter(record.verdict for record in mine)
        skipped = sum(counts[verdict] for verdict in STYLES if verdict is not Verdict.PASS)
        failed = len(mine) - counts[Verdict.PASS] - skipped
        gate = nearest_gate(mine)
        name, ratio = ("", "") if gate is None else (gate.gate, _ratio(gate))
        passed = str(counts[Verdict.PASS])
        table.add_row(Text(kernel), _verdict_text(mine), name, passed, str(failed), str(skipped), ratio)
    return table


def spent_text(records: Iterable[Record]) -> str:
    """Seconds of all judgements, and which part of them each phase took; the judge's own is what the phases leave."""
    records = list(records)
    seconds = sum(record.seconds for record in records)
    parts = {name: sum(record.spent.get(name, 0.0) for record in records) for name in ("kernel", "oracle", "inputs")}
    if not seconds or not any(parts.values()):
        return f"{seconds:.0f} s of work"
    shares = {**parts, "judge": max(0.0, seconds - sum(parts.values()))}
    return f"{seconds:.0f} s of work ({', '.join(f'{name} {part / seconds:.0%}' for name, part in shares.items())})"


def unsupported_table(records: Iterable[Record]) -> Table | None:
    """Why cases were not judged, counted; None if all were."""
    aside = [record for record in records if record.verdict in STYLES and record.verdict is not Verdict.PASS]
    reasons = Counter((record.kernel, record.text) for record in aside)
    if not reasons:
        return None
    table = Table(title="not judged, or waived", title_justify="left")
    for column in ("kernel", "cases", "reason"):
        table.add_column(column)
    for (kernel, reason), count in reasons.most_common():
        table.add_row(Text(kernel), str(count), Text(reason))
    return table


def case_table(cases: list[Case]) -> Table:
    """The plan of a run."""
    table = Table(title=f"{len(cases)} cases", title_justify="left")
    for column in ("id", "sizes", "where"):
        table.add_column(column, overflow="fold")
    for case in cases:
        sizes = ", ".join(f"{name}={_short(value)}" for name, value in case.sizes.items())
        table.add_row(case.id, sizes, "device" if case.needs_device else "any")
    return table


def print_run(console: Console, records: list[Record], title: str) -> None:
    """The whole report of a run."""
    reasons = unsupported_table(records)
    if reasons is not None:
        console.print(reasons)
    console.print(summary_table(records, title))


def nearest_gate(records: Iterable[Record]) -> GateResult | None:
    """The numeric gate with the largest ratio."""
    gates = [gate for record in records for gate in record.gates]
    return max(gates, key=lambda gate: gate.ratio, default=None)


def _verdict_text(records: list[Record]) -> Text:
    failed = [record.verdict for record in records if record.verdict not in STYLES]
    if failed:
        return Text(Counter(failed).most_common(1)[0][0].value, style="red")
    judged = any(record.verdict is Verdict.PASS for record in records)
    verdict = Verdict.PASS if judged else Verdict.UNSUPPORTED
    return Text(verdict.value, style=STYLES[verdict])


def _ratio(gate: GateResult) -> str:
    return "inf" if gate.ratio == float("inf") else f"{gate.ratio:.3g} x"


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"[{len(value)} values, largest {max(value)}]"
    return str(value)
