"""The clean torch twin of ``kda_step``: one sequence and token after the other, float32 throughout.

Part of ``optimized/kda_step.py``; call it from there.
"""

import torch
from torch import Tensor

from ._kda_checks import Layer
from ._kda_step_plan import KdaStepPlan
from ._kda_torch import transformed


def strides_refusal(layer: Layer) -> str | None:
    """None: any strides are served."""
    return None


def forward(layer: Layer, pool: Tensor, plan: KdaStepPlan) -> None:
    """Write the output, and the state after each token to its slot of the pool, ``[slots, HV, K, V]``."""
    layer.out.zero_()
    first, wide = 0, plan.shape.parameter_dtype
    for length, start, slots in zip(plan.lengths, plan.starts.tolist(), plan.slots.tolist(), strict=True):
        rows = slice(first, first + length)
        first += length
        if start < 0 or length == 0:
            continue
        state = pool[start].to(wide)
        tokens = (x.unbind(1) for x in transformed(layer, rows, plan.shape))
        for t, (q, k, v, g, beta) in enumerate(zip(*tokens, strict=True)):
            state = g.exp()[:, :, None] * state
            error = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + k[:, :, None] * error[:, None]
            layer.out[rows.start + t] = torch.einsum("hkv,hk->hv", state, q).to(layer.out.dtype)
            if slots[t] >= 0:
                pool[slots[t]] = state.to(pool.dtype)
