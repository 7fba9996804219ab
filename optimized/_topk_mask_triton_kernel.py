"""The Triton kernels of ``topk_mask``: one row of the mask a program, and the map of its tiles.

Launched by ``_topk_mask_triton.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

# entries and words that a thread holds when a row is built in shared memory
PACK: tl.constexpr = tl.constexpr(16)
_CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=&r"] * PACK.value + ["r"] * (2 * PACK.value)))


@triton.constexpr_function
def row_assembly(row_words):
    """PTX that builds one row of words in shared memory, run once by each thread of a program.

    A thread gets ``PACK`` keys (negative: none) and the numbers of ``PACK`` words, which it clears first and reads in
    the end. A word past the row is left alone and reads 0. Results are operands 0 .. PACK - 1; keys, then words follow.
    """
    pack = PACK.value
    keys, words = range(pack, 2 * pack), range(2 * pack, 3 * pack)
    lines = [
        f".shared .align 4 .b32 row[{row_words}];",
        ".reg .pred inside;",
        ".reg .b32 base, at, bit, one;",
        "mov.u32 base, row;",
        "mov.b32 one, 1;",
    ]
    for word in words:
        lines += [
            f"setp.lt.u32 inside, ${word}, {row_words};",
            f"mad.lo.u32 at, ${word}, 4, base;",
            "@inside st.shared.b32 [at], 0;",
        ]
    lines += ["bar.sync 0;"]
    for key in keys:
        lines += [
            f"setp.ge.s32 inside, ${key}, 0;",
            f"shr.u32 at, ${key}, 5;",
            "mad.lo.u32 at, at, 4, base;",
            f"and.b32 bit, ${key}, 31;",
            "shl.b32 bit, one, bit;",
            "@inside red.shared.or.b32 [at], bit;",
        ]
    lines += ["bar.sync 0;"]
    for result, word in enumerate(words):
        lines += [
            f"setp.lt.u32 inside, ${word}, {row_words};",
            f"mad.lo.u32 at, ${word}, 4, base;",
            f"mov.b32 ${result}, 0;",
            f"@inside ld.shared.b32 ${result}, [at];",
        ]
    return "\n".join(["{", *lines, "}"])


@triton.jit
def _mark_row(
    indices_ptr,
    mask_ptr,
    first_key,
    behind_key,
    topk,
    stride_indices_t,
    stride_indices_j,
    num_words,
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """Set the bits of one query's entries.

    All of them in a row in shared memory of ``ROW_WORDS`` words; or, if that is 0, those of this program's block by
    atomic operations.
    """
    query = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    entries = tl.program_id(1) * BLOCK + lane
    pointers = indices_ptr + query * stride_indices_t + entries.to(tl.int64) * stride_indices_j
    index = tl.load(pointers, mask=entries < topk, other=-1)
    # compared before they are subtracted, as the difference of the smallest number would wrap; no bound is negative
    valid = (index >= first_key) & (index < behind_key)
    row_ptr = mask_ptr + query * num_words
    if ROW_WORDS == 0:
        key = tl.where(valid, index - first_key, 0)
        bit = tl.full([BLOCK], 1, tl.int32) << (key & 31)
        tl.atomic_or(row_ptr + (key >> 5), bit, mask=valid, sem="relaxed")
    else:
        key = tl.where(valid, index - first_key, -1)
        # neighbouring threads get neighbouring words, whatever the layout of their entries
        word = lane % 4 * (BLOCK // 4) + lane // 4
        # past the row of a shorter request nothing is cleared
        word = tl.where(word < num_words, word, ROW_WORDS)
        assembly: tl.constexpr = row_assembly(ROW_WORDS)
        bits = tl.inline_asm_elementwise(assembly, _CONSTRAINTS, [key, word], dtype=tl.int32, is_pure=False, pack=PACK)
        tl.store(row_ptr + word, bits, mask=word < num_words)


@triton.jit(do_not_specialize=["first_key", "behind_key", "num_words"])
def mark_single_kernel(
    indices_ptr,
    mask_ptr,
    first_key,
    behind_key,
    topk,
    stride_indices_t,
    stride_indices_j,
    num_words,
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """A row of the only request."""
    _mark_row(
        indices_ptr, mask_ptr, first_key, behind_key, topk, stride_indices_t, stride_indices_j, num_words,
        BLOCK, ROW_WORDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_words"])
def mark_kernel(
    indices_ptr,
    mask_ptr,
    request_of_query_ptr,
    key_bounds_ptr,
    topk,
    stride_indices_t,
    stride_indices_j,
    num_words,
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
):
    """A row of any request."""
    request = tl.load(request_of_query_ptr + tl.program_id(0))
    first_key = tl.load(key_bounds_ptr + 2 * request)
    behind_key = tl.load(key_bounds_ptr + 2 * request + 1)
    _mark_row(
        indices_ptr, mask_ptr, first_key, behind_key, topk, stride_indices_t, stride_indices_j, num_words,
        BLOCK, ROW_WORDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_words", "num_columns"])
def map_kernel(
    mask_ptr,
    map_ptr,
    tile_rows_ptr,
    num_words,
    num_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Some columns of one row of the map."""
    COLUMNS: tl.constexpr = BLOCK_WORDS // TILE_WORDS
    tile = tl.program_id(0)
    rows = tl.load(tile_rows_ptr + 2 * tile) + tl.arange(0, BLOCK_ROWS)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = (rows < tl.load(tile_rows_ptr + 2 * tile + 1))[:, None] & (words < num_words)[None, :]
    mask = tl.load(mask_ptr + rows.to(tl.int64)[:, None] * num_words + words[None, :], mask=inside, other=0)
    held = tl.max((mask != 0).to(tl.int32), 0)
    held = tl.max(tl.reshape(held, [COLUMNS, TILE_WORDS]), 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(map_ptr + tile.to(tl.int64) * num_columns + columns, held.to(tl.uint8), mask=columns < num_columns)


# decided when the kernels were decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(mark_kernel, triton.runtime.JITFunction)
