"""Sparse MLA inputs with every kind of list, the oracle on some queries of them, and the errors allowed."""

import math
from typing import Any

import torch
from torch import Tensor

from assay.optimized.sparse_mla import SparseMlaPlan, SparseMlaShape, plan_sparse_mla
from assay.optimized.sparse_mla import sparse_mla as twin
from assay.reference.sparse_mla import selected_logits, selected_rows, sparse_mla

INF = math.inf
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
INT32 = torch.iinfo(torch.int32)


def sparse_inputs(
    *,
    h_q: int = 8,
    d_qk: int = 40,
    d_v: int = 32,
    s_q: int = 23,
    s_kv: int = 97,
    topk: int = 50,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    lengths: bool = True,
    sinks: bool = True,
) -> dict[str, Any]:
    """At least 12 queries: empty lists, short ones, padding in front and everywhere, repeated rows, huge tails.

    Rows that no query lists are NaN, the first and the last among them. The queries are the first heads of a buffer
    with more.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    indices = torch.randint(1, s_kv - 1, (s_q, topk), device=device, generator=generator, dtype=torch.int32)
    length = torch.randint(0, topk + 1, (s_q,), device=device, generator=generator, dtype=torch.int32)
    length[:5] = torch.tensor([topk, 0, 1, min(topk, 77), min(topk, 129)])
    # the first tile of any size up to 128 holds nothing, and something is left behind it if the list is long enough
    indices[0, : min(128, topk - 3)] = -1
    indices[2, 0] = 5
    indices[5] = 7
    length[5] = min(topk, 300)
    indices[6, ::3] = INT32.min
    indices[7, ::2] = s_kv
    indices[8] = -1
    length[8:12] = topk
    indices[9, 20:] = -1
    indices[10] = torch.arange(topk, device=device) % 7 + 1
    indices[11, 1::2] = INT32.max
    # some rows are listed by nobody
    kv = torch.randn(s_kv, d_qk, device=device, generator=generator).to(dtype)
    indices[(indices % 11 == 3) & (indices > 0)] = 2
    if lengths:
        beyond = torch.arange(topk, device=device) >= length[:, None]
        indices[beyond] = INT32.max
        # also rows that exist, and are NaN, lie past the length
        indices[:, -1] = torch.where(beyond[:, -1], 0, indices[:, -1])
    used = torch.zeros(s_kv, dtype=torch.bool, device=device)
    _, valid = selected_rows(kv, indices, length if lengths else None)
    used[indices[valid].long()] = True
    assert not used[0]
    assert not used[-1]
    kv[~used] = torch.nan
    sink = torch.randn(h_q, device=device, generator=generator) * 3
    sink[1:2], sink[3:4] = INF, -INF
    buffer = torch.randn(s_q, h_q + 3, d_qk, device=device, generator=generator).to(dtype)
    return {
        "q": buffer[:, :h_q],
        "kv": kv,
        "indices": indices,
        "softmax_scale": 1.7 * d_qk**-0.5,
        "d_v": d_v,
        "topk_length": length if lengths else None,
        "attn_sink": sink.to(torch.promote_types(dtype, torch.float32)) if sinks else None,
    }


def planned(given: dict[str, Any], implementation: str = "torch", **options: Any) -> SparseMlaPlan:
    """A plan for these inputs."""
    (s_q, h_q, d_qk), topk = given["q"].shape, given["indices"].shape[1]
    shape = SparseMlaShape(
        device=given["q"].device,
        dtype=given["q"].dtype,
        s_q=s_q,
        s_kv=len(given["kv"]),
        h_q=h_q,
        d_qk=d_qk,
        d_v=given["d_v"],
        topk=topk,
    )
    return plan_sparse_mla(shape, topk_length=given["topk_length"], implementation=implementation, **options)


def answered(given: dict[str, Any], plan: SparseMlaPlan, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What the planned implementation says."""
    return twin(
        given["q"],
        given["kv"],
        given["indices"],
        softmax_scale=given["softmax_scale"],
        plan=plan,
        attn_sink=given["attn_sink"],
        out=out,
    )


def of_queries(given: dict[str, Any], queries: Tensor) -> dict[str, Any]:
    """The same question about some queries, in float64."""
    length, sink = given["topk_length"], given["attn_sink"]
    return given | {
        "q": given["q"][queries].double(),
        "kv": given["kv"].double(),
        "indices": given["indices"][queries],
        "topk_length": None if length is None else length[queries],
        "attn_sink": None if sink is None else sink.double(),
    }


def bounds(given: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Largest error of each element of ``(out, lse, max_logits)`` that the declared precision allows.

    ``given`` is in float64, ``dtype`` what the kernel saw. By the rules of ``docs/method.md``, with the deterministic
    bound of a sum: a logit is a float32 sum of ``d_qk`` products, scaled; a wrong logit moves the output by the spread
    of the values, a rounded weight and the float32 sum over the list by their magnitude.
    """
    u, u_sum = ROUNDOFF[dtype], 2.0**-53 if dtype == torch.float64 else 2.0**-24
    rows, valid = selected_rows(given["kv"], given["indices"], given["topk_length"])
    scale, topk, d_qk = abs(given["softmax_scale"]), rows.shape[1], rows.shape[2]
    z = selected_logits(given["q"], rows, valid, softmax_scale=given["softmax_scale"])
    products = scale * torch.einsum("shd,sjd->shj", given["q"].abs(), rows.abs()).masked_fill(~valid[:, None], 0.0)
    lse = torch.logsumexp(z, -1)
    height = z.masked_fill(z == -INF, 0.0).abs().amax(-1) + lse.masked_fill(lse == -INF, 0.0).abs()
    # the products of a logit are summed, then scaled to base 2; the exponential takes the difference to the maximum
    eta = (d_qk + 4) * u_sum * products.amax(-1) + 16 * u_sum * height
    sums = (topk + 32) * u_sum + 2.0**-20
    p = torch.exp(z - lse[..., None]).nan_to_num(0.0)
    values = rows[..., : given["d_v"]]
    o = torch.einsum("shj,sjd->shd", p, values)
    magnitude = torch.einsum("shj,sjd->shd", p, values.abs())
    # sum p |v - o| is at most both of these
    spread = torch.minimum(
        2 * magnitude, torch.sqrt((torch.einsum("shj,sjd->shd", p, values**2) - o**2).clamp(min=0.0)) * (1 + 1e-6)
    )
    share = torch.ones_like(lse)
    of_sink = torch.zeros_like(lse)
    if given["attn_sink"] is not None:
        difference = (lse - given["attn_sink"]).masked_fill(lse == -INF, 0.0)
        share = torch.sigmoid(difference)
        finite = torch.where(given["attn_sink"].isfinite(), given["attn_sink"], 0.0).abs()
        # the share moves by at most itself times the error of the difference
        of_sink = torch.expm1(eta + sums + 8 * u_sum * (height + finite))
    relative = torch.expm1(2 * eta)[..., None]
    error = (u + sums) * magnitude + relative * spread + (of_sink[..., None] + 8 * u_sum) * magnitude
    out = share[..., None] * (error + u * (o.abs() + error))
    # float16 weights below 2^-24 of the largest vanish, and so do the smallest answers
    tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    largest = values.abs().amax((1, 2))[:, None, None]
    out = out + tiny * (1 + topk * largest * share[..., None])
    return out, eta + sums, eta + 4 * u_sum * height + 2.0**-126


def check(results: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], queries: Tensor | None = None) -> None:
    """Empty rows exactly ``(0, -inf, -inf)``, everything else finite and within its bound, for some queries or all."""
    dtype = given["q"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert [result.dtype for result in results] == [dtype, wide, wide]
    assert [tuple(result.shape) for result in results] == [(*given["q"].shape[:2], n) for n in (given["d_v"],)] + [
        tuple(given["q"].shape[:2])
    ] * 2
    if queries is None:
        queries = torch.arange(len(given["q"]), device=given["q"].device)
    for block in queries.split(max(1, (1 << 26) // (given["indices"].shape[1] * given["q"].shape[2]))):
        asked = of_queries(given, block)
        expected = sparse_mla(**asked)
        empty = expected[1] == -INF
        for name, ours, truth, bound in zip(
            ("out", "lse", "max_logits"), results, expected, bounds(asked, dtype), strict=True
        ):
            got = ours[block].double()
            assert torch.equal(got[empty], truth[empty]), f"{name} of a query without keys"
            error = torch.where(truth == got, 0.0, (got - truth).abs())
            assert torch.isfinite(error).all(), f"{name} is not finite"
            excess = (error / bound)[~empty]
            if excess.numel():
                assert excess.max() <= 1.0, f"{name}: {excess.max():.3g} of the bound"


def sampled(s_q: int, count: int = 48, device: str = "cuda") -> Tensor:
    """The first queries, which have the special lists, the last, and some between."""
    between = torch.linspace(0, s_q - 1, count, device=device).round().long()
    chosen: Tensor = torch.cat([torch.arange(min(14, s_q), device=device), between]).unique()
    return chosen


def neighbouring_indices(
    s_q: int, s_kv: int, topk: int, *, live: int, shared: float | None, device: str, seed: int = 0
) -> Tensor:
    """Lists of ``live`` different rows in any order, then padding; one for each query.

    Each entry has a stretch of the cache to itself, and goes over to the next query as it is with probability
    ``shared``; None for lists that have nothing to do with each other.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    stretch = s_kv // live
    rows = torch.randint(stretch, (s_q, live), device=device, generator=generator)
    if shared is not None:
        changes = torch.rand(s_q, live, device=device, generator=generator) >= shared
        rows = rows.gather(0, changes.long().cumsum(0) - changes[:1].long())
    rows += torch.arange(live, device=device) * stretch
    rows = rows[:, torch.randperm(live, device=device, generator=generator)]
    indices = torch.full((s_q, topk), -1, dtype=torch.int32, device=device)
    indices[:, :live] = rows
    return indices
