"""Where two runs begin to differ: the first token, the gap that decided it, the log-probabilities before."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from .arms import Arm, both_ok

# upper ends of the bins of the first position that differs
POSITIONS = (1, 4, 16, 64, 256)
# upper ends of the bins of context lengths
CONTEXTS = (256, 1024, 4096, 16384, 65536)
# where the likelier token leads by more than this, in nats, no tie was broken the other way
TIE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First differences of the generated tokens.

    Attributes:
        n: Samples whose tokens are known in both runs.
        identical: Samples whose tokens are all the same.
        positions: Samples by where the first difference lies, by the bin's label.
        gaps: Samples that differ and whose gaps are known.
        median_gap: Median over them of the smaller of both runs' gaps of the two likeliest tokens; None without any.
        no_ties: Those of which even the smaller gap exceeds ``TIE``: no rounding explains them.
        examples: Task, sample, position and both gaps of the largest gaps.
    """

    n: int
    identical: int
    positions: dict[str, int]
    gaps: int
    median_gap: float | None
    no_ties: int
    examples: list[tuple[str, str, int, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDifference:
    """Log-probabilities of prompt tokens, in nats, in one bin of context lengths.

    Attributes:
        context: Tokens before the probe, the bin's label.
        n: Probes.
        first: Mean log-probability in the first run.
        second: In the second run.
        mean: Mean absolute difference.
        largest: Largest absolute difference.
    """

    context: str
    n: int
    first: float
    second: float
    mean: float
    largest: float


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position at which two lists of tokens differ, also where one ends; None if they are equal."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return None if len(first) == len(second) else min(len(first), len(second))


def agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of the tokens before the first difference, of the longer list; 1 for two empty ones."""
    at = first_difference(first, second)
    return 1.0 if at is None else at / max(len(first), len(second))


def tied(one: Mapping[str, Any], other: Mapping[str, Any], tie: float) -> bool:
    """Whether two records first differ where the likelier token leads by at most ``tie`` nats, above 0, in both."""
    at = first_difference(one["output_ids"], other["output_ids"])
    gaps = [None, None] if at is None else [_gap(one, at), _gap(other, at)]
    return tie > 0 and all(gap is not None and gap <= tie for gap in gaps)


def divergence(first: Arm, second: Arm) -> Divergence:
    """Over all samples that both runs answered."""
    n = identical = 0
    labels = _labels(POSITIONS)
    positions = dict.fromkeys(labels, 0)
    found: list[tuple[str, str, int, float, float]] = []
    for task, sample, one, other in _pairs(first, second, "output_ids"):
        n += 1
        at = first_difference(one["output_ids"], other["output_ids"])
        if at is None:
            identical += 1
            continue
        positions[labels[bisect_right(POSITIONS, at)]] += 1
        gaps = _gap(one, at), _gap(other, at)
        if None not in gaps:
            found.append((task, sample, at, gaps[0] or 0.0, gaps[1] or 0.0))
    found.sort(key=lambda one: -min(one[3:]))
    smaller = [min(one[3:]) for one in found]
    return Divergence(
        n=n,
        identical=identical,
        positions={label: count for label, count in positions.items() if count},
        gaps=len(found),
        median_gap=median(smaller) if smaller else None,
        no_ties=sum(gap > TIE for gap in smaller),
        examples=found[:5],
    )


def probe_differences(first: Arm, second: Arm) -> list[ProbeDifference]:
    """By how many tokens stood before the probe."""
    labels = _labels(CONTEXTS)
    bins: list[list[tuple[float, float]]] = [[] for _ in labels]
    for _, _, one, other in _pairs(first, second, "probes"):
        # a model that gives no log-probabilities of prompts has none
        if not (one["probes"] and other["probes"]):
            continue
        # a probe is a position and its log-probability; the positions follow from the length of the prompt alone
        for (position, before), (_, after) in zip(one["probes"], other["probes"], strict=True):
            bins[bisect_right(CONTEXTS, position)].append((before, after))
    return [_summed_up(label, values) for label, values in zip(labels, bins, strict=True) if values]


def _summed_up(label: str, values: Sequence[tuple[float, float]]) -> ProbeDifference:
    first, second = zip(*values, strict=True)
    apart = [abs(after - before) for before, after in values]
    return ProbeDifference(
        context=label,
        n=len(values),
        first=fmean(first),
        second=fmean(second),
        mean=fmean(apart),
        largest=max(apart),
    )


def _pairs(first: Arm, second: Arm, key: str) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    for task in first.tasks:
        for sample in both_ok(first, second, task):
            one, other = first.records[task][sample], second.records[task][sample]
            if one.get(key) is not None and other.get(key) is not None:
                yield task, sample, one, other


def _gap(record: Mapping[str, Any], at: int) -> float | None:
    gaps = record.get("gaps") or []
    return float(gaps[at]) if at < len(gaps) else None


def _labels(edges: Sequence[int]) -> list[str]:
    """A label per bin: what lies below the first edge, between two, and from the last one on."""
    starts, ends = (0, *edges[:-1]), [edge - 1 for edge in edges]
    inner = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return [*inner, f"{edges[-1]}+"]
