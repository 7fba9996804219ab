"""Scores of any value, in pairs: sign flips, bootstrap intervals, clusters, one task or the mean of several."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from .estimate import ALPHA, Estimate, macro_flip_bound

RESAMPLES = 9999
MOST_ENUMERATED = 13
ROUNDING = 1e-9
FEWEST_CHANGED = 25
# numbers of a block of resamples, which bounds the memory
_BLOCK = 1_000_000
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Differences:
    """Second run minus first, a better score being the larger one.

    Attributes:
        values: ``[n]``.
        clusters: ``[n]``, whole numbers; pairs of one cluster are not independent.
    """

    values: Floats
    clusters: NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[float] | Floats, clusters: Sequence[str] | None = None) -> "Differences":
        """From plain lists; without clusters every pair is its own."""
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or not array.size:
            raise ValueError(f"values must be a list of at least one number, got shape {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError("values must be finite, got some that are not")
        if clusters is None:
            return cls(array, np.arange(array.size))
        if len(clusters) != array.size:
            raise ValueError(f"clusters must be as many as values, got {len(clusters)} for {array.size}")
        return cls(array, np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)[1])

    @property
    def n(self) -> int:
        """Pairs."""
        return self.values.size

    @property
    def sums(self) -> Floats:
        """Sum of each cluster."""
        return np.bincount(self.clusters, weights=self.values).astype(np.float64)

    @property
    def sizes(self) -> Floats:
        """Pairs of each cluster."""
        return np.bincount(self.clusters).astype(np.float64)

    @property
    def is_clustered(self) -> bool:
        """Whether any cluster has more than one pair."""
        return bool(self.sizes.max() > 1)

    @property
    def has_no_spread(self) -> bool:
        """Whether all values are equal, or all pairs are of one cluster: then no error can be estimated from them."""
        spread = float(np.ptp(self.values))
        # what was rounded before it was subtracted differs by rounding
        return self.sizes.size < 2 or spread <= ROUNDING * max(1.0, float(np.abs(self.values).max()))

    @property
    def few_differ(self) -> bool:
        """Whether so few clusters hold a difference that it says little of what those without one might do."""
        changed = int((np.bincount(self.clusters, weights=np.abs(self.values)) > 0).sum())
        return changed < min(FEWEST_CHANGED, self.sizes.size / 2)

    @property
    def naive_error(self) -> float:
        """Standard error of the mean if all pairs were independent."""
        return float(self.values.std(ddof=1) / math.sqrt(self.n)) if self.n > 1 else 0.0

    @property
    def clustered_error(self) -> float:
        """Standard error of the mean if clusters are what is independent (Miller 2024)."""
        residuals = np.bincount(self.clusters, weights=self.values - self.values.mean())
        return float(math.sqrt((residuals**2).sum()) / self.n)

    @property
    def error(self) -> float:
        """The larger of the two."""
        return max(self.naive_error, self.clustered_error)


def real_estimate(
    differences: Differences, *, margin: float | None = None, scale: float = 1.0, seed: int = 0
) -> Estimate:
    """Compare two runs on one task.

    Args:
        differences: Of its pairs.
        margin: Loss that is accepted, in the unit of the values.
        scale: What a single pair may change by at most: 1 for scores. It turns the bound on the share of pairs that may
            differ into a bound on the mean, where all pairs differ equally or not at all.
        seed: Of the resampling.
    """
    values, se = differences.values, differences.error
    delta = float(values.mean())
    if differences.has_no_spread:
        return _degenerate([differences], delta, margin=margin, scale=scale)
    low, high, interval = _interval(differences, delta, se, seed)
    return Estimate(
        n=differences.n,
        delta=delta,
        se=se,
        se_naive=differences.naive_error,
        se_clustered=differences.clustered_error,
        p=sign_flip_p([differences], seed=seed),
        low=low,
        high=high,
        interval=interval,
        changed=int((values != 0).sum()),
        variance=differences.n * se**2,
        scale=scale,
        **_margin_tests([differences], delta, se, differences.sizes.size - 1, margin, scale),
    )


def macro_estimate(
    tasks: Sequence[Differences], *, margin: float | None = None, scale: float = 1.0, seed: int = 0
) -> Estimate:
    """Compare two runs by the mean of the means of several tasks; nothing moves between tasks.

    The variance is that of one pair of each task together, so the number of pairs needed counts the pairs of a task.
    """
    if len(tasks) == 1:
        return real_estimate(tasks[0], margin=margin, scale=scale, seed=seed)
    means = np.array([task.values.mean() for task in tasks])
    delta = float(means.mean())
    if all(task.has_no_spread for task in tasks):
        return _degenerate(tasks, delta, margin=margin, scale=scale)
    naive, clustered, se = (
        math.sqrt(sum(error**2 for error in errors)) / len(tasks)
        for errors in (
            [task.naive_error for task in tasks],
            [task.clustered_error for task in tasks],
            [task.error for task in tasks],
        )
    )
    degrees = sum(task.sizes.size - 1 for task in tasks)
    low, high, interval = _macro_interval(tasks, delta, se, degrees, seed)
    return Estimate(
        n=sum(task.n for task in tasks),
        delta=delta,
        se=se,
        se_naive=naive,
        se_clustered=clustered,
        p=sign_flip_p(tasks, seed=seed),
        low=low,
        high=high,
        interval=interval,
        changed=sum(int((task.values != 0).sum()) for task in tasks),
        variance=sum(task.n * task.error**2 for task in tasks) / len(tasks) ** 2,
        tasks=len(tasks),
        scale=scale,
        **_margin_tests(tasks, delta, se, degrees, margin, scale),
    )


def sign_flip_p(tasks: Sequence[Differences], *, seed: int = 0) -> float:
    """Two-sided p of the mean of the means when the sign of each cluster, in every task, may as well be the other.

    Up to 13 clusters all signs are tried; beyond, a sample of them, so that p is never below 1 in 10,000. That is
    ``scipy.stats.permutation_test`` with ``permutation_type="samples"``, which would shuffle pairs one by one, over
    strata, which it lacks.
    """
    shares = np.concatenate([task.sums / (task.n * len(tasks)) for task in tasks])
    observed = abs(float(shares.sum()))
    means = _all_signs(shares) if shares.size <= MOST_ENUMERATED else _random_signs(shares, seed)
    # what is equal up to rounding is as extreme
    extreme = int((np.abs(means) >= observed * (1 - 1e-12)).sum())
    if shares.size <= MOST_ENUMERATED:
        return extreme / means.size
    return (extreme + 1) / (means.size + 1)


def _all_signs(shares: Floats) -> Floats:
    """Sums of the shares under every choice of signs."""
    sums = np.zeros(1)
    for share in shares:
        sums = np.concatenate([sums + share, sums - share])
    return sums


def _random_signs(shares: Floats, seed: int) -> Floats:
    rng, means = np.random.default_rng(seed), np.empty(RESAMPLES)
    width = (shares.size + 7) // 8
    block = max(1, _BLOCK // shares.size)
    for start in range(0, RESAMPLES, block):
        rows = min(block, RESAMPLES - start)
        bits = np.unpackbits(rng.integers(0, 256, size=(rows, width), dtype=np.uint8), axis=1)[:, : shares.size]
        means[start : start + rows] = 2 * (bits.astype(np.float64) @ shares) - shares.sum()
    return means


def _interval(differences: Differences, delta: float, se: float, seed: int) -> tuple[float, float, str]:
    def mean(sums: Floats, sizes: Floats, axis: int = -1) -> Any:
        return sums.sum(axis=axis) / sizes.sum(axis=axis)

    if differences.is_clustered:
        # whole clusters are drawn
        found = _bca((differences.sums, differences.sizes), mean, seed, paired=True)
    else:
        found = _bca((differences.values,), np.mean, seed, paired=False)
    return found or _t(delta, se, differences.sizes.size - 1)


def _macro_interval(
    tasks: Sequence[Differences], delta: float, se: float, degrees: int, seed: int
) -> tuple[float, float, str]:
    def mean_of_means(*values: Floats, axis: int = -1) -> Any:
        return sum(value.mean(axis=axis) for value in values) / len(values)

    # resampling clusters of unequal size in several tasks at once is more than scipy's bootstrap does
    if any(task.is_clustered for task in tasks) or any(task.n < 2 for task in tasks):
        return _t(delta, se, degrees)
    return _bca(tuple(task.values for task in tasks), mean_of_means, seed, paired=False) or _t(delta, se, degrees)


def _bca(data: tuple[Floats, ...], statistic: Any, seed: int, *, paired: bool) -> tuple[float, float, str] | None:
    """None where the bootstrap is degenerate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.bootstrap(
            data,
            statistic,
            method="BCa",
            paired=paired,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=max(1, _BLOCK // max(one.size for one in data)),
            confidence_level=1 - ALPHA,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (low, high, "BCa") if math.isfinite(low) and math.isfinite(high) else None


def _t(delta: float, se: float, degrees: int) -> tuple[float, float, str]:
    half = float(stats.t.ppf(1 - ALPHA / 2, max(1, degrees))) * se
    return delta - half, delta + half, "t"


def _margin_tests(
    tasks: Sequence[Differences], delta: float, se: float, degrees: int, margin: float | None, scale: float
) -> dict[str, Any]:
    """Two one-sided t tests against the margin; without clusters those of ``ttest_1samp``.

    Where few differ, what was not seen is bounded as where nothing differs: a small loss must not say more than none.
    """
    if margin is None:
        return {}
    if margin <= 0:
        raise ValueError(f"margin must be positive, got {margin}")
    worse, better = (float(stats.t.sf(distance / se, max(1, degrees))) for distance in (delta + margin, margin - delta))
    few = all(task.few_differ for task in tasks)
    inside = not few or macro_flip_bound([task.sizes.size for task in tasks]) * scale < margin
    return {"margin": margin, "p_worse": worse, "p_better": better, "within": (inside, inside), "few": few}


def _degenerate(tasks: Sequence[Differences], delta: float, *, margin: float | None, scale: float) -> Estimate:
    """No task shows a spread, so only the share of pairs that differ otherwise can be bounded."""
    if margin is not None and margin <= 0:
        raise ValueError(f"margin must be positive, got {margin}")
    bound = macro_flip_bound([task.sizes.size for task in tasks])
    low, high = delta - bound * scale, delta + bound * scale
    same = not any(task.values.any() for task in tasks)
    tests: dict[str, Any] = {}
    if margin is not None:
        tests = {"margin": margin, "p_worse": 0.0, "p_better": 0.0, "within": (low > -margin, high < margin)}
    return Estimate(
        n=sum(task.n for task in tasks),
        delta=delta,
        se=0.0,
        se_naive=0.0,
        se_clustered=0.0,
        p=1.0 if same else sign_flip_p(tasks),
        low=low,
        high=high,
        interval="rule of three",
        changed=sum(int((task.values != 0).sum()) for task in tasks),
        variance=0.0,
        flip_bound=bound if same else None,
        tasks=len(tasks),
        scale=scale,
        **tests,
    )
