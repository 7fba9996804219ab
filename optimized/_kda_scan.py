"""Launches of the serial part: one walk over all chunks, or, of long sequences of few heads, segments side by side.

Part of ``optimized/kda.py``; call it from there. A segment changes the state by an affine map, ``S -> M S + B``. So a
first walk finds the map of every segment but the last, a short one carries the state from segment to segment, and a
second walk makes the outputs: twice the work in a fraction of the time, and the same answer up to rounding whatever the
decays.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ._kda_checks import Layer
from ._kda_chunks import FIELDS, Chunks, most_chunks, most_cuts
from ._kda_scan_kernel import INTERPRETED, scan_kernel, seed_kernel
from ._kda_shape import KdaShape

Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]

# as many as an H200 has: a plan made without a device foresees the same segments
_PROCESSORS_WITHOUT_DEVICE = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes of tiles, and how the scan runs.

    Attributes:
        chunk: Tokens of a chunk.
        keys: Channels of a key, padded to a power of two.
        values: Channels of a value, padded.
        rows: Value channels of a program of the scan.
        stages: Chunks whose tiles are on their way at once.
        warps: Of a program of the scan.
        operand: Format in which tiles and operands of products are.
        precision: Of products of float32 operands.
        bulk: Whether tiles come by descriptors.
    """

    chunk: int
    keys: int
    values: int
    rows: int
    stages: int
    warps: int
    operand: torch.dtype
    precision: str = "ieee"
    bulk: bool = False


def block(width: int) -> int:
    """The power of two that covers a width, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def device_refusal(shape: KdaShape, *, capability: tuple[int, int]) -> str | None:
    """Why kernels cannot run on the device of a shape, or None."""
    if shape.dtype == torch.float64:
        return "float64 is not served: the kernels sum in float32"
    if INTERPRETED:
        return None
    if shape.device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {shape.device}"
    found = torch.cuda.get_device_capability(shape.device)
    if found < capability:
        return f"compute capability {capability[0]}.{capability[1]} is needed, got {found[0]}.{found[1]}"
    return None


def last_stride_refusal(layer: Layer) -> str | None:
    """Why kernels that read rows cannot read these tensors, or None."""
    for name, tensor in (("q", layer.q), ("k", layer.k), ("v", layer.v), ("g", layer.g), ("out", layer.out)):
        if tensor.stride(2) != 1 and tensor.shape[2] > 1:
            return f"{name} must be contiguous in its last dimension, got stride {tensor.stride(2)}"
    return None


def cutting(shape: KdaShape, blocks: Blocks) -> dict[str, int]:
    """How a batch is cut into chunks and segments, see ``lay_out``."""
    processors = _PROCESSORS_WITHOUT_DEVICE
    if shape.device.type == "cuda":
        index = torch.cuda.current_device() if shape.device.index is None else shape.device.index
        processors = int(triton.runtime.driver.active.utils.get_device_properties(index)["multiprocessor_count"])
    width = shape.num_v_heads * triton.cdiv(shape.head_dim_v, blocks.rows)
    return {"chunk_size": blocks.chunk, "width": width, "processors": processors}


def scan_parts(
    shape: KdaShape, blocks: Blocks, max_tokens: int, max_sequences: int, max_checkpoints: int, folded: torch.dtype
) -> Parts:
    """Tensors of the workspace: five tiles and a decay of each chunk and head, a map and a seed of each segment.

    Args:
        shape: Of the layer.
        blocks: Of the scan.
        max_tokens: Of a batch.
        max_sequences: Of a batch.
        max_checkpoints: Of a batch.
        folded: Format of the values that the inverse has been applied to.
    """
    heads, keys, values = shape.num_v_heads, blocks.keys, blocks.values
    chunks = most_chunks(max_tokens, max_sequences, max_checkpoints, blocks.chunk)
    tiles = chunks * heads
    rule = cutting(shape, blocks)
    cuts = most_cuts(chunks, rule["width"], rule["processors"])
    segments = max_sequences + cuts if cuts else 0
    return {
        "w": ((tiles * blocks.chunk, keys), blocks.operand),
        "queries": ((tiles * blocks.chunk, keys), blocks.operand),
        "keys": ((tiles * blocks.chunk, keys), blocks.operand),
        "u": ((tiles * values, blocks.chunk), folded),
        "o": ((tiles * values, blocks.chunk), blocks.operand),
        "decay": ((tiles, keys), torch.float32),
        "seeds": ((segments, heads, values, keys), torch.float32),
        "maps": ((segments, heads, values + keys, keys), torch.float32),
    }


def scan(
    tiles: dict[str, Any],
    chunks: Chunks,
    layer: Layer,
    initial: Tensor | None,
    final: Tensor,
    checkpoints: Tensor,
    *,
    blocks: Blocks,
) -> None:
    """Write the output and the states from the tiles of the chunks.

    Args:
        tiles: The tensors of ``scan_parts``, those of chunks as descriptors if ``blocks.bulk``.
        chunks: Of the batch.
        layer: Whose ``out`` is written.
        initial: ``[N, HV, K, V]``, any strides, or None.
        final: ``[N, HV, K, V]``, any strides; written.
        checkpoints: ``[M, HV, K, V]``, any strides; written.
        blocks: Of the scan.
    """
    precise: dict[str, Any] = {"PRECISION": "ieee" if blocks.precision == "ieee" else "tf32x3"}
    sizes: dict[str, Any] = {"KEYS": final.shape[2], "VALUES": final.shape[3]}
    sizes |= {"BLOCK_KEYS": blocks.keys, "BLOCK_VALUES": blocks.values, "BLOCK_ROWS": blocks.rows}
    heads, splits = final.shape[1], triton.cdiv(final.shape[3], blocks.rows)
    if chunks.cut:
        identity_rows = blocks.values + blocks.keys
        _walk(tiles, chunks, layer, None, tiles["maps"], checkpoints, blocks, sizes, identity_rows // blocks.rows)
        seed_kernel[(splits, heads, chunks.num_sequences)](
            tiles["maps"],
            tiles["seeds"],
            chunks.starts,
            final if initial is None else initial,
            heads,
            *(final if initial is None else initial).stride(),
            HAS_INITIAL=initial is not None,
            num_warps=8,
            **sizes,
            **precise,
        )
        # as [segments, HV, K, V]
        initial = tiles["seeds"].transpose(2, 3)
    _walk(tiles, chunks, layer, initial, final, checkpoints, blocks, sizes, splits)


def _walk(
    tiles: dict[str, Any],
    chunks: Chunks,
    layer: Layer,
    initial: Tensor | None,
    final: Tensor,
    checkpoints: Tensor,
    blocks: Blocks,
    sizes: dict[str, Any],
    splits: int,
) -> None:
    """One launch; with the maps as ``final`` it is the first of two."""
    mapped = final is tiles["maps"]
    keeps = len(checkpoints) > 0 and not mapped
    start = final if initial is None else initial
    scan_kernel[(splits, layer.out.shape[1], chunks.num_segments)](
        tiles["w"],
        tiles["queries"],
        tiles["keys"],
        tiles["u"],
        tiles["o"],
        tiles["decay"],
        chunks.chunks,
        chunks.segments,
        start,
        final,
        checkpoints,
        layer.out,
        layer.out.shape[1],
        *layer.out.stride()[:2],
        *start.stride(),
        *final.stride(),
        *checkpoints.stride(),
        FIELDS=FIELDS,
        CHUNK=blocks.chunk,
        HAS_INITIAL=initial is not None,
        HAS_CHECKPOINTS=keeps,
        SEEDED=chunks.cut,
        MAPPED=mapped,
        OPERAND=_TRITON_DTYPES[blocks.operand],
        PRECISION=blocks.precision,
        BULK=blocks.bulk,
        # a state on its way out takes the shared memory of a stage
        STAGES=max(1, blocks.stages - keeps),
        INTERPRETED=INTERPRETED,
        num_warps=blocks.warps,
        **sizes,
    )


_TRITON_DTYPES = {
    torch.float32: triton.language.float32,
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
}
