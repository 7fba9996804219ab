"""Token selection: the oracle's choice for any batch, what always holds of one, and every bad input refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from assay.optimized import token_selection as twin
from assay.optimized.token_selection import token_selection
from assay.reference import token_selection as oracle

INF = float("inf")

# numbers of tokens and of what always stays, and how many budgets lie above that
choices = st.fixed_dictionaries(
    {
        "contexts": st.lists(st.integers(0, 20), min_size=1, max_size=5),
        "sink": st.integers(0, 5),
        "recent": st.integers(0, 5),
        "kernel_size": st.sampled_from([1, 3, 5, 7]),
        "pooling": st.sampled_from(["avg", "max"]),
        "seed": st.integers(0, 2**31),
    }
)


def drawn(choice: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Scores with many ties, and some without a finite neighbour; garbage where nothing may look."""
    generator = torch.Generator().manual_seed(choice["seed"])
    contexts, sink, recent = torch.tensor(choice["contexts"]), choice["sink"], choice["recent"]
    scores = torch.randint(0, 4, (len(contexts), 20), generator=generator).float()
    if choice["pooling"] == "max":
        scores[scores == 0] = -INF
    tokens = torch.arange(20)
    unseen = (tokens < sink) | (tokens >= contexts[:, None] - recent)
    scores[unseen] = torch.tensor([torch.nan, INF, 9.0])[torch.randint(0, 3, (20,), generator=generator)].expand_as(
        scores
    )[unseen]
    budgets = sink + recent + torch.randint(0, 9, (len(contexts),), generator=generator)
    options = {name: choice[name] for name in ("sink", "recent", "kernel_size", "pooling")}
    return scores, options | {"context_lens": contexts, "budgets": budgets}


@given(choice=choices)
def test_the_choice_is_the_oracles(choice: dict[str, Any]) -> None:
    scores, options = drawn(choice)
    kept = token_selection(scores, **options)
    expected = oracle.token_selection(scores.double(), **options)
    assert torch.equal(kept, expected)
    assert kept.dtype == torch.int32


@given(choice=choices)
def test_the_budget_is_used_up_and_sink_and_recent_stay(choice: dict[str, Any]) -> None:
    scores, options = drawn(choice)
    kept = token_selection(scores, **options).tolist()
    assert len(kept) == len(scores)
    for row, context, budget in zip(kept, choice["contexts"], options["budgets"].tolist(), strict=True):
        chosen = [token for token in row if token != -1]
        assert len(row) == int(options["budgets"].max())
        assert chosen == sorted(set(chosen)) == row[: len(chosen)]
        assert len(chosen) == min(budget, context)
        assert set(range(min(choice["sink"], context))) <= set(chosen)
        assert set(range(max(0, context - choice["recent"]), context)) <= set(chosen) <= set(range(context))


@given(choice=choices, permutation=st.permutations(range(5)))
def test_requests_are_chosen_for_in_any_order(choice: dict[str, Any], permutation: list[int]) -> None:
    scores, options = drawn(choice)
    order = torch.tensor([row for row in permutation if row < len(scores)])
    kept = token_selection(scores, **options)
    moved = options | {name: options[name][order] for name in ("context_lens", "budgets")}
    assert torch.equal(token_selection(scores[order], **moved), kept[order])
    # and each as if it were alone
    one = options | {name: options[name][:1] for name in ("context_lens", "budgets")}
    alone = token_selection(scores[:1], **one)
    assert torch.equal(alone, kept[:1, : alone.shape[1]])


@given(choice=choices)
def test_a_higher_score_never_costs_a_token_its_place(choice: dict[str, Any]) -> None:
    scores, options = drawn(choice | {"kernel_size": 1})
    kept = token_selection(scores, **options)
    for row, tokens in enumerate(kept.tolist()):
        candidates = range(options["sink"], choice["contexts"][row] - options["recent"])
        between = [token for token in tokens if token in candidates]
        if between:
            raised = scores.clone()
            raised[row, between[-1]] = 50.0
            assert torch.equal(token_selection(raised, **options), kept)


def test_of_equal_scores_the_earlier_token_is_taken_whatever_their_number() -> None:
    options: dict[str, Any] = {"context_lens": torch.tensor([5000]), "budgets": torch.tensor([700]), "sink": 4}
    kept = token_selection(torch.zeros(1, 5000), **options, recent=32)
    assert kept[0].tolist() == [*range(668), *range(4968, 5000)]


def test_scores_may_end_before_the_recent_tokens_and_lie_anywhere() -> None:
    scores = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"context_lens": torch.tensor([16, 16, 9]), "budgets": torch.tensor([7, 9, 8])}
    expected = oracle.token_selection(scores, **options, recent=4)
    assert torch.equal(token_selection(scores, **options, recent=4), expected)
    spread = torch.full((12, 6), torch.nan)
    spread[:, ::2] = scores.T
    assert torch.equal(token_selection(spread.T[::2], **options, recent=4), expected)
    # the memory of a wider buffer
    wide = torch.full((3, 128), 99.0)
    wide[:, :12] = scores
    assert torch.equal(token_selection(wide[:, :12], **options, recent=4), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_any_floating_dtype_is_served(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 30, generator=torch.Generator().manual_seed(2)).to(dtype)
    options: dict[str, Any] = {"context_lens": torch.tensor([30, 20]), "budgets": torch.tensor([9, 9])}
    expected = oracle.token_selection(scores.double(), **options, sink=2, recent=3, kernel_size=3)
    assert torch.equal(token_selection(scores, **options, sink=2, recent=3, kernel_size=3), expected)


def test_inputs_are_not_written() -> None:
    scores, options = drawn(
        {"contexts": [20, 9], "sink": 2, "recent": 3, "kernel_size": 3, "pooling": "avg", "seed": 1}
    )
    before = scores.clone()
    token_selection(scores, **options)
    assert torch.equal(scores.nan_to_num(7.0), before.nan_to_num(7.0))


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "small budget": ({"budgets": torch.tensor([6, 3])}, ValueError, r"at least the 2 \+ 2 tokens .*, got 3 at row 1"),
    "even kernel": ({"kernel_size": 4}, ValueError, "kernel_size must be odd and positive, got 4; an even one has no"),
    "no kernel": ({"kernel_size": 0}, ValueError, "kernel_size must be odd and positive, got 0"),
    "kernel 3.0": ({"kernel_size": 3.0}, TypeError, "kernel_size must be an int, got float"),
    "pooling": ({"pooling": "mean"}, ValueError, "pooling must be 'avg' or 'max', got 'mean'"),
    "sink": ({"sink": -1}, ValueError, "sink must be at least 0, got -1"),
    "recent True": ({"recent": True}, TypeError, "recent must be an int, got bool"),
    "few contexts": ({"context_lens": torch.tensor([9])}, ValueError, r"context_lens must have shape \(2,\), got"),
    "few budgets": ({"budgets": torch.tensor([9])}, ValueError, r"budgets must have shape \(2,\), got \(1,\)"),
    "float budgets": ({"budgets": torch.tensor([9.0, 9.0])}, TypeError, "budgets must be int32 or int64"),
    "negative context": (
        {"context_lens": torch.tensor([9, -1])},
        ValueError,
        "context_lens must be at least 0, got -1",
    ),
    "narrow": ({"context_lens": torch.tensor([13, 9])}, ValueError, "scores must be as wide as the 11 tokens of row 0"),
    "nan": ({"scores": (1, 4, torch.nan)}, ValueError, "finite or -inf, got nan for token 4 of row 1"),
    "infinity": ({"scores": (0, 2, INF)}, ValueError, "finite or -inf, got inf for token 2 of row 0"),
}


@pytest.mark.parametrize("which", BAD)
def test_a_choice_refuses_bad_values_by_name(which: str) -> None:
    changes, error, text = BAD[which]
    options: dict[str, Any] = {"context_lens": torch.tensor([10, 8]), "budgets": torch.tensor([6, 5])}
    scores = torch.arange(20.0).reshape(2, 10)
    assert token_selection(scores, **options, sink=2, recent=2).tolist() == [[0, 1, 6, 7, 8, 9], [0, 1, 5, 6, 7, -1]]
    if "scores" in changes:
        row, token, value = changes["scores"]
        scores[row, token] = value
        changes = {}
    before = scores.clone()
    with pytest.raises(error, match=text):
        token_selection(scores, **options | {"sink": 2, "recent": 2} | changes)
    assert torch.equal(scores.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("scores", [torch.zeros(2, 10, dtype=torch.int32), torch.zeros(20), torch.zeros(1, 2, 10)])
def test_scores_that_are_no_rows_of_numbers_are_refused(scores: Tensor) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^scores must "):
        token_selection(scores, context_lens=torch.tensor([10, 8]), budgets=torch.tensor([6, 5]))


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


Q, K = normal(5, 6, 16), normal(40, 2, 16, seed=1)
WEIGHTS = oracle.observation_weights(Q.double(), K.double(), softmax_scale=0.5)
CONTEXTS = torch.tensor([40, 23, 3])
SCORES = normal(3, 40, seed=2)

METHODS: dict[str, Callable[[Any], Tensor]] = {
    "snapkv, avg": lambda room: room.snapkv_scores(WEIGHTS),
    "snapkv, max": lambda room: room.snapkv_scores(WEIGHTS, kernel_size=7, pooling="max"),
    "kvpress snapkv": lambda room: room.kvpress_snapkv_scores(WEIGHTS, num_kv_heads=2),
    "sparse-vllm snapkv": lambda room: room.sparse_vllm_snapkv_scores(SCORES, CONTEXTS, sink=2, recent=5),
    "sparse-vllm, pooled": lambda room: room.sparse_vllm_snapkv_scores(
        SCORES, CONTEXTS, sink=2, recent=5, kernel_size=3
    ),
    "h2o": lambda room: room.h2o_scores(torch.stack([WEIGHTS, WEIGHTS.flip(0)])),
    "h2o, next step": lambda room: room.accumulate_h2o(WEIGHTS.sum(1)[:, :30], WEIGHTS.sum(1)),
    "sparse-vllm h2o, logits": lambda room: room.sparse_vllm_h2o_step(SCORES, CONTEXTS, mode="logits"),
    "sparse-vllm h2o": lambda room: room.sparse_vllm_h2o_step(SCORES.abs(), CONTEXTS, mode="probability"),
    "observed attention": lambda room: room.observed_attention_scores(WEIGHTS, num_kv_heads=3),
    "tova": lambda room: room.tova_scores(WEIGHTS),
    "maximum": lambda room: room.accumulate_max(SCORES, SCORES.flip(1)),
    "weighted": lambda room: room.accumulate_weighted(SCORES, SCORES.flip(1), torch.tensor([5, 0, 2])),
    "budgets": lambda room: room.kvpress_budgets(torch.arange(1, 2000), compression_ratio=0.9),
    "compacted": lambda room: room.compact_scores(SCORES, torch.tensor([[1, 5], [39, -1], [-1, -1]])),
    "pooled": lambda room: room.pool_scores(SCORES[:, None].expand(3, 2, 40), kernel_size=5, pooling="avg"),
}


@pytest.mark.parametrize("which", METHODS)
def test_a_method_scores_as_its_oracle(which: str) -> None:
    ours, expected = METHODS[which](twin), METHODS[which](oracle)
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_the_oracle_on_the_stored_inputs(dtype: torch.dtype) -> None:
    q, k = Q.to(dtype), K.to(dtype)
    weights = twin.observation_weights(q, k, softmax_scale=0.5)
    expected = oracle.observation_weights(q.double(), k.double(), softmax_scale=0.5)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-9)
    assert torch.equal(weights == 0, expected == 0)


def test_the_methods_are_different_functions() -> None:
    heads = {name: METHODS[name](twin) for name in ("snapkv, avg", "snapkv, max", "kvpress snapkv")}
    assert [tuple(scores.shape) for scores in heads.values()] == [(6, 35), (6, 35), (2, 35)]
    per_head = heads["snapkv, avg"].unflatten(0, (2, 3)).mean(1) / 5
    torch.testing.assert_close(heads["kvpress snapkv"], per_head)
    chosen = []
    for scores in (heads["snapkv, max"].amax(0), heads["kvpress snapkv"].mean(0), twin.tova_scores(WEIGHTS)):
        rows = scores[None, :35]
        options: dict[str, Any] = {"context_lens": torch.tensor([40]), "budgets": torch.tensor([12]), "recent": 5}
        chosen.append(tuple(token_selection(rows, **options)[0].tolist()))
    assert len(set(chosen)) == 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: twin.pool_scores(SCORES, kernel_size=2, pooling="avg"),
            ValueError,
            "got 2; an even one has no middle",
        ),
        (lambda: twin.snapkv_scores(WEIGHTS, kernel_size=6), ValueError, "kernel_size must be odd"),
        (lambda: twin.snapkv_scores(WEIGHTS[0]), ValueError, r"weights must have shape \[H, w, S\]"),
        (lambda: twin.snapkv_scores(WEIGHTS[..., :4]), ValueError, r"1 <= w <= S, got \(6, 5, 4\)"),
        (lambda: twin.h2o_scores(WEIGHTS), ValueError, r"weights must have shape \[B, H, T, S\]"),
        (
            lambda: twin.kvpress_snapkv_scores(WEIGHTS, num_kv_heads=4),
            ValueError,
            "must be a divisor of 6 heads, got 4",
        ),
        (lambda: twin.accumulate_max(SCORES, SCORES[:, 1:]), ValueError, "step must have the shape"),
        (lambda: twin.accumulate_h2o(SCORES, SCORES[:, 1:]), ValueError, "total and step must have shapes"),
        (lambda: twin.kvpress_budgets(CONTEXTS, compression_ratio=1.0), ValueError, r"must lie in \[0, 1\), got 1.0"),
        (lambda: twin.observation_weights(K[:, :1], K[:5], softmax_scale=1.0), ValueError, "a multiple of H_kv"),
        (lambda: twin.observation_weights(K, K[:39], softmax_scale=1.0), ValueError, "at most the 39 queries .* of 40"),
        (lambda: twin.observation_weights(Q, K.half(), softmax_scale=1.0), TypeError, "must have one floating dtype"),
        (lambda: twin.sparse_vllm_h2o_step(SCORES, CONTEXTS, mode="raw"), ValueError, "mode must be 'logits' or"),  # type: ignore[arg-type]
    ],
)
def test_a_method_refuses_bad_values_by_name(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("value", [torch.nan, INF])
def test_h2o_refuses_what_no_softmax_can_digest(value: float) -> None:
    scores = SCORES.clone()
    # past the context of 3 tokens anything may lie
    scores[2, 3:] = value
    for mode in ("logits", "probability"):
        assert twin.sparse_vllm_h2o_step(scores, CONTEXTS, mode=mode).isfinite().all()
    scores[1, 22] = value
    with pytest.raises(ValueError, match=r"finite or -inf, got (nan|inf) for token 22 of row 1"):
        twin.sparse_vllm_h2o_step(scores, CONTEXTS, mode="logits")
    blind = SCORES.clone()
    blind[2, :3] = -INF
    with pytest.raises(ValueError, match="must hold a finite one in each row, got none in row 2"):
        twin.sparse_vllm_h2o_step(blind, CONTEXTS, mode="logits")
