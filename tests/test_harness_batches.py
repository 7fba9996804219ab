"""Batches are uneven: a giant, a fresh request, a history of whole chunks, and small ones, in random order."""

import math

import numpy as np
import pytest

from assay.harness.batches import (
    MANY,
    TILES,
    Batch,
    at_edge,
    crowd,
    decode_batch,
    draw_scale,
    edge_batch,
    log_uniform,
    uneven_batch,
)


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


@pytest.mark.parametrize("seed", range(5))
def test_a_decoding_batch_has_one_query_each_and_contexts_of_every_size(seed: int) -> None:
    drawn = decode_batch(np.random.default_rng(seed), requests=40, longest=5000)
    assert drawn.query_lens == [1] * 40
    assert max(drawn.context_lens) == 5000
    assert min(drawn.context_lens) >= 1
    # a log-uniform draw, not one close below the longest
    assert sum(context < 70 for context in drawn.context_lens) >= 10


def test_a_crowd_is_of_requests_of_next_to_nothing() -> None:
    batch = crowd(MANY)
    pairs = list(zip(batch.query_lens, batch.context_lens, strict=True))
    assert len(pairs) == 35
    assert all(0 <= n <= 2 and n <= m <= 9 for n, m in pairs)
    assert batch.query_lens.count(0) == 7
    # hardly any is like another
    assert len(set(pairs)) > 12
    assert min(batch.query_lens[16:18]) > 0


def test_lengths_lie_at_tile_edges_and_beside_them() -> None:
    rng = np.random.default_rng(0)
    around = {1, *(tile + off for tile in TILES for off in (-1, 0, 1))}
    drawn = edge_batch(rng, requests=600, most_queries=129, longest=129)
    pairs = list(zip(drawn.query_lens, drawn.context_lens, strict=True))
    assert {context for _, context in pairs} == around
    assert {queries for queries, _ in pairs} == around
    assert all(queries <= context for queries, context in pairs)
    # each is drawn for itself, so that most pairs occur
    assert len(set(pairs)) > 60
    assert {at_edge(rng, 16) for _ in range(60)} == {1, 15, 16}
    assert at_edge(rng, 1) == 1


@pytest.mark.parametrize("width", [8, 24, 192, 512])
def test_scales_are_drawn_around_the_usual_one_and_above_1_but_at_neither(width: int) -> None:
    rng, usual = np.random.default_rng(3), width**-0.5
    drawn = [draw_scale(rng, width) for _ in range(400)]
    for special in (usual, 1.0):
        assert min(abs(math.log(scale / special)) for scale in drawn) > math.log(1.2)
    assert min(drawn) < 0.4 * usual
    assert max(drawn) > 2.5
    assert 60 <= sum(scale > 1 for scale in drawn) <= 200
    assert all(float(f"{scale:.4g}") == scale for scale in drawn)
