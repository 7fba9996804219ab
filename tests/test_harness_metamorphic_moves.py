"""The moves behind the metamorphic relations: the oracle's answer to a rearranged case is the rearranged answer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU, Answer, attention_case, in_dtype, mla_case, operation_of

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.faults._attention_variants import split_keys
from assay.harness.kernels import wrap_function
from assay.harness.metamorphic.gate import MOVES, metamorphic_gates
from assay.harness.metamorphic.relations import underflow_slack
from assay.harness.record import GateResult
from assay.reference import attention as oracle
from assay.reference import mla_prefill as mla_oracle

ATTENTION = attention_case(seed=3, query_lens=[9, 5, 1, 12], key_lens=[40, 5, 33, 23])
FULL = attention_case(seed=4, query_lens=[9, 5, 3], key_lens=[40, 7, 33], causal=False, layout="strided")
MLA = mla_case(seed=5, query_lens=[9, 5, 1, 2], context_lens=[45, 5, 18, 33])


def ask_oracle(case: Case, arguments: dict[str, Any]) -> Answer:
    exact = in_dtype(arguments, torch.float64)
    if case.op == "attention":
        return oracle.attention(**exact)
    return mla_oracle.mla_prefill(**{name: value for name, value in exact.items() if name != "history_chunk_size"})


FUSED = replace(ATTENTION, sizes=ATTENTION.sizes | {"layout": "fused", "num_heads": 3, "d_v": 20})
SHARED = replace(MLA, sizes=MLA.sizes | {"layout": "shared", "context_lens": [45, 35, 18, 33]})


@pytest.mark.parametrize("case", [ATTENTION, FULL, FUSED, MLA, mla_case(seed=7, layout="bundled"), SHARED], ids=str)
def test_no_move_changes_the_question(case: Case) -> None:
    moves, operation = MOVES[case.op], operation_of(case)
    inputs = operation.inputs(case, CPU)
    truth = ask_oracle(case, inputs.arguments)
    order = list(range(len(moves.query_lens(case))))[::-1]
    tokens = torch.arange(len(truth[0])).split(moves.query_lens(case))
    assert moves.permute is not None
    moved = moves.permute(case, inputs, order)
    assert moves.query_lens(moved) == moves.query_lens(case)[::-1]
    assert moves.key_lens(moved) == moves.key_lens(case)[::-1]
    answer = ask_oracle(moved, inputs.arguments)
    for new, old in zip(answer, truth, strict=True):
        torch.testing.assert_close(new, old[torch.cat(tokens[::-1])], rtol=1e-12, atol=1e-12)

    for request in range(len(order)):
        for move in (moves.alone, moves.last_query):
            if move is None:
                continue
            (part, own), rows = move(case, operation.inputs(case, CPU), request)
            answer = ask_oracle(part, own.arguments)
            torch.testing.assert_close(answer, (truth[0][rows], truth[1][rows]), rtol=1e-12, atol=1e-12)

    if moves.relabel is not None:
        inputs = operation.inputs(case, CPU)
        before = inputs.arguments["slot_table"].clone()
        moves.relabel(inputs, torch.Generator().manual_seed(1))
        after = inputs.arguments["slot_table"]
        assert {0, len(inputs.arguments["kv_c"]) - 1} <= set(after.flatten().tolist())
        assert (before >= 0).sum() == (after >= 0).sum()
        assert not torch.equal(before, after)
        torch.testing.assert_close(ask_oracle(case, inputs.arguments), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [ATTENTION, FULL], ids=["causal", "full"])
def test_the_parts_of_a_split_merge_to_the_whole(case: Case) -> None:
    inputs, moves = operation_of(case).inputs(case, CPU), MOVES["attention"]
    assert moves.split is not None
    split = moves.split(case, inputs, torch.Generator().manual_seed(2))
    assert split is not None
    assert split.ends is not None
    assert len(split.parts) == 2
    states = [ask_oracle(part, own.arguments) for part, own in split.parts]
    merged = oracle.merge_states(*states[0], *states[1])
    torch.testing.assert_close(merged, ask_oracle(case, inputs.arguments), rtol=1e-12, atol=1e-12)
    assert [ends[-1] for ends in split.ends] == case.sizes["key_lens"]


def test_a_history_is_cut_elsewhere_and_nothing_is_cut_without_one() -> None:
    moves, operation = MOVES["mla_prefill"], operation_of(MLA)
    assert moves.split is not None
    split = moves.split(MLA, operation.inputs(MLA, CPU), torch.Generator().manual_seed(2))
    assert split is not None
    part, own = split.whole
    size = part.sizes["history_chunk_size"]
    assert size == own.arguments["history_chunk_size"] != MLA.sizes["history_chunk_size"]
    fresh = mla_case(query_lens=[4], context_lens=[4])
    assert moves.split(fresh, operation.inputs(fresh, CPU), torch.Generator().manual_seed(2)) is None


def test_only_subnormal_float16_numbers_are_forgiven_anything() -> None:
    out = torch.tensor([1.0, 2.0**-14, 2.0**-15, 0.0], dtype=torch.float16)
    assert underflow_slack(out, Contract(p="fp16", out="fp16")).tolist() == [0.0, 0.0, 2.0**-24, 2.0**-24]
    assert underflow_slack(out.bfloat16(), Contract(p="bf16", out="bf16")).tolist() == [0.0] * 4
    stored = underflow_slack(out, Contract(p="fp16", out="fp16", projected="fp16"))
    # one unit in the last place, and four subnormal spacings
    assert stored.tolist() == [2.0**-10 + 2.0**-22, 2.0**-24 + 2.0**-22, 2.0**-25 + 2.0**-22, 2.0**-11 + 2.0**-22]


def test_parts_merged_in_float32_within_a_call_are_handed_out_in_bfloat16_by_two() -> None:
    """A contract of float32 parts says nothing of the two answers that the judge itself merges."""
    lens = {"query_lens": [67, 17, 16, 17, 16], "key_lens": [133, 16, 63, 63, 31]}
    case = attention_case("peaked", "bfloat16", seed=930553176, softmax_scale=0.1274, **lens)
    operation = operation_of(case)
    kernel = wrap_function(split_keys, operation)
    first = kernel.bind(operation.inputs(case, CPU).arguments)()

    def split(store: Any) -> GateResult:
        contract = operation.default_contract(case).promising(splits_store=store, splits=3)
        gates = metamorphic_gates(operation, kernel, case, CPU, first, contract)
        return next(gate for gate in gates if gate.gate == "G8 split keys")

    fine, coarse = split("fp32"), split("bf16")
    # without a roundoff of bfloat16 for the parts 1.02 of the limit
    assert fine.passed
    assert fine.ratio == coarse.ratio
