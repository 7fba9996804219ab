"""The plain Triton kernel of ``sparse_mla``: one query a program. Launched by ``_sparse_mla_triton.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _listed(list_ptr, first, count, stride_j, BLOCK_N: tl.constexpr, UNIT: tl.constexpr):
    """Load a tile of a list; -1 behind its end."""
    entries = first + tl.arange(0, BLOCK_N)
    if UNIT:
        return tl.load(list_ptr + entries, mask=entries < count, other=-1)
    return tl.load(list_ptr + entries.to(tl.int64) * stride_j, mask=entries < count, other=-1)


@triton.jit
def _gather(
    base, rows, valid, stride_row, stride_column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Load columns of the listed rows, zeros for padding and past the last column; ``UNIT`` if these are contiguous."""
    columns = tl.arange(0, BLOCK)
    if UNIT:
        pointers = base + rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
    else:
        pointers = base + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
    if COLUMNS < BLOCK:
        return tl.load(pointers, mask=valid[:, None] & (columns < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _attend_query(
    query,
    heads,
    q_ptr,
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    scale_log2,
    s_kv,
    h_q,
    stride_q_s,
    stride_q_h,
    stride_q_d,
    stride_kv_s,
    stride_kv_d,
    stride_indices_s,
    stride_indices_j,
    stride_out_s,
    stride_out_h,
    stride_out_d,
    TOPK: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UNIT_STRIDES: tl.constexpr,
):
    """A tile of heads of one query, int64, against its list."""
    real = heads < h_q
    MAIN: tl.constexpr = min(D_QK, BLOCK_MAIN)
    count = TOPK
    if topk_length_ptr is not None:
        count = tl.minimum(tl.load(topk_length_ptr + query), TOPK)

    # a query's heads are gathered as the rows of a matrix
    q_base = q_ptr + query * stride_q_s
    q_main = _gather(q_base, heads, real, stride_q_h, stride_q_d, MAIN, BLOCK_MAIN, UNIT_STRIDES)
    q_rest = q_main
    if BLOCK_REST > 0:
        q_rest = _gather(
            q_base + MAIN * stride_q_d, heads, real, stride_q_h, stride_q_d, D_QK - MAIN, BLOCK_REST, UNIT_STRIDES
        )

    acc = tl.zeros([BLOCK_H, BLOCK_MAIN], tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    list_ptr = indices_ptr + query * stride_indices_s
    next_rows = _listed(list_ptr, 0, count, stride_indices_j, BLOCK_N, UNIT_STRIDES)
    for first in tl.range(0, count, BLOCK_N, num_stages=NUM_STAGES):
        # the list travels a tile ahead of the rows that it names
        rows = next_rows
        next_rows = _listed(list_ptr, first + BLOCK_N, count, stride_indices_j, BLOCK_N, UNIT_STRIDES)
        valid = (rows >= 0) & (rows < s_kv)
        kv_main = _gather(kv_ptr, rows, valid, stride_kv_s, stride_kv_d, MAIN, BLOCK_MAIN, UNIT_STRIDES)
        logits = tl.dot(q_main, kv_main.T, input_precision="ieee")
        if BLOCK_REST > 0:
            rest_ptr = kv_ptr + MAIN * stride_kv_d
            kv_rest = _gather(rest_ptr, rows, valid, stride_kv_s, stride_kv_d, D_QK - MAIN, BLOCK_REST, UNIT_STRIDES)
            logits = tl.dot(q_rest, kv_rest.T, logits, input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # nothing valid yet: any finite shift makes the weights exp2(-inf) = 0
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        # the first columns of a row are its value; what lies behind them is not stored
        acc = tl.dot(weights.to(kv_main.dtype), kv_main, acc * decay[:, None], input_precision="ieee")
        row_max = new_max

    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    lse_log2 = tl.where(empty, 0.0, row_max) + tl.log2(safe_sum)
    share = 1.0 / safe_sum
    if attn_sink_ptr is not None:
        sink_log2 = tl.load(attn_sink_ptr + heads, mask=real, other=float("-inf")) * 1.4426950408889634
        share = share / (1.0 + tl.exp2(sink_log2 - lse_log2))
    out = tl.where(empty[:, None], 0.0, acc * share[:, None])
    columns = tl.arange(0, BLOCK_MAIN)
    out_rows = out_ptr + query * stride_out_s + heads.to(tl.int64)[:, None] * stride_out_h
    out_mask = real[:, None] & (columns < D_V)[None, :]
    tl.store(out_rows + columns.to(tl.int64)[None, :] * stride_out_d, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    lse = tl.where(empty, float("-inf"), lse_log2 * 0.6931471805599453)
    # a maximum drops a NaN, a sum keeps it
    highest = tl.where(row_sum != row_sum, row_sum, row_max * 0.6931471805599453)
    tl.store(lse_ptr + query * h_q + heads, lse, mask=real)
    tl.store(max_logits_ptr + query * h_q + heads, highest, mask=real)


@triton.jit(do_not_specialize=["s_kv", "h_q"])
def sparse_mla_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    scale_log2,
    s_kv,
    h_q,
    stride_q_s,
    stride_q_h,
    stride_q_d,
    stride_kv_s,
    stride_kv_d,
    stride_indices_s,
    stride_indices_j,
    stride_out_s,
    stride_out_h,
    stride_out_d,
    TOPK: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UNIT_STRIDES: tl.constexpr,
):
    """One program a query and tile of heads."""
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    _attend_query(
        query, heads, q_ptr, kv_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr,
        scale_log2, s_kv, h_q, stride_q_s, stride_q_h, stride_q_d, stride_kv_s, stride_kv_d, stride_indices_s,
        stride_indices_j, stride_out_s, stride_out_h, stride_out_d, TOPK, D_QK, D_V, BLOCK_H, BLOCK_N, BLOCK_MAIN,
        BLOCK_REST, NUM_STAGES, UNIT_STRIDES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["s_q", "s_kv", "h_q"])
def flagged_kernel(
    flags_ptr,
    s_q,
    q_ptr,
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    scale_log2,
    s_kv,
    h_q,
    stride_q_s,
    stride_q_h,
    stride_q_d,
    stride_kv_s,
    stride_kv_d,
    stride_indices_s,
    stride_indices_j,
    stride_out_s,
    stride_out_h,
    stride_out_d,
    TOPK: tl.constexpr,
    D_QK: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    UNIT_STRIDES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One program a stretch of queries and tile of heads, for queries that have a flag, ``[s_q, h_q]``; seldom any."""
    first = tl.program_id(0).to(tl.int64) * QUERIES
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    queries = first + tl.arange(0, QUERIES)
    inside = (queries < s_q)[:, None] & (heads < h_q)[None, :]
    flags = tl.load(flags_ptr + queries[:, None] * h_q + heads[None, :], mask=inside, other=0).to(tl.int32)
    if tl.max(tl.max(flags, 1), 0) == 0:
        return
    for query in range(first, tl.minimum(first + QUERIES, s_q)):
        own = tl.load(flags_ptr + query * h_q + heads, mask=heads < h_q, other=0).to(tl.int32)
        if tl.max(own, 0) != 0:
            _attend_query(
                query, heads, q_ptr, kv_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr,
                max_logits_ptr, scale_log2, s_kv, h_q, stride_q_s, stride_q_h, stride_q_d, stride_kv_s, stride_kv_d,
                stride_indices_s, stride_indices_j, stride_out_s, stride_out_h, stride_out_d, TOPK, D_QK, D_V, BLOCK_H,
                BLOCK_N, BLOCK_MAIN, BLOCK_REST, NUM_STAGES, UNIT_STRIDES,
            )  # fmt: skip
