"""What a step on a pool of states may leave: its outputs and the slots that it writes, and of all others every bit."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..answers import Answer
from ..contract import PRECISION_OF_DTYPE, Contract
from ..operation import Judged
from ..perturbed import Spread, perturbed_gates, perturbed_together
from ..phases import phase
from ..record import GateResult, Location
from ._kda_gates import exact_gate, placed, precision_of
from ._kda_recurrence import Tokens, kda_recurrence, sites_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOracle:
    """What an answer is held against.

    Attributes:
        tokens: Of the sequences that start from a slot; ``kept`` is what they store.
        heads: Value heads whose values are judged; all are where none may be written.
        rows: ``[T']``, rows of ``out`` of those tokens.
        slots: ``[M]``, where what is kept goes.
        before: The pool as it was.
        dtype: Of the inputs.
        seed: Of the noise.
        exact: ``bits``, ``near`` or None.
    """

    tokens: Tokens
    heads: Sequence[int]
    rows: Tensor
    slots: Tensor
    before: Tensor
    dtype: str
    seed: int
    exact: str | None = None
    _spreads: dict[str, dict[str, Spread]] = field(default_factory=dict)

    def spreads(self, contract: Contract) -> dict[str, Spread]:
        """By result, how honest kernels with this contract scatter."""
        sites = sites_of(contract, PRECISION_OF_DTYPE[self.dtype])
        known = repr(sorted(sites.items()))
        if known not in self._spreads:
            # the runs of the oracle itself, which wait for a contract
            with phase("oracle", self.tokens.v.device):
                found = perturbed_together(
                    lambda rounded, runs: kda_recurrence(self.tokens, rounded, runs), sites, seed=self.seed
                )
            self._spreads[known] = {name: found[name] for name in ("out", "checkpoints")}
        return self._spreads[known]


def judge_step(oracle: StepOracle, answer: Answer, contract: Contract) -> Judged:
    """G1 finite values, G2 slots that nobody may write, G3 rows of no sequence, then the perturbed oracle.

    Args:
        oracle: Of the case.
        answer: ``out``, ``[T, HV, V]``, and the pool afterwards, ``[slots, HV, K, V]``.
        contract: What the kernel promised.
    """
    out, pool = (one.to(oracle.before.device) for one in answer)
    spreads, bounds = oracle.spreads(contract), oracle.tokens.bounds
    got = {"out": out[oracle.rows][:, oracle.heads], "checkpoints": pool[oracle.slots][:, oracle.heads]}
    formats = {name: precision_of(value) for name, value in got.items()}
    sequences = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    perturbed = perturbed_gates(got, spreads, stored=formats, sequences=sequences)
    gates = [gate for gate in perturbed if gate.gate.startswith("G1")]
    gates += [_untouched(oracle, pool), _nobody(oracle, out)]
    if oracle.exact is not None:
        scale = oracle.tokens.scale
        gates += [exact_gate(name, got[name], spreads[name].exact, scale, oracle.exact) for name in got]
    gates += [gate for gate in perturbed if not gate.gate.startswith("G1")]
    return Judged(gates=[_placed(gate, oracle) for gate in gates], rows=len(oracle.rows) * len(oracle.heads))


def _placed(gate: GateResult, oracle: StepOracle) -> GateResult:
    """Its row by number in the answer, its slot in the pool; what is kept is the pool."""
    gate = placed(gate, oracle.heads)
    where, name = gate.where, gate.gate.replace("checkpoints", "state_pool")
    if where is not None and where.position is not None:
        where = replace(where, position=None, slot=int(oracle.slots[where.position]))
    elif where is not None and where.token is not None and "no sequence" not in name:
        where = replace(where, token=int(oracle.rows[where.token]))
    return replace(gate, gate=name, where=where, text=gate.text.replace("checkpoints", "state_pool"))


def _untouched(oracle: StepOracle, pool: Tensor) -> GateResult:
    """G2: the bits of every slot that is not written."""
    others = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    others[oracle.slots] = False
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.element_size()]
    before, after = (one[others].contiguous().view(word) for one in (oracle.before, pool))
    differs = (before != after).flatten(1).any(1)
    if not bool(differs.any()):
        return GateResult(gate="G2 other slots", ratio=0.0)
    slot = int(others.nonzero()[int(differs.nonzero()[0]), 0])
    text = f"slot {slot} of state_pool was written, which no token of the step owns"
    return GateResult(gate="G2 other slots", ratio=math.inf, where=Location(slot=slot), text=text)


def _nobody(oracle: StepOracle, out: Tensor) -> GateResult:
    """G3: rows of padding, and past the last sequence, are 0."""
    free = torch.ones(len(out), dtype=torch.bool, device=out.device)
    free[oracle.rows] = False
    wrong = free & (out != 0).flatten(1).any(1)
    if not bool(wrong.any()):
        return GateResult(gate="G3 rows of no sequence", ratio=0.0)
    token = int(wrong.nonzero()[0])
    text = f"out of row {token} must be 0, which belongs to padding or to no sequence"
    return GateResult(gate="G3 rows of no sequence", ratio=math.inf, where=Location(token=token), text=text)
