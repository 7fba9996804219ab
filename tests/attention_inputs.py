"""Packed attention inputs, the oracle on them, and the errors that a declared precision allows."""

import itertools
import math

import torch
from torch import Tensor

from assay.optimized.attention import AttentionPlan, AttentionShape, plan_attention
from assay.reference import attention as oracle

INF = float("inf")
# unit roundoffs of the output format and of the rounded weights (verification.md 5.2)
ROUNDOFF = {torch.float64: 2.0**-52, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

Inputs = tuple[Tensor, Tensor, Tensor]
State = tuple[Tensor, Tensor]


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make_plan(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    inputs: Inputs,
    *,
    causal: bool = False,
    provider: str = "torch",
) -> AttentionPlan:
    q, k, v = inputs
    shape = AttentionShape(
        device=q.device,
        dtype=q.dtype,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
    )
    return plan_attention(offsets(query_lens), offsets(key_lens), causal=causal, shape=shape, provider=provider)


def make_inputs(
    num_queries: int,
    num_keys: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (24, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    sizes = (num_queries, heads[0], dims[0]), (num_keys, heads[1], dims[0]), (num_keys, heads[1], dims[1])
    q, k, v = (torch.randn(size, generator=g).to(dtype).to(device) for size in sizes)
    return q, k, v


def by_oracle(inputs: Inputs, plan: AttentionPlan, scale: float) -> State:
    q, k, v = (tensor.double() for tensor in inputs)
    return oracle.attention(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=plan.causal,
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
    )


def envelope(inputs: Inputs, plan: AttentionPlan, scale: float) -> State:
    """Largest errors of ``out`` and ``lse`` that the declared precision allows, element by element.

    Products are exact and summed in float32, the exponential is good to ``2^-22``, weights and output are rounded to
    the dtype of the inputs, the row sum is not. The bound on the logits is the deterministic one.
    """
    q, k, v = (tensor.double() for tensor in inputs)
    dtype, group = inputs[0].dtype, q.shape[1] // k.shape[1]
    u, u_sum, ex2 = ROUNDOFF[dtype], 2.0**-24, 2.0**-22
    if dtype == torch.float64:
        u_sum, ex2 = 2.0**-53, 2.0**-51
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out_bound, lse_bound = torch.zeros(*q.shape[:2], v.shape[2]).to(q), torch.zeros(q.shape[:2]).to(q)
    starts = zip(itertools.accumulate((0, *plan.query_lens)), itertools.accumulate((0, *plan.key_lens)), strict=True)
    for (q0, k0), n, m in zip(starts, plan.query_lens, plan.key_lens, strict=False):
        if n == 0 or m == 0:
            continue
        last_key = torch.arange(n, device=q.device) + m - n if plan.causal else torch.full((n,), m - 1, device=q.device)
        rows, keys = slice(q0, q0 + n), slice(k0, k0 + m)
        z = oracle.masked_logits(q[rows], k[keys], last_key, softmax_scale=scale)
        lse = torch.logsumexp(z, -1)
        p = torch.exp(z - lse[..., None]).nan_to_num(0.0)
        out = torch.einsum("ths,shd->thd", p, v[keys])
        # a token at a time: the distances of all at once would fill gigabytes
        per_head = v[keys].transpose(0, 1)
        distances = (torch.einsum("hs,hsd->hd", p[t], (per_head - out[t][:, None]).abs()) for t in range(n))
        spread = torch.stack(list(distances))
        mass = torch.einsum("ths,shd->thd", p, v[keys].abs())
        lengths = torch.einsum("thd,shd->ths", q[rows].abs(), k[keys].abs()).masked_fill(z == -INF, 0.0)
        longest = abs(scale) * lengths.amax(-1)
        height = z.masked_fill(z == -INF, 0.0).abs().amax(-1)
        logit = q.shape[2] * u_sum * longest + 4 * u_sum * height
        sums = 4 * math.sqrt(m) * u_sum
        tiny = m * 2.0**-25 * v.abs().max() if dtype == torch.float16 else 0.0
        out_bound[rows] = u * out.abs() + (u + ex2 + sums) * mass + 2 * torch.expm1(logit)[..., None] * spread + tiny
        lse_bound[rows] = logit + sums + 2 * u_sum * lse.abs().nan_to_num(0.0, posinf=0.0) + ex2
    return out_bound + torch.finfo(dtype).tiny, lse_bound


def check(state: State, inputs: Inputs, plan: AttentionPlan, scale: float) -> None:
    """Shapes, dtypes, empty rows exactly ``(0, -inf)``, everything else finite and within the envelope."""
    out, lse = state
    expected, expected_lse = by_oracle(inputs, plan, scale)
    assert out.shape == expected.shape
    assert out.dtype == inputs[0].dtype
    assert lse.shape == expected_lse.shape
    assert lse.dtype == (torch.float64 if inputs[0].dtype == torch.float64 else torch.float32)
    empty = expected_lse == -INF
    assert torch.equal(lse == -INF, empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[~empty]).all()
    out_bound, lse_bound = envelope(inputs, plan, scale)
    excess = (out.double() - expected).abs() / out_bound
    assert (excess <= 1.0).all(), f"out: {excess.max():.2f} of the bound at {excess.argmax()}"
    error = torch.where(empty, 0.0, (lse.double() - expected_lse).abs())
    assert (error <= lse_bound).all(), f"lse: {(error / lse_bound).max():.2f} of the bound"
