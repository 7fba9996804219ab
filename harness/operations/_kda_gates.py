"""How far the answer of an honest kernel of the gated delta rule may be from the oracle's: see ``harness.perturbed``.

Beside the gates of the perturbed oracle stand those of what does not round at all: rows of no sequence are 0, a
sequence without tokens hands its state on, integers stay integers where keys are one-hot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..answers import Answer
from ..contract import PRECISION_OF_DTYPE, Contract, Precision
from ..operation import Judged
from ..perturbed import Spread, perturbed_gates, perturbed_together
from ..phases import phase
from ..record import GateResult, Location
from ._kda_recurrence import Tokens, kda_recurrence, sites_of

NAMES = ("out", "final state", "checkpoints")
# of integers that a gate and a norm may touch in their last bit; a wrong step is off by 1
NEAR = 2.0**-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaOracle:
    """What an answer is held against; the spread of honest kernels depends on their contract, and is found when asked.

    Attributes:
        tokens: Of the judged heads.
        heads: Value heads that are judged.
        dtype: Of the inputs.
        seed: Of the noise.
        undefined: Sequences whose tokens are NaN.
        exact: ``bits`` where nothing rounds, ``near`` where a last bit may, None elsewhere.
    """

    tokens: Tokens
    heads: Sequence[int]
    dtype: str
    seed: int
    undefined: Sequence[int] = ()
    exact: str | None = None
    _spreads: dict[str, dict[str, Spread]] = field(default_factory=dict)

    def spreads(self, contract: Contract) -> dict[str, Spread]:
        """By result, how honest kernels with this contract scatter."""
        sites = sites_of(contract, PRECISION_OF_DTYPE[self.dtype])
        known = repr(sorted(sites.items()))
        if known not in self._spreads:
            # the runs of the oracle itself, which wait for a contract
            with phase("oracle", self.tokens.v.device):
                self._spreads[known] = perturbed_together(
                    lambda rounded, runs: kda_recurrence(self.tokens, rounded, runs), sites, seed=self.seed
                )
        return self._spreads[known]


def judge_kda(oracle: KdaOracle, answer: Answer, contract: Contract) -> Judged:
    """G1 finite values, G3 of what does not round, then the gates of the perturbed oracle.

    Args:
        oracle: Of the case.
        answer: ``out``, ``[T, HV, V]``, ``final_state``, ``[N, HV, K, V]``, ``checkpoint_states``, ``[M, HV, K, V]``.
        contract: What the kernel promised.
    """
    device, tokens = oracle.tokens.v.device, oracle.tokens
    picked = torch.tensor(oracle.heads, device=device)
    whole, *stored = (one.to(device)[:, picked] for one in answer)
    end = tokens.bounds[-1]
    got = dict(zip(NAMES, (whole[:end], *stored), strict=True))
    spreads = oracle.spreads(contract)
    exact = {name: spreads[name].exact for name in NAMES}
    gates = _undefined(oracle, got)
    got = {name: _defined(oracle, name, value, exact[name]) for name, value in got.items()}
    formats: dict[str, Precision] = {name: precision_of(value) for name, value in got.items()}
    sequences = [slice(start, stop) for start, stop in zip(tokens.bounds, tokens.bounds[1:], strict=False)]
    sequences = [part for at, part in enumerate(sequences) if at not in oracle.undefined]
    perturbed = perturbed_gates(got, spreads, stored=formats, sequences=sequences)
    gates += [gate for gate in perturbed if gate.gate.startswith("G1")]
    gates += [_beside(whole[end:], end), *_handed_on(oracle, got)]
    if oracle.exact is not None:
        gates += [exact_gate(name, got[name], exact[name], tokens.scale, oracle.exact) for name in NAMES]
    gates += [gate for gate in perturbed if not gate.gate.startswith("G1")]
    return Judged(gates=[placed(gate, oracle.heads) for gate in gates], rows=end * len(oracle.heads))


def precision_of(value: Tensor) -> Precision:
    """The format in which a result is stored."""
    return PRECISION_OF_DTYPE[str(value.dtype).removeprefix("torch.")]


def _owners(oracle: KdaOracle, name: str) -> list[tuple[int | slice, int]]:
    """For each undefined sequence, where it shows in a result."""
    bounds, kept = oracle.tokens.bounds, oracle.tokens.kept
    if name == "out":
        return [(slice(bounds[at], bounds[at + 1]), at) for at in oracle.undefined]
    if name == "final state":
        return [(at, at) for at in oracle.undefined]
    return [(index, owner) for index, (owner, count) in enumerate(kept) if owner in oracle.undefined and count]


def _undefined(oracle: KdaOracle, got: dict[str, Tensor]) -> list[GateResult]:
    """What follows from NaN must be NaN."""
    if not oracle.undefined:
        return []
    gates = []
    for name, value in got.items():
        finite = [at for place, at in _owners(oracle, name) if not bool(value[place].isnan().all())]
        text = f"{name} of sequence {finite[0]} must be NaN, as its tokens are" if finite else ""
        where = Location(request=finite[0]) if finite else None
        gates.append(GateResult(gate=f"G1 {name} of NaN", ratio=math.inf if finite else 0.0, where=where, text=text))
    return gates


def _defined(oracle: KdaOracle, name: str, value: Tensor, exact: Tensor) -> Tensor:
    """The result with the right answer where NaN is."""
    owned = _owners(oracle, name)
    if not owned:
        return value
    value = value.clone()
    for place, _ in owned:
        value[place] = exact[place].to(value.dtype)
    return value


def _beside(rows: Tensor, end: int) -> GateResult:
    """Rows of no sequence are 0."""
    wrong = rows != 0
    name, text, where = "G3 rows of no sequence", "", None
    if bool(wrong.any()):
        at = [int(i) for i in wrong.nonzero()[0]]
        text = f"rows past the last sequence must be 0, got {float(rows[tuple(at)]):.6g} in row {end + at[0]}"
        where = Location(token=end + at[0], head=at[1], dim=at[2], got=float(rows[tuple(at)]), expected=0.0)
    return GateResult(gate=name, ratio=math.inf if text else 0.0, where=where, text=text)


def _handed_on(oracle: KdaOracle, got: dict[str, Tensor]) -> list[GateResult]:
    """States before any token are the initial ones, value for value."""
    initial, lengths = oracle.tokens.initial, oracle.tokens.lengths
    places = {"final state": [(at, at) for at, length in enumerate(lengths) if length == 0]}
    places["checkpoints"] = [(index, owner) for index, (owner, count) in enumerate(oracle.tokens.kept) if count == 0]
    gates = []
    for name, pairs in places.items():
        value, gate = got[name], f"G3 {name} handed on"
        wrong = [owner for index, owner in pairs if not torch.equal(value[index], initial[owner].to(value.dtype))]
        text = f"{name} of sequence {wrong[0]} before any token must be its initial state" if wrong else ""
        where = Location(request=wrong[0]) if wrong else None
        gates.append(GateResult(gate=gate, ratio=math.inf if wrong else 0.0, where=where, text=text))
    return gates


def exact_gate(name: str, got: Tensor, exact: Tensor, scale: float, how: str) -> GateResult:
    """G3: integers, times the scale in outputs, by their ``bits`` or ``near`` enough to be no other ones."""
    unit = abs(scale) if name == "out" else 1.0
    if how == "bits":
        ratio = torch.where(got == exact.to(got.dtype), 0.0, math.inf)
    else:
        # neither its rounding nor last bits of sums come near the middle between two integers
        whole = (exact / unit).round() * unit
        ratio = ((got.double() - whole).abs() / (unit * NEAR)).nan_to_num(nan=math.inf)
    if not ratio.numel():
        return GateResult(gate=f"G3 exact {name}", ratio=0.0)
    index = [int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape)]
    found, expected = float(got[tuple(index)]), float(exact[tuple(index)])
    where = replace(Location(**located(name, index)), got=found, expected=expected)
    text = f"{name} must be {expected:.9g} exactly, got {found:.9g}"
    worst = float(ratio[tuple(index)])
    return GateResult(gate=f"G3 exact {name}", ratio=worst, where=where, text=text if worst > 1 else "")


def located(name: str, index: list[int]) -> dict[str, int]:
    """An index into a result as fields of a ``Location``."""
    axes = {"out": ("token", "head", "dim"), "checkpoints": ("position", "head", "channel", "dim")}
    return dict(zip(axes.get(name, ("request", "head", "channel", "dim")), index, strict=True))


def placed(gate: GateResult, heads: Sequence[int]) -> GateResult:
    """Its head by number in the answer, where some are judged only."""
    if gate.where is None or gate.where.head is None:
        return gate
    return replace(gate, where=replace(gate.where, head=int(heads[gate.where.head])))
