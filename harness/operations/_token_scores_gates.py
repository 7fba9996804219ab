"""How far the scores of an honest kernel may be from the oracle's.

A raw logit errs by what rounding leaves of its terms: keys that are rounded after their projection, or queries that are
absorbed and rounded, and float32 sums. A maximum errs no more than the worst of its candidates. A probability is
``exp(z - lse)``, so that the errors of its own logit and of its denominator count times itself; its mean over queries
and the maximum over heads follow. G4 holds every element to the sum of the bounds, G5 the root mean square of a request
to what independent roundings come to.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...reference.attention import masked_logits
from ...reference.mla_prefill import expand_latent, requests
from ...reference.token_scores import IDENTITIES, eligible_logits, token_scores
from .._gates_bounds import chi_limit
from ..contract import Contract
from ..operation import Judged
from ..record import GateResult, Location

SINGLE = 2.0**-24
# sums of n terms err like sqrt(n) roundings of them; that many standard deviations are allowed
SUM_SIGMAS = 8.0
ROW_RMS_LIMIT = 1.6
# below it nothing is said of a score: a weight that small may as well be 0
TINY = 2.0**-120
INDICES = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
TERMS = ("keys", "absorbed", "lengths", "heights", "keys_spread", "absorbed_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOracle:
    """The scores, and what their errors are made of; float64, ``[N, max_context]`` each.

    Attributes:
        mode: ``logits`` or ``probability``.
        scores: Of the reference.
        reached: Whether an observed query may look there.
        keys: Sums of ``|q| |k|`` over the projected dimensions, what rounded keys err by in units of their roundoff; of
            a probability with its weight, that of the denominator included.
        absorbed: The same over the latent dimensions, for absorbed queries.
        lengths: Of all terms of the unprojected product, what float32 sums err against.
        heights: Magnitude of what an exponential is taken of.
        keys_spread: Roots of summed squares instead of sums, for independent roundings.
        absorbed_spread: The same for absorbed queries.
        worst: By name, the largest exponent error of each kind, for the curvature of the exponential.
        depth: Terms of a sum.
        freedom: ``[N, 2]``, how many of a request's errors are independent when keys, or queries, are rounded.
    """

    mode: str
    scores: Tensor
    reached: Tensor
    keys: Tensor
    absorbed: Tensor
    lengths: Tensor
    heights: Tensor
    keys_spread: Tensor
    absorbed_spread: Tensor
    worst: dict[str, float]
    depth: int
    freedom: Tensor


def score_oracle(arguments: dict[str, Any]) -> ScoreOracle:
    """Work out the reference and the terms of its errors, request by request and head by head."""
    exact: dict[str, Any] = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
        if name != "history_chunk_size"
    }
    scores = token_scores(**exact)
    named = {name: torch.zeros_like(scores) for name in TERMS}
    found = ScoreOracle(
        mode=arguments["mode"],
        scores=scores,
        reached=torch.zeros_like(scores, dtype=torch.bool),
        worst={"keys": 0.0, "absorbed": 0.0, "lengths": 0.0},
        depth=sum(exact["kv_b_proj"].shape[1:]) + exact["q"].shape[-1],
        freedom=torch.ones(len(scores), 2, dtype=torch.float64),
        **named,
    )
    for request, (queries, slots, positions) in enumerate(requests(*(arguments[name] for name in INDICES))):
        start, stop = exact["query_ranges"][request].tolist()
        if start < stop:
            seen = ((positions >= start) & (positions < stop)).nonzero()[:, 0]
            _add_request(found, exact, request, exact["q"][queries][seen], slots, positions[seen])
    return found


def _add_request(
    found: ScoreOracle, exact: dict[str, Any], request: int, q: Tensor, slots: Tensor, positions: Tensor
) -> None:
    candidates = _candidates(exact, request, len(slots))
    d_nope = q.shape[-1] - exact["k_pe"].shape[-1]
    latent, rope = exact["kv_c"][slots], exact["k_pe"][slots]
    for head in range(q.shape[1]):
        weight = exact["kv_b_proj"][head : head + 1]
        k, _ = expand_latent(latent, rope, weight[:, :d_nope], weight[:, d_nope:])
        terms = _terms(q[:, head], k[:, 0], latent, rope, weight[0, :d_nope])
        reach = eligible_logits(q[:, head : head + 1], k, positions, candidates, softmax_scale=1.0)[:, 0] > -math.inf
        found.reached[request, : len(slots)] |= reach.any(0)
        if found.mode == "logits":
            columns = {name: term.masked_fill(~reach, 0.0).amax(0) for name, term in terms.items()}
        else:
            columns = _weighted(found, terms, q[:, head : head + 1], k, positions, candidates, exact["softmax_scale"])
        for name, column in columns.items():
            row = getattr(found, name)[request, : len(slots)]
            torch.maximum(row, column, out=row)
    reached = found.reached[request, : len(slots)]
    rows = torch.cat([latent[reached], rope[reached]], dim=1)
    gram = torch.nn.functional.normalize(rows, dim=1)
    independent = len(rows) ** 2 / float((gram.T @ gram).square().sum().clamp(min=1e-300))
    found.freedom[request] = torch.tensor([max(1.0, len(rows)), max(1.0, independent)], dtype=torch.float64)


def _candidates(exact: dict[str, Any], request: int, context: int) -> tuple[int, int]:
    if exact["candidate_ranges"] is None:
        return exact["candidate_start"], context - exact["recent_keep_tokens"]
    start, stop = exact["candidate_ranges"][request].tolist()
    return start, stop


def _terms(q: Tensor, k: Tensor, latent: Tensor, rope: Tensor, w_uk: Tensor) -> dict[str, Tensor]:
    """Of one head, ``[w, S]`` each; ``q`` is ``[w, D]`` and ``k`` ``[S, D]``."""
    d_nope = w_uk.shape[0]
    absorbed = q[:, :d_nope] @ w_uk
    return {
        "keys": q[:, :d_nope].abs() @ k[:, :d_nope].abs().T,
        "absorbed": absorbed.abs() @ latent.abs().T,
        "lengths": q[:, :d_nope].abs() @ w_uk.abs() @ latent.abs().T + q[:, d_nope:].abs() @ rope.abs().T,
        "keys_spread": (q[:, :d_nope].square() @ k[:, :d_nope].square().T).sqrt(),
        "absorbed_spread": (absorbed.square() @ latent.square().T).sqrt(),
        "heights": q.abs() @ k.abs().T,
    }


def _weighted(
    found: ScoreOracle,
    terms: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    candidates: tuple[int, int],
    scale: float,
) -> dict[str, Tensor]:
    """The terms times the weights they are of, the denominator's added: its logits err together at worst."""
    z = eligible_logits(q, k, positions, candidates, softmax_scale=scale)[:, 0]
    lse = torch.logsumexp(z, -1, keepdim=True)
    p = torch.exp(z - lse).masked_fill(lse == -math.inf, 0.0)
    visible = masked_logits(q, k, positions, softmax_scale=1.0)[:, 0] > -math.inf
    columns = {}
    # a denominator may come from attention, whose keys are rounded, whatever the scores' own queries are
    either = {end: torch.maximum(terms["keys" + end], terms["absorbed" + end]) for end in ("", "_spread")}
    for name in ("keys", "absorbed", "lengths"):
        own, whole = abs(scale) * terms[name], abs(scale) * (terms[name] if name == "lengths" else either[""])
        highest = whole.masked_fill(~visible, 0.0).amax(-1, keepdim=True)
        found.worst[name] = max(found.worst[name], float((own.masked_fill(p == 0, 0.0) + highest).max()))
        columns[name] = (p * (own + highest)).mean(0)
    for name in ("keys_spread", "absorbed_spread"):
        own, whole = abs(scale) * terms[name], abs(scale) * either["_spread"]
        columns[name] = (p * (own + (p * whole).sum(-1, keepdim=True))).mean(0)
    heights = z.masked_fill(z == -math.inf, 0.0).abs().amax(-1, keepdim=True) + lse.abs().masked_fill(lse.isinf(), 0.0)
    columns["heights"] = (p * heights).mean(0)
    return columns


def judge_scores(oracle: ScoreOracle, scores: Tensor, contract: Contract, *, exact: bool) -> Judged:
    """G1 identities and finite values, G3 in exact families, G4 every element, G5 every request.

    Args:
        oracle: Of the case.
        scores: ``[N, max_context]``.
        contract: What the kernel promised.
        exact: Whether every honest kernel gives the same raw logits, bit for bit; its probabilities then err by the
            rounding of exponentials and sums alone.
    """
    oracle = _on(oracle, scores.device)
    blind = ~oracle.reached
    wrong = torch.where(blind, scores != IDENTITIES[oracle.mode], ~torch.isfinite(scores))
    gates = [_gate("G1 scores", torch.where(wrong, math.inf, 0.0), scores, oracle.scores)]
    if not gates[0].passed:
        return Judged(gates=[_explained(gates[0], blind, oracle)], rows=0)
    error = (scores.double() - oracle.scores).masked_fill(blind, 0.0).abs()
    if exact and oracle.mode == "logits":
        same = (scores == oracle.scores.to(scores.dtype)) | blind
        gates.append(_gate("G3 exact", torch.where(same, 0.0, math.inf), scores, oracle.scores))
    hard, spread, sums, rounding = _bounds(oracle, contract)
    if exact and oracle.mode == "probability":
        gates.append(_gate("G3 exact", error / rounding.clamp(min=TINY), scores, oracle.scores))
    gates.append(_gate("G4 envelope", error / hard, scores, oracle.scores))
    observed = oracle.reached.sum(1)
    deviation = (spread / math.sqrt(3) + sums).clamp(min=TINY)
    squares = (error / deviation).square().masked_fill(blind, 0.0).sum(1) / observed.clamp(min=1)
    freedom = oracle.freedom[:, int(contract.absorbed)]
    rms = squares.sqrt() / chi_limit(freedom).clamp(min=ROW_RMS_LIMIT)
    gates.append(_row_gate("G5 row rms", rms, error / deviation, scores, oracle.scores))
    return Judged(gates=gates, rows=int((observed > 0).sum()))


def _explained(gate: GateResult, blind: Tensor, oracle: ScoreOracle) -> GateResult:
    """What is wrong with a value that no score may have."""
    where = gate.where
    if where is None or where.request is None or where.position is None:
        return gate
    if bool(blind[where.request, where.position]):
        said = f"a token that no observed query may look at must score {IDENTITIES[oracle.mode]}"
    else:
        said = "a token that an observed query may look at must have a finite score"
    return replace(gate, text=f"G1 scores: {said}, got {where.got:.6g}")


def _bounds(oracle: ScoreOracle, contract: Contract) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its hard bound, roots of summed squares, what sums add to those, what exponentials and stores alone come to."""
    kind = "absorbed" if contract.absorbed else "keys"
    rounded, cut, products = contract.roundoff("projected"), *_products(contract)
    inputs = 3 * contract.roundoff("inputs")
    linear = rounded * getattr(oracle, kind) + (cut + inputs + products * math.sqrt(oracle.depth)) * oracle.lengths
    spread = rounded * getattr(oracle, kind + "_spread")
    sums = (cut + inputs + products * math.sqrt(oracle.depth)) * oracle.lengths
    if oracle.mode == "logits":
        stored = (contract.roundoff("logits") + contract.roundoff("out")) * oracle.heights
        return (linear + stored).clamp(min=TINY), spread, sums + stored, stored
    worst = rounded * oracle.worst[kind] + (cut + inputs + products * math.sqrt(oracle.depth)) * oracle.worst["lengths"]
    # the exponential bends away from the line through 0
    bend = math.expm1(min(worst, 50.0)) / worst if worst > 0 else 1.0
    single = SINGLE if contract.qk_acc != "fp64" else 2.0**-53
    exponent = (2 * contract.roundoff("logits") + contract.roundoff("lse") + 8 * single) * oracle.heights
    keys = oracle.reached.sum(1, keepdim=True).clamp(min=1)
    own = SUM_SIGMAS * keys.sqrt() * single + 2 * contract.ex2_rel + contract.roundoff("out") + contract.roundoff("p")
    rounding = exponent + own * oracle.scores
    # a weight is at most 1, whatever its logit errs by
    return (bend * linear + rounding).clamp(TINY, 1.0), bend * spread, bend * sums + rounding, rounding


def _products(contract: Contract) -> tuple[float, float]:
    """What cut operands, and what float32 sums, leave of a product's terms."""
    if contract.qk_acc in ("tf32", "bf16x3"):
        return 2 * contract.roundoff("qk_acc"), SUM_SIGMAS * SINGLE
    return 0.0, SUM_SIGMAS * contract.roundoff("qk_acc")


def _on(oracle: ScoreOracle, device: torch.device) -> ScoreOracle:
    names = ("scores", "reached", "freedom", *TERMS)
    return replace(oracle, **{name: getattr(oracle, name).to(device) for name in names})


def _gate(name: str, ratio: Tensor, got: Tensor, expected: Tensor) -> GateResult:
    flat = ratio.nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    if not len(flat):
        return GateResult(gate=name, ratio=0.0)
    at = int(flat.argmax())
    return GateResult(gate=name, ratio=float(flat[at]), where=_place(divmod(at, got.shape[1]), got, expected))


def _row_gate(name: str, ratio: Tensor, each: Tensor, got: Tensor, expected: Tensor) -> GateResult:
    """A gate of whole requests points at the worst element of the worst one."""
    if not len(ratio):
        return GateResult(gate=name, ratio=0.0)
    request = int(ratio.argmax())
    place = request, int(each[request].argmax())
    return GateResult(gate=name, ratio=float(ratio[request]), where=_place(place, got, expected))


def _place(place: tuple[int, int], got: Tensor, expected: Tensor) -> Location:
    return Location(request=place[0], position=place[1], got=float(got[place]), expected=float(expected[place]))
