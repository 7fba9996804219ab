"""The gated delta rule in two Triton kernels that serve any gate and size.

Part of ``optimized/kda.py``; call it from there.
"""

import math

import torch
from torch import Tensor

from ._attention_triton import _shared_memory
from ._kda_checks import Layer
from ._kda_chunks import FIELDS
from ._kda_plan import KdaBatch, KdaPlan
from ._kda_scan import Blocks, Parts, block, device_refusal, last_stride_refusal, scan, scan_parts
from ._kda_scan import cutting as scan_cutting
from ._kda_scan_kernel import INTERPRETED
from ._kda_shape import KdaShape
from ._kda_triton_kernel import prepare_kernel

CHUNK = 32
_WIDEST = 256
_LOG2_E = math.log2(math.e)

strides_refusal = last_stride_refusal


def refusal(shape: KdaShape) -> str | None:
    """Why the kernels cannot serve a shape, or None."""
    reason = device_refusal(shape, capability=(8, 0))
    if reason is not None:
        return reason
    if max(shape.head_dim_k, shape.head_dim_v) > _WIDEST:
        return f"head dimensions up to {_WIDEST} are served, got {shape.head_dim_k} and {shape.head_dim_v}"
    return None


def blocks_of(shape: KdaShape) -> Blocks:
    """Tiles for a shape, in float32: those of as many chunks as fit in shared memory are on their way at once."""
    keys, values = block(shape.head_dim_k), block(shape.head_dim_v)
    half = shape.dtype in (torch.bfloat16, torch.float16)
    # products in float32 are made by the cores, out of registers
    rows = min(values, keys, 64 if half else 16)
    stages = 1
    if shape.device.type == "cuda":
        tile_bytes = 4 * CHUNK * (3 * keys + 2 * rows)
        stages = min(3, max(1, (_shared_memory(shape.device) - 32768) // tile_bytes))
    return Blocks(
        chunk=CHUNK,
        keys=keys,
        values=values,
        rows=rows,
        stages=stages,
        warps=4,
        operand=torch.float32,
        precision="tf32" if half else "ieee",
    )


def cutting(shape: KdaShape) -> dict[str, int]:
    """How a batch is cut into chunks and segments."""
    return scan_cutting(shape, blocks_of(shape))


def parts(shape: KdaShape, max_tokens: int, max_sequences: int, max_checkpoints: int) -> Parts:
    """Tensors of the workspace."""
    return scan_parts(shape, blocks_of(shape), max_tokens, max_sequences, max_checkpoints, folded=torch.float32)


def prepare(plan: KdaPlan, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """The workspace by name."""
    return plan.carved()


def forward(layer: Layer, initial: Tensor | None, final: Tensor, checkpoints: Tensor, batch: KdaBatch) -> None:
    """Write the output, the states after the last tokens, and those that are kept on the way; two to four launches."""
    shape, chunks, tiles = batch.plan.shape, batch.chunks, batch.prepared
    if chunks is None or not isinstance(tiles, dict):
        raise TypeError("batch must be of plan_kda_batch with this implementation's plan")
    blocks, heads = blocks_of(shape), shape.num_v_heads
    # what is not there is never read
    a_log = layer.q if layer.A_log is None else layer.A_log
    dt_bias = layer.q if layer.dt_bias is None else layer.dt_bias
    with torch.cuda.device_of(layer.q):
        if chunks.num_chunks:
            prepare_kernel[(chunks.num_chunks * heads,)](
                layer.q,
                layer.k,
                layer.v,
                layer.g,
                layer.beta,
                a_log,
                dt_bias,
                chunks.chunks,
                *(tiles[name] for name in ("w", "queries", "keys", "u", "o", "decay")),
                heads,
                heads // shape.num_heads,
                layer.scale,
                (shape.lower_bound or 0.0) * _LOG2_E,
                *layer.q.stride()[:2],
                *layer.k.stride()[:2],
                *layer.v.stride()[:2],
                *layer.g.stride()[:2],
                *layer.beta.stride(),
                a_log.stride(0),
                *dt_bias.stride()[:2],
                FIELDS=FIELDS,
                KEYS=shape.head_dim_k,
                VALUES=shape.head_dim_v,
                BLOCK_KEYS=blocks.keys,
                BLOCK_VALUES=blocks.values,
                CHUNK=CHUNK,
                GATE=shape.gate,
                HAS_AMPLITUDE=layer.A_log is not None,
                HAS_BIAS=layer.dt_bias is not None,
                LOGITS=shape.beta_is_logits,
                NORMALISE=shape.qk_l2norm,
                PRECISION=blocks.precision,
                SUMS="ieee" if blocks.precision == "ieee" or INTERPRETED else "tf32x3",
                num_warps=8 if max(blocks.keys, blocks.values) > 64 else 4,
                num_stages=1,
            )
        scan(tiles, chunks, layer, initial, final, checkpoints, blocks=blocks)
