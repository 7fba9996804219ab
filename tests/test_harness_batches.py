"""Batches are uneven: a giant, a fresh request, a history of whole chunks, and small ones, in random order."""

import math

import numpy as np
import pytest

from assay.harness.batches import Batch, log_uniform, uneven_batch


def batch(seed: int, *, requests: int = 6, longest: int = 200, most_queries: int = 33, chunk: int = 17) -> Batch:
    rng = np.random.default_rng(seed)
    return uneven_batch(rng, requests=requests, longest=longest, most_queries=most_queries, chunk=chunk)


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_has_every_kind_of_request(seed: int) -> None:
    drawn = batch(seed)
    pairs = list(zip(drawn.query_lens, drawn.context_lens, strict=True))
    assert len(pairs) == 6
    assert all(1 <= queries <= min(33, context) for queries, context in pairs)
    assert max(drawn.context_lens) == 200
    assert any(queries == context for queries, context in pairs)
    assert any(context > queries and (context - queries) % 17 == 0 for queries, context in pairs)


def test_the_giant_is_not_always_in_the_same_place() -> None:
    places = {batch(seed).context_lens.index(200) for seed in range(20)}
    assert len(places) > 3


def test_chunks_longer_than_the_giant_leave_no_whole_history() -> None:
    drawn = batch(0, longest=20, chunk=4096)
    assert len(drawn.query_lens) == 6
    assert max(drawn.context_lens) == 20


def test_one_request_is_the_giant() -> None:
    drawn = batch(3, requests=1)
    assert drawn.context_lens == [200]


def test_one_token_is_the_shortest_batch() -> None:
    assert batch(0, requests=2, longest=1) == Batch(query_lens=[1, 1], context_lens=[1, 1])


def test_a_seed_repeats_its_batch_and_seeds_differ() -> None:
    assert batch(5) == batch(5)
    assert batch(5) != batch(6)


def test_small_numbers_are_as_likely_as_large_ones() -> None:
    rng = np.random.default_rng(0)
    drawn = [log_uniform(rng, 1, 1023) for _ in range(4000)]
    assert min(drawn) == 1
    assert max(drawn) <= 1023
    # half of them lie below the geometric middle
    assert sum(number < math.sqrt(1024) for number in drawn) == pytest.approx(2000, abs=150)


def test_both_ends_are_drawn() -> None:
    rng = np.random.default_rng(1)
    assert {log_uniform(rng, 3, 5) for _ in range(200)} == {3, 4, 5}
    assert log_uniform(rng, 4, 4) == 4
