"""FlashAttention 3 as an attention provider.

Written against ``hopper/flash_attn_interface.py`` of Dao-AILab/flash-attention at 01afd16 (module
``flash_attn_interface``), and against the copy that vLLM bundles as ``vllm.vllm_flash_attn``
(vllm-project/flash-attention at 03ef28b). Both give ``lse`` ``[H, T]`` in natural log, align the causal mask to the
last key, and write ``+inf`` or ``-inf`` in rows without keys.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

# the keywords by which each home of the library returns the log-sum-exp
_HOMES: dict[str, dict[str, Any]] = {
    "flash_attn_interface": {"return_attn_probs": True},
    "vllm.vllm_flash_attn": {"return_softmax_lse": True, "fa_version": 3},
}


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why FlashAttention 3 cannot serve a request, or None."""
    reason = library_refusal(shape, library="FlashAttention 3", capabilities=(9,))
    if reason is not None:
        return reason
    dq, dv = shape.head_dim_qk, shape.head_dim_v
    served = dq % 8 == dv % 8 == 0 and dq <= 256
    if not served or not (dq == dv or (128 < dq <= 192 and 96 < dv <= 128) or (dq <= 64 and dv <= 512)):
        return f"FlashAttention 3 has no kernel for head sizes {dq} and {dv}"
    found = _find()
    return found if isinstance(found, str) else None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Find the rows without keys, once a plan."""
    return Prepared(empty=empty_rows(plan))


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend by FlashAttention 3; arguments and results as in ``attention``.

    Raises:
        NotImplementedError: If the library is not importable, or does not serve the scale or the strides.
    """
    check_call(q, k, v, softmax_scale, library="FlashAttention 3")
    found = _find()
    if isinstance(found, str):
        raise NotImplementedError(found)
    prepared = prepared_of(plan)
    if plan.num_queries == 0 or plan.num_keys == 0:
        return empty_state(q, v.shape[-1])
    function, keywords = found
    out, lse = function(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        max_seqlen_q=max(plan.query_lens),
        max_seqlen_k=max(plan.key_lens),
        softmax_scale=softmax_scale,
        causal=plan.causal,
        num_splits=1,
        **keywords,
    )
    return canonical_state(out, lse, base="e", layout="HT", empty=prepared.empty)


def _find() -> tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]] | str:
    """The library's function and its keywords from the first home that can be imported, or why none can."""
    failures = []
    for home, keywords in _HOMES.items():
        function = find(home, "flash_attn_varlen_func")
        if not isinstance(function, str):
            return function, keywords
        failures.append(function)
    return f"FlashAttention 3 is not importable ({'; '.join(failures)})"
