"""The gate on generated tokens: where two runs first differ, and when that costs nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from eval_runs import Record, answer, gate, suite_of, two

from assay.eval.statistics import Verdict


def test_agreement_is_judged_by_the_margin_alone(tmp_path: Path) -> None:
    def ids(at: int, share: float) -> Record:
        return answer("gsm8k_cot", at, output_ids=[1] * round(20 * share) + [2] * round(20 * (1 - share)))

    old = [ids(at, 1.0) for at in range(100)]
    slightly, badly = [ids(at, 0.9 if at % 10 == 0 else 1.0) for at in range(100)], [ids(at, 0.5) for at in range(100)]
    suite = suite_of(agreement=5.0)
    result = gate(two(tmp_path / "a", old, slightly, suite=suite))
    assert (result.verdict, result.first) == (Verdict.EQUIVALENT, 100.0)
    assert result.second == pytest.approx(99.0)
    comparison = two(tmp_path / "b", old, badly, suite=suite)
    assert gate(comparison).verdict is Verdict.REGRESSED
    divergence = comparison.pairs[0].divergence
    assert (divergence.n, divergence.identical, divergence.positions) == (100, 0, {"4-15": 100})


def test_a_tie_that_breaks_the_other_way_costs_nothing(tmp_path: Path) -> None:
    def ids(at: int, token: int, gap: float | None) -> Record:
        gaps = [] if gap is None else [3.0, gap, 3.0, 3.0]
        return answer("gsm8k_cot", at, output_ids=[1, token, 1, 1], gaps=gaps)

    plain = suite_of(agreement=5.0)
    excusing = replace(plain, gates=(replace(plain.gates[0], tie=0.25),))
    # gaps of both runs, and what a sample keeps of 4 tokens: a tie must be one in both, and be known
    kept = {(0.25, 0.0): 100.0, (0.0, 0.25): 100.0, (0.26, 0.0): 25.0, (0.0, 2.0): 25.0, (None, 0.0): 25.0}
    for at, (gaps, share) in enumerate(kept.items()):
        old = [ids(one, 1, gaps[0]) for one in range(100)]
        new = [ids(one, 2, gaps[1]) for one in range(100)]
        result = gate(two(tmp_path / f"{at}", old, new, suite=excusing))
        assert (result.second, result.verdict) == (share, Verdict.EQUIVALENT if share == 100.0 else Verdict.REGRESSED)
        what = "100 first differences lie between tokens at most 0.25 nats apart and cost nothing"
        assert result.note == (what if share == 100.0 else "")
        # without a tie in the suite every difference counts
        assert gate(two(tmp_path / f"plain {at}", old, new, suite=plain)).second == 25.0
