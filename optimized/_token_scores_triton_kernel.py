"""The Triton kernels of ``token_scores``. Launched by ``_token_scores_triton.py``, which lays out their spans."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _rows(pointers, inside, stride_column, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load the columns of the rows that ``pointers`` begin; 0 where a row is not ``inside``, and past the last."""
    columns = tl.arange(0, BLOCK_COLUMNS)
    tile = pointers[:, None] + columns.to(tl.int64)[None, :] * stride_column
    if COLUMNS < BLOCK_COLUMNS:
        return tl.load(tile, mask=inside[:, None] & (columns < COLUMNS)[None, :], other=0.0)
    return tl.load(tile, mask=inside[:, None], other=0.0)


# the row stride of the scores is the longest context that the caller has room for
@triton.jit(do_not_specialize=["stride_scores_n"])
def logits_kernel(
    q_ptr,
    k_ptr,
    scores_ptr,
    spans_ptr,
    num_heads,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_t,
    stride_k_h,
    stride_k_d,
    stride_scores_n,
    stride_scores_s,
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One tile of keys of one head against all observed queries; raises the scores to its highest products."""
    tile = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    span_ptr = spans_ptr + tl.program_id(1) * FIELDS
    num_keys = tl.load(span_ptr + 2).to(tl.int32)
    if tile * BLOCK_KEYS >= num_keys:
        return
    request = tl.load(span_ptr)
    first_key = tl.load(span_ptr + 1)
    position = tl.load(span_ptr + 3).to(tl.int32)
    first_query = tl.load(span_ptr + 4)
    query_position = tl.load(span_ptr + 5).to(tl.int32)
    num_queries = tl.load(span_ptr + 6).to(tl.int32)

    MAIN: tl.constexpr = min(WIDTH, BLOCK_MAIN)
    keys = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = keys < num_keys
    k_rows = k_ptr + (first_key + keys) * stride_k_t + head * stride_k_h
    k_main = _rows(k_rows, inside, stride_k_d, MAIN, BLOCK_MAIN)
    k_rest = k_main
    if BLOCK_REST > 0:
        k_rest = _rows(k_rows + MAIN * stride_k_d, inside, stride_k_d, WIDTH - MAIN, BLOCK_REST)

    highest = tl.full([BLOCK_KEYS, BLOCK_QUERIES], float("-inf"), tl.float32)
    for start in tl.range(0, num_queries, BLOCK_QUERIES):
        queries = start + tl.arange(0, BLOCK_QUERIES)
        observed = queries < num_queries
        q_rows = q_ptr + (first_query + queries) * stride_q_t + head * stride_q_h
        q_main = _rows(q_rows, observed, stride_q_d, MAIN, BLOCK_MAIN)
        logits = tl.dot(k_main, q_main.T, input_precision="ieee")
        if BLOCK_REST > 0:
            q_rest = _rows(q_rows + MAIN * stride_q_d, observed, stride_q_d, WIDTH - MAIN, BLOCK_REST)
            logits = tl.dot(k_rest, q_rest.T, logits, input_precision="ieee")
        eligible = ((position + keys)[:, None] <= (query_position + queries)[None, :]) & observed[None, :]
        logits = tl.where(eligible, logits, float("-inf"))
        highest = tl.maximum(highest, logits, propagate_nan=tl.PropagateNan.ALL)

    # a reduction drops a NaN, which must be seen; of equal numbers the atomic maximum keeps the same in any order
    broken = tl.max((highest != highest).to(tl.int32), 1) > 0
    score = tl.max(tl.where(highest != highest, float("-inf"), highest), 1)
    score = tl.where(broken, float("nan"), score)
    targets = scores_ptr + request * stride_scores_n + (position + keys).to(tl.int64) * stride_scores_s
    tl.atomic_max(targets, score, mask=inside & (score != float("-inf")), sem="relaxed")


@triton.jit
def denominator_kernel(
    absorbed_ptr,
    rope_ptr,
    kv_c_ptr,
    k_pe_ptr,
    slots_ptr,
    parts_ptr,
    spans_ptr,
    scale_log2,
    num_heads,
    stride_absorbed_t,
    stride_absorbed_h,
    stride_absorbed_d,
    stride_rope_t,
    stride_rope_h,
    stride_rope_d,
    stride_kv_c_s,
    stride_kv_c_d,
    stride_k_pe_s,
    stride_k_pe_d,
    FIELDS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """A tile of rows (an observed query and a head each) against one stretch of a request's candidates.

    Writes the base-2 logarithm of the summed exponentials of each row, ``-inf`` where the row may look at none.
    """
    span_ptr = spans_ptr + tl.program_id(2) * FIELDS
    num_queries = tl.load(span_ptr + 6).to(tl.int32)
    num_splits = tl.load(span_ptr + 7).to(tl.int32)
    num_rows = num_queries * num_heads
    split = tl.program_id(1)
    if (tl.program_id(0) * BLOCK_ROWS >= num_rows) | (split >= num_splits):
        return
    first_key = tl.load(span_ptr + 1)
    num_keys = tl.load(span_ptr + 2).to(tl.int32)
    position = tl.load(span_ptr + 3).to(tl.int32)
    first_query = tl.load(span_ptr + 4)
    query_position = tl.load(span_ptr + 5).to(tl.int32)
    first_part = tl.load(span_ptr + 8)

    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    queries = rows // num_heads
    heads = (rows % num_heads).to(tl.int64)
    absorbed_rows = absorbed_ptr + (first_query + queries) * stride_absorbed_t + heads * stride_absorbed_h
    absorbed = _rows(absorbed_rows, real, stride_absorbed_d, RANK, BLOCK_RANK)
    rope = absorbed
    if BLOCK_ROPE > 0:
        rope_rows = rope_ptr + (first_query + queries) * stride_rope_t + heads * stride_rope_h
        rope = _rows(rope_rows, real, stride_rope_d, ROPE, BLOCK_ROPE)

    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    stretch = tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_KEYS) * BLOCK_KEYS
    for start in tl.range(split * stretch, tl.minimum((split + 1) * stretch, num_keys), BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        inside = keys < num_keys
        slots = tl.load(slots_ptr + first_key + keys, mask=inside, other=0).to(tl.int64)
        latent = _rows(kv_c_ptr + slots * stride_kv_c_s, inside, stride_kv_c_d, RANK, BLOCK_RANK)
        logits = tl.dot(absorbed, latent.T, input_precision="ieee")
        if BLOCK_ROPE > 0:
            k_pe = _rows(k_pe_ptr + slots * stride_k_pe_s, inside, stride_k_pe_d, ROPE, BLOCK_ROPE)
            logits = tl.dot(rope, k_pe.T, logits, input_precision="ieee")
        eligible = ((position + keys)[None, :] <= (query_position + queries)[:, None]) & inside[None, :]
        logits = tl.where(eligible, logits * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # a row that may look at nothing yet: any finite shift makes its weights exp2(-inf) = 0
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(logits - shift[:, None]), 1)
        row_max = new_max

    empty = row_sum == 0.0
    part = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
    tl.store(parts_ptr + first_part + split * num_rows.to(tl.int64) + rows, part, mask=real)


@triton.jit
def join_kernel(parts_ptr, lse_ptr, spans_ptr, num_heads, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Join the stretches of each row; writes ``lse``, ``[w, H]``, contiguous, natural log."""
    span_ptr = spans_ptr + tl.program_id(1) * FIELDS
    num_rows = tl.load(span_ptr + 6).to(tl.int32) * num_heads
    if tl.program_id(0) * BLOCK_ROWS >= num_rows:
        return
    first_query = tl.load(span_ptr + 4)
    num_splits = tl.load(span_ptr + 7).to(tl.int32)
    first_part = tl.load(span_ptr + 8)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = rows < num_rows
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for split in tl.range(0, num_splits):
        part = tl.load(parts_ptr + first_part + split * num_rows.to(tl.int64) + rows, mask=real, other=float("-inf"))
        new_max = tl.maximum(row_max, part)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.exp2(part - shift)
        row_max = new_max
    empty = row_sum == 0.0
    lse = (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453
    tl.store(lse_ptr + first_query * num_heads + rows, tl.where(empty, float("-inf"), lse), mask=real)


@triton.jit(do_not_specialize=["stride_scores_n"])
def probability_kernel(
    absorbed_ptr,
    rope_ptr,
    kv_c_ptr,
    k_pe_ptr,
    slots_ptr,
    lse_ptr,
    scores_ptr,
    spans_ptr,
    scale_log2,
    num_heads,
    stride_absorbed_t,
    stride_absorbed_h,
    stride_absorbed_d,
    stride_rope_t,
    stride_rope_h,
    stride_rope_d,
    stride_kv_c_s,
    stride_kv_c_d,
    stride_k_pe_s,
    stride_k_pe_d,
    stride_scores_n,
    stride_scores_s,
    FIELDS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One tile of candidates against all observed queries of all heads; writes its scores."""
    span_ptr = spans_ptr + tl.program_id(1) * FIELDS
    num_keys = tl.load(span_ptr + 2).to(tl.int32)
    if tl.program_id(0) * BLOCK_KEYS >= num_keys:
        return
    request = tl.load(span_ptr)
    first_key = tl.load(span_ptr + 1)
    position = tl.load(span_ptr + 3).to(tl.int32)
    first_query = tl.load(span_ptr + 4)
    query_position = tl.load(span_ptr + 5).to(tl.int32)
    num_queries = tl.load(span_ptr + 6).to(tl.int32)

    keys = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = keys < num_keys
    slots = tl.load(slots_ptr + first_key + keys, mask=inside, other=0).to(tl.int64)
    latent = _rows(kv_c_ptr + slots * stride_kv_c_s, inside, stride_kv_c_d, RANK, BLOCK_RANK)
    k_pe = latent
    if BLOCK_ROPE > 0:
        k_pe = _rows(k_pe_ptr + slots * stride_k_pe_s, inside, stride_k_pe_d, ROPE, BLOCK_ROPE)

    highest = tl.zeros([BLOCK_KEYS], tl.float32)
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    # heads and tiles of queries in one loop, so that the loads of the next head run ahead
    num_tiles = tl.cdiv(num_queries, BLOCK_QUERIES)
    for step in tl.range(0, num_heads * num_tiles):
        head = (step // num_tiles).to(tl.int64)
        tile = step % num_tiles
        queries = tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
        observed = queries < num_queries
        absorbed_rows = absorbed_ptr + (first_query + queries) * stride_absorbed_t + head * stride_absorbed_h
        absorbed = _rows(absorbed_rows, observed, stride_absorbed_d, RANK, BLOCK_RANK)
        logits = tl.dot(latent, absorbed.T, input_precision="ieee")
        if BLOCK_ROPE > 0:
            rope_rows = rope_ptr + (first_query + queries) * stride_rope_t + head * stride_rope_h
            rope = _rows(rope_rows, observed, stride_rope_d, ROPE, BLOCK_ROPE)
            logits = tl.dot(k_pe, rope.T, logits, input_precision="ieee")
        lse = tl.load(lse_ptr + (first_query + queries) * num_heads + head, mask=observed, other=0.0)
        eligible = ((position + keys)[:, None] <= (query_position + queries)[None, :]) & observed[None, :]
        # hidden before the exponential: what a query may not look at is not bounded by its denominator
        logits = tl.where(eligible, logits * scale_log2 - (lse * 1.4426950408889634)[None, :], float("-inf"))
        total += tl.sum(tl.exp2(logits), 1)
        # the mean over the queries of a head is whole before the heads are compared
        last = tile == num_tiles - 1
        highest = tl.where(last, tl.maximum(highest, total, propagate_nan=tl.PropagateNan.ALL), highest)
        total = tl.where(last, 0.0, total)
    targets = scores_ptr + request * stride_scores_n + (position + keys).to(tl.int64) * stride_scores_s
    tl.store(targets, highest / num_queries.to(tl.float32), mask=inside)
