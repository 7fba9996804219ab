"""A benchmark in the terminal: ceilings, one block of lines per shape, what was not timed and why, the gate."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..record import Verdict
from .gate import Line
from .results import BenchRun, KernelResult, ShapeResult

WIDTH = 140
_STYLES = {"regressed": "red", "lost": "red", "faster": "green", "absent": "yellow", "new": "yellow", "held": ""}


def print_run(console: Console, run: BenchRun) -> None:
    """The whole run."""
    console.print(Text(ceilings_text(run)), soft_wrap=True)
    console.print(Text(peers_text(run)), soft_wrap=True)
    # a file or a pipe has no width of its own
    console.print(results_table(run.shapes), width=None if console.is_terminal else WIDTH)
    for line in remarks(run):
        console.print(Text(line, style="dim"), soft_wrap=True)
    for verdict, text in untimed(run.shapes):
        style = "yellow" if verdict is Verdict.UNSUPPORTED else "red"
        console.print(Text(f"{verdict.value}  {text}", style=style), soft_wrap=True)


def ceilings_text(run: BenchRun) -> str:
    """The ceilings and the clocks of a run in two sentences."""
    found = run.ceilings
    gathers = ", ".join(f"{rate:.1f} from {size} MiB" for size, rate in found["gather_tb_s"].items())
    rates = f"bf16 GEMM {found['gemm_tflops']:.0f} TFLOP/s, copy {found['copy_tb_s']:.2f} TB/s"
    clocks = " -> ".join(str(clocks) for clocks in run.clocks)
    return f"{run.device['name']}: {rates}, row gather in TB/s {gathers or 'not measured'}; clocks {clocks}"


def peers_text(run: BenchRun) -> str:
    """Which peers there are, with versions, and which are absent and why."""
    met = [peer for peers in run.peers.values() for peer in peers]
    there = {peer.name: f"{peer.name} ({peer.package} {peer.version})" for peer in met if peer.kernel is not None}
    absent = {peer.name: f"{peer.name} ({peer.absent})" for peer in met if peer.name not in there}
    return f"peers here: {', '.join(there.values()) or 'none'}; absent: {', '.join(absent.values()) or 'none'}"


def results_table(shapes: Sequence[ShapeResult]) -> Table:
    """One block per shape; the ratio is that of our first kernel to the kernel of the line."""
    table = Table(title="assay bench, device time", title_justify="left")
    table.add_column("shape, kernel", overflow="fold", min_width=24)
    for column in ("ms", "p10 - p90", "TFLOP/s", "TB/s", "of bound", "ours / it", "peak MiB", "compiled"):
        table.add_column(column, justify="right", no_wrap=True)
    for shape in shapes:
        table.add_section()
        table.add_row(Text(shape.shape, style="bold"))
        for kernel in shape.kernels:
            table.add_row(*_cells(kernel, shape))
    return table


def shape_text(shape: ShapeResult) -> str:
    """What the shape is, and what bounds it."""
    if shape.flop is None or shape.bytes is None or shape.bound_ms is None:
        return shape.shape
    work = f"{shape.flop / 1e9:.4g} GFLOP, {shape.bytes / 1e6:.4g} MB"
    return f"{shape.shape}: {work}, bound {shape.bound_ms:.3f} ms by {shape.bound}"


def _cells(kernel: KernelResult, shape: ShapeResult) -> list[str | Text]:
    # as text: the brackets of a name are no markup
    name = Text(f"  {kernel.kernel}" + (" *" if kernel.captured is False else ""))
    if kernel.verdict is not Verdict.PASS or kernel.ms is None:
        return [name, Text(kernel.verdict.value, style="yellow" if kernel.verdict is Verdict.UNSUPPORTED else "red")]
    ms, ratio = kernel.ms, first_ratio(shape, kernel.kernel)
    return [
        name,
        f"{ms.median:.3f}",
        f"{ms.p10:.3f} - {ms.p90:.3f}",
        "" if kernel.tflops is None else f"{kernel.tflops:.0f}",
        "" if kernel.gb_s is None else f"{kernel.gb_s / 1e3:.2f}",
        "" if kernel.share is None else f"{kernel.share:.1%}",
        ratio,
        "" if kernel.peak_bytes is None else f"{kernel.peak_bytes / 2**20:.0f}",
        "" if kernel.compilations is None else str(kernel.compilations),
    ]


def first_ratio(shape: ShapeResult, peer: str) -> str:
    """Time of our first kernel over that of ``peer``, with its interval; empty where there is none."""
    return next((str(ratio.interval) for ratio in shape.ratios if ratio.other == peer), "")


def remarks(run: BenchRun) -> list[str]:
    """What a reader of the table must know."""
    lines = []
    for shape in run.shapes:
        line = shape_text(shape)
        if shape.noise is not None:
            line += f"; {shape.rounds - shape.dropped} of {shape.rounds} rounds kept, {shape.ring} sets of buffers, "
            line += f"a kernel bound twice differs by a factor of {shape.noise}"
        lines.append(f"{line}; {shape.seconds:.0f} s")
        if shape.compiled_while_timed:
            count = shape.compiled_while_timed
            lines.append(f"{shape.shape}: {count} Triton kernels were compiled in the timed rounds")
    if any(kernel.captured is False for shape in run.shapes for kernel in shape.kernels):
        lines.append("*: not a replayed graph; the times hold the gaps between launches")
    if run.not_started:
        lines.append(f"no time left for {', '.join(run.not_started)}")
    return lines


def untimed(shapes: Sequence[ShapeResult]) -> list[tuple[Verdict, str]]:
    """What has no times, each reason once with the shapes that it holds for."""
    found: dict[tuple[Verdict, str, str], list[str]] = {}
    for shape in shapes:
        for kernel in shape.kernels:
            if kernel.verdict is not Verdict.PASS:
                found.setdefault((kernel.verdict, kernel.kernel, kernel.text), []).append(shape.shape)
    return [(verdict, f"{kernel} on {', '.join(on)}: {text}") for (verdict, kernel, text), on in found.items()]


def gate_table(lines: Sequence[Line]) -> Table:
    """Every ratio against the committed one, what got worse first."""
    table = Table(title="against the committed ratios", title_justify="left")
    for column in ("", "shape", "kernel", "over", "committed", "now", "limit"):
        table.add_column(column, overflow="fold")
    order = list(_STYLES)
    for line in sorted(lines, key=lambda line: order.index(line.status)):
        committed = "" if line.committed is None else f"{line.committed:.3f}"
        now = "" if line.now is None else str(line.now)
        status = Text(line.status, style=_STYLES[line.status])
        table.add_row(status, line.shape, Text(line.kernel), Text(line.other), committed, now, f"{line.limit:.1%}")
    return table
