"""A clean twin of steps on a pool of states, with every place exchangeable: what the faults of ``kda_step`` are of."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._kda_twin import same, token_step, transformed

Arguments = dict[str, Any]
Answer = tuple[Tensor, Tensor]


def start_slot(row: list[int], accepted: int) -> int:
    """Where the last accepted token left its state."""
    return row[accepted - 1]


def end_slot(row: list[int], token: int, accepted: int) -> int:
    """Where a token leaves its own."""
    return row[token]


def step_twin(
    a: Arguments,
    *,
    start: Callable[[list[int], int], int] = start_slot,
    end: Callable[[list[int], int, int], int] = end_slot,
    carry: Callable[[Tensor], Tensor] = same,
    store: Callable[[Tensor], Tensor] = same,
    step: Callable[..., tuple[Tensor, Tensor]] = token_step,
    late: bool = False,
    last_alone: bool = False,
    wraps: bool = False,
    **transforms: Any,
) -> Answer:
    """The clean twin: sequence by sequence, token by token, in place.

    Args:
        a: Of a kernel.
        start: From which slot a sequence starts.
        end: To which one the state after a token goes.
        carry: What becomes of a state between two tokens.
        store: What becomes of it on its way to the pool.
        step: What a token does.
        late: Whether the state before a token is stored instead of the one after it.
        last_alone: Whether only the last state is stored.
        wraps: Whether slot -1 is the last one of the pool.
        transforms: Of ``_kda_twin.transformed``.
    """
    pool, out = a["state_pool"], torch.zeros_like(a["v"], memory_format=torch.contiguous_format)
    bounds, table = a["cu_seqlens"].tolist(), a["slot_table"].tolist()
    accepted = [1] * len(table) if a["num_accepted"] is None else a["num_accepted"].tolist()
    for row, count, (first, stop) in zip(table, accepted, itertools.pairwise(bounds), strict=True):
        slot = start(row, count)
        if stop == first or (slot < 0 and not wraps):
            continue
        state = pool[slot].float()
        for t in range(stop - first):
            before = state
            answer, state = step(*transformed(a, slice(first + t, first + t + 1), **transforms), state)
            out[first + t] = answer[:, 0].to(out.dtype)
            to = end(row, t, count)
            if (to >= 0 or wraps) and not (last_alone and t < stop - first - 1):
                pool[to] = store(before if late else state).to(pool.dtype)
            state = carry(state)
    return out, pool
