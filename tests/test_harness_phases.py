"""What a judgement's time is counted towards."""

import itertools
import time
from typing import Any

import pytest
import torch

from assay.harness import operations
from assay.harness.operation import CaseRequest
from assay.harness.operations import _kda_gates, _kda_step_gates
from assay.harness.phases import accounted, phase
from assay.harness.record import Record, Verdict
from assay.harness.report.terminal import spent_text
from assay.harness.runner import ExamRoom, run_case

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between two looks at the clock."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_phases_add_up_within_the_block_and_not_outside() -> None:
    with phase("oracle"):
        pass
    with accounted() as spent:
        for _ in range(3):
            with phase("kernel", CPU):
                pass
        with phase("inputs"):
            pass
    with phase("kernel"):
        pass
    assert spent.seconds == {"kernel": 3.0, "inputs": 1.0}


@pytest.mark.usefixtures("clock")
def test_a_phase_that_raises_is_counted() -> None:
    with accounted() as spent, pytest.raises(ValueError, match="broken"), phase("kernel"):
        raise ValueError("broken")
    assert spent.seconds == {"kernel": 1.0}


def test_a_record_tells_where_its_time_went() -> None:
    operation = operations.load("attention")
    request = CaseRequest(tier="smoke", seed=0, dtypes=("float32",))
    case = operation.cases(request)[0]
    kernel = next(kernel for kernel in operation.kernels() if kernel.name == "attention[torch]")
    room = ExamRoom()
    first, second = (run_case(operation, kernel, case, CPU, room=room) for _ in range(2))
    assert set(first.spent) == {"inputs", "kernel", "oracle"}
    # inputs and oracle are shared by the kernels of a case
    assert set(second.spent) == {"kernel"}
    assert sum(first.spent.values()) <= first.seconds + 1e-3


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("op", "gates"), [("kda", _kda_gates), ("kda_step", _kda_step_gates)])
def test_runs_of_a_perturbed_oracle_are_the_oracles(op: str, gates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    perturbed = gates.perturbed_together

    def slow(*arguments: Any, **options: Any) -> Any:
        for _ in range(1000):
            time.perf_counter()
        return perturbed(*arguments, **options)

    monkeypatch.setattr(gates, "perturbed_together", slow)
    operation = operations.load(op)
    case = operation.cases(CaseRequest(tier="smoke", seed=0, dtypes=("float32",)))[0]
    kernel = next(kernel for kernel in operation.kernels() if kernel.name == f"{op}[torch]")
    record = run_case(operation, kernel, case, CPU)
    assert record.verdict is Verdict.PASS
    assert record.spent["oracle"] > 1000 > record.seconds - sum(record.spent.values())


def test_a_report_gives_the_judge_what_the_phases_leave() -> None:
    def record(seconds: float, **spent: float) -> Record:
        return Record(
            op="attention", kernel="k", case={}, device="cpu", verdict=Verdict.PASS, seconds=seconds, spent=spent
        )

    records = [record(6.0, kernel=3.0, oracle=2.0), record(4.0, kernel=2.0, inputs=1.0)]
    assert spent_text(records) == "10 s of work (kernel 50%, oracle 20%, inputs 10%, judge 20%)"
    assert spent_text([record(4.0)]) == "4 s of work"
