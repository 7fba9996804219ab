"""The calibration: tails against closed forms, and a collection of real judgements."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Answer, honest_attention

from assay.harness import calibrate
from assay.harness._calibrate_tail import (
    TARGET,
    Ratios,
    Tail,
    advice,
    false_rejects,
    fit_tail,
    rejection_bound,
    statistics,
    tighter_limit,
)
from assay.harness.calibrate import Collection, collect, main, report
from assay.harness.faults import Variant
from assay.harness.record import GateResult, Record, Verdict

pytest.importorskip("scipy", reason="calibration needs scipy")

BOUNDED = Tail(threshold=0.5, share=0.05, shape=-0.5, scale=0.1, peaks=100)
EXPONENTIAL = Tail(threshold=0.5, share=0.05, shape=0.0, scale=0.1, peaks=100)
HEAVY = Tail(threshold=0.5, share=0.05, shape=0.5, scale=0.1, peaks=100)


def ratios(*by_case: float, per_run: float = 10.0) -> Ratios:
    return Ratios(gate="G", every=by_case, by_case=by_case, by_dtype={"float32": max(by_case)}, per_run=per_run)


@pytest.mark.parametrize("tail", [BOUNDED, EXPONENTIAL, HEAVY], ids=["bounded", "exponential", "heavy"])
def test_the_tail_is_that_of_scipy(tail: Tail) -> None:
    pareto = statistics().genpareto(tail.shape, scale=tail.scale)
    for ratio in (0.5, 0.55, 0.65):
        assert tail.beyond(ratio) == pytest.approx(0.05 * pareto.sf(ratio - 0.5), rel=1e-9)
    for probability in (0.05, 1e-3, 1e-8):
        assert tail.beyond(tail.quantile(probability)) == pytest.approx(probability, rel=1e-6)


def test_a_bounded_tail_ends_and_the_others_do_not() -> None:
    assert BOUNDED.end == pytest.approx(0.7)
    assert BOUNDED.beyond(0.71) == 0
    assert EXPONENTIAL.end == HEAVY.end == math.inf
    assert HEAVY.shape_error == pytest.approx(0.15)
    # an end that is reached has no standard error: the likelihood is not regular there
    assert math.isnan(replace(HEAVY, shape=-0.9).shape_error)


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.3])
def test_a_fit_recovers_a_tail(shape: float) -> None:
    """Uniform values below 0.5, peaks of a known shape above: 5 % of 40000."""
    rng = np.random.default_rng(1)
    peaks = 0.5 + statistics().genpareto(shape, scale=0.1).rvs(2000, random_state=rng)
    tail = fit_tail([*rng.uniform(0, 0.5, 38000).tolist(), *peaks.tolist()])
    assert tail is not None
    assert tail.threshold == pytest.approx(0.5, abs=0.01)
    assert tail.share == pytest.approx(0.05, abs=1e-3)
    assert tail.shape == pytest.approx(shape, abs=0.1)
    assert tail.scale == pytest.approx(0.1, rel=0.15)


def test_a_uniform_ratio_ends_where_it_ends() -> None:
    tail = fit_tail(np.random.default_rng(2).uniform(0, 0.8, 20000).tolist())
    assert tail is not None
    assert tail.shape == pytest.approx(-1, abs=0.1)
    assert tail.end == pytest.approx(0.8, abs=0.01)
    assert false_rejects(tail, per_run=1000) == 0


@pytest.mark.parametrize("values", [[], [0.1] * 1000, [0.1, 0.2], [math.inf, *np.linspace(0, 1, 1000)]])
def test_too_few_or_equal_or_infinite_values_have_no_tail(values: list[float]) -> None:
    assert fit_tail(values) is None


def test_no_rejection_of_n_bounds_the_rate_in_closed_form() -> None:
    for judged in (1, 60, 5000):
        assert rejection_bound(0, judged) == pytest.approx(1 - 0.05 ** (1 / judged), rel=1e-9)
    # at the bound, so few rejections have a probability of 5 %
    bound = rejection_bound(2, 50)
    assert statistics().binom.cdf(2, 50, bound) == pytest.approx(0.05, rel=1e-9)
    assert rejection_bound(3, 3) == 1
    assert rejection_bound(0, 0) == 1


def test_false_rejections_of_a_run_add_up_over_its_cases() -> None:
    alone = EXPONENTIAL.beyond(1.0)
    assert false_rejects(EXPONENTIAL, per_run=1) == pytest.approx(alone, rel=1e-9)
    assert false_rejects(EXPONENTIAL, per_run=100) == pytest.approx(1 - (1 - alone) ** 100, rel=1e-9)
    assert false_rejects(BOUNDED, per_run=100) == 0


def test_a_tighter_limit_rejects_once_in_a_million_runs_and_never_what_was_seen() -> None:
    limit = tighter_limit(EXPONENTIAL, ratios(0.6))
    assert false_rejects(Tail(threshold=0.5, share=0.05, shape=0.0, scale=0.1, peaks=100), per_run=10) > TARGET
    assert 10 * EXPONENTIAL.beyond(limit) == pytest.approx(TARGET, rel=1e-6)
    assert tighter_limit(BOUNDED, ratios(0.69, 0.75)) == 0.75


@pytest.mark.parametrize(
    ("tail", "seen", "text"),
    [
        (None, 0.0, "all or nothing"),
        (None, 0.4, "too few cases to extrapolate; the largest ratio is 0.40"),
        (BOUNDED, 0.6, "room: 0.70 of the limit would do"),
        (BOUNDED, 0.9, "about right: 0.90 of the limit would do"),
        (HEAVY, 0.6, "no room: the fitted tail reaches"),
    ],
)
def test_the_advice_says_what_the_tail_allows(tail: Tail | None, seen: float, text: str) -> None:
    assert advice(tail, ratios(seen)).startswith(text)


def record(verdict: Verdict = Verdict.PASS, *, case: str = "a", dtype: str = "float32", **gates: float) -> Record:
    results = [GateResult(gate=name, ratio=ratio) for name, ratio in gates.items()]
    return Record(
        op="attention",
        kernel="k",
        case={"id": case, "dtype": dtype, "family": "diffuse"},
        device="cpu",
        verdict=verdict,
        text="why",
        gates=results,
    )


def test_a_collection_keeps_the_worst_of_each_case_and_dtype() -> None:
    collection = Collection(seeds=2)
    collection.add(record(G4=0.2, G5=0.1), 1)
    collection.add(record(G4=0.3), 1)
    collection.add(record(G4=0.1), 2)
    collection.add(record(G4=0.9, case="b", dtype="bfloat16"), 2)
    collection.add(record(Verdict.UNSUPPORTED, G4=5.0), 2)
    collection.add(record(Verdict.NUMERIC, G5=2.0, case="c"), 2)
    four, five = collection.ratios()
    assert (four.gate, four.every, sorted(four.by_case)) == ("G4", (0.2, 0.3, 0.1, 0.9), [0.1, 0.3, 0.9])
    assert four.by_dtype == {"float32": 0.3, "bfloat16": 0.9}
    assert four.per_run == 1.5
    assert five.every == (0.1, 2.0)
    assert collection.judged == 5
    assert collection.rejected == ["k on c (seed 2): why"]
    page = report(collection, seconds=3)
    assert "**Rejected: 1** of 5" in page
    assert "- k on c (seed 2): why" in page
    assert "| G4 | 4 | 0.900 | k, diffuse bfloat16 | 0.900 |" in page
    assert "| G4 | 0.900 | 0.300 |" in page


def test_correct_kernels_are_collected_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.operations.NAMES", ("attention",))
    collection = collect([5, 6], variants=2, dtypes=("float32",))
    assert collection.seeds == 2
    assert collection.rejected == []
    assert {"attention: attention[torch]", "attention: attention[sdpa]"} < collection.kernels
    # two twins, and two other variants a seed
    assert len(collection.kernels) == 6
    assert {ratio.gate for ratio in collection.ratios()} >= {"G4 envelope", "G5 row rms", "G6 lse", "G6 row scale"}
    assert all(max(ratio.every) <= 1 for ratio in collection.ratios())
    assert "**Rejected: 0**" in report(collection, seconds=1)


def test_a_variant_that_is_wrong_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def half_right(**arguments: Any) -> Answer:
        out, lse = honest_attention(**arguments)
        return out * 1.1, lse

    wrong = Variant(name="half_right", op="attention", function=half_right)
    monkeypatch.setattr("assay.harness.operations.NAMES", ("attention",))
    monkeypatch.setattr(calibrate, "load", lambda op: ([], [wrong]))
    page = tmp_path / "page.md"
    main(["--out", str(page), "--seeds", "1", "--variants", "1"])
    text = page.read_text()
    assert "- half_right on attention-" in text
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--variants", "-1"], []])
def test_wrong_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "page.md")] if options else []
    with pytest.raises(SystemExit) as stop:
        main([*out, *options])
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_without_scipy_the_script_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ModuleNotFoundError, match="calibration needs scipy, which the extra eval installs"):
        main(["--out", str(tmp_path / "page.md")])
    assert not (tmp_path / "page.md").exists()
