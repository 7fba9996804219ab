"""The oracle of token scores against loops in Python floats, the absorbed form, closed forms and a split window."""

import math
from typing import Any

import pytest
import torch
from builders import arguments_of, in_dtype
from score_inputs import CONTEXTS, INF, REQUESTS, WINDOW, request_of, score_case
from torch import Tensor

from assay.reference.token_scores import IDENTITIES, eligible_logits, mean_probability, token_scores

MODES = ("logits", "probability")
CASES = {"rope": score_case(seed=1), "no rope": score_case(seed=2, d_rope=0), "one head": score_case(num_heads=1)}


def inputs(name: str = "rope") -> dict[str, Any]:
    given = in_dtype(arguments_of(CASES[name]), torch.float64)
    del given["history_chunk_size"]
    return given


def looped(given: dict[str, Any], mode: str, request: dict[str, Any]) -> list[list[float]]:
    """One observed query, head and token at a time, with keys absorbed into the query."""
    q, kv_c, k_pe, weights = (given[name].tolist() for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
    starts, table, rows, contexts = (
        given[name].tolist() for name in ("cu_seqlens", "slot_table", "request_rows", "context_lens")
    )
    d_nope = given["q"].shape[2] - given["k_pe"].shape[1]
    answer = []
    for index, context in enumerate(contexts):
        row = [IDENTITIES[mode]] * len(table[0])
        answer.append(row)
        start, stop = request["query_ranges"][index].tolist()
        first, end = request.get("candidate_start", 0), context - request.get("recent_keep_tokens", 0)
        if "candidate_ranges" in request:
            first, end = request["candidate_ranges"][index].tolist()
        per_head: list[list[float]] = [[0.0] * len(row) for _ in weights]
        for position in range(start, stop):
            query = q[starts[index + 1] - context + position]
            for head, up in enumerate(weights):
                pairs = zip(*up[:d_nope], strict=True)
                absorbed = [sum(w * x for w, x in zip(column, query[head][:d_nope], strict=True)) for column in pairs]
                logits = {}
                for token in range(max(first, 0), min(end, position + 1)):
                    slot = table[rows[index]][token]
                    latent = sum(a * b for a, b in zip(absorbed, kv_c[slot], strict=True))
                    rope = sum(a * b for a, b in zip(query[head][d_nope:], k_pe[slot], strict=True))
                    logits[token] = latent + rope
                if mode == "logits":
                    for token, logit in logits.items():
                        row[token] = max(row[token], logit)
                    continue
                exponentials = {token: math.exp(given["softmax_scale"] * z) for token, z in logits.items()}
                for token, value in exponentials.items():
                    per_head[head][token] += value / sum(exponentials.values())
        if mode == "probability" and stop > start:
            answer[-1] = [max(column) / (stop - start) for column in zip(*per_head, strict=True)]
    return answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("name", CASES)
def test_loops_over_plain_floats_give_the_same(name: str, request_name: str, mode: str) -> None:
    given, request = inputs(name), request_of(request_name)
    scores = token_scores(**given, mode=mode, **request)
    expected = torch.tensor(looped(given, mode, request), dtype=torch.float64)
    assert torch.equal(scores == -INF, expected == -INF)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-13)
    if request_name != "no candidates":
        assert bool((scores != IDENTITIES[mode]).any())


def test_zero_queries_spread_their_weight_evenly() -> None:
    given = inputs()
    given["q"].zero_()
    request: dict[str, Any] = {"query_ranges": torch.tensor([[57, 60], [0, 0], [0, 0], [0, 0]]), "candidate_start": 10}
    scores = token_scores(**given, mode="probability", **request)
    # the queries at 57, 58 and 59 see 48, 49 and 50 candidates
    early = (1 / 48 + 1 / 49 + 1 / 50) / 3
    assert scores[0, 10:58].tolist() == pytest.approx([early] * 48, rel=1e-14)
    assert scores[0, 58:60].tolist() == pytest.approx([(1 / 49 + 1 / 50) / 3, 1 / 50 / 3], rel=1e-14)
    assert not scores[0, :10].any()
    assert torch.equal(token_scores(**given, mode="logits", **request)[0, 10:60], torch.zeros(50).double())


def test_the_mean_over_queries_comes_before_the_maximum_over_heads() -> None:
    # two queries and heads; token 0 has weight 1 in head 0 for query 0, in head 1 for query 1
    big = 1000.0
    logits = torch.tensor([[[big, 0.0], [0.0, big]], [[0.0, big], [big, 0.0]]]).double()
    assert mean_probability(logits).tolist() == [0.5, 0.5]


def test_a_query_without_candidates_counts_in_the_mean() -> None:
    logits = torch.tensor([[[-INF, -INF]], [[0.0, 0.0]]]).double()
    assert mean_probability(logits).tolist() == [0.25, 0.25]


def test_probabilities_of_one_query_and_head_sum_to_one_over_the_candidates() -> None:
    given = inputs("one head")
    request: dict[str, Any] = {"query_ranges": torch.tensor([[59, 60], [4, 5], [22, 23], [0, 1]]), "candidate_start": 0}
    for start in (0, 3):
        scores = token_scores(**given, mode="probability", **request | {"candidate_start": start})
        sums = [1.0] * 4 if start == 0 else [1.0, 1.0, 1.0, 0.0]
        assert scores.sum(1).tolist() == pytest.approx(sums, rel=1e-12)


@pytest.mark.parametrize("split", [53, 55, 59])
def test_logits_of_a_window_are_the_maximum_over_its_parts(split: int) -> None:
    given = inputs()
    rest = torch.zeros(3, 2, dtype=torch.long)

    def scored(start: int, stop: int) -> Tensor:
        return token_scores(**given, mode="logits", query_ranges=torch.cat([torch.tensor([[start, stop]]), rest]))

    parts = torch.maximum(scored(51, split), scored(split, 60))
    torch.testing.assert_close(scored(51, 60), parts, rtol=1e-13, atol=1e-13)


def test_the_queries_of_a_window_need_not_be_the_current_tokens_of_one_step() -> None:
    given = inputs()
    whole = token_scores(**given, mode="probability", query_ranges=WINDOW)
    # only the observed queries are packed, as the caller kept them from two steps
    kept = given | {
        "q": torch.cat([given["q"][5:9], given["q"][9:16]]),
        "cu_seqlens": torch.tensor([0, 4, 9, 10, 11]),
    }
    assert torch.equal(token_scores(**kept, mode="probability", query_ranges=WINDOW), whole)


def test_later_tokens_and_foreign_slots_change_nothing() -> None:
    given, request = inputs(), request_of("middle")
    for mode in MODES:
        before = token_scores(**given, mode=mode, **request)
        changed: dict[str, Any] = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()
        }
        row = changed["slot_table"][changed["request_rows"][0]].long()
        # the window ends at position 56
        changed["kv_c"][row[57:60]] += 1.0
        owned = torch.zeros(len(given["kv_c"]), dtype=torch.bool)
        owned[given["slot_table"][given["slot_table"] >= 0].long()] = True
        changed["kv_c"][~owned] = 1e30
        assert torch.equal(token_scores(**changed, mode=mode, **request), before)


def test_a_nan_is_seen_where_a_query_may_look_and_nowhere_else() -> None:
    given = inputs()
    row = given["slot_table"][given["request_rows"][0]].long()
    given["kv_c"][row[20]] = torch.nan
    logits = token_scores(**given, mode="logits", query_ranges=WINDOW)
    assert logits.isnan().nonzero().tolist() == [[0, 20]]
    probability = token_scores(**given, mode="probability", query_ranges=WINDOW)
    assert probability.isnan().sum(1).tolist() == [60, 0, 0, 0]
    assert not token_scores(**given, mode="probability", query_ranges=WINDOW, candidate_start=21).isnan().any()


@pytest.mark.parametrize("mode", MODES)
def test_requests_are_scored_alone(mode: str) -> None:
    given = inputs()
    whole = token_scores(**given, mode=mode, query_ranges=WINDOW)
    starts = given["cu_seqlens"].tolist()
    for index, context in enumerate(CONTEXTS):
        alone = given | {
            "q": given["q"][starts[index] : starts[index + 1]],
            "cu_seqlens": torch.tensor([0, starts[index + 1] - starts[index]]),
            "request_rows": given["request_rows"][index : index + 1],
            "context_lens": torch.tensor([context]),
        }
        assert torch.equal(token_scores(**alone, mode=mode, query_ranges=WINDOW[index : index + 1])[0], whole[index])


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_belongs_to_the_softmax_alone(mode: str) -> None:
    given = inputs()
    changed = token_scores(**given | {"softmax_scale": 0.9}, mode=mode, query_ranges=WINDOW)
    same = torch.equal(changed, token_scores(**given, mode=mode, query_ranges=WINDOW))
    assert same == (mode == "logits")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_of_the_inputs_is_kept(mode: str, dtype: torch.dtype) -> None:
    given = in_dtype(inputs(), dtype)
    scores = token_scores(**given, mode=mode, query_ranges=WINDOW)
    assert scores.dtype == dtype
    assert scores.shape == (4, given["slot_table"].shape[1])


def test_gradients_are_those_of_finite_differences() -> None:
    given = inputs("one head")
    leaf = given.pop("q").requires_grad_()

    def run(q: Tensor) -> Tensor:
        return token_scores(q, **given, mode="probability", query_ranges=WINDOW, candidate_start=1)

    assert torch.autograd.gradcheck(run, (leaf,))


def test_eligibility_is_both_the_candidates_and_the_past() -> None:
    q, k = torch.ones(2, 1, 1), torch.ones(6, 1, 1)
    reach = eligible_logits(q, k, torch.tensor([2, 4]), (1, 4), softmax_scale=2.0)[:, 0]
    assert reach.tolist() == [[-INF, 2.0, 2.0, -INF, -INF, -INF], [-INF, 2.0, 2.0, 2.0, -INF, -INF]]
