"""FlashAttention 4 (CuTe DSL) as an attention provider.

Written against ``flash_attn.cute`` of the distribution ``flash-attn-4`` 4.0.0b36. ``lse`` is ``[H, T]`` in natural log,
the causal mask is aligned to the last key, and a row without keys is ``(0, -inf)``. Kernels are compiled on first call.
Not yet run on a GPU by this project; the change of convention is tested against a stand-in.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._partial_state import Prepared, canonical_state, check_call, empty_rows, library_refusal, prepared_of

if TYPE_CHECKING:
    from ..attention import AttentionPlan, AttentionShape


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why FlashAttention 4 cannot serve a request, or None."""
    reason = library_refusal(shape, library="FlashAttention 4", capabilities=(9, 10, 11))
    if reason is not None:
        return reason
    dq, dv = shape.head_dim_qk, shape.head_dim_v
    widest = 256 if torch.cuda.get_device_capability(shape.device)[0] == 9 else 128
    if dq % 8 or dv % 8 or (max(dq, dv) > widest and (dq, dv) not in ((192, 128), (256, 256))):
        return f"FlashAttention 4 has no kernel for head sizes {dq} and {dv} on this device"
    found = _find()
    return found if isinstance(found, str) else None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Find the rows without keys, once a plan."""
    return Prepared(empty=empty_rows(plan))


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend by FlashAttention 4; arguments and results as in ``attention``.

    Raises:
        NotImplementedError: If the library is not importable, or does not serve the scale or the strides.
    """
    check_call(q, k, v, softmax_scale, library="FlashAttention 4")
    found = _find()
    if isinstance(found, str):
        raise NotImplementedError(found)
    out, lse = found(
        q,
        k,
        v,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        max_seqlen_q=max(plan.query_lens),
        max_seqlen_k=max(plan.key_lens),
        softmax_scale=softmax_scale,
        causal=plan.causal,
        return_lse=True,
    )
    return canonical_state(out, lse, base="e", layout="HT", empty=prepared_of(plan).empty)


def _find() -> Callable[..., tuple[Tensor, Tensor]] | str:
    """The library's function, or why it cannot be imported."""
    try:
        function: Callable[..., tuple[Tensor, Tensor]] = importlib.import_module(
            "flash_attn.cute"
        ).flash_attn_varlen_func
    except (ImportError, OSError) as error:
        return f"FlashAttention 4 is not importable (flash_attn.cute: {error})"
    return function
