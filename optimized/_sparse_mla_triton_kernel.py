"""The plain Triton kernel of ``sparse_mla``: one query a program. Launched by ``_sparse_mla_triton.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _listed(indices_ptr, first, count, s_kv, stride_j, BLOCK_N: tl.constexpr):
    """Load a tile of a list; return it and which entries are valid."""
    entries = first + tl.arange(0, BLOCK_N)
    rows = tl.load(indices_ptr + entries.to(tl.int64) * stride_j, mask=entries < count, other=-1)
    return rows, (rows >= 0) & (rows < s_kv)


@triton.jit
def _gather(base, rows, valid, stride_row, stride_column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Load columns of the listed rows, zeros for padding and past the last column."""
    columns = tl.arange(0, BLOCK)
    pointers = base + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
    if COLUMNS < BLOCK:
        return tl.load(pointers, mask=valid[:, None] & (columns < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers, mask=valid[:, None], other=0.0)


# the two counts change with every step
@triton.jit(do_not_specialize=["s_kv", "h_q"])
def sparse_mla_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    flags_ptr,
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
    ONLY_FLAGGED: tl.constexpr,
):
    """A tile of heads of one query against its list; ``ONLY_FLAGGED`` passes over tiles without a flag."""
    query = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = heads < h_q
    if ONLY_FLAGGED:
        if tl.max(tl.load(flags_ptr + query * h_q + heads, mask=real, other=0).to(tl.int32), 0) == 0:
            return
    MAIN: tl.constexpr = min(D_QK, BLOCK_MAIN)
    count = TOPK
    if topk_length_ptr is not None:
        count = tl.minimum(tl.load(topk_length_ptr + query), TOPK)

    # a query's heads are gathered as the rows of a matrix
    q_base = q_ptr + query * stride_q_s
    q_main = _gather(q_base, heads, real, stride_q_h, stride_q_d, MAIN, BLOCK_MAIN)
    q_rest = q_main
    if BLOCK_REST > 0:
        q_rest = _gather(q_base + MAIN * stride_q_d, heads, real, stride_q_h, stride_q_d, D_QK - MAIN, BLOCK_REST)

    acc = tl.zeros([BLOCK_H, BLOCK_MAIN], tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    list_ptr = indices_ptr + query * stride_indices_s
    next_rows, next_valid = _listed(list_ptr, 0, count, s_kv, stride_indices_j, BLOCK_N)
    for first in tl.range(0, count, BLOCK_N, num_stages=NUM_STAGES):
        # the list travels a tile ahead of the rows that it names
        rows, valid = next_rows, next_valid
        next_rows, next_valid = _listed(list_ptr, first + BLOCK_N, count, s_kv, stride_indices_j, BLOCK_N)
        kv_main = _gather(kv_ptr, rows, valid, stride_kv_s, stride_kv_d, MAIN, BLOCK_MAIN)
        logits = tl.dot(q_main, kv_main.T, input_precision="ieee")
        if BLOCK_REST > 0:
            rest_ptr = kv_ptr + MAIN * stride_kv_d
            kv_rest = _gather(rest_ptr, rows, valid, stride_kv_s, stride_kv_d, D_QK - MAIN, BLOCK_REST)
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
