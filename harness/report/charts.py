"""The pictures of a report, as SVG text that stands inside a page and takes its colours from it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ._charts_case import case_chart
from .chart_style import BAD, FLOOR, INK, MARKERS, MUTED, SERIES, Floats, drawable, limit_line, style, svg_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["case_chart", "margin_chart", "position_chart", "rms_histogram"]

DOTS_PER_DECADE = 25


def margin_chart(gates: Mapping[str, Sequence[float]], label: str) -> str:
    """One strip per gate: a dot for the ratio of each case to its limit, a bar for the median, the worst in figures.

    Args:
        gates: Ratios by gate, not all of them 0.
        label: What the picture shows, for readers who do not see it.
    """
    names = list(gates)
    with style():
        figure = Figure(figsize=(5.6, 0.75 + 0.27 * len(names)), layout="constrained")
        axes = figure.subplots()
        everything = np.concatenate([drawable(gates[name]) for name in names])
        low = max(FLOOR, 10 ** math.floor(math.log10(everything.min())))
        high = max(10.0, 10 ** math.ceil(math.log10(everything.max())))
        for at, name in enumerate(names):
            _strip(axes, at, np.asarray(gates[name], dtype=float))
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low / 1.3, high * 1.3)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        limit_line(axes, vertical=True)
        axes.set_xlabel("error of a case ÷ its limit (log scale); right of the line fails")
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(names)), [_short(_largest(gates[name])) for name in names])
        right.tick_params(axis="y", length=0)
        right.spines["right"].set_visible(False)
        axes.text(1.02, 1.01, "worst", transform=axes.transAxes, fontsize=8, color=MUTED)
        return svg_text(figure, label)


def _strip(axes: "Axes", at: int, ratios: Floats) -> None:
    drawn = drawable(ratios)
    for member, colour, marker in ((drawn <= 1, SERIES[0], "o"), (drawn > 1, BAD, "D")):
        # dots that would cover each other say nothing twice
        _, apart = np.unique(np.round(np.log10(drawn[member]) * DOTS_PER_DECADE), return_index=True)
        dots = drawn[member][apart]
        axes.plot(dots, np.full(len(dots), at), marker, color=colour, alpha=0.6, ms=4.5, mew=0)
    median = float(np.median(drawn))
    axes.plot([median, median], [at - 0.3, at + 0.3], color=INK, lw=1.4)


def rms_histogram(errors: Mapping[str, Sequence[float]], *, row_limit: float, median_limit: float, label: str) -> str:
    """How the root mean square errors of rows are spread, against what the contract predicts and what it allows.

    Args:
        errors: By dtype, in units of the predicted error.
        row_limit: The lowest limit on one row.
        median_limit: The lowest limit on the median of a case.
        label: As in ``margin_chart``.
    """
    with style():
        figure = Figure(figsize=(5.6, 2.5), layout="constrained")
        axes = figure.subplots()
        edges = np.logspace(-2, 2, 65)
        for at, (dtype, values) in enumerate(errors.items()):
            shown = np.clip(drawable(values), edges[0] * 1.001, edges[-1] * 0.999)
            counts, _ = np.histogram(shown, bins=edges)
            colour = SERIES[at % len(SERIES)]
            share = 100 * counts / counts.sum()
            axes.stairs(share, edges, color=colour, lw=1.4, ls=("-", "--", "-.", ":")[at % 4], label=dtype)
            axes.stairs(share, edges, color=colour, alpha=0.12, fill=True)
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=0)
        _log_ticks(axes, ("0.01", "0.1", "1", "10", "≥ 100"))
        axes.set_xlabel("rms error of a row ÷ rms that the contract predicts (log scale)")
        axes.set_ylabel("rows, %")
        for limit, name, dash in ((row_limit, "row", "-"), (median_limit, "median", ":")):
            axes.axvline(limit, color=BAD, lw=1.1, ls=dash, label=f"limit of a {name}, {limit:g}")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.legend(loc="upper left")
        return svg_text(figure, label)


def _log_ticks(axes: "Axes", texts: Sequence[str]) -> None:
    places = [float(text.removeprefix("≥ ")) for text in texts]
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda place, _: texts[places.index(place)] if place in places else "")
    )
    axes.xaxis.set_minor_locator(NullLocator())


def position_chart(errors: Mapping[str, tuple[Sequence[int], Sequence[float]]], label: str) -> str:
    """Error against position, all cases together: the median and the largest of each stretch of positions.

    Args:
        errors: By dtype, positions and ratios of error to limit.
        label: As in ``margin_chart``.
    """
    with style():
        figure = Figure(figsize=(5.6, 2.5), layout="constrained")
        axes = figure.subplots()
        farthest = max(max(positions) for positions, _ in errors.values())
        edges = np.unique(np.round(np.geomspace(1, farthest + 2, 25)).astype(int))
        for at, (dtype, (positions, ratios)) in enumerate(errors.items()):
            places = np.maximum(np.asarray(positions) + 1, 1)
            drawn, bins = drawable(ratios), np.digitize(places, edges)
            parts = [(np.median(places[bins == b]), drawn[bins == b]) for b in np.unique(bins)]
            middle = [place for place, _ in parts]
            colour, marker = SERIES[at % len(SERIES)], MARKERS[at % len(MARKERS)]
            largest, median = [part.max() for _, part in parts], [float(np.median(part)) for _, part in parts]
            axes.fill_between(middle, median, largest, color=colour, alpha=0.12, lw=0)
            axes.plot(middle, largest, color=colour, lw=1.2, marker=marker, ms=3.5, label=f"{dtype}, largest")
            axes.plot(middle, median, color=colour, lw=1.0, ls=":", label=f"{dtype}, median")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        limit_line(axes, vertical=False)
        axes.set_xlabel("position in its request + 1, tokens (log scale)")
        axes.set_ylabel("error ÷ limit (log scale)")
        axes.grid()
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return svg_text(figure, label)


def _largest(ratios: Sequence[float]) -> float:
    return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def _short(ratio: float) -> str:
    return "∞" if math.isinf(ratio) else f"{ratio:.2g}" if ratio < 1000 else f"{ratio:.0e}"
