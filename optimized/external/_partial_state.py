"""What every attention adapter needs: which rows are empty, and the library's answer in this project's convention.

The convention: ``out`` normalised, ``lse`` ``[T, H]`` float32 (float64 for float64 input) in natural log, ``(0, -inf)``
in a row without keys.
"""

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .._attention_torch import accumulation_dtype
from .._layout import copy_engine_objection

if TYPE_CHECKING:
    from ..attention import AttentionPlan, AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Made once a plan: what the host knows and the forward needs on the device.

    Attributes:
        empty: ``[T]``, bool, rows that see no key; None if there are none.
        wrapper: An object of the library that plans on the host, if it has one.
    """

    empty: Tensor | None
    wrapper: object = None


def find(module: str, name: str | None = None) -> Any:
    """A module of a library or what it calls ``name``, or a text that says why it cannot be had.

    An import runs the library's own code, which raises whatever it likes where a part of it is missing: the compiler
    behind FlashAttention 4 raises RuntimeError.
    """
    try:
        found = importlib.import_module(module)
        return found if name is None else getattr(found, name)
    except Exception as error:
        return f"{module}: {type(error).__name__}: {error}"


def empty_state(q: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    """The state of queries none of which sees a key; some libraries fail on tensors without elements."""
    out = q.new_zeros(*q.shape[:2], head_dim_v)
    return out, torch.full(q.shape[:2], float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)


def empty_rows(plan: "AttentionPlan") -> Tensor | None:
    """``[T]``, bool on the device, True for queries that see no key; None if every query sees one.

    These are known from the lengths: all queries of a request without keys, and with a causal mask the first
    ``n - m`` of ``n`` queries over ``m < n`` keys. What a library returns there (``+inf``, a finite sentinel, garbage)
    is replaced; in a row that has keys nothing is, so that a wrong ``+inf`` stays visible.
    """
    flags: list[bool] = []
    for n, m in zip(plan.query_lens, plan.key_lens, strict=True):
        blind = max(n - m, 0) if plan.causal else n if m == 0 else 0
        flags += [True] * blind + [False] * (n - blind)
    return torch.tensor(flags, device=plan.cu_seqlens_q.device) if any(flags) else None


def canonical_state(
    out: Tensor, lse: Tensor, *, base: Literal["e", "2"], layout: Literal["HT", "TH"], empty: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Bring a library's answer into this project's convention; return ``(out, lse)``.

    Args:
        out: ``[T, H, Dv]``, normalised.
        lse: ``[H, T]`` or ``[T, H]``, log-sum-exp of the scaled logits.
        base: Of the logarithm.
        layout: Of ``lse``.
        empty: Of ``empty_rows``.

    Returns:
        ``out``, and ``lse``, ``[T, H]``, contiguous, float32 (float64 if it came so), natural log.
    """
    if layout == "HT":
        lse = lse.t()
    lse = lse.to(accumulation_dtype(lse.dtype))
    if base == "2":
        lse = lse * math.log(2.0)
    if empty is not None:
        out = out.masked_fill(empty[:, None, None], 0.0)
        lse = lse.masked_fill(empty[:, None], float("-inf"))
    return out, lse.contiguous()


def library_refusal(shape: "AttentionShape", *, library: str, capabilities: tuple[int, ...]) -> str | None:
    """Why a 16-bit tensor core library cannot run here, or None.

    Args:
        shape: Of the request.
        library: Its name, for the text.
        capabilities: Major compute capabilities that it serves.
    """
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return f"{library} needs a CUDA device, got {shape.device}"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major not in capabilities:
        served = " or ".join(f"{capability}.x" for capability in capabilities)
        return f"{library} needs compute capability {served}, got {major}.{minor}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"{library} serves bfloat16 and float16, got {shape.dtype}"
    return None


def check_call(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, *, library: str) -> None:
    """Refuse what the flash attention libraries do not compute.

    They take the row maximum before they scale, which a negative scale turns into the minimum, and they load through
    the copy engine.

    Raises:
        NotImplementedError: If the scale is not positive, or a tensor is not aligned.
    """
    if softmax_scale <= 0:
        raise NotImplementedError(f"{library} needs a positive softmax_scale, got {softmax_scale}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        objection = copy_engine_objection(name, tensor) if tensor.numel() else None
        if objection is not None:
            raise NotImplementedError(f"{library}: {objection}")


def prepared_of(plan: "AttentionPlan") -> Prepared:
    """What ``prepare`` left in the plan.

    Raises:
        TypeError: If the plan was made for another provider.
    """
    if not isinstance(plan.prepared, Prepared):
        raise TypeError(f"plan.prepared must be of this provider, got {type(plan.prepared).__name__}")
    return plan.prepared
