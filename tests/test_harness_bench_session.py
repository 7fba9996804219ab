"""One shape from judging to ratios; kernels that cheat the clock are found out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_clock import ATTENTION, CPU, SHAPE, SIZES, FakeAnchor, FakeClock, after, around, honest, participant, setting

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")

from assay.harness.bench import ring as ring_module
from assay.harness.bench.ceilings import Ceilings
from assay.harness.bench.engine import SETTLING
from assay.harness.bench.results import BOUND, KernelResult, ShapeResult
from assay.harness.bench.ring import Ring
from assay.harness.bench.schedule import Content
from assay.harness.bench.session import bench_shape
from assay.harness.operation import Kernel
from assay.harness.poison import same_bits
from assay.harness.record import Verdict
from assay.harness.runner import ExamRoom


def bench(clock: FakeClock, *kernels: Kernel, peers: tuple[Kernel, ...] = (), **changes: Any) -> ShapeResult:
    lineup = [participant(kernel) for kernel in kernels] + [participant(kernel, "peer") for kernel in peers]
    return bench_shape(ATTENTION, SHAPE, lineup, setting(clock, **changes))


def only(result: ShapeResult) -> KernelResult:
    (kernel,) = result.kernels
    return kernel


@pytest.mark.parametrize("graphs", [True, False])
def test_times_ratios_and_noise_of_honest_kernels(graphs: bool) -> None:
    clock = FakeClock(graphs=graphs)
    ours, peer = (honest(name, clock, ms, capturable=graphs) for name, ms in (("ours", 1.2), ("peer", 1.0)))
    result = bench(clock, ours, peers=(peer,))
    mine, other = result.kernels
    assert (mine.kernel, mine.role, mine.verdict) == ("ours", "ours", Verdict.PASS)
    assert (other.kernel, other.role, other.verdict) == ("peer", "peer", Verdict.PASS)
    assert mine.ms is not None
    assert mine.ms.median == pytest.approx(1.2)
    assert len(mine.samples_ms) == 20
    assert mine.captured is graphs
    assert mine.text == ("" if graphs else "timed by events, with the gaps between launches: declared not capturable")
    ratios = {(ratio.kernel, ratio.other): ratio.interval.value for ratio in result.ratios}
    assert ratios["ours", "peer"] == pytest.approx(1.2)
    assert set(ratios) == {("ours", "peer"), ("ours", BOUND), ("peer", BOUND)}
    assert result.noise is not None
    assert result.noise.value == pytest.approx(1.0)
    assert (result.rounds, result.ring, result.dropped) == (10, 2, 0)
    assert mine.peak_bytes == 3 << 20


def test_the_share_of_the_bound_follows_the_anchor_of_each_round() -> None:
    clock = FakeClock()
    # the anchor does 1e9 FLOP in 1 ms; every fourth round of the machine is 2 % slower, and so is the kernel
    slow = {"now": 1.0}

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        return after(lambda: clock.work(0.5 * slow["now"]), run)

    def drift(at: int) -> float:
        # the anchor runs twice a round
        slow["now"] = 1.02 if at // 2 % 4 == 0 else 1.0
        return slow["now"]

    result = bench(clock, around("ours", wrap), anchor=FakeAnchor(clock, drift=drift))
    kernel = only(result)
    assert result.flop is not None
    assert result.bound == "flop"
    assert kernel.share == pytest.approx(result.flop / 1e9 / 0.5)
    (ratio,) = result.ratios
    assert (ratio.interval.low, ratio.interval.high) == pytest.approx((0.5 / (result.flop / 1e9),) * 2)
    assert kernel.tflops == pytest.approx(result.flop / 0.5 / 1e9)
    assert result.bytes is not None
    assert kernel.gb_s == pytest.approx(result.bytes / 0.5 / 1e6)


def test_a_kernel_that_the_judge_rejects_is_never_timed() -> None:
    clock, calls = FakeClock(), []

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        def wrong() -> Any:
            calls.append(clock.timing)
            out, lse = run()
            return out + 1, lse

        return wrong

    result = bench(clock, around("wrong", wrap), honest("right", clock, 1.0))
    wrong, right = result.kernels
    assert wrong.verdict is Verdict.NUMERIC
    assert wrong.ms is None
    assert wrong.samples_ms == []
    assert "G4 envelope" in wrong.text
    assert calls
    assert not any(calls)
    assert right.verdict is Verdict.PASS
    assert right.ms is not None


def test_where_all_are_rejected_nothing_is_timed() -> None:
    clock = FakeClock()
    result = bench(clock, around("wrong", lambda run: lambda: (run()[0] * 2, run()[1])))
    assert not clock.timing
    assert result.ratios == []
    assert result.noise is None


def test_one_that_is_wrong_only_on_other_contents_is_never_timed() -> None:
    clock, first = FakeClock(), []
    clean = next(kernel for kernel in ATTENTION.kernels() if kernel.name == "attention[torch]")

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        run, q = clean.bind(arguments), arguments["q"]

        def call() -> Any:
            out, lse = run()
            first.append(bool(q[0, 0, 0] > 0))
            return (out if first[-1] == first[0] else out * 1.5), lse

        return call

    kernel = only(bench(clock, Kernel(name="one-sided", contract=clean.contract, bind=bind)))
    assert kernel.verdict is Verdict.NUMERIC
    assert not clock.timing


def remembering(clock: FakeClock) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Right until it is timed; then it hands out the answer it gave last, and takes no time."""

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        kept: list[Any] = []

        def call() -> Any:
            if clock.timing and kept:
                clock.work(0.01)
                return kept[-1]
            clock.work(1.0)
            kept.append(run())
            return kept[-1]

        return call

    return wrap


def test_a_kernel_that_returns_cached_outputs_is_found_out() -> None:
    clock = FakeClock()
    kernel = only(bench(clock, around("cached", remembering(clock))))
    assert kernel.verdict is Verdict.NUMERIC
    assert "not computed anew" in kernel.text
    assert kernel.ms is None
    assert kernel.tflops is None


def test_a_cached_peer_is_in_no_ratio_and_the_others_are_timed() -> None:
    clock = FakeClock()
    result = bench(clock, honest("ours", clock, 1.0), peers=(around("cached", remembering(clock)),))
    ours, cached = result.kernels
    assert ours.verdict is Verdict.PASS
    assert cached.verdict is Verdict.NUMERIC
    assert [(ratio.kernel, ratio.other) for ratio in result.ratios] == [("ours", BOUND)]


def test_a_graph_without_the_work_is_found_out() -> None:
    class Hollow(FakeClock):
        """Its replays do nothing, as those of work that was launched elsewhere than on the captured stream."""

        def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
            results = run()
            return lambda: self.work(0.01), results

    clock = Hollow(graphs=True)
    kernel = only(bench(clock, honest("hollow", clock, 1.0, capturable=True)))
    assert kernel.verdict is Verdict.WRITE_SCOPE
    assert "wrote no result by the time the device was idle" in kernel.text


def test_a_kernel_on_a_stream_of_its_own_is_found_out() -> None:
    clock = FakeClock()

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            clock.work(0.01)
            clock.aside += 1.0
            return run()

        return call

    kernel = only(bench(clock, around("aside", wrap)))
    assert kernel.verdict is Verdict.IMPOSSIBLE_TIME
    assert "a stream of its own" in kernel.text
    assert kernel.late_ms == pytest.approx(1.0)
    assert kernel.ms is None


def test_faster_than_the_floor_is_found_out() -> None:
    clock = FakeClock()
    # the shape has some 10^4 FLOP: at 10 MFLOP/s a kernel must take over a millisecond
    slow = Ceilings(gemm_tflops=1e-5, copy_tb_s=1000.0)
    kernel = only(bench(clock, honest("fast", clock, 0.1), ceilings=slow))
    assert kernel.verdict is Verdict.IMPOSSIBLE_TIME
    assert "not all was done" in kernel.text


def test_other_bits_in_a_timed_run_are_found_out_where_determinism_is_promised() -> None:
    clock = FakeClock()

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            clock.work(1.0)
            out, lse = run()
            return (out * (1 + 2.0**-23) if clock.timing else out), lse

        return call

    kernel = only(bench(clock, around("wavering", wrap)))
    assert kernel.verdict is Verdict.NONDETERMINISTIC
    # one that promises nothing is held to the gates, which this passes
    fresh = FakeClock()
    clock = fresh
    assert only(bench(fresh, around("wavering", wrap, deterministic=False))).verdict is Verdict.PASS


def test_a_crash_while_binding_is_the_verdict_and_the_others_are_timed() -> None:
    clock, binds = FakeClock(), []

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        binds.append(clock.timing)
        if len(binds) > 2:
            raise RuntimeError("no more handles")
        return run

    first, second = bench(clock, around("leaking", wrap), honest("right", clock, 1.0)).kernels
    assert first.verdict is Verdict.CRASH
    assert "no more handles" in first.text
    assert second.verdict is Verdict.PASS


def test_a_crash_while_timed_is_the_verdict_and_the_others_are_timed() -> None:
    clock = FakeClock()

    def wrap(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            if clock.log.count("flush") > 20:
                raise RuntimeError("no more workspace")
            clock.work(1.0)
            return run()

        return call

    first, second = bench(clock, around("leaking", wrap), honest("right", clock, 1.0)).kernels
    assert first.verdict is Verdict.CRASH
    assert "no more workspace" in first.text
    assert first.ms is None
    assert second.verdict is Verdict.PASS
    assert second.ms is not None


def test_a_ring_that_does_not_fit_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(ring_module, "MOST_BYTES", 1000)
    kernel = only(bench(clock, honest("ours", clock, 1.0)))
    assert kernel.verdict is Verdict.OUT_OF_MEMORY
    assert "2 sets of buffers must take at most 1000 bytes" in kernel.text
    assert not clock.timing


def test_an_operation_whose_work_nobody_counted_has_times_and_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("assay.harness.bench.work.MODELS", {})
    result = bench(clock, honest("ours", clock, 1.2), peers=(honest("peer", clock, 1.0),))
    assert [kernel.tflops for kernel in result.kernels] == [None, None]
    assert [(ratio.kernel, ratio.other) for ratio in result.ratios] == [("ours", "peer")]


def test_a_failed_capture_is_timed_by_events_and_says_so() -> None:
    clock = FakeClock(graphs=False)
    kernel = only(bench(clock, honest("ours", clock, 1.0, capturable=True)))
    assert kernel.verdict is Verdict.PASS
    assert kernel.captured is False
    assert "the capture failed: RuntimeError: this clock records nothing" in kernel.text


def test_what_a_kernel_may_write_is_restored_before_every_run() -> None:
    clock, seen = FakeClock(), []
    clean = next(kernel for kernel in ATTENTION.kernels() if kernel.name == "attention[torch]")

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        run = clean.bind(arguments)

        def call() -> Any:
            clock.work(1.0)
            if clock.timing:
                seen.append(bool(arguments["v"].any()))
            answer = run()
            arguments["v"].zero_()
            return answer

        return call

    kernel = Kernel(
        name="writing",
        contract=lambda case: clean.contract(case).promising(mutates=("v",), deterministic=False),
        bind=bind,
    )
    # the other one, which writes nothing, must not meet what this one wrote
    first, second = bench(clock, kernel, honest("ours", clock, 1.0)).kernels
    assert (first.verdict, second.verdict) == (Verdict.PASS, Verdict.PASS)
    # both lanes of the first kernel, in the rounds that count and in those before
    assert len(seen) == 40 + 2 * 2 * SETTLING
    assert all(seen)


def test_the_ring_holds_its_own_contents_and_changes_them_in_place() -> None:
    ring = Ring(ATTENTION, SHAPE, CPU, size=3, seed=5, room=ExamRoom())
    queries = [exam.inputs.arguments["q"] for exam in ring.exams]
    assert ring.changed == "q"
    assert len({q.data_ptr() for q in queries}) == 3
    plain = [q.clone() for q in queries]
    assert not any(same_bits(plain[0], other) for other in plain[1:])
    ring.stage(Content(entry=1, version=1))
    assert torch.equal(queries[1], -plain[1])
    assert same_bits(queries[0], plain[0])
    ring.stage(Content(entry=1, version=0))
    assert same_bits(queries[1], plain[1])


def test_the_oracle_answers_for_each_of_the_contents() -> None:
    ring = Ring(ATTENTION, SHAPE, CPU, size=2, seed=5, room=ExamRoom())
    answers = [
        ring.exam(Content(entry=entry, version=version)).answers[0][1].lse for entry in (0, 1) for version in (0, 1)
    ]
    assert all(not torch.equal(one, other) for at, one in enumerate(answers) for other in answers[:at])
    again = ring.exam(Content(entry=0, version=0)).answers[0][1].lse
    assert torch.equal(again, answers[0])


def test_strided_inputs_change_in_place_as_well() -> None:
    shape = replace(SHAPE, sizes=SIZES | {"layout": "strided"})
    ring = Ring(ATTENTION, shape, CPU, size=2, seed=0, room=ExamRoom())
    q = ring.exams[0].inputs.arguments["q"]
    plain = q.clone()
    assert not q.is_contiguous()
    ring.stage(Content(entry=0, version=1))
    assert torch.equal(q, -plain)
    assert ring.exams[0].inputs.ledger.written(allowed=("q",)) == []


def test_a_shape_that_no_kernel_takes_is_never_timed() -> None:
    clock = FakeClock()
    shape = replace(SHAPE, sizes=SIZES | {"num_kv_heads": 0})
    result = bench_shape(ATTENTION, shape, [participant(honest("ours", clock, 1.0))], setting(clock))
    assert only(result).verdict is Verdict.CRASH
    assert not clock.timing
