"""The Triton kernel of ``kda_step``; launched by ``_kda_step_triton.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from ._kda_kernel_parts import log2_decay, rounded, write_strength


@triton.jit
def _vector(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``WIDTH`` contiguous numbers in float32, 0 past them."""
    place = tl.arange(0, BLOCK)
    return tl.load(pointer + place, mask=place < WIDTH, other=0.0).to(tl.float32)


# how many rows and columns there are changes from step to step
@triton.jit(do_not_specialize=["num_rows", "columns"])
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    pool_ptr,
    out_ptr,
    cu_seqlens_ptr,
    starts_ptr,
    slots_ptr,
    num_rows,
    columns,
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
    stride_pool_n,
    stride_pool_h,
    stride_pool_k,
    stride_pool_v,
    stride_out_t,
    stride_out_h,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GATE: tl.constexpr,
    HAS_AMPLITUDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LOGITS: tl.constexpr,
    NORMALISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """All tokens of one sequence, some value columns of one head; the state stays on chip between tokens."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    channels = tl.arange(0, BLOCK_KEYS)
    real = rows < VALUES
    first = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    start = tl.load(starts_ptr + sequence)
    out_ptr += head * stride_out_h + rows
    nothing = rounded(tl.zeros([BLOCK_ROWS], tl.float32), out_ptr.dtype.element_ty, INTERPRETED)
    if sequence == tl.num_programs(2) - 1:
        for step in tl.range(0, num_rows - end):
            tl.store(out_ptr + (end.to(tl.int64) + step) * stride_out_t, nothing, mask=real)
    if start < 0:
        for step in tl.range(0, end - first):
            tl.store(out_ptr + (first.to(tl.int64) + step) * stride_out_t, nothing, mask=real)
        end = first

    q_ptr += (head // group) * stride_q_h
    k_ptr += (head // group) * stride_k_h
    v_ptr += head * stride_v_h + rows
    g_ptr += head * stride_g_h
    beta_ptr += head * stride_beta_h
    bias = tl.zeros([BLOCK_KEYS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + head * stride_bias_h + channels * stride_bias_d, mask=channels < KEYS, other=0.0)
    amplitude = 1.0
    if HAS_AMPLITUDE:
        amplitude = tl.exp(tl.load(a_log_ptr + head * stride_a_log))
    inside = real[:, None] & (channels < KEYS)[None, :]
    pool_ptr += head * stride_pool_h
    tile = rows[:, None] * stride_pool_v + channels[None, :] * stride_pool_k
    begun = inside & (first < end)
    state = tl.load(pool_ptr + tl.maximum(start, 0).to(tl.int64) * stride_pool_n + tile, mask=begun, other=0.0)
    state = state.to(tl.float32)
    for step in tl.range(0, end - first):
        token = first.to(tl.int64) + step
        q = _vector(q_ptr + token * stride_q_t, KEYS, BLOCK_KEYS)
        k = _vector(k_ptr + token * stride_k_t, KEYS, BLOCK_KEYS)
        if NORMALISE:
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        decay = log2_decay(
            _vector(g_ptr + token * stride_g_t, KEYS, BLOCK_KEYS), bias, amplitude, lower_bound_log2, GATE
        )
        beta = write_strength(tl.load(beta_ptr + token * stride_beta_t).to(tl.float32), True, LOGITS)
        v = tl.load(v_ptr + token * stride_v_t, mask=real, other=0.0).to(tl.float32)
        state *= tl.exp2(decay)[None, :]
        error = beta * (v - tl.sum(state * k[None, :], 1))
        state += error[:, None] * k[None, :]
        answer = scale * tl.sum(state * q[None, :], 1)
        tl.store(out_ptr + token * stride_out_t, rounded(answer, out_ptr.dtype.element_ty, INTERPRETED), mask=real)
        slot = tl.load(slots_ptr + sequence * columns + step)
        target = pool_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_pool_n + tile
        tl.store(target, rounded(state, pool_ptr.dtype.element_ty, INTERPRETED), mask=inside & (slot >= 0))
