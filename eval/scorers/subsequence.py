"""Longest common subsequences, a row of the table at a time, so that no text is too long for the stack."""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


def lengths(first: Sequence[Hashable], second: Sequence[Hashable]) -> NDArray[np.int32]:
    """Entry ``[i, j]`` is the length for the first ``i`` and ``j`` items, so the last one is that of the whole."""
    codes: dict[Hashable, int] = {}
    left, right = (np.array([codes.setdefault(item, len(codes)) for item in side]) for side in (first, second))
    table = np.zeros((len(left) + 1, len(right) + 1), dtype=np.int32)
    for row, code in enumerate(left, start=1):
        above = table[row - 1]
        # a match adds one to the entry above and to the left; the rest is the greatest so far in this row or above
        matched = np.where(right == code, above[:-1] + 1, 0)
        np.maximum.accumulate(np.maximum(above[1:], matched), out=table[row, 1:])
    return table


def common(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Hashable]:
    """One of the longest: where several are as long, walking back from the ends leaves out the item of ``second``."""
    table, items = lengths(first, second), []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            items.append(first[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1, j] > table[i, j - 1]:
            i -= 1
        else:
            j -= 1
    return items[::-1]
