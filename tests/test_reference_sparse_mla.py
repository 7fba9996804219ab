"""The oracle of sparse MLA against loops in Python floats, closed forms, dense attention and a split of the list."""

import math
from typing import Any

import pytest
import torch
from builders import in_dtype
from torch import Tensor

from assay.reference.attention import attention, merge_states
from assay.reference.sparse_mla import share_beside_sink, sparse_mla

INF = math.inf
OUTSIDE = (-(2**31), -123456, -1, 11, 114514, 2**31 - 1)


def inputs(
    *, s_q: int = 7, s_kv: int = 11, h_q: int = 3, d_qk: int = 6, topk: int = 9, seed: int = 0
) -> dict[str, Any]:
    """Lists with repeated rows and every kind of padding, ragged lengths, sinks of every kind."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, s_kv, (s_q, topk), generator=generator, dtype=torch.int32)
    indices[0] = -1
    indices[1, ::2] = indices[1, 1]
    indices[2, : len(OUTSIDE)] = torch.tensor(OUTSIDE)
    length = torch.randint(1, topk + 1, (s_q,), generator=generator, dtype=torch.int32)
    length[2], length[3] = topk, 0
    sink = torch.randn(h_q, generator=generator, dtype=torch.float64)
    sink[-1] = -INF
    return {
        "q": torch.randn(s_q, h_q, d_qk, generator=generator, dtype=torch.float64),
        "kv": torch.randn(s_kv, d_qk, generator=generator, dtype=torch.float64),
        "indices": indices,
        "softmax_scale": 0.7,
        "d_v": 4,
        "topk_length": length,
        "attn_sink": sink,
    }


def looped(given: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """One query, head and listed row at a time; the sink is one more exponential of the denominator."""
    q, kv, lists = (given[name].tolist() for name in ("q", "kv", "indices"))
    length, sink = given["topk_length"], given["attn_sink"]
    outs, lses, highest = [], [], []
    for s, heads in enumerate(q):
        listed = lists[s] if length is None else lists[s][: int(length[s])]
        rows = [kv[t] for t in listed if 0 <= t < len(kv)]
        for h, query in enumerate(heads):
            logits = [
                given["softmax_scale"] * math.fsum(a * b for a, b in zip(query, row, strict=True)) for row in rows
            ]
            weights = [math.exp(z) for z in logits]
            total = math.fsum(weights)
            below = total + (0.0 if sink is None else math.exp(sink[h]))
            sums = (math.fsum(w * row[d] for w, row in zip(weights, rows, strict=True)) for d in range(given["d_v"]))
            outs.append([x / below if rows and below < INF else 0.0 for x in sums])
            lses.append(math.log(total) if rows else -INF)
            highest.append(max(logits, default=-INF))
    return outs, lses, highest


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("length", "sink"), [(True, True), (True, False), (False, True), (False, False)])
def test_loops_over_plain_floats_give_the_same(length: bool, sink: bool, seed: int) -> None:
    given = inputs(seed=seed)
    given |= {
        "topk_length": given["topk_length"] if length else None,
        "attn_sink": given["attn_sink"] if sink else None,
    }
    out, lse, max_logits = sparse_mla(**given)
    assert out.shape == (7, 3, 4)
    for ours, theirs in zip((out.flatten(0, 1), lse.flatten(), max_logits.flatten()), looped(given), strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_zero_queries_average_with_multiplicity() -> None:
    kv = torch.tensor([[8.0, 1.0], [2.0, 5.0], [100.0, 100.0]], dtype=torch.float64)
    indices = torch.tensor([[0, 1, 0, -1, 0]])
    out, lse, max_logits = sparse_mla(torch.zeros(1, 1, 2).double(), kv, indices, softmax_scale=1.0, d_v=2)
    assert out[0, 0].tolist() == pytest.approx([26 / 4, 8 / 4], rel=1e-15)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-15)
    assert max_logits.item() == 0.0


def test_rows_without_a_valid_entry_are_empty_whatever_the_sink() -> None:
    given = inputs(h_q=4)
    given["attn_sink"] = torch.tensor([0.0, INF, -INF, 1e30]).double()
    out, lse, max_logits = sparse_mla(**given)
    for row in (0, 3):
        assert torch.equal(out[row], torch.zeros(4, 4).double())
        assert lse[row].tolist() == max_logits[row].tolist() == [-INF] * 4
    assert bool(lse[[1, 2, 4, 5, 6]].isfinite().all())


def test_a_sink_takes_weight_and_moves_neither_lse_nor_maximum() -> None:
    given = inputs()
    plain = sparse_mla(**given | {"attn_sink": None})
    sinks = torch.tensor([-INF, INF, 0.3]).double()
    out, lse, max_logits = sparse_mla(**given | {"attn_sink": sinks})
    assert torch.equal(lse, plain[1])
    assert torch.equal(max_logits, plain[2])
    assert torch.equal(out[:, 0], plain[0][:, 0])
    assert not out[:, 1].any()
    # half the weight goes to a sink as heavy as all the keys together
    assert share_beside_sink(torch.tensor([[1.7]]), torch.tensor([1.7])).tolist() == [[0.5]]


def test_a_sink_is_an_extra_row_of_that_logit_without_a_value() -> None:
    given = inputs(seed=4)
    del given["topk_length"]
    q, sink = given["q"], torch.tensor([0.4, -1.2, 2.0]).double()
    # one more column, in which every query is 1 and only the extra row is not 0, one extra row a head
    wide = torch.cat([q, torch.ones(*q.shape[:2], 1).double()], dim=-1)
    for h in range(3):
        kv = torch.cat([given["kv"], torch.zeros(11, 1).double()], dim=-1)
        extra = torch.zeros(1, 7).double()
        extra[0, -1] = sink[h] / given["softmax_scale"]
        listed = torch.where((given["indices"] >= 0) & (given["indices"] < 11), given["indices"], -1)
        listed = torch.cat([listed, torch.full((7, 1), 11)], dim=1)
        with_row = sparse_mla(
            wide[:, h : h + 1], torch.cat([kv, extra]), listed, softmax_scale=given["softmax_scale"], d_v=4
        )
        beside = sparse_mla(**given | {"attn_sink": sink})[0][:, h : h + 1]
        torch.testing.assert_close(with_row[0], beside, rtol=1e-12, atol=1e-14)


def test_all_rows_in_any_order_are_dense_attention() -> None:
    generator = torch.Generator().manual_seed(5)
    q, kv = torch.randn(5, 3, 6, generator=generator).double(), torch.randn(11, 6, generator=generator).double()
    indices = torch.stack([torch.randperm(11, generator=generator) for _ in range(5)])
    out, lse, _ = sparse_mla(q, kv, indices, softmax_scale=0.4, d_v=4)
    whole = attention(
        q, kv[:, None], kv[:, None, :4], softmax_scale=0.4, causal=False,
        cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 11]),
    )  # fmt: skip
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("split", [0, 1, 4, 9])
def test_parts_of_the_list_merge_to_the_whole(split: int) -> None:
    given = inputs(seed=6)
    del given["topk_length"], given["attn_sink"]
    whole = sparse_mla(**given)
    padded = [given["indices"].clone() for _ in range(2)]
    padded[0][:, split:] = -1
    padded[1][:, :split] = -1
    parts = [sparse_mla(**given | {"indices": part}) for part in padded]
    out, lse = merge_states(*parts[0][:2], *parts[1][:2])
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-13)
    assert torch.equal(torch.maximum(parts[0][2], parts[1][2]), whole[2])


def test_nothing_outside_the_selection_is_looked_at() -> None:
    given = inputs(seed=7)
    before = sparse_mla(**given)
    listed = given["indices"].long()
    reach = (torch.arange(9) < given["topk_length"][:, None]) & (listed >= 0) & (listed < 11)
    # the first row, the last, and all that nobody lists
    given["indices"] = torch.where(reach & (listed % 10 == 0), 5, given["indices"])
    before = sparse_mla(**given)
    unused = torch.ones(11, dtype=torch.bool)
    unused[given["indices"].long()[reach]] = False
    assert unused[0]
    assert unused[10]
    given["kv"][unused] = torch.nan
    given["indices"] = torch.where(torch.arange(9) < given["topk_length"][:, None], given["indices"], 2**31 - 1)
    assert all(torch.equal(*pair) for pair in zip(sparse_mla(**given), before, strict=True))


def test_a_nan_is_seen_by_those_who_list_it_and_by_no_other() -> None:
    given = inputs(seed=8)
    del given["topk_length"]
    sees = ((given["indices"] == 6).any(1)).nonzero()[:, 0].tolist()
    assert 0 < len(sees) < 6
    given["kv"][6] = torch.nan
    for result in sparse_mla(**given):
        assert result.isnan().flatten(1).any(1).nonzero()[:, 0].tolist() == sees


def test_an_empty_cache_is_legal() -> None:
    given = inputs()
    out, lse, max_logits = sparse_mla(**given | {"kv": given["kv"][:0]})
    assert not out.any()
    assert lse.tolist() == max_logits.tolist() == [[-INF] * 3] * 7


def test_lists_without_entries_are_legal() -> None:
    given = inputs()
    out, lse, max_logits = sparse_mla(**given | {"indices": given["indices"][:, :0], "topk_length": None})
    assert torch.equal(out, torch.zeros(7, 3, 4).double())
    assert lse.tolist() == max_logits.tolist() == [[-INF] * 3] * 7


@pytest.mark.parametrize("d_v", [-1, 0, 7])
def test_a_value_has_columns_of_the_cache(d_v: int) -> None:
    with pytest.raises(ValueError, match=f"d_v must be 1 to 6, got {d_v}"):
        sparse_mla(**inputs() | {"d_v": d_v})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_of_the_inputs_is_kept(dtype: torch.dtype) -> None:
    given = in_dtype(inputs(), dtype)
    assert {result.dtype for result in sparse_mla(**given)} == {dtype}


def test_gradients_are_those_of_finite_differences() -> None:
    given = inputs(s_q=4) | {"topk_length": None}
    given["indices"] = torch.tensor([[1, 5, 5, -1], [0, 3, 2, 7], [-1, -1, -1, -1], [9, -1, 11, 9]])
    # one sink takes nothing, also beside the query without a valid entry
    given["attn_sink"] = torch.tensor([0.2, 1.0, -INF]).double()
    leaves = [given.pop(name).requires_grad_() for name in ("q", "kv", "attn_sink")]

    def run(q: Tensor, kv: Tensor, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = sparse_mla(q, kv, attn_sink=attn_sink, **given)
        return out, lse[:2]

    assert torch.autograd.gradcheck(run, tuple(leaves))


def test_a_sink_without_weight_has_no_gradient() -> None:
    """Also of a query without a valid entry, where the difference of the logarithms is NaN."""
    sink = torch.tensor([-INF, INF, 0.0]).requires_grad_()
    share_beside_sink(torch.tensor([[-INF] * 3, [0.0] * 3]), sink).sum().backward()
    assert sink.grad is not None
    assert sink.grad.tolist() == [0.0, 0.0, -0.25]
