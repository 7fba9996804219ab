"""FlashInfer's ragged prefill as an attention provider.

Written against ``BatchPrefillWithRaggedKVCacheWrapper`` of the distribution ``flashinfer-python``, 0.6.13 and
0.6.18.post1, whose sources were read for every statement here. ``lse`` is ``[T, H]`` in base 2; the causal mask is
aligned to the last key; rows without keys have held a finite sentinel (flashinfer-ai/flashinfer#4452), and rows whose
logits all lie below -5e4 came out as zeros (#4451). Its ``plan`` is work of the host and runs once a plan here; the
first for a dtype and head sizes compiles with ninja and nvcc, for minutes. On compute capability 9.x it takes the
FlashAttention 3 template, elsewhere that of FlashAttention 2. The scale is known only at the call, and
``forward_return_lse``, marked deprecated, is the one method that takes it there. The import needs ``apache-tvm-ffi``,
but neither a CuTe nor a tile compiler. Not yet run on a GPU by this project; the change of convention is tested against
a stand-in. Two calls at once on different streams would share a workspace and must not be made.
"""

import functools
from typing import TYPE_CHECKING, Any, cast

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

_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
_WORKSPACE_BYTES = 128 * 1024 * 1024


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why FlashInfer cannot serve a request, or None."""
    reason = library_refusal(shape, library="FlashInfer", capabilities=(8, 9, 10, 12))
    if reason is not None:
        return reason
    if (shape.head_dim_qk, shape.head_dim_v) not in _HEAD_DIMS:
        return f"FlashInfer has no kernel for head sizes {shape.head_dim_qk} and {shape.head_dim_v}"
    found = _find()
    return found if isinstance(found, str) else None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Let FlashInfer plan the request; it copies the offsets to the host.

    Raises:
        NotImplementedError: If the library is not importable.
    """
    found = _find()
    if isinstance(found, str):
        raise NotImplementedError(found)
    shape = plan.shape
    if plan.num_queries == 0 or plan.num_keys == 0:
        return Prepared(empty=empty_rows(plan))
    wrapper = found(_workspace(plan.cu_seqlens_q.device), "NHD")
    wrapper.plan(
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim_qk,
        head_dim_vo=shape.head_dim_v,
        causal=plan.causal,
        q_data_type=shape.dtype,
    )
    return Prepared(empty=empty_rows(plan), wrapper=wrapper)


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend by FlashInfer; arguments and results as in ``attention``.

    Raises:
        NotImplementedError: If the library does not serve the scale or the strides.
    """
    check_call(q, k, v, softmax_scale, library="FlashInfer")
    prepared = prepared_of(plan)
    if plan.num_queries == 0 or plan.num_keys == 0:
        # its copy engine has no descriptor for a tensor without elements
        return empty_state(q, v.shape[-1])
    wrapper = cast(Any, prepared.wrapper)
    out, lse = wrapper.forward_return_lse(q, k, v, causal=plan.causal, sm_scale=softmax_scale)
    return canonical_state(out, lse, base="2", layout="TH", empty=prepared.empty)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch of a running call, one a device: plans are many, and calls on one stream follow each other."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _find() -> Any:
    """The wrapper's class, or why it cannot be imported."""
    found = find("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")
    return f"FlashInfer is not importable ({found})" if isinstance(found, str) else found
