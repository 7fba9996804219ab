"""The host's part of a step on a state pool: every slot and count is checked once, then lies in tables on the device.

Part of ``optimized/kda_step.py``; call it from there.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from ._attention_checks import lengths
from ._kda_shape import KdaShape, check_count

_MODULES = {"torch": "._kda_step_torch", "triton": "._kda_step_triton"}
STEP_IMPLEMENTATIONS = tuple(_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaStepPlan:
    """Which sequences a step has, and from and to which slots they go.

    Attributes:
        shape: Of the layers.
        num_slots: Of the pool.
        lengths: Tokens of each sequence.
        cu_seqlens: ``[N + 1]``, int32, on the device, a copy.
        starts: ``[N]``, int32, the slot from which each sequence starts; -1 for padding.
        slots: ``[N, C]``, int32, where the state after each token goes; -1 where it is dropped.
        implementation: ``torch`` or ``triton``.
        choice: Its name, or for ``auto`` what was taken and why the other was refused.
    """

    shape: KdaShape
    num_slots: int
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    starts: Tensor
    slots: Tensor
    implementation: str
    choice: str

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def module(self) -> ModuleType:
        """The functions of the implementation."""
        return importlib.import_module(_MODULES[self.implementation], __package__)


def plan_kda_step(
    cu_seqlens: Tensor,
    slot_table: Tensor,
    num_accepted: Tensor | None = None,
    *,
    shape: KdaShape,
    num_slots: int,
    implementation: str = "auto",
) -> KdaStepPlan:
    """Check the tables of a step, which reads them back to the host; once, for all layers.

    Args:
        cu_seqlens: ``[N + 1]``, int32 or int64, any device; sequence ``n`` owns rows ``cu[n] .. cu[n + 1] - 1``, at
            most one a column of the table. A sequence may be empty.
        slot_table: ``[N, C]``, int32 or int64; -1 for no slot.
        num_accepted: ``[N]``, int32 or int64, 1 to ``C``: sequence ``n`` starts from column ``num_accepted[n] - 1``;
            from the first without.
        shape: Of the layers.
        num_slots: Of the pool.
        implementation: ``torch``, ``triton``, or ``auto``: on a CUDA device ``triton`` if it serves, else ``torch``.

    Returns:
        The plan.

    Raises:
        ValueError: If shapes disagree, a count or slot is out of range, a sequence has more tokens than the table
            columns, or two sequences share a slot; if there is no such implementation.
        TypeError: If a table is not int32 or int64.
        NotImplementedError: If the named implementation cannot serve the shape.
    """
    check_count("num_slots", num_slots, least=1)
    name, choice = _resolve(implementation, shape)
    lens, starts, slots = _checked(cu_seqlens, slot_table, num_accepted, num_slots)

    def placed(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(shape.device)

    return KdaStepPlan(
        shape=shape,
        num_slots=num_slots,
        lengths=lens,
        cu_seqlens=cu_seqlens.to(device=shape.device, dtype=torch.int32, copy=True),
        starts=placed(starts),
        slots=placed(slots).view(len(lens), -1),
        implementation=name,
        choice=choice,
    )


def refill_kda_step(
    plan: KdaStepPlan, cu_seqlens: Tensor, slot_table: Tensor, num_accepted: Tensor | None = None
) -> KdaStepPlan:
    """Check the tables of a later step, and write them where a captured call of ``plan`` reads them.

    Args:
        plan: Of as many sequences and columns.
        cu_seqlens: As in ``plan_kda_step``.
        slot_table: Likewise.
        num_accepted: Likewise.

    Returns:
        The plan of the later step, on the same tables; ``plan`` is not to be used again.

    Raises:
        ValueError: As ``plan_kda_step``, or if the tables have other sizes; nothing is written then.
        TypeError: As ``plan_kda_step``.
    """
    if tuple(slot_table.shape) != tuple(plan.slots.shape):
        raise ValueError(f"slot_table must have shape {tuple(plan.slots.shape)}, got {tuple(slot_table.shape)}")
    lens, starts, slots = _checked(cu_seqlens, slot_table, num_accepted, plan.num_slots)
    plan.cu_seqlens.copy_(cu_seqlens)
    plan.starts.copy_(torch.tensor(starts, dtype=torch.int32))
    plan.slots.copy_(torch.tensor(slots, dtype=torch.int32).view_as(plan.slots))
    return replace(plan, lengths=lens)


def _resolve(name: str, shape: KdaShape) -> tuple[str, str]:
    """The implementation that will serve, and the account of the choice."""
    if name != "auto" and name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(_MODULES)}, got {name!r}")
    if name == "torch" or (name == "auto" and shape.device.type != "cuda"):
        return "torch", "torch" if name == "torch" else "auto took torch"
    reason = _triton_refusal(shape)
    if reason is None:
        return "triton", "triton" if name == "triton" else "auto took triton"
    if name == "triton":
        raise NotImplementedError(f"implementation 'triton' cannot serve this shape; triton: {reason}")
    return "torch", f"auto took torch; refused: triton: {reason}"


def _triton_refusal(shape: KdaShape) -> str | None:
    try:
        module = importlib.import_module(_MODULES["triton"], __package__)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"
    reason: str | None = module.refusal(shape)
    return reason


def _checked(
    cu_seqlens: Tensor, slot_table: Tensor, num_accepted: Tensor | None, num_slots: int
) -> tuple[tuple[int, ...], list[int], list[list[int]]]:
    """Lengths, starting slots and slots of the tokens of each sequence."""
    lens = lengths("cu_seqlens", cu_seqlens)
    check_table("slot_table", slot_table)
    if slot_table.dim() != 2 or slot_table.shape[0] != len(lens) or slot_table.shape[1] < 1:
        raise ValueError(f"slot_table must have shape [{len(lens)}, C] with C >= 1, got {tuple(slot_table.shape)}")
    columns, rows = slot_table.shape[1], slot_table.tolist()
    accepted = [1] * len(lens)
    if num_accepted is not None:
        check_table("num_accepted", num_accepted)
        if tuple(num_accepted.shape) != (len(lens),):
            raise ValueError(f"num_accepted must have shape ({len(lens)},), got {tuple(num_accepted.shape)}")
        accepted = num_accepted.tolist()
    for sequence, (length, count, row) in enumerate(zip(lens, accepted, rows, strict=True)):
        if not 1 <= count <= columns:
            raise ValueError(f"num_accepted must be 1 to {columns}, got {count} at sequence {sequence}")
        if length > columns:
            raise ValueError(f"a sequence must have at most {columns} tokens, got {length} at sequence {sequence}")
        if min(row) < -1 or max(row) >= num_slots:
            wrong = next(slot for slot in row if not -1 <= slot < num_slots)
            raise ValueError(f"slot_table must hold -1 .. {num_slots - 1}, got {wrong} at sequence {sequence}")
    starts = [row[count - 1] for count, row in zip(accepted, rows, strict=True)]
    check_apart(
        [{start, *row[:length]} for start, row, length in zip(starts, rows, lens, strict=True) if start >= 0 and length]
    )
    return lens, starts, rows


def check_table(name: str, tensor: Tensor) -> None:
    """Refuse a table that is not of integers."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")


def check_apart(owned: Sequence[set[int]]) -> None:
    """Refuse a slot that two sequences read or write: what one leaves the other might find."""
    seen: set[int] = set()
    for slots in owned:
        shared = (slots - {-1}) & seen
        if shared:
            raise ValueError(f"slots must belong to one sequence each, got {min(shared)} in two")
        seen |= slots
