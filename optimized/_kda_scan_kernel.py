"""The serial part of the gated delta rule as Triton kernels; launched by ``_kda_scan.py``.

States are held transposed, value columns as rows, so that the state and the new values are left operands of their
products straight from registers. With the tiles of a chunk from either preparation::

    V'^T = U^T + S^T W^T,     O^T = O'^T + S^T Q'^T,     S^T = S^T diag(decay) + V'^T K

``U`` has the values, ``W`` minus the prediction: it is taken off in float32, before ``V'`` is rounded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from ._kda_kernel_parts import near, rounded, wide


@triton.jit
def _tile(source, tile, row, HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BULK: tl.constexpr):
    """``[ROWS, COLUMNS]`` from a row of a tile of ``HEIGHT`` rows on: by descriptor, or by pointers."""
    if BULK:
        found = source.load([tile * HEIGHT + row, 0])
    else:
        source += tile.to(tl.int64) * HEIGHT * COLUMNS
        found = tl.load(source + (row + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    return found


@triton.jit
def scan_kernel(
    w,
    queries,
    keys,
    u,
    o,
    decay_ptr,
    chunks_ptr,
    segments_ptr,
    initial_ptr,
    final_ptr,
    checkpoint_ptr,
    out_ptr,
    num_heads,
    stride_out_t,
    stride_out_h,
    stride_initial_n,
    stride_initial_h,
    stride_initial_k,
    stride_initial_v,
    stride_final_n,
    stride_final_h,
    stride_final_k,
    stride_final_v,
    stride_checkpoint_n,
    stride_checkpoint_h,
    stride_checkpoint_k,
    stride_checkpoint_v,
    FIELDS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr,
    SEEDED: tl.constexpr,
    MAPPED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Walk the chunks of one segment with some value columns of one head.

    ``SEEDED``: the state of each segment is given. ``MAPPED``: there are no outputs, and the states that zero and, past
    the values, the identity without values become are written: what the segment does to any state.
    """
    first_row = tl.program_id(0) * BLOCK_ROWS
    head = tl.program_id(1)
    segment = tl.program_id(2)
    sequence = tl.load(segments_ptr + segment * FIELDS)
    first = tl.load(segments_ptr + segment * FIELDS + 1)
    end = tl.load(segments_ptr + segment * FIELDS + 2)
    last = tl.load(segments_ptr + segment * FIELDS + 3)
    if MAPPED and last != 0:
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    channels = tl.arange(0, BLOCK_KEYS)
    tokens = tl.arange(0, CHUNK)
    inside = (rows < VALUES)[:, None] & (channels < KEYS)[None, :]
    identity = first_row >= BLOCK_VALUES
    # the rows of the identity have no values: they read those of the first columns, and leave them out
    value_row = tl.where(identity, 0, first_row)

    head64 = head.to(tl.int64)
    owner = (segment if SEEDED else sequence).to(tl.int64)
    state = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    if MAPPED:
        state = tl.where((rows - BLOCK_VALUES)[:, None] == channels[None, :], 1.0, state)
    if HAS_INITIAL:
        initial_ptr += owner * stride_initial_n + head64 * stride_initial_h
        pointers = initial_ptr + rows[:, None] * stride_initial_v + channels[None, :] * stride_initial_k
        state = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)

    for chunk in tl.range(first, end, num_stages=STAGES):
        tile = chunk * num_heads + head
        decay = tl.load(decay_ptr + tile.to(tl.int64) * BLOCK_KEYS + channels)
        w_tile = wide(_tile(w, tile, 0, CHUNK, CHUNK, BLOCK_KEYS, BULK), INTERPRETED)
        key_tile = wide(_tile(keys, tile, 0, CHUNK, CHUNK, BLOCK_KEYS, BULK), INTERPRETED)
        u_tile = _tile(u, tile, value_row, BLOCK_VALUES, BLOCK_ROWS, CHUNK, BULK).to(tl.float32)
        if MAPPED:
            u_tile = tl.where(identity, 0.0, u_tile)
        operand = near(rounded(state, OPERAND, INTERPRETED), PRECISION)
        values = tl.dot(operand, tl.trans(w_tile), u_tile, input_precision=PRECISION)
        if not MAPPED:
            query_tile = wide(_tile(queries, tile, 0, CHUNK, CHUNK, BLOCK_KEYS, BULK), INTERPRETED)
            o_tile = _tile(o, tile, value_row, BLOCK_VALUES, BLOCK_ROWS, CHUNK, BULK).to(tl.float32)
            answer = tl.dot(operand, tl.trans(query_tile), o_tile, input_precision=PRECISION)
            token = tl.load(chunks_ptr + chunk * FIELDS).to(tl.int64)
            length = tl.load(chunks_ptr + chunk * FIELDS + 1)
            targets = (token + tokens)[None, :] * stride_out_t + head64 * stride_out_h + rows[:, None]
            written = (tokens < length)[None, :] & (rows < VALUES)[:, None]
            tl.store(out_ptr + targets, rounded(answer, out_ptr.dtype.element_ty, INTERPRETED), mask=written)
        values = near(rounded(values, OPERAND, INTERPRETED), PRECISION)
        state = tl.dot(values, key_tile, state * decay[None, :], input_precision=PRECISION)
        if HAS_CHECKPOINTS:
            kept = tl.load(chunks_ptr + chunk * FIELDS + 2)
            targets = tl.maximum(kept, 0).to(tl.int64) * stride_checkpoint_n + head64 * stride_checkpoint_h
            targets += rows[:, None] * stride_checkpoint_v + channels[None, :] * stride_checkpoint_k
            stored = rounded(state, checkpoint_ptr.dtype.element_ty, INTERPRETED)
            tl.store(checkpoint_ptr + targets, stored, mask=inside & (kept >= 0))

    if MAPPED:
        final_ptr += (segment.to(tl.int64) * num_heads + head) * (BLOCK_VALUES + BLOCK_KEYS) * BLOCK_KEYS
        tl.store(final_ptr + rows[:, None] * BLOCK_KEYS + channels[None, :], state)
    else:
        final_ptr += sequence.to(tl.int64) * stride_final_n + head64 * stride_final_h
        pointers = final_ptr + rows[:, None] * stride_final_v + channels[None, :] * stride_final_k
        stored = rounded(state, final_ptr.dtype.element_ty, INTERPRETED)
        tl.store(pointers, stored, mask=inside & (last != 0))


@triton.jit
def seed_kernel(
    maps_ptr,
    seeds_ptr,
    starts_ptr,
    initial_ptr,
    num_heads,
    stride_initial_n,
    stride_initial_h,
    stride_initial_k,
    stride_initial_v,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry some value columns of a head from segment to segment of one sequence: ``S^T = S^T M^T + B^T``."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    channels = tl.arange(0, BLOCK_KEYS)
    inside = (rows < VALUES)[:, None] & (channels < KEYS)[None, :]
    tile = rows[:, None] * BLOCK_KEYS + channels[None, :]
    square = channels[:, None] * BLOCK_KEYS + channels[None, :]
    state = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
    if HAS_INITIAL:
        initial_ptr += sequence * stride_initial_n + head * stride_initial_h
        pointers = initial_ptr + rows[:, None] * stride_initial_v + channels[None, :] * stride_initial_k
        state = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    end = tl.load(starts_ptr + sequence + 1)
    for segment in tl.range(tl.load(starts_ptr + sequence), end):
        place = segment * num_heads + head
        tl.store(seeds_ptr + place * BLOCK_VALUES * BLOCK_KEYS + tile, state)
        if segment < end - 1:
            here = maps_ptr + place * (BLOCK_VALUES + BLOCK_KEYS) * BLOCK_KEYS
            added = tl.load(here + tile)
            matrix = tl.load(here + BLOCK_VALUES * BLOCK_KEYS + square)
            state = tl.dot(state, matrix, added, input_precision=PRECISION)


# decided when the kernel was decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(scan_kernel, triton.runtime.JITFunction)
