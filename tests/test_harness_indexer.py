"""The judge of an indexer's lists: what its cases hold, what trips each gate, and what must not."""

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

from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.faults import load
from assay.harness.kernels import wrap_function
from assay.harness.mutation.admission import NULL_KERNELS, null_kernel
from assay.harness.operation import CaseRequest
from assay.harness.operations import _indexer_gates as own_gates
from assay.harness.operations._indexer_gates import IndexOracle, judge_index, keeps_whole_numbers
from assay.harness.operations._indexer_values import EXACT_FAMILIES
from assay.harness.operations.indexer import OPERATION, reversed_requests
from assay.harness.plan import DTYPES
from assay.harness.plugin import kernel
from assay.harness.record import Verdict
from assay.harness.runner import run_case
from assay.harness.shrink import shrink
from assay.harness.snippet import snippet
from assay.harness.worker import isolated
from assay.reference.indexer import best_keys

CPU = torch.device("cpu")
INF = math.inf
PLAIN = Contract(p="fp32", out="fp32")
SMOKE = OPERATION.cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))
(CLEAN,) = (one.function for one in load("indexer")[1] if one.name == "request_by_request")


def case_of(family: str = "diffuse", dtype: str = "float32", **sizes: Any) -> Case:
    plain = {"num_heads": 2, "head_dim": 16, "topk": 6, "query_lens": [4, 3], "key_lens": [20, 3], "layout": "packed"}
    return Case(op="indexer", family=family, dtype=dtype, seed=3, sizes=plain | sizes)


def held(case: Case) -> tuple[IndexOracle, Tensor, Tensor]:
    """The oracle of a case, with the best list and its scores."""
    oracle = OPERATION.oracle(case, OPERATION.inputs(case, CPU).arguments)
    lists = [best_keys(part.scores, case.sizes["topk"]) for part in oracle.parts]
    return oracle, torch.cat([keys for keys, _ in lists]), torch.cat([scores for _, scores in lists]).float()


def failed(oracle: IndexOracle, keys: Tensor, scores: Tensor, contract: Contract = PLAIN, **said: bool) -> list[str]:
    judged = judge_index(oracle, (keys, scores), contract, exact=said.get("exact", False))
    assert judged.rows == len(keys)
    return [gate.gate for gate in judged.gates if not gate.passed]


def text_of(oracle: IndexOracle, keys: Tensor, scores: Tensor, *, exact: bool = False) -> str:
    gates = judge_index(oracle, (keys, scores), PLAIN, exact=exact).gates
    return next(gate.text for gate in gates if not gate.passed)


def test_the_exact_list_passes_and_names_what_it_was_held_to() -> None:
    oracle, keys, scores = held(case_of())
    judged = judge_index(oracle, (keys, scores), PLAIN, exact=False)
    assert [gate.gate for gate in judged.gates] == ["G3 list", "G1 scores", "G4 scores", "G4 order", "G4 choice"]
    assert all(gate.passed for gate in judged.gates)


WRONG_LISTS: dict[str, tuple[int, int, int, str]] = {
    # query, place, what stands there
    "negative": (0, 2, -1, "query 0 of request 0 must list 6 of the 17 keys that it sees"),
    "in the future": (0, 2, 17, "query 0 of request 0 must list 6 of the 17 keys that it sees"),
    "far away": (3, 0, 1 << 30, "query 3 of request 0 must list 6 of the 20 keys that it sees"),
    "not padded": (4, 1, 0, "query 4 of request 1 must list 1 keys and then be -1"),
    "padded otherwise": (6, 5, -2, "query 6 of request 1 must list 3 keys and then be -1"),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_list_that_is_none_is_named(name: str, exact: bool) -> None:
    query, place, value, text = WRONG_LISTS[name]
    oracle, keys, scores = held(case_of("exact-codes" if exact else "diffuse"))
    keys[query, place] = value
    assert failed(oracle, keys, scores, exact=exact) == ["G3 list"]
    assert text in text_of(oracle, keys, scores, exact=exact)


def test_a_key_that_is_listed_twice_is_named() -> None:
    oracle, keys, scores = held(case_of())
    keys[1, 5] = keys[1, 0]
    assert failed(oracle, keys, scores) == ["G3 list"]
    assert "query 1 of request 0 must list each key once" in text_of(oracle, keys, scores)


def test_scores_are_finite_where_a_key_is_listed_and_nowhere_else() -> None:
    oracle, keys, scores = held(case_of())
    for query, place, value, text in (
        (2, 1, INF, "a listed key must have a finite score, got inf"),
        (2, 1, math.nan, "a listed key must have a finite score, got nan"),
        (5, 2, 0.0, "a place without a key must be -inf, got 0"),
        (5, 2, math.nan, "a place without a key must be -inf, got nan"),
    ):
        wrong = scores.clone()
        wrong[query, place] = value
        assert failed(oracle, keys, wrong) == ["G1 scores"]
        assert text_of(oracle, keys, wrong) == f"G1 scores: {text}"


def test_a_score_beyond_its_bound_is_found_and_one_within_is_not() -> None:
    oracle, keys, scores = held(case_of())
    part = oracle.parts[0]
    bound = float(own_gates._bounds(oracle, part, PLAIN)[2, int(keys[2, 3])])
    for share, gates in ((0.8, []), (1.3, ["G4 scores"])):
        off = scores.double()
        off[2, 3] = float(part.scores[2, int(keys[2, 3])]) + share * bound
        assert failed(oracle, keys, off) == gates


def with_scores(rows: list[list[float]], bound: float, topk: int) -> tuple[IndexOracle, IndexOracle]:
    """An oracle of these scores, and the same with bounds of that size; of one request, all keys visible."""
    scores = torch.tensor(rows, dtype=torch.float64)
    lengths = torch.full_like(scores, bound / (own_gates.SUM_SIGMAS * own_gates.SINGLE))
    part = own_gates.RequestScores(
        request=0,
        rows=slice(0, len(rows)),
        scores=scores,
        lengths=lengths,
        heights=torch.zeros_like(scores),
        visible=torch.full((len(rows),), len(rows[0])),
    )
    return IndexOracle(parts=[part], depth=1, heads=1), IndexOracle(parts=[part], depth=4, heads=1)


def test_what_rounding_hides_may_come_in_any_order_and_be_left_out_and_more_may_not() -> None:
    # two bounds are 0.02, of the coarser oracle 0.04; stores add next to nothing
    fine, coarse = with_scores([[1.00, 3.0, 1.03, 2.0, 0.5]], bound=0.01, topk=3)

    def lists(*keys: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([keys], dtype=torch.int32), fine.parts[0].scores[:, list(keys)]

    for keys, fine_fails, coarse_fails in (
        ((1, 3, 2), [], []),
        # one for another
        ((1, 3, 0), ["G4 choice"], []),
        ((1, 3, 4), ["G4 choice"], ["G4 choice"]),
        # one before another
        ((1, 3, 0, 2), ["G4 order"], []),
        ((3, 1, 2), ["G4 order"], ["G4 order"]),
        ((1, 2, 3, 0), ["G4 order"], ["G4 order"]),
        # not neighbours in the list
        ((1, 0, 3, 2), ["G4 order"], ["G4 order"]),
    ):
        assert failed(fine, *lists(*keys)) == fine_fails, keys
        assert failed(coarse, *lists(*keys)) == coarse_fails, keys
    assert text_of(fine, *lists(1, 3, 0)) == (
        "G4 choice: query 0 of request 0 lists key 0 and leaves out key 2, which scores more by 1.5 x of what rounding "
        "may hide"
    )
    assert "lists key 3 before key 1, which scores more by 50 x" in text_of(fine, *lists(3, 1, 2))


@pytest.mark.parametrize("family", EXACT_FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_scores_are_the_same_in_single_precision_in_any_order(family: str, dtype: str) -> None:
    case = case_of(family, dtype, key_lens=[300, 3])
    arguments = OPERATION.inputs(case, CPU).arguments
    oracle = OPERATION.oracle(case, arguments)
    q, k, weights = (arguments[name][: (4, 300, 4)[at]].float() for at, name in enumerate(("q", "k", "weights")))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    for columns in (torch.arange(16), order):
        products = torch.einsum("thd,sd->ths", q[..., columns], k[:, columns])
        scores = (weights[..., None] * products.relu()).flip(1).sum(1)
        seen = oracle.parts[0].scores > -INF
        assert torch.equal(scores.double()[seen], oracle.parts[0].scores[seen])


def test_families_hold_what_they_are_for() -> None:
    def scores(family: str, dtype: str = "float32") -> Tensor:
        case = case_of(family, dtype, query_lens=[30], key_lens=[200])
        return OPERATION.oracle(case, OPERATION.inputs(case, CPU).arguments).parts[0].scores

    seen = scores("diffuse") > -INF
    assert all(len(row[row > -INF].unique()) == int((row > -INF).sum()) for row in scores("exact-codes"))
    rising = scores("exact-rising")
    assert (rising.argmax(1) == torch.arange(30) + 170).all()
    assert all(len(row[row > -INF].unique()) < 40 for row in scores("exact-ties"))
    assert (scores("exact-dead")[seen] == 0).all()
    assert (scores("positive")[seen] >= 0).all()
    assert (scores("negative")[seen] <= 0).all()
    assert int((scores("negative")[seen] < 0).sum()) > 3000
    assert float(scores("large", "float16")[seen].abs().max()) > 65504 * (2 * 16) ** -0.5
    case = case_of("near", query_lens=[30], key_lens=[200])
    oracle = OPERATION.oracle(case, OPERATION.inputs(case, CPU).arguments)
    near, bounds = oracle.parts[0].scores[0, :170], own_gates._bounds(oracle, oracle.parts[0], PLAIN)[0, :170]
    # nobody can be asked for the order of all, but for that of the first and the last
    gaps = near.sort().values.diff() / (2 * bounds.min())
    assert int((gaps > 0).sum()) > 150
    assert float((gaps < 1).double().mean()) > 0.9
    assert float(gaps.sum()) > 1
    # somewhere a score of either sign
    assert 0.2 < float((scores("diffuse")[seen] > 0).double().mean()) < 0.8


def test_what_nobody_may_read_is_nan() -> None:
    case = case_of(query_lens=[5, 0, 2], key_lens=[2, 6, 4], layout="strided")
    arguments = OPERATION.inputs(case, CPU).arguments
    q, k, weights = (arguments[name] for name in ("q", "k", "weights"))
    # of 5 queries over 2 keys the first 3 see none; nobody asks the second request
    assert q[:3].isnan().all()
    assert weights[:3].isnan().all()
    assert k[2:8].isnan().all()
    assert not any(part.isnan().any() for part in (q[3:], weights[3:], k[:2], k[8:]))
    beside = torch.as_strided(k, (12, 21), k.stride(), k.storage_offset())[:, 16:]
    assert beside.isnan().all()


@pytest.mark.parametrize("layout", ["packed", "strided", "heads-first"])
def test_a_layout_holds_the_same_values(layout: str) -> None:
    plain = OPERATION.inputs(case_of(), CPU).arguments
    other = OPERATION.inputs(case_of(layout=layout), CPU).arguments
    for name in ("q", "k", "weights"):
        assert torch.equal(other[name], plain[name])
        assert other[name].is_contiguous() == (layout == "packed")


def test_the_terms_of_a_bound_are_those_of_plain_loops() -> None:
    case = case_of(dtype="bfloat16", query_lens=[3], key_lens=[5])
    arguments = OPERATION.inputs(case, CPU).arguments
    part = OPERATION.oracle(case, arguments).parts[0]
    q, k, weights = (arguments[name].double().tolist() for name in ("q", "k", "weights"))
    for t in range(3):
        for s in range(5):
            lengths = heights = 0.0
            for h in range(2):
                terms = [a * b for a, b in zip(q[t][h], k[s], strict=True)]
                lengths += abs(weights[t][h]) * sum(map(abs, terms))
                heights += abs(weights[t][h]) * abs(sum(terms))
            seen = s <= t + 2
            assert float(part.lengths[t, s]) == pytest.approx(lengths if seen else 0.0)
            assert float(part.heights[t, s]) == pytest.approx(heights if seen else 0.0)
    assert part.visible.tolist() == [3, 4, 5]


def test_the_oracle_is_the_same_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(query_lens=[9, 4], key_lens=[30, 2])
    arguments = OPERATION.inputs(case, CPU).arguments
    whole = OPERATION.oracle(case, arguments).parts
    monkeypatch.setattr(own_gates, "CELLS", 2 * 30 * 4)
    parts = OPERATION.oracle(case, arguments).parts
    assert [part.rows for part in parts] == [slice(0, 4), slice(4, 8), slice(8, 9), slice(9, 13)]
    for name in ("scores", "lengths", "heights"):
        joined = torch.cat([getattr(part, name) for part in parts[:3]])
        torch.testing.assert_close(joined, getattr(whole[0], name), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"qk_acc": "tf32", "inputs": "bf16"}, True),
        ({"logits": "bf16"}, False),
        ({"out": "fp16"}, False),
        ({"inputs": "e4m3"}, False),
        ({"qk_acc": "bf16"}, False),
    ],
)
def test_whole_numbers_are_asked_for_where_a_contract_keeps_them(changes: dict[str, Any], kept: bool) -> None:
    assert keeps_whole_numbers(PLAIN.promising(**changes)) is kept


def test_a_tie_has_one_order_unless_the_contract_rounds() -> None:
    oracle, keys, scores = held(case_of("exact-ties", query_lens=[3], key_lens=[40]))
    equal = (scores[0].diff() == 0).nonzero()[:, 0]
    at = int(equal[0])
    keys[0, [at, at + 1]] = keys[0, [at + 1, at]]
    assert failed(oracle, keys, scores, exact=True) == ["G3 choice"]
    assert "of equal scores the lower position comes first" in text_of(oracle, keys, scores, exact=True)
    assert failed(oracle, keys, scores, PLAIN.promising(logits="bf16"), exact=True) == []


def test_contents_of_the_other_sign_change_the_lists_of_every_case_that_says_so() -> None:
    follow = [case for case in SMOKE if OPERATION.outline(case).follows_contents]
    assert len(follow) > len(SMOKE) // 2
    for case in follow:
        arguments = OPERATION.inputs(case, CPU).arguments
        before, _ = CLEAN(**arguments)
        for name in ("q", "k", "weights"):
            arguments[name].mul_(-0.5)
        assert not torch.equal(CLEAN(**arguments)[0], before), case.id


TURNED: dict[str, Any] = {"query_lens": [4, 0, 3, 7], "key_lens": [20, 6, 3, 11]}


@pytest.mark.parametrize("name", ["query_offsets_known_by_address", "key_offsets_known_by_address"])
def test_a_kernel_that_knows_offsets_by_their_address_is_found(name: str) -> None:
    (fault,) = (one for one in load("indexer")[0] if one.name == name)
    wrong, case = wrap_function(fault.function, OPERATION), case_of(**TURNED)
    record = run_case(OPERATION, wrong, case, CPU)
    assert (record.verdict, record.text) == (Verdict.METAMORPHIC, "permute requests: G3 list, inf x its limit")
    # nothing is wrong with the requests as they come, which is all that other families ask for
    assert run_case(OPERATION, wrong, replace(case, family="positive"), CPU).verdict is Verdict.PASS
    with isolated(OPERATION, f"assay.harness.faults.indexer:{name}", CPU, timeout=60) as worker:
        assert worker.run_case(case).text == record.text


@pytest.mark.parametrize("layout", ["packed", "strided", "heads-first"])
def test_reversed_requests_lie_where_they_lay_and_have_the_same_lists(layout: str) -> None:
    case, calls = case_of(layout=layout, **TURNED), []

    def noting(**arguments: Any) -> Any:
        tensors = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
        calls.append((tensors, {name: (arguments[name].data_ptr(), arguments[name].stride()) for name in tensors}))
        return CLEAN(**arguments)

    assert run_case(OPERATION, wrap_function(noting, OPERATION), case, CPU).verdict is Verdict.PASS
    (first, where), (last, where_last) = calls[0], calls[-1]
    assert where_last == where
    assert last["cu_seqlens_q"].tolist() == [0, 7, 10, 10, 14]
    assert last["cu_seqlens_k"].tolist() == [0, 11, 14, 20, 40]
    for name, cuts in (("q", (7, 4)), ("weights", (7, 4)), ("k", (29, 26, 20))):
        parts = first[name].tensor_split(sorted(cuts))[::-1]
        assert torch.equal(last[name].nan_to_num(nan=7.0), torch.cat(parts).nan_to_num(nan=7.0))
    turned, moved = reversed_requests(case, OPERATION.inputs(case, CPU).arguments)
    assert (turned.sizes["query_lens"], turned.sizes["key_lens"]) == ([7, 3, 0, 4], [11, 3, 6, 20])
    plain = CLEAN(**OPERATION.inputs(case, CPU).arguments)
    for one, other in zip(CLEAN(**moved), plain, strict=True):
        assert torch.equal(one, torch.cat([other[7:], other[4:7], other[:4]]))


def test_a_promise_of_batch_invariance_is_held_in_bits() -> None:
    def placed(**arguments: Any) -> Any:
        keys, scores = CLEAN(**arguments)
        # one roundoff more where the first request has seven queries
        return keys, scores * (1 + 2.0**-23 * (int(arguments["cu_seqlens_q"][1]) == 7))

    invariant = kernel(contract=PLAIN.promising(batch_invariant=True))(lambda **arguments: placed(**arguments))
    record = run_case(OPERATION, wrap_function(invariant, OPERATION), case_of(**TURNED), CPU)
    assert (record.verdict, record.text) == (Verdict.METAMORPHIC, "bits depend on the order of the requests")
    assert run_case(OPERATION, wrap_function(placed, OPERATION), case_of(**TURNED), CPU).verdict is Verdict.PASS


@pytest.mark.parametrize("null", NULL_KERNELS, ids=lambda null: null.__name__)
def test_no_case_is_passed_by_computing_nothing(null: Any) -> None:
    records = [run_case(OPERATION, null_kernel(null, OPERATION, case), case, CPU) for case in SMOKE]
    assert [record.case["id"] for record in records if record.verdict is Verdict.PASS] == []


def test_a_kernel_may_write_into_given_buffers() -> None:
    @kernel(style="dps", contract=PLAIN)
    def into(topk_indices: Tensor, topk_scores: Tensor, **arguments: Any) -> None:
        keys, scores = CLEAN(**arguments)
        topk_indices.copy_(keys)
        topk_scores.copy_(scores)

    @kernel(style="dps", contract=PLAIN)
    def indices_alone(topk_indices: Tensor, topk_scores: Tensor, **arguments: Any) -> None:
        topk_indices.copy_(CLEAN(**arguments)[0])

    def judged(function: Callable[..., Any]) -> Verdict:
        return run_case(OPERATION, wrap_function(function, OPERATION), case_of(), CPU).verdict

    assert judged(into) is Verdict.PASS
    assert judged(indices_alone) is Verdict.WRITE_SCOPE


def test_a_fault_shrinks_and_its_program_shows_it(tmp_path: Path) -> None:
    (fault,) = (one for one in load("indexer")[0] if one.name == "relu_missing")
    wrong, case = wrap_function(fault.function, OPERATION), next(case for case in SMOKE if case.family == "diffuse")
    record = run_case(OPERATION, wrong, case, CPU)
    assert record.verdict is Verdict.NUMERIC
    small = shrink(case, record.verdict, lambda one: run_case(OPERATION, wrong, one, CPU), max_runs=80)
    assert sum(small.sizes["key_lens"]) < sum(case.sizes["key_lens"])
    assert (small.sizes["num_heads"], small.sizes["topk"]) == (1, 1)
    place = next(gate.where for gate in run_case(OPERATION, wrong, small, CPU).gates if not gate.passed)
    program = tmp_path / "show.py"
    program.write_text(snippet(OPERATION, small, "assay.harness.faults.indexer:relu_missing", place))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert "worst: topk_scores[" in done.stdout


def test_what_no_case_can_be_is_refused() -> None:
    case = case_of()
    with pytest.raises(ValueError, match="layout must be one of packed, strided, heads-first, got 'rows'"):
        OPERATION.inputs(replace(case, sizes=case.sizes | {"layout": "rows"}), CPU)
    with pytest.raises(ValueError, match=r"family must be one of diffuse, .*, got 'peaked'"):
        OPERATION.inputs(replace(case, family="peaked"), CPU)
    with pytest.raises(ValueError, match="head_dim must be at least 3 for a code of three digits, got 2"):
        OPERATION.inputs(case_of("exact-codes", head_dim=2), CPU)
