"""Sparse MLA of 576-wide rows for few heads, in Gluon for Hopper: two warpgroups share the list of one query.

As in ``_sparse_mla_gluon_swap.py`` the gathered rows are the M operand and the native heads the N operand, but the two
consumers work on one query, on its even and its odd tiles: one query in shared memory instead of two makes room for a
third slot of the ring. At the end of a query the second keeps its last slot, writes its float32 sums there and hands
the slot to the first, which merges, turns the answer through its own last slot, and releases both.

The rope columns have a ring of their own, and the weights of a tile go over its rope rows, which are done with by then.
Launched by ``_sparse_mla_gluon.py``.
"""

# mypy: disable-error-code="attr-defined"
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
    gather_rope,
    gather_values,
    live_entries,
    load_query,
    raised_maximum,
    thread_barrier,
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
    rope_ring,
    full,
    empty,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    ROPE_SLOTS: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
):
    """Gather the tiles of one query after the other; lists are read a tile ahead, also across queries."""
    layout: gl.constexpr = gl.BlockedLayout([4, 8], [1, 32], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    rope_columns = 512 + gl.arange(0, 64, layout=gl.SliceLayout(0, rope_layout))
    entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    rope_entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rope_layout))
    step = gl.num_programs(0)
    first = gl.program_id(0)
    count = live_entries(topk_length_ptr, first, s_q, topk, HAS_LENGTH)
    list_ptr = indices_ptr + first.to(gl.int64) * stride_indices_s
    rows = gl.load(list_ptr + entries, mask=entries < count, other=-1)
    rope_rows = gl.load(list_ptr + rope_entries, mask=rope_entries < count, other=-1)
    item = 0
    for query in range(first, s_q, step):
        next_count = live_entries(topk_length_ptr, query + step, s_q, topk, HAS_LENGTH)
        next_list = indices_ptr + (query + step).to(gl.int64) * stride_indices_s
        for start in range(0, gl.maximum(count, 1), BLOCK_N):
            rows_now = rows
            rope_rows_now = rope_rows
            more = start + BLOCK_N < count
            left = gl.where(more, count - start - BLOCK_N, next_count)
            ahead = gl.where(more, list_ptr + start + BLOCK_N, next_list)
            rows = gl.load(ahead + entries, mask=entries < left, other=-1)
            rope_rows = gl.load(ahead + rope_entries, mask=rope_entries < left, other=-1)
            live = start < count
            if live:
                gather_values(kv_ptr, rows_now, live, s_kv, stride_kv_s, columns, item, ring, full, empty, SLOTS)
                gather_rope(
                    kv_ptr, rope_rows_now, live, s_kv, stride_kv_s, rope_columns, item, rope_ring, empty, SLOTS,
                    ROPE_SLOTS,
                )  # fmt: skip
                announce(item, full, SLOTS)
                item += 1
        count = next_count
        list_ptr = next_list


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
    query_shared,
    rope_query_shared,
    ring,
    rope_ring,
    weights_shared,
    partial,
    full,
    empty,
    query_ready,
    query_done,
    partial_ready,
    HEADS: gl.constexpr,
    H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    ROPE_SLOTS: gl.constexpr,
    OVER_ROPE: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend the even or the odd tiles of each query; the first side also brings the query in and writes the answer."""
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16])
    per_head: gl.constexpr = gl.SliceLayout(0, product)
    per_row: gl.constexpr = gl.SliceLayout(1, product)
    rows_of_heads: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rope_of_heads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    head = gl.arange(0, H, layout=gl.SliceLayout(1, rows_of_heads))
    rope_head = gl.arange(0, H, layout=gl.SliceLayout(1, rope_of_heads))
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, rows_of_heads)), 0)
    rope_column = gl.expand_dims(512 + gl.arange(0, 64, layout=gl.SliceLayout(0, rope_of_heads)), 0)
    q_offsets = gl.expand_dims(head * stride_q_h, 1) + column
    rope_offsets = gl.expand_dims(rope_head * stride_q_h, 1) + rope_column
    out_offsets = gl.expand_dims(head * stride_out_h, 1) + column
    heads = gl.arange(0, H, layout=per_head)
    entries = gl.arange(0, BLOCK_N, layout=per_row)
    step = gl.num_programs(0)
    first = gl.program_id(0)
    if SIDE == 0:
        sink_log2 = gl.zeros([H], gl.float32, layout=per_head)
        if HAS_SINK:
            sink_log2 = gl.load(attn_sink_ptr + heads, mask=heads < HEADS, other=float("-inf")) * 1.4426950408889634
        query_shared.store(load_query(q_ptr, first, s_q, stride_q_s, q_offsets, head, HEADS, H))
        rope_query_shared.store(load_query(q_ptr, first, s_q, stride_q_s, rope_offsets, rope_head, HEADS, H))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(query_ready, count=1)
    count = live_entries(topk_length_ptr, first, s_q, topk, HAS_LENGTH)
    list_ptr = indices_ptr + first.to(gl.int64) * stride_indices_s + SIDE * BLOCK_N
    rows_next = gl.load(list_ptr + entries, mask=SIDE * BLOCK_N + entries < count, other=-1)
    tiles_before = 0
    queries_done = 0
    merges_done = 0
    for query in range(first, s_q, step):
        count = live_entries(topk_length_ptr, query, s_q, topk, HAS_LENGTH)
        next_count = live_entries(topk_length_ptr, query + step, s_q, topk, HAS_LENGTH)
        num_tiles = (count + BLOCK_N - 1) // BLOCK_N
        list_ptr = indices_ptr + query.to(gl.int64) * stride_indices_s
        next_query = gl.minimum(query + step, s_q - 1).to(gl.int64)
        next_list = indices_ptr + next_query * stride_indices_s + SIDE * BLOCK_N
        if SIDE == 0:
            q_next = load_query(q_ptr, query + step, s_q, stride_q_s, q_offsets, head, HEADS, H)
            rope_next = load_query(q_ptr, query + step, s_q, stride_q_s, rope_offsets, rope_head, HEADS, H)
        if num_tiles <= SIDE:
            rows_next = gl.load(next_list + entries, mask=SIDE * BLOCK_N + entries < next_count, other=-1)
        mbarrier.wait(query_ready, queries_done & 1)
        row_max = gl.full([H], float("-inf"), gl.float32, layout=per_head)
        row_sum = gl.zeros([BLOCK_N, H], gl.float32, layout=product)
        acc = gl.zeros([512, H], gl.float32, layout=product)
        slot = 0
        for tile in range(SIDE, num_tiles, 2):
            item = tiles_before + tile
            slot = item % SLOTS
            valid = (rows_next >= 0) & (rows_next < s_kv)
            more = tile + 2 < num_tiles
            left = gl.where(more, count - (tile + 2) * BLOCK_N, next_count - SIDE * BLOCK_N)
            rows_next = gl.load(
                gl.where(more, list_ptr + (tile + 2) * BLOCK_N, next_list) + entries, mask=entries < left, other=-1
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
            logits = warpgroup_mma(
                rope_ring.index(item % ROPE_SLOTS), rope_query_shared.permute((1, 0)), logits, is_async=True
            )
            logits = warpgroup_mma_wait(0, deps=(logits,))
            logits = gl.where(gl.expand_dims(valid, 1), logits * scale_log2, float("-inf"))
            row_max, shift, decay = raised_maximum(row_max, logits, 0)
            weights = gl.exp2(logits - gl.expand_dims(shift, 0))
            row_sum = row_sum * gl.expand_dims(decay, 0) + weights
            if OVER_ROPE:
                transposed = rope_ring.index(item % ROPE_SLOTS).slice(0, H, 0).permute((1, 0))
            else:
                transposed = weights_shared.index(SIDE).permute((1, 0))
            transposed.store(weights.to(gl.bfloat16))
            fence_async_shared()
            acc = acc * gl.expand_dims(decay, 0)
            acc = warpgroup_mma(ring.index(slot).permute((1, 0)), transposed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            thread_barrier()
            # the last slot stays with this side
            mbarrier.arrive(empty.index(slot), count=1, pred=more)
        total = gl.sum(row_sum, 0)
        if SIDE == 1:
            thread_barrier()
            mbarrier.arrive(query_done, count=1)
            if num_tiles >= 2:
                partial.index((merges_done & 1) * 2).store(row_max)
                partial.index((merges_done & 1) * 2 + 1).store(total)
                ring.index(slot)._reinterpret(gl.float32, [512, H], plain).store(acc)
                thread_barrier()
                mbarrier.arrive(partial_ready.index(merges_done & 1), count=1)
                merges_done += 1
        else:
            # the other side is through with this query: bring in the next
            mbarrier.wait(query_done, queries_done & 1)
            thread_barrier()
            query_shared.store(q_next)
            rope_query_shared.store(rope_next)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(query_ready, count=1)
            if num_tiles >= 2:
                mbarrier.wait(partial_ready.index(merges_done & 1), (merges_done >> 1) & 1)
                other_max = partial.index((merges_done & 1) * 2).load(per_head)
                other_total = partial.index((merges_done & 1) * 2 + 1).load(per_head)
                other_slot = (tiles_before + (num_tiles // 2) * 2 - 1) % SLOTS
                other_acc = ring.index(other_slot)._reinterpret(gl.float32, [512, H], plain).load(product)
                thread_barrier()
                mbarrier.arrive(empty.index(other_slot), count=1)
                new_max = gl.maximum(row_max, other_max)
                shift = gl.where(new_max == float("-inf"), 0.0, new_max)
                decay = gl.exp2(row_max - shift)
                other_decay = gl.exp2(other_max - shift)
                total = total * decay + other_total * other_decay
                acc = acc * gl.expand_dims(decay, 0) + other_acc * gl.expand_dims(other_decay, 0)
                row_max = new_max
                merges_done += 1
            share, lse, highest = finished(row_max, total, sink_log2, HAS_SINK)
            gl.store(lse_ptr + query.to(gl.int64) * HEADS + heads, lse, mask=heads < HEADS)
            gl.store(max_logits_ptr + query.to(gl.int64) * HEADS + heads, highest, mask=heads < HEADS)
            out_rows = out_ptr + query.to(gl.int64) * stride_out_s + out_offsets
            written = gl.expand_dims(head < HEADS, 1)
            if num_tiles >= 1:
                turned = ring.index(slot).slice(0, H, 0)
                turned.permute((1, 0)).store((acc * gl.expand_dims(share, 0)).to(gl.bfloat16))
                thread_barrier()
                gl.store(out_rows, turned.load(rows_of_heads), mask=written)
                thread_barrier()
                mbarrier.arrive(empty.index(slot), count=1)
            else:
                gl.store(out_rows, gl.zeros([H, 512], gl.bfloat16, layout=rows_of_heads), mask=written)
        tiles_before += num_tiles
        queries_done += 1


@gluon.jit(do_not_specialize=["s_q", "s_kv"])
def split_kernel(
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
    ROPE_SLOTS: gl.constexpr,
    OVER_ROPE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    HAS_LENGTH: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend queries ``num_programs`` apart."""
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    # a buffer that is not used is as small as its layout allows
    BUFFERS: gl.constexpr = 1 if OVER_ROPE else 2
    BUFFER_H: gl.constexpr = 8 if OVER_ROPE else H
    BUFFER_N: gl.constexpr = 16 if OVER_ROPE else BLOCK_N
    buffer_layout: gl.constexpr = narrow if OVER_ROPE else tiled
    query_shared = gl.allocate_shared_memory(gl.bfloat16, [H, 512], tiled)
    rope_query_shared = gl.allocate_shared_memory(gl.bfloat16, [H, 64], tiled)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, 512], tiled)
    rope_ring = gl.allocate_shared_memory(gl.bfloat16, [ROPE_SLOTS, BLOCK_N, 64], tiled)
    weights_shared = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BUFFER_H, BUFFER_N], buffer_layout)
    partial = gl.allocate_shared_memory(gl.float32, [4, H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    partial_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barriers)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], barriers)
    query_done = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=128)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(partial_ready.index(0), count=1)
    mbarrier.init(partial_ready.index(1), count=1)
    mbarrier.init(query_ready, count=1)
    mbarrier.init(query_done, count=1)
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0, q_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr, s_q, s_kv,
                    topk, stride_q_s, stride_q_h, stride_indices_s, stride_out_s, stride_out_h, scale_log2,
                    query_shared, rope_query_shared, ring, rope_ring, weights_shared, partial, full, empty, query_ready,
                    query_done, partial_ready, HEADS, H, BLOCK_N, SLOTS, ROPE_SLOTS, OVER_ROPE, HAS_LENGTH, HAS_SINK,
                ),
            ),
            (
                _consumer,
                (
                    1, q_ptr, indices_ptr, topk_length_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr, s_q, s_kv,
                    topk, stride_q_s, stride_q_h, stride_indices_s, stride_out_s, stride_out_h, scale_log2,
                    query_shared, rope_query_shared, ring, rope_ring, weights_shared, partial, full, empty, query_ready,
                    query_done, partial_ready, HEADS, H, BLOCK_N, SLOTS, ROPE_SLOTS, OVER_ROPE, HAS_LENGTH, HAS_SINK,
                ),
            ),
            (
                _producer,
                (
                    kv_ptr, indices_ptr, topk_length_ptr, s_q, s_kv, topk, stride_kv_s, stride_indices_s, ring,
                    rope_ring, full, empty, BLOCK_N, SLOTS, ROPE_SLOTS, HAS_LENGTH,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
