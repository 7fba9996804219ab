"""What the plan of chunked MLA prefill refuses, by name and without a trace, and the workspace that it foresees."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import MLA_INDICES, arguments_of, forward, mla_case, planned
from torch import Tensor

from assay.optimized import _mla_prefill_plan as module
from assay.optimized.mla_prefill import MlaPrefillPlan, MlaShape, plan_mla_prefill

HISTORY = mla_case(query_lens=[9, 5, 2], context_lens=[140, 5, 30], dtype="bfloat16", seed=2)

Change = Callable[[dict[str, Any]], dict[str, Any]]


def with_value(name: str, at: int | tuple[int, int], value: int) -> Change:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        given[name][at] = value
        return {}

    return change


# the requests of HISTORY: 9 of 140, 5 of 5 and 2 of 30 tokens; 8 more rows than slots would be out of range
BAD_PLANS: dict[str, tuple[Change, type[Exception], str]] = {
    "start": (with_value("cu_seqlens", 0, 1), ValueError, "cu_seqlens must start at 0, got 1"),
    "falling": (with_value("cu_seqlens", 2, 3), ValueError, "cu_seqlens must increase strictly, got 9 then 3"),
    "no query": (with_value("cu_seqlens", 1, 14), ValueError, "got 14 then 14 at request 1"),
    "short context": (with_value("context_lens", 0, 8), ValueError, "context_lens must be at least the 9 current"),
    "long context": (with_value("context_lens", 2, 999), ValueError, "context_lens must be at most 143"),
    "row above": (
        with_value("request_rows", 1, 5),
        ValueError,
        r"request_rows must lie in \[0, 5\), got 5 at request 1",
    ),
    "row below": (with_value("request_rows", 1, -1), ValueError, "request_rows must lie in .*, got -1"),
    "few rows": (lambda given: {"request_rows": given["request_rows"][:2]}, ValueError, "request_rows must have shape"),
    "few starts": (lambda given: {"cu_seqlens": given["cu_seqlens"][:3]}, ValueError, "cu_seqlens must have shape"),
    "no request": (lambda given: {"context_lens": given["context_lens"][:0]}, ValueError, "context_lens must name"),
    "flat table": (lambda given: {"slot_table": given["slot_table"][0]}, ValueError, "slot_table must have 2 dim"),
    "float": (lambda given: {"context_lens": given["context_lens"].float()}, TypeError, "context_lens must be int32"),
    "short": (lambda given: {"slot_table": given["slot_table"].short()}, TypeError, "slot_table must be int32"),
    "chunk 0": (lambda given: {"history_chunk_size": 0}, ValueError, "history_chunk_size must be positive, got 0"),
    "chunk -1": (lambda given: {"history_chunk_size": -1}, ValueError, "history_chunk_size must be positive, got -1"),
    "chunk True": (
        lambda given: {"history_chunk_size": True},
        TypeError,
        "history_chunk_size must be an int, got bool",
    ),
    "chunk 1.5": (lambda given: {"history_chunk_size": 1.5}, TypeError, "history_chunk_size must be an int, got float"),
    "no slots": (lambda given: {"num_slots": 0}, ValueError, "num_slots must be positive, got 0"),
    "limit": (lambda given: {"workspace_limit_bytes": 1000}, ValueError, "workspace_limit_bytes must be at least the"),
    "integers": (lambda given: {"dtype": torch.int32}, TypeError, "dtype must be bfloat16, float16, float32"),
}


@pytest.mark.parametrize("which", BAD_PLANS)
def test_a_plan_refuses_bad_values_by_name(which: str) -> None:
    change, error, text = BAD_PLANS[which]
    given = arguments_of(HISTORY)
    changes = change(given)
    before = {name: given[name].clone() for name in MLA_INDICES}
    with pytest.raises(error, match=text):
        planned(HISTORY, given, **changes)
    assert all(torch.equal(before[name], given[name]) for name in MLA_INDICES)


@pytest.mark.parametrize("value", [-1, -7, 220, 1 << 30])
@pytest.mark.parametrize("position", [0, 139])
def test_a_slot_outside_the_cache_is_refused(value: int, position: int) -> None:
    given = arguments_of(HISTORY)
    assert len(given["kv_c"]) == 220
    given["slot_table"][given["request_rows"][0], position] = value
    text = rf"slot_table must hold slots in \[0, 220\) .*, got {value} at packed token {position}"
    with pytest.raises(ValueError, match=text):
        planned(HISTORY, given)


def test_slots_past_the_context_are_nobodys_and_not_checked() -> None:
    given = arguments_of(HISTORY)
    before = forward(given, planned(HISTORY, given))[0]
    given["slot_table"][given["request_rows"][0], 140:] = 1 << 30
    assert torch.equal(before, forward(given, planned(HISTORY, given))[0])


BAD_TENSORS: dict[str, tuple[str, Callable[[Tensor], Tensor], type[Exception]]] = {
    "tokens": ("q", lambda q: q[1:], ValueError),
    "heads": ("q", lambda q: q[:, :1], ValueError),
    "width": ("q", lambda q: q[..., 1:], ValueError),
    "half": ("q", lambda q: q.half(), TypeError),
    "slots": ("kv_c", lambda kv_c: kv_c[1:], ValueError),
    "rank": ("kv_c", lambda kv_c: kv_c[:, 1:], ValueError),
    "wide cache": ("kv_c", lambda kv_c: kv_c.float(), TypeError),
    "rope": ("k_pe", lambda k_pe: k_pe[:, :4], ValueError),
    "heads of rope": ("k_pe", lambda k_pe: k_pe[:, None], ValueError),
    "rows of weight": ("kv_b_proj", lambda weight: weight[:, 1:], ValueError),
    "flat weight": ("kv_b_proj", lambda weight: weight.flatten(0, 1), ValueError),
    "device": ("kv_b_proj", lambda weight: weight.to("meta"), ValueError),
    "device of q": ("q", lambda q: q.to("meta"), ValueError),
}


@pytest.mark.parametrize("which", BAD_TENSORS)
def test_the_forward_refuses_tensors_that_were_not_planned(which: str) -> None:
    name, change, error = BAD_TENSORS[which]
    given = arguments_of(HISTORY)
    plan = planned(HISTORY, given)
    with pytest.raises(error, match=f"^{name} must "):
        forward(given, plan, **{name: change(given[name])})


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"d_rope": -1}, ValueError, "d_rope must be at least 0, got -1"),
        ({"d_v": 2.0}, TypeError, "d_v must be an int, got float"),
        ({"kv_lora_rank": True}, TypeError, "kv_lora_rank must be an int, got bool"),
    ],
)
def test_a_layer_without_size_is_refused(sizes: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"num_heads": 2, "kv_lora_rank": 8, "d_nope": 4, "d_rope": 0, "d_v": 4}
    assert MlaShape(**given).d_rope == 0
    with pytest.raises(error, match=text):
        MlaShape(**given | sizes)


def plan_of_lengths(queries: list[int], contexts: list[int], *, chunk: int, d_rope: int = 64) -> MlaPrefillPlan:
    """A plan of a DeepSeek layer on 16 heads, in bfloat16."""
    return plan_mla_prefill(
        torch.tensor([0, *itertools.accumulate(queries)]),
        torch.arange(max(contexts)).repeat(len(contexts), 1),
        torch.arange(len(contexts)),
        torch.tensor(contexts),
        shape=MlaShape(num_heads=16, kv_lora_rank=512, d_nope=128, d_rope=d_rope, d_v=128),
        dtype=torch.bfloat16,
        num_slots=max(contexts),
        history_chunk_size=chunk,
        provider="torch",
    )


def test_the_workspace_is_the_sum_worked_out_by_hand() -> None:
    # 2 heads, R 32, Dn 16, Dr 8, Dv 12, bfloat16; 16 current tokens, passes of at most 50 rows for 9 queries
    given = arguments_of(HISTORY)
    plan = planned(HISTORY, given, history_chunk_size=50)
    running = 16 * 2 * 12 * 4 + 16 * 2 * 4
    projection, keys, rope = 50 * 2 * (16 + 12) * 2, 50 * 2 * (16 + 8) * 2, 50 * 8 * 2
    assert running + projection + keys + rope == 12864
    assert plan.workspace_bytes == 12864 + module.PROVIDER_SCRATCH_BYTES

    # without history the largest phase is attention itself: projection, keys, output and its lse twice
    fresh = mla_case(query_lens=[100], context_lens=[100], dtype="bfloat16")
    plan = planned(fresh, arguments_of(fresh))
    attend = 100 * 2 * (28 * 2 + 24 * 2 + 12 * 2 + 2 * 4)
    assert attend == 27200
    assert plan.workspace_bytes == 27200 + module.PROVIDER_SCRATCH_BYTES


def test_a_limit_of_exactly_the_workspace_is_kept() -> None:
    given = arguments_of(HISTORY)
    needed = planned(HISTORY, given).workspace_bytes
    assert planned(HISTORY, given, workspace_limit_bytes=needed).workspace_bytes == needed
    with pytest.raises(
        ValueError, match=f"at least the {needed} bytes that 16 current tokens and history_chunk_size 16"
    ):
        planned(HISTORY, given, workspace_limit_bytes=needed - 1)


def test_the_workspace_grows_with_the_chunk_and_not_with_the_history() -> None:
    of_history = {
        history: plan_of_lengths([1024], [1024 + history], chunk=8192).workspace_bytes for history in (8192, 65536)
    }
    assert of_history[8192] == of_history[65536]
    of_chunk = [plan_of_lengths([1024], [1024 + 65536], chunk=chunk).workspace_bytes for chunk in (4096, 8192, 16384)]
    assert of_chunk[0] < of_chunk[1] < of_chunk[2]
    # each further row of a chunk costs 256 projected values and 192 of its key, in 16 heads
    assert of_chunk[2] - of_chunk[1] == 8192 * 16 * (256 + 192) * 2
    assert len(plan_of_lengths([1024], [1024 + 65536], chunk=8192).chunks) == 8


def test_without_a_rope_part_the_keys_are_not_copied() -> None:
    with_rope, without = (plan_of_lengths([64], [64 + 4096], chunk=4096, d_rope=d_rope) for d_rope in (64, 0))
    assert with_rope.workspace_bytes - without.workspace_bytes > 4096 * 16 * 192 * 2 - 4096 * 512 * 2
