"""Other forms of the same step to a kernel on a pool of states, which must get the same answer.

``relabel slots``       every slot one further, with other things in those that nobody reads: equal bits
``accepted counts``     every sequence starts from the next column, where its slot has moved: equal bits
``permute sequences``   another order of the sequences: equal bits if the contract says batch invariant, else the gates

Tables lie where they lay, so that whoever keeps them by their addresses is wrong.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..answers import Answer
from ..case import Case
from ..contract import Contract
from ..metamorphic.rearranged import Rearranged, asked
from ..operation import Ask
from ..poison import same_bits
from ..record import GateResult
from ..replays import elsewhere
from ._kda_relations import reversed_sequences
from ._kda_step_inputs import table_of

# they are about layout, not values: one family asks them
FAMILIES = ("diffuse",)


def ask_step(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract) -> Rearranged | None:
    """All relations that apply to a case; see ``operation.RearrangedOperation``."""
    if case.family not in FAMILIES:
        return None
    gates: list[GateResult] = []
    answers: dict[tuple[str, int], tuple[Answer, ...]] = {}
    if contract.deterministic:
        with asked("relabel slots", gates):
            gates.append(_relabelled(case, arguments, ask, first))
        if arguments["num_accepted"] is not None and case.sizes["columns"] > 1:
            with asked("accepted counts", gates):
                gates.append(_accepted(case, arguments, ask, first))
    if len(case.sizes["seq_lens"]) > 1:
        with asked("permute sequences", gates):
            permuted = _permuted(case, arguments, ask)
            if contract.batch_invariant and contract.deterministic:
                same = all(same_bits(one, other) for one, other in zip(permuted, first, strict=True))
                gates.append(_decided("permute sequences", "bits depend on the order of the sequences", same=same))
            else:
                answers["permute sequences", 0] = (permuted,)
    return Rearranged(gates=tuple(gates), answers=answers)


def written_slots(case: Case) -> list[int]:
    """Slots that a step writes."""
    return [slot for *_, slot in table_of(case).writes(case.sizes["seq_lens"])]


def moved(arguments: dict[str, Any]) -> dict[str, Any]:
    """Every slot one further, the last one first; what was NaN because nobody may read it is huge."""
    pool, table = arguments["state_pool"], arguments["slot_table"]
    other = elsewhere(pool)
    other.copy_(pool.nan_to_num(nan=1e30).roll(1, 0))
    return arguments | {"state_pool": other, "slot_table": torch.where(table < 0, -1, (table + 1) % len(pool))}


def next_columns(arguments: dict[str, Any]) -> dict[str, Any]:
    """Every slot one column further, the last column first, and so the one that each sequence starts from."""
    table, counts = arguments["slot_table"], arguments["num_accepted"]
    return arguments | {"slot_table": table.roll(1, 1), "num_accepted": counts % table.shape[1] + 1}


def _relabelled(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer) -> GateResult:
    out, pool = ask(case, moved(arguments))
    written = written_slots(case)
    same = same_bits(out, first[0]) and same_bits(pool.roll(-1, 0)[written], first[1][written])
    text = "bits depend on where slots lie, or on what lies in those that are not read"
    return _decided("relabel slots", text, same=same)


def _accepted(case: Case, arguments: dict[str, Any], ask: Ask, first: Answer) -> GateResult:
    """The states of all tokens are the same; those are compared that have a slot in both forms."""
    out, pool = ask(case, next_columns(arguments))
    table, pairs = table_of(case), []
    for sequence, token, slot in table.writes(case.sizes["seq_lens"]):
        other = table.rows[sequence][token - 1]
        pairs += [(slot, other)] if other >= 0 else []
    before, after = (list(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
    same = same_bits(out, first[0]) and same_bits(pool[after], first[1][before])
    return _decided("accepted counts", "bits depend on the column from which a sequence starts", same=same)


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the sequences in reverse order, put back; slots stay those of their sequences."""
    turned, rows, changed = reversed_sequences(case, arguments)
    for name in ("slot_table", "num_accepted"):
        changed[name] = None if changed[name] is None else changed[name].flip(0)
    out, pool = ask(turned, changed)
    back: Tensor = torch.empty_like(out)
    back[rows] = out
    return back, pool


def _decided(relation: str, text: str, *, same: bool) -> GateResult:
    return GateResult(gate=f"G8 {relation}", ratio=0.0 if same else math.inf, text="" if same else text)
