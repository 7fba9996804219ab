"""Shrinking a planted fault ends at the smallest case that still shows this fault, and no other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CPU, Answer, attention_case, honest_mla, mla_case, operation_of

from assay.harness.activations import captured_sizes
from assay.harness.case import Case
from assay.harness.kernels import find_kernels, wrap_function
from assay.harness.operation import Kernel
from assay.harness.record import GateResult, Record, Verdict
from assay.harness.runner import run_case
from assay.harness.shrink import fault_kind, shrink, shrunk_text

Judge = Callable[[Case], Record]

KERNELS = '''
"""Kernels that are right but for one planted fault each."""

import torch

from assay.reference.attention import attention
from assay.reference.mla_prefill import mla_prefill, requests


def right(oracle, given):
    given.pop("history_chunk_size", None)
    exact = {name: value.double() if name in FLOATS else value for name, value in given.items()}
    out, lse = oracle(**exact)
    return out.to(given["q"].dtype), lse.float()


FLOATS = ("q", "k", "v", "kv_c", "k_pe", "kv_b_proj")
INDICES = ("cu_seqlens", "slot_table", "request_rows", "context_lens")


def third_request(**given):
    out, lse = right(attention, given)
    ends = given["cu_seqlens_q"].tolist()
    if len(ends) > 3:
        out[ends[2] : ends[3]] += 0.5
    return out, lse


def second_head(**given):
    out, lse = right(attention, given)
    out[:, 1:2] += 0.5
    return out, lse


def long_history(**given):
    out, lse = right(mla_prefill, given)
    for queries, slots, positions in requests(*(given[name] for name in INDICES)):
        if len(slots) - len(positions) >= 17:
            out[queries] += 0.5
    return out, lse


def second_chunk(**given):
    chunk = given["history_chunk_size"]
    out, lse = right(mla_prefill, given)
    for queries, slots, positions in requests(*(given[name] for name in INDICES)):
        if len(slots) - len(positions) > chunk:
            out[queries, 0, 0] += 0.5
    return out, lse


def whole_chunks(**given):
    chunk = given["history_chunk_size"]
    out, lse = right(mla_prefill, given)
    for queries, slots, positions in requests(*(given[name] for name in INDICES)):
        history = len(slots) - len(positions)
        if history and history % chunk == 0:
            lse[queries] = float("nan")
    return out, lse
'''

FIVE_REQUESTS: dict[str, Any] = {"query_lens": [3, 9, 2, 5, 1], "key_lens": [4, 40, 8, 5, 20]}
PLAIN: dict[str, Any] = {"layout": "packed", "num_heads": 1, "num_kv_heads": 1, "d_qk": 1, "d_v": 1}


@pytest.fixture
def kernel_file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


class Steps:
    """Collects what ``shrink`` reports."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.records: list[Record] = []

    def __call__(self, case: Case, record: Record) -> None:
        self.cases.append(case)
        self.records.append(record)


def judge_of(kernel: Kernel, case: Case) -> Judge:
    return partial(run_case, operation_of(case), kernel, device=CPU)


def shrunk(kernel: Kernel, case: Case, **options: Any) -> tuple[Case, Record]:
    """The smallest case and its record, judged once more."""
    judge = judge_of(kernel, case)
    first = judge(case)
    smallest = shrink(case, first.verdict, judge, **options)
    last = judge(smallest)
    kinds = [fault_kind(record.verdict, record.worst, record.text) for record in (first, last)]
    assert kinds[0] == kinds[1]
    return smallest, last


def named(file: Path, name: str, case: Case) -> Kernel:
    return find_kernels(operation_of(case), f"{file}:{name}")[0]


def test_a_fault_of_the_third_request_keeps_three_requests(kernel_file: Path) -> None:
    case = attention_case("peaked", num_heads=4, num_kv_heads=2, layout="strided", **FIVE_REQUESTS)
    smallest, last = shrunk(named(kernel_file, "third_request", case), case)
    ones = [1, 1, 1]
    assert smallest.sizes == case.sizes | PLAIN | {"query_lens": ones, "key_lens": ones}
    assert (smallest.family, smallest.dtype, smallest.seed) == ("diffuse", case.dtype, case.seed)
    assert last.worst is not None
    assert last.worst.where is not None
    assert last.worst.where.request == 2


def test_a_fault_of_long_histories_keeps_the_shortest_of_them(kernel_file: Path) -> None:
    case = mla_case("ramp-v", query_lens=[9, 5, 7], context_lens=[120, 5, 31], num_heads=3, layout="bundled")
    smallest, _ = shrunk(named(kernel_file, "long_history", case), case)
    wanted = {"query_lens": [1], "context_lens": [18], "num_heads": 1, "layout": "split"}
    assert {name: smallest.sizes[name] for name in wanted} == wanted
    assert [smallest.sizes[name] for name in ("kv_lora_rank", "d_nope", "d_rope", "d_v")] == [1, 1, 0, 1]


def test_a_fault_of_the_second_head_keeps_two_heads(kernel_file: Path) -> None:
    case = attention_case(num_heads=8, num_kv_heads=4)
    smallest, last = shrunk(named(kernel_file, "second_head", case), case)
    assert (smallest.sizes["num_heads"], smallest.sizes["num_kv_heads"]) == (2, 1)
    assert (smallest.sizes["query_lens"], smallest.sizes["key_lens"]) == ([1], [1])
    assert last.worst is not None
    assert last.worst.where is not None
    assert last.worst.where.head == 1


def test_a_fault_between_chunks_keeps_two_chunks(kernel_file: Path) -> None:
    case = mla_case(query_lens=[5, 9, 2], context_lens=[5, 100, 30])
    smallest, _ = shrunk(named(kernel_file, "second_chunk", case), case)
    sizes = smallest.sizes
    assert (sizes["query_lens"], sizes["context_lens"], sizes["history_chunk_size"]) == ([1], [3], 1)


def test_a_fault_of_whole_chunks_only_is_followed_where_single_steps_would_lose_it(kernel_file: Path) -> None:
    case = mla_case(query_lens=[5, 9], context_lens=[69, 14])
    smallest, last = shrunk(named(kernel_file, "whole_chunks", case), case)
    sizes = smallest.sizes
    assert (sizes["query_lens"], sizes["context_lens"], sizes["history_chunk_size"]) == ([1], [2], 1)
    assert last.verdict == "NONFINITE"


def test_a_small_fault_in_an_exact_family_stays_in_it() -> None:
    def attend(**given: Any) -> Answer:
        out, lse = honest_mla(**given)
        return torch.nextafter(out, 2 * out), lse

    case = mla_case("exact-one-hot", "float16")
    smallest, last = shrunk(wrap_function(attend, operation_of(case)), case)
    assert (smallest.family, last.worst and last.worst.gate) == ("exact-one-hot", "G3 exact")
    # fewer channels cannot hold the code of two tokens: the one bit twice, and two digits
    assert smallest.sizes["kv_lora_rank"] == 4
    assert smallest.sizes["context_lens"] == [1]


def test_of_a_captured_case_only_requests_and_lengths_shrink(kernel_file: Path) -> None:
    sizes = captured_sizes("mla_smollm2") | {"history_chunk_size": 17, "layout": "bundled"}
    sizes |= {"query_lens": [3, 5], "context_lens": [3, 60]}
    case = Case(op="mla_prefill", family="captured", dtype="float32", seed=0, sizes=sizes)
    smallest, _ = shrunk(named(kernel_file, "long_history", case), case)
    assert smallest.sizes == sizes | {"query_lens": [1], "context_lens": [18]}
    assert smallest.family == "captured"


def test_a_search_does_not_slip_to_another_crash() -> None:
    def attend(**given: Any) -> Answer:
        if len(given["q"]) < 4:
            raise ValueError("too short for a tile")
        if int(given["context_lens"].max()) > 20:
            raise ValueError("too long for the table")
        return honest_mla(**given)

    case = mla_case(query_lens=[4, 5], context_lens=[45, 5])
    smallest, last = shrunk(wrap_function(attend, operation_of(case)), case)
    assert (smallest.sizes["query_lens"], smallest.sizes["context_lens"]) == ([4], [21])
    assert "too long for the table" in last.text


KINDS: list[tuple[Verdict, GateResult | None, str, str]] = [
    (Verdict.NUMERIC, GateResult(gate="G6 pooled scale by head", ratio=3.0), "head 1: ...", "G6"),
    (Verdict.CRASH, None, "RuntimeError: bad (3) tile (/a/k.py:12)", "RuntimeError /a/k.py:12"),
    (Verdict.CRASH, None, "killed by signal 11", "killed by signal #"),
    (Verdict.STRUCTURE, None, "out must have shape (14, 2), got (3, 2)", "out must have shape (#, #)"),
    (Verdict.MUTATED_INPUT, None, "wrote its input q", "wrote its input q"),
    (Verdict.OUT_OF_MEMORY, None, "Tried to allocate 2 GiB", ""),
    (Verdict.WRITE_SCOPE, GateResult(gate="G2 out written", ratio=float("inf")), "16 of 448", "G2"),
    # a gate that holds decided nothing
    (Verdict.PASS, GateResult(gate="G4 envelope", ratio=0.3), "", ""),
]


@pytest.mark.parametrize(("verdict", "worst", "text", "kind"), KINDS, ids=lambda value: None)
def test_the_kind_of_a_fault(verdict: Verdict, worst: GateResult | None, text: str, kind: str) -> None:
    assert fault_kind(verdict, worst, text) == (verdict, kind)


def test_a_case_that_fails_otherwise_now_comes_back_unchanged() -> None:
    case, steps = mla_case(), Steps()
    judge = judge_of(wrap_function(honest_mla, operation_of(case)), case)
    assert shrink(case, Verdict.NUMERIC, judge, on_step=steps) is case
    assert steps.cases == []


def test_an_interrupt_hands_over_the_best_case_so_far(kernel_file: Path) -> None:
    case, steps, calls = mla_case(), Steps(), 0
    honest = named(kernel_file, "long_history", case)

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return honest.bind(arguments)

    kernel = Kernel(name="interrupted", contract=honest.contract, bind=bind)
    with pytest.raises(KeyboardInterrupt):
        shrink(case, Verdict.NUMERIC, judge_of(kernel, case), on_step=steps)
    assert calls == 9
    assert len(steps.cases) >= 2
    # the last step once more
    assert (steps.cases[-1], steps.records[-1]) == (steps.cases[-2], steps.records[-2])
    assert steps.records[-1].case == steps.cases[-1].to_json()
    assert sum(steps.cases[-1].sizes["context_lens"]) < sum(case.sizes["context_lens"])


def test_the_text_says_what_became_smaller() -> None:
    before = mla_case("peaked", query_lens=[9] * 7, context_lens=[45] * 7)
    after = mla_case("diffuse", query_lens=[1], context_lens=[18], num_heads=1)
    assert shrunk_text(before, after) == (
        "family peaked -> diffuse, num_heads 2 -> 1, query_lens [7 values, largest 9] -> [1], "
        "context_lens [7 values, largest 45] -> [18]"
    )
    assert shrunk_text(before, before) == "nothing could be left out"
