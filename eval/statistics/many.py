"""Several tests at once."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import false_discovery_control


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values: any of them below alpha is wrong with at most that probability (Holm 1979)."""
    order = np.argsort(p_values)
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        # never smaller than the one before it
        largest = max(largest, min(1.0, (count - rank) * float(p_values[at])))
        adjusted[int(at)] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values that bound the share of false findings among all that are below alpha."""
    return [float(p) for p in false_discovery_control(p_values)] if len(p_values) else []
