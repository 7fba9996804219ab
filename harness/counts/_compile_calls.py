"""The host's way to each launch of the compile gate, on tensors of a stand-in device that hold no values."""

import torch
from torch import Tensor

from ...optimized.attention import AttentionShape, attention, merge_into, plan_attention
from ...optimized.indexer import IndexerShape, indexer, plan_indexer
from ...optimized.kda import Gate, KdaShape, kda, plan_kda, plan_kda_batch
from ...optimized.kda_step import kda_step, plan_kda_step
from ...optimized.masked_mha import masked_mha, plan_masked_mha
from ...optimized.mla_prefill import MlaShape, plan_mla_prefill
from ...optimized.sparse_mla import SparseMlaShape, plan_sparse_mla, sparse_mla
from ...optimized.token_scores import Mode, plan_token_scores, token_scores
from ...optimized.topk_mask import plan_topk_mask, topk_mask
from .standin_device import DEVICE

# counts and strides are specialised by divisibility alone: these are as even as those of models
TOKENS, HEADS = 8192, 16


def attend(*, head_dim_qk: int, head_dim_v: int, dtype: str, causal: bool, aligned: bool, positive_scale: bool) -> None:
    """Plan one request and attend; tokens that are not aligned lie an odd number of elements apart."""
    q, k, v = (_tokens(width, dtype, aligned=aligned) for width in (head_dim_qk, head_dim_qk, head_dim_v))
    shape = AttentionShape(
        device=DEVICE,
        dtype=q.dtype,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
    )
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32)
    plan = plan_attention(cu_seqlens, cu_seqlens, causal=causal, shape=shape, provider="triton")
    scale = head_dim_qk**-0.5
    attention(q, k, v, softmax_scale=scale if positive_scale else -scale, plan=plan)


def merge(*, width: int, dtype: str) -> None:
    """Merge a partial result of that dtype into a running one, as chunked prefill does."""
    out = torch.empty(TOKENS, HEADS, width, dtype=torch.float32, device=DEVICE)
    lse = torch.empty(TOKENS, HEADS, dtype=torch.float32, device=DEVICE)
    part = torch.empty(TOKENS, HEADS, width, dtype=getattr(torch, dtype), device=DEVICE)
    merge_into(out, lse, part, torch.empty_like(lse))


def score(*, mode: Mode, geometry: tuple[int, int, int, int], dtype: str) -> None:
    """Score the tokens of one request by its last 32 queries; ``geometry`` is R/Dn/Dr/Dv."""
    rank, d_nope, d_rope, d_v = geometry
    tokens, window, floating = 256, 32, getattr(torch, dtype)
    prefill = plan_mla_prefill(
        torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE),
        torch.arange(tokens, dtype=torch.int32, device=DEVICE)[None],
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.full((1,), tokens, dtype=torch.int32, device=DEVICE),
        shape=MlaShape(num_heads=HEADS, kv_lora_rank=rank, d_nope=d_nope, d_rope=d_rope, d_v=d_v),
        dtype=floating,
        num_slots=tokens,
        provider="triton",
    )
    observed = torch.tensor([[tokens - window, tokens]], device=DEVICE)
    plan = plan_token_scores(prefill, mode=mode, query_ranges=observed, implementation="triton")
    token_scores(
        torch.zeros(tokens, HEADS, d_nope + d_rope, dtype=floating, device=DEVICE),
        torch.zeros(tokens, rank, dtype=floating, device=DEVICE),
        torch.zeros(tokens, d_rope, dtype=floating, device=DEVICE),
        torch.zeros(HEADS, d_nope + d_v, rank, dtype=floating, device=DEVICE),
        softmax_scale=(d_nope + d_rope) ** -0.5,
        plan=plan,
    )


def attend_selection(*, implementation: str, h_q: int, d_qk: int) -> None:
    """Attend the native heads of a padded buffer to their lists: with sinks and lengths where models have them."""
    s_q, topk = 64, 640 if d_qk == 512 else 2048
    shape = SparseMlaShape(device=DEVICE, dtype=torch.bfloat16, s_q=s_q, s_kv=TOKENS, h_q=h_q, d_qk=d_qk, topk=topk)
    unified = d_qk == 512
    length = torch.full((s_q,), 512, dtype=torch.int32, device=DEVICE) if unified else None
    plan = plan_sparse_mla(shape, topk_length=length, implementation=implementation)
    sparse_mla(
        torch.zeros(s_q, 128, d_qk, dtype=torch.bfloat16, device=DEVICE)[:, :h_q],
        torch.zeros(TOKENS, d_qk, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(s_q, topk, dtype=torch.int32, device=DEVICE),
        softmax_scale=d_qk**-0.5,
        plan=plan,
        attn_sink=torch.zeros(h_q, device=DEVICE) if unified else None,
        out=torch.zeros(s_q, 128, 512, dtype=torch.bfloat16, device=DEVICE)[:, :h_q],
    )


def pack_selection(*, requests: int) -> None:
    """Pack the lists of 2048 keys a query into bits, with a map of their tiles."""
    queries = 256
    plan = plan_topk_mask(
        torch.arange(0, queries + 1, queries // requests, dtype=torch.int32),
        torch.full((requests,), TOKENS, dtype=torch.int32),
        topk=2048,
        device=DEVICE,
        tile=(128, 64),
        implementation="triton",
    )
    topk_mask(torch.zeros(queries, 2048, dtype=torch.int32, device=DEVICE), plan=plan)


def attend_masked(*, head_dim_qk: int, head_dim_v: int, aligned: bool) -> None:
    """Attend one request to the keys of a mask."""
    q, k, v = (_tokens(width, "bfloat16", aligned=aligned) for width in (head_dim_qk, head_dim_qk, head_dim_v))
    shape = AttentionShape(
        device=DEVICE,
        dtype=q.dtype,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
    )
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32)
    plan = plan_masked_mha(cu_seqlens, cu_seqlens, shape=shape, implementation="triton")
    mask = torch.zeros(TOKENS, TOKENS // 32, dtype=torch.int32, device=DEVICE)
    tile_map = None
    if plan.tile is not None:
        tile_map = torch.zeros(plan.num_tiles, TOKENS // plan.tile[1], dtype=torch.bool, device=DEVICE)
    masked_mha(q, k, v, mask, softmax_scale=head_dim_qk**-0.5, plan=plan, tile_map=tile_map)


def choose_keys() -> None:
    """Score the keys of one request with the index heads of DeepSeek-V3.2, and choose 2048 for each query."""
    tokens, heads, width = 4096, 64, 128
    shape = IndexerShape(device=DEVICE, dtype=torch.bfloat16, num_heads=heads, head_dim=width, topk=2048)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    indexer(
        torch.zeros(tokens, heads, width, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(tokens, width, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(tokens, heads, device=DEVICE),
        plan=plan_indexer(cu_seqlens, cu_seqlens, shape=shape, implementation="triton"),
    )


def recur(*, implementation: str, head_dim_k: int, head_dim_v: int, dtype: str, gate: Gate, tokens: int) -> None:
    """Apply the gated delta rule to one sequence, from and to states with value columns first."""
    shape = KdaShape(
        device=DEVICE,
        dtype=getattr(torch, dtype),
        num_heads=HEADS,
        num_v_heads=HEADS,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        state_layout="VK",
    )
    plan = plan_kda(shape, max_tokens=tokens, max_sequences=1, implementation=implementation)
    parameters = gate != "log"
    kda(
        *_recurrent_tokens(shape, tokens),
        scale=head_dim_k**-0.5,
        batch=plan_kda_batch(torch.tensor([0, tokens], dtype=torch.int32), plan=plan),
        A_log=torch.zeros(HEADS, device=DEVICE) if parameters else None,
        dt_bias=torch.zeros(HEADS, head_dim_k, device=DEVICE) if parameters else None,
        initial_state=torch.zeros(shape.state_size(1), device=DEVICE),
    )


def step_states() -> None:
    """Decode one token of each of eight sequences on a pool of states."""
    shape = KdaShape(
        device=DEVICE,
        dtype=torch.bfloat16,
        num_heads=HEADS,
        num_v_heads=HEADS,
        head_dim_k=128,
        head_dim_v=128,
        lower_bound=-5.0,
    )
    offsets, slots = torch.arange(9, dtype=torch.int32), torch.arange(8, dtype=torch.int32)[:, None]
    kda_step(
        *_recurrent_tokens(shape, 8),
        scale=128**-0.5,
        state_pool=torch.zeros(shape.state_size(8), device=DEVICE),
        plan=plan_kda_step(offsets, slots, shape=shape, num_slots=8, implementation="triton"),
        A_log=torch.zeros(HEADS, device=DEVICE),
        dt_bias=torch.zeros(HEADS, 128, device=DEVICE),
    )


def _recurrent_tokens(shape: KdaShape, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``q, k, v, g, beta``, packed."""
    keys, values = shape.head_dim_k, shape.head_dim_v
    q, k, v, g = (
        torch.zeros(tokens, HEADS, width, dtype=shape.dtype, device=DEVICE) for width in (keys, keys, values, keys)
    )
    return q, k, v, g, torch.zeros(tokens, HEADS, dtype=shape.dtype, device=DEVICE)


def _tokens(width: int, dtype: str, *, aligned: bool) -> Tensor:
    gap = 0 if aligned else 1
    rows = torch.empty(TOKENS, gap + HEADS * width, dtype=getattr(torch, dtype), device=DEVICE)
    return rows[:, gap:].view(TOKENS, HEADS, width)
