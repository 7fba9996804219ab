"""Sparse MLA with the heads padded to 64 or 128, as libraries ask for them: the baseline that native heads avoid.

Part of ``optimized/sparse_mla.py``; call it from there. The queries are copied into a buffer of zeros, the sinks of the
added heads are ``-inf``, and the answers of the real heads are copied out of it.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from . import _sparse_mla_triton as native

if TYPE_CHECKING:
    from ._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape


def padded_heads(h_q: int) -> int:
    """64, or 128 above."""
    return 64 if h_q <= 64 else 128


def refusal(shape: "SparseMlaShape") -> str | None:
    """Why the kernel cannot serve the padded shape, or None."""
    return native.refusal(replace(shape, h_q=padded_heads(shape.h_q)))


def padded_call(call: "SparseMlaCall", h_q: int) -> "SparseMlaCall":
    """The same question about ``h_q`` heads, in buffers of its own."""
    s_q, native_h, d_qk = call.q.shape
    q = call.q.new_zeros(s_q, h_q, d_qk)
    q[:, :native_h] = call.q
    attn_sink = None
    if call.attn_sink is not None:
        attn_sink = call.attn_sink.new_full((h_q,), float("-inf"))
        attn_sink[:native_h] = call.attn_sink
    return replace(
        call,
        q=q,
        attn_sink=attn_sink,
        out=call.out.new_empty(s_q, h_q, call.out.shape[2]),
        lse=call.lse.new_empty(s_q, h_q),
        max_logits=call.lse.new_empty(s_q, h_q),
    )


def keep_native_heads(call: "SparseMlaCall", padded: "SparseMlaCall") -> None:
    """Copy the answers of the real heads out of the padded buffers."""
    h_q = call.q.shape[1]
    call.out.copy_(padded.out[:, :h_q])
    call.lse.copy_(padded.lse[:, :h_q])
    call.max_logits.copy_(padded.max_logits[:, :h_q])


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits`` by way of the padded buffers."""
    h_q = padded_heads(plan.shape.h_q)
    padded = padded_call(call, h_q)
    native.launch(padded, replace(plan.shape, h_q=h_q))
    keep_native_heads(call, padded)
