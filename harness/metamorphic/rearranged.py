"""What comes of questions that are put differently: answers, what bits say of them, and what goes wrong instead."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..answers import Answer
from ..record import GateResult


class RefusedError(Exception):
    """The kernel does not serve the rearranged case: the relation says nothing."""


class BrokenError(Exception):
    """The kernel failed on the rearranged case."""

    # of the gates, the one that this is a matter of
    gate = "G8"

    def of(self, relation: str) -> GateResult:
        """What the relation says then."""
        return GateResult(gate=f"{self.gate} {relation}", ratio=math.inf, text=f"{relation}: {self}")


class MisshapenError(BrokenError):
    """Its answer to the rearranged case is not of the form that it must have."""

    gate = "G0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearranged:
    """What a kernel answered to the rearrangements of a case.

    Attributes:
        gates: Of relations that bits decide, and of those in which it failed.
        answers: ``(relation, number of the question) -> out and lse`` of each part, for the oracle's side to judge.
    """

    gates: tuple[GateResult, ...]
    answers: dict[tuple[str, int], tuple[Answer, ...]]


@contextmanager
def what_it_raises() -> Iterator[None]:
    """Tell what a kernel raises in the block from what the judge does; memory that there is not is nobody's fault.

    Raises:
        RefusedError: If it does not serve the case.
        BrokenError: If it raises anything else.
    """
    try:
        yield
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except (torch.cuda.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise BrokenError(f"the kernel raised {type(error).__name__}: {error}") from error


@contextmanager
def asked(relation: str, gates: list[GateResult]) -> Iterator[None]:
    """A block that asks the questions of one relation: it ends where the kernel refuses one, or fails, which counts."""
    try:
        yield
    except RefusedError:
        pass
    except BrokenError as error:
        gates.append(error.of(relation))
