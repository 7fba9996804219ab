"""A benchmark as one HTML page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .chart import roofline
from .gate import Line
from .results import BOUND, BenchRun, ShapeResult
from .table import ceilings_text, first_ratio, peers_text, remarks, shape_text


def html_page(run: BenchRun, lines: Sequence[Line]) -> str:
    """The page.

    Args:
        run: What to show.
        lines: Of the gate; empty where there was none.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    label = "Roofline of the kernels of this run"
    return environment.get_template("page.html.j2").render(
        run=run,
        lines=lines,
        ceilings=ceilings_text(run),
        peers=peers_text(run),
        remarks=remarks(run),
        # drawn by us, and its texts were escaped when they became SVG
        roofline=Markup(roofline(run, label)),
        label=label,
        shape_text=shape_text,
        first_ratio=first_ratio,
        over_bound=_over_bound,
    )


def _over_bound(shape: ShapeResult, kernel: str) -> str:
    found = (str(ratio.interval) for ratio in shape.ratios if (ratio.kernel, ratio.other) == (kernel, BOUND))
    return next(found, "")
