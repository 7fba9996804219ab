"""What the Triton kernels of the gated delta rule share: rounding, gates, rows, the inverse of a unit triangle."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def rounded(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 to a format; the interpreter cuts bfloat16 off and multiplies its bits, so there it stays wide."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        result = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        result = x.to(DTYPE)
    return result


@triton.jit
def wide(x, INTERPRETED: tl.constexpr):
    """An operand as it is, float32 under the interpreter, where products of bfloat16 are wrong."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def near(x, PRECISION: tl.constexpr):
    """A float32 operand rounded to tf32 where products are: tensor cores would cut it off, and draw every sum to 0."""
    if PRECISION == "tf32" and x.dtype == tl.float32:
        nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x


@triton.jit
def load_rows(pointers, inside, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Columns of the rows that ``pointers`` begin, as stored; 0 where a row is not ``inside``, and past the last."""
    columns = tl.arange(0, BLOCK_COLUMNS)
    mask = inside[:, None]
    if COLUMNS < BLOCK_COLUMNS:
        mask = mask & (columns < COLUMNS)[None, :]
    return tl.load(pointers[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def log2_decay(g, bias, amplitude, lower_bound_log2, GATE: tl.constexpr):
    """Base-2 logarithm of the decay, of float32 logits ``g``; decays below 2^-1000 are 2^-1000, which is 0."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    if GATE == "log":
        decay = g * LOG2_E
    elif GATE == "softplus":
        x = g + bias
        u = tl.exp2(tl.minimum(x, 20.0) * LOG2_E)
        w = 1.0 + u
        # ln(1 + u) of a small u, without the error of 1 + u
        low = tl.where(w == 1.0, u * LOG2_E, tl.log2(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
        decay = -amplitude * tl.where(x > 20.0, x * LOG2_E, low)
    else:
        decay = lower_bound_log2 / (1.0 + tl.exp2(tl.minimum(-LOG2_E * amplitude * (g + bias), 126.0)))
        decay = tl.where(g == g, decay, g)
    return tl.where(decay < -1000.0, -1000.0, decay)


@triton.jit
def write_strength(beta, inside, LOGITS: tl.constexpr):
    """Of float32 ``beta``; 0 in rows that are not ``inside``."""
    if LOGITS:
        strength = 1.0 / (1.0 + tl.exp2(tl.minimum(-1.4426950408889634 * beta, 126.0)))
        beta = tl.where(beta == beta, strength, beta)
    return tl.where(inside, beta, 0.0)


@triton.jit
def inverse_norm(x, NORMALISE: tl.constexpr):
    """``1 / sqrt(sum x^2 + 1e-6)`` of each row, or 1."""
    if NORMALISE:
        factor = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
    else:
        factor = tl.sum(x * 0.0, 1) + 1.0
    return factor


@triton.jit
def block_inverse(a, BLOCKS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Inverse of the unit lower triangles in the diagonal blocks of ``I + a``, 0 elsewhere; float32 substitution."""
    block = tl.arange(0, BLOCKS)[:, None, None, None]
    other = tl.arange(0, BLOCKS)[None, None, :, None]
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    triangles = tl.sum(tl.where(block == other, tl.reshape(a, (BLOCKS, SIZE, BLOCKS, SIZE)), 0.0), 2)
    triangles = tl.where(i > j, triangles, 0.0)
    inverse = tl.where(i == j, 1.0, tl.zeros_like(triangles))
    for step in tl.static_range(SIZE - 1):
        column = tl.sum(tl.where(j == step, triangles, 0.0), 2)
        row = tl.sum(tl.where(i == step, inverse, 0.0), 1)
        inverse = inverse - column[:, :, None] * row[:, None, :]
    return tl.reshape(tl.where(block == other, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
