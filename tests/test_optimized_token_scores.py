"""Token scores, alone and fused: within the derived bounds, the same bits on every way, and nothing else disturbed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import arguments_of, forward, in_dtype
from score_inputs import (
    CONTEXTS,
    QUERIES,
    REQUESTS,
    WINDOW,
    alone,
    check,
    fused,
    oracle_scores,
    plans,
    request_of,
    score_case,
)
from torch import Tensor

MODES = ("logits", "probability")
IMPLEMENTATIONS = ("torch", "triton")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_torch_twin_is_within_its_bounds_alone_and_fused(name: str, mode: str, dtype: str) -> None:
    case, request = score_case(dtype=dtype, seed=3), request_of(name)
    given = arguments_of(case)
    plan, score_plan = plans(case, given, mode, request)
    out, lse, scores = fused(given, plan, score_plan)
    check(scores, given, mode, request)
    full = mode == "probability" and score_plan.full
    assert torch.equal(alone(given, score_plan, lse=lse if full else None), scores)
    if full:
        # without the log-sum-exp of attention the denominators are scanned
        check(alone(given, score_plan), given, mode, request)
    plain, plain_lse = forward(given, plan)
    assert plain_lse is not None
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["full", "some unobserved", "sink and recent", "no candidates"])
def test_the_kernels_are_within_their_bounds_alone_and_fused(name: str, mode: str, dtype: str) -> None:
    case, request = score_case(dtype=dtype, seed=4), request_of(name)
    given = arguments_of(case)
    plan, score_plan = plans(case, given, mode, request, implementation="triton")
    out, lse, scores = fused(given, plan, score_plan)
    check(scores, given, mode, request)
    full = mode == "probability" and score_plan.full
    assert torch.equal(alone(given, score_plan, lse=lse if full else None), scores)
    if full:
        check(alone(given, score_plan), given, mode, request)
    assert torch.equal(out, forward(given, plan)[0])


LONG = {"query_lens": [70, 3], "context_lens": [150, 90], "num_heads": 2, "history_chunk_size": 37}
LONG_WINDOW = torch.tensor([[85, 150], [87, 89]])


ODD = {"d_nope": 20, "d_rope": 20, "kv_lora_rank": 24}


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    [({}, "torch"), (ODD, "torch"), (ODD, "triton"), ({"d_rope": 0}, "torch"), ({"d_rope": 0}, "triton")],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_long_windows_take_several_tiles_of_queries_and_keys(
    sizes: dict[str, int], mode: str, implementation: str
) -> None:
    case = score_case(dtype="float16", seed=5, **LONG | sizes)
    given, request = arguments_of(case), {"query_ranges": LONG_WINDOW, "candidate_start": 2}
    plan, score_plan = plans(case, given, mode, request, implementation=implementation)
    scores = fused(given, plan, score_plan)[2]
    check(scores, given, mode, request)
    assert torch.equal(alone(given, score_plan), scores)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 16, 59, 64, 4096])
def test_the_chunk_size_moves_no_score_past_its_bound(chunk: int, mode: str) -> None:
    case = score_case(dtype="float32", seed=6)
    given = arguments_of(case)
    for request in (request_of("all queries"), request_of("sink and recent")):
        plan, score_plan = plans(case, given, mode, request, history_chunk_size=chunk)
        check(fused(given, plan, score_plan)[2], given, mode, request)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_is_seen_where_a_query_may_look_and_nowhere_else(implementation: str) -> None:
    case = score_case(dtype="float32")
    given = arguments_of(case)
    row = given["slot_table"][given["request_rows"][0]].long()
    given["kv_c"][row[20]] = torch.nan
    # the first query of another request is a NaN, and not observed
    given["q"][9] = torch.nan
    request = {"query_ranges": torch.tensor([[56, 60], [1, 5], [22, 23], [0, 1]])}
    _, logits = plans(case, given, "logits", request, implementation=implementation)
    assert alone(given, logits).isnan().nonzero().tolist() == [[0, 20]]
    _, probability = plans(case, given, "probability", request, implementation=implementation)
    assert alone(given, probability).isnan().sum(1).tolist() == [60, 0, 0, 0]
    _, later = plans(case, given, "probability", request | {"candidate_start": 21}, implementation=implementation)
    assert not alone(given, later).isnan().any()


@pytest.mark.parametrize("mode", MODES)
def test_float64_is_served_by_torch(mode: str) -> None:
    case = score_case()
    given = in_dtype(arguments_of(case), torch.float64)
    for name in ("full", "sink and recent"):
        plan, score_plan = plans(case, given, mode, request_of(name), implementation="auto")
        assert score_plan.choice == "auto took torch"
        torch.testing.assert_close(
            fused(given, plan, score_plan)[2], oracle_scores(given, mode, request_of(name)), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_scale_is_served(implementation: str, scale: float) -> None:
    case = score_case()
    given = arguments_of(case) | {"softmax_scale": scale}
    for name in ("full", "sink"):
        plan, score_plan = plans(case, given, "probability", request_of(name), implementation=implementation)
        check(fused(given, plan, score_plan)[2], given, "probability", request_of(name))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_far_from_zero_neither_overflow_nor_vanish(implementation: str) -> None:
    case = score_case(seed=8)
    given = arguments_of(case)
    given["q"] = given["q"] * 60.0
    for name in ("full", "sink"):
        plan, score_plan = plans(case, given, "probability", request_of(name), implementation=implementation)
        check(fused(given, plan, score_plan)[2], given, "probability", request_of(name))


def wrong_answers(given: dict[str, Any]) -> dict[str, Tensor]:
    """What plausible mistakes would answer to probabilities of all queries, the first four tokens excluded."""
    request = request_of("all queries") | {"candidate_start": 4}
    good = oracle_scores(given, "probability", request)
    full = oracle_scores(given, "probability", request_of("all queries"))
    full[:, :4] = 0.0
    swapped = good.clone()
    per_query = [
        oracle_scores(given, "probability", request | {"query_ranges": torch.tensor([[at, at + 1]] + [[0, 0]] * 3)})[0]
        for at in range(51, 60)
    ]
    swapped[0] = torch.stack(per_query).mean(0)
    # of the five queries of the second request one may look at a candidate
    valid_only = good.clone()
    valid_only[1] *= 5.0
    return {"full denominator": full, "mean of maxima": swapped, "valid rows only": valid_only}


@pytest.mark.parametrize("which", ["full denominator", "mean of maxima", "valid rows only"])
def test_the_bounds_see_what_is_wrong(which: str) -> None:
    given = arguments_of(score_case(dtype="bfloat16", seed=3))
    wrong = wrong_answers(given)[which].float()
    with pytest.raises(AssertionError, match="of the bound"):
        check(wrong, given, "probability", request_of("all queries") | {"candidate_start": 4})


@pytest.mark.parametrize("mode", MODES)
def test_a_smaller_tile_gives_the_same_maximum_and_stays_within_bounds(mode: str) -> None:
    host = pytest.importorskip("assay.optimized._token_scores_triton")
    case = score_case(dtype="float16", seed=5, **LONG)
    given, request = arguments_of(case), {"query_ranges": LONG_WINDOW, "candidate_start": 2}
    _, score_plan = plans(case, given, mode, request, implementation="triton")
    small = host.Tile(16, 16, 1, 4)
    tiles = host.Tiles(logits=small, denominator=small, probability=small)
    tables: list[Any] = [part.prepared for part in score_plan.passes]
    passes = tuple(
        replace(part, prepared=replace(table, tiles=tiles)) if part.spans else part
        for part, table in zip(score_plan.passes, tables, strict=True)
    )
    scores = alone(given, replace(score_plan, passes=passes))
    check(scores, given, mode, request)


def test_a_request_of_each_kind_is_in_the_cases() -> None:
    assert len(QUERIES) == len(CONTEXTS) == len(WINDOW)
    assert [context - count for count, context in zip(QUERIES, CONTEXTS, strict=True)] == [51, 0, 22, 0]
