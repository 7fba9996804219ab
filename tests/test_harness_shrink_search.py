"""The search itself, judged by a fake: never larger, never illegal, never endless, and no step left untried."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import mla_case
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.harness.case import Case
from assay.harness.record import GateResult, Record, Verdict
from assay.harness.shrink import shrink

Judge = Callable[[Case], Record]


class Steps:
    """Collects what ``shrink`` reports."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.records: list[Record] = []

    def __call__(self, case: Case, record: Record) -> None:
        self.cases.append(case)
        self.records.append(record)


def record_of(case: Case, verdict: Verdict, gate: str = "G4 envelope") -> Record:
    gates = [] if verdict is Verdict.PASS else [GateResult(gate=gate, ratio=2.0)]
    return Record(op=case.op, kernel="fake", case=case.to_json(), device="cpu", verdict=verdict, gates=gates)


def always_wrong(case: Case) -> Record:
    return record_of(case, Verdict.NUMERIC)


def search(case: Case, judge: Judge, **options: Any) -> Case:
    return shrink(case, Verdict.NUMERIC, judge, **options)


def test_what_is_no_fault_is_refused() -> None:
    case = mla_case()
    for verdict in (Verdict.PASS, Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR):
        with pytest.raises(ValueError, match=f"must be a failure of the kernel, got {verdict}"):
            shrink(case, verdict, always_wrong)
    with pytest.raises(ValueError, match="max_runs must be at least 1, got 0"):
        shrink(case, Verdict.NUMERIC, always_wrong, max_runs=0)


def test_an_interrupt_of_the_first_run_has_nothing_to_hand_over() -> None:
    def judge(case: Case) -> Record:
        raise KeyboardInterrupt

    case, steps = mla_case(), Steps()
    with pytest.raises(KeyboardInterrupt):
        search(case, judge, on_step=steps)
    assert steps.cases == []


def test_a_flaky_kernel_ends_the_search() -> None:
    runs: list[Case] = []

    def judge(case: Case) -> Record:
        runs.append(case)
        return record_of(case, Verdict.NUMERIC if len(runs) % 3 else Verdict.PASS)

    case = mla_case(query_lens=[9] * 12, context_lens=[500] * 12)
    smallest = search(case, judge, max_runs=100000)
    # the same case is never judged twice, so there is an end
    assert len({run.id for run in runs}) == len(runs) < 1000
    assert smallest in runs


def test_what_fails_now_and_then_must_fail_three_times_to_count() -> None:
    runs: dict[str, int] = {}

    def judge(case: Case) -> Record:
        runs[case.id] = runs.get(case.id, 0) + 1
        # a short context hides it from the third run on, a shorter one from the second
        hidden = {True: 3, case.sizes["context_lens"][0] < 20: 2, case.sizes["context_lens"][0] >= 30: 4}[True]
        return record_of(case, Verdict.NONDETERMINISTIC if runs[case.id] < hidden else Verdict.PASS)

    case = mla_case(query_lens=[1], context_lens=[90])
    smallest = shrink(case, Verdict.NONDETERMINISTIC, judge)
    assert smallest.sizes["context_lens"] == [30]
    assert runs[smallest.id] == 3
    # a budget that ends amid the three takes nothing on trust
    runs.clear()
    assert shrink(case, Verdict.NONDETERMINISTIC, judge, max_runs=3) is case


def test_another_gate_of_the_same_verdict_is_another_fault() -> None:
    def judge(case: Case) -> Record:
        wide = case.sizes["d_v"] > 5
        return record_of(case, Verdict.NUMERIC, "G6 row scale" if wide else "G4 envelope")

    assert search(mla_case(), judge).sizes["d_v"] == 6


def test_the_number_of_runs_is_bounded() -> None:
    runs = 0

    def judge(case: Case) -> Record:
        nonlocal runs
        runs += 1
        return record_of(case, Verdict.NUMERIC)

    case = mla_case(query_lens=[9] * 12, context_lens=[500] * 12)
    assert search(case, judge, max_runs=1) is case
    assert runs == 1
    search(case, judge, max_runs=8)
    assert runs == 9


def test_no_run_starts_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def judge(case: Case) -> Record:
        nonlocal now
        now += 10
        return record_of(case, Verdict.NUMERIC)

    monkeypatch.setattr("assay.harness.shrink.time.monotonic", lambda: now)
    steps = Steps()
    search(mla_case(), judge, max_seconds=35, on_step=steps)
    assert now == 40
    assert len(steps.cases) == 3


def test_a_kernel_that_is_always_wrong_keeps_one_request_of_one_token() -> None:
    smallest = search(mla_case(query_lens=[9, 5, 1], context_lens=[45, 5, 90]), always_wrong)
    assert is_legal(smallest)
    wanted = {"query_lens": [1], "context_lens": [1], "history_chunk_size": 1, "num_heads": 1, "d_rope": 0, "d_v": 1}
    assert {name: smallest.sizes[name] for name in wanted} == wanted


def test_lengths_that_belong_together_shrink_together() -> None:
    def same_distance(case: Case) -> Record:
        sizes = case.sizes
        shown = sizes["query_lens"][0] >= 3 and sizes["context_lens"][0] - sizes["query_lens"][0] == 20
        return record_of(case, Verdict.NUMERIC if shown else Verdict.PASS)

    sizes = search(mla_case(query_lens=[9], context_lens=[29]), same_distance).sizes
    assert (sizes["query_lens"], sizes["context_lens"]) == ([3], [23])

    def two_full_chunks(case: Case) -> Record:
        chunk, history = case.sizes["history_chunk_size"], case.sizes["context_lens"][0] - case.sizes["query_lens"][0]
        return record_of(case, Verdict.NUMERIC if chunk >= 11 and history == 2 * chunk else Verdict.PASS)

    sizes = search(mla_case(query_lens=[9], context_lens=[41]), two_full_chunks).sizes
    assert (sizes["query_lens"], sizes["context_lens"], sizes["history_chunk_size"]) == ([1], [23], 11)


def test_a_case_that_became_small_no_longer_needs_a_device() -> None:
    def judge(case: Case) -> Record:
        return record_of(case, Verdict.NUMERIC if case.sizes["num_heads"] >= 2 else Verdict.PASS)

    large = replace(mla_case(query_lens=[64], context_lens=[65536], kv_lora_rank=512), needs_device=True)
    assert not search(large, judge).needs_device

    def still_long(case: Case) -> Record:
        return record_of(case, Verdict.NUMERIC if case.sizes["context_lens"][0] >= 60000 else Verdict.PASS)

    assert search(large, still_long).needs_device


def sizes_of(case: Case) -> dict[str, list[int]]:
    """Every number that may shrink; lists as they are, padded at the end by what was dropped."""
    return {
        name: list(value) if isinstance(value, list) else [value]
        for name, value in case.sizes.items()
        if isinstance(value, list) or (isinstance(value, int) and not isinstance(value, bool))
    }


def is_legal(case: Case) -> bool:
    sizes = case.sizes
    contexts = zip(sizes["query_lens"], sizes["context_lens"], strict=True)
    dims = (sizes[name] for name in ("history_chunk_size", "num_heads", "kv_lora_rank", "d_nope", "d_v"))
    return all(1 <= n <= c for n, c in contexts) and all(size >= 1 for size in dims) and sizes["d_rope"] >= 0


PAIRS = st.tuples(st.integers(1, 20), st.integers(0, 90)).map(lambda pair: (pair[0], pair[0] + pair[1]))
NEEDS = st.fixed_dictionaries(
    {
        "requests": st.integers(1, 3),
        "queries": st.integers(1, 8),
        "history": st.integers(0, 40),
        "chunks": st.integers(0, 3),
        "num_heads": st.integers(1, 3),
        "d_v": st.integers(1, 9),
    }
)


def shows(case: Case, needs: dict[str, int]) -> bool:
    """A fault with lower bounds on several sizes at once."""
    sizes = case.sizes
    pairs = list(zip(sizes["query_lens"], sizes["context_lens"], strict=True))
    chunks = [-(-(c - n) // sizes["history_chunk_size"]) for n, c in pairs]
    return (
        len(pairs) >= needs["requests"]
        and max(n for n, _ in pairs) >= needs["queries"]
        and max(c - n for n, c in pairs) >= needs["history"]
        and max(chunks) >= needs["chunks"]
        and sizes["num_heads"] >= needs["num_heads"]
        and sizes["d_v"] >= needs["d_v"]
    )


def one_step_smaller(case: Case) -> list[Case]:
    """Every legal case with one request less, or one token less in one list, or one head or dimension less."""
    sizes, names = case.sizes, ("query_lens", "context_lens")
    found = []
    for at in range(len(sizes["query_lens"])):
        found.append({name: [*sizes[name][:at], *sizes[name][at + 1 :]] for name in names})
        for name in names:
            found.append({name: [n - (i == at) for i, n in enumerate(sizes[name])]})
    for name, least in {"num_heads": 1, "kv_lora_rank": 1, "d_nope": 1, "d_rope": 0, "d_v": 1}.items():
        found += [{name: sizes[name] - 1}] * (sizes[name] > least)
    cases = [replace(case, sizes=sizes | change) for change in found if change.get("query_lens") != []]
    return [smaller for smaller in cases if is_legal(smaller)]


@settings(max_examples=60)
@given(pairs=st.lists(PAIRS, min_size=3, max_size=9), chunk=st.sampled_from([1, 16, 4096]), needs=NEEDS)
def test_sizes_never_grow_and_every_case_on_the_way_is_legal(
    pairs: list[tuple[int, int]], chunk: int, needs: dict[str, int]
) -> None:
    case = mla_case(
        query_lens=[n for n, _ in pairs],
        context_lens=[c for _, c in pairs],
        history_chunk_size=chunk,
        num_heads=3,
    )
    runs: list[Case] = []

    def judge(case: Case) -> Record:
        runs.append(case)
        return record_of(case, Verdict.NUMERIC if shows(case, needs) else Verdict.PASS)

    steps = Steps()
    smallest = search(case, judge, max_runs=5000, on_step=steps)
    if not shows(case, needs):
        assert (smallest, len(runs)) == (case, 1)
        return
    assert all(is_legal(run) for run in runs)
    before = case
    for after in steps.cases:
        old, new = sizes_of(before), sizes_of(after)
        assert new != old or (before.family, before.sizes["layout"]) != (after.family, after.sizes["layout"])
        assert all(sum(new[name]) <= sum(old[name]) for name in old)
        assert all(len(new[name]) <= len(old[name]) for name in old)
        before = after
    assert before == smallest
    assert shows(smallest, needs)
    assert [smaller for smaller in one_step_smaller(smallest) if shows(smaller, needs)] == []
    # the search draws nothing
    first = list(runs)
    runs.clear()
    assert search(case, judge, max_runs=5000) == smallest
    assert runs == first
