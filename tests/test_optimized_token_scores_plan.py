"""What token scores refuse, by name and with every buffer as it was, and what their plan lays out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import MLA_TENSORS, arguments_of, forward, planned
from score_inputs import CONTEXTS, QUERIES, WINDOW, fused, plans, request_of, score_case
from torch import Tensor

from assay.optimized import _token_scores_plan as module
from assay.optimized.mla_prefill import mla_prefill
from assay.optimized.token_scores import observation_ranges, plan_token_scores, token_scores

CASE = score_case(dtype="float32", seed=2)


def ranges(request: int, start: int, stop: int) -> Tensor:
    changed = WINDOW.clone()
    changed[request] = torch.tensor([start, stop])
    return changed


# the requests have 9 of 60, 5 of 5, 1 of 23 and 1 of 1 tokens
BAD_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "history": (
        {"query_ranges": ranges(0, 50, 60)},
        ValueError,
        r"current tokens 51 .. 59, got \(50, 60\) at request 0",
    ),
    "past the context": ({"query_ranges": ranges(0, 58, 61)}, ValueError, r"got \(58, 61\) at request 0"),
    "reversed": ({"query_ranges": ranges(1, 4, 2)}, ValueError, r"got \(4, 2\) at request 1"),
    "empty elsewhere": ({"query_ranges": ranges(0, 55, 55)}, ValueError, r"got \(55, 55\) at request 0"),
    "longer than the prompt": ({"query_ranges": ranges(3, -31, 1)}, ValueError, r"got \(-31, 1\) at request 3"),
    "few ranges": ({"query_ranges": WINDOW[:3]}, ValueError, r"query_ranges must have shape \(4, 2\), got \(3, 2\)"),
    "flat ranges": ({"query_ranges": WINDOW[:, 0]}, ValueError, r"query_ranges must have shape \(4, 2\), got \(4,\)"),
    "float ranges": ({"query_ranges": WINDOW.float()}, TypeError, "query_ranges must be int32 or int64, got"),
    "mode": ({"mode": "softmax"}, ValueError, "mode must be one of logits, probability, got 'softmax'"),
    "start": ({"candidate_start": -1}, ValueError, "candidate_start must be at least 0, got -1"),
    "start 1.5": ({"candidate_start": 1.5}, TypeError, "candidate_start must be an int, got float 1.5"),
    "recent": ({"recent_keep_tokens": -2}, ValueError, "recent_keep_tokens must be at least 0, got -2"),
    "recent True": ({"recent_keep_tokens": True}, TypeError, "recent_keep_tokens must be an int, got bool"),
    "candidates reversed": ({"candidate_ranges": ranges(0, 40, 30)}, ValueError, r"got \(40, 30\) at request 0"),
    "candidates past": ({"candidate_ranges": ranges(2, 0, 24)}, ValueError, r"within the 23 tokens .*got \(0, 24\)"),
    "candidates before": ({"candidate_ranges": ranges(2, -1, 4)}, ValueError, r"got \(-1, 4\) at request 2"),
    "candidates twice": (
        {"candidate_ranges": WINDOW, "candidate_start": 1},
        ValueError,
        "candidate_ranges must come without candidate_start and recent_keep_tokens, got 1 and 0",
    ),
    "few candidates": ({"candidate_ranges": WINDOW[:1]}, ValueError, "candidate_ranges must have shape"),
    "short candidates": ({"candidate_ranges": WINDOW.short()}, TypeError, "candidate_ranges must be int32 or int64"),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be 'auto' or one of torch, triton"),
}


@pytest.mark.parametrize("which", BAD_PLANS)
def test_a_plan_refuses_bad_values_by_name(which: str) -> None:
    changes, error, text = BAD_PLANS[which]
    given = arguments_of(CASE)
    options: dict[str, Any] = {"mode": "logits", "query_ranges": WINDOW.clone(), "implementation": "torch"} | changes
    before = {name: value.clone() for name, value in options.items() if isinstance(value, Tensor)}
    with pytest.raises(error, match=text):
        plan_token_scores(planned(CASE, given), **options)
    assert all(torch.equal(value, options[name]) for name, value in before.items())


def test_the_kernels_refuse_what_they_do_not_serve() -> None:
    given = arguments_of(CASE)
    wide = {name: given[name].double() for name in MLA_TENSORS}
    with pytest.raises(NotImplementedError, match="'triton' cannot score this step; float64 is not served"):
        plans(CASE, given | wide, "logits", request_of("full"), implementation="triton")
    half = {name: given[name].bfloat16() for name in MLA_TENSORS}
    with pytest.raises(NotImplementedError, match="bfloat16 is not served under TRITON_INTERPRET"):
        plans(CASE, given | half, "logits", request_of("full"), implementation="triton")
    assert plans(CASE, given, "logits", request_of("full"), implementation="auto")[1].choice == "auto took torch"


def test_a_machine_without_triton_has_a_torch_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton.language")

    given = arguments_of(CASE)
    monkeypatch.setattr(module, "find_implementation", missing)
    with pytest.raises(NotImplementedError, match=r"triton\.language is not installed"):
        plans(CASE, given, "logits", request_of("full"), implementation="triton")


BAD_TENSORS: dict[str, tuple[str, Callable[[Tensor], Tensor], type[Exception]]] = {
    "rows of scores": ("scores", lambda scores: scores[1:], ValueError),
    "width of scores": ("scores", lambda scores: scores[:, 1:], ValueError),
    "half scores": ("scores", lambda scores: scores.half(), TypeError),
    "double scores": ("scores", lambda scores: scores.double(), TypeError),
    "device of scores": ("scores", lambda scores: scores.to("meta"), ValueError),
    "one row for all": ("scores", lambda scores: scores[:1].expand(4, -1), ValueError),
    "rows of lse": ("lse", lambda lse: lse[1:], ValueError),
    "half lse": ("lse", lambda lse: lse.half(), TypeError),
    "device of lse": ("lse", lambda lse: lse.to("meta"), ValueError),
    "queries": ("q", lambda q: q[1:], ValueError),
    "half queries": ("q", lambda q: q.half(), TypeError),
    "cache": ("kv_c", lambda kv_c: kv_c[1:], ValueError),
}


@pytest.mark.parametrize("which", BAD_TENSORS)
def test_the_forward_refuses_tensors_that_were_not_planned_and_writes_nothing(which: str) -> None:
    name, change, error = BAD_TENSORS[which]
    given = arguments_of(CASE)
    plan, score_plan = plans(CASE, given, "probability", request_of("full"))
    lse = forward(given, plan)[1]
    assert lse is not None
    buffer = torch.full(score_plan.score_shape, 7.0)
    arguments = {name: given[name] for name in MLA_TENSORS} | {"lse": lse, "scores": buffer}
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"^{name} must "):
        token_scores(**arguments, softmax_scale=given["softmax_scale"], plan=score_plan)
    if name not in ("lse", "scores"):
        tensors = {name: arguments[name] for name in MLA_TENSORS}
        with pytest.raises(error, match=f"^{name} must "):
            fused(given | tensors, plan, score_plan, buffer)
    if name == "scores":
        with pytest.raises(error, match=r"^scores must "):
            fused(given, plan, score_plan, arguments["scores"])
    assert torch.equal(buffer, torch.full_like(buffer, 7.0))


@pytest.mark.parametrize(
    ("mode", "name"),
    [("logits", "full"), ("probability", "sink"), ("probability", "recent"), ("probability", "ranges")],
)
def test_the_log_sum_exp_of_attention_is_no_denominator_of_some_candidates(mode: str, name: str) -> None:
    given = arguments_of(CASE)
    plan, score_plan = plans(CASE, given, mode, request_of(name))
    tensors = [given[name] for name in MLA_TENSORS]
    with pytest.raises(ValueError, match="lse must be None unless"):
        token_scores(*tensors, softmax_scale=0.1, plan=score_plan, lse=forward(given, plan)[1])


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(scale: float) -> None:
    given = arguments_of(CASE)
    _, score_plan = plans(CASE, given, "probability", request_of("full"))
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        token_scores(*(given[name] for name in MLA_TENSORS), softmax_scale=scale, plan=score_plan)


def test_scores_and_their_plan_come_together_and_belong_to_the_step() -> None:
    given = arguments_of(CASE)
    plan, score_plan = plans(CASE, given, "logits", request_of("full"))
    tensors = [given[name] for name in MLA_TENSORS]
    scores = torch.full(score_plan.score_shape, 7.0)
    with pytest.raises(ValueError, match="must come together, got scores alone"):
        mla_prefill(*tensors, softmax_scale=0.1, plan=plan, scores=scores)
    with pytest.raises(ValueError, match="must come together, got score_plan alone"):
        mla_prefill(*tensors, softmax_scale=0.1, plan=plan, score_plan=score_plan)
    with pytest.raises(ValueError, match="score_plan must be made from plan"):
        fused(given, planned(CASE, given), score_plan, scores)
    assert torch.equal(scores, torch.full_like(scores, 7.0))


def test_only_a_plan_that_leaves_nobody_out_is_full() -> None:
    given = arguments_of(CASE)
    full = {name: plans(CASE, given, "probability", request_of(name))[1].full for name in ("full", "sink", "recent")}
    assert full == {"full": True, "sink": False, "recent": False}
    everything = torch.tensor([[0, context] for context in CONTEXTS])
    request = request_of("full") | {"candidate_ranges": everything}
    assert not plans(CASE, given, "probability", request)[1].full


def test_a_plan_keeps_its_own_ranges() -> None:
    given = arguments_of(CASE)
    for mode in ("logits", "probability"):
        request = request_of("ranges") | {"query_ranges": WINDOW.clone()}
        request["candidate_ranges"] = request["candidate_ranges"].clone()
        plan, score_plan = plans(CASE, given, mode, request)
        before = fused(given, plan, score_plan)[2]
        request["query_ranges"].zero_()
        request["candidate_ranges"].zero_()
        assert torch.equal(fused(given, plan, score_plan)[2], before)


def test_the_observed_rows_are_those_of_the_ranges() -> None:
    given = arguments_of(CASE)
    _, score_plan = plans(CASE, given, "probability", request_of("some unobserved"))
    # requests begin at rows 0, 9, 14 and 15; positions 1 .. 3 of the second and 22 of the third
    assert score_plan.observed_rows is not None
    assert score_plan.observed_rows.tolist() == [10, 11, 12, 14]
    spans = score_plan.passes[0].spans
    assert [(span.request, span.first_key, span.num_keys) for span in spans] == [(1, 60, 4), (2, 65, 23)]
    assert [(span.first_query, span.query_position, span.num_queries) for span in spans] == [(0, 1, 3), (3, 22, 1)]


def steps(*parts: tuple[int, int]) -> Any:
    """A plan of requests with so many queries at the end of so many tokens."""
    case = score_case(query_lens=[count for count, _ in parts], context_lens=[context for _, context in parts])
    return planned(case, arguments_of(case))


def test_the_window_of_a_prompt_is_cut_at_the_steps() -> None:
    # windows of 8 at the end of prompts of 60, 60, 60 and 8 tokens
    plan = steps((10, 50), (10, 57), (3, 60), (8, 8))
    found = observation_ranges(plan, window=8, prompt_lens=torch.tensor([60, 60, 60, 8]))
    assert found.tolist() == [[0, 0], [52, 57], [57, 60], [0, 8]]
    assert observation_ranges(
        plan, window=1, prompt_lens=torch.tensor([60, 60, 60, 8], dtype=torch.int32)
    ).tolist() == [
        [0, 0],
        [0, 0],
        [59, 60],
        [7, 8],
    ]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"window": 9}, ValueError, "window must be at most the prompt of 8 tokens at request 1, got 9"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.0}, TypeError, "window must be an int, got float"),
        ({"prompt_lens": torch.tensor([59, 8])}, ValueError, "prompt_lens must be at least the context 60, got 59"),
        ({"prompt_lens": torch.tensor([60])}, ValueError, "prompt_lens must have shape"),
        ({"prompt_lens": torch.tensor([60.0, 8.0])}, TypeError, "prompt_lens must be int32 or int64"),
    ],
)
def test_a_window_that_no_prompt_has_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    options: dict[str, Any] = {"window": 4, "prompt_lens": torch.tensor([60, 8])}
    plan = steps((10, 60), (8, 8))
    assert observation_ranges(plan, **options).tolist() == [[56, 60], [4, 8]]
    with pytest.raises(error, match=text):
        observation_ranges(plan, **options | changes)


def test_the_workspace_is_the_sum_worked_out_by_hand() -> None:
    # 4 + 5 + 1 + 1 queries in 3 heads of R 32, Dn 16, Dr 8
    given = arguments_of(CASE)
    assert sum(QUERIES) == 16
    rows = 11 * 3
    queries = rows * (16 + 8 + 32) * 4 + rows * 4
    assert plans(CASE, given, "probability", request_of("full"))[1].workspace_bytes == queries
    # of one tile each, so that the candidates are cut into as many stretches as programs are asked for, interpreted 6
    triton = plans(CASE, given, "probability", request_of("full"), implementation="triton")[1]
    assert triton.workspace_bytes == queries + 4 * 6 * rows
    assert plans(CASE, given, "logits", request_of("full"))[1].workspace_bytes == 0
