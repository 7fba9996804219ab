"""Whether the keys that a kernel lists are a right choice: indices are not compared where scores may round.

A score is a sum over heads of ``w relu(q . k)``. Its error is bounded, key by key, by what the contract lets a kernel
round: its inputs, the products, their sums and that over the heads. Of two keys that are no further apart than both
bounds either may come first, or be left out.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...reference.indexer import best_keys, index_scores
from ..answers import Answer
from ..contract import Contract
from ..operation import Judged
from ..record import GateResult, Location

SINGLE = 2.0**-24
# sums of n terms err like sqrt(n) roundings of them; that many standard deviations are allowed
SUM_SIGMAS = 8.0
# below it nothing is said of a score
TINY = 2.0**-120
INF = math.inf
# numbers [queries, heads, keys] that lie in memory at once
CELLS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScores:
    """Some queries of one request and all keys; float64, ``[n, m]`` each.

    Attributes:
        request: Index in the batch.
        rows: Of the answer.
        scores: Of the reference, ``-inf`` where hidden.
        lengths: ``sum_h |w_h| sum_d |q_d k_d|``, what the terms of a score come to.
        heights: ``sum_h |w_h| |q_h . k|``, what is kept of them before the relu.
        visible: ``[n]``, keys that each query sees.
    """

    request: int
    rows: slice
    scores: Tensor
    lengths: Tensor
    heights: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOracle:
    """The reference's scores with the terms of their errors.

    Attributes:
        parts: Request by request, a block of queries each.
        depth: Terms of an inner product.
        heads: Terms of the sum over heads.
    """

    parts: list[RequestScores]
    depth: int
    heads: int


def index_oracle(arguments: dict[str, Any]) -> IndexOracle:
    """Score all keys in float64, some queries at a time."""
    q, k, weights = (arguments[name].double() for name in ("q", "k", "weights"))
    parts = list[RequestScores]()
    for request, queries, keys in _requests(arguments):
        n, m = queries.stop - queries.start, keys.stop - keys.start
        step = max(1, CELLS // max(1, q.shape[1] * m))
        for first in range(0, n, step):
            rows = slice(queries.start + first, queries.start + min(first + step, n))
            last_key = torch.arange(first, first + rows.stop - rows.start, device=q.device) + m - n
            parts.append(_scored(request, rows, q[rows], k[keys], weights[rows], last_key))
    return IndexOracle(parts=parts, depth=q.shape[2], heads=q.shape[1])


def _requests(arguments: dict[str, Any]) -> Iterator[tuple[int, slice, slice]]:
    pairs = (itertools.pairwise(arguments[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for request, (queries, keys) in enumerate(zip(*pairs, strict=True)):
        yield request, slice(*queries), slice(*keys)


def _scored(request: int, rows: slice, q: Tensor, k: Tensor, weights: Tensor, last_key: Tensor) -> RequestScores:
    scores = index_scores(q, k, weights, last_key)
    hidden = scores == -INF
    products = torch.einsum("thd,sd->ths", q, k).abs_()
    heights = torch.einsum("th,ths->ts", weights.abs(), products)
    lengths = torch.einsum("th,thd->td", weights.abs(), q.abs()) @ k.abs().T
    visible = (last_key + 1).clamp(0, k.shape[0])
    return RequestScores(
        request=request,
        rows=rows,
        scores=scores,
        lengths=lengths.masked_fill(hidden, 0.0),
        heights=heights.masked_fill(hidden, 0.0),
        visible=visible,
    )


def judge_index(oracle: IndexOracle, answer: Answer, contract: Contract, *, exact: bool) -> Judged:
    """G3 what every list must be, G1 its scores; then G3 the one list there is, or G4 scores, their order, the choice.

    Args:
        oracle: Of the case.
        answer: ``topk_indices`` and ``topk_scores``, ``[T, topk]``.
        contract: What the kernel promised.
        exact: Whether no score is rounded by a kernel whose contract keeps whole numbers.
    """
    worst: dict[str, GateResult] = {}
    for part in oracle.parts:
        device = part.scores.device
        listed, reported = (tensor[part.rows].to(device) for tensor in answer)
        gates = [_whole(part, listed.long()), _finite(part, reported)]
        if all(gate.passed for gate in gates):
            if exact and keeps_whole_numbers(contract):
                gates.append(_same(part, listed.long(), reported.double()))
            else:
                gates += _bounded(part, listed.long(), reported.double(), _bounds(oracle, part, contract))
        for gate in gates:
            if gate.gate not in worst or gate.ratio > worst[gate.gate].ratio:
                worst[gate.gate] = gate
    return Judged(gates=list(worst.values()), rows=sum(len(part.scores) for part in oracle.parts))


def keeps_whole_numbers(contract: Contract) -> bool:
    """Whether a kernel with this contract rounds no small whole number, and no sum of them."""
    kept = all(getattr(contract, name) in ("fp32", "fp64") for name in ("logits", "out"))
    return kept and contract.qk_acc not in ("fp16", "bf16", "e4m3") and contract.inputs != "e4m3"


def _counts(part: RequestScores, topk: int) -> tuple[Tensor, Tensor]:
    """How many keys each query must list, ``[n]``, and which places of its list they take, ``[n, topk]``."""
    count = part.visible.clamp(max=topk)
    return count, torch.arange(topk, device=count.device) < count[:, None]


def _whole(part: RequestScores, listed: Tensor) -> GateResult:
    """As many different keys as the query sees, or the list holds; then -1."""
    count, taken = _counts(part, listed.shape[1])
    found = torch.where(taken, listed, torch.arange(listed.shape[1], device=listed.device) + (1 << 32))
    ordered = found.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    reach = taken & ((listed < 0) | (listed >= part.visible[:, None]))
    behind = ~taken & (listed != -1)
    for wrong, must in (
        (behind.any(1), "must list {count} keys and then be -1"),
        (reach.any(1), "must list {count} of the {visible} keys that it sees"),
        (twice, "must list each key once"),
    ):
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            said = must.format(count=int(count[row]), visible=int(part.visible[row]))
            shown = ", ".join(map(str, listed[row, :16].tolist()))
            tail = " ..." if listed.shape[1] > 16 else ""
            text = f"G3 list: query {part.rows.start + row} of request {part.request} {said}, got {shown}{tail}"
            where = Location(request=part.request, token=part.rows.start + row)
            return GateResult(gate="G3 list", ratio=INF, where=where, text=text)
    return GateResult(gate="G3 list", ratio=0.0)


def _finite(part: RequestScores, reported: Tensor) -> GateResult:
    """A number for each listed key, ``-inf`` behind them."""
    _, taken = _counts(part, reported.shape[1])
    wrong = torch.where(taken, ~torch.isfinite(reported), reported != -INF)
    if not bool(wrong.any()):
        return GateResult(gate="G1 scores", ratio=0.0)
    row, place = (int(at) for at in wrong.nonzero()[0])
    must = "a listed key must have a finite score" if bool(taken[row, place]) else "a place without a key must be -inf"
    text = f"G1 scores: {must}, got {float(reported[row, place]):.6g}"
    where = Location(request=part.request, token=part.rows.start + row, position=place)
    return GateResult(gate="G1 scores", ratio=INF, where=where, text=text)


def _same(part: RequestScores, listed: Tensor, reported: Tensor) -> GateResult:
    """No score was rounded, so that with the rule for equal ones there is one list."""
    keys, scores = best_keys(part.scores, listed.shape[1])
    wrong = (listed != keys.long()) | (reported != scores)
    if not bool(wrong.any()):
        return GateResult(gate="G3 choice", ratio=0.0)
    row, place = (int(at) for at in wrong.nonzero()[0])
    got = f"key {int(listed[row, place])} with a score of {float(reported[row, place]):.6g}"
    must = f"key {int(keys[row, place])} with {float(scores[row, place]):.6g}"
    text = (
        f"G3 choice: {int(wrong.any(1).sum())} of {len(wrong)} queries of request {part.request} list other keys or "
        f"scores; query {part.rows.start + row} has {got} in place {place}, must have {must}; of equal scores the "
        f"lower position comes first"
    )
    where = Location(
        request=part.request,
        token=part.rows.start + row,
        position=place,
        got=float(listed[row, place]),
        expected=float(keys[row, place]),
    )
    return GateResult(gate="G3 choice", ratio=INF, where=where, text=text)


def _bounds(oracle: IndexOracle, part: RequestScores, contract: Contract) -> Tensor:
    """How far the score of each key may be from the reference's, ``[n, m]``."""
    sums = contract.roundoff("qk_acc") if contract.qk_acc not in ("tf32", "bf16x3") else SINGLE
    cut = 2 * contract.roundoff("qk_acc") if contract.qk_acc in ("tf32", "bf16x3") else 0.0
    # queries, keys and weights are rounded
    cut += (1 + contract.roundoff("inputs")) ** 3 - 1
    products = (cut + SUM_SIGMAS * math.sqrt(oracle.depth) * sums) * part.lengths
    total = (contract.roundoff("logits") + SUM_SIGMAS * math.sqrt(oracle.heads) * sums) * part.heights
    stored = contract.roundoff("out") * part.scores.abs().masked_fill(part.scores == -INF, 0.0)
    return (products + total + stored).clamp(min=TINY)


def _bounded(part: RequestScores, listed: Tensor, reported: Tensor, bounds: Tensor) -> list[GateResult]:
    """Each score within its bound; no key before, or instead of, one that scores more by both bounds."""
    _, taken = _counts(part, listed.shape[1])
    if not bool(taken.any()):
        return [GateResult(gate=name, ratio=0.0) for name in ("G4 scores", "G4 order", "G4 choice")]
    keys = listed.clamp(min=0)
    scores, own = part.scores.gather(1, keys), bounds.gather(1, keys)
    error = ((reported - scores).abs() / own).masked_fill(~taken, 0.0)
    row, place = divmod(int(error.argmax()), error.shape[1])
    where = Location(
        request=part.request,
        token=part.rows.start + row,
        position=place,
        got=float(reported[row, place]),
        expected=float(scores[row, place]),
    )
    gates = [GateResult(gate="G4 scores", ratio=float(error[row, place]), where=where)]
    # the lowest of all that come first, at the best that it may have been
    lowest = (scores + own).masked_fill(~taken, INF).cummin(1)
    before, after = lowest.indices[:, :-1], slice(1, None)
    pairs = scores.gather(1, before), own.gather(1, before), scores[:, after], own[:, after]
    excess = _excess(*pairs).masked_fill(~taken[:, after], 0.0)
    gates.append(_pair("G4 order", part, excess, keys.gather(1, before), keys[:, after], "lists", "before"))
    hidden = torch.arange(part.scores.shape[1], device=keys.device) >= part.visible[:, None]
    left = (part.scores - bounds).masked_fill(_chosen(hidden, keys, taken) | hidden, -INF)
    best = left.argmax(1, keepdim=True)
    last = lowest.indices[:, -1:]
    pairs = scores.gather(1, last), own.gather(1, last), part.scores.gather(1, best), bounds.gather(1, best)
    excess = _excess(*pairs).masked_fill(left.gather(1, best) == -INF, 0.0)
    gates.append(_pair("G4 choice", part, excess, keys.gather(1, last), best, "lists", "and leaves out"))
    return gates


def _chosen(hidden: Tensor, keys: Tensor, taken: Tensor) -> Tensor:
    """Which keys are listed."""
    wide = torch.zeros(hidden.shape[0], hidden.shape[1] + 1, dtype=torch.bool, device=hidden.device)
    return wide.scatter_(1, keys.masked_fill(~taken, hidden.shape[1]), True)[:, :-1]


def _excess(lower: Tensor, lower_bound: Tensor, higher: Tensor, higher_bound: Tensor) -> Tensor:
    """How much more a key scores than the one it lost to, in units of what rounding may hide."""
    more = (higher - lower).nan_to_num(nan=0.0, neginf=0.0)
    return more.clamp(min=0.0) / (lower_bound + higher_bound)


def _pair(
    name: str, part: RequestScores, excess: Tensor, lower: Tensor, higher: Tensor, verb: str, relation: str
) -> GateResult:
    if not excess.numel():
        return GateResult(gate=name, ratio=0.0)
    row, place = divmod(int(excess.argmax()), excess.shape[1])
    ratio, kept, lost = float(excess[row, place]), int(lower[row, place]), int(higher[row, place])
    where = Location(
        request=part.request,
        token=part.rows.start + row,
        got=float(part.scores[row, kept]),
        expected=float(part.scores[row, lost]),
    )
    text = (
        f"{name}: query {part.rows.start + row} of request {part.request} {verb} key {kept} {relation} key {lost}, "
        f"which scores more by {ratio:.3g} x of what rounding may hide"
    )
    return GateResult(gate=name, ratio=ratio, where=where, text=text if ratio > 1 else "")
