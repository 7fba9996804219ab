"""The gated delta rule fused for the models: bfloat16, 128 channels, a bounded gate, logits in.

Part of ``optimized/kda.py``; call it from there. Two launches, four where long sequences are cut: a preparation that is
parallel over chunks and heads, then the scan, whose tiles are fetched by the copy engine.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ._kda_checks import Layer
from ._kda_chunks import FIELDS
from ._kda_flash_kernel import GATE_SCALE, prepare_kernel
from ._kda_plan import KdaBatch, KdaPlan
from ._kda_scan import Blocks, Parts, device_refusal, last_stride_refusal, scan, scan_parts
from ._kda_scan import cutting as scan_cutting
from ._kda_scan_kernel import INTERPRETED
from ._kda_shape import KdaShape

WIDTH = 128
BLOCKS = Blocks(
    chunk=64, keys=WIDTH, values=WIDTH, rows=64, stages=3, warps=4, operand=torch.bfloat16, precision="tf32", bulk=True
)
_LOG2_E = math.log2(math.e)
# rows of a tensor that a descriptor can address
_MOST_ROWS = 2**31

strides_refusal = last_stride_refusal


def refusal(shape: KdaShape) -> str | None:
    """Why the kernels cannot serve a shape, or None."""
    reason = device_refusal(shape, capability=(9, 0))
    if reason is not None:
        return reason
    if shape.dtype != torch.bfloat16:
        return f"bfloat16 is needed, got {shape.dtype}"
    if (shape.head_dim_k, shape.head_dim_v) != (WIDTH, WIDTH):
        return f"head dimensions of 128 are needed, got {shape.head_dim_k} and {shape.head_dim_v}"
    if shape.gate != "bounded":
        return f"a bounded gate is needed, whose decays have a smallest one, got {shape.gate}"
    if not (shape.beta_is_logits and shape.qk_l2norm):
        return "logits of beta and queries and keys before normalisation are needed"
    return None


def cutting(shape: KdaShape) -> dict[str, int]:
    """How a batch is cut into chunks and segments."""
    return scan_cutting(shape, BLOCKS)


def parts(shape: KdaShape, max_tokens: int, max_sequences: int, max_checkpoints: int) -> Parts:
    """Tensors of the workspace.

    Raises:
        NotImplementedError: If the tiles have more rows than a descriptor can address.
    """
    tensors = scan_parts(shape, BLOCKS, max_tokens, max_sequences, max_checkpoints, folded=torch.float32)
    rows = max(size[0] for size, _ in tensors.values())
    if rows >= _MOST_ROWS:
        raise NotImplementedError(f"implementation 'flash' serves tiles of fewer than {_MOST_ROWS} rows, got {rows}")
    return tensors


def prepare(plan: KdaPlan, cu_seqlens: Tensor) -> dict[str, Any]:
    """The workspace by name: tensors for the preparation, and ``tiles`` for the scan."""
    tensors = plan.carved()
    tiles: dict[str, Any] = dict(tensors)
    heights = {"w": BLOCKS.chunk, "queries": BLOCKS.chunk, "keys": BLOCKS.chunk, "u": BLOCKS.rows, "o": BLOCKS.rows}
    for name, height in heights.items():
        if len(tensors[name]):
            tiles[name] = TensorDescriptor.from_tensor(tensors[name], [height, tensors[name].shape[1]])
    return dict(tensors) | {"tiles": tiles, "sums": sum_matrices(plan.shape.device)}


@functools.cache
def sum_matrices(device: torch.device) -> Tensor:
    """``[4, 64, 64]``, float16: what sums log decays over rows, see ``prepare_kernel``; 32 KiB, once a device."""
    i, j = torch.arange(BLOCKS.chunk)[:, None], torch.arange(BLOCKS.chunk)[None]
    same = i // 32 == j // 32
    chosen = torch.stack([i < j, same & (i < j), same & (i >= j), i >= j])
    matrices: Tensor = (chosen / GATE_SCALE.value).to(torch.float16).to(device)
    return matrices


def forward(layer: Layer, initial: Tensor | None, final: Tensor, checkpoints: Tensor, batch: KdaBatch) -> None:
    """Write the output, the states after the last tokens, and those that are kept on the way."""
    shape, chunks, made = batch.plan.shape, batch.chunks, batch.prepared
    if chunks is None or not isinstance(made, dict):
        raise TypeError("batch must be of plan_kda_batch with this implementation's plan")
    heads = shape.num_v_heads
    # what is not there is never read
    a_log = made["sums"] if layer.A_log is None else layer.A_log.contiguous()
    dt_bias = made["sums"] if layer.dt_bias is None else layer.dt_bias.contiguous()
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
                made["sums"],
                *(made[name] for name in ("w", "queries", "keys", "u", "o", "decay")),
                heads,
                chunks.num_chunks,
                heads // shape.num_heads,
                layer.scale,
                (shape.lower_bound or 0.0) * _LOG2_E * GATE_SCALE.value,
                *layer.q.stride()[:2],
                *layer.k.stride()[:2],
                *layer.v.stride()[:2],
                *layer.g.stride()[:2],
                *layer.beta.stride(),
                FIELDS=FIELDS,
                HAS_AMPLITUDE=layer.A_log is not None,
                HAS_BIAS=layer.dt_bias is not None,
                INTERPRETED=INTERPRETED,
                num_warps=4,
                num_stages=1,
            )
        scan(made["tiles"], chunks, layer, initial, final, checkpoints, blocks=BLOCKS)
