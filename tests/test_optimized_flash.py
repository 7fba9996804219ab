"""torch's FlashAttention 2 as a provider, against a stand-in for its operator that is bound by the real schema."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import INF, Inputs, State, make_inputs, make_plan
from library_stand_ins import (
    answer,
    attend_by,
    case,
    check_nothing,
    check_state,
    never_called,
    nothing,
    pretend_gpu,
)
from torch import Tensor

from assay.optimized import attention as optimized
from assay.optimized.attention import AttentionPlan
from assay.optimized.external import flash

SCHEMA = torch.ops.aten._flash_attention_forward.default._schema


class Operator:
    """Refuses what the operator refuses, and answers by the oracle in its convention."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan
        self.arguments: dict[str, Any] = {}

    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, ...]:
        names = [argument.name for argument in SCHEMA.arguments]
        assert not set(keywords) & set(names[: len(args)])
        assert set(keywords) <= set(names)
        given = self.arguments = dict(zip(names, args, strict=False)) | keywords
        q, k, v = inputs = given["query"], given["key"], given["value"]
        width, requests = q.shape[2], len(given["cum_seq_q"]) - 1
        assert k.shape[2] == v.shape[2] == width <= 256
        assert width % 8 == 0
        assert given["cum_seq_q"].dtype == given["cum_seq_k"].dtype == torch.int32
        assert (given["dropout_p"], given["return_debug_mask"]) == (0.0, False)
        assert given["is_causal"] == self.plan.causal
        assert given["max_k"] == max(self.plan.key_lens)
        assert given["max_q"] >= max(self.plan.query_lens)
        if given["max_q"] == 1 and q.shape[1] > k.shape[1]:
            # then it folds the heads of a group into queries
            q.reshape(requests, k.shape[1], -1, width)
        out, lse = answer(inputs, self.plan, given["scale"], base=math.e, heads_first=True, empty_lse=INF)
        nothing = torch.empty(0)
        return out, lse, nothing, nothing, nothing


Install = Callable[[AttentionPlan], Operator]


@pytest.fixture
def install_operator(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(plan: AttentionPlan) -> Operator:
        operator = Operator(plan)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
        return operator

    return put


def test_the_operator_returns_what_is_taken() -> None:
    returned = [value.name for value in SCHEMA.returns]
    assert returned[:2] == ["output", "softmax_logsumexp"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dims", "width"),
    [((64, 64), 64), ((192, 128), 192), ((16, 40), 40), ((24, 16), 24), ((17, 5), 24), ((256, 256), 256)],
)
def test_values(install_operator: Install, dims: tuple[int, int], width: int, causal: bool) -> None:
    inputs, plan = case(dims, causal=causal)
    operator = install_operator(plan)
    check_state(attend_by("flash", inputs, plan), inputs, plan)
    assert operator.arguments["query"].shape[2] == width
    # what is wide enough is not copied
    if dims == (192, 128):
        assert operator.arguments["query"] is inputs[0]
        assert torch.equal(operator.arguments["value"][..., 128:], torch.zeros(9, 2, 64, dtype=torch.float16))


def test_values_in_the_columns_of_wider_rows(install_operator: Install) -> None:
    q, k, kv = make_inputs(10, 9, heads=(4, 2), dims=(64, 128), dtype=torch.float16)
    inputs = (q, k, kv[..., 64:])
    plan = make_plan((5, 3, 0, 2), (2, 0, 3, 4), inputs, causal=True)
    operator = install_operator(plan)
    check_state(attend_by("flash", inputs, plan), inputs, plan)
    assert operator.arguments["value"].data_ptr() == inputs[2].data_ptr()


@pytest.mark.parametrize(("query_lens", "longest"), [((1, 1, 1), 1), ((1, 0, 1), 2), ((0, 2, 1), 2)])
def test_single_queries_are_announced_only_if_each_request_has_one(
    install_operator: Install, query_lens: tuple[int, ...], longest: int
) -> None:
    inputs = make_inputs(sum(query_lens), 9, heads=(4, 2), dims=(64, 64), dtype=torch.float16)
    plan = make_plan(query_lens, (4, 5, 0), inputs)
    operator = install_operator(plan)
    check_state(attend_by("flash", inputs, plan), inputs, plan)
    assert operator.arguments["max_q"] == longest


@pytest.mark.parametrize("tokens", [(3, 0), (0, 3), (0, 0)])
def test_the_operator_is_not_called_for_nothing(monkeypatch: pytest.MonkeyPatch, tokens: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", never_called)
    inputs, plan = nothing(tokens)
    check_nothing(attend_by("flash", inputs, plan), tokens[0])


def test_a_wrong_infinity_in_a_row_with_keys_stays_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plan = case()

    def broken(q: Tensor, *args: Any, **keywords: Any) -> State:
        return q, torch.full((4, q.shape[0]), INF)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", broken)
    _, lse = attend_by("flash", inputs, plan)
    assert (lse == INF).any(dim=1).tolist() == [False, False, False, True, True, False, False, False, True, True]


def test_what_it_would_compute_wrongly_is_refused(install_operator: Install) -> None:
    (q, k, v), plan = case()
    install_operator(plan)
    for scale in (0.0, -0.3):
        with pytest.raises(NotImplementedError, match="needs a positive softmax_scale"):
            attend_by("flash", (q, k, v), plan, scale)
    shifted: Inputs = (q, k, torch.zeros(9, 2, 65, dtype=torch.float16)[..., 1:])
    with pytest.raises(NotImplementedError, match="v must start at a multiple of 16 bytes"):
        attend_by("flash", shifted, plan)


SHAPE = optimized.AttentionShape(
    device=torch.device("cuda:0"),
    dtype=torch.bfloat16,
    num_heads=4,
    num_kv_heads=2,
    head_dim_qk=192,
    head_dim_v=128,
)


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (9, 0), None),
        ({"head_dim_qk": 17, "head_dim_v": 251}, (8, 0), None),
        ({"head_dim_qk": 17, "head_dim_v": 257}, (8, 0), "serves head sizes up to 256, got 17 and 257"),
        ({"dtype": torch.float32}, (9, 0), "serves bfloat16 and float16, got torch.float32"),
        ({}, (7, 5), "needs compute capability 8.x or 9.x or 10.x or 11.x or 12.x, got 7.5"),
        ({"device": torch.device("cpu")}, (9, 0), "needs a CUDA device, got cpu"),
    ],
)
def test_what_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], capability: tuple[int, int], reason: str | None
) -> None:
    pretend_gpu(monkeypatch, capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    refusal = flash.refusal(replace(SHAPE, **change), True, (3,), (5,))
    assert refusal is None if reason is None else reason in str(refusal)


def test_a_torch_without_it_or_with_another_in_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert flash.refusal(SHAPE, True, (3,), (5,)) == "this torch is built without FlashAttention 2"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(flash, "current_flash_attention_impl", lambda: "FA4")
    assert "replaced by FA4 in this process" in str(flash.refusal(SHAPE, True, (3,), (5,)))


def test_a_plan_of_another_provider_is_refused() -> None:
    inputs, plan = case()
    with pytest.raises(TypeError, match="must be of this provider, got NoneType"):
        flash.attend(*inputs, 0.3, plan)


def test_auto_never_takes_it() -> None:
    for tokens in (8, 40000):
        assert "flash" not in optimized._auto_order(SHAPE, True, (tokens,), (tokens,))
