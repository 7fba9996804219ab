"""What a picture is drawn from: cells, edges and limits in their places; and that it is drawn from all of them."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import attention_case, mla_case
from report_runs import failing, passing, rows

pytest.importorskip("matplotlib", reason="pictures need matplotlib, of the extra `report`")

from assay.harness.record import GateResult, RowErrors
from assay.harness.report import charts
from assay.harness.report.row_grid import RowGrid, row_grid

ROW_LIMIT = 1.6


def grid_of(record_rows: RowErrors, gate: str = "G4 envelope", **sizes: Any) -> RowGrid:
    gates = [GateResult(gate=gate, ratio=2.0)]
    return row_grid(failing(mla_case(**sizes), gates=gates, rows=record_rows), row_limit=ROW_LIMIT)


def every_row(query_lens: list[int], context_lens: list[int], heads: int = 2) -> RowErrors:
    """One row of each token and head; the error tells them apart."""
    token, head, position = [], [], []
    start = 0
    for n, m in zip(query_lens, context_lens, strict=True):
        for at in range(n):
            for one in range(heads):
                token.append(start + at)
                head.append(one)
                position.append(m - n + at)
        start += n
    errors = [0.001 + t + 0.1 * h for t, h in zip(token, head, strict=True)]
    return RowErrors(
        token=token,
        head=head,
        position=position,
        envelope=errors,
        rms=[2 * e for e in errors],
        alpha=[-e for e in errors],
    )


def test_a_cell_is_a_token_and_a_head() -> None:
    grid = grid_of(every_row([9, 5], [45, 5]))
    assert grid.tokens.tolist() == list(range(14))
    assert grid.heads.tolist() == [0, 1]
    expected = np.arange(14)[None] + 0.001 + 0.1 * np.arange(2)[:, None]
    assert np.allclose(grid.cells, expected)
    assert (grid.unit, grid.limit) == ("error ÷ limit", 1.0)


def test_the_order_of_the_rows_does_not_matter_and_a_lost_row_is_a_hole() -> None:
    whole = every_row([9, 5], [45, 5])
    order = np.random.default_rng(1).permutation(28)[:-1]
    lost = sorted(set(range(28)) - set(order.tolist()))[0]
    columns = {name: [getattr(whole, name)[at] for at in order] for name in RowErrors.__dataclass_fields__}
    cells, full = grid_of(RowErrors(**columns)).cells, grid_of(whole).cells
    assert np.argwhere(np.isnan(cells)).tolist() == [[lost % 2, lost // 2]]
    assert np.array_equal(cells[~np.isnan(cells)], full[~np.isnan(cells)])


def test_edges_lie_where_requests_tiles_and_chunks_begin() -> None:
    lens: dict[str, Any] = {"query_lens": [9, 70, 3], "context_lens": [45, 80, 3]}
    grid = grid_of(every_row(**lens), **lens, history_chunk_size=16)
    assert grid.request_edges == [9, 79]
    # the second request begins at token 9: its tile of 64 queries ends before token 73
    assert grid.tile_edges == [73]
    # positions 36..44 hold no multiple of 16 but 36 // 16 -> 48 // 16 lies beyond; 10..79 hold 16, 32, 48 and 64
    assert grid.chunk_edges == [9 + 6, 9 + 22, 9 + 38, 9 + 54]
    assert grid.chunk_positions == [16, 32, 48, 64]
    assert grid.tile_positions == [64]


def test_sampled_rows_have_edges_between_the_columns_that_are_left() -> None:
    sampled = RowErrors(
        token=[0, 60, 70, 200],
        head=[0] * 4,
        position=[0, 60, 70, 200],
        envelope=[0.1] * 4,
        rms=[1.0] * 4,
        alpha=[0.0] * 4,
    )
    grid = grid_of(sampled, query_lens=[256], context_lens=[256], history_chunk_size=128)
    assert grid.tokens.tolist() == [0, 60, 70, 200]
    assert (grid.tile_edges, grid.chunk_edges, grid.request_edges) == ([2, 3], [3], [])


def test_edges_that_would_fill_the_picture_are_left_out() -> None:
    far = RowErrors(token=[0, 1], head=[0, 0], position=[0, 60000], envelope=[0.1] * 2, rms=[1.0] * 2, alpha=[0.0] * 2)
    grid = grid_of(far, query_lens=[2], context_lens=[60001], history_chunk_size=16384)
    assert grid.tile_positions == []
    assert grid.chunk_positions == [16384, 32768, 49152]


@pytest.mark.parametrize(
    ("gate", "factor", "limit"),
    [
        ("G4 envelope", 1.0, 1.0),
        ("G3 exact", 1.0, 1.0),
        ("G6 lse", 1.0, 1.0),
        ("G5 row rms", 2.0, ROW_LIMIT),
        ("G5 median rms", 2.0, ROW_LIMIT),
        ("G6 row scale", 1.0, None),
        ("G6 pooled scale by head", 1.0, None),
    ],
)
def test_the_error_is_that_of_the_deciding_gate(gate: str, factor: float, limit: float | None) -> None:
    grid = grid_of(every_row([9, 5], [45, 5]), gate)
    assert np.allclose(grid.errors, factor * np.asarray(every_row([9, 5], [45, 5]).envelope))
    assert grid.limit == limit


def test_an_undefined_error_is_the_worst_one_and_no_hole() -> None:
    broken = every_row([9, 5], [45, 5])
    grid = grid_of(replace(broken, envelope=[float("nan"), *broken.envelope[1:]]))
    assert grid.cells[0, 0] == np.inf


def test_an_operation_without_history_has_no_chunks() -> None:
    record = passing(attention_case(), rows=every_row([9, 5], [40, 5]))
    grid = row_grid(record, row_limit=ROW_LIMIT)
    assert (grid.chunk_edges, grid.chunk_positions, grid.request_edges) == ([], [], [9])


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def marks(svg: str, colour: str) -> int:
    """Dots of a colour."""
    return len(re.findall(rf"<use [^>]*fill: var\({colour}\)", svg))


def test_margins_name_their_gates_and_the_worst_of_each() -> None:
    svg = charts.margin_chart({"G4 envelope": [0.1, 0.4, 0.4, 2.0], "G6 lse": [0.25, 30000.0]}, "margins")
    assert {"G4 envelope", "G6 lse", "2", "3e+04", "worst"} <= set(words(svg))
    # two that hold apart from each other, one that does not; one and one
    assert (marks(svg, "--series-0"), marks(svg, "--bad")) == (3, 2)


def test_a_margin_just_beyond_its_limit_is_drawn_as_a_failure() -> None:
    svg = charts.margin_chart({"G4 envelope": [1.0, 1.001]}, "margins")
    assert (marks(svg, "--series-0"), marks(svg, "--bad")) == (1, 1)


def test_every_picture_is_svg_with_labelled_axes_in_the_colours_of_the_page() -> None:
    record = failing(mla_case(), rows=rows())
    pictures = {
        "margins": charts.margin_chart({"G4": [0.5]}, "m"),
        "rms": charts.rms_histogram({"float32": [0.5, 99.0]}, row_limit=1.6, median_limit=1.1, label="r"),
        "positions": charts.position_chart({"float32": ([-1, 0, 70], [0.0, 0.5, 2.0])}, "p"),
        "case": charts.case_chart(row_grid(record, row_limit=ROW_LIMIT), "c"),
    }
    axes = {
        "margins": ["error of a case ÷ its limit (log scale); right of the line fails"],
        "rms": ["rms error of a row ÷ rms that the contract predicts (log scale)", "rows, %", "limit of a row, 1.6"],
        "positions": [
            "position in its request + 1, tokens (log scale)",
            "error ÷ limit (log scale)",
            "float32, median",
        ],
        "case": ["token, row of out", "head", "position in its request, tokens", "error ÷ limit"],
    }
    for name, svg in pictures.items():
        assert set(axes[name]) <= set(words(svg)), name
        assert "#0a0a" not in svg
        assert "var(--ink)" in svg
        assert not re.search(r"<(metadata|!DOCTYPE|\?xml)", svg)
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in pictures.values()]
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_nobody_elses_settings_change() -> None:
    from matplotlib import rcParams

    before = dict(rcParams)
    charts.margin_chart({"G4": [0.5]}, "m")
    assert dict(rcParams) == before
