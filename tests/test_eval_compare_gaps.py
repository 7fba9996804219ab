"""Runs with gaps: samples that were not answered or measured, or stand twice in the plan, and tasks without any."""

from pathlib import Path

from eval_runs import Record, answer, failure, flipped, gate, item, suite_of, two, with_losses, write_arm

from assay.eval.compare import compare
from assay.eval.statistics import Verdict


def test_a_sample_that_stands_twice_in_the_plan_counts_once_and_is_said(tmp_path: Path) -> None:
    items = [item("gsm8k_cot", at) for at in (0, 1, 2, 1)]
    records = [answer("gsm8k_cot", at) for at in range(3)]
    comparison = two(tmp_path, records, records, items=items)
    assert gate(comparison).estimate.n == 3
    assert comparison.notes == [
        f"{name}: 1 samples of gsm8k_cot are more than once in the plan, and count once" for name in ("old", "new")
    ]


def test_what_cannot_be_asked_is_no_failure_that_counts_as_wrong(tmp_path: Path) -> None:
    items = [item("gsm8k_cot", at, broken="" if at < 40 else "no question") for at in range(80)]
    before = [answer("gsm8k_cot", at) for at in range(40)]
    after = [answer("gsm8k_cot", at, float(at >= 4)) for at in range(40)]
    failures = two(tmp_path / "a", before, after, items=items).pairs[0].failures
    assert failures.table == {("gsm8k_cot", "skipped", "skipped"): 40}
    assert failures.sensitivity == {}
    # one of 40 that were asked fails besides, and four are wrong
    after[39] = failure("gsm8k_cot", 39)
    failures = two(tmp_path / "b", before, after, items=items).pairs[0].failures
    assert failures.sensitivity["score"][0] == -100 * 5 / 40


def test_calls_and_cut_answers_are_those_of_answered_samples(tmp_path: Path) -> None:
    items = [item("gsm8k_cot", at) for at in range(3)]
    fields: Record = {"kernel_calls": {"prefill/new": 30}, "finish_reason": "length"}
    records = [answer("gsm8k_cot", at) | fields for at in (0, 1, 9)]
    records.append(failure("gsm8k_cot", 2) | fields)
    comparison = two(tmp_path, records, records, items=items)
    assert comparison.pairs[0].kernels == {"prefill/new": (60, 60)}
    assert comparison.arms["new"]["cut_answers"] == 2


def test_a_task_without_any_sample_leaves_the_other_findings(tmp_path: Path) -> None:
    suite = suite_of(("gsm8k_cot", "qasper"))
    records = [answer("gsm8k_cot", at) for at in range(40)]
    tasks = {"gsm8k_cot": {"samples": 40}, "qasper": {"samples": 0}}
    runs = [
        write_arm(tmp_path / name, rows, suite=suite, tasks=tasks)
        for name, rows in (("old", records), ("new", [*records[1:], failure("gsm8k_cot", 0)]))
    ]
    comparison = compare(runs)
    assert comparison.pairs[0].failures.one_sided == 1
    assert gate(comparison).note == "score was not measured on qasper"


def test_a_model_without_log_probabilities_of_prompts_has_no_probes(tmp_path: Path) -> None:
    before = [answer("gsm8k_cot", at) for at in range(4)]
    after = [answer("gsm8k_cot", at, probes=[] if at < 3 else [[4, -2.0]]) for at in range(4)]
    assert [(one.n, one.second) for one in two(tmp_path, before, after).pairs[0].probes] == [(1, -2.0)]


def test_losses_that_differ_by_rounding_have_no_spread(tmp_path: Path) -> None:
    # 0.001 more each, and the differences of what was rounded to six digits are equal up to 1e-16
    suite = suite_of(nll=0.02)
    runs = [
        with_losses(tmp_path / name, {"gsm8k_cot": [round(loss + more, 6) for loss in (1.1, 1.2, 1.7)]}, suite=suite)
        for name, more in (("old", 0.0), ("new", 0.001))
    ]
    found = gate(compare(runs))
    assert (found.verdict, found.estimate.interval) == (Verdict.INCONCLUSIVE, "rule of three")


def test_a_loss_that_is_certain_on_one_pair_alone_is_not_called_so_among_several(tmp_path: Path) -> None:
    runs = [flipped(tmp_path / name, 1319, range(6) if name == "d" else ()) for name in "abcd"]
    assert gate(compare([runs[0], runs[3]])).note == "a loss is certain, and smaller than the margin"
    comparison = compare(runs)
    assert gate(comparison, pair=2).p_adjusted > 0.05
    assert gate(comparison, pair=2).note == ""
