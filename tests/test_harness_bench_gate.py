"""The regression gate: a planted slow-down is caught, noise is not, and what cannot be compared is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_clock import ATTENTION, SHAPE, FakeClock, honest, participant, setting

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from assay.harness.bench.gate import (
    Baseline,
    Committed,
    Line,
    accept,
    baseline_path,
    compare,
    exit_code,
    limit_of,
    read_baseline,
)
from assay.harness.bench.results import BOUND, BenchRun, KernelResult, Ratio, ShapeResult
from assay.harness.bench.session import bench_shape
from assay.harness.bench.statistics import Interval
from assay.harness.plan import UsageError
from assay.harness.record import Verdict

GPU = "NVIDIA H200"


def timed(ours_ms: float, *, peer_ms: float = 1.0, jitter: float = 0.0) -> BenchRun:
    """A run on the fake clock: ours and a peer, each sample scattered by ``jitter``."""
    clock = FakeClock()
    lineup = [
        participant(honest("ours", clock, ours_ms, jitter=jitter)),
        participant(honest("peer", clock, peer_ms, jitter=jitter), "peer"),
    ]
    shape = bench_shape(ATTENTION, SHAPE, lineup, setting(clock, rounds=20))
    return run_of(shape)


def run_of(*shapes: ShapeResult) -> BenchRun:
    return BenchRun(device={"name": GPU}, versions={"torch": "2.11"}, peers={}, seed=0, shapes=list(shapes))


def statuses(lines: list[Line]) -> dict[str, str]:
    return {line.other: line.status for line in lines}


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Ratios of a run in which ours took 1.2 of the peer's time."""
    path = tmp_path_factory.mktemp("ratios") / "h200.json"
    assert accept(timed(1.2), path) == 2
    return read_baseline(path)


def test_the_ratios_of_a_run_are_accepted(committed: Baseline) -> None:
    ratios = {(one.shape, one.kernel, one.other): one.ratio for one in committed.ratios}
    assert set(ratios) == {("tiny", "ours", "peer"), ("tiny", "ours", BOUND)}
    assert ratios["tiny", "ours", "peer"] == pytest.approx(1.2)
    assert committed.gpu == GPU
    assert {one.digest for one in committed.ratios} == {SHAPE.digest}


@pytest.mark.parametrize("jitter", [0.0, 0.005])
def test_a_planted_slow_down_of_a_tenth_is_caught(committed: Baseline, jitter: float) -> None:
    lines = compare(timed(1.2 * 1.1, jitter=jitter), committed)
    assert statuses(lines) == {"peer": "regressed", BOUND: "regressed"}
    assert exit_code(lines) == 1
    text = str(next(line for line in lines if line.other == "peer"))
    assert text.startswith("tiny: ours over peer is 1.3")
    assert "against the committed 1.200, at least +" in text


def test_the_text_says_by_how_much(committed: Baseline) -> None:
    (line,) = (line for line in compare(timed(1.32), committed) if line.other == "peer")
    assert str(line) == (
        "tiny: ours over peer is 1.320 [1.320, 1.320], +10.0% against the committed 1.200, "
        "at least +10.0% where 2.0% is the limit"
    )


@pytest.mark.parametrize("factor", [0.981, 1.0, 1.019])
def test_a_wobble_of_two_per_cent_is_not(committed: Baseline, factor: float) -> None:
    lines = compare(timed(1.2 * factor), committed)
    assert statuses(lines) == {"peer": "held", BOUND: "held"}
    assert exit_code(lines) == 0


def test_samples_that_wobble_by_two_per_cent_are_not(committed: Baseline) -> None:
    lines = compare(timed(1.2, jitter=0.02), committed)
    assert "regressed" not in statuses(lines).values()
    assert exit_code(lines) == 0


def test_the_lower_end_of_the_interval_decides() -> None:
    def status(low: float, high: float, noise: Interval | None = None) -> str:
        shape = shape_with(Interval(value=(low + high) / 2, low=low, high=high), noise=noise)
        baseline = Baseline(gpu=GPU, versions={}, ratios=(one_committed(1.0),))
        (line,) = compare(run_of(shape), baseline)
        return line.status

    assert status(1.0201, 1.2) == "regressed"
    assert status(1.0199, 1.2) == "held"
    assert status(0.8, 0.9799) == "faster"
    assert status(0.8, 0.9801) == "held"
    # three times the noise of two lanes of one kernel, where that is more than two per cent
    noise = Interval(value=1.0, low=0.99, high=1.005)
    assert status(1.0299, 1.2, noise) == "held"
    assert status(1.0301, 1.2, noise) == "regressed"


def shape_with(
    ratio: Interval | None, *, other: str = "peer", noise: Interval | None = None, verdicts: str = "PASS PASS"
) -> ShapeResult:
    ours, peer = (Verdict(verdict) for verdict in verdicts.split())
    kernels = [
        KernelResult(kernel="ours", role="ours", verdict=ours),
        KernelResult(kernel="peer", role="peer", verdict=peer),
    ]
    ratios = [] if ratio is None else [Ratio(kernel="ours", other=other, interval=ratio)]
    known: dict[str, Any] = {"shape": "tiny", "digest": "d", "op": "attention", "source": "", "dtype": "float32"}
    return ShapeResult(**known, sizes={}, kernels=kernels, ratios=ratios, noise=noise)


def one_committed(ratio: float, **changes: str) -> Committed:
    known = {"shape": "tiny", "digest": "d", "kernel": "ours", "other": "peer"}
    return Committed(ratio=ratio, **known | changes)


SAME = Interval(value=1.0, low=1.0, high=1.0)


def test_the_limit_is_two_per_cent_or_three_times_the_noise() -> None:
    assert limit_of(shape_with(None)) == 0.02
    assert limit_of(shape_with(None, noise=Interval(value=1.0, low=0.995, high=1.004))) == 0.02
    assert limit_of(shape_with(None, noise=Interval(value=1.0, low=0.99, high=1.02))) == pytest.approx(0.06)


@pytest.mark.parametrize("change", [{"digest": "other"}, {"shape": "large"}, {"kernel": "theirs"}, {"other": BOUND}])
def test_a_ratio_that_nobody_accepted_is_no_baseline(change: dict[str, str]) -> None:
    lines = compare(run_of(shape_with(SAME)), Baseline(gpu=GPU, versions={}, ratios=(one_committed(1.0, **change),)))
    assert [line.status for line in lines if line.now is not None] == ["new"]
    assert exit_code([line for line in lines if line.status == "new"]) == 3


def test_nothing_to_compare_is_no_success() -> None:
    assert exit_code([]) == 3


def test_our_kernel_without_a_time_is_lost_and_fails() -> None:
    baseline = Baseline(gpu=GPU, versions={}, ratios=(one_committed(1.0),))
    lines = compare(run_of(shape_with(None, verdicts="UNSUPPORTED PASS")), baseline)
    assert [line.status for line in lines] == ["lost"]
    assert exit_code(lines) == 1
    assert "ours over peer was 1.000 when committed, and has no time now" in str(lines[0])


def test_a_peer_without_a_time_is_absent_and_does_not_fail() -> None:
    baseline = Baseline(gpu=GPU, versions={}, ratios=(one_committed(1.0), one_committed(1.0, other=BOUND)))
    lines = compare(run_of(shape_with(SAME, other=BOUND, verdicts="PASS UNSUPPORTED")), baseline)
    assert statuses(lines) == {BOUND: "held", "peer": "absent"}
    assert exit_code(lines) == 0


def test_what_the_run_did_not_try_is_left_out() -> None:
    baseline = Baseline(gpu=GPU, versions={}, ratios=(one_committed(1.0), one_committed(1.0, other="fa9")))
    assert statuses(compare(run_of(shape_with(SAME)), baseline)) == {"peer": "held"}


def test_accepting_keeps_the_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    accept(run_of(shape_with(SAME)), path)
    content = json.loads(path.read_text())
    content["ratios"].append({"shape": "large", "digest": "e", "kernel": "ours", "other": "peer", "ratio": 2.0})
    path.write_text(json.dumps(content))
    accept(run_of(shape_with(Interval(value=1.23456789, low=1.2, high=1.3))), path)
    assert [(one.shape, one.ratio) for one in read_baseline(path).ratios] == [("large", 2.0), ("tiny", 1.2346)]


def test_a_file_of_another_gpu_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    accept(run_of(shape_with(SAME)), path)
    other = run_of(shape_with(SAME))
    other.device["name"] = "NVIDIA A100"
    with pytest.raises(UsageError, match="must go to a file of NVIDIA A100, got one of NVIDIA H200"):
        accept(other, path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "assay.bench.ratios/0"}', '{"schema": "x", "ratios": 1}'])
def test_a_file_that_holds_no_ratios_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(UsageError, match="--against must be a file that --accept wrote"):
        read_baseline(tmp_path / "b.json")


def test_each_gpu_model_has_a_file_of_its_own() -> None:
    assert baseline_path("NVIDIA H200").name == "nvidia-h200.json"
    assert baseline_path("NVIDIA A100-SXM4-80GB").name == "nvidia-a100-sxm4-80gb.json"
    assert baseline_path("NVIDIA H200").parent.name == "baselines"


def test_committed_files_are_what_accept_writes() -> None:
    for path in baseline_path("x").parent.glob("*.json"):
        baseline = read_baseline(path)
        assert baseline_path(baseline.gpu) == path
        assert baseline.ratios
        assert all(one.ratio > 0 for one in baseline.ratios)
