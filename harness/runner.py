"""One kernel on one case: have it run, hold its answer against the oracle, make the record."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch

from .answers import Answer, at_hand
from .case import Case
from .companions import Companions
from .contract import Contract
from .execution import Execution, Stop, describe, execute
from .gates import judge_answers, nonfinite_gates, oracle_answers
from .layouts import relocated
from .metamorphic.gate import judge_again
from .metamorphic.rearranged import Rearranged
from .operation import AttentionOperation, GatedOperation, Kernel, Operation, Rows
from .phases import Spent, accounted, phase
from .record import GateResult, Record, RowErrors, Verdict

# elements [rows, keys, dims] that the oracle answers for in full; above it rows are sampled
ROW_BUDGET = {"cpu": 1 << 27, "cuda": 1 << 32}
# of a gate that holds an answer against the oracle; all others find wrong numbers
VERDICTS = {"G1": Verdict.NONFINITE, "G2": Verdict.WRITE_SCOPE}
# of what comes of a question put differently; all others find that the answer is another one
VERDICTS_AGAIN = {"G0": Verdict.STRUCTURE}
NEEDS_DEVICE = "too large for a CPU, needs a device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on a case and what it rests on."""

    verdict: Verdict
    text: str = ""
    gates: tuple[GateResult, ...] = ()
    rows_judged: int = 0
    rows: RowErrors = field(default_factory=RowErrors)


class Exam:
    """A case as every kernel meets it: the same inputs, and one oracle's answer, worked out when first asked for."""

    def __init__(self, operation: Operation, case: Case, device: torch.device) -> None:
        """Draw the inputs.

        Raises:
            ValueError: If the case describes none.
        """
        # the oracle is float64 throughout, and no product anywhere may be cut to tf32 behind a contract's back
        torch.set_float32_matmul_precision("highest")
        self.operation, self.case, self.device = operation, case, device
        with phase("inputs", device):
            self.inputs = operation.inputs(case, device)

    @cached_property
    def oracle(self) -> Any:
        """What the own gates of an operation hold an answer against."""
        if not isinstance(self.operation, GatedOperation):
            raise TypeError(f"operation must bring its own gates, got {self.operation.name}")
        with phase("oracle", self.device):
            return self.operation.oracle(self.case, self.inputs.arguments)

    def work_out(self) -> None:
        """Have the oracle answer now, while the inputs are in place."""
        _ = self.oracle if isinstance(self.operation, GatedOperation) else self.answers

    def forget(self) -> None:
        """Have the oracle answer anew when asked: the inputs have changed."""
        for name in ("oracle", "answers", "absorbed_answers"):
            vars(self).pop(name, None)

    @cached_property
    def answers(self) -> list[tuple[Rows, Companions]]:
        """The oracle's rows with their companions."""
        return self._answers(absorbed=False)

    @cached_property
    def absorbed_answers(self) -> list[tuple[Rows, Companions]]:
        """The same for kernels that absorb the projection of keys and values."""
        return self._answers(absorbed=True)

    def answers_for(self, contract: Contract) -> list[tuple[Rows, Companions]]:
        """Those that a kernel with this contract is held against."""
        return self.absorbed_answers if contract.absorbed else self.answers

    def _answers(self, *, absorbed: bool) -> list[tuple[Rows, Companions]]:
        operation = self.operation
        if not isinstance(operation, AttentionOperation):
            raise TypeError(f"operation must be judged by rows, got {operation.name}")
        budget = ROW_BUDGET[self.device.type] // operation.outline(self.case).d_v
        with phase("oracle", self.device):
            rows = operation.rows(self.case, self.inputs.arguments, budget=budget)
            return list(oracle_answers(rows, absorbed=absorbed))


class ExamRoom:
    """Hands out exams, and keeps the last one for the next kernel on the same case."""

    def __init__(self) -> None:
        """Start empty."""
        self._exam: Exam | None = None

    def exam(self, operation: Operation, case: Case, device: torch.device) -> Exam:
        """The exam of a case; its inputs are as drawn, whatever an earlier kernel did to them.

        Raises:
            ValueError: If the case describes no inputs.
        """
        held = self._exam
        if held is None or (held.operation, held.case, held.device) != (operation, case, device):
            # freed before the next is drawn: two production cases may not fit side by side
            self._exam = held = None
            self._exam = held = Exam(operation, case, device)
        else:
            held.inputs.ledger.restore()
        return held


def run_case(
    operation: Operation, kernel: Kernel, case: Case, device: torch.device, *, room: ExamRoom | None = None
) -> Record:
    """Judge ``kernel`` on ``case`` within this process; whatever the kernel does, the answer is a record.

    Args:
        operation: To which the case belongs.
        kernel: The candidate.
        case: The inputs.
        device: Where to run.
        room: Of a run in which several kernels take the same cases.
    """
    start = time.perf_counter()
    with accounted() as spent:
        try:
            finding = _find(operation, kernel, case, device, room or ExamRoom())
        except Exception as error:
            # kernels fail inside their own guards, so this is a fault of the judge, and is reported as one
            finding = Finding(verdict=Verdict.HARNESS_ERROR, text=describe(error))
    seconds = time.perf_counter() - start
    return make_record(operation, kernel.name, case, device, finding, seconds=seconds, spent=spent)


def make_record(
    operation: Operation,
    kernel_name: str,
    case: Case,
    device: torch.device,
    finding: Finding,
    *,
    seconds: float,
    spent: Spent | None = None,
) -> Record:
    """The finding with its circumstances."""
    return Record(
        op=operation.name,
        kernel=kernel_name,
        case=case.to_json(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        verdict=finding.verdict,
        text=finding.text,
        gates=list(finding.gates),
        rows_judged=finding.rows_judged,
        rows=finding.rows,
        seconds=round(seconds, 4),
        spent={name: round(part, 4) for name, part in spent.seconds.items()} if spent else {},
    )


def refuse(kernel: Kernel, case: Case, device: torch.device) -> Finding | None:
    """Why a case is not run here at all, or None."""
    if case.needs_device and device.type == "cpu":
        return Finding(verdict=Verdict.UNSUPPORTED, text=NEEDS_DEVICE)
    reason = kernel.unsupported(case, device)
    return None if reason is None else Finding(verdict=Verdict.UNSUPPORTED, text=reason)


def sit(operation: Operation, case: Case, device: torch.device, room: ExamRoom) -> Exam | Finding:
    """The exam of a case, or the finding that there is none."""
    try:
        return room.exam(operation, case, device)
    except ValueError as error:
        return Finding(verdict=Verdict.INVALID_CASE, text=str(error))


def _find(operation: Operation, kernel: Kernel, case: Case, device: torch.device, room: ExamRoom) -> Finding:
    refusal = refuse(kernel, case, device)
    if refusal is not None:
        return refusal
    exam = sit(operation, case, device, room)
    if isinstance(exam, Finding):
        return exam
    return assess(exam, execute(operation, kernel, case, exam.inputs, device))


def assess(exam: Exam, execution: Execution | Stop) -> Finding:
    """Hold what a kernel answered against the oracle: all gates, in the order in which a failure explains later ones.

    Args:
        exam: What was run; its inputs are unchanged.
        execution: What came of it.
    """
    if isinstance(execution, Stop):
        return Finding(verdict=execution.verdict, text=execution.text, gates=execution.gates)
    case, contract, operation = exam.case, execution.contract, exam.operation
    # a kernel that promises no determinism must pass with its last answer as well as with its first
    asked = [execution.first] if contract.deterministic else [execution.first, execution.last]
    held = _hold_attention if isinstance(operation, AttentionOperation) else _hold
    gates, judged = held(exam, execution, [at_hand(answer) for answer in asked])
    if not all(gate.passed for gate in gates):
        worst = _failed(gates)
        text = worst.text or f"{worst.gate}: {worst.ratio:.3g} x its limit"
        verdict = VERDICTS.get(worst.gate.split()[0], Verdict.NUMERIC)
        return Finding(verdict=verdict, text=text, gates=tuple(gates), **judged)
    verdict = Verdict.NONDETERMINISTIC
    gates += execution.gates
    again = execution.again
    if again is not None and all(gate.passed for gate in gates):
        verdict = Verdict.METAMORPHIC
        if isinstance(operation, AttentionOperation):
            gates += judge_again(operation, case, exam.inputs, contract, execution.conventions, again)
        else:
            gates += _hold_again(exam, contract, again)
    failed = [gate for gate in gates if not gate.passed]
    if not failed:
        return Finding(verdict=Verdict.PASS, gates=tuple(gates), **judged)
    verdict = VERDICTS_AGAIN.get(failed[0].gate.split()[0], verdict)
    return Finding(verdict=verdict, text=failed[0].text, gates=tuple(gates), **judged)


def _hold_attention(exam: Exam, execution: Execution, asked: list[Answer]) -> tuple[list[GateResult], dict[str, Any]]:
    """The gates of a softmax over keys: G1, and where all is finite the rows; what the finding says of the rows."""
    contract, operation = execution.contract, cast(AttentionOperation, exam.operation)
    out, lse, *more = asked[0]
    gates = nonfinite_gates(out, lse, operation.outline(exam.case), *more)
    if not all(gate.passed for gate in gates):
        return gates, {}
    oracle = exam.answers_for(contract)
    blocks = relocated([rows for rows, _ in oracle], exam.inputs.arguments, exam.case, execution.conventions)
    answers = list(zip(blocks, (c for _, c in oracle), strict=True))
    for out, lse, *more in asked:
        highest = more[0] if more else None
        tally = judge_answers(out, lse, answers, contract=contract, family=exam.case.family, max_logits=highest)
        gates += sorted(tally.results(), key=lambda gate: gate.gate)
    return gates, {"rows_judged": tally.rows_judged, "rows": tally.row_errors()}


def _hold(exam: Exam, execution: Execution, asked: list[Answer]) -> tuple[list[GateResult], dict[str, Any]]:
    """The gates that an operation brings."""
    operation, gates, rows = cast(GatedOperation, exam.operation), [], 0
    for answer in asked:
        judged = operation.judge(exam.case, exam.oracle, answer, execution.contract)
        gates += judged.gates
        rows = judged.rows
    return gates, {"rows_judged": rows}


def _hold_again(exam: Exam, contract: Contract, again: Rearranged) -> list[GateResult]:
    """What bits decided, and the worst gate of each answer in the form of the first; one result for each relation."""
    gates, operation = list(again.gates), cast(GatedOperation, exam.operation)
    for (name, _), parts in again.answers.items():
        judged = (operation.judge(exam.case, exam.oracle, at_hand(answer), contract) for answer in parts)
        worst = max((gate for one in judged for gate in one.gates), key=lambda gate: gate.ratio)
        gates.append(replace(worst, gate=f"G8 {name}", text=f"{name}: {worst.gate}, {worst.ratio:.3g} x its limit"))
    return gates


def _failed(gates: list[GateResult]) -> GateResult:
    return next(gate for gate in gates if not gate.passed)
