"""The tables and the pool of a step: which slots a sequence owns, and what lies in the others."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..answers import dtype_of
from ..case import Case
from ..poison import Ledger

# elements of NaN between the slots of a padded pool
GAP = 40
# of slots, beside those of the sequences
FREE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Slots of a step.

    Attributes:
        rows: ``[N][C]``, -1 for none.
        accepted: Tokens of the last step that were taken, for each sequence; None where none are told.
        num_slots: Of the pool.
    """

    rows: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...] | None
    num_slots: int

    @property
    def starts(self) -> list[int]:
        """The slot from which each sequence starts, -1 for padding."""
        counts = self.accepted or (1,) * len(self.rows)
        return [row[count - 1] for row, count in zip(self.rows, counts, strict=True)]

    def writes(self, lens: list[int]) -> list[tuple[int, int, int]]:
        """``(sequence, token, slot)`` of every state that is stored."""
        starts = self.starts
        return [
            (sequence, token, row[token])
            for sequence, row in enumerate(self.rows)
            for token in range(lens[sequence] if starts[sequence] >= 0 else 0)
            if row[token] >= 0
        ]


def table_of(case: Case) -> Table:
    """Slots in no order, all different; the same for whoever asks."""
    sizes, rng = case.sizes, np.random.default_rng(case.seed)
    lens, columns = sizes["seq_lens"], sizes["columns"]
    num_slots = len(lens) * columns + FREE
    slots = rng.permutation(num_slots)[: len(lens) * columns].reshape(len(lens), columns)
    drawn = {"sweep": np.arange(len(lens)) % columns + 1, "drawn": rng.integers(1, columns + 1, len(lens))}
    counts = drawn.get(sizes["accepted"])
    for sequence in range(len(lens)):
        start = 0 if counts is None else int(counts[sequence]) - 1
        if sizes["padding"] and sequence % sizes["padding"] == sizes["padding"] - 1:
            slots[sequence] = -1
        elif sizes["dropped"] and columns > 1:
            slots[sequence, (start + 1) % columns] = -1
    accepted = None if counts is None else tuple(int(count) for count in counts)
    return Table(rows=tuple(tuple(int(slot) for slot in row) for row in slots), accepted=accepted, num_slots=num_slots)


def pool_of(case: Case, table: Table, initial: Tensor, ledger: Ledger, device: torch.device) -> Tensor:
    """The pool seen as ``[slots, HV, K, V]``: NaN in every slot that no sequence starts from."""
    sizes = case.sizes
    values = initial.new_full((table.num_slots, *initial.shape[1:]), torch.nan)
    for sequence, slot in enumerate(table.starts):
        if slot >= 0:
            values[slot] = initial[sequence]
    stored = values.to(dtype_of(sizes["state_dtype"]))
    if sizes["state_layout"] == "VK":
        stored = stored.mT.contiguous()
    if sizes["pool"] == "heads":
        pool = ledger.guarded("state_pool", stored.transpose(0, 1).contiguous(), device).transpose(0, 1)
    elif sizes["pool"] == "padded":
        rows, width = stored.flatten(1), stored[0].numel()
        inner = ledger.guarded_view("state_pool", rows, device, lambda buffer: buffer[:, :width], width=width + GAP)
        pool = inner.unflatten(1, stored.shape[1:])
    else:
        pool = ledger.guarded("state_pool", stored, device)
    return pool.mT if sizes["state_layout"] == "VK" else pool
