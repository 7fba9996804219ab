"""The timed rounds: what lies between the marks, in which order, and which rounds count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from bench_clock import FakeAnchor, FakeClock

from assay.harness.bench.ceilings import Ceilings
from assay.harness.bench.clock import time_once
from assay.harness.bench.engine import SETTLING, measure
from assay.harness.bench.schedule import Content, Schedule
from assay.harness.bench.verdicts import impossible
from assay.harness.bench.work import Work
from assay.harness.record import Verdict

UNTIMED = 2 * SETTLING


@dataclass
class Lane:
    """Takes ``ms`` on the stream and leaves ``aside`` on another."""

    name: str
    clock: FakeClock
    ms: float = 1.0
    aside: float = 0.0
    wrong_from: int = 1000
    raises_from: int = 1000
    staged: list[tuple[Content, bool]] = field(default_factory=list)
    calls: list[Content] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def stage(self, content: Content, *, poison: bool) -> None:
        self.clock.log.append(f"stage {self.name}")
        self.clock.now += 0.5
        self.staged.append((content, poison))

    def call(self, content: Content) -> object:
        if len(self.calls) >= self.raises_from:
            raise RuntimeError("gone")
        self.clock.work(self.ms)
        self.clock.aside += self.aside
        self.calls.append(content)
        return len(self.calls) - 1

    def finding(self, content: Content, results: Any) -> Any:
        self.seen.append(results)
        return f"wrong in {results}" if results >= self.wrong_from else None

    def failure(self, error: Exception) -> Any:
        return f"raised {error}"


def run(lanes: list[Lane], clock: FakeClock, *, rounds: int = 4, **anchor: Any) -> Any:
    return measure(lanes, Schedule(rounds=rounds, ring=2, seed=0), clock, anchor=FakeAnchor(clock, **anchor))


def test_the_flush_and_the_staging_lie_outside_of_the_marks() -> None:
    clock = FakeClock()
    run([Lane("a", clock)], clock, rounds=2)
    assert clock.log[:9] == ["flush", "mark", "work", "mark", "stage a", "flush", "mark", "work", "mark"]


def test_every_run_is_timed_in_the_order_a_b_b_a_after_rounds_that_are_not() -> None:
    clock = FakeClock()
    measured = run([Lane("a", clock, ms=1.0), Lane("b", clock, ms=2.0)], clock)
    order = [entry.split()[1] for entry in clock.log if entry.startswith("stage")]
    # the anchor takes its turn as well: with it, the fourth round begins like the first
    assert "".join(order) == "abbabaab" + "abbaabbabaababba"
    assert measured.samples("a") == pytest.approx([1.0] * 8)
    assert measured.per_round("b") == pytest.approx([2.0] * 4)
    assert measured.anchor_ms == pytest.approx([1.0] * 4)


def test_all_lanes_meet_the_same_contents_and_only_looked_at_runs_are_poisoned() -> None:
    clock, schedule = FakeClock(), Schedule(rounds=4, ring=2, seed=0)
    one, two = Lane("a", clock), Lane("b", clock)
    run([one, two], clock)
    settling = [(schedule.content(0), False)] * UNTIMED
    assert one.staged == two.staged == settling + [(schedule.content(at), at in schedule.checked) for at in range(8)]
    assert one.calls[UNTIMED:] == [schedule.content(at) for at in range(8)]
    assert one.seen == [UNTIMED + at for at in sorted(schedule.checked)]


def test_the_first_wrong_result_of_a_lane_is_kept() -> None:
    clock, schedule = FakeClock(), Schedule(rounds=4, ring=2, seed=0)
    measured = run([Lane("a", clock), Lane("b", clock, wrong_from=0)], clock)
    assert measured.findings == {"b": f"wrong in {UNTIMED + min(schedule.checked)}"}


def test_a_lane_that_raises_is_out_and_the_others_go_on() -> None:
    clock = FakeClock()
    measured = run([Lane("a", clock), Lane("b", clock, raises_from=UNTIMED + 3), Lane("c", clock)], clock)
    assert measured.findings == {"b": "raised gone"}
    assert [len(measured.ticks[name]) for name in "abc"] == [8, 3, 8]
    assert measured.samples("c") == pytest.approx([1.0] * 8)


def _by_round(drift: Callable[[int], float]) -> Callable[[int], float]:
    """A drift by the number of the anchor's run, of which each round has two."""
    return lambda run: drift((run - UNTIMED) // 2)


def test_rounds_in_which_the_anchor_is_off_do_not_count() -> None:
    clock = FakeClock()
    measured = run(
        [Lane("a", clock)], clock, rounds=6, drift=_by_round(lambda at: 1.04 if at in (1, 4) else 1.0 + 0.001 * at)
    )
    assert measured.kept == (0, 2, 3, 5)
    assert len(measured.samples("a")) == 8
    assert len(measured.anchor) == 12


def test_where_most_rounds_differ_none_is_the_rule_and_all_count() -> None:
    clock = FakeClock()
    measured = run([Lane("a", clock)], clock, rounds=5, drift=_by_round(lambda at: 1.0 + 0.1 * at))
    assert measured.kept == (0, 1, 2, 3, 4)


def test_two_lanes_of_one_name_are_refused() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="names of their own, got a, a"):
        run([Lane("a", clock), Lane("a", clock)], clock)


def test_what_runs_on_after_the_last_mark_is_late() -> None:
    clock = FakeClock()
    clock.aside = 0.7
    tick, _ = time_once(lambda: clock.work(2.0), clock)
    assert (tick.ms, tick.late_ms) == pytest.approx((2.0, 0.71))
    measured = run([Lane("a", clock), Lane("b", clock, ms=0.1, aside=0.9)], clock)
    # the wait for an idle device, which the anchor takes as well, is not late
    assert measured.late_ms("a") == pytest.approx(0.0)
    assert measured.late_ms("b") == pytest.approx(0.9)


CEILINGS = Ceilings(gemm_tflops=800.0, copy_tb_s=4.0, cache_bytes=60 << 20)


def verdict(ms: float, *, late: float = 0.0, work: Work | None = None) -> str | None:
    finding = impossible([ms] * 5, late, work, CEILINGS)
    assert finding is None or finding.verdict is Verdict.IMPOSSIBLE_TIME
    return None if finding is None else finding.text


def test_work_on_another_stream_is_found_out() -> None:
    assert "0.900 ms on after the caller's stream was done" in (verdict(0.1, late=0.9) or "")
    assert verdict(0.1, late=0.029) is None
    # of a long run, two per cent may be the wait itself
    assert verdict(10.0, late=0.19) is None
    assert verdict(10.0, late=0.21) is not None


def test_faster_than_the_machine_is_found_out() -> None:
    # 800 GFLOP at 800 TFLOP/s are 1 ms; a quarter more is beyond every unit
    flop = Work(flop=800 * 10**9, bytes=1)
    assert verdict(0.81, work=flop) is None
    assert "less than the 0.8000 ms" in (verdict(0.79, work=flop) or "")
    # 4 GB at 4 TB/s are 1 ms; what is still in the cache was not written yet
    moved = Work(flop=1, bytes=4 * 10**9)
    floor = (4 * 10**9 - (60 << 20)) / (4 * 1.15) / 1e9
    assert verdict(floor * 1.001, work=moved) is None
    assert verdict(floor * 0.999, work=moved) is not None
    assert verdict(0.0001) is None


def test_the_bound_is_the_larger_of_both() -> None:
    ms, bound = CEILINGS.bound_ms(Work(flop=800 * 10**9, bytes=10**9))
    assert (ms, bound) == (1.0, "flop")
    ms, bound = CEILINGS.bound_ms(Work(flop=800 * 10**6, bytes=10**9))
    assert (ms, bound) == (0.25, "bytes")
