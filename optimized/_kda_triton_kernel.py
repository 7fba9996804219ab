"""What of a chunk does not need the state, for any gate, as a Triton kernel; launched by ``_kda_triton.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from ._kda_kernel_parts import block_inverse, inverse_norm, load_rows, log2_decay, near, write_strength


@triton.jit
def _row_decay(
    g_ptr,
    rows,
    inside,
    stride_g_t,
    bias,
    amplitude,
    lower_bound_log2,
    KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Base-2 log decay of rows of one head, ``[rows, BLOCK_KEYS]``; 0 in rows that are not ``inside``."""
    g = load_rows(g_ptr + rows * stride_g_t, inside, KEYS, BLOCK_KEYS).to(tl.float32)
    decay = log2_decay(g, bias[None, :], amplitude, lower_bound_log2, GATE)
    # a logit of zero is no decay of zero
    return tl.where(inside[:, None] & (tl.arange(0, BLOCK_KEYS) < KEYS)[None, :], decay, 0.0)


@triton.jit
def prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    w_ptr,
    queries_ptr,
    keys_ptr,
    u_ptr,
    o_ptr,
    decay_ptr,
    num_heads,
    group,
    scale,
    lower_bound_log2,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_g_t,
    stride_g_h,
    stride_beta_t,
    stride_beta_h,
    stride_a_log,
    stride_bias_h,
    stride_bias_d,
    FIELDS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    GATE: tl.constexpr,
    HAS_AMPLITUDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOGITS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One chunk of one head: the tiles of the scan.

    ::

        T = (I + b tril(K K^T decayed, -1))^-1 b,    P = tril(Q K^T decayed) T
        W = -T K_start,    U = T V,    Q' = Q_start - P K_start,    O' = P V

    The 32 rows are two blocks of 16. Decays between rows of a block are summed row by row and never differences, those
    between blocks are split at the boundary, so that no exponent is positive whatever the gate, and that nothing
    depends on a later row.
    """
    HALF: tl.constexpr = CHUNK // 2
    chunk = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * FIELDS).to(tl.int64)
    length = tl.load(chunks_ptr + chunk * FIELDS + 1)
    rows = tl.arange(0, CHUNK)
    inside = rows < length
    channels = tl.arange(0, BLOCK_KEYS)
    local = rows % HALF
    late = rows >= HALF
    row, column = rows[:, None], tl.arange(0, CHUNK)[None, :]

    q_ptr += (head // group) * stride_q_h
    k_ptr += (head // group) * stride_k_h
    g_ptr += head * stride_g_h
    q = load_rows(q_ptr + (first + rows) * stride_q_t, inside, KEYS, BLOCK_KEYS).to(tl.float32)
    k = load_rows(k_ptr + (first + rows) * stride_k_t, inside, KEYS, BLOCK_KEYS).to(tl.float32)
    q_norm = inverse_norm(q, NORMALISE) * scale
    k_norm = inverse_norm(k, NORMALISE)
    bias = tl.zeros([BLOCK_KEYS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + head * stride_bias_h + channels * stride_bias_d, mask=channels < KEYS, other=0.0)
    amplitude = 1.0
    if HAS_AMPLITUDE:
        amplitude = tl.exp(tl.load(a_log_ptr + head * stride_a_log))
    beta = tl.load(beta_ptr + (first + rows) * stride_beta_t + head * stride_beta_h, mask=inside, other=0.0)
    beta = write_strength(beta.to(tl.float32), inside, LOGITS)

    # products within the two blocks, a column at a time from the last; ``past`` sums the decay since that column
    gram = tl.zeros([CHUNK, CHUNK], tl.float32)
    read = tl.zeros([CHUNK, CHUNK], tl.float32)
    past = tl.zeros([CHUNK, BLOCK_KEYS], tl.float32)
    for step in tl.range(0, HALF):
        place = HALF - 1 - step
        source = tl.where(late, HALF, 0) + place
        known = source < length
        key = load_rows(k_ptr + (first + source) * stride_k_t, known, KEYS, BLOCK_KEYS).to(tl.float32)
        key *= tl.exp2(past)
        here = (column == tl.where(late, HALF, 0)[:, None] + place) & (local >= place)[:, None]
        gram = tl.where(here, tl.sum(k * key, 1)[:, None], gram)
        read = tl.where(here, tl.sum(q * key, 1)[:, None], read)
        decay = _row_decay(
            g_ptr, first + source, known, stride_g_t, bias, amplitude, lower_bound_log2, KEYS, BLOCK_KEYS, GATE
        )
        past = tl.where((local >= place)[:, None], past + decay, 0.0)

    # now ``past`` is the decay since the start of the block; the rest of a block after a row comes by a product
    decay = _row_decay(
        g_ptr, first + rows, inside, stride_g_t, bias, amplitude, lower_bound_log2, KEYS, BLOCK_KEYS, GATE
    )
    after = (row // HALF == column // HALF) & (row < column)
    rest = tl.dot(tl.where(after, 1.0, 0.0), decay, input_precision=SUMS)
    early_total = tl.sum(tl.where(late[:, None], 0.0, decay), 0)
    late_total = tl.sum(tl.where(late[:, None], decay, 0.0), 0)
    since_block = tl.exp2(past)
    crossing = near(tl.trans(tl.where(late[:, None], 0.0, k * tl.exp2(rest))), PRECISION)
    late_k = near(tl.where(late[:, None], k * since_block, 0.0), PRECISION)
    late_q = near(tl.where(late[:, None], q * since_block, 0.0), PRECISION)
    gram = tl.dot(late_k, crossing, gram, input_precision=PRECISION)
    read = tl.dot(late_q, crossing, read, input_precision=PRECISION)
    gram = tl.where(row > column, gram * (k_norm * beta)[:, None] * k_norm[None, :], 0.0)
    read = tl.where(row >= column, read * q_norm[:, None] * k_norm[None, :], 0.0)

    inverse = block_inverse(gram, 2, HALF, CHUNK)
    # the second block row of the inverse of a triangle of two blocks
    below = tl.where(row // HALF > column // HALF, gram, 0.0)
    inverse -= tl.dot(tl.dot(inverse, below, input_precision=SUMS), inverse, input_precision=SUMS)
    # of equal tokens whole diagonals are equal, and so would their rounding errors be: they would add up
    inverse *= beta[None, :]
    read = near(tl.dot(read, inverse, input_precision=SUMS), PRECISION)

    tile = chunk.to(tl.int64) * num_heads + head
    wide_tile = tile * CHUNK * BLOCK_KEYS + row * BLOCK_KEYS + channels[None, :]
    start = tl.exp2(past + tl.where(late[:, None], early_total[None, :], 0.0))
    k_start = near(k * k_norm[:, None] * start, PRECISION)
    tl.store(w_ptr + wide_tile, near(-tl.dot(inverse, k_start, input_precision=SUMS), PRECISION))
    q_start = q * q_norm[:, None] * start
    queries = q_start - tl.dot(read, k_start, input_precision=PRECISION)
    tl.store(queries_ptr + wide_tile, near(queries, PRECISION))
    to_end = tl.exp2(rest + tl.where(late[:, None], 0.0, late_total[None, :]))
    tl.store(keys_ptr + wide_tile, near(k * k_norm[:, None] * to_end, PRECISION))
    tl.store(decay_ptr + tile * BLOCK_KEYS + channels, tl.exp2(early_total + late_total))

    v_rows = v_ptr + (first + rows) * stride_v_t + head * stride_v_h
    v = tl.trans(load_rows(v_rows, inside, VALUES, BLOCK_VALUES).to(tl.float32))
    tall_tile = tile * BLOCK_VALUES * CHUNK + tl.arange(0, BLOCK_VALUES)[:, None] * CHUNK + column
    tl.store(u_ptr + tall_tile, tl.dot(v, tl.trans(inverse), input_precision=SUMS))
    tl.store(o_ptr + tall_tile, tl.dot(v, tl.trans(read), input_precision=PRECISION))
