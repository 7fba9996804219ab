"""One shape: judge every kernel, bind those that pass to a ring of buffers, time them together."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from ..operation import Operation
from ..record import Verdict
from ..runner import ExamRoom, Finding, run_case
from .ceilings import Ceilings
from .clock import Clock
from .compilations import counted_compilations
from .engine import Measured, measure
from .lineup import Participant
from .machine import Clocks
from .results import BOUND, KernelResult, Ratio, ShapeResult
from .ring import Ring, input_bytes
from .schedule import ROUNDS, Schedule, schedule_for
from .shapes import Shape
from .statistics import Interval, Spread, ratio_interval
from .timed import TimedKernel, ready
from .verdicts import impossible
from .work import Work, work_of

AGAIN = " (bound again)"
ANCHOR_WARMUP = 20


class Anchor(Protocol):
    """Work of a known size that is timed once a round; ``ceilings.Gemm`` is one."""

    flop: int

    def __call__(self) -> object:
        """Do it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all shapes of a run have in common.

    Attributes:
        device: Where the inputs lie.
        clock: Of the device.
        ceilings: Measured before.
        anchor: Of every round.
        seed: Of contents, checked runs and resampling.
        rounds: At least so many.
        read_clocks: Asked before and after the rounds.
        say: Told what is going on.
    """

    device: torch.device
    clock: Clock
    ceilings: Ceilings
    anchor: Anchor
    seed: int = 0
    rounds: int = ROUNDS
    read_clocks: Callable[[], Clocks] = Clocks
    say: Callable[[str], None] = field(default=lambda text: None)


def bench_shape(
    operation: Operation, shape: Shape, participants: Sequence[Participant], setting: Setting
) -> ShapeResult:
    """Judge and time the kernels on a shape.

    A kernel that the judge does not pass on this shape, in every contents that will be looked at, is never timed. One
    whose timed answers are wrong, or whose times are impossible, has no times.
    """
    start, work = time.perf_counter(), work_of(shape.op, shape.sizes, shape.dtype)
    room, found = ExamRoom(), {}
    for one in participants:
        found[one.kernel.name] = _judged(operation, shape, one, setting, room)
    outcome = ShapeResult(
        shape=shape.name,
        digest=shape.digest,
        op=shape.op,
        source=shape.source,
        dtype=shape.dtype,
        sizes=shape.sizes,
        flop=None if work is None else work.flop,
        bytes=None if work is None else work.bytes,
    )
    if work is not None:
        bound_ms, bound = setting.ceilings.bound_ms(work)
        outcome = replace(outcome, bound_ms=bound_ms, bound=bound)
    passed = [one for one in participants if found[one.kernel.name].verdict is Verdict.PASS]
    if passed:
        outcome = _timed(operation, shape, passed, found, setting, room, work, outcome)
    return replace(outcome, kernels=list(found.values()), seconds=round(time.perf_counter() - start, 2))


def _judged(operation: Operation, shape: Shape, one: Participant, setting: Setting, room: ExamRoom) -> KernelResult:
    setting.say(f"{shape.name}: judging {one.kernel.name}")
    with counted_compilations() as compilations:
        record = run_case(operation, one.kernel, shape.case(setting.seed), setting.device, room=room)
    return KernelResult(
        kernel=one.kernel.name,
        role=one.role,
        verdict=record.verdict,
        text=record.text,
        compilations=compilations.made,
        seconds=record.seconds,
    )


def _timed(
    operation: Operation,
    shape: Shape,
    passed: Sequence[Participant],
    found: dict[str, KernelResult],
    setting: Setting,
    room: ExamRoom,
    work: Work | None,
    outcome: ShapeResult,
) -> ShapeResult:
    """Time those that passed; fills ``found``, and returns the outcome of the shape."""
    touched = work.bytes if work is not None else _touched(operation, shape, setting, room)
    schedule = schedule_for(touched, setting.ceilings.cache_bytes, seed=setting.seed, rounds=setting.rounds)
    outcome = replace(outcome, ring=schedule.ring, rounds=schedule.rounds)
    try:
        ring = Ring(operation, shape, setting.device, size=schedule.ring, seed=setting.seed, room=room)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        for one in passed:
            result = found[one.kernel.name]
            found[one.kernel.name] = replace(result, verdict=Verdict.OUT_OF_MEMORY, text=str(error))
        return outcome
    for content in schedule.checked_contents:
        ring.exam(content)
    lanes = _lanes(passed, found, ring, schedule, setting)
    return _raced(lanes, found, ring, schedule, setting, work, outcome) if lanes else outcome


def _raced(
    lanes: Sequence[TimedKernel],
    found: dict[str, KernelResult],
    ring: Ring,
    schedule: Schedule,
    setting: Setting,
    work: Work | None,
    outcome: ShapeResult,
) -> ShapeResult:
    """Run the rounds, and say what follows from them."""
    twin = next((lane for lane in lanes if found[lane.name].role == "ours"), lanes[0])
    # the same kernel bound again: between its two lanes there is nothing but noise
    again = ready(twin.kernel, ring, schedule, setting.clock, name=twin.name + AGAIN)
    twins = [] if isinstance(again, Finding) else [again]
    setting.say(f"{ring.shape.name}: timing {len(lanes)} kernels, {schedule.rounds} rounds, a ring of {schedule.ring}")
    clocks = [setting.read_clocks()]
    # reading them left the device idle, and an idle one runs slowly at first
    for _ in range(ANCHOR_WARMUP):
        setting.anchor()
    with counted_compilations() as compilations:
        measured = measure([*lanes, *twins], schedule, setting.clock, anchor=setting.anchor)
    clocks.append(setting.read_clocks())
    for lane in lanes:
        found[lane.name] = _result(lane, found[lane.name], measured, work, setting)
    fine = [lane.name for lane in lanes if found[lane.name].verdict is Verdict.PASS]
    ratios = _ratios(fine, found, measured, outcome, setting)
    for ratio in ratios:
        if ratio.other == BOUND:
            found[ratio.kernel] = replace(found[ratio.kernel], share=1 / ratio.interval.value)
    return replace(
        outcome,
        dropped=schedule.rounds - len(measured.kept),
        anchor_ms=[tick.ms for tick in measured.anchor],
        ratios=ratios,
        noise=_noise(twin.name, measured, setting.seed) if twins and twin.name in fine else None,
        compiled_while_timed=compilations.made,
        clocks=clocks,
    )


def _lanes(
    passed: Sequence[Participant],
    found: dict[str, KernelResult],
    ring: Ring,
    schedule: Schedule,
    setting: Setting,
) -> list[TimedKernel]:
    lanes = []
    for one in passed:
        name, start = one.kernel.name, time.perf_counter()
        setting.say(f"{ring.shape.name}: binding {name} to {schedule.ring} sets of buffers")
        with counted_compilations() as compilations:
            lane = ready(one.kernel, ring, schedule, setting.clock)
        result = found[name]
        if result.compilations is not None and compilations.made is not None:
            result = replace(result, compilations=result.compilations + compilations.made)
        result = replace(result, seconds=round(result.seconds + time.perf_counter() - start, 2))
        if isinstance(lane, Finding):
            result = replace(result, verdict=lane.verdict, text=lane.text)
        else:
            lanes.append(lane)
        found[name] = result
    return lanes


def _result(
    lane: TimedKernel, before: KernelResult, measured: Measured, work: Work | None, setting: Setting
) -> KernelResult:
    """The times of a kernel, or what is wrong with them or with its results."""
    known = replace(before, captured=lane.captured, peak_bytes=lane.peak_bytes, text=_note(lane))
    wrong = measured.findings.get(lane.name) or measured.findings.get(lane.name + AGAIN)
    if wrong is not None:
        return replace(known, verdict=wrong.verdict, text=wrong.text)
    samples, late = measured.samples(lane.name), measured.late_ms(lane.name)
    known = replace(known, samples_ms=samples, late_ms=late)
    wrong = impossible(samples, late, work, setting.ceilings)
    if wrong is not None:
        return replace(known, verdict=wrong.verdict, text=wrong.text)
    spread = Spread.of(samples)
    if work is None:
        return replace(known, ms=spread)
    return replace(
        known,
        ms=spread,
        tflops=work.flop / spread.median / 1e9,
        gb_s=work.bytes / spread.median / 1e6,
    )


def _note(lane: TimedKernel) -> str:
    return "" if lane.captured else f"timed by events, with the gaps between launches: {lane.note}"


def _ratios(
    fine: Sequence[str],
    found: dict[str, KernelResult],
    measured: Measured,
    outcome: ShapeResult,
    setting: Setting,
) -> list[Ratio]:
    """Each of ours over each peer and all over the bound, round by round."""
    ratios = []
    bounds = _bounds(measured, outcome, setting.anchor)
    for name in fine:
        mine = measured.per_round(name)
        if bounds is not None:
            ratios.append(Ratio(kernel=name, other=BOUND, interval=ratio_interval(mine, bounds, seed=setting.seed)))
        if found[name].role != "ours":
            continue
        for other in fine:
            if found[other].role == "peer":
                interval = ratio_interval(mine, measured.per_round(other), seed=setting.seed)
                ratios.append(Ratio(kernel=name, other=other, interval=interval))
    return ratios


def _bounds(measured: Measured, outcome: ShapeResult, anchor: Anchor) -> list[float] | None:
    """The bound of each kept round; that of arithmetic follows the anchor, and so the clocks, of its round."""
    if outcome.bound_ms is None or outcome.flop is None:
        return None
    if outcome.bound == "flop":
        return [outcome.flop / anchor.flop * ms for ms in measured.anchor_ms]
    return [outcome.bound_ms for _ in measured.kept]


def _noise(twin: str, measured: Measured, seed: int) -> Interval:
    return ratio_interval(measured.per_round(twin + AGAIN), measured.per_round(twin), seed=seed)


def _touched(operation: Operation, shape: Shape, setting: Setting, room: ExamRoom) -> int:
    """Bytes of the inputs, where nobody counted what must be moved."""
    return input_bytes(room.exam(operation, shape.case(setting.seed), setting.device).inputs)
