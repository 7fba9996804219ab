"""Sparse MLA of 512-wide rows for few heads, in Gluon for Hopper: the gathered rows are the rows of the matrix product.

A tile of 64 gathered rows is the M operand of the warpgroup instruction and the native heads are its N, 8, 16 or 32, so
that nothing is padded to 64::

    z^T[64 rows, H] = K[64, 512] . q^T[512, H]        out^T[512, H] += K^T[512, 64] . p^T[64, H]

A program is persistent and takes two queries at a time, one warpgroup each; a third warpgroup gathers for both, in
strict alternation: first query's tile k, second query's tile k. Where one query has fewer tiles its items are empty:
nothing is copied and nothing computed. Without that a warpgroup could wait for an item more than a round of the ring
ahead. Launched by ``_sparse_mla_gluon.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ._sparse_mla_gluon_gather import (
    announce,
    finished,
    gather_values,
    live_entries,
    load_query,
    raised_maximum,
    thread_barrier,
    wait_released,
)


@gluon.jit
def _producer(
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    s_q,
    s_kv,
    topk,
    stride_kv_s,
    stride_indices_s,
    ring,
    full,
    empty,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
):
    """Gather for both queries; lists are read a tile ahead, also across queries, so that their latency is hidden."""
    # a warp copies half a row at a time, 16 bytes a lane
    layout: gl.constexpr = gl.BlockedLayout([4, 8], [1, 32], [4, 1], [1, 0])
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    step = gl.num_programs(0) * 2
    first = gl.program_id(0) * 2
    count_a = live_entries(topk_length_ptr, first, s_q, topk, HAS_LENGTH)
    count_b = live_entries(topk_length_ptr, first + 1, s_q, topk, HAS_LENGTH)
    list_a = indices_ptr + first.to(gl.int64) * stride_indices_s
    list_b = list_a + stride_indices_s
    rows_a = gl.load(list_a + entries, mask=entries < count_a, other=-1)
    rows_b = gl.load(list_b + entries, mask=entries < count_b, other=-1)
    item = 0
    for query in range(first, s_q, step):
        next_count_a = live_entries(topk_length_ptr, query + step, s_q, topk, HAS_LENGTH)
        next_count_b = live_entries(topk_length_ptr, query + step + 1, s_q, topk, HAS_LENGTH)
        next_list_a = indices_ptr + (query + step).to(gl.int64) * stride_indices_s
        next_list_b = next_list_a + stride_indices_s
        longer = gl.maximum(count_a, count_b)
        for start in range(0, gl.maximum(longer, 1), BLOCK_N):
            now = rows_a
            more = start + BLOCK_N < count_a
            left = gl.where(more, count_a - start - BLOCK_N, next_count_a)
            rows_a = gl.load(
                gl.where(more, list_a + start + BLOCK_N, next_list_a) + entries, mask=entries < left, other=-1
            )
            if start < longer:
                live = start < count_a
                gather_values(kv_ptr, now, live, s_kv, stride_kv_s, columns, item, ring, full, empty, SLOTS)
                announce(item, full, SLOTS)
                item += 1
            now = rows_b
            more = start + BLOCK_N < count_b
            left = gl.where(more, count_b - start - BLOCK_N, next_count_b)
            rows_b = gl.load(
                gl.where(more, list_b + start + BLOCK_N, next_list_b) + entries, mask=entries < left, other=-1
            )
            if start < longer:
                live = start < count_b
                gather_values(kv_ptr, now, live, s_kv, stride_kv_s, columns, item, ring, full, empty, SLOTS)
                announce(item, full, SLOTS)
                item += 1
        count_a = next_count_a
        list_a = next_list_a
        count_b = next_count_b
        list_b = next_list_b


@gluon.jit
def _consumer(
    SIDE: gl.constexpr,
    q_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    s_q,
    s_kv,
    topk,
    stride_q_s,
    stride_q_h,
    stride_indices_s,
    stride_out_s,
    stride_out_h,
    scale_log2,
    queries_shared,
    ring,
    weights_shared,
    full,
    empty,
    HEADS: gl.constexpr,
    H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    ONE_BUFFER: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend the first or the second query of each pair; ``SIDE`` says which."""
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16])
    per_head: gl.constexpr = gl.SliceLayout(0, product)
    per_row: gl.constexpr = gl.SliceLayout(1, product)
    rows_of_heads: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    head = gl.arange(0, H, layout=gl.SliceLayout(1, rows_of_heads))
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, rows_of_heads)), 0)
    q_offsets = gl.expand_dims(head * stride_q_h, 1) + column
    out_offsets = gl.expand_dims(head * stride_out_h, 1) + column
    heads = gl.arange(0, H, layout=per_head)
    entries = gl.arange(0, BLOCK_N, layout=per_row)
    sink_log2 = gl.zeros([H], gl.float32, layout=per_head)
    if HAS_SINK:
        sink_log2 = gl.load(attn_sink_ptr + heads, mask=heads < HEADS, other=float("-inf")) * 1.4426950408889634
    query_shared = queries_shared.index(SIDE)
    step = gl.num_programs(0) * 2
    first = gl.program_id(0) * 2
    # queries travel one ahead in registers, if these suffice
    AHEAD: gl.constexpr = H <= 16
    if AHEAD:
        q_next = load_query(q_ptr, first + SIDE, s_q, stride_q_s, q_offsets, head, HEADS, H)
    count = live_entries(topk_length_ptr, first + SIDE, s_q, topk, HAS_LENGTH)
    list_ptr = indices_ptr + gl.minimum(first + SIDE, s_q - 1).to(gl.int64) * stride_indices_s
    rows_next = gl.load(list_ptr + entries, mask=entries < count, other=-1)
    tiles_before = 0
    for pair in range(first, s_q, step):
        query = pair + SIDE
        count = live_entries(topk_length_ptr, query, s_q, topk, HAS_LENGTH)
        other_count = live_entries(topk_length_ptr, pair + 1 - SIDE, s_q, topk, HAS_LENGTH)
        num_tiles = (count + BLOCK_N - 1) // BLOCK_N
        other_tiles = (other_count + BLOCK_N - 1) // BLOCK_N
        next_count = live_entries(topk_length_ptr, query + step, s_q, topk, HAS_LENGTH)
        list_ptr = indices_ptr + query.to(gl.int64) * stride_indices_s
        next_list = indices_ptr + gl.minimum(query + step, s_q - 1).to(gl.int64) * stride_indices_s
        if AHEAD:
            query_shared.store(q_next)
            q_next = load_query(q_ptr, query + step, s_q, stride_q_s, q_offsets, head, HEADS, H)
        else:
            query_shared.store(load_query(q_ptr, query, s_q, stride_q_s, q_offsets, head, HEADS, H))
        fence_async_shared()
        if num_tiles == 0:
            rows_next = gl.load(next_list + entries, mask=entries < next_count, other=-1)
        row_max = gl.full([H], float("-inf"), gl.float32, layout=per_head)
        # denominators stay spread over the rows of the tile until the end
        row_sum = gl.zeros([BLOCK_N, H], gl.float32, layout=product)
        acc = gl.zeros([512, H], gl.float32, layout=product)
        for tile in range(0, num_tiles):
            item = (tiles_before + tile) * 2 + SIDE
            slot = item % SLOTS
            valid = (rows_next >= 0) & (rows_next < s_kv)
            more = tile + 1 < num_tiles
            left = gl.where(more, count - (tile + 1) * BLOCK_N, next_count)
            rows_next = gl.load(
                gl.where(more, list_ptr + (tile + 1) * BLOCK_N, next_list) + entries, mask=entries < left, other=-1
            )
            mbarrier.wait(full.index(slot), (item // SLOTS) & 1)
            fence_async_shared()
            logits = warpgroup_mma(
                ring.index(slot),
                query_shared.permute((1, 0)),
                gl.zeros([BLOCK_N, H], gl.float32, layout=product),
                use_acc=False,
                is_async=True,
            )
            logits = warpgroup_mma_wait(0, deps=(logits,))
            logits = gl.where(gl.expand_dims(valid, 1), logits * scale_log2, float("-inf"))
            row_max, shift, decay = raised_maximum(row_max, logits, 0)
            weights = gl.exp2(logits - gl.expand_dims(shift, 0))
            row_sum = row_sum * gl.expand_dims(decay, 0) + weights
            if ONE_BUFFER:
                # one buffer for both sides, handed on in the order of the items
                transposed = weights_shared.index(0).permute((1, 0))
                wait_released(empty, item - 1, SLOTS)
            else:
                transposed = weights_shared.index(SIDE).permute((1, 0))
            transposed.store(weights.to(gl.bfloat16))
            fence_async_shared()
            acc = acc * gl.expand_dims(decay, 0)
            acc = warpgroup_mma(ring.index(slot).permute((1, 0)), transposed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            # all four warps have finished reading the slot
            thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
        for tile in range(num_tiles, other_tiles):
            # the empty items of the shorter query
            item = (tiles_before + tile) * 2 + SIDE
            mbarrier.wait(full.index(item % SLOTS), (item // SLOTS) & 1)
            thread_barrier()
            mbarrier.arrive(empty.index(item % SLOTS), count=1)
        tiles_before += gl.maximum(num_tiles, other_tiles)
        share, lse, highest = finished(row_max, gl.sum(row_sum, 0), sink_log2, HAS_SINK)
        real = (heads < HEADS) & (query < s_q)
        gl.store(lse_ptr + query.to(gl.int64) * HEADS + heads, lse, mask=real)
        gl.store(max_logits_ptr + query.to(gl.int64) * HEADS + heads, highest, mask=real)
        # transposed on its way through the tile of the query, which is done with
        query_shared.permute((1, 0)).store((acc * gl.expand_dims(share, 0)).to(gl.bfloat16))
        written = gl.expand_dims((head < HEADS) & (query < s_q), 1)
        gl.store(
            out_ptr + query.to(gl.int64) * stride_out_s + out_offsets, query_shared.load(rows_of_heads), mask=written
        )
        thread_barrier()


@gluon.jit(do_not_specialize=["s_q", "s_kv"])
def swap_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    topk_length_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    s_q,
    s_kv,
    topk,
    stride_q_s,
    stride_q_h,
    stride_kv_s,
    stride_indices_s,
    stride_out_s,
    stride_out_h,
    scale_log2,
    HEADS: gl.constexpr,
    H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    ONE_BUFFER: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend pairs of queries, ``num_programs`` pairs apart."""
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    BUFFERS: gl.constexpr = 1 if ONE_BUFFER else 2
    queries_shared = gl.allocate_shared_memory(gl.bfloat16, [2, H, 512], tiled)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, 512], tiled)
    weights_shared = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, H, BLOCK_N], tiled)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    for slot in gl.static_range(SLOTS):
        # every thread of the producer arrives when its copies have landed
        mbarrier.init(full.index(slot), count=128)
        mbarrier.init(empty.index(slot), count=1)
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, q_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr, s_q, s_kv,
                    topk, stride_q_s, stride_q_h, stride_indices_s, stride_out_s, stride_out_h, scale_log2,
                    queries_shared, ring, weights_shared, full, empty, HEADS, H, BLOCK_N, SLOTS, ONE_BUFFER, HAS_LENGTH,
                    HAS_SINK,
                ),
            ),
            (
                _consumer,
                (
                    1, q_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr, s_q, s_kv,
                    topk, stride_q_s, stride_q_h, stride_indices_s, stride_out_s, stride_out_h, scale_log2,
                    queries_shared, ring, weights_shared, full, empty, HEADS, H, BLOCK_N, SLOTS, ONE_BUFFER, HAS_LENGTH,
                    HAS_SINK,
                ),
            ),
            (
                _producer,
                (
                    kv_ptr, indices_ptr, topk_length_ptr, s_q, s_kv, topk, stride_kv_s, stride_indices_s, ring, full,
                    empty, BLOCK_N, SLOTS, HAS_LENGTH,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
