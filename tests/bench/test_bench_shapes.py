"""The packaged shapes: small on the CPU, in full on a GPU, there beside the peer and against the machine's ceilings."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from assay.harness.bench.ceilings import Gemm, measure_ceilings
from assay.harness.bench.cuda import CudaClock, GpuTimer
from assay.harness.bench.lineup import Participant, line_up
from assay.harness.bench.machine import read_clocks
from assay.harness.bench.results import BOUND
from assay.harness.bench.session import Setting, bench_shape
from assay.harness.bench.shapes import Shape, packaged_shapes
from assay.harness.bench.work import work_of
from assay.harness.discovery import load_operation
from assay.harness.kernels import find_kernels
from assay.harness.record import Verdict
from assay.harness.runner import run_case

CPU = torch.device("cpu")
SHAPES = {shape.name: shape for shape in packaged_shapes()}
# lengths are divided by this, and there are so many heads
SHRINK, HEADS = 256, 2


def small(shape: Shape) -> Shape:
    """The same geometry with few heads and short lengths, all different ones kept different."""
    sizes = dict(shape.sizes)
    for name in ("query_lens", "key_lens", "context_lens"):
        if name in sizes:
            sizes[name] = [max(1, length // SHRINK) for length in sizes[name]]
    sizes |= {name: HEADS for name in ("num_heads", "num_kv_heads") if name in sizes}
    if "history_chunk_size" in sizes:
        sizes["history_chunk_size"] //= SHRINK
    return replace(shape, name=f"{shape.name}, small", dtype="float32", sizes=sizes)


@pytest.mark.parametrize("name", SHAPES)
def test_bench_a_small_shape_on_the_cpu(benchmark: Any, name: str) -> None:
    shape = small(SHAPES[name])
    operation, case = load_operation(shape.op), shape.case(0)
    kernels = {provider: find_kernels(operation, provider)[0] for provider in ("torch", "sdpa")}
    # a kernel whose answer is wrong is not timed
    for kernel in kernels.values():
        record = run_case(operation, kernel, case, CPU)
        refused = record.verdict is Verdict.UNSUPPORTED and kernel.name.endswith("[sdpa]")
        assert refused or record.verdict is Verdict.PASS, record.text
    run = kernels["torch"].bind(operation.inputs(case, CPU).arguments)
    benchmark.pedantic(run, rounds=10, iterations=1, warmup_rounds=2)
    work = work_of(shape.op, shape.sizes, shape.dtype)
    assert work is not None
    benchmark.extra_info.update(shape=shape.name, gigaflop=work.flop / 1e9, megabytes=work.bytes / 1e6)
    if benchmark.stats is not None:
        benchmark.extra_info["gigaflops"] = work.flop / benchmark.stats.stats.median / 1e9


@pytest.fixture(scope="module")
def setting() -> Setting:
    """The clock and the ceilings of the GPU."""
    device = torch.device("cuda", 0)
    clock, anchor = CudaClock(device), Gemm(device)
    return Setting(
        device=device,
        clock=clock,
        ceilings=measure_ceilings(clock, device, anchor, cache_bytes=clock.cache_bytes),
        anchor=anchor,
        read_clocks=partial(read_clocks, device),
    )


@pytest.mark.gpu
@pytest.mark.benchmark(timer=GpuTimer())
@pytest.mark.parametrize("name", SHAPES)
def test_bench_a_shape_on_the_gpu(benchmark: Any, setting: Setting, name: str) -> None:
    shape = SHAPES[name]
    operation, device, clock = load_operation(shape.op), setting.device, setting.clock
    lineup = [
        *line_up(operation),
        *(Participant(kernel=kernel, role="peer") for kernel in find_kernels(operation, "sdpa")),
    ]
    result = bench_shape(operation, shape, lineup, setting)
    ours, peer = result.kernels
    assert ours.verdict is Verdict.PASS, ours.text
    assert peer.verdict is Verdict.PASS, peer.text
    assert ours.ms is not None
    ratios = {ratio.other: ratio.interval for ratio in result.ratios if ratio.kernel == ours.kernel}
    benchmark.extra_info.update(
        shape=name,
        kernel=ours.kernel,
        median_ms=ours.ms.median,
        tflops=ours.tflops,
        share=ours.share,
        ratio=ratios[peer.kernel].value,
        ratio_interval=(ratios[peer.kernel].low, ratios[peer.kernel].high),
        over_bound=ratios[BOUND].value,
        noise=None if result.noise is None else result.noise.reach,
        samples_ms=ours.samples_ms,
    )
    run = lineup[0].kernel.bind(operation.inputs(shape.case(0), device).arguments)
    replay, _ = clock.capture(run)
    benchmark.pedantic(replay, setup=clock.flush, rounds=30, iterations=1, warmup_rounds=3)
    # the same work by the coarser clock, which holds a launch as well; there are no statistics under xdist
    assert benchmark.stats is None or benchmark.stats.stats.median * 1e3 == pytest.approx(
        ours.ms.median, rel=0.2, abs=0.1
    )
