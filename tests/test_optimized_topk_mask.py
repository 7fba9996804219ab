"""Both builders of the bit-packed mask, bit for bit against the oracle, and everything that a plan refuses."""

from typing import Any

import pytest
import torch
from mask_inputs import INT32, mask_plan, offsets, selection
from torch import Tensor

from assay.optimized import topk_mask as face
from assay.optimized.topk_mask import mask_bytes, plan_topk_mask, query_tiles, topk_mask
from assay.reference import topk_mask as oracle

IMPLEMENTATIONS = ["torch", "triton"]


def expected(
    indices: Tensor,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    starts: tuple[int, ...] | None = None,
    tile: tuple[int, int] = (16, 32),
) -> tuple[Tensor, Tensor]:
    cu = offsets(query_lens)
    mask = oracle.topk_mask(
        indices,
        cu_seqlens_q=cu,
        key_lens=torch.tensor(key_lens),
        key_starts=None if starts is None else torch.tensor(starts),
    )
    return mask, oracle.tile_map(mask, cu_seqlens_q=cu, tile_queries=tile[0], tile_keys=tile[1])


# name -> queries, keys, first positions
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]] = {
    "one request": ((33,), (97,), None),
    "one chunk": ((7,), (64,), (33,)),
    "three requests": ((17, 1, 20), (31, 130, 64), None),
    "chunks of three": ((5, 16, 3), (40, 0, 33), (31, 7, 100)),
    "no queries": ((0, 3, 0), (5, 70, 9), None),
    "no keys": ((2, 2), (0, 0), None),
    "nothing": ((0,), (40,), None),
}


@pytest.mark.parametrize("tile", [(16, 32), (32, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_oracle_bit_by_bit(implementation: str, batch: str, tile: tuple[int, int]) -> None:
    query_lens, key_lens, starts = BATCHES[batch]
    indices = selection(query_lens, tuple(m + 35 for m in key_lens) if starts else key_lens, 40)
    plan = mask_plan(indices, query_lens, key_lens, key_starts=starts, tile=tile, implementation=implementation)
    mask, held = topk_mask(indices, plan=plan)
    truth, truth_map = expected(indices, query_lens, key_lens, starts, tile)
    assert held is not None
    assert (mask.dtype, held.dtype) == (torch.int32, torch.bool)
    assert torch.equal(mask, truth)
    assert torch.equal(held, truth_map)
    assert plan.map_shape == held.shape


def test_the_selections_hold_what_matters() -> None:
    query_lens, key_lens, _ = BATCHES["three requests"]
    indices = selection(query_lens, key_lens, 40)
    mask, held = expected(indices, query_lens, key_lens)
    assert {-1, INT32.min, INT32.max, 31, 0} <= set(indices.unique().tolist())
    assert (mask < 0).any()
    assert not mask[::5].any()
    assert held.any()
    assert not held.all()
    assert (indices[0:17] == 31).any()
    # request 0 has 31 keys: its bit 31 is set by nobody
    assert (mask[:17] >= 0).all()


@pytest.mark.parametrize("topk", [1, 3, 1025])
def test_lists_of_any_length(topk: int) -> None:
    indices = selection((6, 5), (70, 33), topk)
    truth, _ = expected(indices, (6, 5), (70, 33))
    for implementation in IMPLEMENTATIONS:
        mask, held = topk_mask(indices, plan=mask_plan(indices, (6, 5), (70, 33), implementation=implementation))
        assert torch.equal(mask, truth)
        assert held is None


@pytest.mark.parametrize("single", [False, True])
def test_single_and_generic_builders_agree(single: bool) -> None:
    from assay.optimized import _topk_mask_triton as host

    indices = selection((37,), (150,), 64)
    for starts in ((0,), (31,)):
        plan = mask_plan(indices, (37,), (100,), key_starts=starts, implementation="triton")
        mask = host.launch(indices, plan, single=single, in_shared=False)
        assert torch.equal(mask, expected(indices, (37,), (100,), starts)[0])


def test_a_bound_near_the_largest_number_does_not_wrap() -> None:
    start = INT32.max - 40
    lists = [[INT32.min, INT32.max, start, start - 1, start + 39, -1, 0, start + 33, INT32.min + start]]
    indices = torch.tensor(lists, dtype=torch.int32)
    for implementation in IMPLEMENTATIONS:
        plan = mask_plan(indices, (1,), (40,), key_starts=(start,), implementation=implementation)
        assert topk_mask(indices, plan=plan)[0].tolist() == [[1, 2**7 | 2]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_indices(implementation: str) -> None:
    indices = selection((9, 8), (70, 33), 20)
    wide = torch.full((20, 40, 2), 5, dtype=torch.int32)
    view = wide[1:18, 4:24, 1].copy_(indices)
    plan = mask_plan(indices, (9, 8), (70, 33), implementation=implementation)
    assert not view.is_contiguous()
    assert torch.equal(topk_mask(view, plan=plan)[0], topk_mask(indices, plan=plan)[0])
    turned = indices.t().contiguous().t()
    assert torch.equal(topk_mask(turned, plan=plan)[0], topk_mask(indices, plan=plan)[0])


def test_many_rows_at_a_time_are_built_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.optimized import _topk_mask_torch as module

    indices = selection((9, 8), (70, 33), 20)
    plan = mask_plan(indices, (9, 8), (70, 33))
    whole = topk_mask(indices, plan=plan)[0]
    monkeypatch.setattr(module, "_CELLS", 5 * 96)
    assert torch.equal(topk_mask(indices, plan=plan)[0], whole)
    assert plan.choice == "auto took torch"


def test_the_cap_holds_to_the_byte() -> None:
    # 97 keys are 4 words: 64 MiB are 4194304 rows of them
    cap = 16 * 10
    assert mask_bytes(10, 97) == cap
    assert mask_bytes(23040, 23040) <= face.MAX_MASK_BYTES < mask_bytes(23296, 23296)
    indices = selection((10,), (97,), 4)
    assert topk_mask(indices, plan=mask_plan(indices, (10,), (97,), max_bytes=cap))[0].nbytes == cap
    row_more = selection((11,), (97,), 4)
    with pytest.raises(
        ValueError,
        match=r"the mask must take at most max_bytes = 160 bytes, got 176 for 11 queries and 97 keys; build one for",
    ):
        mask_plan(row_more, (11,), (97,), max_bytes=cap)
    with pytest.raises(ValueError, match="max_bytes = 159 bytes, got 160"):
        mask_plan(indices, (10,), (97,), max_bytes=cap - 1)
    # the longest request decides for all
    with pytest.raises(ValueError, match="got 176"):
        mask_plan(row_more, (1, 10), (97, 1), max_bytes=cap)


def test_no_tile_spans_two_requests() -> None:
    assert query_tiles((5, 0, 4, 1), 4) == [(0, 4), (4, 5), (5, 9), (9, 10)]


BAD_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "length dtype": ({"key_lens": torch.ones(2)}, TypeError, "key_lens must be int32 or int64, got torch.float32"),
    "length count": (
        {"key_lens": torch.ones(3).int()},
        ValueError,
        r"key_lens must have shape \[N\] = \(2,\), got \(3,\)",
    ),
    "negative length": ({"key_lens": torch.tensor([3, -1])}, ValueError, "key_lens must not be negative, got -1 at"),
    "negative start": ({"key_starts": torch.tensor([-4, 0])}, ValueError, "key_starts must not be negative, got -4"),
    "far start": (
        {"key_starts": torch.tensor([2**31 - 5, 0])},
        ValueError,
        r"key_starts \+ key_lens must be below 2\*\*31, got 2147483652",
    ),
    "topk": ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    "tile": ({"tile": (16, 48)}, ValueError, r"two powers of two, at least \(16, 32\), got \(16, 48\)"),
    "small tile": ({"tile": (16, 16)}, ValueError, "two powers of two"),
    "name": ({"implementation": "cuda"}, ValueError, "must be 'auto' or one of torch, triton, got 'cuda'"),
    "offsets": ({"cu_seqlens_q": torch.tensor([1, 3, 5])}, ValueError, "cu_seqlens_q must start at 0, got 1"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_refuses(name: str) -> None:
    changed, error, text = BAD_PLANS[name]
    good: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 2, 5]), "key_lens": torch.tensor([9, 8]), "topk": 3}
    plan_topk_mask(**good, device=torch.device("cpu"))
    with pytest.raises(error, match=text):
        plan_topk_mask(**good | changed, device=torch.device("cpu"))


def test_wrong_indices_are_refused_before_anything_is_built() -> None:
    indices = selection((2, 3), (9, 8), 4)
    plan = mask_plan(indices, (2, 3), (9, 8))
    with pytest.raises(TypeError, match=r"indices must be int32, got torch\.int64"):
        topk_mask(indices.long(), plan=plan)
    for wrong in (indices[:4], indices[:, :3], indices[None]):
        with pytest.raises(ValueError, match=r"indices must have shape \[T, topk\] = \(5, 4\) as planned, got"):
            topk_mask(wrong, plan=plan)
    with pytest.raises(ValueError, match="indices must be on cpu as planned, got meta"):
        topk_mask(indices.to("meta"), plan=plan)


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.optimized import _topk_mask_triton as host

    monkeypatch.setattr(host, "INTERPRETED", False)
    with pytest.raises(NotImplementedError, match=r"'triton' cannot build this mask; a CUDA device is needed"):
        plan_topk_mask(
            torch.tensor([0, 2]),
            torch.tensor([5]),
            topk=1,
            device=torch.device("cpu"),
            implementation="triton",
        )


# each wrong builder, and that the comparison above sees it
DEFECTS: dict[str, Any] = {
    "repeated positions are added": lambda bits, key: bits.scatter_add_(1, key, torch.ones_like(key)),
    "padding sets bit 0": lambda bits, key: bits.scatter_(1, key.masked_fill(key == bits.shape[1] - 1, 0), 1),
    "padding sets the last bit": lambda bits, key: bits.scatter_(1, key.clamp(max=bits.shape[1] - 2), 1),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_wrong_builder_is_seen(name: str) -> None:
    indices = selection((33,), (97,), 40)
    key = indices.masked_fill((indices < 0) | (indices >= 97), 128).long()
    honest = torch.zeros(33, 129, dtype=torch.int64).scatter_(1, key, 1)
    wrong = DEFECTS[name](torch.zeros(33, 129, dtype=torch.int64), key)

    def packed(bits: Tensor) -> Tensor:
        weights = 2 ** torch.arange(32)
        words: Tensor = (bits[:, :-1].reshape(-1, 4, 32) * weights).sum(-1).int()
        return words

    truth, _ = expected(indices, (33,), (97,))
    assert torch.equal(packed(honest), truth)
    assert not torch.equal(packed(wrong), truth)
