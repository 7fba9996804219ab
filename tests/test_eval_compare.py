"""Comparing runs: what is refused, what is judged, and how the verdict comes about."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_runs import Record, answer, failure, flipped, gate, item, suite_of, two, with_losses, write_arm, write_run

from assay.eval.arms import Arm, NotComparableError, read_arm
from assay.eval.compare import compare
from assay.eval.comparison import Comparison
from assay.eval.exit_code import ExitCode
from assay.eval.statistics import Verdict
from assay.eval.suite import load_suite

GSM8K = 1319


@pytest.mark.parametrize(
    ("lost", "won", "margin", "verdict", "code"),
    [
        (5, 7, 1.0, Verdict.EQUIVALENT, ExitCode.PASSED),
        (5, 7, 0.5, Verdict.NON_INFERIOR, ExitCode.PASSED),
        (0, 6, 0.1, Verdict.IMPROVED, ExitCode.PASSED),
        (30, 12, 2.0, Verdict.REGRESSED, ExitCode.REGRESSED),
        (3, 0, 0.2, Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        (0, 0, 0.5, Verdict.EQUIVALENT, ExitCode.PASSED),
    ],
)
def test_flips_of_gsm8k_come_to_their_verdict(
    tmp_path: Path, lost: int, won: int, margin: float, verdict: Verdict, code: int
) -> None:
    suite = suite_of(score=margin)
    old = flipped(tmp_path / "old", GSM8K, range(lost, lost + won), suite=suite)
    new = flipped(tmp_path / "new", GSM8K, range(lost), suite=suite)
    comparison = compare([old, new])
    result = gate(comparison)
    assert (result.verdict, comparison.exit_code) == (verdict, code)
    assert (result.estimate.changed, result.estimate.n) == (lost + won, GSM8K)
    assert 100 * result.estimate.delta == pytest.approx(100 * (won - lost) / GSM8K)
    assert result.second - result.first == pytest.approx(100 * result.estimate.delta)
    assert len(comparison.pairs[0].flips) == lost + won


@pytest.mark.parametrize(("n", "verdict"), [(299, Verdict.EQUIVALENT), (298, Verdict.INCONCLUSIVE)])
def test_identical_runs_are_equivalent_only_with_enough_samples(tmp_path: Path, n: int, verdict: Verdict) -> None:
    assert gate(compare([flipped(tmp_path / "old", n, ()), flipped(tmp_path / "new", n, ())])).verdict is verdict


def test_the_p_value_is_that_of_pairs(tmp_path: Path) -> None:
    # 20 lost and 2 won of 200, half of all right: a test that takes the runs for independent sees nothing
    old = flipped(tmp_path / "old", 200, range(90, 182))
    new = flipped(tmp_path / "new", 200, [*range(70, 90), *range(92, 182)])
    result = gate(compare([old, new]))
    assert result.estimate.p < 0.001
    shares = [result.first / 100, result.second / 100]
    unpaired = sum(share * (1 - share) / 200 for share in shares) ** 0.5
    assert abs(result.estimate.delta) < 1.96 * unpaired


def test_runs_with_other_settings_are_refused_with_a_list(tmp_path: Path) -> None:
    old, new = flipped(tmp_path / "old", 5, ()), flipped(tmp_path / "new", 5, (), suite=suite_of(score=2.0))
    with pytest.raises(NotComparableError) as caught:
        compare([old, new])
    assert caught.value.reasons == ["old and new: suite.gates[0].margin: 1.0 against 2.0"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_sha256": "other"}, "gsm8k_cot: prompt_sha256 differs for 1 samples: s0003"),
        ({"prompt_tokens": 9}, "gsm8k_cot: prompt_tokens differs for 1 samples: s0003"),
        ({"gold_sha256": "other"}, "gsm8k_cot: gold_sha256 differs for 1 samples: s0003"),
        ({"truncated": True}, "gsm8k_cot: truncated differs for 1 samples: s0003"),
    ],
)
def test_samples_that_are_not_the_same_question_are_refused(tmp_path: Path, fields: Record, reason: str) -> None:
    items = [item("gsm8k_cot", at, **(fields if at == 3 else {})) for at in range(5)]
    old, new = flipped(tmp_path / "old", 5, ()), flipped(tmp_path / "new", 5, (), items=items)
    with pytest.raises(NotComparableError) as caught:
        compare([old, new])
    assert caught.value.reasons == [f"old and new: {reason}"]


def test_samples_of_one_run_alone_are_listed(tmp_path: Path) -> None:
    old, new = flipped(tmp_path / "old", 20, ()), flipped(tmp_path / "new", 5, ())
    with pytest.raises(NotComparableError, match=r"15 samples are not in new: s0005, .*s0014 and 5 more") as caught:
        compare([old, new])
    assert len(caught.value.reasons) == 1


def test_a_run_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    items = [item("gsm8k_cot", at) for at in range(5)]
    new = write_arm(tmp_path / "new", [answer("gsm8k_cot", 0)], items=items)
    with pytest.raises(NotComparableError, match="new: 4 samples were not asked yet"):
        compare([flipped(tmp_path / "old", 5, ()), new])


def test_two_runs_of_one_label_are_refused(tmp_path: Path) -> None:
    run = flipped(tmp_path / "old", 5, ())
    with pytest.raises(ValueError, match="runs must be two or more, each with a label of its own, got old, old"):
        compare([run, run])
    with pytest.raises(ValueError, match=r"got old$"):
        compare([run])


def test_a_failure_on_one_side_fails_whatever_the_scores(tmp_path: Path) -> None:
    before = [answer("gsm8k_cot", at) for at in range(400)]
    after = [*before[:-2], failure("gsm8k_cot", 398), failure("gsm8k_cot", 399, "timeout")]
    comparison = two(tmp_path, before, after)
    failures = comparison.pairs[0].failures
    assert comparison.exit_code == ExitCode.FAILURES
    assert failures.table == {("gsm8k_cot", "ok", "error"): 1, ("gsm8k_cot", "ok", "timeout"): 1}
    # what was not answered is neither right nor wrong
    assert (gate(comparison).estimate.n, gate(comparison).estimate.delta) == (398, 0.0)
    assert failures.sensitivity["score"][0] == pytest.approx(-0.5)


def test_the_same_failures_on_both_sides_are_counted_and_pass(tmp_path: Path) -> None:
    records = [*(answer("gsm8k_cot", at) for at in range(400)), failure("gsm8k_cot", 400)]
    comparison = two(tmp_path, records, records)
    assert comparison.exit_code == ExitCode.PASSED
    assert comparison.pairs[0].failures.table == {("gsm8k_cot", "error", "error"): 1}
    assert comparison.pairs[0].failures.one_sided == 0


def test_a_record_that_cannot_be_asked_is_skipped_in_both(tmp_path: Path) -> None:
    items = [*(item("gsm8k_cot", at) for at in range(300)), item("gsm8k_cot", 300, broken="no question")]
    comparison = two(tmp_path, *[[answer("gsm8k_cot", at) for at in range(300)]] * 2, items=items)
    assert comparison.exit_code == ExitCode.PASSED
    assert comparison.pairs[0].failures.table == {("gsm8k_cot", "skipped", "skipped"): 1}


@pytest.mark.parametrize("n", [32, 64])
def test_a_fault_shows_in_log_probabilities_long_before_answers(tmp_path: Path, n: int) -> None:
    rng, suite = np.random.default_rng(2), suite_of(score=1.0, nll=0.05)
    losses = rng.gamma(2.0, 0.5, n)
    rounding, fault = rng.normal(0, 1e-4, n), rng.normal(0.15, 0.2, n)
    runs = {
        name: with_losses(tmp_path / name, {"gsm8k_cot": (losses + change).tolist()}, suite=suite)
        for name, change in (("old", 0 * losses), ("again", rounding), ("broken", fault))
    }
    assert gate(compare([runs["old"], runs["again"]]), 1).verdict is Verdict.EQUIVALENT
    comparison = compare([runs["old"], runs["broken"]], runs["again"])
    assert gate(comparison, 1).verdict is Verdict.REGRESSED
    assert gate(comparison, 0).verdict is Verdict.INCONCLUSIVE
    assert comparison.exit_code == ExitCode.REGRESSED
    # a larger loss is worse: the gain is negative, the loss itself is shown as it is
    assert gate(comparison, 1).estimate.delta < 0
    assert gate(comparison, 1).second > gate(comparison, 1).first
    noise = comparison.pairs[0].noise
    assert noise is not None
    assert noise.nll is not None
    assert noise.nll[1] > 100 * noise.nll[0] > 0


def test_a_loss_that_is_certain_and_small_is_named(tmp_path: Path) -> None:
    suite = suite_of(nll=0.05)
    old = with_losses(tmp_path / "old", {"gsm8k_cot": [1.0] * 40}, suite=suite)
    new = with_losses(tmp_path / "new", {"gsm8k_cot": [1.001 + 1e-4 * (at % 3) for at in range(40)]}, suite=suite)
    result = gate(compare([old, new]))
    assert result.verdict is Verdict.EQUIVALENT
    assert result.note == "a loss is certain, and smaller than the margin"


def test_what_was_not_measured_is_no_verdict(tmp_path: Path) -> None:
    records = [answer("gsm8k_cot", at, gold_nll=None) for at in range(400)]
    comparison = two(tmp_path, records, records, suite=suite_of(nll=0.05))
    assert gate(comparison).note == "nll was not measured on gsm8k_cot"
    assert comparison.exit_code == ExitCode.INCONCLUSIVE


def test_a_task_whose_data_was_missing_leaves_its_gate_open(tmp_path: Path) -> None:
    suite = suite_of(("gsm8k_cot", "qasper"))
    tasks = {"tasks": {"gsm8k_cot": {"samples": 400}}, "unloaded": {"qasper": "no such file"}}
    records = [answer("gsm8k_cot", at) for at in range(400)]
    comparison = two(tmp_path, records, records, suite=suite, **tasks)
    assert gate(comparison).note == "score was not measured on qasper"
    assert comparison.notes == ["qasper was not asked: no such file"]
    assert comparison.exit_code == ExitCode.INCONCLUSIVE


def test_tasks_weigh_alike_and_both_averages_name_their_tasks(tmp_path: Path) -> None:
    from assay.eval.report_text import average_rows

    tasks = ("qasper", "multifieldqa_en", "hotpotqa")
    before = [answer(task, at) for task in tasks for at in range(50)]
    # one task of one category falls from 1 to 0.4
    after = [answer(task, at, 0.4 if task == "qasper" else 1.0) for task in tasks for at in range(50)]
    comparison = two(tmp_path, before, after, suite=suite_of(tasks))
    assert gate(comparison).second == pytest.approx(100 * (0.4 + 1 + 1) / 3)
    rows = average_rows(comparison.pairs[0])
    assert rows[0][:3] == ("longbench, all, every task alike", "100.00", "80.00")
    assert rows[0][3] == "3: qasper, multifieldqa_en, hotpotqa"
    # of two categories, one has the mean of 0.4 and 1
    assert rows[1][:3] == ("longbench, all, every category alike", "100.00", "85.00")


def test_samples_of_one_context_are_taken_as_one(tmp_path: Path) -> None:
    def runs(place: Path, items: list[Any]) -> Comparison:
        rng = np.random.default_rng(0)
        lost = rng.uniform(size=50) < 0.3
        after = [answer("qasper", at, 0.4 if lost[at // 4] else 1.0) for at in range(200)]
        before = [answer("qasper", at) for at in range(200)]
        return two(place, before, after, items=items, suite=suite_of(("qasper",)))

    alone = gate(runs(tmp_path / "a", [item("qasper", at) for at in range(200)])).estimate
    shared = gate(runs(tmp_path / "b", [item("qasper", at, cluster=f"c{at // 4}") for at in range(200)])).estimate
    assert shared.delta == alone.delta
    assert shared.se == shared.se_clustered
    assert shared.se > 1.8 * alone.se
    assert shared.high - shared.low > 1.6 * (alone.high - alone.low)


def test_the_better_of_two_attempts_counts_and_the_last_of_the_good(tmp_path: Path) -> None:
    first = [failure("gsm8k_cot", 0), answer("gsm8k_cot", 0, 0.0, attempt=2), answer("gsm8k_cot", 0, 1.0, attempt=3)]
    arm = write_arm(tmp_path / "a", [*first, failure("gsm8k_cot", 0)], items=[item("gsm8k_cot", 0)])
    assert arm.records["gsm8k_cot"]["s0000"]["attempt"] == 3
    assert arm.scores["gsm8k_cot"] == {"s0000": 1.0}


def test_scores_that_do_not_fit_the_answers_are_made_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [answer("gsm8k_cot", 0), answer("gsm8k_cot", 1)])
    folder.append([answer("gsm8k_cot", 1, 0.0, attempt=2)])
    assert read_arm(folder.path).scores["gsm8k_cot"] == {"s0000": 1.0, "s0001": 0.0}
    path = tmp_path / "a" / "scores" / "gsm8k_cot.numeric.jsonl"
    path.write_text(path.read_text().replace("numeric@1", "numeric@0"))
    assert read_arm(folder.path).scores["gsm8k_cot"] == {"s0000": 1.0, "s0001": 0.0}
    unscored = write_run(tmp_path / "b", [answer("gsm8k_cot", 0)], score=False)
    assert read_arm(unscored.path).scores["gsm8k_cot"] == {"s0000": 1.0}


def test_a_matrix_of_runs_is_corrected_over_its_pairs(tmp_path: Path) -> None:
    arms = [flipped(tmp_path / name, GSM8K, range(wrong)) for name, wrong in (("a", 0), ("b", 9), ("c", 9))]
    comparison = compare(arms)
    assert [(pair.first, pair.second) for pair in comparison.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    raw = [gate(comparison, 0, at).estimate.p for at in range(3)]
    assert raw == pytest.approx([2 * 0.5**9, 2 * 0.5**9, 1.0])
    adjusted = [gate(comparison, 0, at).p_adjusted for at in range(3)]
    assert adjusted == pytest.approx([6 * 0.5**9, 6 * 0.5**9, 1.0])


def test_the_correction_can_take_a_verdict_away(tmp_path: Path) -> None:
    # six lost flips alone have p = 0.031, of three pairs 0.094
    suite = suite_of(score=0.1)
    arms = [
        flipped(tmp_path / name, GSM8K, range(wrong), suite=suite) for name, wrong in (("a", 0), ("b", 6), ("c", 0))
    ]
    assert gate(compare(arms[:2])).verdict is Verdict.REGRESSED
    assert gate(compare(arms)).verdict is Verdict.INCONCLUSIVE


def test_factors_of_a_full_design_have_an_effect_of_their_own(tmp_path: Path) -> None:
    suite, losses = suite_of(nll=0.05), np.linspace(0.5, 1.5, 60)
    arms: list[Arm] = []
    for kernel, kind, change in (
        ("old", "logits", 0.0),
        ("new", "logits", 0.0),
        ("old", "probability", 0.2),
        ("new", "probability", 0.2),
    ):
        wave = 0.01 * np.sin(np.arange(60) + 7 * len(arms))
        values = {"gsm8k_cot": (losses + change + wave).tolist()}
        label = f"{kernel}-{kind}"
        arms.append(with_losses(tmp_path / label, values, suite=suite, factors={"kernel": kernel, "scores": kind}))
    comparison = compare(arms)
    effects = {effect.factor: effect for effect in comparison.effects}
    assert effects["kernel"].levels == ("old", "new")
    assert effects["kernel"].gates[0].verdict is Verdict.EQUIVALENT
    assert effects["scores"].gates[0].verdict is Verdict.REGRESSED
    assert effects["scores"].gates[0].estimate is not None
    assert effects["scores"].gates[0].estimate.delta == pytest.approx(-0.2, abs=0.005)
    assert comparison.pairs[0].differs_in == {"kernel": ("old", "new")}
    assert compare(arms[:3]).effects == []


def test_probes_are_compared_by_context_length(tmp_path: Path) -> None:
    before = [answer("gsm8k_cot", at, probes=[[10, -1.0], [2000, -2.0], [3000, -3.0]]) for at in range(4)]
    after = [answer("gsm8k_cot", at, probes=[[10, -1.0], [2000, -2.5], [3000, -2.75]]) for at in range(4)]
    found = two(tmp_path, before, after).pairs[0].probes
    assert [dataclasses.astuple(one) for one in found] == [
        ("0-255", 4, -1.0, -1.0, 0.0, 0.0),
        ("1024-4095", 8, -2.5, -2.625, 0.375, 0.5),
    ]


def test_sure_tokens_that_differ_are_told_from_ties(tmp_path: Path) -> None:
    def one(at: int, token: int, gap: float) -> Record:
        return answer("gsm8k_cot", at, output_ids=[5, 6, token], gaps=[9.0, 9.0, gap])

    before = [one(0, 1, 0.01), one(1, 1, 2.0), one(2, 1, 3.0)]
    after = [one(0, 2, 0.02), one(1, 2, 1.5), one(2, 1, 0.0)]
    found = two(tmp_path, before, after).pairs[0].divergence
    assert (found.n, found.identical, found.positions) == (3, 1, {"1-3": 2})
    assert (found.gaps, found.no_ties) == (2, 1)
    assert found.median_gap == pytest.approx((0.01 + 1.5) / 2)
    assert found.examples[0] == ("gsm8k_cot", "s0001", 2, 2.0, 1.5)


def test_latencies_are_paired_and_other_lengths_flagged(tmp_path: Path) -> None:
    before = [answer("gsm8k_cot", at, latency_s=2.0, first_token_s=0.5, output_ids=[1] * 10) for at in range(3)]
    after = [answer("gsm8k_cot", at, latency_s=1.0, first_token_s=0.25, output_ids=[1] * (10 + at)) for at in range(3)]
    speed = two(tmp_path, before, after).pairs[0].speed
    assert speed is not None
    assert (speed.n, speed.first_latency, speed.second_latency) == (3, 2.0, 1.0)
    assert (speed.first_ttft, speed.second_ttft) == (0.5, 0.25)
    assert (speed.first_rate, speed.second_rate) == (5.0, 11.0)
    assert speed.tokens_differ == 2


def test_kernel_calls_of_both_runs_stand_side_by_side(tmp_path: Path) -> None:
    before = [answer("gsm8k_cot", at, kernel_calls={"eager": 30}) for at in range(2)]
    after = [answer("gsm8k_cot", at, kernel_calls={"chunked": 30}) for at in range(2)]
    assert two(tmp_path, before, after).pairs[0].kernels == {"chunked": (0, 60), "eager": (60, 0)}


def test_parts_of_a_task_are_shown_apart(tmp_path: Path) -> None:
    items = [item("qasper_e", at, stratum="0-4k" if at < 6 else "8k+") for at in range(10)]
    before = [answer("qasper_e", at) for at in range(10)]
    after = [answer("qasper_e", at, 0.4 if at >= 6 else 1.0) for at in range(10)]
    comparison = two(tmp_path, before, after, items=items, suite=suite_of(("qasper_e",)))
    result = comparison.pairs[0].tasks[0]
    assert result.strata == {"0-4k": (6, 100.0, 100.0), "8k+": (4, 100.0, 40.0)}
    assert result.worst[0] == ("s0006", 1.0, 0.4)


def test_the_whole_of_longbench_is_compared_within_ten_seconds(tmp_path: Path) -> None:
    suite, rng = load_suite("longbench-full"), np.random.default_rng(0)
    counts = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
    arms = []
    for name in ("old", "new"):
        records, items = [], []
        for task in suite.tasks:
            for at in range(counts.get(task, 200)):
                items.append(replace(item(task, at), answers=("1",), classes=("1",)))
                ids = rng.integers(0, 50_000, 60).tolist()
                probes = [[place + 1, float(rng.normal())] for place in range(64)]
                more = {"output_ids": ids, "gold_nll": float(rng.gamma(2.0)), "probes": probes, "output_text": "1"}
                records.append(answer(task, at, **more))
        folder = write_run(tmp_path / name, records, suite=suite, items=items, score=False)
        for task in suite.tasks:
            write_scores(folder.path, task, records, rng)
        arms.append(folder.path)
    # of the processor, as the machine may be busy with other things
    began = time.process_time()
    comparison = compare([read_arm(path) for path in arms])
    took = time.process_time() - began
    assert gate(comparison).estimate.n == 4750
    assert took < 10


def write_scores(path: Path, task: str, records: Sequence[Record], rng: np.random.Generator) -> None:
    """Scores at random, as if the answers had been scored."""
    import json

    from assay.eval.scorers import find_scorer
    from assay.eval.settings import text_digest
    from assay.eval.tasks import find_task

    scorer = find_scorer(find_task(task).scored_by)
    mine = [record for record in records if record["task"] == task]
    rows = [
        {
            "id": record["sample_id"],
            "score": float(rng.uniform()),
            "scorer": scorer.id,
            "output_sha256": text_digest(record["output_text"]),
        }
        for record in mine
    ]
    file = path / "scores" / f"{task}.{scorer.name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
