"""The scores of the indexer as one Triton kernel: the heads of a tile of queries and keys are summed in registers.

Part of ``optimized/indexer.py``; call it from there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .indexer import IndexerShape


@triton.jit(
    do_not_specialize=["num_queries", "num_keys", "first", "stride_scores_t"],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr", "weights_ptr"],
)
def score_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    scores_ptr,
    num_queries,
    num_keys,
    first,
    stride_q_t,
    stride_q_h,
    stride_q_d,
    stride_k_t,
    stride_k_d,
    stride_weights_t,
    stride_weights_h,
    stride_scores_t,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of scores."""
    first_query, first_key = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    queries = first_query + tl.arange(0, BLOCK_M)
    keys = first_key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    row, key, column = queries.to(tl.int64), keys.to(tl.int64), columns.to(tl.int64)
    inside, present = queries < num_queries, keys < num_keys
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # a tile in the future of all its queries is only filled
    if first_key <= first_query + BLOCK_M - 1 + first:
        k = tl.load(
            k_ptr + key[:, None] * stride_k_t + column[None, :] * stride_k_d,
            mask=present[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        q_pointers = q_ptr + row[:, None] * stride_q_t + column[None, :] * stride_q_d
        weight_pointers = weights_ptr + row * stride_weights_t
        for _ in tl.range(0, HEADS):
            q = tl.load(q_pointers, mask=inside[:, None] & (columns < D)[None, :], other=0.0)
            weight = tl.load(weight_pointers, mask=inside, other=0.0)
            product = tl.dot(q, k.T, input_precision="ieee")
            scores += weight[:, None] * tl.maximum(product, 0.0)
            q_pointers += stride_q_h
            weight_pointers += stride_weights_h
    visible = keys[None, :] <= (queries + first)[:, None]
    scores = tl.where(visible, scores, float("-inf"))
    tl.store(
        scores_ptr + row[:, None] * stride_scores_t + key[None, :], scores, mask=inside[:, None] & present[None, :]
    )


# decided when the kernel was decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(score_kernel, triton.runtime.JITFunction)
# heads are at most this wide, so that a tile of keys fits in shared memory beside the queries of two heads
_MAX_HEAD_DIM = 256


def refusal(shape: "IndexerShape") -> str | None:
    """Why the kernel cannot serve a shape, or None."""
    if shape.dtype == torch.float64:
        return "float64 is not served: the kernel sums in float32"
    if INTERPRETED and shape.dtype == torch.bfloat16:
        return "bfloat16 is not served under TRITON_INTERPRET: the interpreter multiplies its bit patterns"
    if not INTERPRETED and shape.device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {shape.device}"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device is available"
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"index heads are at most {_MAX_HEAD_DIM} wide, got {shape.head_dim}"
    return None


def score(q: Tensor, k: Tensor, weights: Tensor, first: int) -> Tensor:
    """Score the keys of one request for some of its queries; arguments and result as in the torch form."""
    scores = torch.empty(len(q), len(k), dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    block_m, block_n, num_warps = (32, 32, 4) if INTERPRETED or q.dtype == torch.float32 else (64, 128, 4)
    grid = triton.cdiv(len(q), block_m), triton.cdiv(len(k), block_n)
    with torch.cuda.device_of(q):
        score_kernel[grid](
            q,
            k,
            weights,
            scores,
            len(q),
            len(k),
            first,
            *q.stride(),
            *k.stride(),
            *weights.stride(),
            scores.stride(0),
            HEADS=q.shape[1],
            D=q.shape[2],
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=max(16, triton.next_power_of_2(q.shape[2])),
            num_stages=2,
            num_warps=num_warps,
        )
    return scores
