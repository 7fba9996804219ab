"""The judged rows of a record laid out for a picture: cells of (token, head), and where tiles and chunks begin."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import Record

TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGrid:
    """Errors of a record over token and head, and over position.

    Columns are the tokens that were judged and kept, in order: where rows were sampled, neighbours in the picture need
    not be neighbours in the batch.

    Attributes:
        tokens: Rows of ``out``, ascending, one per column.
        heads: Query heads, ascending, one per line.
        cells: ``[heads, tokens]``; NaN where no row was kept, infinite for an error that is undefined.
        positions: ``[rows]``, position of each row in its request.
        errors: ``[rows]``, the same errors row by row.
        unit: What the errors are, for an axis.
        limit: Of the errors; None where it differs from row to row.
        request_edges: Columns at which a request begins, the first one left out.
        tile_edges: Columns at which a tile of 64 queries of a request begins.
        chunk_edges: Columns at which a chunk of positions begins.
        tile_positions: Positions at which a tile of 64 keys begins, as far as there are rows; few, or none at all.
        chunk_positions: Positions at which a chunk begins, likewise.
    """

    tokens: NDArray[np.int64]
    heads: NDArray[np.int64]
    cells: NDArray[np.float64]
    positions: NDArray[np.int64]
    errors: NDArray[np.float64]
    unit: str
    limit: float | None
    request_edges: list[int]
    tile_edges: list[int]
    chunk_edges: list[int]
    tile_positions: list[int]
    chunk_positions: list[int]


def row_grid(record: Record, *, row_limit: float) -> RowGrid:
    """Lay out the rows of a record by the error that decided its verdict.

    Args:
        record: With rows.
        row_limit: The lowest limit on the rms error of a row.
    """
    rows, sizes = record.rows, record.case["sizes"]
    errors, unit, limit = _errors(record, row_limit)
    token, head, position = (np.asarray(column, dtype=np.int64) for column in (rows.token, rows.head, rows.position))
    tokens, column = np.unique(token, return_inverse=True)
    heads, line = np.unique(head, return_inverse=True)
    cells = np.full((len(heads), len(tokens)), np.nan)
    cells[line, column] = np.where(np.isnan(errors), math.inf, errors)
    at = np.empty(len(tokens), dtype=np.int64)
    at[column] = position
    starts = np.concatenate([[0], np.cumsum(sizes.get("query_lens", []))]).astype(np.int64)
    owner = np.searchsorted(starts, tokens, side="right") - 1
    chunk = sizes.get("history_chunk_size")
    tiles = (tokens - starts[owner]) // TILE
    return RowGrid(
        tokens=tokens,
        heads=heads,
        cells=cells,
        positions=position,
        errors=errors,
        unit=unit,
        limit=limit,
        request_edges=_steps(owner),
        tile_edges=_steps(tiles, within=owner),
        chunk_edges=_steps(at // chunk, within=owner) if chunk else [],
        tile_positions=_multiples(TILE, position),
        chunk_positions=_multiples(chunk, position) if chunk else [],
    )


def _errors(record: Record, row_limit: float) -> tuple[NDArray[np.float64], str, float | None]:
    """The error of each row that belongs to the deciding gate, its name and its limit."""
    rows, gate = record.rows, record.worst.gate if record.worst else ""
    if gate.startswith("G5"):
        return np.asarray(rows.rms), "rms ÷ predicted", row_limit
    if gate.startswith("G6") and "scale" in gate:
        return np.abs(np.asarray(rows.alpha)), "scale error (no common limit)", None
    return np.asarray(rows.envelope), "error ÷ limit", 1.0


def _steps(labels: NDArray[Any], within: NDArray[Any] | None = None) -> list[int]:
    """Where a label differs from the one before, but only inside the same group of ``within``."""
    changed = labels[1:] != labels[:-1]
    if within is not None:
        changed &= within[1:] == within[:-1]
    return [int(index) + 1 for index in np.flatnonzero(changed)]


def _multiples(size: int, positions: NDArray[np.int64], most: int = 40) -> list[int]:
    """Multiples of ``size`` among the positions; none if they would fill the picture."""
    low, high = int(positions.min()), int(positions.max())
    found = list(range(-(-max(low, 1) // size) * size, high + 1, size))
    return found if len(found) <= most else []
