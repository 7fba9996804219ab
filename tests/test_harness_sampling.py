"""A sample of rows always holds the rows where kernels go wrong, and is the same for the same seed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from builders import CPU, attention_case, mla_case, operation_of

from assay.harness.case import Case
from assay.harness.sampling import MAX_DRAWN, MAX_REQUESTS, sample_heads, sample_queries, sample_requests


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_within_the_budget_every_request_is_judged() -> None:
    assert sample_requests([3, 5, 2], budget=10, rng=rng()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_above_it_the_first_the_last_and_the_dearest_are(seed: int) -> None:
    costs = [1 + request % 7 for request in range(100)]
    costs[41] = 1000
    chosen = sample_requests(costs, budget=10, rng=rng(seed))
    assert {0, 41, 99} <= set(chosen)
    assert chosen == sorted(set(chosen))
    assert 3 < len(chosen) <= MAX_REQUESTS
    assert set(chosen) <= set(range(100))


def test_one_request_above_the_budget_is_judged() -> None:
    assert sample_requests([1000], budget=10, rng=rng()) == [0]


@pytest.mark.parametrize("seed", range(5))
def test_the_first_and_the_last_head_are_judged(seed: int) -> None:
    heads = sample_heads(128, everything=False, rng=rng(seed)).tolist()
    assert heads[0] == 0
    assert heads[-1] == 127
    assert len(heads) == len(set(heads)) == 4
    assert heads == sorted(heads)


@pytest.mark.parametrize(("num_heads", "everything"), [(128, True), (4, False), (1, False)])
def test_few_heads_are_all_judged(num_heads: int, everything: bool) -> None:
    assert sample_heads(num_heads, everything=everything, rng=rng()).tolist() == list(range(num_heads))


@pytest.mark.parametrize("seed", range(5))
def test_queries_at_every_edge_are_judged(seed: int) -> None:
    chosen = sample_queries(1000, first_position=300, chunk=256, everything=False, rng=rng(seed)).tolist()
    assert chosen == sorted(set(chosen))
    # first and last, tile edges from both ends
    assert {0, 999, 15, 16, 63, 64, 127, 128, 255, 256, 984, 983, 936, 935, 872, 871} <= set(chosen)
    # the last query of one chunk and the first of the next: positions 511 and 512
    assert {211, 212} <= set(chosen)
    for stratum in range(MAX_DRAWN):
        low, high = (1000 * edge // MAX_DRAWN for edge in (stratum, stratum + 1))
        assert any(low <= index < high for index in chosen)


@pytest.mark.parametrize("count", [1, 2, 15, 17])
def test_short_requests_stay_in_range(count: int) -> None:
    chosen = sample_queries(count, first_position=0, chunk=64, everything=False, rng=rng()).tolist()
    assert {0, count - 1} <= set(chosen)
    assert set(chosen) <= set(range(count))


def test_everything_is_everything() -> None:
    assert sample_queries(300, first_position=7, chunk=64, everything=True, rng=rng()).tolist() == list(range(300))


def test_a_seed_repeats_its_draw_and_seeds_differ() -> None:
    def draw(seed: int) -> list[int]:
        return sample_queries(5000, first_position=0, chunk=64, everything=False, rng=rng(seed)).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("make", [attention_case, mla_case])
def test_an_operation_samples_above_the_budget_only(make: Callable[..., Case]) -> None:
    case = make(num_heads=8)
    operation = operation_of(case)
    given = operation.inputs(case, CPU).arguments
    whole = list(operation.rows(case, given, budget=1 << 30))
    sample = list(operation.rows(case, given, budget=100))
    assert [rows.request for rows in whole] == [rows.request for rows in sample] == [0, 1]
    assert [len(rows.heads) for rows in whole] == [8, 8]
    assert [len(rows.heads) for rows in sample] == [4, 4]
    tokens, heads = sample[0].tokens, sample[0].heads
    at = [int(index) for index in tokens]
    assert torch.equal(sample[0].q, whole[0].q[at][:, heads])
    # the projection of fewer heads may sum in another order
    torch.testing.assert_close(sample[0].k, whole[0].k[:, heads], rtol=1e-12, atol=1e-12)
    assert torch.equal(sample[0].last_key, whole[0].last_key[at])
