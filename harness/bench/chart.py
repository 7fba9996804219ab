"""The roofline of a run: what each kernel reached over the arithmetic that each byte brings."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..report.chart_style import MARKERS, MUTED, SERIES, style, svg_text
from .results import BenchRun, ShapeResult


def roofline(run: BenchRun, label: str) -> str:
    """An SVG picture; empty where nothing has both a time and counted work.

    Args:
        run: Whose ceilings are the roof.
        label: What the picture shows, for readers who do not see it.
    """
    points = _points(run.shapes)
    if not points:
        return ""
    gemm, copy = run.ceilings["gemm_tflops"], run.ceilings["copy_tb_s"]
    places = [x for marks in points.values() for x, _ in marks]
    rates = [y for marks in points.values() for _, y in marks]
    with style():
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        reach = np.geomspace(min([*places, gemm / copy]) / 3, max([*places, gemm / copy]) * 3, 200)
        axes.plot(
            reach, np.minimum(gemm, copy * reach), color=MUTED, lw=1.2, label=f"{gemm:.0f} TFLOP/s, {copy:.2f} TB/s"
        )
        for at, (kernel, marks) in enumerate(points.items()):
            colour, marker = SERIES[at % len(SERIES)], MARKERS[at // len(SERIES) % len(MARKERS)]
            xs, ys = zip(*marks, strict=True)
            axes.plot(xs, ys, marker, color=colour, ms=5, mew=0, alpha=0.8, label=kernel)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(min(rates) / 3, gemm * 1.6)
        axes.set_xlabel("FLOP a compulsory byte (log scale)")
        axes.set_ylabel("TFLOP/s (log scale)")
        axes.grid()
        axes.set_axisbelow(True)
        axes.legend(loc="lower right")
        return svg_text(figure, label)


def _points(shapes: Sequence[ShapeResult]) -> dict[str, list[tuple[float, float]]]:
    """By kernel, intensity and rate of each shape."""
    points: dict[str, list[tuple[float, float]]] = {}
    for shape in shapes:
        for kernel in shape.kernels:
            if kernel.tflops is not None and shape.flop is not None and shape.bytes:
                points.setdefault(kernel.kernel, []).append((shape.flop / shape.bytes, kernel.tflops))
    return points
