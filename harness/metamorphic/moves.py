"""What a metamorphic relation needs of an operation: how its inputs are rearranged without changing the question."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..case import Case
from ..operation import Inputs
from ..poison import GUARD_ELEMENTS, Ledger

# a case and the inputs that belong to it
Part: TypeAlias = tuple[Case, Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Parts whose answers, merged by log-sum-exp, answer the whole.

    Attributes:
        parts: One, or two whose keys are disjoint and whose queries are the same.
        whole: What the answer is held to.
        ends: End of each stretch of keys of each request; None where the operation's own rows say it.
    """

    parts: tuple[Part, ...]
    whole: Part
    ends: Sequence[tuple[int, ...]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The rearrangements of one operation; None where it has no such freedom.

    What is done in place is undone by the ledger of the inputs.

    Attributes:
        query_lens: Queries of each request of a case.
        key_lens: Keys of each request.
        permute: Put the requests into another order, in place; return the case that the inputs now belong to.
        poison: Fill all that the given requests own with a number, in place.
        largest_value: Upper bound on the magnitude of a value that meets the weights.
        scale_values: Multiply the values by a power of two, in place.
        split: Cut the keys, or cut them elsewhere; None where a case has nothing to cut.
        alone: One request by itself, and the tokens of ``out`` that its answer must repeat.
        last_query: The last query of one request by itself, likewise; None where that changes the arithmetic.
        relabel: Give physical places other names, in place.
        company: Whether a row must keep its bits whatever its neighbours hold, or only may.
    """

    query_lens: Callable[[Case], list[int]]
    key_lens: Callable[[Case], list[int]]
    permute: Callable[[Case, Inputs, list[int]], Case] | None
    poison: Callable[[Case, Inputs, set[int], float], None]
    largest_value: Callable[[dict[str, Any]], float]
    scale_values: Callable[[dict[str, Any], float], None]
    split: Callable[[Case, Inputs, torch.Generator], Split | None] | None
    alone: Callable[[Case, Inputs, int], tuple[Part, slice]] | None
    last_query: Callable[[Case, Inputs, int], tuple[Part, slice]] | None = None
    relabel: Callable[[Inputs, torch.Generator], None] | None = None
    company: Literal["must", "may"] = "must"


def placed(ledger: Ledger, name: str, content: Tensor, like: Tensor) -> Tensor:
    """``content`` between guard bands of its own, in rows as wide as those of ``like`` and in the same columns."""
    if content.ndim == 3 and like.stride(0) != like.shape[1] * like.stride(1):
        # heads are columns of one row per token
        rows: Tensor = placed(ledger, name, content.flatten(1), like.flatten(1)).unflatten(1, content.shape[1:])
        return rows
    width = like.stride(-2)
    column = (like.storage_offset() - GUARD_ELEMENTS) % width
    columns = slice(column, column + content.shape[-1])
    return ledger.guarded_view(name, content, like.device, lambda buffer: buffer[..., columns], width=width)


def offsets(lengths: list[int], like: Tensor) -> Tensor:
    """``[N + 1]``, where each request starts, in the dtype and on the device of ``like``."""
    return torch.tensor([0, *lengths]).cumsum(0).to(like)


def ranges(lengths: list[int]) -> list[slice]:
    """The range of each request in a packed batch."""
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(lengths, initial=0))]
