"""Admission of cases: one on which a null kernel passes, or every planted fault, would prove nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..answers import Answer
from ..case import Case
from ..layouts import result_dtype
from ..operation import Kernel, Operation
from ..record import Verdict
from ..runner import ExamRoom, run_case
from .kill_matrix import NOT_JUDGED, KillMatrix

Null = Callable[[Answer, dict[str, Any]], Answer]


def zeros(empty: Answer, arguments: dict[str, Any]) -> Answer:
    """Answer nothing: every result is 0."""
    return empty


def noise(empty: Answer, arguments: dict[str, Any]) -> Answer:
    """Answer normal values, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return tuple((torch.randn(one.shape, generator=generator) * 4).to(one) for one in empty)


def inputs_themselves(empty: Answer, arguments: dict[str, Any]) -> Answer:
    """Answer with the first floating argument, or the first of all, repeated or cut to the size of the first result."""
    first, *others = empty
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    source = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    values = source.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).flatten()
    copies = -(-first.numel() // max(1, values.numel()))
    return values.repeat(copies)[: first.numel()].view(first.shape).to(first), *others


NULL_KERNELS: tuple[Null, ...] = (zeros, noise, inputs_themselves)


def null_kernel(null: Null, operation: Operation, case: Case) -> Kernel:
    """A kernel that answers a case without computing anything."""
    outline, contract = operation.outline(case), operation.default_contract(case)
    dtypes = [result_dtype(result, contract) for result in outline.results]

    def bind(arguments: dict[str, Any]) -> Callable[[], Answer]:
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))

        def run() -> Answer:
            pairs = zip(outline.results, dtypes, strict=True)
            empty = tuple(torch.zeros(result.shape, dtype=dtype, device=device) for result, dtype in pairs)
            answer = zip(outline.results, null(empty, arguments), strict=True)
            # what is to be written in place is left as it is
            return tuple(arguments[result.name] if result.in_place else one for result, one in answer)

        return run

    return Kernel(name=getattr(null, "__name__", "null"), contract=lambda case: contract, bind=bind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Why a case belongs into the plan: no null kernel passes it, and it kills some of the planted faults."""

    case: Case
    passed_nulls: tuple[str, ...]
    kills: int
    judged: int

    @property
    def admitted(self) -> bool:
        """Whether the case proves anything; one too large for this machine is not held against."""
        return not self.judged or (not self.passed_nulls and self.kills > 0)


def admissions(operation: Operation, cases: list[Case], matrix: KillMatrix, device: torch.device) -> list[Admission]:
    """Judge the null kernels on every case, and count the kills of a complete kill matrix.

    Args:
        operation: Of the cases.
        cases: Those of the matrix.
        matrix: Made without stopping at the first kill.
        device: Where to run.
    """
    room, found = ExamRoom(), []
    for case in cases:
        kernels = [null_kernel(null, operation, case) for null in NULL_KERNELS]
        passed = [k.name for k in kernels if run_case(operation, k, case, device, room=room).verdict is Verdict.PASS]
        outcomes = [one for result in matrix.faults for one in result.outcomes if one.case_id == case.id]
        judged = [one for one in outcomes if one.verdict not in NOT_JUDGED]
        kills = sum(one.verdict is not Verdict.PASS for one in judged)
        found.append(Admission(case=case, passed_nulls=tuple(passed), kills=kills, judged=len(judged)))
    return found


def admission_table(found: list[Admission]) -> Table:
    """One line per family, and one per case that is not admitted."""
    table = Table(title="admission of cases", title_justify="left")
    for column in ("family", "cases", "null kernels that pass", "faults killed by a case", "not admitted"):
        table.add_column(column, justify="left" if column == "family" else "right", overflow="fold")
    for family in dict.fromkeys(one.case.family for one in found):
        mine = [one for one in found if one.case.family == family]
        nulls = sorted({name for one in mine for name in one.passed_nulls})
        kills = [one.kills for one in mine]
        outside = [one.case.id for one in mine if not one.admitted]
        spread = f"{min(kills)} to {max(kills)} of {max(one.judged for one in mine)}"
        table.add_row(family, str(len(mine)), ", ".join(nulls) or "none", spread, ", ".join(outside) or "none")
    return table
