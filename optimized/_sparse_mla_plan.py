"""The host's part of sparse MLA: what a call will hold, every value check, and which implementation will serve it.

Part of ``optimized/sparse_mla.py``; call it from there.
"""

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ._sparse_mla_overlap import Overlap, measure_overlap, union_verdict

_MODULES = {
    "torch": "._sparse_mla_torch",
    "triton": "._sparse_mla_triton",
    "padded": "._sparse_mla_padded",
    "gluon": "._sparse_mla_gluon",
    "gluon-union": "._sparse_mla_union",
    "flashmla": ".external.flashmla",
}
IMPLEMENTATIONS = tuple(_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaShape:
    """What an implementation must know of the tensors before it sees them.

    Attributes:
        device: Where the tensors live.
        dtype: Of ``q``, ``kv`` and ``out``: bfloat16, float16, float32 or (``torch``) float64.
        s_q: Queries, of all requests.
        s_kv: Rows of the latent cache.
        h_q: Query heads, 1 to 128.
        d_qk: Width of a query and of a row.
        d_v: Leading columns of a row that act as its value.
        topk: Entries of each query's list.
    """

    device: torch.device
    dtype: torch.dtype
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    d_v: int = 512
    topk: int

    def __post_init__(self) -> None:
        """Refuse sizes that no tensors have, and dtypes that no implementation computes in."""
        for name, least in (("s_q", 0), ("s_kv", 0), ("h_q", 1), ("d_qk", 1), ("d_v", 1), ("topk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.h_q > 128:
            raise ValueError(f"h_q must be at most 128, got {self.h_q}")
        if self.s_kv > torch.iinfo(torch.int32).max:
            raise ValueError(f"s_kv must be below 2**31, as indices are int32, got {self.s_kv}")
        if self.d_v > self.d_qk:
            raise ValueError(f"d_v must be at most d_qk, got {self.d_v} and {self.d_qk}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {self.dtype}")

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Of ``lse`` and ``max_logits``: float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaPlan:
    """What the host decides once a step, for any layer of it.

    Attributes:
        shape: Of the tensors that will be passed.
        topk_length: ``[s_q]``, int32, on ``shape.device``, a checked copy; None if every entry counts.
        implementation: One of ``IMPLEMENTATIONS``.
        choice: Its name, or for ``auto`` what was taken and why each earlier one was refused.
        prepared: The implementation's own object, such as scratch memory; None if it needs none.
    """

    shape: SparseMlaShape
    topk_length: Tensor | None
    implementation: str
    choice: str
    prepared: object = None

    @property
    def module(self) -> ModuleType:
        """The functions of the implementation."""
        return find_implementation(self.implementation)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaCall:
    """The checked tensors of one call.

    Attributes:
        q: ``[s_q, h_q, d_qk]``, any strides.
        kv: ``[s_kv, d_qk]``, any strides.
        indices: ``[s_q, topk]``, int32, any strides.
        topk_length: ``[s_q]``, int32, contiguous, or None.
        attn_sink: ``[h_q]``, float32, contiguous, or None.
        softmax_scale: Factor on the logits.
        out: ``[s_q, h_q, d_v]``, any strides; written.
        lse: ``[s_q, h_q]``, contiguous; written.
        max_logits: ``[s_q, h_q]``, contiguous; written.
    """

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    softmax_scale: float
    out: Tensor
    lse: Tensor
    max_logits: Tensor


def plan_sparse_mla(
    shape: SparseMlaShape,
    *,
    topk_length: Tensor | None = None,
    indices: Tensor | None = None,
    implementation: str = "auto",
) -> SparseMlaPlan:
    """Check the lengths and choose the implementation, once a step. This may synchronise; ``sparse_mla`` does not.

    Args:
        shape: Of the tensors that ``sparse_mla`` will get.
        topk_length: ``[s_q]``, int32, any device; how many entries of each list count, 0 to ``topk``. All if None.
        indices: ``[s_q, topk]``, int32; the selection of one layer. With ``auto``, what neighbouring queries share is
            measured in a sample of it. Without, no implementation is taken that needs them to share rows.
        implementation: One of ``IMPLEMENTATIONS``, or ``auto``: on a CUDA device the first that serves of
            ``gluon-union`` (if the measured overlap repays its lists), ``gluon``, ``triton``, ``torch``; elsewhere
            ``torch``. A name is never replaced by another.

    Returns:
        The plan, valid for any tensors of this shape and these lengths.

    Raises:
        ValueError: If a length is out of range, a shape is wrong, or there is no such implementation.
        TypeError: If the lengths or indices are not int32.
        NotImplementedError: If the named implementation does not serve the shape.
    """
    lengths = _checked_lengths(shape, topk_length)
    if indices is not None:
        check_indices(indices, shape)
    name, choice = _resolve(implementation, shape, lengths, indices)
    plan = SparseMlaPlan(shape=shape, topk_length=lengths, implementation=name, choice=choice)
    prepare = getattr(plan.module, "prepare", None)
    return plan if prepare is None else replace(plan, prepared=prepare(shape))


def find_implementation(name: str) -> ModuleType:
    """The module of an implementation, imported when it is first asked for.

    Raises:
        ValueError: If there is no such implementation.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(_MODULES[name], __package__)


def refusal(name: str, shape: SparseMlaShape) -> str | None:
    """Why an implementation cannot serve a shape, or None."""
    try:
        return cast("str | None", find_implementation(name).refusal(shape))
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"


def check_indices(indices: Tensor, shape: SparseMlaShape) -> None:
    """Refuse indices of another dtype or shape; reads no value."""
    if indices.dtype != torch.int32:
        raise TypeError(f"indices must be int32, got {indices.dtype}")
    if tuple(indices.shape) != (shape.s_q, shape.topk):
        raise ValueError(
            f"indices must have shape [s_q, topk] = {(shape.s_q, shape.topk)} as planned, got {tuple(indices.shape)}"
        )


def _checked_lengths(shape: SparseMlaShape, topk_length: Tensor | None) -> Tensor | None:
    """A copy of the lengths on the device, each of them within the list."""
    if topk_length is None:
        return None
    if topk_length.dtype != torch.int32:
        raise TypeError(f"topk_length must be int32, got {topk_length.dtype}")
    if tuple(topk_length.shape) != (shape.s_q,):
        raise ValueError(f"topk_length must have shape [s_q] = {(shape.s_q,)}, got {tuple(topk_length.shape)}")
    if shape.s_q:
        low, high = torch.stack(torch.aminmax(topk_length)).tolist()
        if low < 0 or high > shape.topk:
            value, rows = (low, topk_length < 0) if low < 0 else (high, topk_length > shape.topk)
            at = int(rows.nonzero()[0, 0])
            raise ValueError(f"topk_length must be 0 to topk = {shape.topk}, got {value}, first at query {at}")
    return topk_length.to(device=shape.device, copy=True, memory_format=torch.contiguous_format)


def _resolve(name: str, shape: SparseMlaShape, topk_length: Tensor | None, indices: Tensor | None) -> tuple[str, str]:
    """The implementation that will serve, and the account of the choice."""
    if name != "auto":
        reason = refusal(name, shape)
        if reason is not None:
            raise NotImplementedError(f"implementation {name!r} cannot serve this shape; {reason}")
        return name, name
    if shape.device.type != "cuda":
        return "torch", "auto took torch"
    refused: list[str] = []
    for candidate in ("gluon-union", "gluon", "triton", "torch"):
        reason = refusal(candidate, shape)
        if reason is None and candidate == "gluon-union":
            reason = _union_objection(shape, topk_length, indices)
        if reason is None:
            break
        refused.append(f"{candidate}: {reason}")
    return candidate, f"auto took {candidate}" + (f"; refused: {'; '.join(refused)}" if refused else "")


def _union_objection(shape: SparseMlaShape, topk_length: Tensor | None, indices: Tensor | None) -> str | None:
    """Why shared lists would not pay, by a measurement of what neighbouring queries share; None if they do."""
    if indices is None:
        return "the overlap of neighbouring queries is not known, as no indices were given"
    if shape.s_q == 0:
        return "there are no queries"
    overlap: Overlap = measure_overlap(indices, s_kv=shape.s_kv, h_q=shape.h_q, topk_length=topk_length)
    return union_verdict(overlap, s_q=shape.s_q, s_kv=shape.s_kv, h_q=shape.h_q, d_qk=shape.d_qk)
