"""The attention oracle against plain loops, closed forms and its own definition split in parts."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.reference.attention import attention, masked_logits, merge_states, softmax_with_lse

INF = float("inf")


def packed(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dq: int = 5,
    dv: int = 3,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random float64 inputs and offsets of a packed batch."""
    g = torch.Generator().manual_seed(seed)
    cu_q = torch.tensor([0, *itertools.accumulate(query_lens)])
    cu_k = torch.tensor([0, *itertools.accumulate(key_lens)])
    q = torch.randn(sum(query_lens), heads, dq, generator=g, dtype=torch.float64)
    k = torch.randn(sum(key_lens), kv_heads, dq, generator=g, dtype=torch.float64)
    v = torch.randn(sum(key_lens), kv_heads, dv, generator=g, dtype=torch.float64)
    return q, k, v, cu_q, cu_k


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention one number at a time, in Python floats."""
    group = q.shape[1] // k.shape[1]
    out, lse = (
        torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64),
        torch.full(q.shape[:2], -INF).double(),
    )
    for request in range(len(cu_q) - 1):
        q0, q1, k0, k1 = int(cu_q[request]), int(cu_q[request + 1]), int(cu_k[request]), int(cu_k[request + 1])
        for i, h in itertools.product(range(q1 - q0), range(q.shape[1])):
            visible = [j for j in range(k1 - k0) if not causal or j <= i + (k1 - k0) - (q1 - q0)]
            if not visible:
                continue
            pairs = [zip(q[q0 + i, h].tolist(), k[k0 + j, h // group].tolist(), strict=True) for j in visible]
            z = [scale * math.fsum(a * b for a, b in pair) for pair in pairs]
            total = math.fsum(math.exp(x) for x in z)
            lse[q0 + i, h] = math.log(total)
            for d in range(v.shape[2]):
                terms = (math.exp(x) * v[k0 + j, h // group, d].item() for x, j in zip(z, visible, strict=True))
                out[q0 + i, h, d] = math.fsum(terms) / total
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_equals_plain_loops(heads: tuple[int, int], causal: bool) -> None:
    q, k, v, cu_q, cu_k = packed((3, 0, 4, 1, 2), (5, 2, 2, 0, 2), heads=heads[0], kv_heads=heads[1])
    got = attention(q, k, v, softmax_scale=-0.7, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    expected = by_loops(q, k, v, cu_q, cu_k, scale=-0.7, causal=causal)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_causal_mask_is_aligned_to_the_last_key() -> None:
    logits = masked_logits(torch.ones(2, 1, 1), torch.ones(5, 1, 1), torch.arange(2) + 5 - 2, softmax_scale=1.0)
    assert (logits[:, 0] == -INF).tolist() == [[False] * 4 + [True], [False] * 5]


def test_queries_before_the_first_key_are_empty() -> None:
    q, k, v, cu_q, cu_k = packed((5,), (2,))
    out, lse = attention(q, k, v, softmax_scale=1.0, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert (lse == -INF).tolist() == [[True] * 4] * 3 + [[False] * 4] * 2


def test_a_request_without_keys_is_empty() -> None:
    q, k, v, cu_q, cu_k = packed((2, 1), (0, 3))
    out, lse = attention(q, k, v, softmax_scale=1.0, causal=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.isneginf(lse[:2]).all()
    assert torch.isfinite(lse[2]).all()


def test_zero_queries_give_the_mean() -> None:
    q, k, v, cu_q, cu_k = packed((3,), (8,), heads=2, kv_heads=2)
    out, lse = attention(
        torch.zeros_like(q), k, v, softmax_scale=9.0, causal=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    torch.testing.assert_close(out, v.mean(0).expand_as(out), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)), rtol=1e-15, atol=0)


def test_a_dominant_key_gives_its_value() -> None:
    keys = torch.eye(6, dtype=torch.float64)[:, None]
    v = torch.arange(6, dtype=torch.float64)[:, None, None]
    logits = masked_logits(keys, keys, torch.full((6,), 5), softmax_scale=2000.0)
    out, lse = softmax_with_lse(logits, v)
    assert torch.equal(out, v)
    assert torch.equal(lse, torch.full_like(lse, 2000.0))


@pytest.mark.parametrize("shift", [-6e4, 6e4])
def test_a_common_shift_of_the_logits_changes_only_the_lse(shift: float) -> None:
    q, k, v, cu_q, cu_k = packed((3,), (7,), heads=2, kv_heads=2)
    offsets: dict[str, Any] = {"softmax_scale": 1.0, "causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = attention(q, k, v, **offsets)
    one = torch.ones(1, 2, 1, dtype=torch.float64)
    wide_q, wide_k = torch.cat([q, one.expand(3, -1, -1)], -1), torch.cat([k, shift * one.expand(7, -1, -1)], -1)
    shifted, shifted_lse = attention(wide_q, wide_k, v, **offsets)
    torch.testing.assert_close(shifted, out, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(shifted_lse, lse + shift, rtol=1e-12, atol=0)


def test_one_request_never_sees_another() -> None:
    q, k, v, cu_q, cu_k = packed((2, 3), (4, 5))
    whole, _ = attention(q, k, v, softmax_scale=1.0, causal=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    k[4:] = v[4:] = float("nan")
    changed, _ = attention(q, k, v, softmax_scale=1.0, causal=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(changed[:2], whole[:2])
    assert changed[2:].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal: bool) -> None:
    q, k, v, cu_q, cu_k = packed((2, 1), (3, 2), heads=2, kv_heads=1, dq=3, dv=2)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*tensors, softmax_scale=0.8, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("cuts", [(0, 7), (0, 1, 7), (0, 3, 3, 5, 7), (0, 0, 7)], ids=str)
def test_merged_parts_equal_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v, cu_q, cu_k = packed((4,), (7,))
    whole = attention(q, k, v, softmax_scale=0.6, causal=False, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    state = torch.zeros(4, 4, 3, dtype=torch.float64), torch.full((4, 4), -INF, dtype=torch.float64)
    for start, stop in itertools.pairwise(cuts):
        offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": torch.tensor([0, stop - start])}
        part = attention(q, k[start:stop], v[start:stop], softmax_scale=0.6, causal=False, **offsets)
        state = merge_states(*state, *part)
    for mine, theirs in zip(state, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


def test_merge_ignores_what_an_empty_side_holds() -> None:
    out, lse = torch.randn(2, 1, 3), torch.tensor([[0.5], [-INF]])
    garbage, empty = torch.full((2, 1, 3), float("nan")), torch.full((2, 1), -INF)
    for merged, merged_lse in (merge_states(out, lse, garbage, empty), merge_states(garbage, empty, out, lse)):
        assert torch.equal(merged[0], out[0])
        assert torch.equal(merged[1], torch.zeros(1, 3))
        assert torch.equal(merged_lse, lse)


def test_merge_weighs_by_mass() -> None:
    one, three = torch.ones(1, 1, 1), 3 * torch.ones(1, 1, 1)
    out, lse = merge_states(one, torch.log(torch.tensor([[1.0]])), three, torch.log(torch.tensor([[3.0]])))
    torch.testing.assert_close(out, torch.full_like(out, 2.5))
    torch.testing.assert_close(lse, torch.log(torch.tensor([[4.0]])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computes_in_the_dtype_of_its_inputs(dtype: torch.dtype) -> None:
    q, k, v, cu_q, cu_k = packed((2,), (3,))
    out, lse = attention(
        q.to(dtype), k.to(dtype), v.to(dtype), softmax_scale=1.0, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )
    assert out.dtype == lse.dtype == dtype
