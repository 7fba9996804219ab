"""Speed and accuracy of the gated delta rule beside its peers, in one run, with fast gates and with slow channels."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from kda_bounds import TOKENS, relative_errors, shape_of
from kda_inputs import kda_inputs
from test_bench_mla_prefill import synchronised, timed

from assay.harness.bench.cuda import CudaClock
from assay.harness.bench.statistics import ratio_interval
from assay.optimized import _kda_plan
from assay.optimized.kda import kda, plan_kda, plan_kda_batch

SHAPES: dict[str, tuple[int, list[int]]] = {
    "H16 8x2048": (16, [2048] * 8),
    "H16 4x8192": (16, [8192] * 4),
    "H16 1x16384": (16, [16384]),
    "H64 1x8192": (64, [8192]),
    "H64 8x1024": (64, [1024] * 8),
    "H64 1x16384": (64, [16384]),
    "H96 1x8192": (96, [8192]),
    "H32 mixed": (32, [1300, 547, 2048, 963, 271, 3063]),
    "H8 1x65536": (8, [65536]),
}
# a tenth of the channels hardly decays in the second
MIXES = ("normal", "slow")
CONTENDERS = ("flash", "triton", "flashkda", "fla")
# bytes of a token and head: q, k, v, g and out in bfloat16, beta
TOKEN_BYTES = 5 * 256 + 2


def contenders(given: dict[str, Any], names: tuple[str, ...] = CONTENDERS) -> dict[str, Callable[[], Any]]:
    """A call of each implementation that serves here, into buffers of its own; prints why others do not."""
    calls: dict[str, Callable[[], Any]] = {}
    shape = shape_of(given, state_layout="VK")
    state = given["initial_state"].mT.contiguous()
    for name in names:
        reason = _kda_plan.refusal(name, shape)
        if reason is not None:
            print(f"{name}: {reason}")
            continue
        plan = plan_kda(
            shape, max_tokens=len(given["q"]), max_sequences=len(given["cu_seqlens"]) - 1, implementation=name
        )
        calls[name] = bound_call(given, plan_kda_batch(given["cu_seqlens"], plan=plan), state)
    return calls


def bound_call(given: dict[str, Any], batch: Any, state: torch.Tensor) -> Callable[[], Any]:
    out, final = torch.empty_like(given["v"]), torch.empty_like(state)
    layer = {name: given[name] for name in (*TOKENS, "scale", "A_log", "dt_bias")}
    return lambda: kda(**layer, batch=batch, initial_state=state, final_state=final, out=out)


def captured(calls: dict[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The calls that a graph can record, and milliseconds by events of those that none can."""
    clock, able, eager = CudaClock(torch.device("cuda", 0)), dict[str, Callable[[], Any]](), dict[str, float]()
    for name, run in calls.items():
        try:
            clock.capture(run)
            able[name] = run
        except RuntimeError as error:
            print(f"{name} is not captured: {str(error).splitlines()[0]}")
            eager[name] = by_events(run)
    return able, eager


def by_events(run: Callable[[], Any], rounds: int = 10) -> float:
    """Median milliseconds of a call from a cold cache, launches included."""
    flush, samples = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for _ in range(rounds):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop))
    return float(statistics.median(samples))


def model_inputs(name: str, mix: str) -> dict[str, Any]:
    heads, lengths = SHAPES[name]
    return kda_inputs(
        lengths, heads=(heads, heads), dims=(128, 128), family=mix, dtype=torch.bfloat16, seed=1, device="cuda"
    )


def test_bench_chunks_on_cpu(benchmark: Any) -> None:
    given = kda_inputs([96, 33], heads=(2, 2), dims=(32, 32), dtype=torch.float32)
    plan = plan_kda(shape_of(given), max_tokens=129, max_sequences=2, implementation="torch")
    batch = plan_kda_batch(given["cu_seqlens"], plan=plan)
    out, final, _ = benchmark.pedantic(bound_call(given, batch, given["initial_state"]), rounds=5, warmup_rounds=1)
    errors = relative_errors(given, (out, final, final[:0]))
    assert max(errors) < 1e-6


# fla warns when it is imported
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SHAPES)
def test_bench_beside_the_peers(benchmark: Any, name: str) -> None:
    heads, lengths = SHAPES[name]
    size = sum(lengths) * heads * TOKEN_BYTES + len(lengths) * heads * 128 * 128 * 8
    milliseconds: dict[str, dict[str, float]] = {}
    for mix in MIXES:
        calls = contenders(model_inputs(name, mix))
        able, eager = captured(calls)
        measured, _ = timed(able)
        times = {who: statistics.median(measured.samples(who)) for who in able} | eager
        milliseconds[mix] = times
        ratios = {
            who: ratio_interval(measured.per_round("flash"), measured.per_round(who), seed=0).value
            for who in able
            if who != "flash"
        }
        print(
            f"{name}, {mix}: "
            + ", ".join(f"{who} {time * 1e3:.0f} us" for who, time in times.items())
            + f"; {size / times['flash'] / 1e9:.2f} TB/s of compulsory bytes; flash takes "
            + ", ".join(f"{ratio:.3f} of {who}" for who, ratio in ratios.items())
        )
        benchmark.extra_info.update({f"{mix} {who} ms": time for who, time in times.items()})
        benchmark.extra_info.update({f"{mix} flash / {who}": ratio for who, ratio in ratios.items()})
    benchmark.pedantic(synchronised(calls["flash"]), rounds=3, iterations=1)
    for who in ("flash", "triton"):
        assert abs(milliseconds["slow"][who] / milliseconds["normal"][who] - 1.0) < 0.05


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SHAPES)
def test_bench_errors_beside_the_peers(name: str) -> None:
    """Root mean square errors over those of the oracle's answer, output and state; not timed."""
    for mix in MIXES:
        given = model_inputs(name, mix)
        errors = {}
        for who, run in contenders(given).items():
            out, final, _ = run()
            errors[who] = relative_errors(given, (out, final.mT, final[:0]))[:2]
        print(f"{name}, {mix}: " + ", ".join(f"{who} {out:.2e} / {state:.2e}" for who, (out, state) in errors.items()))
        if "flashkda" in errors:
            assert errors["flash"][0] <= errors["flashkda"][0]
            assert errors["flash"][1] <= errors["flashkda"][1]
