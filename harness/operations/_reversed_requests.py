"""Packed requests in reverse order, for whoever asks a kernel whether that matters.

Lengths and offsets lie where they lay, see ``execution``: a kernel that keeps a plan by their addresses is wrong.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..answers import Answer
from ..contract import Contract
from ..metamorphic.rearranged import Rearranged, asked
from ..poison import same_bits
from ..record import GateResult
from ..replays import elsewhere

RELATION = "permute requests"


def reversed_rows(lens: Sequence[int], device: torch.device) -> Tensor:
    """Which row each row was, where requests of these lengths are packed from the last to the first."""
    ranges = [range(start, stop) for start, stop in itertools.pairwise([0, *itertools.accumulate(lens)])]
    return torch.tensor([row for one in reversed(ranges) for row in one], dtype=torch.int64, device=device)


def reversed_offsets(offsets: Tensor) -> Tensor:
    """The bounds of the requests from the last to the first."""
    return offsets[-1] - offsets.flip(0)


def moved_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows in memory of the same form."""
    moved: Tensor = elsewhere(tensor)
    return moved.copy_(tensor[rows])


def put_back(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of an answer in the order of the first one."""
    back = torch.empty_like(tensor)
    back[rows] = tensor
    return back


def ask_permuted(permuted: Callable[[], Answer], first: Answer, contract: Contract) -> Rearranged:
    """Equal bits if the contract says batch invariant, else as good an answer.

    Args:
        permuted: Asks, and gives the answer to the reversed requests, put back.
        first: The answer to the case.
        contract: Of the kernel.
    """
    gates: list[GateResult] = []
    answers: dict[tuple[str, int], tuple[Answer, ...]] = {}
    with asked(RELATION, gates):
        answer = permuted()
        if contract.batch_invariant and contract.deterministic:
            same = all(same_bits(one, other) for one, other in zip(answer, first, strict=True))
            text = "" if same else "bits depend on the order of the requests"
            gates.append(GateResult(gate=f"G8 {RELATION}", ratio=0.0 if same else math.inf, text=text))
        else:
            answers[RELATION, 0] = (answer,)
    return Rearranged(gates=tuple(gates), answers=answers)
