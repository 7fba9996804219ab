"""Token scores and selections in another order of requests: who keeps lengths by their addresses is found out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU, MLA_INDICES
from torch import Tensor

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.execution import Execution, execute
from assay.harness.faults import load
from assay.harness.faults._selection import select
from assay.harness.faults._windows import token_scores_twin
from assay.harness.kernels import wrap_function
from assay.harness.operation import CaseRequest
from assay.harness.operations import token_scores, token_selection
from assay.harness.plan import DTYPES
from assay.harness.plugin import kernel
from assay.harness.poison import same_bits
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case
from assay.harness.worker import isolated
from assay.reference.token_scores import token_scores as scores_oracle
from assay.reference.token_selection import token_selection as selection_oracle

SCORES, SELECTION = operations.load("token_scores"), operations.load("token_selection")
# integer arguments that describe the batch
TABLES = {
    "token_scores": (*MLA_INDICES, "query_ranges", "candidate_ranges"),
    "token_selection": ("context_lens", "budgets"),
}
TURNED = {"token_scores": token_scores.reversed_requests, "token_selection": token_selection.reversed_requests}
TWINS: dict[str, Callable[[dict[str, Any]], Tensor]] = {"token_scores": token_scores_twin, "token_selection": select}
BY_ADDRESS = [(op, fault.name) for op in TABLES for fault in load(op)[0] if fault.name.endswith("_known_by_address")]


def scores_case() -> Case:
    """Three requests, of which no two have a length, a history, a window or a range in common."""
    sizes = {
        "num_heads": 2,
        "kv_lora_rank": 16,
        "d_nope": 8,
        "d_rope": 4,
        "d_v": 8,
        "softmax_scale": 0.25,
        "query_lens": [1, 5, 3],
        "context_lens": [9, 20, 3],
        "history_chunk_size": 7,
        "layout": "split",
        "mode": "logits",
        "window": 3,
        "behind": 0,
        "unobserved": 0,
        "candidate_start": 0,
        "recent_keep_tokens": 0,
        "ranges": "middle",
    }
    return Case(op="token_scores", family="diffuse", dtype="float32", seed=4, sizes=sizes)


def selection_case() -> Case:
    """Three requests, the last one within its budget."""
    sizes = {"context_lens": [30, 12, 8], "sink": 1, "recent": 2, "part": 0.5, "pooling": "max", "kernel_size": 3}
    return Case(op="token_selection", family="diffuse", dtype="float32", seed=4, sizes=sizes)


CASES = {"token_scores": scores_case(), "token_selection": selection_case()}


def diffuse_cases(op: str) -> list[Case]:
    cases = operations.load(op).cases(CaseRequest(tier="smoke", seed=0, dtypes=DTYPES))
    return [case for case in cases if case.family == "diffuse"]


def judged(op: str, function: Any, case: Case | None = None) -> Record:
    operation = operations.load(op)
    return run_case(operation, wrap_function(function, operation), case or CASES[op], CPU)


def relation(record: Record) -> str:
    """The one gate that failed."""
    (gate,) = (gate.gate for gate in record.gates if not gate.passed)
    return gate


@pytest.mark.parametrize(("op", "name"), BY_ADDRESS)
def test_a_kernel_that_knows_a_table_by_its_address_is_found_out(op: str, name: str) -> None:
    (fault,) = (fault for fault in load(op)[0] if fault.name == name)
    record = judged(op, fault.function)
    assert (record.verdict, relation(record)) == (Verdict.METAMORPHIC, "G8 permute requests")
    assert record.text.startswith("permute requests: G")


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in BY_ADDRESS if name.startswith("contexts")])
def test_it_is_found_out_in_a_process_of_its_own(op: str, name: str) -> None:
    with isolated(operations.load(op), f"assay.harness.faults.{op}:{name}", CPU, timeout=60.0) as worker:
        record = worker.run_case(CASES[op])
    assert (record.verdict, relation(record)) == (Verdict.METAMORPHIC, "G8 permute requests")


def test_each_table_has_a_fault_that_keeps_it_and_one_keeps_all() -> None:
    assert len(BY_ADDRESS) == len(TABLES["token_scores"]) + 1 + len(TABLES["token_selection"])


@pytest.mark.parametrize("op", TABLES)
def test_tables_lie_where_they_lay_and_hold_others(op: str) -> None:
    seen: list[dict[str, tuple[int, Any]]] = []

    def watching(**arguments: Any) -> Tensor:
        seen.append({name: (arguments[name].data_ptr(), arguments[name].tolist()) for name in TABLES[op]})
        return TWINS[op](arguments)

    assert judged(op, watching).verdict is Verdict.PASS
    *earlier, last = seen
    for name in TABLES[op]:
        place, values = earlier[0][name]
        assert last[name][0] == place, name
        # nothing but the last call is given another batch
        assert last[name][1] != values, name
        assert all(call[name][1] == values for call in earlier), name


def test_reversed_requests_are_those_of_the_batch() -> None:
    a = SCORES.inputs(scores_case(), CPU).arguments
    b = token_scores.reversed_requests(a)
    assert (a["cu_seqlens"].tolist(), b["cu_seqlens"].tolist()) == ([0, 1, 6, 9], [0, 3, 8, 9])
    assert b["context_lens"].tolist() == [3, 20, 9]
    assert (a["query_ranges"].tolist(), b["query_ranges"].tolist()) == (
        [[8, 9], [17, 20], [0, 3]],
        [[0, 3], [17, 20], [8, 9]],
    )
    assert (a["candidate_ranges"].tolist(), b["candidate_ranges"].tolist()) == (
        [[2, 7], [5, 15], [0, 3]],
        [[0, 3], [5, 15], [2, 7]],
    )
    assert torch.equal(b["q"], a["q"][[6, 7, 8, 1, 2, 3, 4, 5, 0]])
    rows = [(args["slot_table"][int(row)].tolist()) for args in (a, b) for row in args["request_rows"]]
    assert rows[:3] == rows[:2:-1]
    assert not torch.equal(a["request_rows"].flip(0), b["request_rows"])


def test_reversed_budgets_are_those_of_the_batch() -> None:
    a = SELECTION.inputs(selection_case(), CPU).arguments
    b = token_selection.reversed_requests(a)
    assert (a["budgets"].tolist(), b["budgets"].tolist()) == ([15, 6, 10], [10, 6, 15])
    assert b["context_lens"].tolist() == [8, 12, 30]
    assert b["scores"].stride() == a["scores"].stride()
    assert same_bits(b["scores"].flip(0), a["scores"])


@pytest.mark.parametrize("op", TABLES)
def test_the_oracle_answers_in_the_order_of_the_requests(op: str) -> None:
    oracle: Any = {"token_scores": scores_oracle, "token_selection": selection_oracle}[op]
    for case in diffuse_cases(op):
        arguments = operations.load(op).inputs(case, CPU).arguments
        first, turned = (
            oracle(**{name: value for name, value in given.items() if name != "history_chunk_size"})
            for given in (arguments, TURNED[op](arguments))
        )
        assert torch.equal(turned.flip(0), first)


@pytest.mark.parametrize("op", TABLES)
def test_every_table_is_another_one_in_some_smoke_case(op: str) -> None:
    changed = set()
    for case in diffuse_cases(op):
        arguments = operations.load(op).inputs(case, CPU).arguments
        turned = TURNED[op](arguments)
        changed |= {
            name
            for name in TABLES[op]
            if arguments[name] is not None and not torch.equal(arguments[name], turned[name])
        }
    assert changed == set(TABLES[op])


@pytest.mark.parametrize(
    ("op", "changes", "asked"),
    [
        ("token_scores", {}, True),
        ("token_scores", {"family": "peaked"}, False),
        ("token_scores", {"sizes": {"query_lens": [4], "context_lens": [9]}}, False),
        ("token_selection", {}, True),
        ("token_selection", {"family": "negative"}, False),
        ("token_selection", {"sizes": {"context_lens": [9]}}, False),
    ],
)
def test_one_family_of_more_than_one_request_is_asked_and_left_as_it_was(
    op: str, changes: dict[str, Any], asked: bool
) -> None:
    operation = operations.load(op)
    case = replace(CASES[op], **changes | {"sizes": CASES[op].sizes | changes.get("sizes", {})})
    given, fresh = operation.inputs(case, CPU), operation.inputs(case, CPU).arguments
    found = execute(operation, wrap_function(lambda **a: TWINS[op](a), operation), case, given, CPU)
    assert isinstance(found, Execution)
    assert (found.again is not None) is asked
    tensors = {name: value for name, value in given.arguments.items() if isinstance(value, Tensor)}
    assert all(same_bits(value, fresh[name]) for name, value in tensors.items())


@pytest.mark.parametrize("op", TABLES)
def test_a_promise_of_batch_invariance_is_held_in_bits(op: str) -> None:
    contract = operations.load(op).default_contract(CASES[op]).promising(batch_invariant=True)
    (fault,) = (fault for fault in load(op)[0] if fault.name == "contexts_known_by_address")
    record = judged(op, kernel(contract=contract)(lambda **a: fault.function(**a)))
    assert (record.verdict, record.text) == (Verdict.METAMORPHIC, "bits depend on the order of the requests")
    assert judged(op, kernel(contract=contract)(lambda **a: TWINS[op](a))).verdict is Verdict.PASS


def test_a_last_bit_may_go_with_the_place_of_a_request_unless_the_contract_says_otherwise() -> None:
    def placed(**a: Any) -> Tensor:
        return token_scores_twin(a) * (1 + 2.0**-23 * (int(a["context_lens"][0]) == 3))

    contract = SCORES.default_contract(CASES["token_scores"])
    assert judged("token_scores", kernel(contract=contract)(lambda **a: placed(**a))).verdict is Verdict.PASS
    promised = contract.promising(batch_invariant=True)
    record = judged("token_scores", kernel(contract=promised)(lambda **a: placed(**a)))
    assert record.text == "bits depend on the order of the requests"
