"""Percentiles and bootstrap intervals."""

import sys

import numpy as np
import pytest

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from assay.harness.bench.statistics import Interval, Spread, ratio_interval


def test_percentiles() -> None:
    assert Spread.of([float(value) for value in range(101)]) == Spread(median=50.0, p10=10.0, p90=90.0)


def test_drift_that_hits_both_alike_cancels() -> None:
    drift = [1 + at / 10 for at in range(20)]
    interval = ratio_interval([1.1 * ms for ms in drift], drift, seed=0)
    assert (interval.value, interval.low, interval.high) == pytest.approx((1.1, 1.1, 1.1))


def test_one_hiccup_does_not_move_the_ratio() -> None:
    ours = [1.0] * 19 + [9.0]
    assert ratio_interval(ours, [2.0] * 20, seed=0) == Interval(value=0.5, low=0.5, high=0.5)


def test_the_interval_holds_the_ratio_nineteen_times_in_twenty() -> None:
    rng, held = np.random.default_rng(3), 0
    for at in range(200):
        ours, theirs = np.exp(0.03 * rng.standard_normal((2, 20)))
        interval = ratio_interval((1.2 * ours).tolist(), theirs.tolist(), seed=at)
        held += interval.low <= 1.2 <= interval.high
    # of 200 at 95 %, three standard deviations around 190
    assert 180 <= held <= 199


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = np.exp(0.1 * rng.standard_normal((2, 12))).tolist()
    assert ratio_interval(ours, theirs, seed=5) == ratio_interval(ours, theirs, seed=5)


def test_rounds_must_pair_up() -> None:
    with pytest.raises(ValueError, match="two rounds or more of both, got 3 and 2"):
        ratio_interval([1.0] * 3, [1.0] * 2, seed=0)
    with pytest.raises(ValueError, match="got 1 and 1"):
        ratio_interval([1.0], [1.0], seed=0)


def test_the_reach_of_noise_is_its_farther_end() -> None:
    assert Interval(value=1.0, low=0.98, high=1.01).reach == pytest.approx(0.02)
    assert Interval(value=1.0, low=1.0, high=1.03).reach == pytest.approx(0.03)


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ModuleNotFoundError, match=r"kernel-assay\[bench\]"):
        ratio_interval([1.0, 2.0], [1.0, 1.5], seed=0)
