"""Masked attention inputs, the oracle on them, and the errors that the declared precision allows."""

import itertools
import math
from typing import Any

import torch
from attention_inputs import ROUNDOFF, make_inputs
from mask_inputs import offsets, selection
from torch import Tensor

from assay.optimized import _masked_mha_triton as host
from assay.optimized.attention import AttentionShape
from assay.optimized.masked_mha import MaskedMhaPlan, masked_mha, plan_masked_mha
from assay.optimized.topk_mask import plan_topk_mask, topk_mask
from assay.reference import masked_mha as oracle
from assay.reference.attention import masked_logits
from assay.reference.topk_mask import selected_keys

INF = math.inf

State = tuple[Tensor, Tensor]


def masked_inputs(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    *,
    first_keys: tuple[int, ...] | None = None,
    first_queries: tuple[int, ...] | None = None,
    topk: int = 40,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (24, 16),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Queries, keys and values of a packed batch, and a mask over all positions up to the last key."""
    q, k, v = make_inputs(sum(query_lens), sum(key_lens), heads=heads, dims=dims, dtype=dtype, seed=seed, device=device)
    starts = first_keys or (0,) * len(key_lens)
    contexts = tuple(start + m for start, m in zip(starts, key_lens, strict=True))
    indices = selection(query_lens, contexts, topk, seed=seed, device=device)
    plan = plan_topk_mask(offsets(query_lens), torch.tensor(contexts), topk=topk, device=q.device)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "indices": indices, "mask": topk_mask(indices, plan=plan)[0]}
    placed: dict[str, Any] = {"query_starts": first_queries, "key_starts": first_keys}
    return given | {
        "cu_seqlens_q": offsets(query_lens),
        "cu_seqlens_k": offsets(key_lens),
        **{name: None if value is None else torch.tensor(value) for name, value in placed.items()},
        "softmax_scale": 1.3 * dims[0] ** -0.5,
    }


def shape_of(given: dict[str, Any]) -> AttentionShape:
    q, k, v = given["q"], given["k"], given["v"]
    return AttentionShape(
        device=q.device,
        dtype=q.dtype,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
    )


def planned(given: dict[str, Any], implementation: str = "torch") -> MaskedMhaPlan:
    return plan_masked_mha(
        given["cu_seqlens_q"],
        given["cu_seqlens_k"],
        shape=shape_of(given),
        query_starts=given["query_starts"],
        key_starts=given["key_starts"],
        implementation=implementation,
    )


def map_of(given: dict[str, Any], plan: MaskedMhaPlan, implementation: str = "torch") -> Tensor | None:
    """The map of the mask in tiles of the plan."""
    indices, starts = given["indices"], plan.key_starts
    contexts = torch.tensor([start + m for start, m in zip(starts, plan.key_lens, strict=True)])
    mask_plan = plan_topk_mask(
        given["cu_seqlens_q"],
        contexts,
        topk=indices.shape[1],
        device=indices.device,
        tile=plan.tile,
        implementation=implementation,
    )
    return topk_mask(indices, plan=mask_plan)[1]


def answered(given: dict[str, Any], plan: MaskedMhaPlan, tile_map: Tensor | None = None) -> State:
    """What the planned implementation says."""
    tensors = (given[name] for name in ("q", "k", "v", "mask"))
    return masked_mha(*tensors, softmax_scale=given["softmax_scale"], plan=plan, tile_map=tile_map)


def launched(given: dict[str, Any], plan: MaskedMhaPlan, held: Tensor | None, *, descriptors: bool) -> State:
    """What the Triton kernel says, its tiles loaded by descriptors or by pointers."""
    q, k, v, mask = (given[name] for name in ("q", "k", "v", "mask"))
    tile = host.choose_tile(plan.shape)
    assert tile is not None
    return host.launch(q, k, v, mask, held, given["softmax_scale"], plan, tile=tile, descriptors=descriptors)


def by_oracle(given: dict[str, Any]) -> State:
    """The oracle in float64 on the stored inputs."""
    wide = {name: given[name].double() for name in ("q", "k", "v")}
    rest = {name: value for name, value in given.items() if name not in ("indices", *wide)}
    return oracle.masked_mha(**wide, **rest)


def envelope(given: dict[str, Any], plan: MaskedMhaPlan) -> State:
    """Largest errors of ``out`` and ``lse`` that the declared precision allows, element by element.

    As for ``attention``: products are summed in float32, the exponential is good to ``2^-22``, weights and output are
    rounded to the dtype of the inputs, the row sum is not.
    """
    q, k, v = (given[name].double() for name in ("q", "k", "v"))
    dtype, group, scale = given["q"].dtype, q.shape[1] // k.shape[1], given["softmax_scale"]
    u, u_sum, ex2 = ROUNDOFF[dtype], 2.0**-24, 2.0**-22
    if dtype == torch.float64:
        u_sum, ex2 = 2.0**-53, 2.0**-51
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out_bound, lse_bound = torch.zeros(*q.shape[:2], v.shape[2]).to(q), torch.zeros(q.shape[:2]).to(q)
    rows = itertools.accumulate((0, *plan.query_lens))
    columns = itertools.accumulate((0, *plan.key_lens))
    for row, column, n, m, query, key in zip(
        rows, columns, plan.query_lens, plan.key_lens, plan.query_starts, plan.key_starts, strict=False
    ):
        if n == 0 or m == 0:
            continue
        part, keys = slice(row, row + n), slice(column, column + m)
        last_key = torch.arange(n, device=q.device) + query - key
        hidden = ~selected_keys(given["mask"][part], m, key)[:, None]
        z = masked_logits(q[part], k[keys], last_key, softmax_scale=scale).masked_fill(hidden, -INF)
        lse = torch.logsumexp(z, -1)
        p = torch.exp(z - lse[..., None]).nan_to_num(0.0)
        out = torch.einsum("ths,shd->thd", p, v[keys])
        mass = torch.einsum("ths,shd->thd", p, v[keys].abs())
        second = torch.einsum("ths,shd->thd", p, v[keys] ** 2)
        # the mean distance from the mean is at most the standard deviation
        spread = (second - out**2).clamp(min=0.0).sqrt() * (1 + 1e-6)
        lengths = torch.einsum("thd,shd->ths", q[part].abs(), k[keys].abs()).masked_fill(z == -INF, 0.0)
        height = z.masked_fill(z == -INF, 0.0).abs().amax(-1)
        logit = q.shape[2] * u_sum * abs(scale) * lengths.amax(-1) + 4 * u_sum * height
        sums = 4 * math.sqrt(m) * u_sum
        tiny = m * 2.0**-25 * v.abs().max() if dtype == torch.float16 else 0.0
        out_bound[part] = u * out.abs() + (u + ex2 + sums) * mass + 2 * torch.expm1(logit)[..., None] * spread + tiny
        lse_bound[part] = logit + sums + 2 * u_sum * lse.abs().nan_to_num(0.0, posinf=0.0) + ex2
    return out_bound + torch.finfo(dtype).tiny, lse_bound


def check(state: State, given: dict[str, Any], plan: MaskedMhaPlan) -> None:
    """Shapes, dtypes, empty rows exactly ``(0, -inf)``, everything else finite and within the envelope."""
    out, lse = state
    expected, expected_lse = by_oracle(given)
    dtype = given["q"].dtype
    assert (out.shape, out.dtype) == (expected.shape, dtype)
    assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.promote_types(dtype, torch.float32))
    empty = expected_lse == -INF
    assert torch.equal(lse == -INF, empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[~empty]).all()
    out_bound, lse_bound = envelope(given, plan)
    excess = (out.double() - expected).abs() / out_bound
    assert (excess <= 1.0).all(), f"out: {excess.max():.2f} of the bound at {excess.argmax()}"
    error = torch.where(empty, 0.0, (lse.double() - expected_lse).abs())
    assert (error <= lse_bound).all(), f"lse: {(error / lse_bound).max():.2f} of the bound"
