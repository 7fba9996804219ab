"""The oracles of token selection against loops in Python floats, torch's own pooling, and choices made by hand."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from assay.reference.token_selection import (
    accumulate_h2o,
    accumulate_max,
    accumulate_weighted,
    compact_scores,
    h2o_scores,
    kvpress_budgets,
    kvpress_snapkv_scores,
    observation_weights,
    observed_attention_scores,
    pool_scores,
    snapkv_scores,
    sparse_vllm_h2o_step,
    sparse_vllm_snapkv_scores,
    token_selection,
    tova_scores,
)

INF = math.inf
HEADS, KV_HEADS, WINDOW, KEYS, WIDTH = 4, 2, 3, 11, 5


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()


def looped_weights(q: Any, k: Any, scale: float) -> list[list[list[float]]]:
    """``[H][w][S]`` by one logit at a time."""
    group = len(q[0]) // len(k[0])
    weights: list[list[list[float]]] = []
    for head in range(len(q[0])):
        weights.append([])
        for t, query in enumerate(q):
            seen = range(len(k) - len(q) + t + 1)
            logits = [scale * sum(a * b for a, b in zip(query[head], k[s][head // group], strict=True)) for s in seen]
            total = sum(math.exp(z) for z in logits)
            row = [math.exp(z) / total for z in logits]
            weights[-1].append(row + [0.0] * (len(k) - len(row)))
    return weights


def looped_pool(row: list[float], size: int, pooling: str) -> list[float]:
    answer = []
    for at in range(len(row)):
        near = [row[i] for i in range(at - size // 2, at + size // 2 + 1) if 0 <= i < len(row)]
        answer.append(sum(near) / size if pooling == "avg" else max(near))
    return answer


def close(tensor: Tensor, expected: Any) -> None:
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.fixture
def weights() -> Tensor:
    return observation_weights(normal(WINDOW, HEADS, WIDTH), normal(KEYS, KV_HEADS, WIDTH, seed=1), softmax_scale=0.7)


def test_the_weights_are_those_of_loops_over_all_keys_that_a_query_sees(weights: Tensor) -> None:
    q, k = normal(WINDOW, HEADS, WIDTH), normal(KEYS, KV_HEADS, WIDTH, seed=1)
    close(weights, looped_weights(q.tolist(), k.tolist(), 0.7))
    # a query's own token is the last that it sees
    assert (weights > 0).sum(-1).tolist() == [[9, 10, 11]] * HEADS


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("size", [1, 3, 5, 21])
def test_pooling_is_that_of_a_loop(size: int, pooling: str) -> None:
    scores = normal(3, 8)
    close(
        pool_scores(scores, kernel_size=size, pooling=pooling),
        [looped_pool(row, size, pooling) for row in scores.tolist()],
    )
    assert pool_scores(scores[:, :0], kernel_size=size, pooling=pooling).shape == (3, 0)


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_snapkv_sums_over_its_queries_in_each_query_head(weights: Tensor, pooling: str) -> None:
    rows = [[sum(column) for column in zip(*head, strict=True)][: KEYS - WINDOW] for head in weights.tolist()]
    close(snapkv_scores(weights, pooling=pooling), [looped_pool(row, 5, pooling) for row in rows])


def test_kvpress_averages_queries_then_pools_then_averages_the_group(weights: Tensor) -> None:
    rows = [[sum(column) / WINDOW for column in zip(*head, strict=True)][: KEYS - WINDOW] for head in weights.tolist()]
    pooled = [looped_pool(row, 3, "avg") for row in rows]
    groups = [[(a + b) / 2 for a, b in zip(pooled[2 * i], pooled[2 * i + 1], strict=True)] for i in range(KV_HEADS)]
    close(kvpress_snapkv_scores(weights, num_kv_heads=KV_HEADS, kernel_size=3), groups)


def test_h2o_sums_over_queries_and_batch_and_over_its_steps() -> None:
    # a prompt of four tokens, then two steps of one
    q, k = normal(6, HEADS, WIDTH), normal(6, KV_HEADS, WIDTH, seed=1)
    steps = [(slice(0, 4), 4), (slice(4, 5), 5), (slice(5, 6), 6)]
    parts = [observation_weights(q[queries], k[:keys], softmax_scale=1.0) for queries, keys in steps]
    total = h2o_scores(parts[0][None])
    for part in parts[1:]:
        total = accumulate_h2o(total, h2o_scores(part[None]))
    whole = observation_weights(q, k, softmax_scale=1.0)
    close(total, [[sum(column) for column in zip(*head, strict=True)] for head in whole.tolist()])
    torch.testing.assert_close(h2o_scores(torch.stack([whole, whole])), 2 * total, rtol=1e-12, atol=0)


def test_observed_attention_divides_by_the_queries_that_see_a_key() -> None:
    whole = observation_weights(normal(7, HEADS, WIDTH), normal(7, KV_HEADS, WIDTH, seed=1), softmax_scale=1.0)
    per_head = [
        [sum(head[t][s] for t in range(s, 7)) / (7 - s) for s in range(7)]  # keys are seen from their own token on
        for head in whole.tolist()
    ]
    groups = [[(a + b) / 2 for a, b in zip(per_head[2 * i], per_head[2 * i + 1], strict=True)] for i in range(KV_HEADS)]
    close(observed_attention_scores(whole, num_kv_heads=KV_HEADS), groups)


def test_observed_attention_of_a_window_has_no_more_observers_than_queries(weights: Tensor) -> None:
    observers = [3.0] * 9 + [2.0, 1.0]
    per_head = [[sum(column) for column in zip(*head, strict=True)] for head in weights.tolist()]
    rows = [[total / n for total, n in zip(row, observers, strict=True)] for row in per_head]
    groups = [[(a + b) / 2 for a, b in zip(rows[2 * i], rows[2 * i + 1], strict=True)] for i in range(KV_HEADS)]
    close(observed_attention_scores(weights, num_kv_heads=KV_HEADS), groups)


def test_tova_looks_at_the_last_query_alone(weights: Tensor) -> None:
    last = [head[-1] for head in weights.tolist()]
    close(tova_scores(weights), [sum(column) / HEADS for column in zip(*last, strict=True)])


def test_sparse_vllm_pools_among_the_candidates_alone() -> None:
    scores = torch.tensor([[9.0, 1.0, 5.0, 2.0, 8.0, 7.0], [9.0, 3.0, 9.0, 9.0, 9.0, 9.0]]).double()
    pooled = sparse_vllm_snapkv_scores(scores, torch.tensor([6, 3]), sink=1, recent=2, kernel_size=3)
    assert pooled.tolist() == [[-INF, 5.0, 5.0, 5.0, -INF, -INF], [-INF] * 6]


def test_sparse_vllm_h2o_turns_raw_logits_into_weights_of_a_request() -> None:
    rows = [[0.0, math.log(3.0), -INF, 50.0], [1.0, 50.0, 50.0, 50.0]]
    scores = torch.tensor(rows, dtype=torch.float64)
    close(sparse_vllm_h2o_step(scores, torch.tensor([3, 1]), mode="logits"), [[0.25, 0.75, 0, 0], [1.0, 0, 0, 0]])
    same = sparse_vllm_h2o_step(scores.exp(), torch.tensor([2, 1]), mode="probability")
    close(same, [[1.0, 3.0, 0, 0], [math.e, 0, 0, 0]])


def test_steps_are_joined_by_maximum_or_by_the_queries_observed() -> None:
    total, step = torch.tensor([[1.0, -INF], [2.0, 3.0]]), torch.tensor([[0.5, 4.0], [-INF, 3.5]])
    assert accumulate_max(total, step).tolist() == [[1.0, 4.0], [2.0, 3.5]]
    weighted = accumulate_weighted(torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.ones(2, 2), torch.tensor([8, 0]))
    assert weighted.tolist() == [[9.0, 8.0], [2.0, 3.0]]


def test_kvpress_keeps_at_least_one_token() -> None:
    budgets = kvpress_budgets(torch.tensor([1, 2, 5, 10]), compression_ratio=0.6)
    assert budgets.tolist() == [1, 1, 2, 4]
    assert kvpress_budgets(torch.tensor([7]), compression_ratio=0.0).tolist() == [7]


def test_scores_are_compacted_to_what_was_kept() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert compact_scores(scores, torch.tensor([[0, 2, -1], [1, -1, -1]])).tolist() == [
        [1.0, 3.0, 0.0],
        [5.0, 0.0, 0.0],
    ]


def test_a_choice_made_by_hand() -> None:
    # the best candidates are 9 and 5 (of the equal ones the earlier); 1, 2 and 10, 11 stay whatever they score
    scores = torch.tensor([[99.0, 0.0, 1.0, 2.0, 0.0, 7.0, 7.0, 6.0, 1.0, 8.0, 0.0, 0.0]])
    kept = token_selection(scores, context_lens=torch.tensor([12]), budgets=torch.tensor([6]), sink=2, recent=2)
    assert kept.tolist() == [[0, 1, 5, 9, 10, 11]]
    assert kept.dtype == torch.int32


def test_short_requests_keep_everything_and_each_has_its_own_budget() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    contexts, budgets = torch.tensor([3, 4, 0]), torch.tensor([3, 2, 5])
    kept = token_selection(scores, context_lens=contexts, budgets=budgets, recent=1)
    assert kept.tolist() == [[0, 1, 2, -1, -1], [1, 3, -1, -1, -1], [-1, -1, -1, -1, -1]]


def test_protected_neighbours_do_not_lend_their_score() -> None:
    # with a kernel of 3 a sink of 100 would lift token 1, a recent one token 5
    scores = torch.tensor([[100.0, 0.0, 0.0, 1.0, 0.0, 0.0, 100.0]])
    kept = token_selection(
        scores,
        context_lens=torch.tensor([7]),
        budgets=torch.tensor([5]),
        sink=1,
        recent=1,
        kernel_size=3,
        pooling="max",
    )
    assert kept.tolist() == [[0, 2, 3, 4, 6]]


def test_the_window_wins_against_any_score() -> None:
    kept = token_selection(torch.ones(1, 8), context_lens=torch.tensor([8]), budgets=torch.tensor([4]), recent=2)
    assert kept.tolist() == [[0, 1, 6, 7]]


def test_snapkv_keeps_what_a_loop_over_the_method_keeps(weights: Tensor) -> None:
    budget = 6
    scores = snapkv_scores(weights, kernel_size=3)
    kept = token_selection(
        scores,
        context_lens=torch.full((HEADS,), KEYS),
        budgets=torch.full((HEADS,), budget),
        recent=WINDOW,
    )
    for row, head in zip(kept.tolist(), scores.tolist(), strict=True):
        best = sorted(zip(head, range(KEYS - WINDOW), strict=True), reverse=True)[: budget - WINDOW]
        assert row == [*sorted(token for _, token in best), 8, 9, 10]


@given(
    contexts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    sink=st.integers(0, 4),
    recent=st.integers(0, 4),
    extra=st.integers(0, 6),
    kernel_size=st.sampled_from([1, 3, 5]),
    pooling=st.sampled_from(["avg", "max"]),
    seed=st.integers(0, 2**20),
)
def test_a_choice_has_the_size_of_the_budget_the_protected_tokens_and_nothing_better_is_left(
    contexts: list[int], sink: int, recent: int, extra: int, kernel_size: int, pooling: str, seed: int
) -> None:
    rng = random.Random(seed)
    # few values, so that ties are common; -inf as in scores of logits
    values = [0.0, 1.0, 2.0, 3.0] if pooling == "avg" else [-INF, 0.0, 1.0, 2.0]
    scores = torch.tensor([[rng.choice(values) for _ in range(12)] for _ in contexts]).double()
    budget = sink + recent + extra
    kept = token_selection(
        scores,
        context_lens=torch.tensor(contexts),
        budgets=torch.full((len(contexts),), budget),
        sink=sink,
        recent=recent,
        kernel_size=kernel_size,
        pooling=pooling,
    ).tolist()
    for context, row, own in zip(contexts, kept, scores.tolist(), strict=True):
        chosen = [token for token in row if token >= 0]
        assert row == chosen + [-1] * (budget - len(chosen))
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(budget, context)
        protected = {*range(min(sink, context)), *range(max(context - recent, 0), context)}
        assert protected <= set(chosen) <= set(range(context))
        if context <= budget:
            continue
        pooled = looped_pool(own[sink : context - recent], kernel_size, pooling)
        between = range(sink, context - recent)
        for taken, left in itertools.product(between, between):
            if taken in chosen and left not in chosen:
                assert (pooled[taken - sink], -taken) > (pooled[left - sink], -left)
