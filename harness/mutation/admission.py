"""Admission of cases: one on which a null kernel passes, or every planted fault, would prove nothing."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..case import Case
from ..kernels import wrap_function
from ..operation import Operation
from ..record import Verdict
from ..runner import ExamRoom, run_case
from .kill_matrix import NOT_JUDGED, KillMatrix


def zeros(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Answer nothing: ``(0, 0)``."""
    q = arguments["q"]
    return q.new_zeros(*q.shape[:2], _value_width(arguments)), torch.zeros(q.shape[:2], device=q.device)


def noise(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Answer normal values, the same at every call."""
    out, lse = zeros(**arguments)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(one.shape, generator=generator).to(one) for one in (out, lse))  # type: ignore[return-value]


def first_queries(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Answer with the queries themselves, cut or padded to the width of a value."""
    out, lse = zeros(**arguments)
    width = min(out.shape[-1], arguments["q"].shape[-1])
    out[..., :width] = arguments["q"][..., :width]
    return out, lse


NULL_KERNELS = (zeros, noise, first_queries)


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
    kernels = [wrap_function(function, operation) for function in NULL_KERNELS]
    for case in cases:
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


def _value_width(arguments: dict[str, Any]) -> int:
    if "v" in arguments:
        return int(arguments["v"].shape[-1])
    d_nope = arguments["q"].shape[-1] - arguments["k_pe"].shape[-1]
    return int(arguments["kv_b_proj"].shape[1] - d_nope)
