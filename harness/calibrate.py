"""How near correct kernels come to the limits: ``python -m assay.harness.calibrate --out docs/calibration.md``.

Runs the torch and sdpa twins and the correct variants of ``harness/faults`` over fresh smoke cases, keeps the ratio of
every gate, and extrapolates its tail (peaks over a threshold, a generalised Pareto distribution) to the probability
that a correct kernel is rejected. It says which limits have room and changes none. Needs scipy (extra ``eval``).
"""

import argparse
import math
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from . import operations
from ._calibrate_tail import (
    CONFIDENCE,
    THRESHOLD_QUANTILE,
    Ratios,
    advice,
    false_rejects,
    fit_tail,
    rejection_bound,
    statistics,
)
from .faults import load
from .kernels import wrap_function
from .operation import CaseRequest, Kernel, Operation
from .plan import DTYPES
from .record import Record, Verdict
from .runner import ExamRoom, run_case

CPU = torch.device("cpu")
TWINS = ("torch", "sdpa")


@dataclass(slots=True)
class Collection:
    """What the judgements left behind."""

    every: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    by_case: dict[str, dict[tuple[int, str], float]] = field(default_factory=lambda: defaultdict(dict))
    by_dtype: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    verdicts: Counter[str] = field(default_factory=Counter)
    rejected: list[str] = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    kernels: set[str] = field(default_factory=set)
    seeds: int = 0

    def add(self, record: Record, seed: int) -> None:
        """Take in one judgement; one that was not made says nothing."""
        self.verdicts[record.verdict.value] += 1
        if record.verdict in (Verdict.UNSUPPORTED, Verdict.INVALID_CASE):
            return
        self.kernels.add(f"{record.op}: {record.kernel}")
        if record.verdict is not Verdict.PASS:
            self.rejected.append(f"{record.kernel} on {record.case['id']} (seed {seed}): {record.text}")
        dtype, case = str(record.case["dtype"]), (seed, str(record.case["id"]))
        for gate in record.gates:
            self.every[gate.gate].append(gate.ratio)
            if gate.ratio > self.worst.get(gate.gate, (0.0, ""))[0]:
                self.worst[gate.gate] = gate.ratio, f"{record.kernel}, {record.case['family']} {dtype}"
            self.by_case[gate.gate][case] = max(gate.ratio, self.by_case[gate.gate].get(case, 0.0))
            self.by_dtype[gate.gate][dtype] = max(gate.ratio, self.by_dtype[gate.gate].get(dtype, 0.0))

    @property
    def judged(self) -> int:
        """Judgements that were made."""
        return sum(count for verdict, count in self.verdicts.items() if verdict not in ("UNSUPPORTED", "INVALID_CASE"))

    def ratios(self) -> list[Ratios]:
        """Gate by gate, in the order of their names."""
        return [
            Ratios(
                gate=gate,
                every=tuple(self.every[gate]),
                by_case=tuple(self.by_case[gate].values()),
                by_dtype=self.by_dtype[gate],
                per_run=len(self.by_case[gate]) / max(1, self.seeds),
            )
            for gate in sorted(self.every)
        ]


def collect(seeds: Sequence[int], *, variants: int, dtypes: Sequence[str] = DTYPES) -> Collection:
    """Judge the twins and some variants on the smoke cases of each seed.

    Args:
        seeds: One draw of cases each.
        variants: How many of an operation's variants a seed takes; they take turns.
        dtypes: Of the inputs.
    """
    collection = Collection(seeds=len(seeds))
    for turn, seed in enumerate(seeds):
        for name in operations.NAMES:
            operation, room = operations.load(name), ExamRoom()
            request = CaseRequest(tier="smoke", seed=seed, dtypes=tuple(dtypes))
            kernels = _kernels(operation, turn, variants)
            # all kernels on one case, so that its oracle is asked once
            for case in operation.cases(request):
                for kernel in kernels:
                    collection.add(run_case(operation, kernel, case, CPU, room=room), seed)
    return collection


def _kernels(operation: Operation, turn: int, variants: int) -> list[Kernel]:
    """The twins, and the variants whose turn it is."""
    twins = [kernel for kernel in operation.kernels() if kernel.name.endswith(tuple(f"[{twin}]" for twin in TWINS))]
    _, every = load(operation.name)
    turns = range(turn * variants, turn * variants + min(variants, len(every)))
    return twins + [wrap_function(every[at % len(every)].function, operation) for at in turns]


def report(collection: Collection, *, seconds: float) -> str:
    """The page, in Markdown."""
    judged, rejected = collection.judged, len(collection.rejected)
    bound = rejection_bound(rejected, judged) if judged else 1.0
    lines = [
        "# Calibration of the limits",
        "",
        "Written by `python -m assay.harness.calibrate`; what the columns mean is in [method.md](method.md).",
        "",
        f"{collection.seeds} seeds of the smoke tier, {judged} judgements of correct kernels "
        f"({', '.join(f'{count} {verdict}' for verdict, count in sorted(collection.verdicts.items()))}), "
        f"torch {torch.__version__} on the CPU, Python {platform.python_version()}, {seconds:.0f} s.",
        "",
        f"**Rejected: {rejected}** of {judged}; the rate of false rejections is below {bound:.2g} with "
        f"{CONFIDENCE:.0%} confidence (Clopper-Pearson).",
        "",
        *(f"- {text}" for text in collection.rejected),
        *([""] if collection.rejected else []),
        "A ratio is the worst value of a gate over its limit; above 1 is a rejection. The tail is fitted to the "
        f"largest ratio of each case above the {THRESHOLD_QUANTILE:.0%} quantile; `per run` is the extrapolated "
        "probability that a smoke run rejects a correct kernel by that gate.",
        "",
        *_gate_table(collection),
        "",
        "## Largest ratio by dtype",
        "",
        *_dtype_table(collection.ratios()),
        "",
        "## Kernels",
        "",
        *(f"- {name}" for name in sorted(collection.kernels)),
    ]
    return "\n".join(lines) + "\n"


def _gate_table(collection: Collection) -> list[str]:
    columns = ("gate", "judgements", "largest", "of", "99.9 %", "tail shape", "tail ends at", "per run", "limit")
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for ratios in collection.ratios():
        tail = fit_tail(ratios.by_case)
        fitted = ["", "", ""]
        if tail is not None:
            end = f"{tail.end:.2f}" if math.isfinite(tail.end) else "no end"
            shape = (
                f"{tail.shape:.2f}" if math.isnan(tail.shape_error) else f"{tail.shape:.2f} ± {tail.shape_error:.2f}"
            )
            fitted = [shape, end, f"{false_rejects(tail, ratios.per_run):.1g}"]
        high = float(np.quantile(ratios.every, 0.999, method="higher"))
        _, where = collection.worst.get(ratios.gate, (0.0, ""))
        numbers = [str(len(ratios.every)), f"{max(ratios.every):.3f}", where, f"{high:.3f}"]
        rows.append("| " + " | ".join([ratios.gate, *numbers, *fitted, advice(tail, ratios)]) + " |")
    return rows


def _dtype_table(every: list[Ratios]) -> list[str]:
    dtypes = sorted({dtype for ratios in every for dtype in ratios.by_dtype})
    rows = [f"| gate | {' | '.join(dtypes)} |", "|" + " --- |" * (1 + len(dtypes))]
    for ratios in every:
        cells = [f"{ratios.by_dtype[dtype]:.3f}" if dtype in ratios.by_dtype else "" for dtype in dtypes]
        rows.append(f"| {ratios.gate} | {' | '.join(cells)} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, fit, write the page."""
    parser = argparse.ArgumentParser(prog="python -m assay.harness.calibrate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--seeds", type=int, default=20, help="draws of the smoke cases (default 20)")
    parser.add_argument("--first-seed", type=int, default=1000, help="of the first draw (default 1000)")
    parser.add_argument("--variants", type=int, default=3, help="correct variants a seed and operation (default 3)")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.variants < 0:
        parser.error(f"--seeds must be at least 1 and --variants 0, got {options.seeds} and {options.variants}")
    statistics()
    start = time.perf_counter()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    collection = collect(seeds, variants=options.variants)
    options.out.write_text(report(collection, seconds=time.perf_counter() - start), encoding="utf-8")
    print(f"{collection.judged} judgements, {len(collection.rejected)} rejected, {options.out} written")


if __name__ == "__main__":
    main()
