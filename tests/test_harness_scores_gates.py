"""The gates of token scores and selections: what trips each of them, and what must not."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.execution import Execution, execute
from assay.harness.faults import load
from assay.harness.kernels import wrap_function
from assay.harness.messages import decode, encode
from assay.harness.mutation.admission import null_kernel, zeros
from assay.harness.operation import CaseRequest, Inputs, Judged
from assay.harness.operations._token_scores_gates import ScoreOracle, judge_scores
from assay.harness.operations._token_scores_gates import _bounds as bounds
from assay.harness.plan import DTYPES
from assay.harness.plugin import kernel
from assay.harness.poison import same_bits
from assay.harness.record import GateResult, Verdict
from assay.harness.runner import run_case
from assay.harness.shrink import shrink
from assay.harness.snippet import snippet
from assay.optimized.token_selection import token_selection
from assay.reference.token_scores import IDENTITIES

CPU = torch.device("cpu")
SCORES, SELECTION = operations.load("token_scores"), operations.load("token_selection")


def drawn(op: str, **wanted: Any) -> Case:
    """The first smoke case with such a family or sizes."""
    for case in operations.load(op).cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES)):
        if all(getattr(case, name, case.sizes.get(name)) == value for name, value in wanted.items()):
            return case
    raise LookupError(wanted)


def held(case: Case) -> tuple[ScoreOracle, Contract, Inputs]:
    inputs = SCORES.inputs(case, CPU)
    return SCORES.oracle(case, inputs.arguments), SCORES.default_contract(case), inputs  # type: ignore[attr-defined]


def failed(judged: Judged) -> list[str]:
    return [gate.gate for gate in judged.gates if not gate.passed]


@pytest.mark.parametrize("mode", IDENTITIES)
def test_the_exact_scores_pass_and_each_gate_has_what_trips_it(mode: str) -> None:
    case = drawn("token_scores", mode=mode, family="diffuse", dtype="bfloat16", num_heads=3)
    oracle, contract, _ = held(case)
    exact = oracle.scores.float()
    assert failed(judge_scores(oracle, exact, contract, exact=False)) == []
    reached = oracle.reached.nonzero()
    assert 0 < len(reached) < oracle.reached.numel()

    def changed(value: float, at: Tensor) -> Tensor:
        scores = exact.clone()
        scores[tuple(at)] = value
        return scores

    blind = (~oracle.reached).nonzero()[0]
    assert failed(judge_scores(oracle, changed(0.25, blind), contract, exact=False)) == ["G1 scores"]
    assert failed(judge_scores(oracle, changed(math.nan, reached[0]), contract, exact=False)) == ["G1 scores"]
    # far beyond anything that rounding does to one element
    scale = float(exact[oracle.reached].abs().max())
    assert "G4 envelope" in failed(judge_scores(oracle, changed(3 * scale + 1, reached[-1]), contract, exact=False))
    # every element off by less than its own bound, but all of them together by more than roundings come to
    hard, spread, sums, _ = bounds(oracle, contract)
    off = torch.minimum(0.9 * hard, 20 * (spread / math.sqrt(3) + sums))
    alike = torch.where(oracle.reached, oracle.scores + off, oracle.scores).float()
    assert failed(judge_scores(oracle, alike, contract, exact=False)) == ["G5 row rms"]


def test_exact_logits_are_compared_bit_for_bit() -> None:
    case = drawn("token_scores", mode="logits", family="exact-one-hot")
    oracle, contract, _ = held(case)
    exact = oracle.scores.float()
    assert failed(judge_scores(oracle, exact, contract, exact=True)) == []
    next_up = torch.where(oracle.reached, torch.nextafter(exact, torch.tensor(math.inf)), exact)
    assert failed(judge_scores(oracle, next_up, contract, exact=True)) == ["G3 exact"]


def test_probabilities_of_exact_families_are_held_to_the_rounding_of_exponentials_alone() -> None:
    case = drawn("token_scores", mode="probability", family="exact-one-hot")
    oracle, contract, _ = held(case)
    exact = oracle.scores.float()
    assert failed(judge_scores(oracle, exact, contract, exact=True)) == []
    off = judge_scores(oracle, exact * (1 + 2.0**-8), contract, exact=True)
    assert failed(off) == ["G3 exact"]
    # the format of the weights is part of what they may err by
    assert failed(judge_scores(oracle, exact * (1 + 2.0**-8), contract.promising(p="bf16"), exact=True)) == []


def test_what_no_score_may_be_is_said() -> None:
    case = drawn("token_scores", mode="logits", family="peaked")
    oracle, contract, _ = held(case)
    scores = oracle.scores.float()
    blind, seen = (~oracle.reached).nonzero()[0], oracle.reached.nonzero()[0]
    for place, value, text in (
        (blind, 0.25, "a token that no observed query may look at must score -inf, got 0.25"),
        (seen, math.inf, "a token that an observed query may look at must have a finite score, got inf"),
    ):
        wrong = scores.clone()
        wrong[tuple(place)] = value
        (gate,) = judge_scores(oracle, wrong, contract, exact=False).gates
        assert gate.text == f"G1 scores: {text}"


def test_the_terms_of_a_logit_are_those_of_plain_loops() -> None:
    case = drawn("token_scores", mode="logits", family="diffuse", dtype="float32", ranges="all")
    oracle, _, inputs = held(case)
    a = inputs.arguments
    d_nope = a["q"].shape[2] - a["k_pe"].shape[1]
    request = int((a["query_ranges"][:, 0] < a["query_ranges"][:, 1]).nonzero()[0])
    context, first = int(a["context_lens"][request]), int(a["cu_seqlens"][request])
    history = context - int(a["cu_seqlens"][request + 1]) + first
    for token in {0, context // 2, context - 1}:
        slot = int(a["slot_table"][int(a["request_rows"][request]), token])
        latent, best = a["kv_c"][slot].double(), 0.0
        for position in range(*a["query_ranges"][request].tolist()):
            candidate = a["candidate_start"] <= token < context - a["recent_keep_tokens"]
            if token > position or not candidate:
                continue
            for head in range(a["q"].shape[1]):
                q = a["q"][first + position - history, head, :d_nope].double()
                k = a["kv_b_proj"][head, :d_nope].double() @ latent
                best = max(best, float((q.abs() * k.abs()).sum()))
        assert float(oracle.keys[request, token]) == pytest.approx(best)


def test_one_tensor_is_an_answer_and_two_are_not() -> None:
    case = drawn("token_scores", mode="logits", family="diffuse", dtype="float32")
    (clean,) = (one.function for one in load("token_scores")[1] if one.name == "keys_at_once")
    verdicts = {
        "alone": lambda **a: clean(**a),
        "tuple": lambda **a: (clean(**a),),
        "two": lambda **a: (clean(**a), clean(**a)),
        "half": lambda **a: clean(**a).half(),
        "narrow": lambda **a: clean(**a)[:, :-1],
    }
    found = {name: run_case(SCORES, wrap_function(one, SCORES), case, CPU) for name, one in verdicts.items()}
    assert [found[name].verdict for name in ("alone", "tuple")] == [Verdict.PASS] * 2
    assert {found[name].verdict for name in ("two", "half", "narrow")} == {Verdict.STRUCTURE}
    assert found["two"].text == "a kernel must return one tensor scores, got tuple"
    assert "scores must have the declared precision fp32, got torch.float16" in found["half"].text


def test_a_kernel_may_write_into_a_given_buffer() -> None:
    case = drawn("token_scores", mode="probability", family="diffuse")
    (clean,) = (one.function for one in load("token_scores")[1] if one.name == "keys_at_once")

    @kernel(style="dps", contract=Contract(p="fp32", out="fp32", projected="bf16"))
    def into(scores: Tensor, **arguments: Any) -> None:
        scores.copy_(clean(**arguments))

    assert run_case(SCORES, wrap_function(into, SCORES), case, CPU).verdict is Verdict.PASS


def test_an_answer_of_one_tensor_crosses_to_another_process() -> None:
    case = drawn("token_selection", family="ties")
    result = execute(SELECTION, SELECTION.kernels()[0], case, SELECTION.inputs(case, CPU), CPU)
    assert isinstance(result, Execution)
    back = decode(*encode(result), CPU)
    assert isinstance(back, Execution)
    assert len(back.first) == 1
    assert same_bits(back.first[0], result.first[0])


WRONG: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "one too many": (lambda kept, at: _put(kept, at, 5), "must keep 6 tokens and then be -1"),
    "past the context": (lambda kept, at: _put(kept, 5, 40), "must keep 6 tokens of its 20"),
    "twice": (lambda kept, at: _put(kept, 1, int(kept[0, 0])), "must name each token once, in ascending order"),
    "sink lost": (lambda kept, at: _put(kept, 0, 1), "must keep its first 1 and last 2 tokens"),
    "another token": (lambda kept, at: _other(kept), "keep other tokens; of equal scores the earlier stays"),
}


def _put(kept: Tensor, place: int, value: int) -> Tensor:
    kept[0, place] = value
    if place == 0:
        # still ascending
        kept[0, 1:6] = torch.tensor([2, 3, 4, 18, 19], dtype=torch.int32)
    return kept


def _other(kept: Tensor) -> Tensor:
    middle = kept[0, 1:4].tolist()
    free = next(token for token in range(1, 18) if token not in middle)
    kept[0, 1:4] = torch.tensor(sorted([*middle[:2], free]), dtype=torch.int32)
    return kept


@pytest.mark.parametrize("name", WRONG)
def test_a_selection_that_is_none_is_named(name: str) -> None:
    change, text = WRONG[name]
    # the third request is within its budget, so that the answer is wider than the first one's choice
    sizes = {"context_lens": [20, 20, 20], "sink": 1, "recent": 2, "part": 0.3, "pooling": "max", "kernel_size": 3}
    case = Case(op="token_selection", family="diffuse", dtype="float32", seed=1, sizes=sizes)
    kept = wrap_function(lambda **a: change(token_selection(**a), 6), SELECTION)
    record = run_case(SELECTION, kept, case, CPU)
    assert record.verdict is Verdict.NUMERIC
    assert text in record.text


def test_what_the_rounding_of_a_mean_hides_is_no_fault_and_more_is() -> None:
    sizes = {"context_lens": [9], "sink": 0, "recent": 0, "part": 0.34, "pooling": "avg", "kernel_size": 3}
    case = Case(op="token_selection", family="diffuse", dtype="bfloat16", seed=0, sizes=sizes)
    inputs = SELECTION.inputs(case, CPU)

    def judged(row: list[float], kept: list[int]) -> list[GateResult]:
        inputs.arguments["scores"][0, :9] = torch.tensor(row).bfloat16()
        oracle = SELECTION.oracle(case, inputs.arguments)  # type: ignore[attr-defined]
        answer = (torch.tensor([kept], dtype=torch.int32),)
        return SELECTION.judge(case, oracle, answer, SELECTION.default_contract(case)).gates  # type: ignore[attr-defined,no-any-return]

    # the means around tokens 1, 4 and 7 are 1, 1 + 2^-9 and 0.5: bfloat16 tells the first two not apart
    near = [0.0, 3.0, 0.0, 0.0, 3.015625, 0.0, 0.0, 1.5, 0.0]
    assert all(gate.passed for gate in judged(near, [0, 1, 2]))
    assert all(gate.passed for gate in judged(near, [3, 4, 5]))
    assert [gate.gate for gate in judged(near, [6, 7, 8]) if not gate.passed] == ["G4 choice"]


def test_a_fault_of_scores_shrinks_and_its_program_shows_it(tmp_path: Path) -> None:
    case = drawn("token_scores", mode="probability", family="diffuse", ranges="all", candidate_start=3)
    (fault,) = (one for one in load("token_scores")[0] if one.name == "full_denominator")
    wrong = wrap_function(fault.function, SCORES)
    record = run_case(SCORES, wrong, case, CPU)
    assert record.verdict is Verdict.NUMERIC
    small = shrink(case, record.verdict, lambda one: run_case(SCORES, wrong, one, CPU), max_runs=60)
    assert sum(small.sizes["context_lens"]) < sum(case.sizes["context_lens"])
    again = run_case(SCORES, wrong, small, CPU)
    place = next(gate.where for gate in again.gates if not gate.passed)
    program = tmp_path / "show.py"
    program.write_text(snippet(SCORES, small, "assay.harness.faults.token_scores:full_denominator", place))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert "judged: scores" in done.stdout
    assert "worst: scores" in done.stdout


def test_candidates_by_an_unknown_rule_are_refused() -> None:
    case = drawn("token_scores", ranges="middle")
    with pytest.raises(ValueError, match="ranges must be one of all, middle, single, got 'most'"):
        SCORES.inputs(replace(case, sizes=case.sizes | {"ranges": "most"}), CPU)


@pytest.mark.parametrize("op", ["token_scores", "token_selection"])
def test_no_case_is_passed_by_answering_nothing(op: str) -> None:
    operation = operations.load(op)
    cases = operation.cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))
    records = [run_case(operation, null_kernel(zeros, operation, case), case, CPU) for case in cases]
    assert [record.case["id"] for record in records if record.verdict is Verdict.PASS] == []


@pytest.mark.parametrize(
    ("mode", "contexts", "follows"),
    [("probability", [1, 1], False), ("probability", [2, 1], True), ("logits", [1, 1], True)],
)
def test_a_softmax_over_one_token_need_not_follow_the_contents(mode: str, contexts: list[int], follows: bool) -> None:
    case = drawn("token_scores", mode=mode, family="peaked")
    sizes = {"query_lens": [1, 1], "context_lens": contexts, "window": 1, "unobserved": 0, "ranges": "all"}
    case = replace(case, sizes=case.sizes | sizes | {"candidate_start": 0, "recent_keep_tokens": 0, "behind": 0})
    assert SCORES.outline(case).follows_contents is follows
    (clean,) = (one.function for one in load("token_scores")[1] if one.name == "keys_at_once")
    assert run_case(SCORES, wrap_function(clean, SCORES), case, CPU).verdict is Verdict.PASS
