"""Inputs in another layout hold the same values bit for bit, and answers are restated only as declared."""

import itertools
import math
from typing import Any

import pytest
import torch
from builders import CPU, arguments_of, attention_case, mla_case
from foreign_layouts import LAYOUTS, gathered, given_to
from torch import Tensor

from assay.harness import Conventions, kernel, operations
from assay.harness.kernels import wrap_function
from assay.harness.layouts import (
    Placement,
    block_table,
    empty_row_gates,
    page_indices,
    paged,
    place,
    prepared,
    restated,
    settled,
    tokens_first,
)
from assay.harness.operation import AttentionOutline, Inputs
from assay.harness.poison import GUARD_ELEMENTS, same_bits

MLA = operations.load("mla_prefill")
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("page_size", [1, 2, 16, 53, 61, 64, 69])
@pytest.mark.parametrize("lengths", [[1], [16, 64, 17, 65], [5, 0, 0, 129], [0]])
def test_pages_belong_to_one_request_each_and_the_first_and_last_to_none(lengths: list[int], page_size: int) -> None:
    placed = place(lengths, page_size, seed=1)
    pages = torch.cat(placed.pages).tolist()
    assert [len(mine) for mine in placed.pages] == [math.ceil(length / page_size) for length in lengths]
    assert len(set(pages)) == len(pages)
    assert not {0, placed.num_pages - 1} & set(pages)
    assert all(0 < page < placed.num_pages - 1 for page in pages)
    assert len(pages) < 5 or pages != sorted(pages)
    again = place(lengths, page_size, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(placed.pages, again.pages, strict=True))


def test_pages_by_hand() -> None:
    placed = Placement(page_size=2, num_pages=6, pages=(torch.tensor([4, 1]), torch.tensor([3])), lengths=(3, 2))
    cache = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]])
    got = paged(cache, [torch.tensor([5, 0, 2]), torch.tensor([1, 3])], placed)
    expected = torch.full((6, 2, 1), NAN)
    expected[4, 0], expected[4, 1], expected[1, 0], expected[3, 0], expected[3, 1] = 5.0, 0.0, 2.0, 1.0, 3.0
    assert torch.equal(got.nan_to_num(nan=-9.0), expected.nan_to_num(nan=-9.0))
    assert block_table(placed).tolist() == [[4, 1, 0], [3, 0, 0]]
    indices = page_indices(placed)
    assert {name: tensor.tolist() for name, tensor in indices.items()} == {
        "kv_indptr": [0, 2, 3],
        "kv_indices": [4, 1, 3],
        "kv_last_page_len": [1, 2],
    }
    assert {tensor.dtype for tensor in (*indices.values(), block_table(placed))} == {torch.int32}
    assert [rows.tolist() for rows in placed.rows()] == [[8, 9, 2], [6, 7]]


def test_requests_without_keys_have_no_pages() -> None:
    placed = place([0, 3, 0], 2, seed=0)
    indices = page_indices(placed)
    assert indices["kv_indptr"].tolist() == [0, 0, 2, 2]
    assert indices["kv_last_page_len"].tolist() == [0, 1, 0]
    assert block_table(placed)[[0, 2]].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert page_indices(place([0], 4, seed=0))["kv_indices"].tolist() == []


@pytest.mark.parametrize("layout", ["split", "bundled"])
@pytest.mark.parametrize("which", LAYOUTS)
def test_another_layout_holds_the_same_rows_and_is_undefined_elsewhere(which: str, layout: str) -> None:
    conventions = Conventions(**LAYOUTS[which])
    case = mla_case(layout=layout, query_lens=[9, 5, 1], context_lens=[45, 5, 64], dtype="bfloat16")
    canonical, given = arguments_of(case), given_to(case, conventions).arguments
    bundled = {"kv_cache": torch.cat([canonical["kv_c"], canonical["k_pe"]], dim=1)}
    caches = bundled if conventions.bundled else {name: canonical[name] for name in ("kv_c", "k_pe")}
    for name, cache in caches.items():
        for request, length in enumerate(case.sizes["context_lens"]):
            slots = canonical["slot_table"][int(canonical["request_rows"][request]), :length].long()
            rows = gathered(given, name, request, length, conventions.page_size)
            assert same_bits(rows, cache[slots])
        # rows of no token are NaN throughout: page tails, pages of nobody
        assert int((~given[name].isnan()).sum()) == 114 * cache.shape[1]
        assert given[name].stride(-2) == cache.shape[1] + conventions.row_gap
        assert given[name].is_contiguous() == (conventions.row_gap == 0)
    assert given["context_lens"].tolist() == [45, 5, 64]
    gone = {"slot_table", "request_rows"} | ({"kv_c", "k_pe"} if conventions.bundled else {"kv_cache"})
    assert not gone & set(given)
    assert all(same_bits(given[name], canonical[name]) for name in ("q", "kv_b_proj", "cu_seqlens"))


def test_unused_entries_of_a_block_table_name_a_page_of_nan() -> None:
    given = given_to(mla_case(), Conventions(cache="blocks", page_size=16)).arguments
    table = given["block_table"]
    assert (table.dtype, tuple(table.shape)) == (torch.int32, (2, 4))
    assert table[1, 1:].tolist() == [0, 0, 0]
    assert bool(given["kv_c"][0].isnan().all())


def test_gaps_between_rows_are_undefined_too() -> None:
    case = mla_case()
    inputs = given_to(case, Conventions(row_gap=5))
    cache, canonical = inputs.arguments["kv_c"], arguments_of(case)["kv_c"]
    assert same_bits(cache, canonical)
    inner = inputs.ledger.buffers["kv_c"][GUARD_ELEMENTS:-GUARD_ELEMENTS].view(len(cache), -1)
    assert inner.shape[1] == cache.shape[1] + 5
    assert bool(inner[:, cache.shape[1] :].isnan().all())


def test_packed_keys_go_into_pages_with_their_heads() -> None:
    case = attention_case(num_heads=4, num_kv_heads=2, query_lens=[9, 0, 5], key_lens=[40, 3, 0])
    canonical = arguments_of(case)
    given = given_to(case, Conventions(cache="blocks", page_size=16, row_gap=4)).arguments
    ends = canonical["cu_seqlens_k"].tolist()
    for name, (request, (start, end)) in itertools.product("kv", enumerate(itertools.pairwise(ends))):
        rows = gathered(given, name, request, end - start, 16)
        assert end == start or same_bits(rows, canonical[name][start:end])
    assert given["k"].shape[1:] == (16, 2, 24)
    assert given["k"].stride()[1:] == (2 * 24 + 4, 24, 1)
    assert "cu_seqlens_k" not in given
    assert given["context_lens"].tolist() == [40, 3, 0]


def test_a_flat_projection_is_the_same_memory() -> None:
    case = mla_case()
    inputs = given_to(case, Conventions(flat_projection=True))
    flat = inputs.arguments["kv_b_proj"]
    assert tuple(flat.shape) == (2 * (16 + 12), 32)
    assert torch.equal(flat.view(2, 28, 32), arguments_of(case)["kv_b_proj"])
    assert flat.untyped_storage().data_ptr() == inputs.ledger.buffers["kv_b_proj"].untyped_storage().data_ptr()


def test_the_oracle_keeps_its_own_inputs() -> None:
    case = mla_case(layout="bundled")
    inputs = MLA.inputs(case, CPU)
    before = dict(inputs.arguments)
    stranger = wrap_function(kernel(conventions=Conventions(**LAYOUTS["bundled blocks"]))(lambda **given: None), MLA)
    given = prepared(inputs, stranger, case, MLA.default_contract(case), MLA.outline(case))
    assert inputs.arguments == before
    assert given.arguments["q"] is inputs.arguments["q"]
    assert {"q", "kv_cache", "block_table"} <= set(given.ledger.buffers)
    plain = wrap_function(lambda **given: None, MLA)
    assert prepared(inputs, plain, case, MLA.default_contract(case), MLA.outline(case)) is inputs


@pytest.mark.parametrize("which", LAYOUTS)
def test_what_is_arranged_anew_lies_where_it_lay(which: str) -> None:
    conventions = Conventions(**LAYOUTS[which])
    lens: dict[str, Any] = {"query_lens": [9, 5, 1], "context_lens": [45, 30, 64]}
    home, other = (given_to(mla_case(seed=seed, **lens), conventions) for seed in (0, 1))
    wanted = {name: one.clone() for name, one in other.arguments.items() if isinstance(one, Tensor)}
    found = settled(other, home)
    moved = {name for name, one in wanted.items() if name in other.ledger.buffers}
    assert {"q", "context_lens"} < moved
    for name, values in wanted.items():
        assert same_bits(found.arguments[name], values)
        buffer = found.ledger.buffers[name]
        assert buffer is home.ledger.buffers[name]
        assert found.arguments[name].data_ptr() == home.arguments[name].data_ptr()
        # guard bands came along
        assert same_bits(buffer, found.ledger.copies[name])
    assert not same_bits(other.arguments["q"], given_to(mla_case(seed=0, **lens), conventions).arguments["q"])


def test_what_has_another_form_or_another_maker_stays_where_it_is() -> None:
    conventions = Conventions(cache="blocks", page_size=16)
    home, longer = given_to(mla_case(), conventions), given_to(mla_case(context_lens=[45, 21]), conventions)
    found = settled(longer, home)
    for name in ("kv_c", "k_pe"):
        assert found.arguments[name] is longer.arguments[name]
    assert found.arguments["context_lens"] is home.arguments["context_lens"]
    assert found.arguments["context_lens"].tolist() == [45, 21]
    # a question may bring a tensor of its own under the name of one that the ledger holds
    scaled = home.arguments["q"] * 2
    asked = Inputs(arguments=home.arguments | {"q": scaled}, ledger=home.ledger)
    assert settled(asked, home).arguments["q"] is scaled


def test_a_transposed_lse_is_a_view() -> None:
    out, lse = torch.zeros(3, 2, 4), torch.arange(6.0).view(2, 3)
    same_out, view = tokens_first((out, lse), Conventions(lse_layout="HT"))
    assert same_out is out
    assert view.data_ptr() == lse.data_ptr()
    assert view.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tokens_first((out, lse), Conventions()) == (out, lse)
    # an answer of another structure is left for the judge to name
    for odd in (None, out, (out, None), (out, lse, out), (out, lse[0])):
        assert repr(tokens_first(odd, Conventions(lse_layout="HT"))) == repr(odd)


def test_base_two_is_changed_in_float64() -> None:
    lse = torch.tensor([[1.0, -3.25], [INF, -INF], [NAN, 1e-30]])
    _, natural = restated((torch.zeros(3, 2, 1), lse), Conventions(lse_base="2"), torch.tensor([False, True, False]))
    assert natural.dtype is torch.float64
    assert natural[0].tolist() == [math.log(2.0), -3.25 * math.log(2.0)]
    assert natural[1].tolist() == [INF, -INF]
    assert math.isnan(natural[2, 0])
    assert natural[2, 1] == float(torch.tensor(1e-30)) * math.log(2.0)


EMPTY = torch.tensor([True, False])


@pytest.mark.parametrize("value", ["zero", "nan"])
@pytest.mark.parametrize("lse_value", ["-inf", "+inf", "nan"])
def test_only_declared_values_of_empty_rows_are_translated(value: Any, lse_value: Any) -> None:
    conventions = Conventions(empty_row=(value, lse_value))
    values = {"zero": 0.0, "nan": NAN, "-inf": -INF, "+inf": INF}
    out, lse = torch.full((2, 1, 2), values[value], dtype=torch.bfloat16), torch.full((2, 1), values[lse_value])
    got, got_lse = restated((out, lse), conventions, EMPTY)
    assert (got.dtype, got_lse.dtype) == (torch.bfloat16, torch.float32)
    assert got[0].tolist() == [[0.0, 0.0]]
    assert got_lse[0].tolist() == [-INF]
    # the same values in a row that sees keys stay what they are
    assert same_bits(got[1], out[1])
    assert same_bits(got_lse[1], lse[1])
    other = torch.full((2, 1, 2), 3.0), torch.full((2, 1), 3.0)
    assert all(same_bits(a, b) for a, b in zip(restated(other, conventions, EMPTY), other, strict=True))


OUTLINE = AttentionOutline(num_tokens=2, num_heads=1, d_v=2, empty_rows=EMPTY, requests=torch.tensor([4, 5]))


def test_an_empty_row_must_hold_what_was_declared_and_not_what_the_oracle_says() -> None:
    conventions = Conventions(empty_row=("nan", "+inf"))
    right = torch.tensor([[[NAN, NAN]], [[1.0, 2.0]]]), torch.tensor([[INF], [0.5]])
    assert [gate.passed for gate in empty_row_gates(right, conventions, OUTLINE)] == [True, True]
    canonical = torch.tensor([[[NAN, 0.0]], [[1.0, 2.0]]]), torch.tensor([[-INF], [0.5]])
    out, lse = empty_row_gates(canonical, conventions, OUTLINE)
    assert (out.gate, out.passed, lse.gate, lse.passed) == ("G1 out empty row", False, "G1 lse empty row", False)
    assert out.text == "1 elements of out in empty rows are not the declared nan"
    assert str(out.where) == "request 4, token 0, head 0, dim 1, got 0, must be nan"
    assert str(lse.where) == "request 4, token 0, head 0, got -inf, must be inf"
    assert empty_row_gates(canonical, Conventions(lse_base="2"), OUTLINE) == []
