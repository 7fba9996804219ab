"""FlashMLA's sparse prefill as an implementation of ``sparse_mla``, its heads padded to 64 or 128.

Written against ``flash_mla.flash_mla_sparse_fwd`` of deepseek-ai/FlashMLA since 082094b (distribution
``tokenspeed-flashmla`` 1.0.0): natural logarithms, the sink outside ``lse``, ``lse = +inf`` in a row without keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .._sparse_mla_padded import keep_native_heads, padded_call, padded_heads
from ._partial_state import find

if TYPE_CHECKING:
    from .._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape


def refusal(shape: "SparseMlaShape") -> str | None:
    """Why FlashMLA cannot serve a shape, or None."""
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return f"FlashMLA needs a CUDA device, got {shape.device}"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major not in (9, 10):
        return f"FlashMLA needs compute capability 9.x or 10.x, got {major}.{minor}"
    if shape.dtype != torch.bfloat16:
        return f"FlashMLA serves bfloat16, got {shape.dtype}"
    if shape.d_qk not in (512, 576) or shape.d_v != 512:
        return f"FlashMLA serves rows of width 512 or 576 with 512 values, got {shape.d_qk} and {shape.d_v}"
    if shape.topk % 128:
        return f"FlashMLA serves lists whose length is a multiple of 128, got {shape.topk}"
    found = _find()
    return found if isinstance(found, str) else None


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits``; the copies into and out of the padded heads are part of the price."""
    function = _find()
    if isinstance(function, str):
        raise NotImplementedError(function)
    h_q = padded_heads(plan.shape.h_q)
    padded = padded_call(call, h_q)
    indices = call.indices if call.indices.stride(1) == 1 else call.indices.contiguous()
    kv = call.kv if call.kv.stride(1) == 1 else call.kv.contiguous()
    out, max_logits, lse = function(
        padded.q,
        kv[:, None],
        indices[:, None],
        call.softmax_scale,
        d_v=plan.shape.d_v,
        attn_sink=padded.attn_sink,
        topk_length=call.topk_length,
    )
    lse = lse.masked_fill(max_logits == float("-inf"), float("-inf"))
    keep_native_heads(call, replace(padded, out=out, lse=lse, max_logits=max_logits))


def _find() -> Callable[..., Any] | str:
    """The library's function, or why it cannot be had."""
    found: Callable[..., Any] | str = find("flash_mla", "flash_mla_sparse_fwd")
    return found
