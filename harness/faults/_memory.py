"""Faults of memory and of the form of the answer, around any clean twin."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..answers import Answer

# takes the arguments of an operation and, by name, steps to be changed
Twin = Callable[..., Answer]


def unwritten(twin: Twin, arguments: Mapping[str, Any], rows: slice, heads: slice) -> Answer:
    """Leave part of all results as the memory came."""
    answer = twin(arguments)
    lazy = tuple(torch.empty_like(result) for result in answer)
    written = torch.ones_like(answer[1], dtype=torch.bool)
    written[rows, heads] = False
    for mine, result in zip(lazy, answer, strict=True):
        mine[written] = result[written]
    return lazy


def past_the_end(twin: Twin, arguments: Mapping[str, Any]) -> Answer:
    """Store one row more than the output has."""
    out, *others = twin(arguments)
    mine = torch.empty_like(out)
    mine.copy_(out)
    row = out.shape[1] * out.shape[2]
    torch.as_strided(mine, (row,), (1,), mine.storage_offset() + out.numel()).fill_(1.0)
    return mine, *others


def uninitialised_accumulator(twin: Twin, arguments: Mapping[str, Any]) -> Answer:
    """Add the result to fresh memory as if it were zero."""
    out, *others = twin(arguments)
    return torch.empty_like(out).add_(out), *others


def scaled_in_place(twin: Twin, arguments: Mapping[str, Any]) -> Answer:
    """Fold the scale into the caller's queries."""
    arguments["q"].mul_(arguments["softmax_scale"])
    return twin({**arguments, "softmax_scale": 1.0})


class Workspace:
    """One output buffer for all calls of a shape: a result lasts until the next call."""

    def __init__(self) -> None:
        """No call yet."""
        self._buffers: dict[tuple[Any, ...], Answer] = {}

    def __call__(self, twin: Twin, arguments: Mapping[str, Any]) -> Answer:
        """Compute into the buffer and hand it out."""
        fresh = twin(arguments)
        key = (tuple(fresh[0].shape), fresh[0].dtype, fresh[0].device)
        mine = self._buffers.setdefault(key, tuple(torch.zeros_like(result) for result in fresh))
        for buffer, result in zip(mine, fresh, strict=True):
            buffer.copy_(result)
        return mine


class Memo:
    """The answer of the last call, given again when shapes, dtype and address of the queries are the same."""

    def __init__(self) -> None:
        """No call yet."""
        self._key: tuple[Any, ...] = ()
        self._answer: Answer | None = None

    def __call__(self, twin: Twin, arguments: Mapping[str, Any]) -> Answer:
        """Compute once for each key, which knows nothing of the values."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        key = (arguments["q"].data_ptr(), *((name, tuple(t.shape), t.dtype) for name, t in tensors.items()))
        if key != self._key or self._answer is None:
            self._key, self._answer = key, twin(arguments)
        return tuple(result.clone() for result in self._answer)


class Previous:
    """Double buffering with the wrong index: each call returns what the call before computed."""

    def __init__(self) -> None:
        """No call yet."""
        self._last: Answer | None = None

    def __call__(self, twin: Twin, arguments: Mapping[str, Any]) -> Answer:
        """Compute, keep, and return the older one if it has the shape."""
        fresh, last = twin(arguments), self._last
        self._last = fresh
        fits = last is not None and last[0].shape == fresh[0].shape and last[0].dtype == fresh[0].dtype
        return last if last is not None and fits else tuple(torch.empty_like(result) for result in fresh)


class TableByAddress:
    """A table of the batch that is read once for every place in memory, as part of a plan."""

    def __init__(self) -> None:
        """No place is known yet."""
        self._seen: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, table: Tensor, *sizes: Tensor) -> Tensor:
        """What lay there first, of the batches whose requests have these sizes in some order."""
        # another batch is read anew: an earlier case that lay there must have no say
        key = (table.data_ptr(), table.dtype, *(tuple(sorted(one.tolist())) for one in sizes))
        return self._seen.setdefault(key, table.clone())


class CallCounter:
    """How often a fault ran: what stands in for the order in which threads arrive."""

    def __init__(self) -> None:
        """No call yet."""
        self.calls = 0

    def next(self) -> int:
        """Count one call."""
        self.calls += 1
        return self.calls


class Baked:
    """Compiled artifacts by class: the size of whoever came first is baked into each."""

    def __init__(self) -> None:
        """Nothing is compiled yet."""
        self._sizes: dict[Any, int] = {}

    def __call__(self, kind: Any, size: int) -> int:
        """The size with which the artifact of this class runs."""
        return self._sizes.setdefault(kind, size)


def sixteen_requests(answer: Answer, offsets: Tensor, fill: float = 0.0) -> Answer:
    """The answer with nothing in rows of requests past the sixteenth, as of a table that has no place for them."""
    end = int(offsets[16]) if len(offsets) > 16 else None
    for result in answer if end is not None else ():
        result[end:] = fill
    return answer
