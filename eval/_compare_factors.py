"""Named factors over a full design: what one of them does, averaged over the levels of the others."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from ._compare_gates import judged
from .arms import Arm
from .comparison import FactorEffect, GateResult
from .run_folder import OK
from .statistics import Differences, Verdict, macro_estimate
from .suite import AGREEMENT, NLL, SCORE, Gate, Suite


def factor_effects(arms: Sequence[Arm], suite: Suite) -> list[FactorEffect]:
    """The effect of each factor of two levels, where there are two factors or more and a run for every combination."""
    names = sorted(set.intersection(*(set(arm.factors) for arm in arms)))
    levels = {name: list(dict.fromkeys(arm.factors[name] for arm in arms)) for name in names}
    names = [name for name in names if len(levels[name]) > 1]
    by_levels = {tuple(arm.factors[name] for name in names): arm for arm in arms}
    full = len(by_levels) == len(arms) and set(by_levels) == set(product(*(levels[name] for name in names)))
    if len(names) < 2 or not full:
        return []
    effects = []
    for at, name in enumerate(names):
        if len(levels[name]) == 2:
            sides = [[arm for key, arm in by_levels.items() if key[at] == level] for level in levels[name]]
            gates = [_effect(gate, suite, sides) for gate in suite.gates if gate.metric != AGREEMENT]
            effects.append(FactorEffect(factor=name, levels=(levels[name][0], levels[name][1]), gates=gates))
    return effects


def _effect(gate: Gate, suite: Suite, sides: list[list[Arm]]) -> GateResult:
    tasks, found, means = suite.tasks_of(gate), [], []
    for task in tasks:
        arms = [arm for side in sides for arm in side]
        planned = arms[0].items.get(task, {})
        samples = [one for one in planned if all(_value(gate, arm, task, one) is not None for arm in arms)]
        if not samples:
            note = f"{gate.metric} was not measured on {task}"
            return GateResult(gate=gate, tasks=tasks, estimate=None, verdict=Verdict.INCONCLUSIVE, note=note)
        first, second = (
            np.mean([[_value(gate, arm, task, one) or 0.0 for one in samples] for arm in side], axis=0)
            for side in sides
        )
        clusters = [arms[0].items[task][one].cluster or one for one in samples]
        found.append(Differences.of((second - first).tolist(), clusters))
        means.append((float(first.mean()), float(second.mean())))
    estimate = macro_estimate(found, margin=gate.loss, scale=gate.scale if gate.metric == NLL else 1.0)
    sign = -1.0 if gate.metric == NLL else 100.0
    before, after = (sign * sum(one[side] for one in means) / len(means) for side in (0, 1))
    result = GateResult(
        gate=gate,
        tasks=tasks,
        estimate=estimate,
        verdict=Verdict.INCONCLUSIVE,
        p_adjusted=estimate.p,
        first=before,
        second=after,
    )
    return judged(result)


def _value(gate: Gate, arm: Arm, task: str, sample: str) -> float | None:
    if arm.status(task, sample) != OK:
        return None
    if gate.metric == SCORE:
        return arm.scores[task].get(sample)
    loss = arm.records[task][sample].get("gold_nll")
    return None if loss is None else -float(loss)
