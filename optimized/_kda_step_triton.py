"""Steps on a state pool as one Triton kernel. Part of ``optimized/kda_step.py``; call it from there."""

import math

import torch
import triton
from torch import Tensor

from ._kda_checks import Layer
from ._kda_scan import block, device_refusal, last_stride_refusal
from ._kda_scan_kernel import INTERPRETED
from ._kda_shape import KdaShape
from ._kda_step_plan import KdaStepPlan
from ._kda_step_triton_kernel import step_kernel

_LOG2_E = math.log2(math.e)
# elements of a state that one program holds
_STATE_ELEMENTS = 4096

strides_refusal = last_stride_refusal


def refusal(shape: KdaShape) -> str | None:
    """Why the kernel cannot serve a shape, or None."""
    return device_refusal(shape, capability=(7, 0))


def forward(layer: Layer, pool: Tensor, plan: KdaStepPlan) -> None:
    """Write the output and the slots in one launch; arguments as in ``_kda_step_torch``."""
    shape = plan.shape
    keys = block(shape.head_dim_k)
    rows = max(1, min(block(shape.head_dim_v), _STATE_ELEMENTS // keys))
    # what is not there is never read
    a_log = layer.q if layer.A_log is None else layer.A_log
    dt_bias = layer.q if layer.dt_bias is None else layer.dt_bias
    with torch.cuda.device_of(layer.q):
        step_kernel[(triton.cdiv(shape.head_dim_v, rows), shape.num_v_heads, len(plan.lengths))](
            layer.q,
            layer.k,
            layer.v,
            layer.g,
            layer.beta,
            a_log,
            dt_bias,
            pool,
            layer.out,
            plan.cu_seqlens,
            plan.starts,
            plan.slots,
            len(layer.out),
            plan.slots.shape[1],
            shape.num_v_heads // shape.num_heads,
            layer.scale,
            (shape.lower_bound or 0.0) * _LOG2_E,
            *layer.q.stride()[:2],
            *layer.k.stride()[:2],
            *layer.v.stride()[:2],
            *layer.g.stride()[:2],
            *layer.beta.stride(),
            a_log.stride(0),
            *dt_bias.stride()[:2],
            *pool.stride(),
            *layer.out.stride()[:2],
            KEYS=shape.head_dim_k,
            VALUES=shape.head_dim_v,
            BLOCK_KEYS=keys,
            BLOCK_ROWS=rows,
            GATE=shape.gate,
            HAS_AMPLITUDE=layer.A_log is not None,
            HAS_BIAS=layer.dt_bias is not None,
            LOGITS=shape.beta_is_logits,
            NORMALISE=shape.qk_l2norm,
            INTERPRETED=INTERPRETED,
            num_warps=4,
        )
