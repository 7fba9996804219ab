"""The picture of one case: errors over token and head, and against position."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from .chart_style import BAD, CEILING, GRID, MUTED, SERIES, Floats, drawable, limit_line, style, svg_text
from .row_grid import RowGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# blue up to the limit, orange to red beyond it: told apart by every eye, in grey by the step at the limit
BELOW = ((0.93, 0.95, 0.97), (0.62, 0.76, 0.88), (0.26, 0.51, 0.74), (0.05, 0.28, 0.53))
BEYOND = ((0.99, 0.68, 0.33), (0.91, 0.40, 0.10), (0.70, 0.16, 0.06), (0.40, 0.04, 0.06))


def case_chart(grid: RowGrid, label: str) -> str:
    """One case: the map of errors over token and head, and below it error against position.

    Args:
        grid: Its rows.
        label: As in ``margin_chart``.
    """
    with style():
        # a head is as high as a line of text as long as there are few
        map_height = min(2.2, max(0.7, 0.16 * len(grid.heads)))
        figure = Figure(figsize=(5.6, map_height + 2.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=[map_height, 1.4])
        _heat_map(figure, top, grid)
        _against_position(bottom, grid)
        return svg_text(figure, label)


def _heat_map(figure: Figure, axes: "Axes", grid: RowGrid) -> None:
    norm, colours = _scale(grid)
    image = axes.imshow(
        np.ma.masked_invalid(np.clip(grid.cells, norm.vmin, norm.vmax)),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm,
        extent=(-0.5, len(grid.tokens) - 0.5, len(grid.heads) - 0.5, -0.5),
    )
    axes.set_facecolor(GRID)
    for edges, dash, width in (
        (grid.tile_edges, ":", 0.8),
        (grid.chunk_edges, "--", 0.8),
        (grid.request_edges, "-", 1.4),
    ):
        for at in edges:
            # dark with a light rim, to be seen on every colour of the map
            axes.axvline(at - 0.5, color="white", lw=width + 1.2, alpha=0.6)
            axes.axvline(at - 0.5, color="black", lw=width, ls=dash)
    ticks = np.unique(np.linspace(0, len(grid.tokens) - 1, min(8, len(grid.tokens))).round().astype(int))
    axes.set_xticks(ticks, [str(grid.tokens[at]) for at in ticks])
    rows = np.unique(np.linspace(0, len(grid.heads) - 1, min(6, len(grid.heads))).round().astype(int))
    axes.set_yticks(rows, [str(grid.heads[at]) for at in rows])
    axes.set_xlabel("token, row of out")
    axes.set_ylabel("head")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label(grid.unit, fontsize=8)


def _scale(grid: RowGrid) -> tuple[LogNorm, ListedColormap]:
    """Colours by decades, with their step at the limit where the error has one."""
    finite = grid.cells[np.isfinite(grid.cells) & (grid.cells > 0)]
    if grid.limit is None:
        top = 10 ** math.ceil(math.log10(finite.max())) if len(finite) else 1.0
        return LogNorm(top * 1e-3, top), _colours(BELOW)
    worst = float(np.nan_to_num(grid.cells, nan=0.0, posinf=CEILING).max())
    decades = 1 if worst <= 10 else 2 if worst <= 100 else 4
    norm = LogNorm(grid.limit * 10.0**-decades, grid.limit * 10.0**decades)
    return norm, _colours(BELOW, BEYOND)


def _colours(*ramps: Sequence[tuple[float, float, float]]) -> ListedColormap:
    """The ramps one after the other, each blended from its stops."""
    steps = np.linspace(0, 1, 64)
    parts = []
    for ramp in ramps:
        places = np.linspace(0, 1, len(ramp))
        parts.append(np.stack([np.interp(steps, places, channel) for channel in zip(*ramp, strict=True)], axis=1))
    return ListedColormap(np.concatenate(parts))


def _against_position(axes: "Axes", grid: RowGrid) -> None:
    norm, _ = _scale(grid)
    drawn = drawable(grid.errors) if grid.limit else np.clip(grid.errors, norm.vmin, norm.vmax)
    limit = grid.limit or math.inf
    for member, colour, marker in ((drawn <= limit, SERIES[0], "o"), (drawn > limit, BAD, "D")):
        axes.plot(*_thinned(grid.positions[member], drawn[member]), marker, color=colour, alpha=0.5, ms=3, mew=0)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    if grid.limit is not None:
        limit_line(axes, vertical=False, at=grid.limit)
    for edges, dash in ((grid.tile_positions, ":"), (grid.chunk_positions, "--")):
        for position in edges:
            axes.axvline(position - 0.5, color=MUTED, lw=0.7, ls=dash)
    axes.set_xlabel("position in its request, tokens")
    axes.set_ylabel(grid.unit)
    axes.margins(x=0.02)


def _thinned(x: NDArray[np.int64], y: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Points that do not lie on another one, as far as a small picture can tell."""
    if not len(x):
        return x, y
    span = max(1, int(x.max() - x.min()))
    cells = np.stack([(x - x.min()) * 300 // span, np.round(np.log10(y) * 25)], axis=1)
    _, kept = np.unique(cells, axis=0, return_index=True)
    return x[kept], y[kept]
