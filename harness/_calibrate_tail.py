"""Tails of gate ratios: how likely a correct kernel is rejected, and where a limit could lie."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

THRESHOLD_QUANTILE = 0.95
FEWEST_PEAKS = 30
# a run may blame a correct kernel once in a million runs
TARGET = 1e-6
CONFIDENCE = 0.95
# a limit that the fitted tail puts below this share of today's is said to have room
ROOM = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Worst ratios of one gate.

    Attributes:
        gate: Its name.
        every: One for each judgement.
        by_case: The largest of the kernels on each case: kernels on the same case err alike, cases do not.
        by_dtype: The largest of each dtype.
        per_run: Cases of a run, of one operation after the other, in which the gate applies.
    """

    gate: str
    every: tuple[float, ...]
    by_case: tuple[float, ...]
    by_dtype: dict[str, float]
    per_run: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The fitted tail of a gate's ratio over cases: what lies above the threshold, and how it falls off.

    Attributes:
        threshold: Where it begins.
        share: Of the cases that lie above.
        shape: Of the generalised Pareto distribution; negative if it ends.
        scale: Of the distribution.
        peaks: How many values it was fitted to.
    """

    threshold: float
    share: float
    shape: float
    scale: float
    peaks: int

    @property
    def shape_error(self) -> float:
        """Standard error of the shape, in the limit of many peaks; NaN where the tail ends too abruptly to have one."""
        return (1 + self.shape) / math.sqrt(self.peaks) if self.shape > -0.5 else math.nan

    @property
    def end(self) -> float:
        """The largest ratio that the tail allows; infinite unless its shape is negative."""
        return self.threshold - self.scale / self.shape if self.shape < 0 else math.inf

    def beyond(self, ratio: float) -> float:
        """Probability that a case lies beyond ``ratio``, which must be at least the threshold."""
        over = (ratio - self.threshold) / self.scale
        if abs(self.shape) < 1e-9:
            return self.share * math.exp(-over)
        base = 1 + self.shape * over
        return 0.0 if base <= 0 else float(self.share * base ** (-1 / self.shape))

    def quantile(self, probability: float) -> float:
        """The ratio that a case exceeds with ``probability``, at most ``share``."""
        rate = probability / self.share
        if abs(self.shape) < 1e-9:
            return self.threshold - self.scale * math.log(rate)
        return float(self.threshold + self.scale / self.shape * (rate**-self.shape - 1))


def statistics() -> Any:
    """``scipy.stats``, which only calibration needs.

    Raises:
        ModuleNotFoundError: If scipy is not installed.
    """
    try:
        return importlib.import_module("scipy.stats")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("calibration needs scipy, which the extra eval installs") from error


def fit_tail(values: Sequence[float]) -> Tail | None:
    """Fit the peaks over the 95 % quantile; None where there are too few, or all alike."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        return None
    threshold = float(np.quantile(numbers, THRESHOLD_QUANTILE))
    peaks = numbers[numbers > threshold] - threshold
    if len(peaks) < FEWEST_PEAKS or np.ptp(peaks) == 0:
        return None
    shape, _, scale = statistics().genpareto.fit(peaks, floc=0)
    return Tail(
        threshold=threshold,
        share=len(peaks) / len(numbers),
        shape=float(shape),
        scale=float(scale),
        peaks=len(peaks),
    )


def rejection_bound(rejected: int, judged: int) -> float:
    """Upper end of the one-sided 95 % interval of Clopper and Pearson for the rate of rejections."""
    if rejected >= judged:
        return 1.0
    return float(statistics().beta.ppf(CONFIDENCE, rejected + 1, judged - rejected))


def false_rejects(tail: Tail, per_run: float) -> float:
    """Probability that one run rejects a correct kernel by this gate."""
    return -math.expm1(per_run * math.log1p(-min(tail.beyond(max(1.0, tail.threshold)), 1 - 1e-12)))


def tighter_limit(tail: Tail, ratios: Ratios) -> float:
    """The share of today's limit at which a run rejects with probability ``TARGET``; never below what was seen."""
    return max(tail.quantile(TARGET / max(1.0, ratios.per_run)), max(ratios.by_case))


def advice(tail: Tail | None, ratios: Ratios) -> str:
    """What the tail says of the limit."""
    worst = max(ratios.by_case)
    if worst == 0:
        return "all or nothing: no correct kernel shows anything"
    if tail is None:
        return f"too few cases to extrapolate; the largest ratio is {worst:.2f}"
    share = tighter_limit(tail, ratios)
    if share >= 1:
        return f"no room: the fitted tail reaches {share:.2f} of the limit at {TARGET:g} a run"
    if share > ROOM:
        return f"about right: {share:.2f} of the limit would do"
    return f"room: {share:.2f} of the limit would do"
