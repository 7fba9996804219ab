"""Benchmarks on a real device: the clock, kernels that cheat it, and the gate on a kernel that got slower."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_clock import around, participant
from typer.testing import CliRunner

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from assay.harness import cli
from assay.harness.bench.ceilings import Ceilings, Gemm, copy_rate, gather_rate
from assay.harness.bench.clock import time_once
from assay.harness.bench.cuda import CudaClock, GpuTimer
from assay.harness.bench.engine import measure
from assay.harness.bench.results import BOUND
from assay.harness.bench.schedule import Content, Schedule
from assay.harness.bench.session import Setting, bench_shape
from assay.harness.bench.shapes import Shape
from assay.harness.bench.verdicts import impossible
from assay.harness.discovery import load_operation
from assay.harness.kernels import find_kernels
from assay.harness.operation import Kernel
from assay.harness.record import Verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times are those of a GPU that nobody else uses"),
]

DEVICE = torch.device("cuda", 0)
SHAPE = Shape(
    name="square",
    op="attention",
    source="a test",
    dtype="bfloat16",
    sizes={
        "num_heads": 16,
        "num_kv_heads": 16,
        "d_qk": 128,
        "d_v": 128,
        "query_lens": [2048],
        "key_lens": [2048],
        "causal": True,
        "softmax_scale": 128**-0.5,
        "layout": "packed",
    },
)


@pytest.fixture(scope="module")
def clock() -> CudaClock:
    return CudaClock(DEVICE)


@pytest.fixture(scope="module")
def gemm() -> Gemm:
    product = Gemm(DEVICE, 4096)
    product()
    return product


@pytest.fixture(scope="module")
def setting(clock: CudaClock, gemm: Gemm) -> Setting:
    rate = gemm.flop / time_once(gemm, clock)[0].ms / 1e9
    ceilings = Ceilings(gemm_tflops=rate, copy_tb_s=copy_rate(clock, DEVICE), cache_bytes=clock.cache_bytes)
    return Setting(device=DEVICE, clock=clock, ceilings=ceilings, anchor=gemm, rounds=10)


class Lane:
    """A forward without contents of its own."""

    def __init__(self, name: str, run: Callable[[], Any]) -> None:
        self.name, self._run = name, run

    def stage(self, content: Content, *, poison: bool) -> None:
        """Nothing changes."""

    def call(self, content: Content) -> object:
        return self._run()

    def finding(self, content: Content, results: Any) -> None:
        """Nothing is looked at."""

    def failure(self, error: Exception) -> None:
        raise error


def of_the_house(provider: str) -> Kernel:
    return find_kernels(load_operation("attention"), provider)[0]


def bench(setting: Setting, kernel: Kernel) -> Any:
    result = bench_shape(load_operation("attention"), SHAPE, [participant(kernel)], setting)
    return result, result.kernels[0]


def test_marks_measure_the_work_between_them(clock: CudaClock, gemm: Gemm) -> None:
    def both() -> None:
        gemm()
        gemm()

    once, twice = (min(time_once(call, clock)[0].ms for _ in range(5)) for call in (gemm, both))
    assert once > 0
    assert twice == pytest.approx(2 * once, rel=0.3)


def test_a_replay_answers_for_the_contents_at_its_addresses(clock: CudaClock) -> None:
    a = torch.arange(8.0, device=DEVICE)
    replay, result = clock.capture(lambda: a * 2)
    a.add_(1)
    replay()
    torch.cuda.synchronize()
    assert result.tolist() == [2 * (value + 1) for value in range(8)]


def test_what_cannot_be_captured_says_so_and_the_device_goes_on(clock: CudaClock) -> None:
    a = torch.ones(8, device=DEVICE)
    with pytest.raises(RuntimeError):
        clock.capture(lambda: a.sum().item())
    assert float(a.sum()) == 8.0
    assert float(torch.rand(8, device=DEVICE).max()) < 1.0


def test_the_peak_is_that_of_one_call(clock: CudaClock) -> None:
    a = torch.ones(1 << 20, device=DEVICE)
    assert clock.peak_bytes(lambda: (a + 1) + 1) == 8 << 20


def test_the_flush_is_larger_than_the_cache(clock: CudaClock) -> None:
    assert clock._flushed.numel() >= 4 * clock.cache_bytes > 0


def test_the_timer_of_pytest_benchmark_counts_seconds_of_the_device(gemm: Gemm, clock: CudaClock) -> None:
    timer = GpuTimer()
    assert timer() == 0.0
    # so many that the device is never idle between the marks
    for _ in range(50):
        gemm()
    first = timer()
    assert first * 1e3 == pytest.approx(50 * time_once(gemm, clock)[0].ms, rel=0.5)
    assert timer() >= first


def test_a_gather_within_the_cache_is_faster_than_one_past_it(clock: CudaClock) -> None:
    table = clock.cache_bytes // 8
    assert gather_rate(clock, DEVICE, table) > gather_rate(clock, DEVICE, 8 * clock.cache_bytes) > 0


def test_work_on_a_side_stream_is_found_out(clock: CudaClock, gemm: Gemm) -> None:
    aside, a = torch.cuda.Stream(DEVICE), torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def unjoined() -> torch.Tensor:
        aside.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(aside):
            return a @ a

    def joined() -> torch.Tensor:
        result = unjoined()
        torch.cuda.current_stream(DEVICE).wait_stream(aside)
        return result

    lanes = [Lane("unjoined", unjoined), Lane("joined", joined)]
    joined()
    measured = measure(lanes, Schedule(rounds=5, ring=1, seed=0), clock, anchor=gemm)
    ceilings = Ceilings(gemm_tflops=1e6, copy_tb_s=1e6)
    found = {lane.name: _found(measured, lane.name, ceilings) for lane in lanes}
    assert found["joined"] is None
    assert found["unjoined"] is not None
    assert found["unjoined"].verdict is Verdict.IMPOSSIBLE_TIME
    assert "a stream of its own" in found["unjoined"].text


def _found(measured: Any, name: str, ceilings: Ceilings) -> Any:
    return impossible(measured.samples(name), measured.late_ms(name), None, ceilings)


def test_a_kernel_on_a_side_stream_has_no_times(setting: Setting, gemm: Gemm) -> None:
    aside, attend = torch.cuda.Stream(DEVICE), of_the_house("sdpa")

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        run = attend.bind(arguments)

        def call() -> Any:
            aside.wait_stream(torch.cuda.current_stream(DEVICE))
            with torch.cuda.stream(aside):
                # long enough to be at work when the host has seen the caller's stream end
                for _ in range(50):
                    gemm()
                return run()

        return call

    def contract(case: Any) -> Any:
        return attend.contract(case).promising(capturable=False, deterministic=False)

    result, kernel = bench(setting, Kernel(name="aside", contract=contract, bind=bind))
    # the judge may see it first, where it copies an answer before it was written
    assert kernel.verdict in (Verdict.IMPOSSIBLE_TIME, Verdict.NUMERIC, Verdict.NONFINITE, Verdict.NONDETERMINISTIC)
    assert kernel.ms is None
    assert result.ratios == []


def test_a_kernel_that_returns_cached_outputs_has_no_times(setting: Setting) -> None:
    attend = of_the_house("triton")

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        run, kept = attend.bind(arguments), list[Any]()

        def call() -> Any:
            # honest for as long as it is judged, and hardly longer
            if len(kept) < 6:
                kept.append(run())
            return kept[-1]

        return call

    def contract(case: Any) -> Any:
        return attend.contract(case).promising(capturable=False)

    _, kernel = bench(setting, Kernel(name="cached", contract=contract, bind=bind))
    assert kernel.verdict in (Verdict.NUMERIC, Verdict.STRUCTURE)
    assert kernel.ms is None


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_graph_without_the_work_has_no_times(setting: Setting) -> None:
    attend = of_the_house("triton")

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        run, kept = attend.bind(arguments), list[Any]()

        def call() -> Any:
            if torch.cuda.is_current_stream_capturing() and kept:
                return kept[-1]
            kept[:] = [run()]
            return kept[-1]

        return call

    def contract(case: Any) -> Any:
        # what promises determinism has its graph looked at by the judge already
        return attend.contract(case).promising(deterministic=False)

    _, kernel = bench(setting, Kernel(name="hollow", contract=contract, bind=bind))
    assert kernel.verdict in (Verdict.NUMERIC, Verdict.WRITE_SCOPE)
    assert kernel.ms is None


def test_an_honest_kernel_is_replayed_and_as_fast_as_itself(setting: Setting) -> None:
    result, kernel = bench(setting, of_the_house("triton"))
    assert kernel.verdict is Verdict.PASS, kernel.text
    assert kernel.captured is True
    assert kernel.peak_bytes > 2048 * 16 * 128 * 2
    assert kernel.share is not None
    assert 0 < kernel.share < 1.2
    assert [ratio.other for ratio in result.ratios] == [BOUND]
    assert result.noise is not None
    assert result.noise.value == pytest.approx(1.0, abs=0.05)
    assert result.compiled_while_timed == 0


def test_a_wrong_kernel_is_never_timed(setting: Setting) -> None:
    wrong = around("wrong", lambda run: lambda: (run()[0] * 2, run()[1]))
    result, kernel = bench(setting, wrong)
    assert kernel.verdict is Verdict.NUMERIC
    assert result.anchor_ms == []


SHAPES = """
[[shape]]
name = "long"
op = "attention"
num_heads = 16
num_kv_heads = 16
d_qk = 128
d_v = 128
query_lens = [16384]
key_lens = [16384]
causal = false
softmax_scale = 0.08838834764831845
layout = "packed"
"""

KERNEL = """
import torch
from assay.harness import Contract, kernel


def attend_once(q, k, v, scale):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)[:2]


@kernel(name="mine", contract=Contract(p="bf16", out="bf16", capturable=True, deterministic=False))
def attend(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, lse = attend_once(q, k, v, softmax_scale)
    if SLOWED:
        attend_once(q[:, :, : q.shape[2] // 10], k, v, softmax_scale)
    return out[0].transpose(0, 1).contiguous(), lse.reshape(q.shape[1], q.shape[2]).t().contiguous()
"""


def test_a_slowed_kernel_makes_the_gate_fail(tmp_path: Path) -> None:
    files = {"shapes.toml": SHAPES, "fast.py": "SLOWED = False\n" + KERNEL, "slow.py": "SLOWED = True\n" + KERNEL}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def run(file: str, *more: str) -> Any:
        command = ["bench", "attention", "--shapes", tmp_path / "shapes.toml", "--kernel", f"{tmp_path / file}:attend"]
        command += ["--against", tmp_path / "ratios.json", *more]
        done = CliRunner().invoke(cli.app, [str(part) for part in command])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    accepted = run("fast.py", "--accept")
    assert accepted.exit_code == 0, accepted.output
    again = run("fast.py")
    assert again.exit_code == 0, again.output
    slowed = run("slow.py")
    assert slowed.exit_code == 1, slowed.output
    assert "regressed: long: mine over bound" in slowed.output
