"""Few flips: what they exclude, and how often a loss of the margin passes."""

import math

import pytest
from scipy import optimize, stats

from assay.eval.statistics import Verdict, binary, binary_estimate


@pytest.mark.parametrize(
    ("lost", "won", "n", "margin"), [(1, 0, 300, 0.01), (5, 7, 1319, 0.005), (30, 12, 1319, 0.02), (3, 9, 40, 0.1)]
)
def test_the_score_test_takes_its_error_from_the_likeliest_shares_that_lose_the_margin(
    lost: int, won: int, n: int, margin: float
) -> None:
    def unlikely(gained: float) -> float:
        shares = (gained + margin, gained, 1 - margin - 2 * gained)
        counts = (lost, won, n - lost - won)
        return -sum(count * math.log(share) for count, share in zip(counts, shares, strict=True) if count)

    bounds = (1e-12, (1 - margin) / 2 - 1e-12)
    gained = optimize.minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    error = math.sqrt((2 * gained + margin - margin**2) / n)
    wanted = stats.norm.sf(((won - lost) / n + margin) / error)
    assert binary._score_p(lost, won, n, margin) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("n", [299, 300, 350, 473, 1319, 3000])
def test_a_loss_of_the_margin_passes_as_seldom_as_it_says(n: int) -> None:
    # a fault that only loses: as many flips as a binomial distribution has, all of them one way
    margin = 0.01
    passing = [lost for lost in range(n + 1) if binary_estimate(lost, 0, n, margin=margin).non_inferior()]
    assert stats.binom.pmf(passing, n, margin).sum() < 0.06


def test_one_flip_of_300_excludes_no_loss_of_one_percent() -> None:
    assert binary_estimate(1, 0, 300, margin=0.01).verdict() is Verdict.INCONCLUSIVE
    assert binary_estimate(1, 0, 500, margin=0.01).verdict() is Verdict.EQUIVALENT
