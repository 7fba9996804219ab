"""Paired statistics: golden values, what they must agree with, and verdicts that may not be given."""

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from assay.eval.statistics import (
    Differences,
    Estimate,
    Verdict,
    benjamini_hochberg,
    binary,
    binary_estimate,
    flip_bound,
    holm,
    macro_estimate,
    macro_flip_bound,
    needed_pairs,
    real_estimate,
    rule_of_three_pairs,
    sign_flip_p,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    ("lost", "won", "n", "p", "delta", "se", "interval", "ends"),
    [
        (5, 7, 1319, 0.774414, 0.1516, 0.2626, "exact", (-0.406, 0.634)),
        (0, 5, 1319, 0.0625, 0.3791, 0.1692, "exact", (-0.017, 0.379)),
        (0, 6, 1319, 0.03125, 0.4549, 0.1853, "exact", (0.037, 0.455)),
        (30, 12, 1319, 0.007916, -1.3647, 0.4899, "Wald", (-2.325, -0.404)),
        (1, 9, 200, 0.021484, 4.0, 1.5556, "exact", (0.550, 4.975)),
        (8, 0, 20, 0.0078125, -40.0, 10.95, "exact", (-40.0, -10.45)),
    ],
)
def test_flips_come_to_their_golden_values(
    lost: int, won: int, n: int, p: float, delta: float, se: float, interval: str, ends: tuple[float, float]
) -> None:
    found = binary_estimate(lost, won, n)
    assert found.p == pytest.approx(p, abs=5e-7)
    assert 100 * found.delta == pytest.approx(delta, abs=5e-5)
    assert 100 * found.se == pytest.approx(se, abs=5e-3 if se > 10 else 5e-5)
    assert found.interval == interval
    assert (100 * found.low, 100 * found.high) == pytest.approx(ends, abs=5e-3 if se > 10 else 5e-4)
    assert (found.n, found.changed) == (n, lost + won)


@pytest.mark.parametrize(
    ("lost", "won", "wald", "exact"),
    [
        (5, 7, (-0.363, 0.666), (-0.406, 0.634)),
        (30, 12, (-2.325, -0.404), (-2.183, -0.345)),
    ],
)
def test_both_intervals_come_to_their_golden_values(
    lost: int, won: int, wald: tuple[float, float], exact: tuple[float, float]
) -> None:
    found = binary_estimate(lost, won, 1319)
    half = stats.norm.ppf(0.975) * found.se
    assert (100 * (found.delta - half), 100 * (found.delta + half)) == pytest.approx(wald, abs=5e-4)
    assert tuple(100 * end for end in binary._exact(lost, won, 1319)) == pytest.approx(exact, abs=5e-4)
    assert found.interval == ("exact" if lost + won < binary.FEWEST_FLIPS else "Wald")


def test_pairs_are_worth_more_than_two_averages() -> None:
    paired = binary_estimate(5, 7, 1319).se
    # two independent runs with 42 and 44 right answers, whose flips may be these
    shares = 42 / 1319, 44 / 1319
    unpaired = math.sqrt(sum(share * (1 - share) for share in shares) / 1319)
    assert 100 * unpaired == pytest.approx(0.692, abs=5e-4)
    assert unpaired / paired == pytest.approx(2.63, abs=5e-3)


def test_the_factors_of_planning_are_those_of_80_percent_power() -> None:
    found = binary_estimate(5, 7, 1319)
    assert found.detectable / found.se == pytest.approx(2.802, abs=5e-4)
    assert needed_pairs(1.0, 0.01) == pytest.approx(7.849e4, rel=1e-4)


def test_the_exact_interval_of_many_flips_lies_inside_the_margin_or_not() -> None:
    found = binary_estimate(30, 12, 1319, margin=0.02)
    # [-2.183, -0.345] percent: the exact bound alone would not do
    assert found.within == (False, True)
    assert found.p_worse == pytest.approx(0.097, abs=5e-4)
    assert found.verdict() is Verdict.REGRESSED
    assert binary_estimate(30, 12, 1319, margin=0.0218).within == (False, True)
    # from 2.19 percent on the exact bound is inside, and p of the score test falls below 0.05 at 2.25
    assert binary_estimate(30, 12, 1319, margin=0.0219).within == (False, True)
    assert binary_estimate(30, 12, 1319, margin=0.0226).within == (True, True)


@pytest.mark.parametrize(
    ("margin", "p_worse", "p_better", "verdict"),
    [(0.005, 0.0065, 0.0923, Verdict.NON_INFERIOR), (0.01, 5.8e-6, 6.2e-4, Verdict.EQUIVALENT)],
)
def test_equivalence_of_seven_against_five_flips_depends_on_the_margin(
    margin: float, p_worse: float, p_better: float, verdict: Verdict
) -> None:
    found = binary_estimate(5, 7, 1319, margin=margin)
    assert (found.p_worse, found.p_better) == pytest.approx((p_worse, p_better), rel=0.01)
    assert found.equivalent() == (verdict is Verdict.EQUIVALENT)
    assert found.verdict() is verdict


@pytest.mark.parametrize(("n", "bound"), [(1319, 0.00227), (200, 0.0149)])
def test_without_a_flip_the_share_of_flips_is_bounded(n: int, bound: float) -> None:
    found = binary_estimate(0, 0, n, margin=0.01)
    assert found.flip_bound == pytest.approx(bound, abs=5e-5)
    assert (found.p, found.se, found.interval) == (1.0, 0.0, "rule of three")
    assert (found.low, found.high) == (-flip_bound(n), flip_bound(n))


@pytest.mark.parametrize(("n", "verdict"), [(299, Verdict.EQUIVALENT), (298, Verdict.INCONCLUSIVE)])
def test_identical_runs_are_equivalent_only_where_the_bound_lies_inside_the_margin(n: int, verdict: Verdict) -> None:
    assert binary_estimate(0, 0, n, margin=0.01).verdict() is verdict
    assert real_estimate(Differences.of([0.0] * n), margin=0.01).verdict() is verdict
    assert rule_of_three_pairs(0.01) == 299
    assert binary_estimate(0, 0, 298, margin=0.01).needed == 299


def test_without_a_margin_no_run_is_as_good_as_another() -> None:
    for found in (binary_estimate(0, 0, 1319), binary_estimate(5, 7, 1319), real_estimate(Differences.of([0.0] * 999))):
        assert not found.equivalent()
        assert not found.non_inferior()
        assert found.verdict() is Verdict.INCONCLUSIVE


def test_a_large_p_is_not_a_pass() -> None:
    found = binary_estimate(3, 3, 40, margin=0.01)
    assert found.p == 1.0
    assert found.verdict() is Verdict.INCONCLUSIVE
    assert found.needed == needed_pairs(6 / 40, 0.01)
    assert found.needed in (11773, 11774)


def test_planning_gives_the_published_number_of_questions() -> None:
    assert needed_pairs(1 / 9, 0.03) == 969
    with pytest.raises(ValueError, match="difference must be positive, got 0"):
        needed_pairs(1.0, 0)
    # six tasks, five of 200 pairs and one of 500: a gain of 0.13 points cannot be called anything
    found = macro_estimate([Differences.of([0.15, -0.15] * (n // 2)) for n in (200, 200, 200, 200, 200, 500)])
    assert 100 * found.se == pytest.approx(0.41, abs=3e-3)
    assert 100 * found.detectable == pytest.approx(1.15, abs=5e-3)


def test_a_loss_that_is_certain_but_small_is_no_regression(rng: np.random.Generator) -> None:
    values = rng.normal(-0.002, 0.005, 400)
    found = real_estimate(Differences.of(values), margin=0.02)
    assert found.high < 0
    assert found.p < 0.05
    assert found.verdict() is Verdict.EQUIVALENT
    assert real_estimate(Differences.of(values)).verdict() is Verdict.REGRESSED
    assert real_estimate(Differences.of(-values)).verdict() is Verdict.IMPROVED


def test_sign_flips_agree_with_scipy(rng: np.random.Generator) -> None:
    few, many = rng.normal(0.3, 1.0, 11), rng.normal(0.15, 1.0, 60)
    for values in (few, many):
        expected = stats.permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=9999, rng=np.random.default_rng(0)
        ).pvalue
        # all signs are tried with few values; with many, two samples of signs differ by chance
        tolerance = 1e-12 if values is few else 4 * math.sqrt(expected * (1 - expected) / 9999)
        assert sign_flip_p([Differences.of(values)]) == pytest.approx(expected, abs=tolerance)
    # the same in two strata, tried one by one
    strata = [Differences.of(few[:4]), Differences.of(few[4:])]
    weights = np.concatenate([few[:4] / 8, few[4:] / 14])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 11)).reshape(11, -1)
    expected = float((np.abs(weights @ signs) >= abs(weights.sum()) - 1e-12).mean())
    assert sign_flip_p(strata) == pytest.approx(expected, abs=1e-12)


def test_the_smallest_p_is_one_in_ten_thousand() -> None:
    assert sign_flip_p([Differences.of([1.0] * 40 + [0.9])]) == pytest.approx(1e-4)


def test_an_unpaired_permutation_would_miss_what_pairs_show(rng: np.random.Generator) -> None:
    first = rng.uniform(0, 1, 200)
    second = first + rng.normal(0.02, 0.05, 200)
    unpaired = stats.permutation_test(
        (first, second), lambda x, y: x.mean() - y.mean(), permutation_type="independent", n_resamples=999, rng=rng
    ).pvalue
    assert unpaired > 0.2
    assert sign_flip_p([Differences.of(second - first)]) < 0.001


def test_one_sided_tests_are_those_of_scipy(rng: np.random.Generator) -> None:
    values = rng.normal(0.0, 0.2, 80)
    found = real_estimate(Differences.of(values), margin=0.04)
    assert found.p_worse == pytest.approx(stats.ttest_1samp(values, -0.04, alternative="greater").pvalue, rel=1e-9)
    assert found.p_better == pytest.approx(stats.ttest_1samp(values, 0.04, alternative="less").pvalue, rel=1e-9)
    assert found.se == pytest.approx(values.std(ddof=1) / math.sqrt(80))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    missed = 0
    for _ in range(200):
        values = rng.gamma(2.0, 0.1, 60) - 0.2
        found = real_estimate(Differences.of(values))
        assert found.interval == "BCa"
        missed += not found.low <= 0.0 <= found.high
    # 5 % of 200 are 10
    assert 3 <= missed <= 22


def test_pairs_that_share_a_context_count_less(rng: np.random.Generator) -> None:
    shared = np.repeat(rng.normal(0, 0.2, 50), 4)
    names = [f"context {at // 4}" for at in range(200)]
    clustered, naive = Differences.of(shared, names), Differences.of(shared)
    assert clustered.error == pytest.approx(2 * naive.error, rel=0.02)
    by_hand = math.sqrt(sum((shared[4 * c : 4 * c + 4] - shared.mean()).sum() ** 2 for c in range(50))) / 200
    assert clustered.clustered_error == pytest.approx(by_hand)
    found, plain = real_estimate(clustered, margin=0.1), real_estimate(naive, margin=0.1)
    assert (found.se_naive, found.se) == (plain.se, clustered.clustered_error)
    assert found.high - found.low > 1.7 * (plain.high - plain.low)
    assert found.p > plain.p
    assert found.p_worse > plain.p_worse


def test_clusters_that_cancel_do_not_shrink_the_error(rng: np.random.Generator) -> None:
    half = rng.normal(0, 0.2, 50)
    found = Differences.of(np.stack([half, -half], axis=1).ravel(), [str(at // 2) for at in range(100)])
    assert found.clustered_error < 1e-12
    assert found.error == found.naive_error > 0.01


def test_the_mean_of_tasks_weighs_every_task_alike(rng: np.random.Generator) -> None:
    small, large = Differences.of(rng.normal(0.1, 0.1, 20)), Differences.of(rng.normal(0.0, 0.1, 500))
    found = macro_estimate([small, large], margin=0.2)
    assert found.delta == pytest.approx((small.values.mean() + large.values.mean()) / 2)
    assert found.se == pytest.approx(math.sqrt(small.error**2 + large.error**2) / 2)
    assert (found.n, found.interval) == (520, "BCa")
    assert found.low < found.delta < found.high
    pooled = np.concatenate([small.values, large.values]).mean()
    assert abs(found.delta - pooled) > 0.02
    assert macro_estimate([large]) == real_estimate(large)


def test_a_clustered_task_widens_the_mean_of_tasks(rng: np.random.Generator) -> None:
    shared = np.repeat(rng.normal(0, 0.2, 50), 4)
    other = Differences.of(rng.normal(0, 0.2, 200))
    clustered = macro_estimate([Differences.of(shared, [str(at // 4) for at in range(200)]), other])
    naive = macro_estimate([Differences.of(shared), other])
    assert (clustered.interval, naive.interval) == ("t", "BCa")
    assert clustered.high - clustered.low > 1.3 * (naive.high - naive.low)


def test_equal_differences_have_no_spread_to_divide_by() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = real_estimate(Differences.of([-0.1] * 30), margin=0.02)
    assert (found.interval, found.se, found.flip_bound) == ("rule of three", 0.0, None)
    assert found.delta == pytest.approx(-0.1)
    assert (found.low, found.high) == pytest.approx((-0.1 - flip_bound(30), -0.1 + flip_bound(30)))
    assert found.verdict() is Verdict.REGRESSED
    assert found.p == pytest.approx(1e-4)


def test_the_bound_of_unbounded_scores_takes_their_scale() -> None:
    zeros = Differences.of([0.0] * 64)
    assert real_estimate(zeros, margin=0.05).verdict() is Verdict.EQUIVALENT
    assert real_estimate(zeros, margin=0.05, scale=4.0).verdict() is Verdict.INCONCLUSIVE
    assert macro_estimate([zeros, zeros], margin=0.05).verdict() is Verdict.EQUIVALENT
    assert macro_estimate([zeros, Differences.of([0.0] * 20)], margin=0.05).verdict() is Verdict.INCONCLUSIVE


def test_the_pairs_that_are_still_needed_are_enough_and_one_less_is_not() -> None:
    for tasks, scale in ((1, 1.0), (6, 1.0), (1, 4.0), (6, 0.4)):
        unsure = macro_estimate([Differences.of([0.0] * 3)] * tasks, margin=0.02, scale=scale)
        assert unsure.needed is not None
        verdicts = [
            macro_estimate([Differences.of([0.0] * n)] * tasks, margin=0.02, scale=scale).verdict()
            for n in (unsure.needed - 1, unsure.needed)
        ]
        assert verdicts == [Verdict.INCONCLUSIVE, Verdict.EQUIVALENT]
    # a margin that no pair can reach needs one
    assert real_estimate(Differences.of([0.0] * 3), margin=2.0).needed == 1


def test_a_small_loss_says_no_more_than_none() -> None:
    none, one = Differences.of([0.0] * 20), Differences.of([0.0] * 19 + [-0.05])
    for tasks in ([none] * 6, [*[none] * 5, one]):
        assert macro_estimate(tasks, margin=0.02).verdict() is Verdict.INCONCLUSIVE
        assert macro_estimate(tasks, margin=0.02).needed == 25
        assert macro_estimate(tasks, margin=0.03).verdict() is Verdict.EQUIVALENT
    none, one = Differences.of([0.0] * 100), Differences.of([0.0] * 99 + [-0.02])
    for margin, verdict in ((0.02, Verdict.INCONCLUSIVE), (0.03, Verdict.EQUIVALENT)):
        assert [real_estimate(each, margin=margin).verdict() for each in (none, one)] == [verdict] * 2


def test_where_many_differ_their_spread_says_what_others_might_do(rng: np.random.Generator) -> None:
    values = np.zeros(200)
    values[:40] = rng.normal(0, 0.05, 40)
    # the bound without a difference, 1.49 percent, would not do
    assert real_estimate(Differences.of(values), margin=0.01).verdict() is Verdict.EQUIVALENT
    # all of ten differ, and by nearly the same
    assert real_estimate(Differences.of(rng.normal(0, 1e-4, 10)), margin=0.01).verdict() is Verdict.EQUIVALENT


def test_pairs_of_one_context_raise_what_is_needed(rng: np.random.Generator) -> None:
    values = np.repeat(rng.normal(0, 0.2, 20), 10)
    alone = real_estimate(Differences.of(values), margin=0.05)
    together = real_estimate(Differences.of(values, [str(at // 10) for at in range(200)]), margin=0.05)
    assert alone.needed is not None
    assert together.needed is not None
    assert together.needed == pytest.approx(alone.needed * (together.se / alone.se) ** 2, rel=0.01)
    assert together.needed > 5 * alone.needed


def test_no_flip_in_any_task_bounds_the_mean_of_their_shares() -> None:
    assert macro_flip_bound([64]) == pytest.approx(flip_bound(64))
    # tasks of one size are as one
    assert macro_flip_bound([16] * 4) == pytest.approx(flip_bound(64))
    # the worst of all ways to share out what two tasks may hide, on a fine grid
    first, second = 20, 64
    spent = np.linspace(0, -math.log(0.05), 20001)
    shares = (1 - np.exp(-spent / first) + 1 - np.exp(-(spent[-1] - spent) / second)) / 2
    assert macro_flip_bound([first, second]) == pytest.approx(shares.max(), abs=1e-8)
    assert macro_flip_bound([200] * 18 + [150, 500, 500]) < 0.001


@pytest.mark.parametrize("values", [[0.0], [0.3], [0.0] * 5, [1.0, 0.0], [0.0] * 30 + [-1.0], [1e-9, -1e-9, 0.0]])
@pytest.mark.parametrize("margin", [None, 0.01])
def test_no_number_is_ever_undefined(values: list[float], margin: float | None) -> None:
    for found in (
        real_estimate(Differences.of(values), margin=margin),
        macro_estimate([Differences.of(values), Differences.of([0.0, 0.5])], margin=margin),
        real_estimate(Differences.of(values, ["same"] * len(values)), margin=margin),
    ):
        numbers = [
            found.delta,
            found.se,
            found.p,
            found.low,
            found.high,
            found.p_worse,
            found.p_better,
            found.detectable,
        ]
        assert all(math.isfinite(number) for number in numbers)
        assert found.verdict() in Verdict


def test_a_single_pair_allows_no_verdict() -> None:
    assert real_estimate(Differences.of([-0.5]), margin=0.01).verdict() is Verdict.INCONCLUSIVE
    assert binary_estimate(1, 0, 1, margin=0.01).verdict() is Verdict.INCONCLUSIVE


def test_one_cluster_allows_no_verdict() -> None:
    found = real_estimate(Differences.of([0.1, -0.1, 0.1, 0.1], ["same"] * 4), margin=0.01)
    assert found.p == 1.0
    assert found.verdict() is Verdict.INCONCLUSIVE


def test_holm_is_monotone_and_strict() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_false_discoveries_are_controlled_as_in_scipy() -> None:
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert benjamini_hochberg([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: binary_estimate(3, 3, 5), "flips must be at least 0 and at most n together, got 3 and 3 of 5"),
        (lambda: binary_estimate(0, 0, 0), "flips must be"),
        (lambda: binary_estimate(1, 1, 5, margin=0.0), "margin must be positive, got 0.0"),
        (lambda: Differences.of([]), "values must be a list of at least one number"),
        (lambda: Differences.of([math.nan]), "values must be finite"),
        (lambda: Differences.of([1.0], ["a", "b"]), "clusters must be as many as values, got 2 for 1"),
        (lambda: real_estimate(Differences.of([1.0, 2.0]), margin=-1.0), "margin must be positive, got -1.0"),
        (lambda: real_estimate(Differences.of([1.0, 1.0]), margin=0.0), "margin must be positive"),
        (lambda: rule_of_three_pairs(1.0), "margin must be between 0 and 1, got 1.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_an_estimate_does_not_change() -> None:
    found: Estimate = binary_estimate(1, 2, 10)
    with pytest.raises(AttributeError):
        found.p = 0.0  # type: ignore[misc]
