"""What a paired comparison comes to: a difference with its uncertainty, and the verdict that it allows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from scipy.optimize import brentq

ALPHA = 0.05
# two-sided 5 % and 80 % power: the sum of the two quantiles of the normal distribution, and its square
DETECTABLE, PLANNING = 2.802, 7.849


class Verdict(StrEnum):
    """What may be said of the second run; ``p > 0.05`` alone never says that it is as good."""

    EQUIVALENT = "equivalent"
    IMPROVED = "improved"
    NON_INFERIOR = "non_inferior"
    REGRESSED = "regressed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean difference over pairs, positive where the second run is better, in the unit of the scores.

    Attributes:
        n: Pairs.
        delta: Mean difference.
        se: Standard error: the larger of the next two.
        se_naive: As if all pairs were independent.
        se_clustered: As if pairs of one cluster moved together.
        p: Of a difference at least as large if there were none, two-sided.
        low: Lower end of the 95 % interval.
        high: Upper end.
        interval: How the interval was made: ``Wald``, ``exact``, ``BCa``, ``t`` or ``rule of three``.
        changed: Pairs that differ.
        variance: Of the differences.
        margin: The loss that the suite accepts, declared before the runs; None if it declares none.
        p_worse: Of the data if the second run were worse by the margin; 1 without one.
        p_better: The same for better.
        within: Whether stricter bounds, which hold with few differences too, lie inside the margin, below and above;
            True where no such bound is asked for.
        flip_bound: Where nothing differs, the share of pairs that may differ all the same, 95 % one-sided; else None.
        tasks: Of which this is the mean.
        scale: What a single pair may change by at most.
        few: Whether so few pairs differ that what was not seen is bounded as if none did.
    """

    n: int
    delta: float
    se: float
    se_naive: float
    se_clustered: float
    p: float
    low: float
    high: float
    interval: str
    changed: int
    variance: float
    margin: float | None = None
    p_worse: float = 1.0
    p_better: float = 1.0
    within: tuple[bool, bool] = (True, True)
    flip_bound: float | None = None
    tasks: int = 1
    scale: float = 1.0
    few: bool = False

    @property
    def detectable(self) -> float:
        """The smallest true difference that 80 % of such comparisons would find."""
        return DETECTABLE * self.se

    @property
    def needed(self) -> int | None:
        """Pairs of a task with which a difference of the margin would be found in 80 % of comparisons.

        Where no pair differs from the others, those that would show that few can; None without a margin.
        """
        if self.margin is None:
            return None
        found = needed_pairs(self.variance, self.margin) if self.variance else 1
        if self.variance and not self.few:
            return found
        share = self.margin / self.scale
        return max(found, math.ceil(rule_of_three_pairs(share) / self.tasks) if share < 1 else 1)

    def non_inferior(self, alpha: float = ALPHA) -> bool:
        """Whether a loss of the margin or more is excluded."""
        return self.margin is not None and self.p_worse < alpha and self.within[0]

    def equivalent(self, alpha: float = ALPHA) -> bool:
        """Whether both a loss and a gain of the margin or more are excluded."""
        return self.non_inferior(alpha) and self.p_better < alpha and self.within[1]

    def verdict(self, alpha: float = ALPHA) -> Verdict:
        """The strongest statement that holds; a significant loss smaller than the margin is not a regression."""
        if self.equivalent(alpha):
            return Verdict.EQUIVALENT
        if self.low > 0 and self.p < alpha:
            return Verdict.IMPROVED
        if self.non_inferior(alpha):
            return Verdict.NON_INFERIOR
        if self.high < 0 and self.p < alpha:
            return Verdict.REGRESSED
        return Verdict.INCONCLUSIVE


def needed_pairs(variance: float, difference: float) -> int:
    """Pairs with which a difference is found with 80 % power at 5 %, two-sided."""
    if difference <= 0:
        raise ValueError(f"difference must be positive, got {difference}")
    return max(1, round(PLANNING * variance / difference**2))


def flip_bound(n: int, alpha: float = ALPHA) -> float:
    """The share of pairs that may differ although none of ``n`` did, one-sided."""
    return 1.0 - math.pow(alpha, 1 / n)


def macro_flip_bound(sizes: Sequence[int], alpha: float = ALPHA) -> float:
    """The mean over tasks of the shares that may differ although no pair of any task did, one-sided.

    The worst case spends the evidence, ``-log(alpha)`` in all, where it buys most: first on the smallest tasks. With
    tasks of one size it is the bound of all pairs together.
    """
    counts = np.asarray(sizes, dtype=np.float64)
    evidence = -math.log(alpha)

    def spent(level: float) -> Any:
        return counts * np.maximum(0.0, level - np.log(counts))

    level = brentq(lambda one: spent(one).sum() - evidence, math.log(counts.min()), math.log(counts.max()) + evidence)
    return float((-np.expm1(-spent(level) / counts)).mean())


def rule_of_three_pairs(margin: float, alpha: float = ALPHA) -> int:
    """Pairs without any difference that keep the flip bound below a margin."""
    if not 0 < margin < 1:
        raise ValueError(f"margin must be between 0 and 1, got {margin}")
    return math.floor(math.log(alpha) / math.log1p(-margin)) + 1
