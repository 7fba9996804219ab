"""Poison and guard bands: nothing that a kernel reads or leaves by accident may look right."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GUARD_ELEMENTS = 256
# a finite value that no output of a case comes near
SENTINEL = -24576.0


@dataclass(slots=True)
class Ledger:
    """The buffers behind a case's inputs, with a copy of each, to tell afterwards what a kernel wrote."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)

    def guarded(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Move a tensor to ``device``, contiguous, between guard bands (NaN, or -1 for integers)."""
        return self.guarded_view(name, tensor, device, lambda buffer: buffer)

    def guarded_view(
        self,
        name: str,
        tensor: Tensor,
        device: torch.device,
        view: Callable[[Tensor], Tensor],
        width: int | None = None,
    ) -> Tensor:
        """The same inside rows of ``width`` elements in the last dimension, ``view`` picking the columns that hold it.

        The other columns are guard, too: a kernel that takes the strides of a contiguous tensor reads NaN.
        """
        shape = (*tensor.shape[:-1], tensor.shape[-1] if width is None else width)
        guard = math.nan if tensor.is_floating_point() else -1
        count = math.prod(shape)
        buffer = torch.full((count + 2 * GUARD_ELEMENTS,), guard, dtype=tensor.dtype, device=device)
        inner = view(buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + count].view(shape))
        inner.copy_(tensor)
        self.buffers[name], self.copies[name] = buffer, buffer.clone()
        return inner

    def written(self, allowed: tuple[str, ...] = ()) -> list[str]:
        """Names of inputs whose bytes changed, guard bands included, other than the allowed ones."""
        names = [name for name in self.buffers if name not in allowed]
        if not names:
            return []
        # one answer for all: each waits for the device
        changed = torch.stack([_differs(self.buffers[name], self.copies[name]) for name in names])
        return [name for name, differs in zip(names, changed.tolist(), strict=True) if differs]

    def written_beside(self, names: tuple[str, ...], arguments: dict[str, Any]) -> list[str]:
        """Names of inputs that may be written of which more was: guard bands, columns between."""
        found = []
        for name in names:
            buffer, inner = self.buffers[name], arguments[name]
            right = self.copies[name].clone()
            offset = inner.storage_offset() - buffer.storage_offset()
            right.as_strided(inner.size(), inner.stride(), offset).copy_(inner)
            if bool(_differs(right, buffer)):
                found.append(name)
        return found

    def restore(self, names: tuple[str, ...] | None = None) -> None:
        """Undo whatever a kernel did to its inputs, or to the named ones of them."""
        for name, buffer in self.buffers.items():
            if names is None or name in names:
                buffer.copy_(self.copies[name])


def surround(whole: Tensor, inner: Tensor) -> None:
    """Fill a buffer with a guard around a view of it, whose own elements stay."""
    own = inner.clone()
    whole.fill_(_guard_fill(whole))
    inner.copy_(own)


def surroundings_intact(whole: Tensor, inner: Tensor) -> bool:
    """Whether the guard around the view is as it was."""
    rest = whole.clone()
    offset = inner.storage_offset() - whole.storage_offset()
    rest.as_strided(inner.size(), inner.stride(), offset).fill_(_guard_fill(rest))
    return same_bits(rest, torch.full_like(rest, _guard_fill(rest)))


def left_as(tensor: Tensor, fill: float) -> Tensor:
    """Which elements hold what their memory was poisoned with by ``poisoned_allocations(fill)``."""
    if _has_nan(tensor):
        return tensor.isnan() if math.isnan(fill) else tensor == fill
    if tensor.dtype != torch.bool and not tensor.dtype.is_signed:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return tensor == _integer_poison(tensor, fill)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes; NaNs compare by their bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)))


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Whether the bytes of two contiguous tensors of one kind differ, on their device."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(word) != b.view(word)).any()


@dataclass(slots=True)
class Allocations:
    """Uninitialised memory that a kernel asked torch for, each block between guard bands."""

    fill: float
    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def intact(self) -> bool:
        """Whether no guard band was written."""
        bands: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for band in (band for block in self.blocks for band in block):
            bands.setdefault((band.dtype, band.device), []).append(band)
        # one comparison for all of a kind: each waits for the device
        together = [torch.cat(alike) for alike in bands.values()]
        return all(same_bits(band, torch.full_like(band, _guard_fill(band))) for band in together)


class _PoisonMode(TorchFunctionMode):
    """Answers ``torch.empty`` and its relatives with poisoned, guarded memory; all else passes through."""

    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self._allocations = allocations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Poison what ``func`` returns if it is fresh, uninitialised memory."""
        result = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and isinstance(result, Tensor) and "out" not in (kwargs or {}):
            return self._poisoned(result)
        return result

    def _poisoned(self, fresh: Tensor) -> Tensor:
        if fresh.layout != torch.strided or fresh.is_quantized or fresh.is_meta or fresh.is_pinned():
            return fresh
        value = self._allocations.fill if _has_nan(fresh) else _integer_poison(fresh, self._allocations.fill)
        if not fresh.is_contiguous():
            return _fill(fresh, value)
        count = fresh.numel()
        buffer = torch.empty(count + 2 * GUARD_ELEMENTS, dtype=fresh.dtype, device=fresh.device)
        low, inner, high = buffer.split([GUARD_ELEMENTS, count, GUARD_ELEMENTS])
        for band in (low, high):
            band.fill_(_guard_fill(band))
        self._allocations.blocks.append((low, high))
        return _fill(inner.view(fresh.shape), value)


_UNINITIALISED = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    Tensor.new_empty,
    Tensor.new_empty_strided,
}


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _guard_fill(band: Tensor) -> float:
    return 1 if band.dtype == torch.bool or not band.dtype.is_signed else -77


def _integer_poison(tensor: Tensor, fill: float) -> int:
    """Integers have no NaN, so they get one sentinel in its stead and another for any other fill."""
    if tensor.dtype == torch.bool:
        return int(math.isnan(fill))
    return max(int(SENTINEL), torch.iinfo(tensor.dtype).min) + (not math.isnan(fill))


def _fill(tensor: Tensor, value: float) -> Tensor:
    if tensor.dtype != torch.bool and not tensor.dtype.is_signed:
        value = 1
    return tensor.fill_(value)


@contextmanager
def poisoned_allocations(fill: float) -> Iterator[Allocations]:
    """Fill every uninitialised tensor of the block with ``fill`` (signed integers with a sentinel) and guard it.

    Sees allocations made through torch's Python functions, not those inside compiled libraries.
    """
    allocations = Allocations(fill)
    with _PoisonMode(allocations):
        yield allocations
