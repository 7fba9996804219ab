"""Counts of arithmetic and bytes, against figures worked out by hand and pairs counted one by one."""

import itertools
from typing import Any

import pytest

from assay.harness.bench.shapes import packaged_shapes
from assay.harness.bench.work import Work, visible_pairs, work_of

ATTENTION: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1, "d_qk": 5, "d_v": 4, "causal": True}
MLA: dict[str, Any] = {"num_heads": 2, "kv_lora_rank": 8, "d_nope": 3, "d_rope": 2, "d_v": 4}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0), (1, 1), (4, 4), (2, 7), (7, 2), (5, 6)])
def test_visible_pairs_are_those_counted_one_by_one(queries: int, keys: int, causal: bool) -> None:
    shift = keys - queries
    pairs = itertools.product(range(queries), range(keys))
    counted = sum(1 for i, j in pairs if not causal or j <= i + shift)
    assert visible_pairs(queries, keys, causal=causal) == counted


def test_a_causal_square_is_half_and_half_the_diagonal() -> None:
    assert visible_pairs(8192, 8192, causal=True) == 8192 * 8193 // 2


def test_attention_by_hand() -> None:
    # queries 2 and 1 see 3 + 4 keys of 4, and 1 of 1: 8 pairs, 3 heads, 5 + 4 products each, 2 FLOP a product
    sizes = ATTENTION | {"query_lens": [2, 1, 0], "key_lens": [4, 1, 6]}
    work = work_of("attention", sizes, "bfloat16")
    # q and out 3 x 3 x 9 elements, lse 9 floats, k and v 5 x 1 x 9 (no query looks at the six), offsets 2 x 4 integers
    assert work == Work(flop=2 * 8 * 3 * 9, bytes=81 * 2 + 9 * 4 + 45 * 2 + 8 * 4)
    assert work.intensity == 432 / 320


def test_mla_prefill_by_hand_where_expanding_is_cheaper() -> None:
    sizes = MLA | {"query_lens": [4], "context_lens": [6]}
    # pairs 3 + 4 + 5 + 6 = 18; expanded 6 x 8 x 7 + 18 x 9 = 498 a head, absorbed 4 x 8 x 7 + 18 x 18 = 548
    work = work_of("mla_prefill", sizes, "float32")
    # q and out 4 x 2 x 9 elements, lse 8 floats, 6 latents of 10 elements and their slots, weights 2 x 7 x 8 elements
    assert work == Work(flop=2 * 2 * 498, bytes=72 * 4 + 8 * 4 + 6 * (40 + 4) + 112 * 4)


def test_mla_prefill_by_hand_where_absorbing_is_cheaper() -> None:
    # one query over 50: expanded 50 x 56 + 50 x 9 = 3250 a head, absorbed 56 + 50 x 18 = 956
    work = work_of("mla_prefill", MLA | {"query_lens": [1], "context_lens": [50]}, "float32")
    assert work is not None
    assert work.flop == 2 * 2 * 956


def test_each_request_takes_its_own_cheaper_form() -> None:
    both = work_of("mla_prefill", MLA | {"query_lens": [4, 1], "context_lens": [6, 50]}, "float32")
    assert both is not None
    assert both.flop == 2 * 2 * (498 + 956)


def test_nobody_counted_an_unknown_operation() -> None:
    assert work_of("kda", {}, "bfloat16") is None


# 2 x pairs x heads x (d_qk + d_v), in units of 1e9, worked out on paper
GIGA_FLOP = {
    "deepseek-v3-tp8-8k": 2 * (8192 * 8193 / 2) * 16 * 320 / 1e9,
    "deepseek-v3-tp8-16k": 2 * (16384 * 16385 / 2) * 16 * 320 / 1e9,
    "deepseek-v3-tp8-history": 2 * 8192 * 16384 * 16 * 320 / 1e9,
    "deepseek-v3-4k": 2 * (4096 * 4097 / 2) * 128 * 320 / 1e9,
    "glm-4.7-flash-8k": 2 * (8192 * 8193 / 2) * 20 * 512 / 1e9,
}


@pytest.mark.parametrize("name", GIGA_FLOP)
def test_the_work_of_a_packaged_shape(name: str) -> None:
    shape = next(shape for shape in packaged_shapes() if shape.name == name)
    work = work_of(shape.op, shape.sizes, shape.dtype)
    assert work is not None
    assert work.flop / 1e9 == pytest.approx(GIGA_FLOP[name], rel=1e-12)


def test_the_published_rate_of_cudnn_follows_from_its_time() -> None:
    # 0.600 ms and 572 TFLOP/s were measured together
    shape = next(shape for shape in packaged_shapes() if shape.name == "deepseek-v3-tp8-8k")
    work = work_of(shape.op, shape.sizes, shape.dtype)
    assert work is not None
    assert work.flop / 0.600 / 1e9 == pytest.approx(572, abs=1)


def test_the_long_mla_shape() -> None:
    shape = next(shape for shape in packaged_shapes() if shape.name == "deepseek-v3.2-tp8-64k")
    work = work_of(shape.op, shape.sizes, shape.dtype)
    assert work is not None
    pairs = 8192 * 65536 + 8192 * 8193 // 2
    assert work.flop == 2 * 16 * (73728 * 512 * 256 + pairs * 320)
    latents, queries = 73728 * (576 * 2 + 4), 8192 * 16 * (320 * 2 + 4)
    assert work.bytes == latents + queries + 16 * 256 * 512 * 2
