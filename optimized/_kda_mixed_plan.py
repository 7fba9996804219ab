"""The host's part of a step with speculative and plain sequences: whose tokens lie where, and which slots they own.

Part of ``optimized/kda_step.py``; call it from there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._attention_checks import lengths
from ._kda_plan import KdaBatch, KdaPlan, plan_kda_batch
from ._kda_step_plan import KdaStepPlan, check_apart, check_table, plan_kda_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPart:
    """The sequences without drafts that have tokens.

    Attributes:
        batch: Of ``plan_kda_batch``.
        tokens: ``[Tp]``, int64, their rows; None if they are the first rows in order, which are then not gathered.
        slots: ``[Np]``, int64, where they start and leave their states.
        fresh: ``[Np, 1, 1, 1]``, bool: starts from zero, whatever its slot holds; None if none does.
    """

    batch: KdaBatch
    tokens: Tensor | None
    slots: Tensor
    fresh: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaMixedPlan:
    """A step in two parts, either of which may be missing.

    Attributes:
        num_rows: Rows of the layer's tensors.
        num_slots: Of the pool.
        spec: The speculative part, or None.
        spec_tokens: ``[Ts]``, int64, its rows; None if they are the first rows in order.
        plain: The other part, or None.
        rest: ``[T - Ts - Tp]``, int64, rows of no sequence, which become zero in the output; None if there are none.
    """

    num_rows: int
    num_slots: int
    spec: KdaStepPlan | None
    spec_tokens: Tensor | None
    plain: PlainPart | None
    rest: Tensor | None


def plan_kda_mixed_step(
    *,
    num_rows: int,
    spec_tokens: Tensor,
    spec_cu_seqlens: Tensor,
    spec_slots: Tensor,
    num_accepted: Tensor,
    plain_tokens: Tensor,
    plain_cu_seqlens: Tensor,
    plain_slots: Tensor,
    has_initial_state: Tensor,
    plan: KdaPlan,
    num_slots: int,
    implementation: str = "auto",
) -> KdaMixedPlan:
    """Check the tables of a step, which reads them back to the host; once, for all layers.

    Args:
        num_rows: Rows ``T`` of the layer's tensors.
        spec_tokens: ``[Ts]``, int32 or int64, rows of the speculative tokens, sequence after sequence.
        spec_cu_seqlens: ``[Ns + 1]``, offsets in ``spec_tokens``; ``[0, 0]`` for none.
        spec_slots: ``[Ns, C]``, as in ``plan_kda_step``.
        num_accepted: ``[Ns]``, likewise.
        plain_tokens: ``[Tp]``, rows of the other tokens.
        plain_cu_seqlens: ``[Np + 1]``, offsets in ``plain_tokens``.
        plain_slots: ``[Np]``, where each starts and leaves its state.
        has_initial_state: ``[Np]``, bool; a sequence without starts from zero.
        plan: Of ``plan_kda``, whose workspace the plain part takes.
        num_slots: Of the pool.
        implementation: Of the speculative part, as in ``plan_kda_step``.

    Returns:
        The plan.

    Raises:
        ValueError: If a row is named twice or is none, offsets do not end with their rows, a slot is out of range or
            belongs to two sequences, or the batch is larger than planned.
        TypeError: If a table has another dtype.
        NotImplementedError: If the named implementation cannot serve the shape.
    """
    spec_rows, plain_rows = _rows("spec_tokens", spec_tokens), _rows("plain_tokens", plain_tokens)
    spec_lens, plain_lens = lengths("spec_cu_seqlens", spec_cu_seqlens), lengths("plain_cu_seqlens", plain_cu_seqlens)
    for name, lens, rows in (("spec", spec_lens, spec_rows), ("plain", plain_lens, plain_rows)):
        if sum(lens) != len(rows):
            raise ValueError(f"{name}_cu_seqlens must end at the {len(rows)} of {name}_tokens, got {sum(lens)}")
    named = spec_rows + plain_rows
    if named and not 0 <= min(named) <= max(named) < num_rows:
        raise ValueError(
            f"spec_tokens and plain_tokens must hold rows 0 .. {num_rows - 1}, got {min(named)} .. {max(named)}"
        )
    if len(set(named)) < len(named):
        raise ValueError(
            f"spec_tokens and plain_tokens must name each row once, got {len(named) - len(set(named))} again"
        )
    spec = plan_kda_step(
        spec_cu_seqlens, spec_slots, num_accepted, shape=plan.shape, num_slots=num_slots, implementation=implementation
    )
    filled, slots = _plain_slots(plain_lens, plain_slots, has_initial_state, num_slots)
    drafts = [
        {start, *row[:length]}
        for start, row, length in zip(spec.starts.tolist(), spec.slots.tolist(), spec.lengths, strict=True)
        if start >= 0 and length
    ]
    check_apart([*drafts, *({slot} for slot in slots)])
    rest = sorted(set(range(num_rows)) - set(named))
    return KdaMixedPlan(
        num_rows=num_rows,
        num_slots=num_slots,
        spec=spec if spec_rows else None,
        spec_tokens=_gathered(spec_rows, plan),
        plain=_plain_part(plain_rows, plain_lens, filled, slots, has_initial_state, plan) if plain_rows else None,
        rest=torch.tensor(rest, dtype=torch.int64).to(plan.shape.device) if rest else None,
    )


def _plain_slots(
    lens: tuple[int, ...], plain_slots: Tensor, has_initial_state: Tensor, num_slots: int
) -> tuple[list[int], list[int]]:
    """Sequences that have tokens, and the slot of each."""
    check_table("plain_slots", plain_slots)
    if has_initial_state.dtype != torch.bool:
        raise TypeError(f"has_initial_state must be bool, got {has_initial_state.dtype}")
    for name, tensor in (("plain_slots", plain_slots), ("has_initial_state", has_initial_state)):
        if tuple(tensor.shape) != (len(lens),):
            raise ValueError(f"{name} must have shape ({len(lens)},), got {tuple(tensor.shape)}")
    filled = [sequence for sequence, length in enumerate(lens) if length]
    slots = [plain_slots.tolist()[sequence] for sequence in filled]
    for slot in slots:
        if not 0 <= slot < num_slots:
            raise ValueError(f"plain_slots must hold 0 .. {num_slots - 1}, got {slot}")
    return filled, slots


def _plain_part(
    rows: list[int],
    lens: tuple[int, ...],
    filled: list[int],
    slots: list[int],
    has_initial_state: Tensor,
    plan: KdaPlan,
) -> PlainPart:
    """Sequences without tokens are left out: they have nothing to say, and their slots stay as they are."""
    device, offsets = plan.shape.device, [0]
    for sequence in filled:
        offsets.append(offsets[-1] + lens[sequence])
    fresh = ~has_initial_state.cpu()[filled]
    return PlainPart(
        batch=plan_kda_batch(torch.tensor(offsets), plan=plan),
        tokens=_gathered(rows, plan),
        slots=torch.tensor(slots, dtype=torch.int64).to(device),
        fresh=fresh[:, None, None, None].to(device) if bool(fresh.any()) else None,
    )


def _gathered(rows: list[int], plan: KdaPlan) -> Tensor | None:
    """Rows on the device, or None where they are the first ones in order."""
    if rows == list(range(len(rows))):
        return None
    return torch.tensor(rows, dtype=torch.int64).to(plan.shape.device)


def _rows(name: str, tensor: Tensor) -> list[int]:
    check_table(name, tensor)
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    rows: list[int] = tensor.tolist()
    return rows
