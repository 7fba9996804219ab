"""The judge's side of ``sparse_mla``: lists are what they say, rows are the oracle's, and each gate finds its fault."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU
from sparse_cases import OPERATION, PLAIN, judged_sparse, sparse_arguments, sparse_case
from torch import Tensor

from assay.harness.case import Case
from assay.harness.companions import companions
from assay.harness.faults._sparse import sparse_twin
from assay.harness.gates import Roundoffs, exact_elements, nonfinite_gates
from assay.harness.operation import CaseRequest
from assay.harness.operations._sparse_mla_lists import EMPTY, HOLES, REPEATS, TAILS, lists_of
from assay.harness.operations._sparse_mla_values import FAMILIES
from assay.harness.record import Verdict
from assay.harness.runner import run_case
from assay.reference.sparse_mla import sparse_mla

INF = math.inf


def drawn(tier: str = "smoke", seed: int = 0) -> list[Case]:
    cases: list[Case] = OPERATION.cases(CaseRequest(tier=tier, seed=seed, dtypes=("float32", "float16", "bfloat16")))
    return cases


def answer_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle itself, on all that is stored, in float64; what nobody may read is left out first."""
    a = sparse_arguments(case)
    used = torch.zeros(len(a["kv"]), 1, dtype=torch.bool)
    lists = lists_of(case)
    used[a["indices"][lists.valid].long()] = True
    kv = torch.where(used, a["kv"].double(), 0.0)
    sink = None if a["attn_sink"] is None else a["attn_sink"].double()
    return sparse_mla(**(a | {"q": a["q"].double(), "kv": kv, "attn_sink": sink}))


@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("repeats", REPEATS)
def test_lists_hold_what_they_are_asked_to(holes: str, repeats: str) -> None:
    case = sparse_case(holes=holes, repeats=repeats, lengths="ragged", tail="rows", query_lens=[12], context_lens=[60])
    lists, s_kv = lists_of(case), lists_of(case).num_slots
    assert lists.topk_length is not None
    within = torch.arange(40) < lists.topk_length[:, None]
    named = (lists.indices >= 0) & (lists.indices < s_kv)
    # what counts is what the oracle counts
    assert torch.equal(lists.valid, named & within)
    assert torch.equal(lists.slots[lists.tokens[lists.valid]].int(), lists.indices[lists.valid])
    assert lists.topk_length[:3].tolist() == [20, 0, 40]
    assert bool(lists.empty[1])
    front = ~lists.valid[:, :16].any(1) & lists.valid.any(1)
    assert bool(front.any()) == (holes == "front")
    copies = [len(row[ok]) - len(row[ok].unique()) for row, ok in zip(lists.indices, lists.valid, strict=True)]
    assert (max(copies) > 0) == (repeats != "none")
    wild = lists.indices[within & ~named & (lists.indices != -1)]
    assert bool(len(wild)) == (holes == "wild")
    if holes == "wild":
        assert int(wild.min()) < -1
        assert int(wild.max()) >= s_kv


@pytest.mark.parametrize("holes", EMPTY)
def test_whole_requests_list_nothing_that_there_is(holes: str) -> None:
    case = sparse_case(holes=holes, lengths="ragged", tail="rows", query_lens=[3, 70, 4], context_lens=[30, 90, 40])
    lists = lists_of(case)
    empty = [bool(part.all()) for part in lists.empty.split(case.sizes["query_lens"])]
    assert empty == [holes == "all", True, holes == "all"]
    assert lists.topk_length is not None
    within = torch.arange(40) < lists.topk_length[:, None]
    listed = lists.indices[3:73][within[3:73]]
    assert not bool(((listed >= 0) & (listed < lists.num_slots)).any())
    assert int(listed.min()) < -1
    assert int(listed.max()) >= lists.num_slots
    # what lies behind the lengths names rows all the same
    behind = lists.indices[3:73][~within[3:73]]
    assert bool(((behind >= 0) & (behind < lists.num_slots)).all())


def test_a_whole_tile_or_step_without_entries_is_in_the_smoke_tier() -> None:
    empty = [lists_of(case).empty for case in drawn()]
    assert any(bool(part.all()) for one in empty for part in one[: len(one) // 64 * 64].split(64) if len(part))
    assert any(bool(one.all()) for one in empty)


@pytest.mark.parametrize("tail", TAILS)
def test_tails_are_nobodys(tail: str) -> None:
    case = sparse_case(lengths="ragged", tail=tail)
    lists, kv = lists_of(case), sparse_arguments(case)["kv"]
    assert lists.topk_length is not None
    behind = lists.indices[torch.arange(40) >= lists.topk_length[:, None]].long()
    held = kv[behind[(behind >= 0) & (behind < len(kv))]]
    if tail == "padding":
        assert behind.unique().tolist() == [-1]
    elif tail == "huge":
        assert int(behind.min()) > len(kv)
    else:
        assert len(held) == len(behind)
        assert bool(held.isnan().all()) == (tail == "nan")


@pytest.mark.parametrize(
    ("source", "order"), [("uniform", "shuffled"), ("clustered", "ascending"), ("indexer", "ascending")]
)
def test_lists_come_from_selections_in_any_order(source: str, order: str) -> None:
    lists = lists_of(sparse_case(source=source, order=order))
    rises = [bool((row[ok].diff() > 0).all()) for row, ok in zip(lists.indices, lists.valid, strict=True)]
    assert all(rises) == (order == "ascending")
    # of a short request every query lists all that it sees
    assert lists.valid[7:].sum(1).tolist() == [7, 8, 9]
    assert not bool((lists.tokens[:7][lists.valid[:7]] >= 60).any())
    assert not bool((lists.tokens[7:][lists.valid[7:]] < 60).any())


def test_everything_that_nobody_lists_holds_no_number() -> None:
    ends = set()
    for seed in range(8):
        case = sparse_case(seed=seed)
        kv, lists = sparse_arguments(case)["kv"], lists_of(case)
        free = ~torch.isin(torch.arange(len(kv)), lists.slots)
        assert bool(kv[free].isnan().all())
        assert bool(torch.isfinite(kv[lists.slots]).all())
        ends.add((bool(free[0]), bool(free[-1])))
    # both are padding's favourites, with NaN in one case and a row that counts in another
    assert ends == {(True, True), (False, False)}


def test_lures_lie_at_free_ends_of_the_cache() -> None:
    seeds = [seed for seed in range(8) if 0 not in lists_of(sparse_case("leverage", seed=seed)).slots]
    case = sparse_case("leverage", seed=seeds[0])
    kv, lists = sparse_arguments(case)["kv"], lists_of(case)
    assert torch.equal(kv[[0, -1]], kv[lists.slots[lists.targets[[0, -1]]]])


@pytest.mark.parametrize("layout", ["packed", "strided", "within"])
def test_layouts_leave_nan_between(layout: str) -> None:
    given = sparse_arguments(sparse_case(layout=layout))
    assert given["q"].is_contiguous() == given["kv"].is_contiguous() == (layout == "packed")
    same = sparse_arguments(sparse_case(layout="packed"))
    for name in ("q", "kv", "indices"):
        torch.testing.assert_close(given[name], same[name], rtol=0, atol=0, equal_nan=True)
    if layout != "packed":
        assert given["q"].stride() == (64 * 48, 48, 1)
        between = given["q"].as_strided((10, 64, 48), (64 * 48, 48, 1), given["q"].storage_offset() - 30 * 48)
        assert bool(between[:, :30].isnan().all())
    assert (OPERATION.outline(sparse_case(layout=layout)).out_within is not None) == (layout == "within")
    with pytest.raises(ValueError, match="layout must be one of packed, strided, within, vast, got 'odd'"):
        OPERATION.inputs(sparse_case(layout="odd"), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_oracle(family: str) -> None:
    lists: dict[str, Any] = {"holes": "between", "repeats": "some", "lengths": "ragged", "tail": "rows"}
    case = sparse_case(family, sink="finite" if family == "visible-nan" else "mixed", layout="within", **lists)
    expected, outline, seen = answer_of(case), OPERATION.outline(case), 0
    for rows in OPERATION.rows(case, sparse_arguments(case), budget=1 << 40):
        c = companions(rows)
        for own, whole in zip((c.out, c.lse, c.max_logits), expected, strict=True):
            torch.testing.assert_close(own, whole[rows.tokens], rtol=1e-9, atol=1e-9)
        seen += len(rows.tokens)
    assert outline.nan_rows is not None
    assert seen == 10 - int(outline.nan_rows.sum())
    assert torch.equal(expected[1].isnan().all(1), outline.nan_rows)
    assert torch.equal((expected[1] == -INF).all(1), outline.empty_rows)
    assert (int(outline.nan_rows.sum()) > 0) == (family == "visible-nan")


def test_a_large_case_is_sampled() -> None:
    case = sparse_case(query_lens=[300], context_lens=[400], num_heads=9)
    (rows,) = OPERATION.rows(case, sparse_arguments(case), budget=1000)
    assert 20 < len(rows.tokens) < 100
    assert {0, 63, 64, 299} <= set(rows.tokens.tolist())
    assert len(rows.heads) == 4


@pytest.mark.parametrize("family", ["exact-uniform", "exact-one-hot"])
def test_exact_families_hold_exact_elements_beside_a_sink(family: str) -> None:
    case = sparse_case(
        family, "bfloat16", lengths="ragged", repeats="some", sink="mixed", query_lens=[12], context_lens=[64]
    )
    (rows,) = OPERATION.rows(case, sparse_arguments(case), budget=1 << 40)
    c = companions(rows)
    u = Roundoffs.of(OPERATION.default_contract(case), rows)
    exact = exact_elements(c, rows, u, torch.bfloat16, family)
    # beside a finite sink, without one, and under one that takes all, whose zeros are no sums
    by_head = exact.flatten(2).float().mean((0, 2))
    assert float(by_head[1]) > 0.5
    assert float(by_head[0]) > 0.05
    assert c.share[:, 1].unique().tolist() == [1.0]
    assert c.share[c.visible[:, 3] > 0, 3].unique().tolist() == [0.0]


@pytest.mark.parametrize("sink", ["finite", "mixed"])
def test_sinks_lie_where_they_take_a_share(sink: str) -> None:
    for family in ("diffuse", "peaked", "shifted", "leverage"):
        case = sparse_case(family, sink=sink)
        (rows, *_) = OPERATION.rows(case, sparse_arguments(case), budget=1 << 40)
        share = companions(rows).share
        assert 0.02 < float(share[:, 0].median()) < 0.98
        assert share[:, 1].unique().tolist() == [1.0] or sink == "finite"
        assert float(share[:, 3].max()) == 0.0 or sink == "finite"


def test_sizes_that_say_nothing_are_refused() -> None:
    for name in ("holes", "repeats", "lengths", "tail"):
        with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'odd'"):
            lists_of(replace(sparse_case(), sizes=PLAIN | {name: "odd"}))
    with pytest.raises(ValueError, match="sink must be one of none, finite, mixed, got 'odd'"):
        sparse_arguments(sparse_case(sink="odd"))
    with pytest.raises(ValueError, match=r"family must be one of .*, got 'odd'"):
        sparse_arguments(sparse_case("odd"))


def test_each_kind_of_list_and_family_is_in_the_smoke_tier() -> None:
    cases = drawn()
    assert {case.family for case in cases} == set(FAMILIES)
    for name, least in (("holes", 6), ("repeats", 3), ("lengths", 2), ("tail", 4), ("sink", 3), ("source", 3)):
        assert len({case.sizes[name] for case in cases}) == least
    assert {1, 17} <= {case.sizes["num_heads"] for case in cases}
    assert max(sum(case.sizes["query_lens"]) for case in cases) >= 65
    assert not [case for case in cases if case.needs_device]


def test_the_full_tier_has_models_and_edges() -> None:
    cases = drawn("full")
    assert {(576, 512), (512, 512)} <= {(case.sizes["d_qk"], case.sizes["d_v"]) for case in cases}
    assert {512, 640, 1024, 2048, 2176} <= {case.sizes["topk"] for case in cases}
    assert {1, 2, 7, 8, 16, 17, 32, 33, 63, 64, 65, 128} <= {case.sizes["num_heads"] for case in cases}
    assert {63, 64, 65, 129, 70000} <= {sum(case.sizes["query_lens"]) for case in cases}
    assert [case for case in cases if case.sizes["layout"] == "vast"]
    assert all(case.needs_device for case in cases if case.sizes["layout"] == "vast")
    # dtypes that a cache of that length is kept in
    assert not [case for case in cases if case.dtype == "float32" and case.needs_device]


def test_kernels_say_what_they_do_not_serve() -> None:
    kernels = {kernel.name: kernel for kernel in OPERATION.kernels()}
    assert list(kernels)[:3] == ["sparse_mla[torch]", "sparse_mla[triton]", "sparse_mla[padded]"]
    assert [name for name, kernel in kernels.items() if kernel.by_name] == ["sparse_mla[flashmla]"]
    case = sparse_case()
    reasons = {name: kernel.unsupported(case, CPU) or "" for name, kernel in kernels.items()}
    assert reasons["sparse_mla[torch]"] == ""
    assert "where no more than 8 steps fit the time" in reasons["sparse_mla[triton]"]
    assert "gluon refuses: a CUDA device is needed" in reasons["sparse_mla[gluon]"]
    assert "flashmla refuses: FlashMLA needs a CUDA device" in reasons["sparse_mla[flashmla]"]


@pytest.mark.parametrize("name", ["triton", "padded"])
def test_interpreted_kernels_pass_a_small_case(name: str) -> None:
    kernel = next(kernel for kernel in OPERATION.kernels() if kernel.name == f"sparse_mla[{name}]")
    lists: dict[str, Any] = {"holes": "front", "repeats": "some", "sink": "mixed", "layout": "within"}
    case = sparse_case("leverage", query_lens=[2, 1], context_lens=[40, 9], **lists)
    record = run_case(OPERATION, kernel, case, CPU)
    assert record.verdict is Verdict.PASS, record.text
    assert record.rows_judged == 12


def test_the_highest_logit_of_a_row_with_a_nan_may_be_anything() -> None:
    case = sparse_case("visible-nan", query_lens=[6], context_lens=[30])
    out, lse, top = answer_of(case)
    outline = OPERATION.outline(case)
    for value in (math.nan, 3.0, INF):
        changed = torch.where(outline.nan_rows[:, None], value, top)
        assert all(gate.passed for gate in nonfinite_gates(out, lse, outline, changed))
    changed = torch.where(outline.nan_rows[:, None], top, math.nan)
    assert not nonfinite_gates(out, lse, outline, changed)[2].passed


def test_a_highest_logit_without_an_entry_must_be_minus_infinity() -> None:
    case = sparse_case(lengths="ragged")
    out, lse, top = answer_of(case)
    gates = nonfinite_gates(out, lse, OPERATION.outline(case), top.masked_fill(top == -INF, -1e30))
    assert [gate.gate for gate in gates if not gate.passed] == ["G1 max_logits"]
    assert gates[2].where is not None
    assert gates[2].where.expected == -INF


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        (lambda out, lse, top: (out, lse), Verdict.STRUCTURE, r"\(out, lse, max_logits\)"),
        (
            lambda out, lse, top: (out, lse, top.half()),
            Verdict.STRUCTURE,
            "max_logits must have the declared precision",
        ),
        (lambda out, lse, top: (out, lse, top + 1e-3), Verdict.NUMERIC, "G6 max logits"),
        (lambda out, lse, top: (out, lse + 1e-3, top), Verdict.NUMERIC, "G6 lse"),
        (lambda out, lse, top: (out * 1.0001, lse, top), Verdict.NUMERIC, "G6 row scale|G5|G4|G6 pooled"),
    ],
)
def test_each_result_is_held_to_its_gate(change: Any, verdict: Verdict, text: str) -> None:
    record = judged_sparse(sparse_case(), lambda **arguments: change(*sparse_twin(arguments)))
    assert record.verdict is verdict
    assert any(pattern in record.text for pattern in text.replace("\\", "").split("|"))
    assert judged_sparse(sparse_case(), lambda **arguments: sparse_twin(arguments)).verdict is Verdict.PASS


def test_lists_are_contents_and_not_a_plan() -> None:
    kept: dict[int, Tensor] = {}

    def planned_once(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        indices = kept.setdefault(arguments["indices"].data_ptr(), arguments["indices"].clone())
        return sparse_twin({**arguments, "indices": indices})

    record = judged_sparse(replace(sparse_case(), seed=3), planned_once)
    assert (record.verdict, record.text) == (
        Verdict.NONDETERMINISTIC,
        "G7 other addresses: bits differ from a plain call",
    )
