"""The pictures of a comparison, drawn as the judge's reports are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ..harness.report.chart_style import BAD, INK, MUTED, SERIES, style, svg_text
from .comparison import GateResult, Pair, TaskResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# a gate that misses by far is drawn at the edge
WIDEST = 4.0


def gate_chart(results: Sequence[GateResult], label: str) -> str:
    """Each gate's gain and interval in units of its margin: left of -1 is more loss than was accepted."""
    shown = [result for result in results if result.estimate is not None]
    with style():
        figure = Figure(figsize=(5.6, 0.9 + 0.32 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for at, result in enumerate(shown):
            estimate, margin = result.estimate, result.gate.loss
            if estimate is not None:
                low, middle, high = (value / margin for value in (estimate.low, estimate.delta, estimate.high))
                _interval(axes, at, low, middle, high, edge=WIDEST)
        axes.axvspan(-1, 1, color=SERIES[3], alpha=0.12, lw=0)
        for place, colour in ((-1, BAD), (0, MUTED), (1, MUTED)):
            axes.axvline(place, color=colour, lw=1.0, ls="-" if place else ":")
        axes.set_xlim(-WIDEST, WIDEST)
        _names(axes, [result.gate.name for result in shown])
        axes.set_xlabel("gain ÷ margin, 95 % interval; shaded: accepted")
        return svg_text(figure, label)


def task_chart(results: Sequence[TaskResult], label: str) -> str:
    """Each task's gain in points with its interval."""
    with style():
        figure = Figure(figsize=(5.6, 0.9 + 0.27 * len(results)), layout="constrained")
        axes = figure.subplots()
        for at, result in enumerate(results):
            estimate = result.estimate
            _interval(axes, at, 100 * estimate.low, 100 * estimate.delta, 100 * estimate.high, edge=100.0)
        axes.axvline(0, color=MUTED, lw=1.0, ls=":")
        _names(axes, [result.task for result in results])
        axes.set_xlabel("gain in points of 100, with 95 % interval")
        return svg_text(figure, label)


def position_chart(pair: Pair, label: str) -> str:
    """How many answers first differ where."""
    positions = pair.divergence.positions
    with style():
        figure = Figure(figsize=(5.6, 2.2), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(positions)), list(positions.values()), color=SERIES[0], width=0.7)
        axes.set_xticks(range(len(positions)), list(positions))
        axes.set_xlim(-0.75, max(len(positions), 4) - 0.25)
        axes.set_xlabel("first generated token that differs")
        axes.set_ylabel("answers")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        return svg_text(figure, label)


def probe_chart(pair: Pair, label: str) -> str:
    """Differences of prompt log-probabilities by context length, with those of the repetition."""
    names = [one.context for one in pair.probes]
    with style():
        figure = Figure(figsize=(5.6, 2.2), layout="constrained")
        axes = figure.subplots()
        lines = [(pair.second, pair.probes, "o")]
        lines += [(f"{pair.noise.label} (repeated)", pair.noise.probes, "s")] if pair.noise else []
        for at, (name, probes, marker) in enumerate(lines):
            # what is equal has no place on a logarithmic axis: it is drawn at the bottom
            known = {one.context: max(one.mean, 1e-9) for one in probes}
            places = [place for place, context in enumerate(names) if context in known]
            values = [known[names[place]] for place in places]
            axes.plot(places, values, color=SERIES[at], marker=marker, ms=4, lw=1.2, label=name)
        axes.set_yscale("log")
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("tokens before the position")
        axes.set_ylabel("mean |difference|, nats")
        axes.grid(axis="y")
        axes.legend(loc="best")
        return svg_text(figure, label)


def _interval(axes: "Axes", at: int, low: float, middle: float, high: float, *, edge: float) -> None:
    ends = [max(-edge, min(edge, value)) for value in (low, middle, high)]
    axes.plot([ends[0], ends[2]], [at, at], color=INK, lw=1.4, solid_capstyle="butt")
    axes.plot([ends[1]], [at], marker="o", ms=5, color=BAD if high < 0 else SERIES[0], mew=0)


def _names(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
