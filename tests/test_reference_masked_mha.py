"""The oracle of masked attention against plain loops over sets, dense attention, and the merge of its chunks."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.reference.attention import attention, merge_states
from assay.reference.masked_mha import masked_mha
from assay.reference.sparse_mla import sparse_mla
from assay.reference.topk_mask import topk_mask

INF = float("inf")


def inputs(
    n: tuple[int, ...], m: tuple[int, ...], *, heads: int = 4, kv_heads: int = 2, dq: int = 5, dv: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(sum(n), heads, dq, generator=g, dtype=torch.float64)
    k = torch.randn(sum(m), kv_heads, dq, generator=g, dtype=torch.float64)
    v = torch.randn(sum(m), kv_heads, dv, generator=g, dtype=torch.float64)
    return q, k, v, torch.tensor([0, *itertools.accumulate(n)]), torch.tensor([0, *itertools.accumulate(m)])


def by_loops(q: Tensor, k: Tensor, v: Tensor, seen: list[list[int]], scale: float, group: int) -> tuple[Tensor, Tensor]:
    """Each query over the keys it is said to see, rows of ``k``, in Python floats."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    for i, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        keys = seen[i]
        if not keys:
            continue
        pairs = [zip(q[i, h].tolist(), k[s, h // group].tolist(), strict=True) for s in keys]
        z = [scale * math.fsum(a * b for a, b in pair) for pair in pairs]
        total = math.fsum(math.exp(x) for x in z)
        lse[i, h] = math.log(total)
        for d in range(v.shape[2]):
            terms = (math.exp(x) * v[s, h // group, d].item() for x, s in zip(z, keys, strict=True))
            out[i, h, d] = math.fsum(terms) / total
    return out, lse


def assert_close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_equals_plain_loops_over_sets() -> None:
    n, m, first_query, first_key = (4, 0, 3, 2), (6, 3, 5, 0), (33, 0, 1, 9), (31, 2, 0, 4)
    q, k, v, cu_q, cu_k = inputs(n, m)
    g = torch.Generator().manual_seed(1)
    lists = torch.randint(-2, 40, (sum(n), 30), generator=g)
    mask = topk_mask(lists, cu_seqlens_q=cu_q, key_lens=torch.full((4,), 40))
    got = masked_mha(
        q,
        k,
        v,
        mask,
        softmax_scale=-0.7,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        query_starts=torch.tensor(first_query),
        key_starts=torch.tensor(first_key),
    )
    seen: list[list[int]] = []
    for r in range(4):
        for i in range(n[r]):
            chosen = set(lists[int(cu_q[r]) + i].tolist())
            positions = range(first_key[r], first_key[r] + m[r])
            seen.append([int(cu_k[r]) + p - first_key[r] for p in positions if p in chosen and p <= first_query[r] + i])
    assert {len(keys) for keys in seen} >= {0, 2}
    assert_close(got, by_loops(q, k, v, seen, -0.7, 2))


def test_all_bits_are_dense_causal_attention() -> None:
    q, k, v, cu_q, cu_k = inputs((3, 5, 2), (7, 5, 0))
    options: dict[str, Any] = {"softmax_scale": 0.4, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    got = masked_mha(q, k, v, torch.full((10, 1), -1, dtype=torch.int32), **options)
    assert_close(got, attention(q, k, v, causal=True, **options))
    later = masked_mha(q, k, v, torch.full((10, 1), -1, dtype=torch.int32), query_starts=torch.full((3,), 9), **options)
    assert_close(later, attention(q, k, v, causal=False, **options))


def test_a_selected_key_of_the_future_is_not_seen() -> None:
    q, k, v, cu_q, cu_k = inputs((4,), (4,))
    mask = torch.tensor([[0b1000], [0b1010], [0b1001], [0b1000]], dtype=torch.int32)
    got = masked_mha(q, k, v, mask, softmax_scale=1.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert_close(got, by_loops(q, k, v, [[], [1], [0], [3]], 1.0, 2))
    assert torch.equal(got[0][0], torch.zeros(4, 3, dtype=torch.float64))
    assert (got[1][0] == -INF).all()


def test_one_key_gives_its_value() -> None:
    q, k, v, cu_q, cu_k = inputs((1,), (40,))
    mask = torch.tensor([[-(2**31), 0]], dtype=torch.int32)
    out, lse = masked_mha(q, k, v, mask, softmax_scale=2.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    values = v[31].repeat_interleave(2, 0)
    torch.testing.assert_close(out[0], values, rtol=1e-12, atol=1e-13)
    logits = 2.0 * (q[0] * k[31].repeat_interleave(2, 0)).sum(-1)
    torch.testing.assert_close(lse[0], logits, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cuts", [(0, 33, 70), (0, 1, 32, 64, 69, 70), (0, 0, 70)], ids=str)
def test_chunks_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v, cu_q, cu_k = inputs((6,), (70,))
    g = torch.Generator().manual_seed(2)
    mask = topk_mask(torch.randint(0, 70, (6, 9), generator=g), cu_seqlens_q=cu_q, key_lens=torch.tensor([70]))
    whole = masked_mha(q, k, v, mask, softmax_scale=0.9, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    state = torch.zeros_like(whole[0]), torch.full_like(whole[1], -INF)
    for start, stop in itertools.pairwise(cuts):
        part = masked_mha(
            q,
            k[start:stop],
            v[start:stop],
            mask,
            softmax_scale=0.9,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=torch.tensor([0, stop - start]),
            query_starts=torch.tensor([64]),
            key_starts=torch.tensor([start]),
        )
        state = merge_states(*state, *part)
    assert_close(state, whole)


def test_equals_sparse_attention_to_lists_without_repetition() -> None:
    """One latent row for key and value, one key head: the two operations meet."""
    g = torch.Generator().manual_seed(3)
    q, kv = (torch.randn(size, generator=g, dtype=torch.float64) for size in ((8, 3, 6), (50, 6)))
    lists = torch.stack([torch.randperm(43 + i, generator=g)[:12] for i in range(8)])
    out, lse, _ = sparse_mla(q, kv, lists, softmax_scale=0.5, d_v=4)
    mask = topk_mask(lists, cu_seqlens_q=torch.tensor([0, 8]), key_lens=torch.tensor([50]))
    got = masked_mha(
        q,
        kv[:, None],
        kv[:, None, :4],
        mask,
        softmax_scale=0.5,
        cu_seqlens_q=torch.tensor([0, 8]),
        cu_seqlens_k=torch.tensor([0, 50]),
    )
    assert_close(got, (out, lse))


@pytest.mark.parametrize(
    ("start", "error", "text"),
    [(-1, ValueError, "first_key must not be negative, got -1"), (30, IndexError, "out of bounds")],
)
def test_every_key_has_a_bit(start: int, error: type[Exception], text: str) -> None:
    q, k, v, cu_q, cu_k = inputs((2,), (3,))
    mask = torch.full((2, 1), -1, dtype=torch.int32)
    starts = torch.tensor([start])
    with pytest.raises(error, match=text):
        masked_mha(q, k, v, mask, softmax_scale=1.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, key_starts=starts)
