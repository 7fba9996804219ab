"""Sparse MLA over united lists, in Gluon for Hopper: neighbouring queries that share rows gather them once.

The heads of ``64 / H`` neighbouring queries are the 64 rows of an ordinary tile. Their list has a row of the cache and
a byte with a bit for each of these queries; a row that one query lists twice is two entries. Eight warps attend: in the
first product they split the listed rows, in the second the 512 values; four warps gather. Launched by
``_sparse_mla_union.py``.

A query's own weights are zero where a neighbour listed a row, and zero times a NaN is a NaN. Where the sum of a query's
weights is a number and its answer is not, a flag is set, and the launcher has that query attended alone.
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

from ._sparse_mla_gluon_gather import announce, finished, gather_rope, gather_values, raised_maximum, thread_barrier


@gluon.jit
def _producer(
    kv_ptr,
    rows_ptr,
    count_ptr,
    s_kv,
    num_groups,
    stride_kv_s,
    ring,
    rope_ring,
    full,
    empty,
    D_QK: gl.constexpr,
    CAPACITY: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Gather the united lists of one group after the other; a list is read a tile ahead, also across groups."""
    layout: gl.constexpr = gl.BlockedLayout([4, 8], [1, 32], [4, 1], [1, 0])
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    rope_columns = 512 + gl.arange(0, 64, layout=gl.SliceLayout(0, rope_layout))
    entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    rope_entries = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rope_layout))
    first = gl.program_id(0)
    count = gl.load(count_ptr + first)
    list_ptr = rows_ptr + first.to(gl.int64) * CAPACITY
    rows = gl.load(list_ptr + entries, mask=entries < count, other=-1)
    rope_rows = gl.load(list_ptr + rope_entries, mask=rope_entries < count, other=-1)
    item = 0
    for group in range(first, num_groups, gl.num_programs(0)):
        next_group = gl.minimum(group + gl.num_programs(0), num_groups - 1)
        next_count = gl.load(count_ptr + next_group)
        next_list = rows_ptr + next_group.to(gl.int64) * CAPACITY
        if count == 0:
            rows = gl.load(next_list + entries, mask=entries < next_count, other=-1)
            rope_rows = gl.load(next_list + rope_entries, mask=rope_entries < next_count, other=-1)
        for start in range(0, count, BLOCK_N):
            rows_now = rows
            rope_rows_now = rope_rows
            more = start + BLOCK_N < count
            left = gl.where(more, count - start - BLOCK_N, next_count)
            ahead = gl.where(more, list_ptr + start + BLOCK_N, next_list)
            rows = gl.load(ahead + entries, mask=entries < left, other=-1)
            if D_QK == 576:
                rope_rows = gl.load(ahead + rope_entries, mask=rope_entries < left, other=-1)
            live = count > 0
            gather_values(kv_ptr, rows_now, live, s_kv, stride_kv_s, columns, item, ring, full, empty, SLOTS)
            if D_QK == 576:
                gather_rope(
                    kv_ptr, rope_rows_now, live, s_kv, stride_kv_s, rope_columns, item, rope_ring, empty, SLOTS, SLOTS
                )
            announce(item, full, SLOTS)
            item += 1
        count = next_count
        list_ptr = next_list


@gluon.jit
def _consumer(
    q_ptr,
    members_ptr,
    count_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    flags_ptr,
    s_q,
    num_groups,
    stride_q_s,
    stride_q_h,
    stride_out_s,
    stride_out_h,
    scale_log2,
    query_shared,
    rope_query_shared,
    ring,
    rope_ring,
    weights_shared,
    full,
    empty,
    HEADS: gl.constexpr,
    H: gl.constexpr,
    D_QK: gl.constexpr,
    CAPACITY: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend the rows of one group after the other: row ``r`` of a tile is head ``r % H`` of query ``r // H``."""
    GROUP: gl.constexpr = 64 // H
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BLOCK_N // 2, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]
    )
    per_row: gl.constexpr = gl.SliceLayout(1, logits_layout)
    per_key: gl.constexpr = gl.SliceLayout(0, logits_layout)
    rows_of_heads: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    rope_of_heads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    lines_of_heads: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0])
    wide = gl.arange(0, 64, layout=gl.SliceLayout(1, rows_of_heads))
    narrow = gl.arange(0, 64, layout=gl.SliceLayout(1, rope_of_heads))
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, lines_of_heads))
    line_column = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, lines_of_heads)) * 64, 0)
    column = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, rows_of_heads)), 0)
    rope_column = gl.expand_dims(512 + gl.arange(0, 64, layout=gl.SliceLayout(0, rope_of_heads)), 0)
    row = gl.arange(0, 64, layout=per_row)
    entries = gl.arange(0, BLOCK_N, layout=per_key)
    sink_log2 = gl.zeros([64], gl.float32, layout=per_row)
    if HAS_SINK:
        sink_log2 = gl.load(attn_sink_ptr + row % H, mask=row % H < HEADS, other=float("-inf")) * 1.4426950408889634
    item = 0
    for group in range(gl.program_id(0), num_groups, gl.num_programs(0)):
        count = gl.load(count_ptr + group)
        group_members = members_ptr + group.to(gl.int64) * CAPACITY
        members_next = gl.load(group_members + entries, mask=entries < count, other=0).to(gl.int32)
        query = group * GROUP + wide // H
        query_shared.store(
            gl.load(
                q_ptr + gl.expand_dims(query.to(gl.int64) * stride_q_s + (wide % H) * stride_q_h, 1) + column,
                mask=gl.expand_dims((query < s_q) & (wide % H < HEADS), 1),
                other=0.0,
            )
        )
        if D_QK == 576:
            rope_query = group * GROUP + narrow // H
            rope_rows = rope_query.to(gl.int64) * stride_q_s + (narrow % H) * stride_q_h
            rope_query_shared.store(
                gl.load(
                    q_ptr + gl.expand_dims(rope_rows, 1) + rope_column,
                    mask=gl.expand_dims((rope_query < s_q) & (narrow % H < HEADS), 1),
                    other=0.0,
                )
            )
        fence_async_shared()
        # bring the next group's queries into the cache meanwhile
        ahead = gl.minimum((group + gl.num_programs(0)) * GROUP + line // H, s_q - 1)
        ahead_rows = ahead.to(gl.int64) * stride_q_s + gl.minimum(line % H, HEADS - 1) * stride_q_h
        gl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l",
            [q_ptr + gl.expand_dims(ahead_rows, 1) + line_column],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        row_max = gl.full([64], float("-inf"), gl.float32, layout=per_row)
        row_sum = gl.zeros([64, BLOCK_N], gl.float32, layout=logits_layout)
        acc = gl.zeros([64, 512], gl.float32, layout=out_layout)
        for start in range(0, count, BLOCK_N):
            slot = item % SLOTS
            listed = ((gl.expand_dims(members_next, 0) >> gl.expand_dims(row // H, 1)) & 1) != 0
            beyond = start + BLOCK_N + entries
            members_next = gl.load(group_members + start + BLOCK_N + entries, mask=beyond < count, other=0).to(gl.int32)
            mbarrier.wait(full.index(slot), (item // SLOTS) & 1)
            fence_async_shared()
            logits = warpgroup_mma(
                query_shared,
                ring.index(slot).permute((1, 0)),
                gl.zeros([64, BLOCK_N], gl.float32, layout=logits_layout),
                use_acc=False,
                is_async=True,
            )
            if D_QK == 576:
                logits = warpgroup_mma(rope_query_shared, rope_ring.index(slot).permute((1, 0)), logits, is_async=True)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            logits = gl.where(listed, logits * scale_log2, float("-inf"))
            row_max, shift, decay = raised_maximum(row_max, logits, 1)
            weights = gl.exp2(logits - gl.expand_dims(shift, 1))
            row_sum = row_sum * gl.expand_dims(decay, 1) + weights
            weights_shared.store(weights.to(gl.bfloat16))
            fence_async_shared()
            acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, out_layout)), 1)
            acc = warpgroup_mma(weights_shared, ring.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            thread_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            item += 1
        total = gl.sum(row_sum, 1)
        share, lse, highest = finished(row_max, total, sink_log2, HAS_SINK)
        answered = group * GROUP + row // H
        real = (answered < s_q) & (row % H < HEADS)
        place = answered.to(gl.int64) * HEADS + row % H
        gl.store(lse_ptr + place, lse, mask=real)
        gl.store(max_logits_ptr + place, highest, mask=real)
        strange = gl.convert_layout(gl.max((acc != acc).to(gl.int32), 1), per_row)
        gl.store(flags_ptr + place, ((strange != 0) & (total == total)).to(gl.int8), mask=real)
        query_shared.store(
            (acc * gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(1, out_layout)), 1)).to(gl.bfloat16)
        )
        query = group * GROUP + wide // H
        gl.store(
            out_ptr + gl.expand_dims(query.to(gl.int64) * stride_out_s + (wide % H) * stride_out_h, 1) + column,
            query_shared.load(rows_of_heads),
            mask=gl.expand_dims((query < s_q) & (wide % H < HEADS), 1),
        )
        thread_barrier()


@gluon.jit(do_not_specialize=["s_q", "s_kv", "num_groups"])
def union_kernel(
    q_ptr,
    kv_ptr,
    rows_ptr,
    members_ptr,
    count_ptr,
    attn_sink_ptr,
    out_ptr,
    lse_ptr,
    max_logits_ptr,
    flags_ptr,
    s_q,
    s_kv,
    num_groups,
    stride_q_s,
    stride_q_h,
    stride_kv_s,
    stride_out_s,
    stride_out_h,
    scale_log2,
    HEADS: gl.constexpr,
    H: gl.constexpr,
    D_QK: gl.constexpr,
    CAPACITY: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    """Attend groups of queries ``num_programs`` apart."""
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_N, element_bitwidth=16, rank=2)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    # buffers that are not used are as small as their layout allows
    ROPE: gl.constexpr = 64 if D_QK == 576 else 16
    ROPE_HEADS: gl.constexpr = 64 if D_QK == 576 else 8
    ROPE_ROWS: gl.constexpr = BLOCK_N if D_QK == 576 else 8
    rope_layout: gl.constexpr = (
        tiled if D_QK == 576 else gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    )
    query_shared = gl.allocate_shared_memory(gl.bfloat16, [64, 512], tiled)
    rope_query_shared = gl.allocate_shared_memory(gl.bfloat16, [ROPE_HEADS, ROPE], rope_layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK_N, 512], tiled)
    rope_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROPE_ROWS, ROPE], rope_layout)
    weights_shared = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK_N], weights_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=128)
        mbarrier.init(empty.index(slot), count=1)
    thread_barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    q_ptr, members_ptr, count_ptr, attn_sink_ptr, out_ptr, lse_ptr, max_logits_ptr, flags_ptr, s_q,
                    num_groups, stride_q_s, stride_q_h, stride_out_s, stride_out_h, scale_log2, query_shared,
                    rope_query_shared, ring, rope_ring, weights_shared, full, empty, HEADS, H, D_QK, CAPACITY, BLOCK_N,
                    SLOTS, HAS_SINK,
                ),
            ),
            (
                _producer,
                (
                    kv_ptr, rows_ptr, count_ptr, s_kv, num_groups, stride_kv_s, ring, rope_ring, full, empty, D_QK,
                    CAPACITY, BLOCK_N, SLOTS,
                ),
            ),
        ],
        [4],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
