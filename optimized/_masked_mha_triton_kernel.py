"""The Triton kernels of ``masked_mha``: online softmax over the tiles of keys that hold a bit, and the list of those.

Launched by ``_masked_mha_triton.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from ._attention_triton_kernel import _open_rows, _tile_rows


# rows of a map or mask that are handed over for a chunk begin at any address
@triton.jit(do_not_specialize=["num_columns"], do_not_specialize_on_alignment=["map_ptr"])
def list_kernel(map_ptr, listed_ptr, rank_ptr, num_columns, BLOCK: tl.constexpr):
    """List the marked columns of one row of the map, in order, and count for each column those before it."""
    tile = tl.program_id(0).to(tl.int64)
    map_row = map_ptr + tile * num_columns
    listed_row = listed_ptr + tile * num_columns
    rank_row = rank_ptr + tile * (num_columns + 1)
    before = 0
    for first in tl.range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        marked = (tl.load(map_row + columns, mask=inside, other=0) != 0).to(tl.int32)
        rank = before + tl.cumsum(marked, 0) - marked
        tl.store(rank_row + columns, rank, mask=inside)
        tl.store(listed_row + rank, columns, mask=marked != 0)
        before += tl.sum(marked, 0)
    tl.store(rank_row + num_columns, before)


@triton.jit
def _key_rows(
    source,
    first_row,
    num_rows,
    stride_row,
    stride_column,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Load ``[BLOCK_ROWS, BLOCK_COLUMNS]``, 0 before the first row and past the last; ``first_row`` may be negative."""
    if DESCRIPTOR:
        # the copy engine takes negative coordinates, and fills what lies outside with 0
        tile = source.load([first_row, 0])
    else:
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_COLUMNS)
        pointers = source + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
        inside = (rows >= 0) & (rows < num_rows)
        tile = tl.load(pointers, mask=inside[:, None] & (columns < COLUMNS)[None, :], other=0.0)
    return tile


@triton.jit
def _visible(words, first_word_key, first_key, last_key, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """``[BLOCK_M, BLOCK_N]``: whether a query's bit is set and the key lies between ``first_key`` and ``last_key[m]``.

    The bounds are taken to the words, of which there are 32 times fewer than logits.
    """
    WORDS: tl.constexpr = BLOCK_N // 32
    all_bits = tl.full([BLOCK_M, WORDS], -1, tl.int32)
    start = first_word_key + 32 * tl.arange(0, WORDS)
    # bits 0 .. kept - 1 are not in the future, bits from skipped on are keys of this chunk
    kept = last_key[:, None] + 1 - start[None, :]
    past = tl.where(kept >= 32, -1, ~(all_bits << (tl.maximum(kept, 0) & 31)))
    skipped = first_key - start[None, :] + tl.zeros([BLOCK_M, WORDS], tl.int32)
    present = tl.where(skipped >= 32, 0, all_bits << (tl.maximum(skipped, 0) & 31))
    # key 8 j + r of a word: shifted by r once, then bit 8 j; a register for each of 32 bits would be too many
    eighths = (words & past & present)[:, :, None] >> tl.arange(0, 8)[None, None, :]
    bit = tl.full([4], 1, tl.int32) << (8 * tl.arange(0, 4))
    visible = (eighths[:, :, None, :] & bit[None, None, :, None]) != 0
    return tl.reshape(visible, [BLOCK_M, BLOCK_N])


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
    visible,
    first_row,
    num_keys,
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
    POSITIVE_SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Take one tile of keys into the running softmax; ``row_max`` is in base-2 units of the scaled logits."""
    MAIN: tl.constexpr = min(DQ, BLOCK_MAIN)
    k_main = _key_rows(
        k_main_source, first_row, num_keys, stride_k_t, stride_k_d, MAIN, BLOCK_N, BLOCK_MAIN, DESCRIPTORS
    )
    logits = tl.dot(q_main, k_main.T, input_precision="ieee")
    if BLOCK_REST > 0:
        k_rest = _key_rows(
            k_rest_source, first_row, num_keys, stride_k_t, stride_k_d, DQ - MAIN, BLOCK_N, BLOCK_REST, DESCRIPTORS
        )
        logits = tl.dot(q_rest, k_rest.T, logits, input_precision="ieee")
    if not POSITIVE_SCALE:
        # the highest scaled logit is then not the scaled highest logit
        logits = logits * scale_log2
        scale_log2 = 1.0
    logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)
    # a row that has seen no key yet: any finite shift makes its weights exp2(-inf) = 0
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(logits * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    v = _key_rows(v_source, first_row, num_keys, stride_v_t, stride_v_d, DV, BLOCK_N, BLOCK_V, DESCRIPTORS)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit(
    do_not_specialize=["stride_mask_t", "num_words", "num_columns"],
    do_not_specialize_on_alignment=["mask_ptr", "listed_ptr", "rank_ptr"],
)
def masked_mha_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    listed_ptr,
    rank_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    starts_ptr,
    scale_log2,
    num_words,
    num_columns,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_t,
    stride_k_h,
    stride_k_d,
    stride_v_t,
    stride_v_h,
    stride_v_d,
    stride_mask_t,
    stride_mask_w,
    GROUP: tl.constexpr,
    DQ: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LISTED: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """One tile of queries of one head of one request against the keys that it sees.

    Tiles of keys are cut at multiples of ``BLOCK_N`` counted from bit 0, not from the first key: a tile then takes
    whole words, wherever the chunk of keys begins, and is a column of the map.
    """
    request = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    start_q = tl.load(cu_seqlens_q_ptr + request)
    num_queries = tl.load(cu_seqlens_q_ptr + request + 1) - start_q
    # the last queries see the most keys: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_query = tile * BLOCK_M
    if first_query >= num_queries:
        return
    start_k = tl.load(cu_seqlens_k_ptr + request)
    num_keys = tl.load(cu_seqlens_k_ptr + request + 1) - start_k
    # positions of the first query and key, and the row of the map where the request begins
    query_start = tl.load(starts_ptr + 3 * request)
    key_start = tl.load(starts_ptr + 3 * request + 1)
    map_row = (tl.load(starts_ptr + 3 * request + 2) + tile).to(tl.int64)

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
        q_rest_base = q_base + MAIN * stride_q_d
        q_rest_source = _open_rows(q_rest_base, num_queries, stride_q_t, rest, BLOCK_M, BLOCK_REST, DESCRIPTORS)
        q_rest = _tile_rows(
            q_rest_source, first_query, num_queries, stride_q_t, stride_q_d,
            rest, BLOCK_M, BLOCK_REST, True, DESCRIPTORS,
        )  # fmt: skip
        k_rest_base = k_base + MAIN * stride_k_d
        k_rest_source = _open_rows(k_rest_base, num_keys, stride_k_t, rest, BLOCK_N, BLOCK_REST, DESCRIPTORS)

    queries = first_query + tl.arange(0, BLOCK_M)
    inside = queries < num_queries
    last_key = tl.minimum(queries + query_start, key_start + num_keys - 1)
    # tiles from that of the first key to that of the last one which some query of this tile may see
    behind_query = tl.minimum(first_query + BLOCK_M, num_queries) + query_start
    behind_key = tl.maximum(tl.minimum(behind_query, key_start + num_keys), key_start)
    first = key_start // BLOCK_N
    behind = tl.cdiv(behind_key, BLOCK_N)
    if behind_key == key_start:
        behind = first
    listed = listed_ptr + map_row * num_columns
    if LISTED:
        ranks = rank_ptr + map_row * (num_columns + 1)
        first = tl.load(ranks + first)
        behind = tl.load(ranks + behind)

    WORDS: tl.constexpr = BLOCK_N // 32
    mask_rows = mask_ptr + (start_q + queries).to(tl.int64)[:, None] * stride_mask_t
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    column = first
    if LISTED:
        column = tl.load(listed + first, mask=first < behind, other=0)
    for step in tl.range(first, behind):
        word = column * WORDS + tl.arange(0, WORDS)
        words = tl.load(
            mask_rows + word.to(tl.int64)[None, :] * stride_mask_w,
            mask=inside[:, None] & (word < num_words)[None, :],
            other=0,
        )
        visible = _visible(words, column * BLOCK_N, key_start, last_key, BLOCK_M, BLOCK_N)
        acc, row_sum, row_max = _attend_tile(
            acc, row_sum, row_max, q_main, q_rest, k_main_source, k_rest_source, v_source, visible,
            column * BLOCK_N - key_start, num_keys, scale_log2, stride_k_t, stride_k_d, stride_v_t, stride_v_d,
            DQ, DV, BLOCK_N, BLOCK_MAIN, BLOCK_REST, BLOCK_V, POSITIVE_SCALE, DESCRIPTORS,
        )  # fmt: skip
        # carried, so that the next tile can be loaded without waiting for its number
        if LISTED:
            column = tl.load(listed + step + 1, mask=step + 1 < behind, other=0)
        else:
            column = step + 1

    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(safe_sum)) * 0.6931471805599453)
    rows = (start_q + queries).to(tl.int64) * tl.num_programs(1) + head
    columns = tl.arange(0, BLOCK_V)
    tl.store(lse_ptr + rows, lse, mask=inside)
    out = (acc / safe_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * DV + columns[None, :], out, mask=inside[:, None] & (columns < DV)[None, :])
