"""The host's part of the gated delta rule: sizes, workspace, lengths, and which implementation will serve.

Part of ``optimized/kda.py``; call it from there.
"""

import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._attention_checks import lengths
from ._kda_chunks import lay_out
from ._kda_shape import KdaShape, check_count

if TYPE_CHECKING:
    from ._kda_chunks import Chunks

_MODULES = {
    "torch": "._kda_torch",
    "triton": "._kda_triton",
    "flash": "._kda_flash",
    "fla": ".external.fla",
    "flashkda": ".external.flashkda",
}
IMPLEMENTATIONS = tuple(_MODULES)
# the fastest first; libraries of others are taken by name only
_AUTO_ON_CUDA = ("flash", "triton", "torch")

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaPlan:
    """A workspace for batches up to a size, and who computes in it. Batches of one plan must follow each other.

    Attributes:
        shape: Of the tensors.
        max_tokens: Of a batch.
        max_sequences: Of a batch.
        max_checkpoints: States that a batch keeps on its way.
        implementation: One of ``IMPLEMENTATIONS``.
        choice: Its name, or for ``auto`` what was taken and why each earlier one was refused.
        parts: Name, shape and dtype of the tensors in the workspace.
        workspace: ``[workspace_bytes]`` or more, uint8.
    """

    shape: KdaShape
    max_tokens: int
    max_sequences: int
    max_checkpoints: int
    implementation: str
    choice: str
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]
    workspace: Tensor

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace that are needed, and all that a call takes beside its results."""
        return total_bytes(self.parts)

    @property
    def module(self) -> ModuleType:
        """The functions of the implementation."""
        return find_implementation(self.implementation)

    def carved(self) -> dict[str, Tensor]:
        """The tensors in the workspace, by name."""
        tensors, start = {}, 0
        for name, (size, dtype) in self.parts.items():
            stop = start + math.prod(size) * dtype.itemsize
            tensors[name] = self.workspace[start:stop].view(dtype).view(size)
            start += _aligned(stop - start)
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaBatch:
    """The sequences of one step; every value has been checked. For any layer of the shape of its plan.

    Attributes:
        plan: With the workspace.
        lengths: Tokens of each sequence.
        cu_seqlens: ``[N + 1]``, int32, on the device; a copy, so that it cannot drift from the host's numbers.
        checkpoints: ``(sequence, tokens)`` of each state that is kept on the way.
        chunks: Where its chunks lie; None for an implementation that cuts none.
        prepared: What the implementation made ready, or None.
    """

    plan: KdaPlan
    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    checkpoints: tuple[tuple[int, int], ...]
    chunks: "Chunks | None" = None
    prepared: object = None

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)


def plan_kda(
    shape: KdaShape,
    *,
    max_tokens: int,
    max_sequences: int,
    max_checkpoints: int = 0,
    implementation: str = "auto",
    workspace: Tensor | None = None,
) -> KdaPlan:
    """Choose an implementation and set aside the workspace of its largest batch; once, for all steps and layers.

    Args:
        shape: Of a layer.
        max_tokens: Of any batch.
        max_sequences: Of any batch.
        max_checkpoints: States that any batch keeps on its way.
        implementation: ``auto`` or one of ``IMPLEMENTATIONS``. On a CUDA device ``auto`` takes the first that serves of
            ``flash``, ``triton`` and ``torch``, elsewhere ``torch``; libraries of others are taken by name only, and a
            name is never replaced by another.
        workspace: ``[bytes]``, uint8, contiguous, starting at a multiple of 16 bytes; a new one without.

    Returns:
        The plan.

    Raises:
        ValueError: If there is no such implementation, a count is negative, or the workspace is too small, elsewhere or
            out of line.
        TypeError: If a count is no int or the workspace is not uint8.
        NotImplementedError: If the named implementation cannot serve the shape.
    """
    check_count("max_tokens", max_tokens, least=0)
    check_count("max_sequences", max_sequences, least=1)
    check_count("max_checkpoints", max_checkpoints, least=0)
    name, choice = resolve_implementation(implementation, shape)
    sizes = find_implementation(name).parts(shape, max_tokens, max_sequences, max_checkpoints)
    if workspace is None:
        workspace = torch.empty(total_bytes(sizes), dtype=torch.uint8, device=shape.device)
    else:
        _check_workspace(workspace, total_bytes(sizes), shape.device)
    return KdaPlan(
        shape=shape,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        max_checkpoints=max_checkpoints,
        implementation=name,
        choice=choice,
        parts=sizes,
        workspace=workspace,
    )


def plan_kda_batch(cu_seqlens: Tensor, *, plan: KdaPlan, checkpoints: Tensor | None = None) -> KdaBatch:
    """Check the sequences of a step and lay out their chunks; this may synchronise, ``kda`` does not.

    Args:
        cu_seqlens: ``[N + 1]``, int32 or int64, any device; sequence ``n`` owns rows ``cu[n] .. cu[n + 1] - 1``.
        plan: With a workspace for at least as much.
        checkpoints: ``[M, 2]``, int32 or int64: of which sequence, and after how many of its tokens, a state is kept;
            None for none. Chunks end there, so off multiples of the chunk later rounding may differ.

    Returns:
        The batch.

    Raises:
        ValueError: If the offsets do not start at 0 or decrease, a checkpoint is not in its sequence, or the plan is
            too small.
        TypeError: If either is not int32 or int64.
        NotImplementedError: If the implementation keeps no states.
    """
    lens = lengths("cu_seqlens", cu_seqlens)
    kept = _kept_states(checkpoints, lens)
    planned = {"tokens": plan.max_tokens, "sequences": plan.max_sequences, "checkpoints": plan.max_checkpoints}
    for name, count in (("tokens", sum(lens)), ("sequences", len(lens)), ("checkpoints", len(kept))):
        if count > planned[name]:
            raise ValueError(f"a batch must have at most {planned[name]} {name} as planned, got {count}")
    module, device = plan.module, plan.shape.device
    if kept and hasattr(module, "checkpoint_refusal"):
        raise NotImplementedError(f"implementation {plan.implementation!r} {module.checkpoint_refusal}")
    offsets = cu_seqlens.to(device=device, dtype=torch.int32, copy=True)
    return KdaBatch(
        plan=plan,
        lengths=lens,
        cu_seqlens=offsets,
        checkpoints=kept,
        chunks=lay_out(lens, kept, **module.cutting(plan.shape), device=device) if hasattr(module, "cutting") else None,
        prepared=module.prepare(plan, offsets) if hasattr(module, "prepare") else None,
    )


def resolve_implementation(name: str, shape: KdaShape) -> tuple[str, str]:
    """Find who will serve; return the name and the account of the choice.

    Raises:
        ValueError: If there is no such implementation.
        NotImplementedError: If it cannot serve the shape.
    """
    order = (_AUTO_ON_CUDA if shape.device.type == "cuda" else ("torch",)) if name == "auto" else (name,)
    refused: list[str] = []
    for candidate in order:
        reason = refusal(candidate, shape)
        if reason is None:
            why = f"; refused: {'; '.join(refused)}" if refused else ""
            return candidate, f"auto took {candidate}{why}" if name == "auto" else candidate
        refused.append(f"{candidate}: {reason}")
    raise NotImplementedError(f"implementation {name!r} cannot serve this shape; {'; '.join(refused)}")


def refusal(name: str, shape: KdaShape) -> str | None:
    """Why an implementation cannot serve a shape, or None."""
    try:
        module = find_implementation(name)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"
    reason: str | None = module.refusal(shape)
    return reason


def find_implementation(name: str) -> ModuleType:
    """The module of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(_MODULES[name], __package__)


def total_bytes(parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Bytes of a workspace with these tensors, each at a multiple of 256 bytes."""
    return sum(_aligned(math.prod(size) * dtype.itemsize) for size, dtype in parts.values())


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _check_workspace(workspace: Tensor, needed: int, device: torch.device) -> None:
    if workspace.dtype != torch.uint8:
        raise TypeError(f"workspace must be uint8, got {workspace.dtype}")
    if workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(f"workspace must be [bytes] and contiguous, got {tuple(workspace.shape)}")
    if workspace.numel() < needed:
        raise ValueError(f"workspace must have at least {needed} bytes, got {workspace.numel()}")
    if workspace.device != torch.empty(0, device=device).device:
        raise ValueError(f"workspace must be on {device}, got {workspace.device}")
    if workspace.data_ptr() % 16:
        raise ValueError(f"workspace must start at a multiple of 16 bytes, got {workspace.data_ptr() % 16} past one")


def _kept_states(checkpoints: Tensor | None, lens: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if checkpoints is None:
        return ()
    if checkpoints.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"checkpoints must be int32 or int64, got {checkpoints.dtype}")
    if checkpoints.dim() != 2 or checkpoints.shape[1] != 2:
        raise ValueError(f"checkpoints must have shape [M, 2], got {tuple(checkpoints.shape)}")
    kept = tuple((sequence, tokens) for sequence, tokens in checkpoints.tolist())
    for sequence, tokens in kept:
        if not 0 <= sequence < len(lens):
            raise ValueError(f"checkpoints must name sequences 0 .. {len(lens) - 1}, got {sequence}")
        if not 0 <= tokens <= lens[sequence]:
            raise ValueError(
                f"checkpoints must be after 0 .. {lens[sequence]} tokens of sequence {sequence}, got {tokens}"
            )
    return kept
