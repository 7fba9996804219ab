"""Times that cannot be: faster than the machine, or of work that went on after the clock was stopped."""

from collections.abc import Sequence

from ..record import Verdict
from ..runner import Finding
from .ceilings import Ceilings
from .statistics import Spread
from .work import Work

# waiting for an idle device takes as long after any call: what takes this much longer had work left elsewhere
LATE_MS, LATE_SHARE = 0.03, 0.02


def impossible(samples_ms: Sequence[float], late_ms: float, work: Work | None, ceilings: Ceilings) -> Finding | None:
    """Why these times are not those of the whole work, or None.

    Args:
        samples_ms: Of one kernel.
        late_ms: How long the device was busy after the last mark, over what it was after the anchor.
        work: Of the shape, if anybody counted.
        ceilings: Of this run.
    """
    median = Spread.of(samples_ms).median
    if late_ms > max(LATE_MS, LATE_SHARE * median):
        text = (
            f"the device worked {late_ms:.3f} ms on after the caller's stream was done, which counts {median:.3f} ms: "
            "the work is on a stream of its own, for which the caller's does not wait"
        )
        return Finding(verdict=Verdict.IMPOSSIBLE_TIME, text=text)
    floor = 0.0 if work is None else ceilings.floor_ms(work)
    if median < floor:
        text = f"{median:.4f} ms is less than the {floor:.4f} ms that this machine needs for the work: not all was done"
        return Finding(verdict=Verdict.IMPOSSIBLE_TIME, text=text)
    return None
