"""Medians, spreads, and how sure a ratio is."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4999


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """For tables."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def reach(self) -> float:
        """How far the interval goes from 1, to either side: of two runs of one thing, that is noise."""
        return max(abs(self.low - 1), abs(self.high - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of single samples."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Percentiles, with values between samples taken linearly."""
        p10, median, p90 = np.percentile(np.asarray(samples, dtype=float), (10, 50, 90))
        return cls(median=float(median), p10=float(p10), p90=float(p90))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float], *, seed: int) -> Interval:
    """Median over rounds of the ratio within a round, which cancels the drift of clocks, with a bootstrap interval.

    Args:
        ours: A time per round.
        theirs: The other's time in the same rounds.
        seed: Of the resampling.

    Raises:
        ValueError: If there are not as many rounds of both, or fewer than two.
        ModuleNotFoundError: If scipy is not installed.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"ratios must have two rounds or more of both, got {len(ours)} and {len(theirs)}")
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    value = float(np.median(ratios))
    if np.ptp(ratios) == 0:
        return Interval(value=value, low=value, high=value)
    # percentiles rather than BCa: the jackknife that corrects for bias is degenerate for a median
    found = (
        scipy_stats()
        .bootstrap(
            (ratios,),
            np.median,
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            method="percentile",
            vectorized=True,
            random_state=np.random.default_rng(seed),
        )
        .confidence_interval
    )
    return Interval(value=value, low=float(found.low), high=float(found.high))


def scipy_stats() -> Any:
    """``scipy.stats``.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    try:
        return importlib.import_module("scipy.stats")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "bootstrap intervals need scipy, got none: pip install 'kernel-assay[bench]'", name="scipy"
        ) from error
