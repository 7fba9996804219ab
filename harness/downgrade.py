"""``PRECISION_DOWNGRADE``: right mathematics in a lower precision than the contract declares, named as such.

The verdict is reached over all cases of a run that a kernel judged under one contract. A wrong kernel may fit a looser
contract on one family, a missing key on diffuse data for instance, so a downgrade is named only if the kernel fails its
contract and, under the contract with one field a step lower, on every case of every family

* passes all gates,
* uses up what the field allows: the median over the families of its row errors lies between 0.3 and 1.1 of the
  prediction, families aside where the field hardly changes the prediction, and
* has no bias: the pooled scale error stays within three of its standard deviations, beside what the format itself does
  in one direction.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, pstdev
from typing import cast

import torch
from torch import Tensor

from .case import Case
from .contract import Contract, Precision
from .execution import Execution, Stop, execute
from .families import EXACT_FAMILIES
from .gates import Roundoffs, Variances, judge_answers, nonfinite_gates
from .operation import AttentionOperation, Kernel, Operation
from .record import Record, Verdict
from .runner import Exam
from .strata import BIAS_TO_NEAREST, POOLED_SIGMAS, ScaleRows, pooled_scale

# one step down, nearest first: where two formats may follow, the size of the errors tells which one it is
STEPS: dict[str, dict[Precision, tuple[Precision, ...]]] = {
    "p": {"fp32": ("tf32", "bf16"), "fp16": ("bf16", "e4m3"), "bf16": ("e4m3",)},
    "logits": {"fp32": ("fp16", "bf16")},
    "qk_acc": {"fp32": ("tf32", "bf16")},
    "pv_acc": {"fp32": ("fp16", "bf16")},
    "projected": {"fp32": ("fp16", "bf16"), "fp16": ("bf16", "e4m3"), "bf16": ("e4m3",)},
    "splits_store": {"fp32": ("fp16", "bf16"), "fp16": ("bf16",)},
}
# one switch of a library cuts the operands of both products
TOGETHER: tuple[tuple[tuple[str, ...], Precision, Precision], ...] = ((("qk_acc", "p"), "fp32", "tf32"),)
# without each of these a wrong kernel of some kind fits: they show denominators, constant factors, single keys
NEEDED_FAMILIES = frozenset({"diffuse", "constant-v", "peaked"})
LEAST_RMS, MOST_RMS = 0.3, 1.1
MOST_BIAS = 3.0
# a prediction that the lower field raises by less says nothing about the field
LEAST_SENSITIVITY = 2.0
FEWEST_MEASURED_FAMILIES = 1
LEAST_LOG = 1e-6
JUDGED = (Verdict.PASS, Verdict.NUMERIC)
NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.INVALID_CASE)

Ask = Callable[[Exam], Execution | Stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How an answer fits a lower contract.

    Attributes:
        passed: Whether all gates hold.
        rms: Median error of its rows in units of what the lower contract predicts; None where too few rows show it, or
            where it predicts more than the values themselves, which says nothing of an error.
        sensitive: Whether the lower field changes that prediction much.
        bias: Pooled scale error over all rows, in standard deviations under the lower contract.
    """

    passed: bool
    rms: float | None
    sensitive: bool
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One case: whether the declared contract holds, and the fit of each lower one, by its label."""

    declared: bool
    lower: Mapping[str, Fit]


def downgraded(contract: Contract) -> list[tuple[str, Contract]]:
    """The contracts one step below, each with a label such as ``p: declared bf16, fits e4m3``."""
    found = []
    # the products of half-precision operands are exact in float32: there is nothing to cut
    fields = [field for field in STEPS if field != "qk_acc" or contract.p == "fp32"]
    for field in fields:
        declared = getattr(contract, field)
        for lower in STEPS[field].get(declared, ()):
            found.append((f"{field}: declared {declared}, fits {lower}", contract.promising(**{field: lower})))
    for names, declared, lower in TOGETHER:
        if all(getattr(contract, name) == declared for name in names):
            label = f"{' and '.join(names)}: declared {declared}, fit {lower}"
            found.append((label, contract.promising(**dict.fromkeys(names, lower))))
    return found


def name_downgrade(evidence_by_family: Mapping[str, Sequence[Evidence]]) -> str | None:
    """The label of the lower contract that explains a run, or None if none does.

    Args:
        evidence_by_family: Every judged case of a kernel under one contract.
    """
    every = [evidence for cases in evidence_by_family.values() for evidence in cases]
    if not NEEDED_FAMILIES <= {family for family, cases in evidence_by_family.items() if cases}:
        return None
    if all(evidence.declared for evidence in every):
        return None
    labels = dict.fromkeys(label for evidence in every for label in evidence.lower)
    spread = {label: _spread(label, evidence_by_family) for label in labels if _explains(label, evidence_by_family)}
    # of several that fit, the one that predicts alike how large the errors are in each family
    return min(spread, key=lambda label: spread[label], default=None)


def _explains(label: str, evidence_by_family: Mapping[str, Sequence[Evidence]]) -> bool:
    """Whether every case fits, and the families that are sensitive to the field use it up."""
    fits = [evidence.lower.get(label) for cases in evidence_by_family.values() for evidence in cases]
    if any(fit is None or not fit.passed or fit.bias > MOST_BIAS for fit in fits):
        return False
    medians = _medians(label, evidence_by_family, sensitive=True)
    return len(medians) >= FEWEST_MEASURED_FAMILIES and LEAST_RMS < median(medians) <= MOST_RMS


def _spread(label: str, evidence_by_family: Mapping[str, Sequence[Evidence]]) -> float:
    """Standard deviation over the families of the logarithm of their row errors, in units of the prediction."""
    medians = _medians(label, evidence_by_family, sensitive=False)
    return pstdev(math.log(max(rms, LEAST_LOG)) for rms in medians)


def _medians(label: str, evidence_by_family: Mapping[str, Sequence[Evidence]], *, sensitive: bool) -> list[float]:
    """Of the row errors of each family under one lower contract; if asked, of its sensitive cases alone."""
    medians = []
    for cases in evidence_by_family.values():
        fits = [evidence.lower[label] for evidence in cases]
        measured = [fit.rms for fit in fits if fit.rms is not None and (fit.sensitive or not sensitive)]
        if measured:
            medians.append(median(measured))
    return medians


def reassess(
    operation: Operation, kernel: Kernel, cases: Sequence[Case], records: Sequence[Record], device: torch.device
) -> list[Record]:
    """The records of a run, ``NUMERIC`` turned into ``PRECISION_DOWNGRADE`` where a lower precision explains them all.

    Args:
        operation: Of the kernel.
        kernel: The candidate, asked again on the judged cases if any verdict is ``NUMERIC``.
        cases: Of the run.
        records: Of the run; those of other kernels and operations are handed back as they are.
        device: Where to run.
    """

    def ask(exam: Exam) -> Execution | Stop:
        return execute(operation, kernel, exam.case, exam.inputs, device)

    return reassess_answers(operation, kernel.name, ask, cases, records, device)


def reassess_answers(
    operation: Operation,
    kernel_name: str,
    ask: Ask,
    cases: Sequence[Case],
    records: Sequence[Record],
    device: torch.device,
) -> list[Record]:
    """The same for a kernel that lives elsewhere; ``ask`` runs it on the inputs of an exam."""
    if not isinstance(operation, AttentionOperation):
        # the own gates of an operation tell no lower contract from a fault
        return list(records)
    by_id = {case.id: case for case in cases}
    own = [record for record in records if (record.op, record.kernel) == (operation.name, kernel_name)]
    own = [record for record in own if record.case["id"] in by_id and record.verdict not in NOT_JUDGED]
    explained: dict[str, str] = {}
    # cases of one dtype are under one contract; those that failed come first, since they rule out most at once
    for dtype in dict.fromkeys(record.case["dtype"] for record in own):
        group = [record for record in own if record.case["dtype"] == dtype]
        failed = [record for record in group if record.verdict is Verdict.NUMERIC]
        if failed and all(record.verdict in JUDGED for record in group):
            group.sort(key=lambda record: record.verdict is Verdict.PASS)
            label = _explanation(operation, ask, [by_id[record.case["id"]] for record in group], device)
            explained |= {record.case["id"]: label for record in failed if label is not None}
    return [
        replace(record, verdict=Verdict.PRECISION_DOWNGRADE, text=f"{explained[record.case['id']]}; {record.text}")
        if record in own and record.verdict is Verdict.NUMERIC and record.case["id"] in explained
        else record
        for record in records
    ]


def _explanation(operation: Operation, ask: Ask, cases: Iterable[Case], device: torch.device) -> str | None:
    """The lower contract that explains the answers to all cases, if there is one."""
    evidence: dict[str, list[Evidence]] = {}
    alive: list[str] | None = None
    for case in cases:
        exam = Exam(operation, case, device)
        execution = ask(exam)
        if isinstance(execution, Stop):
            return None
        found = case_evidence(exam, execution, alive)
        alive = [label for label, fit in found.lower.items() if fit.passed and fit.bias <= MOST_BIAS]
        if not alive:
            return None
        evidence.setdefault(case.family, []).append(found)
    return name_downgrade(evidence)


def case_evidence(exam: Exam, execution: Execution, labels: Sequence[str] | None = None) -> Evidence:
    """How an answer fits the declared contract and the lower ones.

    Args:
        exam: The case.
        execution: The kernel's answer to it.
        labels: Of the lower contracts that are still in question; all if None.
    """
    contract = execution.contract
    lower = {name: low for name, low in downgraded(contract) if labels is None or name in labels}
    declared = _fit(exam, execution, contract)
    out, lse, *more = execution.first
    outline = cast(AttentionOperation, exam.operation).outline(exam.case)
    if not all(gate.passed for gate in nonfinite_gates(out, lse, outline, *more)):
        return Evidence(declared=False, lower={})
    fits = {name: _fit(exam, execution, low) for name, low in lower.items()}
    return Evidence(declared=declared.passed, lower={name: _sensitive(fit, declared) for name, fit in fits.items()})


def _fit(exam: Exam, execution: Execution, contract: Contract) -> Fit:
    family = exam.case.family
    out, lse, *more = execution.first
    highest = more[0] if more else None
    answers = exam.answers_for(contract)
    tally = judge_answers(out, lse, answers, contract=contract, family=family, max_logits=highest)
    exact = family in EXACT_FAMILIES
    return Fit(
        passed=all(gate.passed for gate in tally.results()),
        rms=None if exact or not _predicts(exam, contract) else tally.median_rms,
        sensitive=False,
        bias=0.0 if exact else _bias(exam, out, contract),
    )


def _predicts(exam: Exam, contract: Contract) -> bool:
    """Whether half of the rows are predicted to err by less than their own size, which no weights exceed."""
    shares = []
    for rows, c in exam.answers_for(contract):
        size = c.magnitude.square().sum(-1)
        shares.append((Variances.of(c, Roundoffs.of(contract, rows)).total / size)[size > 0].flatten().cpu())
    every = torch.cat(shares) if shares else torch.empty(0)
    return bool(len(every) and every.median() < 1)


def _bias(exam: Exam, out: Tensor, contract: Contract) -> float:
    """Pooled scale error of all rows in standard deviations, beside what the format itself does in one direction.

    Truncated operands take the edge off all logits, weights rounded to nearest have a bias of the second order. Sums of
    low precision are no excuse.
    """
    blocks = []
    for rows, c in exam.answers_for(contract):
        got, u = out[rows.tokens][:, rows.heads].to(c.out.device).double(), Roundoffs.of(contract, rows)
        scale = ScaleRows.of(c, u, rows, got)
        own = u.cut * c.scale_cut + (0.0 if u.from_p else BIAS_TO_NEAREST * u.p**2)
        # the gate has four drifts beside its deviations, and the bias is measured in those
        drift = own.flatten() * POOLED_SIGMAS / MOST_BIAS / 4
        blocks.append(replace(scale, drift=torch.where(scale.used, drift, 0.0)))
    # a float64 contract has no margin beside the deviation
    pooled = {gate.gate: gate for gate in pooled_scale(blocks, contract.promising(p="fp64"))}
    gate = pooled.get("G6 pooled scale by all")
    return 0.0 if gate is None else POOLED_SIGMAS * gate.ratio


def _sensitive(fit: Fit, declared: Fit) -> Fit:
    """The fit, marked if the lower contract predicts much larger errors than the declared one."""
    if fit.rms is None or declared.rms is None:
        return fit
    return replace(fit, sensitive=declared.rms >= LEAST_SENSITIVITY * fit.rms)
