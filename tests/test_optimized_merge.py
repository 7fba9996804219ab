"""The merge of partial attention states: out of place, in place in torch, in place in Triton."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.optimized.attention import MergeImplementation, merge_into, merge_states
from assay.reference import attention as oracle

INF = float("inf")
State = tuple[Tensor, Tensor]
IMPLEMENTATIONS: tuple[MergeImplementation, ...] = ("torch", "triton")


def merge_by(implementation: MergeImplementation) -> Callable[..., State]:
    """The in-place merge as a function of two states."""

    def merged(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> State:
        out, lse = out.clone(), lse.clone()
        merge_into(out, lse, part_out, part_lse, implementation=implementation)
        return out, lse

    return merged


MERGES = [merge_states, merge_by("torch"), merge_by("triton")]
every_merge = pytest.mark.parametrize("merge", MERGES, ids=["states", "into-torch", "into-triton"])
in_place = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def state(tokens: int, heads: int, width: int, *, seed: int) -> State:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, width, generator=g), 4 * torch.randn(tokens, heads, generator=g)


@every_merge
@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 3, 8), (5, 2, 96), (3, 1, 513)], ids=str)
def test_equals_the_oracle(merge: Callable[..., State], sizes: tuple[int, int, int]) -> None:
    a, b = state(*sizes, seed=1), state(*sizes, seed=2)
    out, lse = merge(*a, *b)
    expected, expected_lse = oracle.merge_states(*(tensor.double() for tensor in (*a, *b)))
    # weights from two exponentials, three roundings of products and sums, one of the division
    bound = 16 * 2.0**-24 * torch.maximum(a[0].abs(), b[0].abs())
    assert ((out.double() - expected).abs() <= bound).all()
    assert ((lse.double() - expected_lse).abs() <= 4 * 2.0**-24 * (1 + expected_lse.abs())).all()


@every_merge
def test_an_empty_side_takes_no_part_whatever_it_holds(merge: Callable[..., State]) -> None:
    out, lse = state(6, 2, 8, seed=0)
    lse[4:] = -INF
    out[4:] = float("nan")
    empty = torch.full_like(lse, -INF)
    for garbage in (float("nan"), INF, 1e38):
        junk = torch.full_like(out, garbage)
        for merged, merged_lse in (merge(out, lse, junk, empty), merge(junk, empty, out, lse)):
            assert torch.equal(merged[:4], out[:4])
            assert torch.equal(merged[4:], torch.zeros_like(out[4:]))
            assert torch.equal(merged_lse, lse)


@every_merge
def test_visible_nan_stays_visible(merge: Callable[..., State]) -> None:
    out, lse = state(3, 1, 4, seed=0)
    bad_out, bad_lse = out.clone(), lse.clone()
    bad_out[0], bad_lse[1] = float("nan"), float("nan")
    merged, merged_lse = merge(out, lse, bad_out, bad_lse)
    assert merged.isnan().all(-1)[:, 0].tolist() == [True, True, False]
    assert merged_lse.isnan()[:, 0].tolist() == [False, True, False]


@every_merge
def test_far_apart_and_large_lse(merge: Callable[..., State]) -> None:
    a, b = torch.full((3, 1, 2), 1.0), torch.full((3, 1, 2), -1.0)
    lse_a, lse_b = torch.tensor([[6e4], [-6e4], [300.0]]), torch.tensor([[6e4], [-7e4], [-300.0]])
    out, lse = merge(a, lse_a, b, lse_b)
    assert out[:, 0, 0].tolist() == [0.0, 1.0, 1.0]
    assert torch.equal(lse, torch.logaddexp(lse_a, lse_b))


@every_merge
def test_a_chain_of_chunks_in_any_order_equals_the_whole(merge: Callable[..., State]) -> None:
    g = torch.Generator().manual_seed(0)
    logits, v = 3 * torch.randn(5, 2, 40, generator=g, dtype=torch.float64), torch.randn(40, 2, 6, generator=g).double()
    whole, whole_lse = oracle.softmax_with_lse(logits, v)
    cuts = [0, 1, 9, 9, 20, 37, 40]
    chunks = [oracle.softmax_with_lse(logits[..., a:b], v[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    chunks.append((torch.full_like(whole, float("nan")), torch.full_like(whole_lse, -INF)))
    for order in itertools.islice(itertools.permutations(chunks), 0, 720, 240):
        out, lse = torch.zeros(5, 2, 6), torch.full((5, 2), -INF)
        for part, part_lse in order:
            out, lse = merge(out, lse, part.float(), part_lse.float())
        assert (out - whole).abs().max() < 40 * 2.0**-24 * v.abs().max()
        assert (lse - whole_lse).abs().max() < 40 * 2.0**-24 * (1 + whole_lse.abs().max())


# the interpreter does not multiply bfloat16, and is refused it
PART_DTYPES = [("torch", torch.bfloat16), *itertools.product(IMPLEMENTATIONS, (torch.float32, torch.float16))]


@pytest.mark.parametrize(("implementation", "part_dtype"), PART_DTYPES)
def test_every_operand_may_be_strided(implementation: MergeImplementation, part_dtype: torch.dtype) -> None:
    (a, lse_a), (b, lse_b) = state(7, 3, 10, seed=3), state(7, 3, 10, seed=4)
    b = b.to(part_dtype)
    expected, expected_lse = merge_states(a, lse_a, b, lse_b)
    around = torch.full((9, 5, 30), 7.0)
    out = around[1:8, 1:4, 5:25:2]
    lse_around = torch.full((4, 8), 7.0)
    lse = lse_around.t()[:7, :3]
    part = torch.full((3, 7, 20), float("nan"), dtype=part_dtype).transpose(0, 1)[:, :, ::2]
    part_lse = torch.full((7, 3, 2), float("nan"))[:, :, 1]
    for view, value in ((out, a), (lse, lse_a), (part, b), (part_lse, lse_b)):
        view.copy_(value)
    merge_into(out, lse, part, part_lse, implementation=implementation)
    assert torch.allclose(out, expected, rtol=0, atol=2.0**-21)
    assert torch.allclose(lse, expected_lse, rtol=0, atol=2.0**-21)
    # nothing beside the views is written
    out.fill_(7.0)
    lse.fill_(7.0)
    assert torch.equal(around, torch.full_like(around, 7.0))
    assert torch.equal(lse_around, torch.full_like(lse_around, 7.0))


@in_place
def test_no_rows_are_legal(implementation: MergeImplementation) -> None:
    out, lse = torch.zeros(0, 2, 4), torch.zeros(0, 2)
    merge_into(out, lse, out.clone(), lse.clone(), implementation=implementation)


def test_the_result_is_rounded_once() -> None:
    """Both sides equal: any weights give the value back, which a second rounding to 16 bits would move."""
    value = (1 + torch.arange(1, 100) / 128).bfloat16()[:, None, None]
    lse = torch.randn(99, 1, generator=torch.Generator().manual_seed(0))
    out, _ = merge_states(value, lse, value, lse + 0.7)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, value)


def test_merging_many_parts_does_not_drift() -> None:
    """Near-equal parts in bfloat16: the error stays that of one rounding of each part, however many there are."""
    g = torch.Generator().manual_seed(0)
    parts = (1 + torch.rand(64, 4, 1, 8, generator=g) / 8).bfloat16()
    out, lse = torch.zeros(4, 1, 8), torch.full((4, 1), -INF)
    for part in parts:
        merge_into(out, lse, part, torch.zeros(4, 1))
    assert torch.allclose(out, parts.float().mean(0), rtol=64 * 2.0**-24, atol=0)


def test_refusals() -> None:
    out, lse = state(3, 2, 4, seed=0)
    with pytest.raises(ValueError, match=r"the second out must have shape \(3, 2, 4\), got \(3, 2, 5\)"):
        merge_states(out, lse, torch.zeros(3, 2, 5), lse)
    with pytest.raises(ValueError, match=r"the second lse must have shape \(3, 2\), got \(2, 3\)"):
        merge_into(out, lse, out.clone(), lse.t())
    with pytest.raises(TypeError, match=r"out must be torch.float32, got torch.float16"):
        merge_into(out.half(), lse, out.clone(), lse.clone())
    with pytest.raises(TypeError, match="the second out must be floating"):
        merge_states(out, lse, out.int(), lse)
    with pytest.raises(ValueError, match="the first lse must be on cpu, got meta"):
        merge_states(out, lse.to("meta"), out, lse)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        merge_into(out[:1].expand(3, -1, -1), lse, out.clone(), lse.clone())
    with pytest.raises(ValueError, match="implementation must be 'torch' or 'triton', got 'cuda'"):
        merge_into(out, lse, out.clone(), lse.clone(), implementation="cuda")  # type: ignore[arg-type]
