"""FlashKDA as an implementation of ``kda``.

Written against ``flash_kda.fwd`` of the distribution ``tokenspeed-flashkda`` 0.0.1.post20260901, whose Python source
was read and is that of post20260526, which ran with torch 2.11 on an H200 (later ones are built for another torch),
and what is known of its kernels: bfloat16, 128 channels, as many key heads as value heads, a bounded gate with its
parameters, logits of beta, contiguous tensors, states with value columns first, float32 or bfloat16 outside and
bfloat16 on chip, int64 offsets. It checks neither the bound nor the offsets; both are checked here before. It writes
the output in place if that is contiguous. A float32 state of a sequence without tokens comes back rounded.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._kda_checks import Layer
from .._kda_shape import KdaShape
from ._kda_library import checkpoint_refusal, device_refusal, packed
from ._partial_state import find

if TYPE_CHECKING:
    from .._kda_plan import KdaBatch, KdaPlan

__all__ = ["checkpoint_refusal", "find_library", "forward", "parts", "prepare", "refusal", "strides_refusal"]

_WIDTH = 128


def find_library() -> str | None:
    """None if it can be imported, or why not."""
    found = find("flash_kda", "fwd")
    return f"FlashKDA is not importable ({found})" if isinstance(found, str) else None


def refusal(shape: KdaShape) -> str | None:
    """Why FlashKDA cannot serve a shape, or None."""
    reason = device_refusal(shape, library="FlashKDA", capabilities=(9, 10, 12))
    if reason is not None:
        return reason
    if shape.dtype != torch.bfloat16:
        return f"FlashKDA serves bfloat16, got {shape.dtype}"
    if (shape.head_dim_k, shape.head_dim_v) != (_WIDTH, _WIDTH):
        return f"FlashKDA serves head dimensions of 128, got {shape.head_dim_k} and {shape.head_dim_v}"
    if shape.num_heads != shape.num_v_heads:
        return f"FlashKDA needs as many key heads as value heads, got {shape.num_heads} and {shape.num_v_heads}"
    if shape.gate != "bounded":
        return f"FlashKDA serves bounded gates, got {shape.gate}"
    if not (shape.beta_is_logits and shape.qk_l2norm):
        return "FlashKDA takes logits of beta and queries and keys before normalisation"
    return find_library()


def strides_refusal(layer: Layer) -> str | None:
    """Why FlashKDA cannot take these tensors, or None; what is not contiguous is copied."""
    if layer.g.dtype != torch.bfloat16 or layer.beta.dtype != torch.bfloat16:
        return f"g and beta must be bfloat16, got {layer.g.dtype} and {layer.beta.dtype}"
    return None


def parts(shape: KdaShape, max_tokens: int, max_sequences: int, max_checkpoints: int) -> dict[str, Any]:
    """Nothing of ours: the library allocates by itself."""
    return {}


def prepare(plan: "KdaPlan", cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An amplitude of 1 and a bias of 0 for layers that have none, as the library needs both; the offsets in int64."""
    heads, device = plan.shape.num_v_heads, plan.shape.device
    return torch.zeros(heads, device=device), torch.zeros(heads, _WIDTH, device=device), cu_seqlens.long()


def forward(layer: Layer, initial: Tensor | None, final: Tensor, checkpoints: Tensor, batch: "KdaBatch") -> None:
    """Call the library; it writes in place where the output and the states lie as it wants them."""
    tokens = batch.num_tokens
    if tokens == 0:
        final.zero_() if initial is None else final.copy_(initial)
        return
    q, k, v, g, beta = packed(layer, tokens)
    if not isinstance(batch.prepared, tuple):
        raise TypeError("batch must be of plan_kda_batch with this implementation's plan")
    no_a_log, no_bias, offsets = batch.prepared
    out = layer.out[:tokens] if layer.out[:tokens].is_contiguous() else torch.empty_like(v[0])
    # value columns first
    start = None if initial is None else initial.transpose(2, 3).contiguous()
    end = final.transpose(2, 3)
    # the library has a buffer for either, never one for both
    apart = end.is_contiguous() and (start is None or start.data_ptr() != end.data_ptr())
    state = end if apart else torch.empty(end.shape, dtype=end.dtype, device=end.device)
    importlib.import_module("flash_kda").fwd(
        q,
        k,
        v,
        g,
        beta,
        layer.scale,
        out[None],
        no_a_log if layer.A_log is None else layer.A_log.contiguous(),
        no_bias if layer.dt_bias is None else layer.dt_bias.contiguous(),
        batch.plan.shape.lower_bound,
        initial_state=start,
        final_state=state,
        cu_seqlens=offsets,
    )
    if out.data_ptr() != layer.out.data_ptr():
        layer.out[:tokens].copy_(out)
    if not apart:
        end.copy_(state)
