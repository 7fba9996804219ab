"""The Triton kernels of flash-linear-attention as an implementation of ``kda``.

Written against ``fla.ops.kda.chunk_kda`` of the distribution ``fla-core`` 0.6.0, whose source was read for every
statement here. States are float32, keys first unless asked. Given value columns first it would hand the call to
FlashKDA where that is installed, so it is always asked for keys first, and the states are transposed here. Inputs are
made contiguous, as it does itself. A sequence without tokens hands its state on.
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

_WIDEST_KEY = 256


def find_library() -> str | None:
    """None if it can be imported, or why not."""
    found = find("fla.ops.kda", "chunk_kda")
    return f"flash-linear-attention is not importable ({found})" if isinstance(found, str) else None


def refusal(shape: KdaShape) -> str | None:
    """Why flash-linear-attention cannot serve a shape, or None."""
    reason = device_refusal(shape, library="flash-linear-attention", capabilities=(8, 9, 10, 12))
    if reason is not None:
        return reason
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-linear-attention is asked for bfloat16 and float16, got {shape.dtype}"
    if shape.head_dim_k > _WIDEST_KEY:
        return f"flash-linear-attention serves keys of up to {_WIDEST_KEY}, got {shape.head_dim_k}"
    if shape.state_dtype != torch.float32:
        return f"flash-linear-attention keeps states in float32, got {shape.state_dtype}"
    return find_library()


def strides_refusal(layer: Layer) -> str | None:
    """None: what is not contiguous is copied."""
    return None


def parts(shape: KdaShape, max_tokens: int, max_sequences: int, max_checkpoints: int) -> dict[str, Any]:
    """Nothing of ours: the library allocates by itself."""
    return {}


def prepare(plan: "KdaPlan", cu_seqlens: Tensor) -> Tensor:
    """The offsets in int64."""
    return cu_seqlens.long()


def forward(layer: Layer, initial: Tensor | None, final: Tensor, checkpoints: Tensor, batch: "KdaBatch") -> None:
    """Call the library, and copy its results to where they belong."""
    shape, tokens = batch.plan.shape, batch.num_tokens
    if tokens == 0:
        final.zero_() if initial is None else final.copy_(initial)
        return
    q, k, v, g, beta = packed(layer, tokens)
    gate: dict[str, Any] = {"use_gate_in_kernel": shape.gate != "log", "safe_gate": shape.gate == "bounded"}
    if shape.gate != "log":
        # it asks for an amplitude where there is no bound
        a_log = layer.A_log if layer.A_log is not None else torch.zeros(v.shape[2], device=v.device)
        gate |= {"A_log": a_log, "dt_bias": None if layer.dt_bias is None else layer.dt_bias.flatten()}
        gate |= {"lower_bound": shape.lower_bound}
    out, state = importlib.import_module("fla.ops.kda").chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=layer.scale,
        initial_state=None if initial is None else initial.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=shape.qk_l2norm,
        use_beta_sigmoid_in_kernel=shape.beta_is_logits,
        state_v_first=False,
        cu_seqlens=batch.prepared,
        **gate,
    )
    layer.out[:tokens].copy_(out[0])
    final.copy_(state)
