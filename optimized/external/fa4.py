"""FlashAttention 4 (CuTe DSL) as an attention provider.

Written against ``flash_attn.cute`` of the distribution ``flash-attn-4`` 4.0.0b36, whose sources were read for every
statement here. ``lse`` is ``[H, T]`` in natural log, the causal mask is aligned to the last key, and a row without keys
is ``(0, -inf)``; a row whose sum is NaN has that ``lse`` too. On compute capability 9.x both head sizes may be any
multiple of 8 up to 256. The import needs the compiler, ``nvidia-cutlass-dsl`` with the libraries of one CUDA version,
and ``quack-kernels``. Kernels are compiled on first call, in seconds; for sm_90a that was done with this call at the
head sizes of models. Not yet run on a GPU by this project; the change of convention is tested against a stand-in.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._partial_state import (
    Prepared,
    canonical_state,
    check_call,
    empty_rows,
    empty_state,
    find,
    library_refusal,
    prepared_of,
)

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
    prepared = prepared_of(plan)
    if plan.num_queries == 0 or plan.num_keys == 0:
        return empty_state(q, v.shape[-1])
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
    return canonical_state(out, lse, base="e", layout="HT", empty=prepared.empty)


def _find() -> Any:
    """The library's function, or why it cannot be imported."""
    found = find("flash_attn.cute", "flash_attn_varlen_func")
    return f"FlashAttention 4 is not importable ({found})" if isinstance(found, str) else found
