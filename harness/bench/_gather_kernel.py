"""A row gather as one Triton kernel: its rate is the ceiling of whatever reads rows by index."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

# rows in flight at a time: 16 KiB at 1 KiB a row
_ROWS = 16


@triton.jit
def _gather_kernel(table_ptr, indices_ptr, out_ptr, KEYS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Sum the rows of one query."""
    query = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    # a tile of sums, added up once at the end: a sum over rows in every step would make the warps wait for each other
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for at in range(0, KEYS, ROWS):
        rows = tl.load(indices_ptr + query * KEYS + at + tl.arange(0, ROWS)).to(tl.int64)
        values = tl.load(table_ptr + rows[:, None] * WIDTH + columns[None, :])
        sums += values.to(tl.float32)
    tl.store(out_ptr + query * WIDTH + columns, tl.sum(sums, axis=0))


def gather_sum(table: Tensor, indices: Tensor, out: Tensor) -> None:
    """``out[q] = sum_k table[indices[q, k]]``, one program a query.

    Args:
        table: ``[rows, width]``, contiguous, width a power of two.
        indices: ``[queries, keys]``, int32, contiguous, ``keys`` a multiple of 16, all of them rows of the table.
        out: ``[queries, width]``, float32, contiguous; overwritten.

    Raises:
        ValueError: If a shape is not as asked for.
    """
    (queries, keys), width = indices.shape, table.shape[1]
    if keys % _ROWS or width & (width - 1):
        raise ValueError(f"keys must be a multiple of {_ROWS} and width a power of two, got {keys} and {width}")
    if out.shape != (queries, width) or out.dtype != torch.float32:
        raise ValueError(f"out must be float32 of shape {(queries, width)}, got {out.dtype} {tuple(out.shape)}")
    _gather_kernel[(queries,)](table, indices, out, KEYS=keys, WIDTH=width, ROWS=_ROWS, num_warps=4)
