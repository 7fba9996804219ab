"""Chunked MLA prefill: the oracle's answer at any chunk size, one projection per row, and every bad input refused."""

from typing import Any

import pytest
import torch
from builders import (
    MLA_INDICES,
    MLA_TENSORS,
    arguments_of,
    failing,
    forward,
    gates_of,
    in_dtype,
    mla_case,
    planned,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assay.harness.case import Case
from assay.optimized.attention import attention
from assay.optimized.mla_prefill import mla_prefill

CHUNK_SIZES = (1, 17, 64, 4096)

FRESH = mla_case(query_lens=[4, 1, 9], context_lens=[4, 1, 9], dtype="bfloat16", seed=1)
HISTORY = mla_case(query_lens=[9, 5, 2], context_lens=[140, 5, 30], dtype="bfloat16", seed=2)
NO_ROPE = mla_case(query_lens=[3], context_lens=[40], d_rope=0, dtype="bfloat16", seed=3)


def answered(case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    given = arguments_of(case)
    out, lse = forward(given, planned(case, given, **changes))
    assert lse is not None
    return out, lse


@pytest.mark.parametrize("chunk", CHUNK_SIZES)
@pytest.mark.parametrize("case", [FRESH, HISTORY, NO_ROPE], ids=["fresh", "history", "no rope"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_chunk_size_stays_within_the_derived_bounds(case: Case, chunk: int, dtype: str) -> None:
    cut = Case(
        op=case.op, family="diffuse", dtype=dtype, seed=case.seed, sizes=case.sizes | {"history_chunk_size": chunk}
    )
    gates = gates_of(cut, answered(cut))
    assert failing(gates) == set()
    assert max(gate.ratio for gate in gates.values()) > 0


def test_the_history_is_cut_at_multiples_of_the_chunk_size() -> None:
    given = arguments_of(HISTORY)
    plan = planned(HISTORY, given, history_chunk_size=50)
    # histories of 131, 0 and 28 tokens
    assert [len(chunk.slots) for chunk in plan.chunks] == [50, 50, 31, 28]
    assert [chunk.queries for chunk in plan.chunks] == [slice(0, 9)] * 3 + [slice(14, 16)]
    table, rows = given["slot_table"], given["request_rows"]
    assert torch.equal(plan.chunks[1].slots, table[rows[0], 50:100])
    assert torch.equal(
        plan.current_slots, torch.cat([table[rows[0], 131:140], table[rows[1], :5], table[rows[2], 28:30]])
    )
    assert plan.projected_rows == 140 + 5 + 30
    assert plan.num_tokens == 16


class CountedRows(TorchDispatchMode):
    """Counts the rows that are multiplied with the up-projection."""

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.rows = rank, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left = args[-2]
            self.rows += left.shape[0] if left.shape[1] == self.rank else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", CHUNK_SIZES)
def test_each_row_of_the_context_is_projected_once(chunk: int) -> None:
    given = arguments_of(HISTORY)
    plan = planned(HISTORY, given, history_chunk_size=chunk)
    with CountedRows(HISTORY.sizes["kv_lora_rank"]) as counted:
        forward(given, plan)
    assert counted.rows == sum(HISTORY.sizes["context_lens"]) == plan.projected_rows


def test_without_history_the_output_is_that_of_one_attention_call() -> None:
    given = arguments_of(FRESH)
    plan = planned(FRESH, given)
    assert plan.chunks == ()
    expanded = torch.nn.functional.linear(given["kv_c"][plan.current_slots], given["kv_b_proj"].flatten(0, 1))
    k_nope, v = expanded.unflatten(1, (2, 28)).split([16, 12], dim=-1)
    k = torch.cat([k_nope, given["k_pe"][plan.current_slots][:, None].expand(-1, 2, -1)], dim=-1)
    expected, expected_lse = attention(given["q"], k, v, softmax_scale=given["softmax_scale"], plan=plan.current)
    out, lse = forward(given, plan)
    assert torch.equal(out, expected)
    assert lse is not None
    assert torch.equal(lse, expected_lse)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("case", [FRESH, HISTORY], ids=["fresh", "history"])
def test_the_output_is_the_same_whether_or_not_the_lse_is_asked_for(case: Case) -> None:
    given = arguments_of(case)
    plan = planned(case, given)
    out, lse = forward(given, plan)
    alone, nothing = mla_prefill(
        *(given[name] for name in MLA_TENSORS), softmax_scale=given["softmax_scale"], plan=plan, return_lse=False
    )
    assert torch.equal(out, alone)
    assert nothing is None
    assert lse is not None
    assert lse.dtype == torch.float32


def test_a_plan_keeps_its_own_slots_and_lengths() -> None:
    given = arguments_of(HISTORY)
    plan = planned(HISTORY, given)
    before = forward(given, plan)
    for name in MLA_INDICES:
        given[name].fill_(0)
    for one, other in zip(before, forward(given, plan), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_long_indices_are_the_same_indices() -> None:
    given = arguments_of(HISTORY)
    out, lse = forward(given, planned(HISTORY, given))
    wide = given | {name: given[name].long() for name in MLA_INDICES}
    again, again_lse = forward(wide, planned(HISTORY, wide))
    assert torch.equal(out, again)
    assert lse is not None
    assert again_lse is not None
    assert torch.equal(lse, again_lse)


def test_float64_is_served_with_history_too() -> None:
    given = in_dtype(arguments_of(mla_case()), torch.float64)
    out, lse = forward(given, planned(mla_case(), given))
    assert lse is not None
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_inputs_are_not_written() -> None:
    given = arguments_of(HISTORY)
    before = {name: given[name].clone() for name in (*MLA_TENSORS, *MLA_INDICES)}
    forward(given, planned(HISTORY, given))
    for name, tensor in before.items():
        assert torch.equal(tensor.nan_to_num(7.0), given[name].nan_to_num(7.0)), name


def test_a_provider_that_cannot_serve_refuses_and_auto_says_what_it_took() -> None:
    given = arguments_of(HISTORY)
    with pytest.raises(ValueError, match=r"provider must be 'auto' or one of torch, .*, got 'cutlass'"):
        planned(HISTORY, given, provider="cutlass")
    assert planned(HISTORY, given).choice == "torch"
    assert planned(HISTORY, given, provider="auto").choice.startswith("auto took torch")
