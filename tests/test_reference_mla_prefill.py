"""The MLA oracle against loops in Python floats, its absorbed form, a split at any point, and gradients."""

import math
from typing import Any

import pytest
import torch
from builders import arguments_of, in_dtype, mla_case
from torch import Tensor

from assay.reference.attention import attention, merge_states
from assay.reference.mla_prefill import expand_latent, mla_prefill, mla_prefill_absorbed, requests

CASES = {
    "history": mla_case(seed=1),
    "fresh": mla_case(seed=2, query_lens=[4, 1], context_lens=[4, 1]),
    "no rope": mla_case(seed=3, d_rope=0),
    "one head": mla_case(seed=4, num_heads=1, d_v=5, query_lens=[1, 3, 2], context_lens=[7, 3, 30]),
    "bundled": mla_case(seed=5, layout="bundled"),
}


def inputs(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    given = in_dtype(arguments_of(CASES[name]), dtype)
    del given["history_chunk_size"]
    return given


def looped(given: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """One query, head, key and dimension at a time."""
    q, kv_c, k_pe, weights = (given[name].tolist() for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
    starts, table, rows, contexts = (
        given[name].tolist() for name in ("cu_seqlens", "slot_table", "request_rows", "context_lens")
    )
    d_rope = given["k_pe"].shape[1]
    d_nope = len(q[0][0]) - d_rope
    outs: list[Any] = []
    lses: list[Any] = []
    for request, context in enumerate(contexts):
        count = starts[request + 1] - starts[request]
        for i in range(count):
            query = q[starts[request] + i]
            outs.append([])
            lses.append([])
            for head, up in enumerate(weights):
                logits, values = [], []
                for position in range(context - count + i + 1):
                    slot = table[rows[request]][position]
                    latent = kv_c[slot]
                    expanded = [sum(w * x for w, x in zip(row, latent, strict=True)) for row in up]
                    key = expanded[:d_nope] + k_pe[slot]
                    dot = sum(a * b for a, b in zip(query[head], key, strict=True))
                    logits.append(given["softmax_scale"] * dot)
                    values.append(expanded[d_nope:])
                total = sum(math.exp(z) for z in logits)
                weighted = [
                    sum(math.exp(z) * value[d] for z, value in zip(logits, values, strict=True)) / total
                    for d in range(len(values[0]))
                ]
                outs[-1].append(weighted)
                lses[-1].append(math.log(total))
    return outs, lses


@pytest.mark.parametrize("name", CASES)
def test_loops_over_plain_floats_give_the_same(name: str) -> None:
    given = inputs(name)
    out, lse = mla_prefill(**given)
    expected_out, expected_lse = looped(given)
    torch.testing.assert_close(out, torch.tensor(expected_out, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.tensor(expected_lse, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_absorbed_form_is_the_same_function(name: str) -> None:
    given = inputs(name)
    for one, other in zip(mla_prefill(**given), mla_prefill_absorbed(**given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 17, 35, 36])
def test_history_split_anywhere_and_merged_is_the_whole(cut: int) -> None:
    given = inputs("history")
    whole_out, whole_lse = mla_prefill(**given)
    queries, slots, _ = requests(*(given[n] for n in ("cu_seqlens", "slot_table", "request_rows", "context_lens")))[0]
    weights = given["kv_b_proj"].split([16, 12], dim=1)
    # 9 current tokens after a history of 36
    parts = [(slots[:cut], False), (slots[cut:36], False), (slots[36:], True)]
    total: tuple[Tensor, Tensor] = torch.zeros(9, 2, 12).double(), torch.full((9, 2), -math.inf).double()
    for part, causal in parts:
        k, v = expand_latent(given["kv_c"][part], given["k_pe"][part], *weights)
        lengths = {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, len(part)])}
        state = attention(given["q"][queries], k, v, softmax_scale=given["softmax_scale"], causal=causal, **lengths)
        total = merge_states(*total, *state)
    torch.testing.assert_close(total[0], whole_out[:9], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total[1], whole_lse[:9], rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    case = mla_case(
        num_heads=2, kv_lora_rank=3, d_nope=2, d_rope=1, d_v=2, query_lens=[2, 1], context_lens=[4, 1], seed=8
    )
    given = in_dtype(arguments_of(case), torch.float64)
    del given["history_chunk_size"]
    names = ("q", "kv_c", "k_pe", "kv_b_proj")
    # no NaN in unowned slots: finite differences touch every row
    leaves = [given.pop(name).nan_to_num(0.0).requires_grad_() for name in names]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return mla_prefill(*tensors, **given)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [mla_prefill, mla_prefill_absorbed])
def test_the_dtype_of_the_inputs_is_kept(form: Any, dtype: torch.dtype) -> None:
    out, lse = form(**inputs("history", dtype))
    assert (out.dtype, lse.dtype) == (dtype, dtype)
    assert (out.shape, lse.shape) == ((14, 2, 12), (14, 2))


def test_slots_that_no_token_owns_are_never_read() -> None:
    given = inputs("history")
    before = mla_prefill(**given)
    owned = given["slot_table"][given["slot_table"] >= 0].long()
    free = torch.ones(len(given["kv_c"]), dtype=torch.bool)
    free[owned] = False
    assert bool(given["kv_c"][free].isnan().all())
    given["kv_c"][free], given["k_pe"][free] = 1e30, -1e30
    # nor are entries of the table past the context
    given["slot_table"][given["slot_table"] < 0] = 0
    for one, other in zip(before, mla_prefill(**given), strict=True):
        assert torch.equal(one, other)


def test_a_query_sees_its_own_token_and_none_later() -> None:
    given = inputs("history")
    before, _ = mla_prefill(**given)
    # position 40 is current token 4 of 9
    given["kv_c"][given["slot_table"][given["request_rows"][0], 40]] += 1.0
    after, _ = mla_prefill(**given)
    changed = (after != before).flatten(1).any(1).tolist()
    assert changed == [False] * 4 + [True] * 5 + [False] * 5


def test_rows_of_the_table_are_found_through_request_rows() -> None:
    given = inputs("history")
    before = mla_prefill(**given)
    order = torch.tensor([2, 0, 3, 1])
    given["slot_table"] = given["slot_table"][order]
    given["request_rows"] = torch.argsort(order)[given["request_rows"]]
    for one, other in zip(before, mla_prefill(**given), strict=True):
        assert torch.equal(one, other)


def test_requests_name_queries_slots_and_last_tokens() -> None:
    table = torch.tensor([[7, 8, 9, -1], [3, 1, -1, -1]])
    parts = requests(torch.tensor([0, 2, 3]), table, torch.tensor([1, 0]), torch.tensor([2, 3]))
    assert [(queries, slots.tolist(), last.tolist()) for queries, slots, last in parts] == [
        (slice(0, 2), [3, 1], [0, 1]),
        (slice(2, 3), [7, 8, 9], [2]),
    ]
