"""The Triton kernels that unite the lists of neighbouring queries. Launched by ``_sparse_mla_union.py``.

A group of at most 8 queries has one byte a row of the cache, in which each query that lists the row has a bit. The
bytes lie in words of four; they are zero before the first kernel and again after the second.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["s_kv", "num_words"])
def mark_kernel(
    indices_ptr,
    topk_length_ptr,
    words_ptr,
    num_repeats_ptr,
    repeat_rows_ptr,
    repeat_bits_ptr,
    s_kv,
    num_words,
    stride_indices_s,
    stride_indices_j,
    TOPK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a query: sets its bit in the byte of each listed row; a bit that was set already is a repeat."""
    query = tl.program_id(0)
    group = (query // GROUP).to(tl.int64)
    member = query % GROUP
    count = TOPK
    if topk_length_ptr is not None:
        count = tl.minimum(tl.load(topk_length_ptr + query), TOPK)
    list_ptr = indices_ptr + query.to(tl.int64) * stride_indices_s
    for first in range(0, count, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        rows = tl.load(list_ptr + entries.to(tl.int64) * stride_indices_j, mask=entries < count, other=-1)
        valid = (rows >= 0) & (rows < s_kv)
        bit = (1 << (member + 8 * (rows & 3))).to(tl.int32)
        before = tl.atomic_or(words_ptr + group * num_words + (rows >> 2), bit, mask=valid, sem="relaxed")
        repeated = valid & ((before & bit) != 0)
        if tl.sum(repeated.to(tl.int32)) > 0:
            counters = num_repeats_ptr + group + tl.zeros([BLOCK], tl.int32)
            place = group * (GROUP * TOPK) + tl.atomic_add(counters, 1, mask=repeated, sem="relaxed")
            tl.store(repeat_rows_ptr + place, rows, mask=repeated)
            own = (tl.zeros([BLOCK], tl.int32) + (1 << member)).to(tl.uint8)
            tl.store(repeat_bits_ptr + place, own, mask=repeated)


@triton.jit
def _append_byte(rows_ptr, members_ptr, place, row, byte):
    """Write one entry of the united list where the byte names a query; return the next place."""
    named = byte != 0
    tl.store(rows_ptr + place, row, mask=named)
    tl.store(members_ptr + place, byte.to(tl.uint8), mask=named)
    return place + named.to(tl.int32)


@triton.jit(do_not_specialize=["num_words"])
def compact_kernel(
    words_ptr,
    num_repeats_ptr,
    repeat_rows_ptr,
    repeat_bits_ptr,
    united_rows_ptr,
    united_members_ptr,
    united_count_ptr,
    num_words,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REPEATS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """One program a group: lists its rows in ascending order with the byte of each, then its repeats; clears the marks.

    The repeats, which came in any order, are put in order of row and query, so that the list is always the same.
    """
    group = tl.program_id(0).to(tl.int64)
    rows_ptr = united_rows_ptr + group * CAPACITY
    members_ptr = united_members_ptr + group * CAPACITY
    total = 0
    for first in range(0, num_words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < num_words
        word = tl.load(words_ptr + group * num_words + at, mask=inside, other=0)
        tl.store(words_ptr + group * num_words + at, tl.zeros([BLOCK], tl.int32), mask=inside & (word != 0))
        entries = ((word & 255) != 0).to(tl.int32) + (((word >> 8) & 255) != 0).to(tl.int32)
        entries += (((word >> 16) & 255) != 0).to(tl.int32) + (((word >> 24) & 255) != 0).to(tl.int32)
        place = total + tl.cumsum(entries, 0) - entries
        for byte in tl.static_range(4):
            place = _append_byte(rows_ptr, members_ptr, place, 4 * at + byte, (word >> (8 * byte)) & 255)
        total += tl.sum(entries)

    num_repeats = tl.load(num_repeats_ptr + group)
    scratch = group * CAPACITY
    for first in range(0, num_repeats, BLOCK_REPEATS):
        at = first + tl.arange(0, BLOCK_REPEATS)
        row = tl.load(repeat_rows_ptr + scratch + at, mask=at < num_repeats, other=0)
        bit = tl.load(repeat_bits_ptr + scratch + at, mask=at < num_repeats, other=0)
        key = row.to(tl.int64) * 256 + bit.to(tl.int64)
        rank = tl.zeros([BLOCK_REPEATS], tl.int32)
        for first_other in range(0, num_repeats, BLOCK_OTHERS):
            other = first_other + tl.arange(0, BLOCK_OTHERS)
            other_row = tl.load(repeat_rows_ptr + scratch + other, mask=other < num_repeats, other=0)
            other_bit = tl.load(repeat_bits_ptr + scratch + other, mask=other < num_repeats, other=0)
            other_key = other_row.to(tl.int64) * 256 + other_bit.to(tl.int64)
            tied = (other_key[None, :] == key[:, None]) & (other[None, :] < at[:, None])
            earlier = ((other_key[None, :] < key[:, None]) | tied) & (other < num_repeats)[None, :]
            rank += tl.sum(earlier.to(tl.int32), 1)
        tl.store(rows_ptr + total + rank, row, mask=at < num_repeats)
        tl.store(members_ptr + total + rank, bit, mask=at < num_repeats)
    tl.store(united_count_ptr + group, total + num_repeats)
    tl.store(num_repeats_ptr + group, 0)
