"""How every picture of a report is drawn: its colours come from the page, its text stays text."""

import io
import re
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

# colours that the page replaces: it knows whether it is light or dark
INK, MUTED, GRID, BAD, PAPER = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04", "#0a0a05"
SERIES = ("#0a0a06", "#0a0a07", "#0a0a08", "#0a0a09")
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    BAD: "--bad",
    PAPER: "--paper",
    **{colour: f"--series-{at}" for at, colour in enumerate(SERIES)},
}
MARKERS = ("o", "s", "^", "D")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "assay",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
# errors below are drawn at this edge: nothing is learnt from how far below its limit an error is
FLOOR, CEILING = 1e-3, 1e4


def style() -> AbstractContextManager[None]:
    """Within it, figures are drawn in the style of the report; nobody else's settings change."""
    return rc_context(STYLE)


def limit_line(axes: "Axes", *, vertical: bool, at: float = 1.0) -> None:
    """What must not be exceeded."""
    draw = axes.axvline if vertical else axes.axhline
    draw(at, color=BAD, lw=1.1)


def drawable(ratios: Sequence[float] | Floats) -> Floats:
    """Ratios that a logarithmic axis can hold; an undefined one is beyond every limit."""
    values = np.nan_to_num(np.asarray(ratios, dtype=float), nan=CEILING, posinf=CEILING)
    return np.asarray(np.clip(np.abs(values), FLOOR, CEILING))


def svg_text(figure: Figure, label: str) -> str:
    """The picture without a file's prologue; its ids begin with its own name, its colours are the page's."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    prefix = f"p{zlib.crc32(label.encode()):x}"
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
