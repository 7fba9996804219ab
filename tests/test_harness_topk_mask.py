"""The judge of masks of bits: what its cases hold, what trips each gate, and what must not."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.faults import load
from assay.harness.kernels import wrap_function
from assay.harness.mutation.admission import NULL_KERNELS, null_kernel
from assay.harness.operation import CaseRequest
from assay.harness.operations._sizes import checked_sizes
from assay.harness.operations._topk_mask_gates import judge_mask
from assay.harness.operations._topk_mask_lists import FIRST, drawn_lists
from assay.harness.operations.topk_mask import OPERATION, REARRANGED, key_bounds, reversed_requests
from assay.harness.plan import DTYPES
from assay.harness.plugin import Unsupported, kernel
from assay.harness.record import Verdict
from assay.harness.runner import run_case
from assay.harness.shrink import shrink
from assay.harness.snippet import snippet
from assay.harness.worker import isolated
from assay.optimized.topk_mask import MAX_MASK_BYTES, mask_bytes
from assay.reference.topk_mask import selected_keys, topk_mask

CPU = torch.device("cpu")
INT32 = torch.iinfo(torch.int32)
SMOKE = OPERATION.cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))
FULL = OPERATION.cases(CaseRequest(tier="full", seed=0, dtypes=DTYPES))
(CLEAN,) = (one.function for one in load("topk_mask")[1] if one.name == "request_by_request")


def drawn(**wanted: Any) -> Case:
    """The first smoke case with such a family or sizes."""
    for case in SMOKE:
        if all(getattr(case, name, case.sizes.get(name)) == value for name, value in wanted.items()):
            return case
    raise LookupError(wanted)


def case_of(family: str, **sizes: Any) -> Case:
    plain = {
        "query_lens": [5, 3],
        "context_lens": [40, 70],
        "topk": 9,
        "chunk_start": 0,
        "chunk_size": 0,
        "tile_queries": 16,
        "tile_keys": 32,
        "layout": "packed",
        "exact_cap": False,
    }
    return Case(op="topk_mask", family=family, dtype="float32", seed=4, sizes=plain | sizes)


def verdict(function: Callable[..., Any], case: Case) -> tuple[Verdict, str]:
    record = run_case(OPERATION, wrap_function(function, OPERATION), case, CPU)
    return record.verdict, record.text


def changed(change: Callable[[Tensor, Tensor], None]) -> Callable[..., Any]:
    """The right answer but for a change of mask and map."""

    def wrong(**arguments: Any) -> Any:
        mask, held = CLEAN(**arguments)
        change(mask, held)
        return mask, held

    return wrong


@pytest.mark.parametrize(("bit", "word"), [(31, "0x80000000"), (0, "0x00000001"), (7, "0x00000080")])
def test_a_bit_too_many_is_named(bit: int, word: str) -> None:
    # requests of 40 and 70 keys, whose bits 40 .. 63 nobody has
    case = case_of("diffuse", query_lens=[2, 3])

    def more(mask: Tensor, held: Tensor) -> None:
        mask[1, 2] ^= INT32.min if bit == 31 else 1 << bit

    found, text = verdict(changed(more), case)
    assert found is Verdict.NUMERIC
    assert f"1 of 5 rows differ; query 1 of request 0 must not have key {64 + bit} (bit {bit} of word 2)" in text
    assert f"whose word is {word}, must be 0x00000000" in text


def test_a_missing_key_is_named_by_its_request() -> None:
    case = case_of("full", topk=70)

    def fewer(mask: Tensor, held: Tensor) -> None:
        mask[6, 0] &= INT32.max

    found, text = verdict(changed(fewer), case)
    assert found is Verdict.NUMERIC
    assert (
        "query 1 of request 1 must have key 31 (bit 31 of word 0), whose word is 0x7fffffff, must be 0xffffff" in text
    )


def test_a_map_is_held_to_the_tiles_of_the_mask() -> None:
    case = case_of("full", topk=70)

    def says_nothing(mask: Tensor, held: Tensor) -> None:
        held[1, 2] = False

    def says_something(mask: Tensor, held: Tensor) -> None:
        held[0, 2] = True

    assert verdict(changed(says_nothing), case) == (
        Verdict.NUMERIC,
        "G3 map: 1 of 6 tiles differ; tile 2 of row 1 holds a bit, the map says none",
    )
    assert verdict(changed(says_something), case) == (
        Verdict.NUMERIC,
        "G3 map: 1 of 6 tiles differ; tile 2 of row 0 holds none, the map says a bit",
    )


def test_the_oracles_own_words_pass_and_count_their_rows() -> None:
    case = drawn(family="signs")
    oracle = OPERATION.oracle(case, OPERATION.inputs(case, CPU).arguments)
    answer = (oracle.mask,) if oracle.held is None else (oracle.mask, oracle.held)
    judged = judge_mask(oracle, answer)
    assert all(gate.passed for gate in judged.gates)
    assert judged.rows == sum(case.sizes["query_lens"]) == len(oracle.mask)


def test_a_kernel_without_a_map_serves_the_cases_that_ask_for_none() -> None:
    @kernel(supports=lambda case: case.sizes["tile_queries"] == 0 or Unsupported("no map"))
    def words_alone(*, indices: Tensor, cu_seqlens_q: Tensor, key_lens: Tensor, key_starts: Tensor | None) -> Tensor:
        return topk_mask(indices, cu_seqlens_q=cu_seqlens_q, key_lens=key_lens, key_starts=key_starts)

    assert verdict(words_alone, drawn(tile_queries=0))[0] is Verdict.PASS
    assert verdict(words_alone, drawn(tile_queries=16)) == (Verdict.UNSUPPORTED, "no map")

    def words_for_all(**arguments: Any) -> Any:
        return CLEAN(**{**arguments, "tile": None})

    assert verdict(words_for_all, drawn(tile_queries=16))[0] is Verdict.STRUCTURE


def test_a_kernel_may_write_into_given_buffers() -> None:
    @kernel(style="dps", contract=Contract(p="fp32", out="fp32"))
    def into(mask: Tensor, tile_map: Tensor, **arguments: Any) -> None:
        words, held = CLEAN(**arguments)
        mask.copy_(words)
        tile_map.copy_(held)

    @kernel(style="dps", contract=Contract(p="fp32", out="fp32"))
    def map_forgotten(mask: Tensor, tile_map: Tensor, **arguments: Any) -> None:
        mask.copy_(CLEAN(**arguments)[0])

    case = case_of("diffuse")
    assert verdict(into, case)[0] is Verdict.PASS
    assert verdict(map_forgotten, case) == (Verdict.WRITE_SCOPE, "6 of 6 elements of tile_map left unwritten")


def kinds(family: str, **sizes: Any) -> Tensor:
    return drawn_lists(case_of(family, query_lens=[30, 20], **sizes), CPU)


def test_lists_hold_what_their_family_is_for() -> None:
    assert (kinds("diffuse").sort(1).values.diff(dim=1) > 0).all()
    repeated = kinds("duplicates", topk=24)
    assert all(len(set(row)) <= 4 for row in repeated.tolist())
    holes = kinds("holes", topk=24)
    assert {-1, -123456, INT32.min} <= set(holes.flatten().tolist())
    assert (holes[0] == -1).all()
    # a key behind padding, in most lists
    behind = (holes < 0).cumsum(1) > 0
    assert int(((holes >= 0) & behind).any(1).sum()) > 30
    outside = set(kinds("outside", topk=40)[:30].flatten().tolist())
    assert {40, 41, 63, 64, 95, 133, 70, 2147480000, INT32.max, INT32.min, -1} <= outside
    signs = kinds("signs", context_lens=[512, 300])
    assert set((signs[signs >= 0] % 32).tolist()) == {0, 31, 300 % 32 - 1}
    late = kinds("late", topk=70, context_lens=[200, 70])
    assert (late[:, :FIRST] == -1).all()
    assert (late[:, FIRST:] >= FIRST).all()
    full = kinds("full", topk=50)
    assert all(sorted(row)[-40:] == list(range(40)) for row in full[:30].tolist())
    assert len({tuple(row) for row in full[:30].tolist()}) == 30


def test_neighbours_of_a_cluster_or_an_indexer_share_keys_and_see_no_future() -> None:
    sizes = {"query_lens": [12], "context_lens": [200], "topk": 40}
    for family in ("clustered", "indexed"):
        lists = drawn_lists(case_of(family, **sizes), CPU)
        last = torch.arange(188, 200)[:, None]
        assert ((lists <= last) & (lists >= 0)).all()
        before, after = set(lists[5].tolist()), set(lists[6].tolist())
        assert 20 <= len(before & after) < 40


def test_chunks_begin_within_words_and_differ_between_requests() -> None:
    chunks = [case for case in SMOKE if case.sizes["chunk_start"]]
    starts = [start % 32 for case in chunks for start in key_bounds(case)[0]]
    assert 0 in starts
    assert 31 in starts
    assert len(set(starts)) > 4
    case = case_of("full", topk=70, chunk_start=31, chunk_size=33)
    assert key_bounds(case) == ([31, 32], [9, 33])
    arguments = OPERATION.inputs(case, CPU).arguments
    assert arguments["key_starts"].tolist() == [31, 32]
    oracle = OPERATION.oracle(case, arguments)
    selected = selected_keys(oracle.mask, 64)
    assert selected[0].nonzero()[:, 0].tolist() == list(range(9))
    assert selected[7].nonzero()[:, 0].tolist() == list(range(33))
    # a request that ends before its chunk has no key in it
    assert key_bounds(case_of("full", context_lens=[20, 70], chunk_start=40)) == ([40, 41], [0, 29])


def test_cases_reach_across_words_tiles_and_the_cap() -> None:
    counts = {count % 32 for case in SMOKE for count in key_bounds(case)[1]}
    assert {0, 1, 31} <= counts
    assert {n for case in SMOKE for n in case.sizes["query_lens"]} >= {0, 1, 15, 16, 17}
    assert {case.sizes["topk"] for case in SMOKE} >= {1, 33, 64, 130}
    sizes = [mask_bytes(sum(case.sizes["query_lens"]), max(key_bounds(case)[1])) for case in FULL]
    assert MAX_MASK_BYTES in sizes
    for case in SMOKE:
        size = mask_bytes(sum(case.sizes["query_lens"]), max(key_bounds(case)[1]))
        given = OPERATION.inputs(case, CPU).arguments["max_bytes"]
        assert given == (size if case.sizes["exact_cap"] else MAX_MASK_BYTES)


def test_a_mask_of_exactly_the_cap_is_built_and_one_row_more_is_refused() -> None:
    case = case_of("diffuse", exact_cap=True)
    (twin, _) = OPERATION.kernels()
    arguments = OPERATION.inputs(case, CPU).arguments
    assert twin.bind(arguments)()[0].numel() * 4 == arguments["max_bytes"]
    row = arguments["max_bytes"] // 8
    with pytest.raises(ValueError, match="the mask must take at most max_bytes"):
        twin.bind(arguments | {"max_bytes": 7 * row})


@pytest.mark.parametrize("layout", ["packed", "strided", "columns"])
def test_a_layout_holds_the_same_lists(layout: str) -> None:
    case = case_of("diffuse", layout=layout)
    indices = OPERATION.inputs(case, CPU).arguments["indices"]
    assert torch.equal(indices, drawn_lists(case, CPU))
    assert indices.is_contiguous() == (layout == "packed")
    if layout == "strided":
        beside = torch.as_strided(indices, (8, 12), indices.stride(), indices.storage_offset())[:, 9:]
        assert (beside >= 0).all()
        assert (beside < 70).all()


def test_a_mask_kept_by_the_address_of_its_lists_is_found() -> None:
    kept: dict[int, Any] = {}

    def remembering(**arguments: Any) -> Any:
        address = arguments["indices"].data_ptr()
        if address not in kept:
            kept[address] = CLEAN(**arguments)
        return tuple(one.clone() for one in kept[address])

    assert verdict(remembering, case_of("diffuse")) == (
        Verdict.NONDETERMINISTIC,
        "the answer stayed the same when the inputs changed",
    )


def test_lists_that_move_up_by_one_change_the_mask_of_every_case_that_says_so() -> None:
    follow = [case for case in SMOKE if OPERATION.outline(case).follows_contents]
    assert len(follow) > len(SMOKE) // 3
    for case in follow:
        arguments = OPERATION.inputs(case, CPU).arguments
        before = OPERATION.oracle(case, arguments).mask
        indices = arguments["indices"]
        indices.add_((indices >= 0) & (indices < INT32.max))
        assert not torch.equal(OPERATION.oracle(case, arguments).mask, before)


TURNED = {"query_lens": [5, 0, 3, 18], "context_lens": [40, 9, 70, 101], "chunk_start": 17, "chunk_size": 60}


@pytest.mark.parametrize("name", ["offsets", "lengths", "first_keys"])
def test_a_kernel_that_knows_a_table_by_its_address_is_found(name: str) -> None:
    (fault,) = (one for one in load("topk_mask")[0] if one.name == f"{name}_known_by_address")
    case = case_of("late", **TURNED)
    found, text = verdict(fault.function, case)
    assert found is Verdict.METAMORPHIC
    assert text.startswith("permute requests: G3 ma")
    # nothing is wrong with the requests as they come, which is all that other families ask for
    assert verdict(fault.function, replace(case, family="full"))[0] is Verdict.PASS


def test_it_is_found_in_a_process_of_its_own() -> None:
    spec = "assay.harness.faults.topk_mask:lengths_known_by_address"
    with isolated(OPERATION, spec, CPU, timeout=60) as worker:
        record = worker.run_case(case_of("late", **TURNED))
    assert (record.verdict, record.text) == (Verdict.METAMORPHIC, "permute requests: G3 mask, inf x its limit")


@pytest.mark.parametrize("layout", ["packed", "strided", "columns"])
def test_reversed_requests_lie_where_they_lay_and_have_the_same_rows(layout: str) -> None:
    case, calls = case_of("late", layout=layout, **TURNED), []

    def noting(**arguments: Any) -> Any:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        calls.append({name: (value.data_ptr(), value.stride(), value.tolist()) for name, value in tensors.items()})
        return CLEAN(**arguments)

    assert verdict(noting, case)[0] is Verdict.PASS
    first, last = calls[0], calls[-1]
    assert [last[name][:2] for name in last] == [first[name][:2] for name in first]
    assert [last[name][2] for name in ("cu_seqlens_q", "key_lens", "key_starts")] == [
        [0, 18, 21, 21, 26],
        [60, 51, 0, 23],
        [20, 19, 18, 17],
    ]
    lists = drawn_lists(case, CPU).tolist()
    assert last["indices"][2] == lists[8:] + lists[5:8] + lists[:5]


def test_a_reversed_case_describes_what_is_asked() -> None:
    case = case_of("late", **TURNED)
    turned, moved = reversed_requests(case, OPERATION.inputs(case, CPU).arguments)
    assert (turned.sizes["query_lens"], turned.sizes["context_lens"]) == ([18, 3, 0, 5], [101, 70, 9, 40])
    assert key_bounds(turned) == ([20, 19, 18, 17], [60, 51, 0, 23]) == tuple(x[::-1] for x in key_bounds(case))
    mask, held = CLEAN(**moved)
    assert [tuple(mask.shape), tuple(held.shape)] == [one.shape for one in OPERATION.outline(turned).results]
    assert key_bounds(reversed_requests(turned, moved)[0]) == key_bounds(case)
    whole = case_of("late", query_lens=[1, 2], context_lens=[9, 40])
    turned, moved = reversed_requests(whole, OPERATION.inputs(whole, CPU).arguments)
    assert moved["key_starts"] is None
    assert key_bounds(turned) == ([0, 0], [40, 9])


def test_a_promise_of_batch_invariance_is_held_in_bits() -> None:
    def placed(**arguments: Any) -> Any:
        mask, held = CLEAN(**arguments)
        mask[0, 0] ^= int(arguments["key_lens"][0]) == 60
        return mask, held

    case, promise = case_of("late", **TURNED), Contract(p="fp32", out="fp32", batch_invariant=True)
    invariant = kernel(contract=promise)(lambda **arguments: placed(**arguments))
    assert verdict(invariant, case) == (Verdict.METAMORPHIC, "bits depend on the order of the requests")
    assert verdict(placed, case) == (Verdict.METAMORPHIC, "permute requests: G3 mask, inf x its limit")


@pytest.mark.parametrize("seed", range(3))
def test_every_seed_has_requests_whose_tables_change_with_their_order(seed: int) -> None:
    cases = OPERATION.cases(CaseRequest(tier="smoke", seed=seed, dtypes=DTYPES))
    changed = set[str]()
    for case in cases if seed else SMOKE:
        if case.family in REARRANGED and len(case.sizes["query_lens"]) > 1:
            arguments = OPERATION.inputs(case, CPU).arguments
            moved = reversed_requests(case, arguments)[1]
            names = (name for name in ("cu_seqlens_q", "key_lens", "key_starts") if arguments[name] is not None)
            changed |= {name for name in names if not torch.equal(moved[name], arguments[name])}
    assert changed == {"cu_seqlens_q", "key_lens", "key_starts"}


@pytest.mark.parametrize("null", NULL_KERNELS, ids=lambda null: null.__name__)
def test_no_case_is_passed_by_computing_nothing(null: Any) -> None:
    records = [run_case(OPERATION, null_kernel(null, OPERATION, case), case, CPU) for case in SMOKE]
    assert [record.case["id"] for record in records if record.verdict is Verdict.PASS] == []


def test_a_fault_shrinks_and_its_program_shows_it(tmp_path: Path) -> None:
    (fault,) = (one for one in load("topk_mask")[0] if one.name == "bit_31_lost")
    wrong, case = wrap_function(fault.function, OPERATION), drawn(family="signs", tile_queries=16)
    record = run_case(OPERATION, wrong, case, CPU)
    assert record.verdict is Verdict.NUMERIC
    small = shrink(case, record.verdict, lambda one: run_case(OPERATION, wrong, one, CPU), max_runs=80)
    assert sum(small.sizes["query_lens"]) == 1
    assert sum(small.sizes["context_lens"]) == 32
    place = next(gate.where for gate in run_case(OPERATION, wrong, small, CPU).gates if not gate.passed)
    program = tmp_path / "show.py"
    program.write_text(snippet(OPERATION, small, "assay.harness.faults.topk_mask:bit_31_lost", place))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert "judged: mask[0, 0] is " in done.stdout
    assert "worst: mask[0, 0] is " in done.stdout


def test_what_no_case_can_be_is_refused() -> None:
    case = case_of("diffuse")
    with pytest.raises(ValueError, match="layout must be one of packed, strided, columns, got 'rows'"):
        OPERATION.inputs(replace(case, sizes=case.sizes | {"layout": "rows"}), CPU)
    with pytest.raises(ValueError, match=r"family must be one of diffuse, .*, got 'peaked'"):
        OPERATION.inputs(replace(case, family="peaked"), CPU)
    for tile in ((16, 0), (8, 32), (16, 48), (17, 32)):
        sizes = case.sizes | {"tile_queries": tile[0], "tile_keys": tile[1]}
        with pytest.raises(ValueError, match="tile_queries and tile_keys must be powers of two from 16 and 32 on"):
            checked_sizes(sizes, SMOKE)
    assert checked_sizes(case.sizes | {"tile_queries": 0, "tile_keys": 0}, SMOKE)["tile_keys"] == 0
