"""Writes outside a buffer are found at both of its ends, and memory that was never written does not look right."""

import math
from typing import Any

import pytest
import torch
from builders import CPU, attention_case, honest_attention, judged, mla_case, operation_of
from torch import Tensor

from assay.harness.poison import GUARD_ELEMENTS, SENTINEL, Allocations, Ledger, left_as, poisoned_allocations, same_bits

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def poke(tensor: Tensor, offset: int) -> None:
    """Change one element, ``offset`` elements past the first of ``tensor``."""
    base = tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)
    base.copy_(torch.logical_not(base) if tensor.dtype == torch.bool else torch.full_like(base, 3))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("offset", [-GUARD_ELEMENTS, -1, 0, 5, 6, 5 + GUARD_ELEMENTS])
def test_a_write_into_or_around_an_input_is_found(dtype: torch.dtype, offset: int) -> None:
    ledger = Ledger()
    tensor = ledger.guarded("mine", torch.arange(6).view(2, 3).to(dtype), CPU)
    other = ledger.guarded("other", torch.zeros(4, dtype=dtype), CPU)
    assert torch.equal(tensor, torch.arange(6).view(2, 3).to(dtype))
    assert tensor.is_contiguous()
    assert ledger.written() == []
    poke(tensor, offset)
    assert ledger.written() == ["mine"]
    assert ledger.written(allowed=("mine",)) == []
    ledger.restore()
    assert ledger.written() == []
    assert torch.equal(tensor, torch.arange(6).view(2, 3).to(dtype))
    assert float(other.sum()) == 0


def test_the_guards_of_an_input_are_nan_or_minus_one() -> None:
    ledger = Ledger()
    ledger.guarded("floats", torch.zeros(3), CPU)
    ledger.guarded("integers", torch.zeros(3, dtype=torch.int32), CPU)
    floats, integers = ledger.buffers["floats"], ledger.buffers["integers"]
    assert int(floats.isnan().sum()) == 2 * GUARD_ELEMENTS
    assert int((integers == -1).sum()) == 2 * GUARD_ELEMENTS


def test_columns_between_strided_rows_are_guard_too() -> None:
    ledger = Ledger()
    values = torch.arange(8.0).view(2, 2, 2)
    view = ledger.guarded_view("v", values, CPU, lambda buffer: buffer[..., 1:3], width=5)
    assert torch.equal(view, values)
    assert view.stride() == (10, 5, 1)
    poke(view, -1)
    assert ledger.written() == ["v"]
    ledger.restore()
    poke(view, 2)
    assert ledger.written() == ["v"]


def test_bits_tell_zeros_and_nans_apart() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2).double())
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert same_bits(torch.ones(4, 2)[:, 0], torch.ones(4))


ALLOCATORS = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(2, 3),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((2, 3), (3, 1)),
    "empty_permuted": lambda dtype: torch.empty_permuted((2, 3), (0, 1), dtype=dtype),
}


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fresh_floats_are_filled(name: str, dtype: torch.dtype) -> None:
    for fill in (math.nan, SENTINEL):
        with poisoned_allocations(fill):
            fresh = ALLOCATORS[name](dtype)
        assert (fresh.shape, fresh.dtype) == ((2, 3), dtype)
        assert same_bits(fresh, torch.full((2, 3), fill, dtype=dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_fresh_integers_are_not_zero(dtype: torch.dtype) -> None:
    with poisoned_allocations(math.nan):
        fresh = torch.empty(5, dtype=dtype)
    expected = {torch.uint8: 1, torch.bool: 1, torch.int8: -128}.get(dtype, int(SENTINEL))
    assert fresh.tolist() == [expected] * 5


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("offset", [-GUARD_ELEMENTS, -1, 6, 5 + GUARD_ELEMENTS])
def test_a_write_around_fresh_memory_is_found(name: str, dtype: torch.dtype, offset: int) -> None:
    with poisoned_allocations(math.nan) as allocations:
        fresh = ALLOCATORS[name](dtype)
        fresh.fill_(1)
        second = torch.empty(3)
    second.fill_(2.0)
    assert allocations.intact()
    poke(fresh, offset)
    assert not allocations.intact()


def test_initialised_memory_and_given_memory_pass_through() -> None:
    given = torch.arange(3.0)
    with poisoned_allocations(math.nan) as allocations:
        assert torch.zeros(3).tolist() == [0.0, 0.0, 0.0]
        assert torch.empty(3, out=given) is given
        assert (given + 1).tolist() == [1.0, 2.0, 3.0]
    assert allocations.blocks == []


def test_after_the_block_memory_is_plain_again() -> None:
    with poisoned_allocations(7.5) as allocations:
        pass
    torch.empty(3).fill_(0.0)
    assert allocations == Allocations(7.5)


def test_memory_with_gaps_is_filled_without_guards() -> None:
    with poisoned_allocations(SENTINEL) as allocations:
        fresh = torch.empty_strided((2, 3), (8, 2))
    assert fresh.stride() == (8, 2)
    assert bool((fresh == SENTINEL).all())
    assert allocations.blocks == []


def test_a_kernel_that_reads_uninitialised_memory_is_caught() -> None:
    def reads_stale_floats(**given: Any) -> Any:
        out, lse = honest_attention(**given)
        return out * torch.empty(1), lse

    def hides_its_nan(**given: Any) -> Any:
        out, lse = honest_attention(**given)
        return out + torch.empty(1).nan_to_num(0.0), lse

    def reads_stale_integers(**given: Any) -> Any:
        out, lse = honest_attention(**given)
        return out + torch.empty(1, dtype=torch.int32), lse

    assert judged(reads_stale_floats, attention_case()).verdict == "NONFINITE"
    assert judged(hides_its_nan, attention_case()).verdict == "NONDETERMINISTIC"
    assert judged(reads_stale_integers, attention_case()).verdict == "NUMERIC"


def test_slots_of_no_token_and_columns_between_rows_are_nan() -> None:
    case = mla_case(layout="bundled")
    given = operation_of(case).inputs(case, CPU).arguments
    used = torch.zeros(len(given["kv_c"]), dtype=torch.bool)
    used[given["slot_table"][given["slot_table"] >= 0].long()] = True
    for name in ("kv_c", "k_pe"):
        assert bool(given[name][~used].isnan().all())
        assert bool(given[name][used].isfinite().all())
    # the first and the last slot belong to nobody, where a clamped or wrapped index would land
    assert not bool(used[0])
    assert not bool(used[-1])
    assert int(used.sum()) == 50

    strided = attention_case(layout="strided")
    k = operation_of(strided).inputs(strided, CPU).arguments["k"]
    assert k.stride() == (40, 40, 1)
    assert bool(k.as_strided((40, 16), (40, 1), k.storage_offset() + 24).isnan().all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_that_were_left_as_they_were_are_told_from_others(dtype: torch.dtype) -> None:
    answers = []
    for fill in (math.nan, SENTINEL):
        with poisoned_allocations(fill):
            answers.append(torch.empty(3, dtype=dtype))
        # one element is written, with the other call's poison
        answers[-1][1] = -24577 if dtype not in (torch.int8,) else -100
    first, second = answers
    assert (left_as(first, math.nan) & left_as(second, SENTINEL)).tolist() == [True, False, True]
    assert not left_as(torch.zeros(2, dtype=torch.uint8), math.nan).any()


def test_truths_that_were_left_as_they_were_are_told_from_others() -> None:
    answers = []
    for fill in (math.nan, SENTINEL):
        with poisoned_allocations(fill):
            answers.append(torch.empty(3, dtype=torch.bool))
        answers[-1][:2] = torch.tensor([True, False])
    first, second = answers
    assert (left_as(first, math.nan) & left_as(second, SENTINEL)).tolist() == [False, False, True]
