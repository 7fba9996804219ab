"""Masked attention in chunks of keys: one mask or several, the cap to the byte, and where each chunk begins."""

import math
from typing import Any

import pytest
import torch
from mask_inputs import offsets, selection
from torch import Tensor

from assay.optimized.attention import AttentionShape
from assay.optimized.masked_mha import ChunkedMaskPlan, KeyChunk, masked_mha_in_chunks, plan_masked_chunks
from assay.optimized.topk_mask import mask_bytes
from assay.reference.masked_mha import masked_mha
from assay.reference.topk_mask import topk_mask

# a history that ends within a word, none, no queries, one token after a long history
QUERIES, CONTEXTS = (9, 5, 0, 1), (54, 5, 3, 70)
CAP = mask_bytes(sum(QUERIES), max(CONTEXTS))


def question(topk: int = 40, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    total = sum(CONTEXTS)
    sizes = (sum(QUERIES), 2, 24), (total, 1, 24), (total, 1, 16)
    q, k, v = (torch.randn(size, generator=g).to(dtype) for size in sizes)
    return {"q": q, "k": k, "v": v, "indices": selection(QUERIES, CONTEXTS, topk)}


def planned(given: dict[str, Any], **options: Any) -> ChunkedMaskPlan:
    shape = AttentionShape(
        device=torch.device("cpu"),
        dtype=given["q"].dtype,
        num_heads=2,
        num_kv_heads=1,
        head_dim_qk=24,
        head_dim_v=16,
    )
    chosen: dict[str, Any] = {"history_chunk_size": 19} | options
    return plan_masked_chunks(
        offsets(QUERIES), torch.tensor(CONTEXTS), shape=shape, topk=given["indices"].shape[1], **chosen
    )


def answered(given: dict[str, Any], plan: ChunkedMaskPlan) -> tuple[tuple[Tensor, Tensor], list[KeyChunk]]:
    starts = offsets(CONTEXTS).tolist()
    asked: list[KeyChunk] = []

    def expand(chunk: KeyChunk) -> tuple[Tensor, Tensor]:
        asked.append(chunk)
        rows = torch.cat([torch.arange(starts[r] + start, starts[r] + stop) for r, start, stop in chunk.spans])
        return given["k"][rows], given["v"][rows]

    return masked_mha_in_chunks(given["q"], given["indices"], expand, softmax_scale=0.3, plan=plan), asked


def by_oracle(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    cu = offsets(QUERIES)
    mask = topk_mask(given["indices"], cu_seqlens_q=cu, key_lens=torch.tensor(CONTEXTS))
    q, k, v = (given[name].double() for name in ("q", "k", "v"))
    return masked_mha(q, k, v, mask, softmax_scale=0.3, cu_seqlens_q=cu, cu_seqlens_k=offsets(CONTEXTS))


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("cap", [CAP, CAP - 1])
def test_one_mask_or_several_give_the_answer_of_the_whole(cap: int, implementation: str) -> None:
    given = question()
    plan = planned(given, max_mask_bytes=cap, implementation=implementation)
    assert (plan.mask is not None) == (cap == CAP)
    assert all((chunk.mask is None) == (cap == CAP) for chunk in plan.chunks)
    (out, lse), asked = answered(given, plan)
    expected, expected_lse = by_oracle(given)
    assert asked == list(plan.chunks)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=3e-6)
    empty = expected_lse == -math.inf
    assert empty.any()
    assert not out[empty].any()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_the_answer_does_not_depend_on_the_chunks(size: int) -> None:
    given = question()
    expected, expected_lse = by_oracle(given)
    for cap in (CAP, CAP - 1):
        (out, lse), _ = answered(given, planned(given, history_chunk_size=size, max_mask_bytes=cap))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=3e-6)


def test_spans_cover_every_position_once() -> None:
    plan = planned(question())
    assert plan.chunks[0].spans == ((0, 45, 54), (1, 0, 5), (2, 3, 3), (3, 69, 70))
    assert [chunk.spans for chunk in plan.chunks[1:]] == [
        ((0, 0, 19),),
        ((0, 19, 38),),
        ((0, 38, 45),),
        ((3, 0, 19),),
        ((3, 19, 38),),
        ((3, 38, 57),),
        ((3, 57, 69),),
    ]
    assert [(chunk.queries.start, chunk.queries.stop) for chunk in plan.chunks] == [(0, 15)] + [(0, 9)] * 3 + [
        (14, 15)
    ] * 4


def test_no_mask_passes_the_cap() -> None:
    # 15 queries of one word: the largest of the masks for single chunks
    given, least = question(), mask_bytes(15, 9)
    plan = planned(given, max_mask_bytes=least)
    assert [chunk.mask is not None for chunk in plan.chunks] == [True] * 8
    sizes = [mask_bytes(chunk.mask.num_queries, max(chunk.mask.key_lens)) for chunk in plan.chunks if chunk.mask]
    assert max(sizes) == least
    with pytest.raises(ValueError, match="the mask must take at most max_bytes = 59 bytes, got 60"):
        planned(given, max_mask_bytes=least - 1)


def test_one_row_more_passes_the_cap() -> None:
    """The default cap: 16384 queries by 32768 keys are 64 MiB to the byte."""
    shape = AttentionShape(
        device=torch.device("cpu"), dtype=torch.float32, num_heads=1, num_kv_heads=1, head_dim_qk=8, head_dim_v=8
    )
    for rows, whole in ((16384, True), (16385, False)):
        plan = plan_masked_chunks(
            torch.tensor([0, rows]), torch.tensor([32768]), shape=shape, topk=4, history_chunk_size=8192
        )
        assert (plan.mask is not None) == whole


def test_without_history_nothing_is_merged() -> None:
    given = question(dtype=torch.bfloat16)
    shape = AttentionShape(
        device=torch.device("cpu"), dtype=torch.bfloat16, num_heads=2, num_kv_heads=1, head_dim_qk=24, head_dim_v=16
    )
    plan = plan_masked_chunks(offsets((5,)), torch.tensor([5]), shape=shape, topk=40, history_chunk_size=16)
    assert len(plan.chunks) == 1
    rows = slice(9, 14)
    k, v = given["k"][54:59], given["v"][54:59]
    out, lse = masked_mha_in_chunks(
        given["q"][rows], given["indices"][rows], lambda _: (k, v), softmax_scale=0.3, plan=plan
    )
    assert out.dtype == torch.bfloat16
    expected, expected_lse = by_oracle(given)
    torch.testing.assert_close(out.double(), expected[rows], rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(lse.double(), expected_lse[rows], rtol=0, atol=1e-5)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "chunk": ({"history_chunk_size": 0}, ValueError, "history_chunk_size must be at least 1, got 0"),
    "context": (
        {"context_lens": torch.tensor([3, 2])},
        ValueError,
        "context_lens must include the 4 current tokens of request 0, got 3",
    ),
    "context dtype": ({"context_lens": torch.ones(2)}, TypeError, "context_lens must be int32 or int64"),
    "context count": ({"context_lens": torch.tensor([9])}, ValueError, r"context_lens must have shape \[N\] = \(2,\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_refuses(name: str) -> None:
    changed, error, text = BAD[name]
    shape = AttentionShape(
        device=torch.device("cpu"), dtype=torch.float32, num_heads=1, num_kv_heads=1, head_dim_qk=8, head_dim_v=8
    )
    good: dict[str, Any] = {"context_lens": torch.tensor([9, 2]), "topk": 4, "history_chunk_size": 8}
    plan_masked_chunks(offsets((4, 1)), shape=shape, **good)
    with pytest.raises(error, match=text):
        plan_masked_chunks(offsets((4, 1)), shape=shape, **good | changed)


def test_a_bad_call_is_refused_where_it_is_noticed() -> None:
    given = question()
    plan = planned(given)
    with pytest.raises(ValueError, match=r"indices must have shape \[T, topk\]"):
        masked_mha_in_chunks(
            given["q"], given["indices"][1:], lambda _: pytest.fail("expanded"), softmax_scale=0.3, plan=plan
        )
    with pytest.raises(TypeError, match="softmax_scale must be a number of the host"):
        masked_mha_in_chunks(
            given["q"],
            given["indices"],
            lambda _: pytest.fail("expanded"),
            softmax_scale=torch.tensor(0.3),  # type: ignore[arg-type]
            plan=plan,
        )
    with pytest.raises(ValueError, match=r"k must have shape \(15, 1, 24\) as planned, got \(3, 1, 24\)"):
        masked_mha_in_chunks(
            given["q"],
            given["indices"],
            lambda _: (given["k"][:3], given["v"][:3]),
            softmax_scale=0.3,
            plan=plan,
        )
