"""The latent cache of one layer and its expansion to keys and values.

Part of ``optimized/mla_prefill.py``, for it and for ``optimized/token_scores.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._mla_prefill_plan import MlaPrefillPlan, MlaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The latent cache of one layer with its up-projection, ``weight`` being ``[H * (Dn + Dv), R]``."""

    kv_c: Tensor
    k_pe: Tensor
    weight: Tensor
    shape: MlaShape

    def expand(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather and project the rows of ``slots``, ``[n]``; return ``k``, ``[n, H, Dq]``, and ``v``, ``[n, H, Dv]``.

        ``v`` is a strided view of the projection, and so is ``k`` where there is no rope part.
        """
        shape = self.shape
        projected = torch.nn.functional.linear(self.kv_c.index_select(0, slots), self.weight)
        k_nope, v = projected.unflatten(1, (shape.num_heads, -1)).split([shape.d_nope, shape.d_v], dim=-1)
        if shape.d_rope == 0:
            return k_nope, v
        k = projected.new_empty(len(slots), shape.num_heads, shape.d_nope + shape.d_rope)
        k[..., : shape.d_nope] = k_nope
        k[..., shape.d_nope :] = self.k_pe.index_select(0, slots)[:, None, :]
        return k, v


def check_inputs(q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_proj: Tensor, plan: MlaPrefillPlan) -> None:
    """Refuse tensors that are not what was planned for, by shape, dtype and device alone."""
    shape = plan.shape
    expected = {
        "q": (q, (plan.num_tokens, shape.num_heads, shape.d_nope + shape.d_rope)),
        "kv_c": (kv_c, (plan.num_slots, shape.kv_lora_rank)),
        "k_pe": (k_pe, (plan.num_slots, shape.d_rope)),
        "kv_b_proj": (kv_b_proj, (shape.num_heads, shape.d_nope + shape.d_v, shape.kv_lora_rank)),
    }
    for name, (tensor, size) in expected.items():
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} must have the planned shape {size}, got {tuple(tensor.shape)}")
        if tensor.dtype != plan.dtype:
            raise TypeError(f"{name} must have the planned dtype {plan.dtype}, got {tensor.dtype}")
        if tensor.device != plan.device:
            raise ValueError(f"{name} must be on the planned device {plan.device}, got {tensor.device}")
