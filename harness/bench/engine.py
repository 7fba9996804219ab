"""The timed part: rounds in which an anchor and every kernel run from a cold cache, forwards and backwards."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .clock import Clock, Tick, time_once
from .schedule import Content, Schedule

# a round in which the anchor was off by more was not like the others
ANCHOR_DRIFT = 0.03
# rounds that are not timed: clocks, power and caches come to what they will be
SETTLING = 2


class Lane(Protocol):
    """What is timed; ``timed.TimedKernel`` is one."""

    @property
    def name(self) -> str:
        """Its own."""
        ...

    def stage(self, content: Content, *, poison: bool) -> None:
        """Put the inputs in place, outside of the timed region."""
        ...

    def call(self, content: Content) -> object:
        """Run once; return the results."""
        ...

    def finding(self, content: Content, results: Any) -> Any:
        """What is wrong with the results, or None."""
        ...

    def failure(self, error: Exception) -> Any:
        """The finding that a run raised this."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rounds gave.

    Attributes:
        ticks: By lane, ``2 * rounds``; fewer of one that raised.
        anchor: As many.
        findings: By lane, the first thing that was wrong with a result.
        kept: Rounds in which the anchor was like in the others.
    """

    ticks: Mapping[str, tuple[Tick, ...]]
    anchor: tuple[Tick, ...]
    findings: Mapping[str, Any]
    kept: tuple[int, ...]

    def samples(self, name: str) -> list[float]:
        """Milliseconds of each run of the kept rounds."""
        return [self.ticks[name][at].ms for kept in self.kept for at in (2 * kept, 2 * kept + 1)]

    def per_round(self, name: str) -> list[float]:
        """Mean of the two runs of each kept round, in which a steady drift cancels."""
        return [(self.ticks[name][2 * at].ms + self.ticks[name][2 * at + 1].ms) / 2 for at in self.kept]

    @property
    def anchor_ms(self) -> list[float]:
        """Mean of the anchor's two runs of each kept round."""
        return [(self.anchor[2 * at].ms + self.anchor[2 * at + 1].ms) / 2 for at in self.kept]

    def late_ms(self, name: str) -> float:
        """How much longer than after the anchor the device was busy after a run, in the median."""
        late = statistics.median(tick.late_ms for tick in self.ticks[name])
        return late - statistics.median(tick.late_ms for tick in self.anchor)


def measure(lanes: Sequence[Lane], schedule: Schedule, clock: Clock, *, anchor: Callable[[], object]) -> Measured:
    """Run the schedule.

    Args:
        lanes: With names of their own.
        schedule: The order, the contents, and the runs whose results are looked at.
        clock: Of the machine.
        anchor: Always the same work, timed in turn with the lanes: it shows whether the machine was itself, and what it
            can do at the clocks that the lanes leave it.
    """
    ticks: dict[str, list[Tick]] = {lane.name: [] for lane in lanes}
    if len(ticks) != len(lanes):
        raise ValueError(f"lanes must have names of their own, got {', '.join(lane.name for lane in lanes)}")
    anchors: list[Tick] = []
    findings: dict[str, Any] = {}
    running: list[Lane | None] = [None, *lanes]
    for iteration in range(-2 * SETTLING, schedule.iterations):
        timed, content = iteration >= 0, schedule.content(max(0, iteration))
        checked = iteration in schedule.checked
        for lane in schedule.order(running, iteration):
            if lane is None:
                tick, _ = time_once(anchor, clock)
                anchors += [tick] if timed else []
                continue
            try:
                lane.stage(content, poison=checked)
                tick, results = time_once(partial(lane.call, content), clock)
            except Exception as error:
                # its turn is over, and the others' is not
                findings.setdefault(lane.name, lane.failure(error))
                running.remove(lane)
                continue
            ticks[lane.name] += [tick] if timed else []
            if checked and lane.name not in findings:
                found = lane.finding(content, results)
                if found is not None:
                    findings[lane.name] = found
    return Measured(
        ticks={name: tuple(of) for name, of in ticks.items()},
        anchor=tuple(anchors),
        findings=findings,
        kept=_kept([(one.ms + two.ms) / 2 for one, two in zip(anchors[::2], anchors[1::2], strict=True)]),
    )


def _kept(anchors: Sequence[float]) -> tuple[int, ...]:
    """Rounds whose anchor was near the median; all of them if fewer than half were, for then no round is the rule."""
    median = statistics.median(anchors)
    near = tuple(at for at, ms in enumerate(anchors) if abs(ms - median) <= ANCHOR_DRIFT * median)
    return near if 2 * len(near) >= len(anchors) and len(near) >= 2 else tuple(range(len(anchors)))
