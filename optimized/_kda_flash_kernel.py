"""What of a chunk does not need the state, for a bounded gate and 128 channels, on the matrix units.

Launched by ``_kda_flash.py``. Chunks have 64 tokens, in two halves of 32. With a lower bound of -5 the decay between
two rows of a half is at least 2^-231, so one constant factor keeps both of its sides in range: ``k_i 2^(E_i + 115)``
and ``k_j 2^(-E_j - 115)``, ``E`` the sum of the log decays since the start of the half. As the factor is a constant,
no row depends on a later one. What lies between the halves is split at their boundary.

Sums of log decays are products with matrices of zeros and one other number. The log decay is rounded once to float16
and used so everywhere, which is exact for a gate that differs by 2^-12: at most 1e-4 in any decay. Registers are what
this kernel is short of, hence 64 channels at a time, and keys before queries; tiles that would keep a second program
off the processor are read again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from ._kda_kernel_parts import block_inverse, rounded, wide

# of the log decay, so that float16 resolves the slow ones; its inverse is the number in the matrices of sums
GATE_SCALE = tl.constexpr(4096.0)


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    """2^x by one instruction."""
    if INTERPRETED:
        y = tl.exp2(tl.minimum(x, 127.0))
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x by one instruction."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def _square_sum(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)


@triton.jit
def _key_channels(
    k,
    g,
    bias_ptr,
    keys_ptr,
    decay_ptr,
    tile,
    channels,
    inside,
    k_norm,
    amplitude,
    bound,
    after_ptr,
    after_half_ptr,
    since_half_ptr,
    since_start_ptr,
    near,
    far,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Some channels of the keys: writes those of the scan; adds to the products within and between the halves."""
    keys = k.to(tl.float32) * k_norm[:, None]
    logits = g.to(tl.float32)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + channels)[None, :]
    gate = bound * _reciprocal(1.0 + _exp2(amplitude * logits, INTERPRETED), INTERPRETED)
    # a logit of zero is no decay of zero
    gate = tl.where(inside[:, None], gate, 0.0).to(tl.float16)
    total = tl.sum(gate.to(tl.float32), 0) * (1.0 / GATE_SCALE)
    tl.store(decay_ptr + channels, _exp2(total, INTERPRETED))
    to_end = _exp2(tl.dot(tl.load(after_ptr), gate), INTERPRETED)
    tl.store(keys_ptr + tile, rounded(keys * to_end, tl.bfloat16, INTERPRETED))
    to_half = _exp2(tl.dot(tl.load(after_half_ptr), gate), INTERPRETED)
    far_keys = tl.trans(rounded(keys * to_half, tl.bfloat16, INTERPRETED))
    since_half = tl.dot(tl.load(since_half_ptr), gate)
    near_keys = tl.trans(rounded(keys * _exp2(-115.0 - since_half, INTERPRETED), tl.bfloat16, INTERPRETED))
    ahead = keys * _exp2(since_half + 115.0, INTERPRETED)
    near = tl.dot(rounded(ahead, tl.bfloat16, INTERPRETED), near_keys, near)
    # 2^-115: the other side has no factor
    far = tl.dot(rounded(ahead * 2.407412430484045e-35, tl.bfloat16, INTERPRETED), far_keys, far)
    start_keys = (keys * _exp2(tl.dot(tl.load(since_start_ptr), gate), INTERPRETED)).to(tl.float16)
    return gate, near_keys, far_keys, start_keys, near, far


@triton.jit
def _query_channels(q, q_norm, gate, near_keys, far_keys, since_half_ptr, near, far, INTERPRETED: tl.constexpr):
    """Some channels of the queries: adds to the products within and between the halves."""
    queries = q.to(tl.float32) * q_norm[:, None]
    ahead = queries * _exp2(tl.dot(tl.load(since_half_ptr), gate) + 115.0, INTERPRETED)
    near = tl.dot(rounded(ahead, tl.bfloat16, INTERPRETED), near_keys, near)
    far = tl.dot(rounded(ahead * 2.407412430484045e-35, tl.bfloat16, INTERPRETED), far_keys, far)
    return near, far


# as many chunks as there are compile nothing new
@triton.jit(do_not_specialize=["num_chunks"])
def prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    chunks_ptr,
    sums_ptr,
    w_ptr,
    queries_ptr,
    keys_ptr,
    u_ptr,
    o_ptr,
    decay_ptr,
    num_heads,
    num_chunks,
    group,
    scale,
    bound,
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
    FIELDS: tl.constexpr,
    HAS_AMPLITUDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One chunk of one head: the tiles of the scan.

    ::

        T = (I + b tril(K K^T decayed, -1))^-1 b,    P = tril(Q K^T decayed) T
        W = -T K_start,    U = T V,    Q' = Q_start - P K_start,    O' = P V

    ``sums_ptr`` has four matrices ``[64, 64]``, float16: rows after one in the chunk, after it in its half, up to it in
    its half, up to it in the chunk. ``bound`` is the lower bound in base 2 times ``GATE_SCALE``.
    """
    CHUNK: tl.constexpr = 64
    WIDTH: tl.constexpr = 128
    PART: tl.constexpr = 64
    # the first chunks last: the scan begins with them, and finds their tiles in the cache
    chunk = num_chunks - 1 - tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * FIELDS).to(tl.int64)
    length = tl.load(chunks_ptr + chunk * FIELDS + 1)
    rows = tl.arange(0, CHUNK)
    part = tl.arange(0, PART)
    row, column = rows[:, None], tl.arange(0, CHUNK)[None, :]
    inside = rows < length
    mask = inside[:, None]
    # rows of the caller's may be any number of elements apart
    apart = row.to(tl.int64)

    q_ptr += first * stride_q_t + (head // group) * stride_q_h
    k_ptr += first * stride_k_t + (head // group) * stride_k_h
    v_ptr += first * stride_v_t + head * stride_v_h
    g_ptr += first * stride_g_t + head * stride_g_h
    beta_ptr += first * stride_beta_t + head * stride_beta_h
    place = chunk.to(tl.int64) * num_heads + head
    w_ptr += place * CHUNK * WIDTH
    queries_ptr += place * CHUNK * WIDTH
    keys_ptr += place * CHUNK * WIDTH
    u_ptr += place * CHUNK * WIDTH
    o_ptr += place * CHUNK * WIDTH
    decay_ptr += place * WIDTH
    dt_bias_ptr += head * WIDTH
    amplitude = -1.4426950408889634
    if HAS_AMPLITUDE:
        amplitude = tl.exp2(tl.load(a_log_ptr + head) * 1.4426950408889634) * -1.4426950408889634
    square = row * CHUNK + column
    after_ptr = sums_ptr + square
    after_half_ptr = after_ptr + CHUNK * CHUNK
    since_half_ptr = after_half_ptr + CHUNK * CHUNK
    since_start_ptr = since_half_ptr + CHUNK * CHUNK
    tile = row * WIDTH + part[None, :]

    k_low = tl.load(k_ptr + apart * stride_k_t + part[None, :], mask=mask, other=0.0)
    k_high = tl.load(k_ptr + apart * stride_k_t + part[None, :] + PART, mask=mask, other=0.0)
    g_low = tl.load(g_ptr + apart * stride_g_t + part[None, :], mask=mask, other=0.0)
    g_high = tl.load(g_ptr + apart * stride_g_t + part[None, :] + PART, mask=mask, other=0.0)
    k_norm = tl.rsqrt(_square_sum(k_low) + _square_sum(k_high) + 1e-6)
    near = tl.zeros([CHUNK, CHUNK], tl.float32)
    far = tl.zeros([CHUNK, CHUNK], tl.float32)
    gate_low, near_low, far_low, start_low, near, far = _key_channels(
        k_low, g_low, dt_bias_ptr, keys_ptr, decay_ptr, tile, part, inside, k_norm, amplitude, bound,
        after_ptr, after_half_ptr, since_half_ptr, since_start_ptr, near, far, HAS_BIAS, INTERPRETED,
    )  # fmt: skip
    gate_high, near_high, far_high, start_high, near, far = _key_channels(
        k_high, g_high, dt_bias_ptr, keys_ptr, decay_ptr, tile + PART, part + PART, inside, k_norm, amplitude, bound,
        after_ptr, after_half_ptr, since_half_ptr, since_start_ptr, near, far, HAS_BIAS, INTERPRETED,
    )  # fmt: skip
    # on their way while the triangle is inverted
    q_low = tl.load(q_ptr + apart * stride_q_t + part[None, :], mask=mask, other=0.0)
    q_high = tl.load(q_ptr + apart * stride_q_t + part[None, :] + PART, mask=mask, other=0.0)
    same = row // 32 == column // 32
    crossing = row // 32 > column // 32
    beta = tl.load(beta_ptr + rows.to(tl.int64) * stride_beta_t, mask=inside, other=0.0).to(tl.float32)
    beta = _reciprocal(1.0 + _exp2(-1.4426950408889634 * beta, INTERPRETED), INTERPRETED)
    beta = tl.where(inside, beta, 0.0)
    gram = tl.where(crossing, far, tl.where(same & (row > column), near, 0.0)) * beta[:, None]

    # float32 substitution in blocks of 16, then two exact merges; entries of the inverse are at most 1, so float16
    # serves their operands, and rounds 8 times finer than bfloat16
    inverse = block_inverse(gram, 4, 16, CHUNK)
    below = tl.where(same & (row // 16 > column // 16), gram, 0.0).to(tl.float16)
    half = inverse.to(tl.float16)
    inverse -= tl.dot(tl.dot(half, below).to(tl.float16), half)
    below = tl.where(crossing, gram, 0.0).to(tl.float16)
    half = inverse.to(tl.float16)
    inverse -= tl.dot(tl.dot(half, below).to(tl.float16), half)
    inverse = inverse * beta[None, :]
    half = inverse.to(tl.float16)

    q_norm = tl.rsqrt(_square_sum(q_low) + _square_sum(q_high) + 1e-6) * scale
    near = tl.zeros([CHUNK, CHUNK], tl.float32)
    far = tl.zeros([CHUNK, CHUNK], tl.float32)
    near, far = _query_channels(q_low, q_norm, gate_low, near_low, far_low, since_half_ptr, near, far, INTERPRETED)
    near, far = _query_channels(q_high, q_norm, gate_high, near_high, far_high, since_half_ptr, near, far, INTERPRETED)
    read = tl.where(crossing, far, tl.where(same & (row >= column), near, 0.0)).to(tl.float16)
    read = tl.dot(read, half)
    minus = -half
    tl.store(w_ptr + tile, rounded(tl.dot(minus, start_low), tl.bfloat16, INTERPRETED))
    tl.store(w_ptr + tile + PART, rounded(tl.dot(minus, start_high), tl.bfloat16, INTERPRETED))
    # values are exact in bfloat16 but have no bound: the inverse as the sum of two numbers
    channels = tl.arange(0, WIDTH)
    values = tl.load(v_ptr + apart * stride_v_t + channels[None, :], mask=mask, other=0.0)
    values = tl.trans(wide(values, INTERPRETED))
    tall = channels[:, None] * CHUNK + column
    high = rounded(inverse, tl.bfloat16, INTERPRETED)
    low = rounded(inverse - high.to(tl.float32), tl.bfloat16, INTERPRETED)
    tl.store(u_ptr + tall, tl.dot(values, tl.trans(high), tl.dot(values, tl.trans(low))))
    answer = tl.dot(values, tl.trans(rounded(read, tl.bfloat16, INTERPRETED)))
    tl.store(o_ptr + tall, rounded(answer, tl.bfloat16, INTERPRETED))
    minus = (-read).to(tl.float16)
    since_start = _exp2(tl.dot(tl.load(since_start_ptr), gate_low), INTERPRETED)
    start_queries = q_low.to(tl.float32) * q_norm[:, None] * since_start
    tl.store(queries_ptr + tile, rounded(tl.dot(minus, start_low, start_queries), tl.bfloat16, INTERPRETED))
    since_start = _exp2(tl.dot(tl.load(since_start_ptr), gate_high), INTERPRETED)
    start_queries = q_high.to(tl.float32) * q_norm[:, None] * since_start
    tl.store(queries_ptr + tile + PART, rounded(tl.dot(minus, start_high, start_queries), tl.bfloat16, INTERPRETED))
