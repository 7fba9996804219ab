"""G8: the same question put differently must get the same answer, bit for bit where no arithmetic may change.

Each relation rearranges the inputs of a case in a way that a right kernel cannot notice, asks again, and compares with
the first answer. Where the order of sums may change, the new answer is held to the gates of the rearranged case.

``relabel slots``         tokens lie in other physical slots, in the same order: equal bits
``unused content``        slots without a token, padding and guard bands hold a huge number, then 0: equal bits
``poisoned neighbours``   every other request is full of NaN: the remaining rows have equal bits
``scale values``          values times ``2^k``: outputs times ``2^k``, equal log-sum-exp
``permute requests``      equal bits if the contract says batch invariant, else as good an answer
``split keys``            keys cut in two calls (or in other chunks) and merged: as good an answer
``alone``                 a request, and a query, without company: equal bits, if the contract says batch invariant

A kernel that promises no determinism is held to the gates everywhere. Asking needs no oracle and may happen where the
kernel lives; judging needs no kernel.
"""

import math
import warnings
from dataclasses import replace

import torch

from ...reference.attention import merge_states
from ..answers import Answer, copied
from ..case import Case
from ..contract import UNIT_ROUNDOFF, Contract
from ..conventions import Conventions
from ..gates import judge, nonfinite_gates
from ..interpreter import no_interpreted_bfloat16
from ..layouts import prepared, relocated, restated, settled
from ..operation import AttentionOperation, Inputs, Kernel
from ..phases import phase
from ..poison import poisoned_allocations, same_bits
from ..record import GateResult, Location
from ..structure import misshapen
from . import attention, masked_mha, mla_prefill, sparse_mla
from .moves import Moves, Part
from .rearranged import BrokenError, MisshapenError, Rearranged, RefusedError, what_it_raises
from .relations import RELATIONS, Question, Scene, scaled_back

MOVES: dict[str, Moves] = {
    "attention": attention.MOVES,
    "masked_mha": masked_mha.MOVES,
    "mla_prefill": mla_prefill.MOVES,
    "sparse_mla": sparse_mla.MOVES,
}
# elements [rows, keys, dims] of a rearranged case that the oracle answers for; above it rows are sampled
ROW_BUDGET = 1 << 26


def metamorphic_gates(
    operation: AttentionOperation, kernel: Kernel, case: Case, device: torch.device, first: Answer, contract: Contract
) -> list[GateResult]:
    """Ask the kernel all rearrangements of a case and judge; one result for each relation that applies.

    Args:
        operation: To which the case belongs.
        kernel: The candidate.
        case: The inputs; rearrangements are drawn from its seed.
        device: Where to run.
        first: The kernel's answer to the case, ``out`` and ``lse`` in the oracle's conventions, already judged.
        contract: What the kernel promised.

    Raises:
        NotImplementedError: If no moves are written for the operation.
    """
    inputs = operation.inputs(case, device)
    again = ask_again(operation, kernel, case, inputs, device, first, contract)
    return judge_again(operation, case, inputs, contract, kernel.conventions, again)


def ask_again(
    operation: AttentionOperation,
    kernel: Kernel,
    case: Case,
    inputs: Inputs,
    device: torch.device,
    first: Answer,
    contract: Contract,
    home: Inputs | None = None,
) -> Rearranged:
    """The kernel's side: ask, and compare bits; no oracle takes part.

    Args:
        operation: To which the case belongs.
        kernel: The candidate.
        case: The inputs.
        inputs: The inputs themselves, the oracle's; left as they were.
        device: Where they lie.
        first: The kernel's answer to the case, in the oracle's conventions.
        contract: What the kernel promised.
        home: What the kernel was given when it gave that answer: where its inputs lie in these questions, too.
    """
    scene = _scene(operation, case, inputs, contract, kernel.conventions)
    gates, answers = [], {}
    for name, relation in RELATIONS.items():
        found = None
        for at, question in enumerate(relation(scene)):
            try:
                got = tuple(_ask(operation, kernel, part, question, contract, device, home) for part in question.parts)
            except RefusedError:
                break
            except BrokenError as error:
                gates.append(error.of(name))
                break
            finally:
                inputs.ledger.restore()
            same = _same_bits(question, got, first, contract)
            if same is None:
                answers[name, at] = got
                continue
            found = same
            if not found.passed:
                break
        # what the oracle is to decide is reported once, with its decision
        if found is not None and not (found.passed and any(name == asked for asked, _ in answers)):
            gates.append(_named(name, found, scene))
    return Rearranged(gates=tuple(gates), answers=answers)


def judge_again(
    operation: AttentionOperation,
    case: Case,
    inputs: Inputs,
    contract: Contract,
    conventions: Conventions,
    again: Rearranged,
) -> list[GateResult]:
    """The oracle's side: hold the answers that bits do not decide to the gates of their rearranged cases.

    Args:
        operation: To which the case belongs.
        case: The inputs.
        inputs: The inputs themselves; left as they were.
        contract: What the kernel promised.
        conventions: Of the kernel.
        again: What it answered.
    """
    scene = _scene(operation, case, inputs, contract, conventions)
    gates = list(again.gates)
    for name, relation in RELATIONS.items():
        if not any(name == asked for asked, _ in again.answers):
            continue
        found = None
        for at, question in enumerate(relation(scene)):
            got = again.answers.get((name, at))
            try:
                result = None if got is None else _judged(operation, question, got, contract, conventions)
            finally:
                inputs.ledger.restore()
            if result is not None and (found is None or result.ratio > found.ratio):
                found = result
        if found is not None:
            gates.append(_named(name, found, scene))
    return gates


def _scene(
    operation: AttentionOperation, case: Case, inputs: Inputs, contract: Contract, conventions: Conventions
) -> Scene:
    if operation.name not in MOVES:
        raise NotImplementedError(f"operation must be one of {', '.join(MOVES)}, got {operation.name}")
    outline = operation.outline(case)
    nan_rows = torch.zeros(outline.num_tokens, dtype=torch.bool) if outline.nan_rows is None else outline.nan_rows
    return Scene(
        case=case,
        inputs=inputs,
        contract=contract,
        moves=MOVES[operation.name],
        requests=outline.requests,
        defined=~nan_rows.cpu(),
        paged=conventions.cache != "slots",
    )


def _ask(
    operation: AttentionOperation,
    kernel: Kernel,
    part: Part,
    question: Question,
    contract: Contract,
    device: torch.device,
    home: Inputs | None,
) -> Answer:
    """The kernel's answer by value in the oracle's conventions, on memory full of NaN."""
    case, inputs = part
    reason = kernel.unsupported(case, device)
    if reason is not None:
        raise RefusedError(reason)
    outline = operation.outline(case)
    given = prepared(inputs, kernel, case, contract, outline)
    given = given if home is None else settled(given, home)
    if question.unused is not None:
        for buffer in given.ledger.buffers.values():
            if buffer.is_floating_point():
                buffer.masked_fill_(buffer.isnan(), min(question.unused, torch.finfo(buffer.dtype).max))
    with warnings.catch_warnings(), no_interpreted_bfloat16(), poisoned_allocations(math.nan), what_it_raises():
        # numpy, in which Triton's interpreter computes, remarks on the NaN of poisoned neighbours
        warnings.simplefilter("ignore", RuntimeWarning)
        with phase("kernel", device):
            answer = kernel.bind(given.arguments)()
    if (form := misshapen(answer, outline, contract, given)) is not None:
        raise MisshapenError(form)
    return restated(copied(answer), kernel.conventions, outline.empty_rows)


def _same_bits(question: Question, got: tuple[Answer, ...], first: Answer, contract: Contract) -> GateResult | None:
    """What bits say of an answer; None if they do not decide."""
    if question.bits == "need not":
        return None
    names = ("out", "lse", "max_logits")[: len(first)]
    for name, new, old in zip(names, got[0], first, strict=True):
        rows, place = question.rows.to(old.device), question.place.to(new.device)
        if new.shape[1:] != old.shape[1:] or new.dtype != old.dtype or len(new) < len(rows):
            text = f"{name} must be {old.dtype} with {len(rows)} rows, got {new.dtype} {tuple(new.shape)}"
            return _explained(question, GateResult(gate=name, ratio=math.inf, text=text))
        expected, found = old[rows], new[place]
        if name == "out":
            found = scaled_back(found, expected, question.power, contract)
        if not same_bits(found, expected):
            # bits that only may be equal settle the question when they are: the first answer has been judged
            if question.bits == "may" or not contract.deterministic:
                return None
            return _explained(question, _difference(name, found, expected, question.rows))
    return GateResult(gate="bits", ratio=0.0)


def _difference(name: str, got: torch.Tensor, expected: torch.Tensor, rows: torch.Tensor) -> GateResult:
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    wrong = got.contiguous().view(words) != expected.contiguous().view(words)
    index = [int(i) for i in wrong.nonzero()[0]]
    where = Location(
        token=int(rows[index[0]]),
        head=index[1],
        dim=index[2] if len(index) > 2 else None,
        got=float(got[tuple(index)]),
        expected=float(expected[tuple(index)]),
    )
    text = f"{int(wrong.sum())} of {wrong.numel()} elements of {name} differ"
    return GateResult(gate=name, ratio=math.inf, where=where, text=text)


def _judged(
    operation: AttentionOperation,
    question: Question,
    got: tuple[Answer, ...],
    contract: Contract,
    conventions: Conventions,
) -> GateResult:
    """The worst gate of an answer to a rearranged case; requests with a token that does not count are left out."""
    (case, inputs), (out, lse, *more) = question.whole, _merged(got)
    outline = operation.outline(case)
    if out.shape != (outline.num_tokens, outline.num_heads, outline.d_v):
        text = f"out must have {outline.num_tokens} rows, got shape {tuple(out.shape)}"
        return _explained(question, GateResult(gate="G0", ratio=math.inf, text=text))
    counts = torch.zeros(outline.num_tokens, dtype=torch.bool).index_fill(0, question.place, True)
    left_out = set(outline.requests[~counts].tolist())
    blocks = operation.rows(case, inputs.arguments, budget=ROW_BUDGET // outline.d_v)
    # a kernel that merges partial results of its own does so within each of the calls
    ends, at_will = question.ends, contract.splits_store is not None
    chosen = (
        block if ends is None or (at_will and not block.split_ends) else replace(block, split_ends=ends[block.request])
        for block in relocated(blocks, inputs.arguments, question.parts[0][0], conventions)
        if block.request not in left_out
    )
    if len(got) > 1:
        splits = None if contract.splits is None else contract.splits * len(got)
        # what each call hands out is rounded to its output, however fine the parts are that it merges itself
        stored = max((contract.splits_store or contract.out, contract.out), key=UNIT_ROUNDOFF.__getitem__)
        contract = contract.promising(splits_store=stored, splits=splits)
    gates = [] if left_out else nonfinite_gates(out, lse, outline, *more)
    highest = more[0] if more else None
    with phase("oracle", out.device):
        tally = judge(out, lse, chosen, contract=contract, family=case.family, max_logits=highest)
    gates += tally.results()
    worst = max(gates, key=lambda gate: gate.ratio, default=GateResult(gate="", ratio=0.0))
    text = "" if worst.passed else worst.text or f"{worst.gate} {worst.ratio:.3g} x its limit"
    return _explained(question, replace(worst, text=text))


def _merged(answers: tuple[Answer, ...]) -> Answer:
    """The merge in float64, rounded once to what a kernel hands out."""
    if len(answers) == 1:
        return answers[0]
    total, *others = [(out.double(), lse.double()) for out, lse in answers]
    for part in others:
        total = merge_states(*total, *part)
    out, lse = answers[0]
    return total[0].to(out.dtype), total[1].to(lse.dtype)


def _explained(question: Question, found: GateResult) -> GateResult:
    """The finding with what was done to provoke it."""
    return replace(found, text=f"{question.text}: {found.text}") if question.text and found.text else found


def _named(name: str, found: GateResult, scene: Scene) -> GateResult:
    """The finding under the name of its relation, its place with the owner of the token."""
    where = found.where
    if where is not None and where.request is None and where.token is not None:
        where = replace(where, request=int(scene.requests[where.token]))
    return replace(found, gate=f"G8 {name}", where=where, text=f"{name}: {found.text}" if found.text else "")
