"""Right or wrong, in pairs: the exact McNemar test, and intervals that hold with few flips."""

import math
from typing import Any

from scipy.stats import binomtest, norm

from .estimate import ALPHA, Estimate, flip_bound

# with fewer flips the normal distribution is no good approximation
FEWEST_FLIPS = 25


def binary_estimate(lost: int, won: int, n: int, *, margin: float | None = None) -> Estimate:
    """Compare two runs by their flips.

    Args:
        lost: Pairs that the first run has right and the second wrong.
        won: Pairs that the second run has right and the first wrong.
        n: Pairs in all.
        margin: Share of right answers that may be lost.

    Raises:
        ValueError: If the counts contradict each other, or the margin is not positive.
    """
    if min(lost, won) < 0 or lost + won > n or n < 1:
        raise ValueError(f"flips must be at least 0 and at most n together, got {lost} and {won} of {n}")
    if margin is not None and margin <= 0:
        raise ValueError(f"margin must be positive, got {margin}")
    flips, delta = lost + won, (won - lost) / n
    se = math.sqrt(flips - (lost - won) ** 2 / n) / n
    low, high, interval = _interval(lost, won, n, delta, se)
    exact_low, exact_high = (low, high) if flips == 0 else _exact(lost, won, n)
    tests: dict[str, Any] = {}
    if margin is not None:
        tests = {
            "margin": margin,
            "p_worse": _excludes(delta + margin, se),
            "p_better": _excludes(margin - delta, se),
            "within": (
                exact_low > -margin and (flips == 0 or _score_p(lost, won, n, margin) < ALPHA),
                exact_high < margin and (flips == 0 or _score_p(won, lost, n, margin) < ALPHA),
            ),
        }
    return Estimate(
        n=n,
        delta=delta,
        se=se,
        se_naive=se,
        se_clustered=se,
        p=float(binomtest(min(lost, won), flips, 0.5).pvalue) if flips else 1.0,
        low=low,
        high=high,
        interval=interval,
        changed=flips,
        variance=flips / n - delta**2,
        flip_bound=None if flips else flip_bound(n),
        **tests,
    )


def _interval(lost: int, won: int, n: int, delta: float, se: float) -> tuple[float, float, str]:
    if lost + won == 0:
        bound = flip_bound(n)
        return -bound, bound, "rule of three"
    if lost + won < FEWEST_FLIPS:
        return *_exact(lost, won, n), "exact"
    half = float(norm.ppf(1 - ALPHA / 2)) * se
    return delta - half, delta + half, "Wald"


def _exact(lost: int, won: int, n: int) -> tuple[float, float]:
    """Given the number of flips, the share of them that is won has an exact interval (Clopper and Pearson)."""
    flips = lost + won
    share = binomtest(won, flips, 0.5).proportion_ci(1 - ALPHA, "exact")
    return (2 * share.low - 1) * flips / n, (2 * share.high - 1) * flips / n


def _score_p(lost: int, won: int, n: int, margin: float) -> float:
    """One-sided p of the flips if the second run were worse by the margin, with the error that it would have then.

    A few flips that all go one way say little of their own error: one of 300 leaves a z of 2, and would exclude a loss
    of 1 %. The score test takes the error from the likeliest shares among those that lose the margin (Tango 1998,
    Statistics in Medicine 17:891).
    """
    linear = -lost - won - (2 * n + lost - won) * margin
    constant = lost * margin * (1 + margin)
    share = (math.sqrt(linear**2 - 8 * n * constant) - linear) / (4 * n)
    variance = n * (2 * share - margin * (1 + margin))
    return float(norm.sf((won - lost + n * margin) / math.sqrt(variance))) if variance > 0 else 1.0


def _excludes(distance: float, se: float) -> float:
    """One-sided p of a true value this far away; the rule of three decides where there is no error to divide by."""
    return float(norm.sf(distance / se)) if se else 0.0 if distance > 0 else 1.0
