"""A kernel that passed, bound to every set of buffers of the ring, and whether its timed answers are right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..answers import Answer, copied
from ..execution import Execution, describe
from ..layouts import restated
from ..operation import AttentionOutline, Kernel
from ..poison import same_bits
from ..record import Verdict
from ..runner import Finding, assess
from .clock import Clock
from .ring import Ring, Slot
from .schedule import Content, Schedule

WARMUP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One bound call: what repeats it, and where its results lie if they lie at one place each time."""

    call: Callable[[], object]
    results: Any = None


class TimedKernel:
    """One lane of the schedule.

    Attributes:
        name: Of the kernel; a second lane of the same kernel says so.
        kernel: Itself.
        contract: What it promised.
        captured: Whether replays of a graph are timed, rather than calls with their gaps between launches.
        note: Why not.
        peak_bytes: Most memory of a call beside its inputs.
    """

    def __init__(self, kernel: Kernel, ring: Ring, clock: Clock, *, name: str | None = None) -> None:
        """Bind the kernel to all sets of buffers and record a replay of each.

        Raises:
            Exception: Whatever the kernel raises.
        """
        case = ring.exams[0].case
        self.name, self.kernel, self.contract = name or kernel.name, kernel, kernel.contract(case)
        self._ring, self._clock = ring, clock
        self._slots = [Slot(ring, entry, kernel, self.contract) for entry in range(len(ring.exams))]
        self.captured, self.note = False, "declared not capturable"
        self._replays = [Replay(call=slot.run) for slot in self._slots]
        if self.contract.capturable:
            self._record(clock)
        else:
            self._warm_up()
        self._slots[0].stage(Content(entry=0, version=0))
        self.peak_bytes = clock.peak_bytes(self._slots[0].run)
        self._judged: dict[Content, Answer] = {}

    def _record(self, clock: Clock) -> None:
        try:
            recorded = [clock.capture(slot.run) for slot in self._slots]
        except RuntimeError as error:
            self.note = f"the capture failed: {describe(error)}"
            self._warm_up()
            return
        self._replays = [Replay(call=call, results=results) for call, results in recorded]
        self.captured, self.note = True, ""

    def _warm_up(self) -> None:
        for slot in self._slots:
            for _ in range(WARMUP):
                slot.run()

    def judge(self, contents: list[Content]) -> Finding | None:
        """Have a plain call answer each of the contents, and judge the answers; None if all pass."""
        for content in contents:
            self._slots[content.entry].stage(content)
            results = self._slots[content.entry].run()
            # wherever it was worked out: that is asked about when it is timed
            self._clock.drain()
            answer = copied(results)
            finding = self._assess(answer, content)
            if finding.verdict is not Verdict.PASS:
                return finding
            self._judged[content] = answer
        return None

    def stage(self, content: Content, *, poison: bool) -> None:
        """Put the contents in place, and NaN where the results will lie."""
        self._slots[content.entry].stage(content)
        if poison:
            for tensor in _tensors(self._replays[content.entry].results):
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def call(self, content: Content) -> object:
        """The timed call; returns the results."""
        replay = self._replays[content.entry]
        returned = replay.call()
        return returned if replay.results is None else replay.results

    def finding(self, content: Content, results: Any) -> Finding | None:
        """What is wrong with the results of a timed call, or None."""
        expected, got = self._judged[content], copied(results)
        if all(same_bits(a, b) for a, b in zip(got, expected, strict=True)):
            return None
        place = f"a timed call on set {content.entry} with contents {content.version}"
        for other, answer in self._judged.items():
            if other != content and same_bits(got[0], answer[0]):
                text = f"{place} gave the answer to set {other.entry} with contents {other.version}: not computed anew"
                return Finding(verdict=Verdict.NUMERIC, text=text)
        if bool(got[0].isnan().all()) and not bool(expected[0].isnan().any()):
            return Finding(verdict=Verdict.WRITE_SCOPE, text=f"{place} wrote no result by the time the device was idle")
        finding = self._assess(got, content)
        if finding.verdict is not Verdict.PASS:
            return Finding(verdict=finding.verdict, text=f"{place}: {finding.text}", gates=finding.gates)
        if not self.contract.deterministic:
            return None
        return Finding(verdict=Verdict.NONDETERMINISTIC, text=f"{place} gave other bits than a plain call")

    def failure(self, error: Exception) -> Finding:
        """The verdict on a timed call that raised; after so many that did not, it is no refusal."""
        finding = raised(error)
        return (
            finding
            if finding.verdict is Verdict.OUT_OF_MEMORY
            else Finding(verdict=Verdict.CRASH, text=describe(error))
        )

    def _assess(self, answer: Answer, content: Content) -> Finding:
        exam = self._ring.exam(content)
        outline = exam.operation.outline(exam.case)
        if isinstance(outline, AttentionOutline):
            answer = restated(answer, self.kernel.conventions, outline.empty_rows)
        execution = Execution(
            contract=self.contract, first=answer, last=answer, gates=(), conventions=self.kernel.conventions
        )
        return assess(exam, execution)


def ready(
    kernel: Kernel, ring: Ring, schedule: Schedule, clock: Clock, *, name: str | None = None
) -> TimedKernel | Finding:
    """The kernel, ready to be timed and its answers judged, or why it is not timed."""
    try:
        timed = TimedKernel(kernel, ring, clock, name=name)
        return timed.judge(schedule.checked_contents) or timed
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> Finding:
    """What it means that a kernel raised this."""
    if isinstance(error, NotImplementedError):
        return Finding(verdict=Verdict.UNSUPPORTED, text=str(error))
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return Finding(verdict=Verdict.OUT_OF_MEMORY, text=str(error) or "out of memory")
    return Finding(verdict=Verdict.CRASH, text=describe(error))


def _tensors(results: Any) -> list[Tensor]:
    found = [results] if isinstance(results, Tensor) else results or ()
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
