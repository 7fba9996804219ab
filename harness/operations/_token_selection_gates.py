"""Whether the tokens that a kernel kept are a right choice: indices are not compared where scores may round."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...reference.token_selection import pool_scores, token_selection
from ..contract import Contract
from ..operation import Judged
from ..record import GateResult, Location

INF = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOracle:
    """The reference's choice, and what it chose by; on the CPU.

    Attributes:
        kept: ``[N, C]``.
        pooled: Pooled score of each candidate of each request that is over its budget, float64; None within it.
        magnitudes: The same of the absolute scores, for the rounding of a mean.
        contexts: Tokens of each request.
        counts: Tokens that each keeps.
        sink: Tokens at the start that always stay.
        recent: Tokens at the end that always stay.
        terms: Scores that one pooled score is made of; 1 for a maximum, which rounds nothing.
    """

    kept: Tensor
    pooled: list[Tensor | None]
    magnitudes: list[Tensor | None]
    contexts: list[int]
    counts: list[int]
    sink: int
    recent: int
    terms: int


def selection_oracle(arguments: dict[str, Any]) -> SelectionOracle:
    """Choose in float64, and keep the pooled scores."""
    exact: dict[str, Any] = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()
    }
    exact["scores"] = exact["scores"].double()
    sink, recent, pooling = (exact[name] for name in ("sink", "recent", "pooling"))
    contexts, budgets = exact["context_lens"].tolist(), exact["budgets"].tolist()
    pooled: list[Tensor | None] = []
    magnitudes: list[Tensor | None] = []
    for row, context, budget in zip(exact["scores"], contexts, budgets, strict=True):
        own = row[sink : context - recent] if context > budget else None
        options = {"kernel_size": exact["kernel_size"], "pooling": pooling}
        pooled.append(None if own is None else pool_scores(own, **options))
        magnitudes.append(None if own is None else pool_scores(own.abs(), **options))
    return SelectionOracle(
        kept=token_selection(**exact),
        pooled=pooled,
        magnitudes=magnitudes,
        contexts=contexts,
        counts=[min(pair) for pair in zip(contexts, budgets, strict=True)],
        sink=sink,
        recent=recent,
        terms=exact["kernel_size"] if pooling == "avg" and exact["kernel_size"] > 1 else 1,
    )


def judge_selection(oracle: SelectionOracle, kept: Tensor, contract: Contract, *, exact: bool = False) -> Judged:
    """G1 what every choice must be, G3 the choice itself where nothing rounds, G4 where a mean does.

    Args:
        oracle: Of the case.
        kept: ``[N, C]``, int32.
        contract: What the kernel promised; ``logits`` is the format in which it pools.
        exact: Whether even means are exact, or rounded alike.
    """
    kept = kept.cpu().long()
    gates = [_whole(oracle, kept)]
    if gates[0].passed:
        gates.append(_exact(oracle, kept) if exact or oracle.terms == 1 else _bounded(oracle, kept, contract))
    return Judged(gates=gates, rows=len(kept))


def _whole(oracle: SelectionOracle, kept: Tensor) -> GateResult:
    """Ascending positions of the request, as many as it may keep, the first and the last among them; then -1."""
    for request, (row, context, count) in enumerate(zip(kept, oracle.contexts, oracle.counts, strict=True)):
        chosen = row[:count]
        always = set(range(context))
        if context > count:
            always = {*range(oracle.sink), *range(context - oracle.recent, context)}
        wrong = None
        if bool((row[count:] != -1).any()):
            wrong = f"must keep {count} tokens and then be -1"
        elif bool((chosen < 0).any() or (chosen >= context).any()):
            wrong = f"must keep {count} tokens of its {context}"
        elif bool((chosen.diff() <= 0).any()):
            wrong = "must name each token once, in ascending order"
        elif not always <= set(chosen.tolist()):
            wrong = f"must keep its first {oracle.sink} and last {oracle.recent} tokens"
        if wrong is not None:
            shown = ", ".join(map(str, row[:16].tolist()))
            text = f"kept of request {request} {wrong}, got {shown}{' ...' if len(row) > 16 else ''}"
            return GateResult(gate="G3 kept", ratio=INF, where=Location(request=request), text=text)
    return GateResult(gate="G3 kept", ratio=0.0)


def _exact(oracle: SelectionOracle, kept: Tensor) -> GateResult:
    """No score was rounded, so that with the rule for equal ones there is one choice."""
    wrong = kept != oracle.kept.long()
    if not bool(wrong.any()):
        return GateResult(gate="G3 choice", ratio=0.0)
    request, place = (int(at) for at in wrong.nonzero()[0])
    where = Location(
        request=request, position=place, got=float(kept[request, place]), expected=float(oracle.kept[request, place])
    )
    count = f"{int(wrong.any(1).sum())} of {len(kept)}"
    text = f"G3 choice: {count} requests keep other tokens; of equal scores the earlier stays"
    return GateResult(gate="G3 choice", ratio=INF, where=where, text=text)


def _bounded(oracle: SelectionOracle, kept: Tensor, contract: Contract) -> GateResult:
    """Every kept score is at least every dropped one, up to what the rounding of either mean may hide."""
    worst = GateResult(gate="G4 choice", ratio=0.0)
    for request, (pooled, magnitudes) in enumerate(zip(oracle.pooled, oracle.magnitudes, strict=True)):
        if pooled is None or magnitudes is None:
            continue
        chosen = torch.zeros(oracle.contexts[request], dtype=torch.bool)
        chosen[kept[request, : oracle.counts[request]]] = True
        inside = chosen[oracle.sink : oracle.sink + len(pooled)]
        if bool(inside.all()) or not bool(inside.any()):
            continue
        # a mean with -inf among its terms is -inf whoever works it out
        bounds = ((oracle.terms + 1) * contract.roundoff("logits") * magnitudes).masked_fill(pooled.isinf(), 0.0)
        stay, leave = inside.nonzero()[:, 0], (~inside).nonzero()[:, 0]
        kept_at = int(stay[(pooled + bounds)[stay].argmin()])
        dropped_at = int(leave[(pooled - bounds)[leave].argmax()])
        excess = 0.0 if pooled[dropped_at].isinf() else float(pooled[dropped_at] - pooled[kept_at])
        ratio = max(0.0, excess) / max(float(bounds[dropped_at] + bounds[kept_at]), 1e-300)
        if ratio <= worst.ratio:
            continue
        where = Location(
            request=request,
            position=oracle.sink + kept_at,
            got=float(pooled[kept_at]),
            expected=float(pooled[dropped_at]),
        )
        text = (
            f"G4 choice: request {request} keeps token {oracle.sink + kept_at}, drops {oracle.sink + dropped_at}, "
            f"{ratio:.3g} x of what rounding may hide apart"
        )
        worst = GateResult(gate="G4 choice", ratio=ratio, where=where, text=text)
    return worst
