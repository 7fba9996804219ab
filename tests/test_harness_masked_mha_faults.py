"""What tells each fault of masked attention from a right kernel, rearranged cases, and the way by sparse attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from masked_cases import CPU, FINITE_VALUES, OPERATION, State, by_sparse_attention, by_twin, case_of
from torch import Tensor

from assay.harness.case import Case
from assay.harness.faults import load
from assay.harness.kernels import wrap_function
from assay.harness.metamorphic.gate import metamorphic_gates
from assay.harness.metamorphic.masked_mha import MOVES
from assay.harness.plugin import kernel
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case
from assay.harness.shrink import shrink
from assay.reference.attention import merge_states
from assay.reference.masked_mha import masked_mha
from assay.reference.sparse_mla import sparse_mla

NUMERIC_OR_NONFINITE = {Verdict.NUMERIC, Verdict.NONFINITE}


def alone(**sizes: Any) -> dict[str, Any]:
    """One request: the last 20 tokens of 83, and its keys from position 33 on."""
    return {
        "query_lens": [20],
        "key_lens": [50],
        "query_starts": [63],
        "key_starts": [33],
        "selection_seeds": [5],
        "key_holes": [0],
    } | sizes


def judged(name: str, case: Case) -> Record:
    (found,) = (entry for kind in load("masked_mha") for entry in kind if entry.name == name)
    return run_case(OPERATION, wrap_function(found.function, OPERATION), case, CPU)


TWO: dict[str, Any] = {"query_lens": [9, 20], "selection_seeds": [6, 5]}
FROM_0 = {"query_starts": [11, 20], "key_starts": [0, 0], "key_lens": [20, 40]} | TWO
# the sizes that tell a fault, and those beside them that cannot
TELLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "next_word_never_read": (alone(), alone(key_starts=[32])),
    "chunk_offset_in_whole_words": (alone(), alone(key_starts=[32])),
    "chunk_offset_ignored": (alone(key_starts=[32]), alone(key_starts=[0])),
    "sign_fills_the_shift": (alone(), alone(key_starts=[32])),
    "bit_31_lost": (alone(key_starts=[0]), alone(key_starts=[0], key_lens=[31])),
    "first_word_of_the_tile_for_all": (
        alone(key_starts=[0], key_lens=[64]),
        alone(key_starts=[0], key_lens=[32]),
    ),
    "bits_of_the_last_word_lost": (alone(), alone(key_starts=[0], key_lens=[64])),
    "rows_of_the_first_request": (FROM_0, alone()),
    "offset_of_rows_in_bits": (FROM_0, alone()),
    "positions_of_another_request": (TWO, FROM_0),
    "mask_read_as_contiguous": (alone(layout="strided"), alone(layout="packed")),
    "rows_as_wide_as_the_keys": (alone(mask_words=4), alone(mask_words=3)),
    "causality_left_to_the_bits": (alone(), alone(key_lens=[30])),
    "diagonal_tile_not_masked_by_causality": (alone(), alone(key_lens=[30])),
    "query_positions_ignored": (alone(key_lens=[30]), alone()),
    "first_query_at_the_first_key": (alone(), alone(query_starts=[33])),
    "chunk_offset_missing_in_causality": (alone(), alone(key_starts=[0])),
    "map_of_a_chunk_from_its_first_key": (alone(key_holes=[32], mask_words=4), alone(key_starts=[0], key_holes=[32])),
    "map_of_tiles_over_requests": (
        FROM_0
        | {"query_lens": [9, 40], "key_lens": [20, 80], "query_starts": [11, 40]}
        | {"key_holes": [64, 32], "selection_seeds": [6, 1]},
        alone(key_holes=[32]),
    ),
    "k_read_as_contiguous": (alone(layout="beside"), alone()),
    "v_read_as_contiguous": (alone(layout="beside"), alone()),
    "first_head_masked_only": (alone(), alone(num_heads=1)),
    "query_heads_interleaved": (alone(num_heads=4, num_kv_heads=2), alone(num_heads=2, num_kv_heads=2)),
}


@pytest.mark.parametrize("name", TELLING)
def test_a_fault_dies_of_its_trigger_alone(name: str) -> None:
    telling, harmless = (case_of("diffuse", **sizes) for sizes in TELLING[name])
    assert judged("clean", telling).verdict is Verdict.PASS
    assert judged(name, telling).verdict in NUMERIC_OR_NONFINITE
    assert judged(name, harmless).verdict is Verdict.PASS


def test_a_kernel_may_not_remember_a_mask() -> None:
    record = judged("mask_of_the_first_call", case_of("diffuse", dtype="float32"))
    assert record.verdict is Verdict.NONDETERMINISTIC
    assert record.text == "G7 other addresses: bits differ from a plain call"


def test_a_shrunk_case_keeps_what_belongs_to_its_requests() -> None:
    lens: dict[str, Any] = {"query_lens": [9, 20, 3, 7], "key_lens": [20, 40, 9, 9], "query_starts": [11, 20, 6, 2]}
    own: dict[str, Any] = {"key_starts": [0] * 4, "selection_seeds": [6, 5, 4, 3], "key_holes": [0] * 4}
    case = case_of("diffuse", **lens, **own)
    (found,) = (fault for fault in load("masked_mha")[0] if fault.name == "rows_of_the_first_request")
    wrong = wrap_function(found.function, OPERATION)
    record = run_case(OPERATION, wrong, case, CPU)
    small = shrink(case, record.verdict, lambda one: run_case(OPERATION, wrong, one, CPU), max_seconds=20, max_runs=60)
    sizes = small.sizes
    assert len(sizes["query_lens"]) == 2
    assert {len(value) for value in sizes.values() if isinstance(value, list)} == {2}
    assert sizes["selection_seeds"][1] in own["selection_seeds"][1:]
    assert sum(sizes["query_lens"]) < 10


# rearranged


def ask(arguments: dict[str, Any]) -> State:
    return masked_mha(**arguments | {name: arguments[name].double() for name in ("q", "k", "v")})


THREE: dict[str, Any] = {
    "query_lens": [20, 0, 9],
    "key_lens": [50, 3, 40],
    "query_starts": [63, 0, 31],
    "key_starts": [33, 7, 0],
}
THREE |= {"selection_seeds": [5, 7, 6], "key_holes": [32, 0, 0]}
MOVED = [case_of("peaked", "float32", **THREE, layout=layout) for layout in ("packed", "strided", "beside")]


@pytest.mark.parametrize("case", MOVED, ids=lambda case: str(case.sizes["layout"]))
def test_no_move_changes_the_question(case: Case) -> None:
    truth = ask(OPERATION.inputs(case, CPU).arguments)
    inputs = OPERATION.inputs(case, CPU)
    assert MOVES.permute is not None
    moved = MOVES.permute(case, inputs, [2, 0, 1])
    tokens = torch.arange(len(truth[0])).split(MOVES.query_lens(case))
    order = torch.cat([tokens[2], tokens[0], tokens[1]])
    torch.testing.assert_close(ask(inputs.arguments), (truth[0][order], truth[1][order]), rtol=1e-12, atol=1e-12)
    assert torch.equal(OPERATION.outline(moved).empty_rows, OPERATION.outline(case).empty_rows[order])
    for request in (0, 2):
        for move in (MOVES.alone, MOVES.last_query):
            assert move is not None
            (part, own), rows = move(case, OPERATION.inputs(case, CPU), request)
            torch.testing.assert_close(ask(own.arguments), (truth[0][rows], truth[1][rows]), rtol=1e-12, atol=1e-12)
            assert torch.equal(OPERATION.outline(part).empty_rows, OPERATION.outline(case).empty_rows[rows])


@pytest.mark.parametrize("case", MOVED, ids=lambda case: str(case.sizes["layout"]))
def test_chunks_that_begin_anywhere_merge_to_the_whole(case: Case) -> None:
    inputs = OPERATION.inputs(case, CPU)
    cuts = set()
    assert MOVES.split is not None
    for seed in range(12):
        split = MOVES.split(case, inputs, torch.Generator().manual_seed(seed))
        assert split is not None
        assert split.ends is not None
        states = []
        for part, own in split.parts:
            states.append(ask(own.arguments))
            assert torch.equal(OPERATION.outline(part).empty_rows, (states[-1][1] == float("-inf")).all(1))
            cuts.add(part.sizes["key_starts"][0] % 32)
        torch.testing.assert_close(merge_states(*states[0], *states[1]), ask(inputs.arguments), rtol=1e-12, atol=1e-12)
        assert [ends[-1] for ends in split.ends] == case.sizes["key_lens"]
    assert len(cuts) > 6
    one_key = {"query_lens": [20], "key_lens": [1], "query_starts": [63], "key_starts": [33], "selection_seeds": [5]}
    single = replace(case, sizes=case.sizes | one_key | {"key_holes": [0]})
    assert MOVES.split(single, OPERATION.inputs(single, CPU), torch.Generator().manual_seed(1)) is None


def test_every_rearrangement_is_asked_of_a_kernel_that_promises_all() -> None:
    contract = OPERATION.default_contract(MOVED[0]).promising(batch_invariant=True)
    (clean,) = (variant for variant in load("masked_mha")[1] if variant.name == "clean")
    right = wrap_function(kernel(contract=contract)(clean.function), OPERATION)
    first = right.bind(OPERATION.inputs(MOVED[0], CPU).arguments)()
    gates = metamorphic_gates(OPERATION, right, MOVED[0], CPU, first, contract)
    names = {gate.gate.removeprefix("G8 ") for gate in gates}
    assert names >= {"unused content", "poisoned neighbours", "scale values", "permute requests", "split keys", "alone"}
    assert [gate.text for gate in gates if not gate.passed] == []


# by sparse attention


def by_oracle(q: Tensor, cache: Tensor, lists: Tensor, scale: float, d_v: int) -> State:
    return sparse_mla(q, cache, lists, softmax_scale=scale, d_v=d_v)[:2]


@pytest.mark.parametrize("case", FINITE_VALUES, ids=lambda case: case.id)
def test_equals_the_oracle_of_sparse_attention_on_lists_without_repetition(case: Case) -> None:
    arguments = OPERATION.inputs(case, CPU).arguments
    wide = arguments | {name: arguments[name].double() for name in ("q", "k", "v")}
    torch.testing.assert_close(
        by_sparse_attention(by_oracle)(**wide), ask(arguments), rtol=1e-9, atol=1e-9, equal_nan=True
    )


@pytest.mark.parametrize("case", [case for case in FINITE_VALUES if case.dtype == "bfloat16"], ids=lambda case: case.id)
def test_the_twin_of_sparse_attention_is_a_right_kernel(case: Case) -> None:
    kernel = wrap_function(by_sparse_attention(by_twin("torch")), OPERATION)
    record = run_case(OPERATION, kernel, case, CPU)
    assert (record.verdict, record.text) == (Verdict.PASS, "")


def test_the_tiles_of_sparse_attention_are_a_right_kernel() -> None:
    case = case_of("leverage", "float32", **alone(query_lens=[5], query_starts=[70]))
    record = run_case(OPERATION, wrap_function(by_sparse_attention(by_twin("triton")), OPERATION), case, CPU)
    assert (record.verdict, record.text) == (Verdict.PASS, "")


def test_keys_that_are_listed_twice_count_once_under_a_mask() -> None:
    def twice(lists: Tensor) -> Tensor:
        return torch.cat([lists, lists[:, ::2]], dim=1)

    record = run_case(
        OPERATION, wrap_function(by_sparse_attention(by_twin("torch"), twice), OPERATION), case_of("diffuse"), CPU
    )
    assert record.verdict is Verdict.NUMERIC
