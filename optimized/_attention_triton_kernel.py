"""The Triton kernel of ``attention``: online softmax over tiles of keys. Launched by ``_attention_triton.py``."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _tile_rows(
    source,
    first_row,
    num_rows,
    stride_row,
    stride_column,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Load ``[BLOCK_ROWS, BLOCK_COLUMNS]`` from a descriptor or from a pointer; 0 past the last row and column."""
    if DESCRIPTOR:
        # the copy engine fills what lies outside the request with 0
        tile = source.load([first_row, 0])
    else:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_COLUMNS)
        pointers = source + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
        if CHECK_ROWS:
            tile = tl.load(pointers, mask=(rows < num_rows)[:, None] & (columns < COLUMNS)[None, :], other=0.0)
        elif COLUMNS < BLOCK_COLUMNS:
            tile = tl.load(pointers, mask=(columns < COLUMNS)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _open_rows(
    pointer,
    num_rows,
    stride_row,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Make the source that ``_tile_rows`` reads: a descriptor that ends with the request, or the pointer itself."""
    if DESCRIPTOR:
        # a descriptor may not be empty; of an empty request no tile is ever loaded
        source = tl.make_tensor_descriptor(
            pointer,
            shape=[tl.maximum(num_rows, 1), COLUMNS],
            strides=[stride_row, 1],
            block_shape=[BLOCK_ROWS, BLOCK_COLUMNS],
        )
    else:
        source = pointer
    return source


@triton.jit
def _attend_tile(
    acc,
    row_sum,
    row_max,
    q_main,
    q_rest,
    k_main_source,
    k_rest_source,
    v_source,
    first_key,
    num_keys,
    last_key,
    scale_log2,
    stride_k_t,
    stride_k_d,
    stride_v_t,
    stride_v_d,
    DQ: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Take one tile of keys into the running softmax; ``row_max`` is in base-2 units of the scaled logits."""
    MAIN: tl.constexpr = min(DQ, BLOCK_MAIN)
    k_main = _tile_rows(
        k_main_source, first_key, num_keys, stride_k_t, stride_k_d, MAIN, BLOCK_N, BLOCK_MAIN, MASKED, DESCRIPTORS
    )
    logits = tl.dot(q_main, k_main.T, input_precision="ieee")
    if BLOCK_REST > 0:
        k_rest = _tile_rows(
            k_rest_source,
            first_key,
            num_keys,
            stride_k_t,
            stride_k_d,
            DQ - MAIN,
            BLOCK_N,
            BLOCK_REST,
            MASKED,
            DESCRIPTORS,
        )
        logits = tl.dot(q_rest, k_rest.T, logits, input_precision="ieee")
    if not POSITIVE_SCALE:
        # the highest scaled logit is then not the scaled highest logit
        logits = logits * scale_log2
        scale_log2 = 1.0
    if MASKED:
        keys = first_key + tl.arange(0, BLOCK_N)
        logits = tl.where(keys[None, :] <= last_key[:, None], logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)
    shift = new_max
    if MASKED:
        # a row that has seen no key yet: any finite shift makes its weights exp2(-inf) = 0
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(logits * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = _tile_rows(v_source, first_key, num_keys, stride_v_t, stride_v_d, DV, BLOCK_N, BLOCK_V, MASKED, DESCRIPTORS)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    scale_log2,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_t,
    stride_k_h,
    stride_k_d,
    stride_v_t,
    stride_v_h,
    stride_v_d,
    GROUP: tl.constexpr,
    DQ: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One tile of queries of one head of one request against all keys that it sees."""
    request = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    start_q = tl.load(cu_seqlens_q_ptr + request)
    num_queries = tl.load(cu_seqlens_q_ptr + request + 1) - start_q
    tile = tl.program_id(0)
    if CAUSAL:
        # the last queries see the most keys: they start first
        tile = tl.num_programs(0) - 1 - tile
    first_query = tile * BLOCK_M
    if first_query >= num_queries:
        return
    start_k = tl.load(cu_seqlens_k_ptr + request)
    num_keys = tl.load(cu_seqlens_k_ptr + request + 1) - start_k

    MAIN: tl.constexpr = min(DQ, BLOCK_MAIN)
    q_base = q_ptr + start_q.to(tl.int64) * stride_q_t + head * stride_q_h
    k_base = k_ptr + start_k.to(tl.int64) * stride_k_t + head // GROUP * stride_k_h
    v_base = v_ptr + start_k.to(tl.int64) * stride_v_t + head // GROUP * stride_v_h
    q_source = _open_rows(q_base, num_queries, stride_q_t, MAIN, BLOCK_M, BLOCK_MAIN, DESCRIPTORS)
    q_main = _tile_rows(
        q_source, first_query, num_queries, stride_q_t, stride_q_d, MAIN, BLOCK_M, BLOCK_MAIN, True, DESCRIPTORS
    )
    k_main_source = _open_rows(k_base, num_keys, stride_k_t, MAIN, BLOCK_N, BLOCK_MAIN, DESCRIPTORS)
    v_source = _open_rows(v_base, num_keys, stride_v_t, DV, BLOCK_N, BLOCK_V, DESCRIPTORS)
    q_rest = q_main
    k_rest_source = k_main_source
    if BLOCK_REST > 0:
        rest: tl.constexpr = DQ - MAIN
        q_rest_source = _open_rows(
            q_base + MAIN * stride_q_d, num_queries, stride_q_t, rest, BLOCK_M, BLOCK_REST, DESCRIPTORS
        )
        q_rest = _tile_rows(
            q_rest_source,
            first_query,
            num_queries,
            stride_q_t,
            stride_q_d,
            rest,
            BLOCK_M,
            BLOCK_REST,
            True,
            DESCRIPTORS,
        )
        k_rest_source = _open_rows(
            k_base + MAIN * stride_k_d, num_keys, stride_k_t, rest, BLOCK_N, BLOCK_REST, DESCRIPTORS
        )

    queries = first_query + tl.arange(0, BLOCK_M)
    end = num_keys
    full_end = num_keys
    last_key = tl.zeros([BLOCK_M], tl.int32) + (num_keys - 1)
    if CAUSAL:
        # bottom right: query i of n sees keys 0 .. i + m - n
        last_key = tl.minimum(queries + (num_keys - num_queries), num_keys - 1)
        end = tl.minimum(num_keys, tl.maximum(first_query + BLOCK_M + num_keys - num_queries, 0))
        full_end = tl.maximum(first_query + 1 + num_keys - num_queries, 0)
    full_end = full_end // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # tiles that every query of this program sees whole carry no mask
    for first_key in tl.range(0, full_end, BLOCK_N):
        acc, row_sum, row_max = _attend_tile(
            acc, row_sum, row_max, q_main, q_rest, k_main_source, k_rest_source, v_source,
            first_key, num_keys, last_key, scale_log2, stride_k_t, stride_k_d, stride_v_t, stride_v_d,
            DQ, DV, BLOCK_N, BLOCK_MAIN, BLOCK_REST, BLOCK_V, False, POSITIVE_SCALE, DESCRIPTORS,
        )  # fmt: skip
    for first_key in tl.range(full_end, end, BLOCK_N):
        acc, row_sum, row_max = _attend_tile(
            acc, row_sum, row_max, q_main, q_rest, k_main_source, k_rest_source, v_source,
            first_key, num_keys, last_key, scale_log2, stride_k_t, stride_k_d, stride_v_t, stride_v_d,
            DQ, DV, BLOCK_N, BLOCK_MAIN, BLOCK_REST, BLOCK_V, True, POSITIVE_SCALE, DESCRIPTORS,
        )  # fmt: skip

    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(safe_sum)) * 0.6931471805599453)
    rows = (start_q + queries).to(tl.int64) * tl.num_programs(1) + head
    columns = tl.arange(0, BLOCK_V)
    inside = queries < num_queries
    tl.store(lse_ptr + rows, lse, mask=inside)
    out = (acc / safe_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * DV + columns[None, :], out, mask=inside[:, None] & (columns < DV)[None, :])
