"""What the Gluon kernels of ``sparse_mla`` share: gathering listed rows into a ring of slots in shared memory.

Rows travel in items of 64. Item ``i`` lies in slot ``i % SLOTS``; the barrier ``full`` of a slot says that its rows
have landed, ``empty`` that whoever used them is done. The parity of a barrier tells one round of the ring from the next
and no more: nobody may wait for an item that is more than a round away.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# waits for the warps of a partition; triton 3.7 gave it another name
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def wait_released(empty, item, SLOTS: gl.constexpr):
    """Wait until an item was released; at once for one before the first."""
    some = gl.maximum(item, 0)
    mbarrier.wait(empty.index(some % SLOTS), (some // SLOTS) & 1, pred=item >= 0)


@gluon.jit
def live_entries(topk_length_ptr, query, s_q, topk, HAS_LENGTH: gl.constexpr):
    """Entries of a query's list that count; 0 past the last query."""
    count = topk
    if HAS_LENGTH:
        count = gl.maximum(gl.minimum(gl.load(topk_length_ptr + gl.minimum(query, s_q - 1)), topk), 0)
    return gl.where(query < s_q, count, 0)


@gluon.jit
def load_query(q_ptr, query, s_q, stride_q_s, offsets, head, HEADS: gl.constexpr, H: gl.constexpr):
    """The native heads of a query, zeros for those that fill the tile; any query past the last is the last."""
    pointers = q_ptr + gl.minimum(query, s_q - 1).to(gl.int64) * stride_q_s + offsets
    if HEADS < H:
        return gl.load(pointers, mask=gl.expand_dims(head < HEADS, 1), other=0.0)
    return gl.load(pointers)


@gluon.jit
def gather_values(kv_ptr, rows, live, s_kv, stride_kv_s, columns, item, ring, full, empty, SLOTS: gl.constexpr):
    """Begin to copy the first 512 columns of an item; zeros for padding, and for all of it where it is not live.

    A row that is not valid is never read, so that it may hold anything.
    """
    valid = (rows >= 0) & (rows < s_kv) & live
    pointers = gl.expand_dims(kv_ptr + rows.to(gl.int64) * stride_kv_s, 1) + gl.expand_dims(columns, 0)
    wait_released(empty, item - SLOTS, SLOTS)
    async_copy.async_copy_global_to_shared(ring.index(item % SLOTS), pointers, mask=gl.expand_dims(valid, 1))


@gluon.jit
def gather_rope(
    kv_ptr,
    rows,
    live,
    s_kv,
    stride_kv_s,
    columns,
    item,
    ring,
    empty,
    SLOTS: gl.constexpr,
    ROPE_SLOTS: gl.constexpr,
):
    """The same for the columns behind, in a ring of their own that may be shorter."""
    valid = (rows >= 0) & (rows < s_kv) & live
    pointers = gl.expand_dims(kv_ptr + rows.to(gl.int64) * stride_kv_s, 1) + gl.expand_dims(columns, 0)
    if ROPE_SLOTS < SLOTS:
        wait_released(empty, item - ROPE_SLOTS, SLOTS)
    async_copy.async_copy_global_to_shared(ring.index(item % ROPE_SLOTS), pointers, mask=gl.expand_dims(valid, 1))


@gluon.jit
def announce(item, full, SLOTS: gl.constexpr):
    """Let the copies of an item, when they land, arrive at its barrier: once for each of the 128 threads."""
    async_copy.mbarrier_arrive(full.index(item % SLOTS), increment_count=False)


@gluon.jit
def raised_maximum(row_max, logits, AXIS: gl.constexpr):
    """Take a tile of base-2 logits into the running maximum; return ``(new_max, shift, decay)``.

    Where nothing valid was seen yet, any finite shift makes the weights ``exp2(-inf) = 0``.
    """
    new_max = gl.maximum(row_max, gl.max(logits, AXIS))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, shift, gl.exp2(row_max - shift)


@gluon.jit
def finished(row_max, row_sum, sink_log2, HAS_SINK: gl.constexpr):
    """Return ``(share, lse, max_logits)``: the factor on the weighted sum, and the natural logarithms."""
    none = row_sum == 0.0
    safe_sum = gl.where(none, 1.0, row_sum)
    lse_log2 = gl.where(none, 0.0, row_max) + gl.log2(safe_sum)
    share = 1.0 / safe_sum
    if HAS_SINK:
        share = share / (1.0 + gl.exp2(sink_log2 - lse_log2))
    share = gl.where(none, 0.0, share)
    lse = gl.where(none, float("-inf"), lse_log2 * 0.6931471805599453)
    # a maximum drops a NaN, a sum keeps it
    return share, lse, gl.where(row_sum != row_sum, row_sum, row_max * 0.6931471805599453)
