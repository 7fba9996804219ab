"""The oracle of steps on a state pool: against whole sequences, by hand, and where rejected tokens are forgotten."""

from typing import Any

import pytest
import torch
from kda_inputs import kda_inputs, offsets
from torch import Tensor

from assay.reference.kda import kda
from assay.reference.kda_step import kda_mixed_step, kda_step

TOKENS = ("q", "k", "v", "g", "beta")


def step_inputs(lengths: list[int], *, slots: int = 12, **options: Any) -> dict[str, Any]:
    """Arguments of a step without its tables: the pool is drawn, the initial states are not used."""
    given = kda_inputs(lengths, **options)
    state = given.pop("initial_state")
    generator = torch.Generator().manual_seed(99)
    given["state_pool"] = torch.randn(slots, *state.shape[1:], generator=generator, dtype=torch.float64)
    return given


def by_tokens(given: dict[str, Any], rows: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and state after each of some rows, one call of the whole-sequence oracle a token."""
    layer = {name: value for name, value in given.items() if name not in (*TOKENS, "state_pool", "cu_seqlens")}
    outs, states = [], []
    for row in rows:
        one = {name: given[name][row : row + 1] for name in TOKENS}
        out, state, _ = kda(**one, **layer, cu_seqlens=torch.tensor([0, 1]), initial_state=state[None])
        state = state[0]
        outs.append(out[0])
        states.append(state)
    return torch.stack(outs), torch.stack(states)


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_every_column_can_be_the_start_and_every_token_leaves_its_state(accepted: int) -> None:
    given = step_inputs([4], seed=1)
    table = torch.tensor([[7, 2, 9, 4]])
    before = given["state_pool"].clone()
    out, pool = kda_step(**given, slot_table=table, num_accepted=torch.tensor([accepted]))
    expected, states = by_tokens(given, [0, 1, 2, 3], before[table[0, accepted - 1]])
    assert torch.equal(out, expected)
    assert torch.equal(pool[table[0]], states)
    others = [slot for slot in range(12) if slot not in table[0].tolist()]
    assert torch.equal(pool[others], before[others])
    assert torch.equal(given["state_pool"], before)


def test_rejected_tokens_leave_no_trace() -> None:
    """Three drafts of which one is accepted, then two: as if only the accepted tokens had ever been seen."""
    given = step_inputs([3], seed=2)
    other = step_inputs([2], seed=3)
    table = torch.tensor([[1, 5, 3]])
    _, pool = kda_step(**given, slot_table=table)
    out, _ = kda_step(**other | {"state_pool": pool}, slot_table=table, num_accepted=torch.tensor([1]))
    _, states = by_tokens(given, [0], given["state_pool"][1])
    expected, _ = by_tokens(other, [0, 1], states[0])
    assert torch.equal(out, expected)


def test_without_counts_the_first_column_is_the_start() -> None:
    given = step_inputs([1, 1], seed=4)
    table = torch.tensor([[3], [0]])
    counted = kda_step(**given, slot_table=table, num_accepted=torch.tensor([1, 1]))
    for got, expected in zip(kda_step(**given, slot_table=table), counted, strict=True):
        assert torch.equal(got, expected)


def test_padding_empty_sequences_and_rows_past_the_last() -> None:
    given = step_inputs([2, 0, 2, 1], seed=5, tail=2)
    # the third is padding; the last drops the state of its token, after a start that its table has
    table = torch.tensor([[4, 6, -1], [8, 1, 2], [-1, -1, -1], [-1, 9, 0]])
    out, pool = kda_step(**given, slot_table=table, num_accepted=torch.tensor([2, 3, 1, 2]))
    before = given["state_pool"]
    expected, states = by_tokens(given, [0, 1], before[6])
    assert torch.equal(out[:2], expected)
    assert torch.equal(pool[[4, 6]], states)
    assert torch.equal(out[4:5], by_tokens(given, [4], before[9])[0])
    assert not out[2:4].any()
    assert not out[5:].any()
    others = [slot for slot in range(12) if slot not in (4, 6)]
    assert torch.equal(pool[others], before[others])


MIXED: dict[str, Any] = {
    # a plain row before the drafts of a speculative sequence, and one between
    "spec_tokens": torch.tensor([1, 2, 4, 8, 9]),
    "spec_cu_seqlens": offsets([3, 2]),
    "spec_slots": torch.tensor([[2, 5, 7], [1, 10, 11]]),
    "num_accepted": torch.tensor([2, 1]),
    "plain_tokens": torch.tensor([0, 3, 5, 6, 7]),
    "plain_cu_seqlens": offsets([1, 0, 4]),
    "plain_slots": torch.tensor([4, 6, 8]),
    "has_initial_state": torch.tensor([True, False, False]),
}


def test_a_mixed_step_is_its_sequences_apart() -> None:
    given = step_inputs([11], seed=6)
    del given["cu_seqlens"]
    before = given["state_pool"].clone()
    # what a former request left must not matter
    given["state_pool"][8] = torch.nan
    out, pool = kda_mixed_step(**given, **MIXED)
    zero = torch.zeros_like(before[0])
    expected = {"drafts": ([1, 2, 4], before[5]), "more drafts": ([8, 9], before[1])}
    expected |= {"decode": ([0], before[4]), "prompt": ([3, 5, 6, 7], zero)}
    left = {"drafts": [2, 5, 7], "more drafts": [1, 10], "decode": [4], "prompt": [8]}
    for name, (rows, start) in expected.items():
        outs, states = by_tokens(given, rows, start)
        torch.testing.assert_close(out[rows], outs, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(pool[left[name]], states[-len(left[name]) :], rtol=1e-14, atol=1e-14)
    assert not out[10].any()
    untouched = [0, 3, 6, 9, 11]
    assert torch.equal(pool[untouched], before[untouched])


def test_a_slot_of_a_plain_sequence_without_tokens_is_not_read() -> None:
    given = step_inputs([11], seed=6)
    del given["cu_seqlens"]
    expected = kda_mixed_step(**given, **MIXED)
    for slot in (-1, 12):
        slots = {"plain_slots": torch.tensor([4, slot, 8])}
        for got, same in zip(kda_mixed_step(**given, **MIXED | slots), expected, strict=True):
            assert torch.equal(got, same)


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_plain_sequence_has_a_slot_of_the_pool(slot: int) -> None:
    given = step_inputs([11], seed=6)
    del given["cu_seqlens"]
    with pytest.raises(ValueError, match=f"plain_slots must hold 0 .. 11, got {slot}"):
        kda_mixed_step(**given, **MIXED | {"plain_slots": torch.tensor([4, 6, slot])})


@pytest.mark.parametrize("accepted", [-1, 0, 3])
def test_a_number_of_accepted_tokens_is_a_column(accepted: int) -> None:
    given, table = step_inputs([1, 2]), torch.tensor([[7, 2], [9, 4]])
    with pytest.raises(ValueError, match=f"num_accepted must be 1 to 2, got {accepted} at sequence 1"):
        kda_step(**given, slot_table=table, num_accepted=torch.tensor([2, accepted]))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_table_has_a_row_a_sequence(rows: int) -> None:
    table = torch.tensor([[7], [2], [9]])[:rows]
    with pytest.raises(ValueError, match=f"slot_table must have 2 rows, one a sequence, got {rows}"):
        kda_step(**step_inputs([1, 1]), slot_table=table)
