"""Other forms of the same question to a kernel of the gated delta rule, which must get the same answer.

``later tokens``        what follows a token does not reach its bits, finite or not in the chunk or the sequence
``permute sequences``   another order of the pack: equal bits if the contract says batch invariant, else the gates
``split sequences``     each sequence in two calls with the state carried over: as good an answer
``zero state``          initial states of zeros instead of none: as good an answer
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..answers import Answer, dtype_of
from ..case import Case
from ..contract import Contract
from ..metamorphic.rearranged import Rearranged, asked
from ..operation import Ask
from ..poison import same_bits
from ..record import GateResult, Location
from ..replays import elsewhere
from ._kda_inputs import TOKENS

# they are about layout, not values: one family asks them
FAMILIES = ("diffuse",)


def ask_kda(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract) -> Rearranged | None:
    """All relations that apply to a case; see ``operation.RearrangedOperation``."""
    if case.family not in FAMILIES or sum(case.sizes["seq_lens"]) == 0:
        return None
    gates: list[GateResult] = []
    answers: dict[tuple[str, int], tuple[Answer, ...]] = {}
    if contract.deterministic:
        with asked("later tokens", gates):
            gates.append(_later_tokens(case, arguments, ask, first))
    with asked("permute sequences", gates):
        permuted = _permuted(case, arguments, ask)
        if contract.batch_invariant and contract.deterministic:
            same = all(same_bits(one, other) for one, other in zip(permuted, first, strict=True))
            text = "" if same else "bits depend on the order of the sequences"
            gates.append(GateResult(gate="G8 permute sequences", ratio=0.0 if same else math.inf, text=text))
        else:
            answers["permute sequences", 0] = (permuted,)
    if case.sizes["state_dtype"] == "float32":
        with asked("split sequences", gates):
            answers["split sequences", 0] = (_split(case, arguments, ask, first),)
    if arguments["initial_state"] is None:
        with asked("zero state", gates):
            answers["zero state", 0] = (_from_zeros(case, arguments, ask, first),)
    return Rearranged(gates=tuple(gates), answers=answers)


def _bounds(case: Case) -> list[int]:
    return [0, *itertools.accumulate(case.sizes["seq_lens"])]


def _later_tokens(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer) -> GateResult:
    """Change the second part of each sequence, gates included; the first part keeps its bits."""
    bounds = _bounds(case)
    earlier = torch.zeros(len(first[0]), dtype=torch.bool)
    for at, (start, stop) in enumerate(itertools.pairwise(bounds)):
        # off the middle, so that it is no edge of a block
        earlier[start : start + (stop - start) // 2 + at % 3] = stop - start > 1
        earlier[stop:] = False
    earlier = earlier.to(first[0].device)
    changed = dict(arguments)
    for name in TOKENS:
        # a gate and a strength keep their sign
        factor = torch.where(earlier, 1.0, 0.5 if name in ("g", "beta") else -1.0).to(arguments[name].dtype)
        # in memory as it was: torch computes elements side by side to other bits than apart
        changed[name] = elsewhere(arguments[name])
        changed[name].mul_(factor.view(-1, *[1] * (changed[name].dim() - 1)))
    out = ask(case, changed)[0]
    differs = (out != first[0]).flatten(1).any(1) & earlier
    if not bool(differs.any()):
        return GateResult(gate="G8 later tokens", ratio=0.0)
    token = int(differs.nonzero()[0])
    text = f"out of token {token} depends on tokens that follow it"
    return GateResult(gate="G8 later tokens", ratio=math.inf, where=Location(token=token), text=text)


def reversed_sequences(case: Case, arguments: dict[str, Any]) -> tuple[Case, Tensor, dict[str, Any]]:
    """The case with its sequences in reverse order, which row each of its rows was, and its tokens and offsets."""
    bounds, lens = _bounds(case), case.sizes["seq_lens"]
    order = list(range(len(lens)))[::-1]
    parts = [torch.arange(bounds[at], bounds[at + 1]) for at in order]
    tail = torch.arange(bounds[-1], len(arguments["q"]))
    rows = torch.cat([*parts, tail]).to(arguments["q"].device)
    moved = arguments | {name: elsewhere(arguments[name]) for name in TOKENS}
    for name in TOKENS:
        moved[name].copy_(arguments[name][rows])
    offsets = torch.tensor([0, *itertools.accumulate(lens[at] for at in order)])
    moved["cu_seqlens"] = offsets.to(arguments["cu_seqlens"])
    return replace(case, sizes=case.sizes | {"seq_lens": [lens[at] for at in order]}), rows, moved


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the sequences in reverse order, put back."""
    turned, rows, moved = reversed_sequences(case, arguments)
    if arguments["initial_state"] is not None:
        moved["initial_state"] = elsewhere(arguments["initial_state"])
        moved["initial_state"].copy_(arguments["initial_state"].flip(0))
    if arguments["checkpoints"] is not None:
        moved["checkpoints"] = arguments["checkpoints"].clone()
        moved["checkpoints"][:, 0] = len(case.sizes["seq_lens"]) - 1 - moved["checkpoints"][:, 0]
    out, final, kept = ask(turned, moved)
    back = torch.empty_like(out)
    back[rows] = out
    return back, final.flip(0), kept


def _split(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer) -> Answer:
    """The answer of two calls, each with a part of every sequence."""
    bounds, lens = _bounds(case), case.sizes["seq_lens"]
    cuts = [length * 2 // 5 for length in lens]
    device, out = arguments["q"].device, first[0].clone()
    state = arguments["initial_state"]
    for part in range(2):
        ranges = [
            (start, start + cut) if part == 0 else (start + cut, stop)
            for start, stop, cut in zip(bounds, bounds[1:], cuts, strict=False)
        ]
        rows = torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)
        own = [stop - start for start, stop in ranges]
        called = arguments | {name: arguments[name][rows] for name in TOKENS}
        called |= {"initial_state": state, "checkpoints": None}
        called["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(own)]).to(arguments["cu_seqlens"])
        sizes = {"seq_lens": own, "tail": 0, "checkpoints": "none", "initial": state is not None}
        got, state, _ = ask(replace(case, sizes=case.sizes | sizes), called)
        out[rows] = got
    return out, state, first[2]


def _from_zeros(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer) -> Answer:
    """The answer to initial states that hold nothing."""
    dtype = dtype_of(case.sizes["state_dtype"])
    zeros = torch.zeros(first[1].shape, dtype=dtype, device=first[1].device)
    given = replace(case, sizes=case.sizes | {"initial": True})
    return ask(given, arguments | {"initial_state": zeros})
