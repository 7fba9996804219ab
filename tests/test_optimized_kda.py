"""Twins of the gated delta rule: within the bounds of the perturbed oracle, bit by bit where bits are promised."""

import itertools
from typing import Any

import pytest
import torch
from kda_bounds import OPERANDS, TOKENS, call, failures
from kda_inputs import GATES, kda_inputs, offsets, oracle
from torch import Tensor

from assay.optimized import _kda_chunks, _kda_torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FAMILIES = ("normal", "slow", "u01", "runs", "fast", "alternating")
CHECKPOINTS = torch.tensor([[5, 33], [1, 0], [4, 17], [5, 33], [0, 0]])
SMALL: dict[str, Any] = {"heads": (1, 2), "dims": (20, 24), "tail": 3}


@pytest.mark.parametrize(
    ("dtype", "family"), [*itertools.product(["float32"], FAMILIES), ("float16", "slow"), ("bfloat16", "runs")]
)
def test_the_torch_twin_is_within_its_bounds(dtype: str, family: str) -> None:
    given = kda_inputs([5, 0, 1, 16, 17, 34], dims=(16, 20), family=family, dtype=DTYPES[dtype], seed=1) | {
        "checkpoints": CHECKPOINTS
    }
    assert failures(given, call(given, "torch")) == {}


@pytest.mark.parametrize("gate", GATES)
def test_the_torch_twin_in_float64_is_the_oracle(gate: str) -> None:
    given = kda_inputs(gate=gate, seed=2, tail=2) | {"checkpoints": CHECKPOINTS}
    if gate == "log":
        given["g"][[7, 30]] = -1000.0
    for got, expected in zip(call(given, "torch"), oracle(given), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "gate"), [*itertools.product(["float32"], GATES), ("float16", "bounded"), ("bfloat16", "log")]
)
def test_the_kernels_are_within_their_bounds(dtype: str, gate: str) -> None:
    given = kda_inputs([5, 0, 33], gate=gate, dtype=DTYPES[dtype], seed=3, **SMALL)
    given["checkpoints"] = torch.tensor([[2, 32], [1, 0], [2, 32], [2, 0]]) if gate == "log" else None
    if gate == "log":
        given["g"][20] = -1000.0
    out, final, kept = call(given, "triton")
    assert failures(given, (out, final, kept), operand=OPERANDS[dtype]) == {}
    assert torch.equal(out[38:], torch.zeros_like(out[38:]))
    assert torch.equal(final[1], given["initial_state"][1])
    if gate == "log":
        assert torch.equal(kept[1], given["initial_state"][1])
        assert torch.equal(kept[3], given["initial_state"][2])
        assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize("family", ["u01", "runs", "alternating"])
def test_repeated_keys_with_slow_decay_do_not_hurt_the_kernels(family: str) -> None:
    given = kda_inputs([40], heads=(1, 1), dims=(16, 16), family=family, dtype=torch.float32, seed=4)
    assert failures(given, call(given, "triton")) == {}


@pytest.mark.parametrize("dims", [(128, 128), (60, 100), (64, 16)])
def test_head_dimensions_of_the_models_and_others(dims: tuple[int, int]) -> None:
    given = kda_inputs([19], heads=(1, 1), dims=dims, dtype=torch.float16, seed=5)
    assert failures(given, call(given, "triton"), operand=OPERANDS["float16"]) == {}


def test_a_state_that_is_rounded_between_chunks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = kda_inputs([130], heads=(1, 2), dims=(16, 20), family="slow", dtype=torch.float32, seed=6)
    assert failures(given, call(given, "torch")) == {}
    honest = _kda_torch.chunk_step

    def rounded(*args: Tensor) -> tuple[Tensor, Tensor]:
        out, state = honest(*args)
        return out, state.bfloat16().float()

    monkeypatch.setattr(_kda_torch, "chunk_step", rounded)
    assert failures(given, call(given, "torch"))


@pytest.mark.parametrize("initial", [True, False])
def test_segments_of_a_long_sequence_are_joined_exactly(monkeypatch: pytest.MonkeyPatch, initial: bool) -> None:
    monkeypatch.setattr(_kda_chunks, "FEWEST_CHUNKS", 1)
    given = kda_inputs([100, 0, 20], heads=(1, 1), dims=(20, 24), family="slow", dtype=torch.float32, seed=7)
    given["checkpoints"] = torch.tensor([[0, 64], [0, 90]])
    if not initial:
        given["initial_state"].zero_()
    cuts = []
    lay_out = _kda_chunks.lay_out

    def seen(*args: Any, **options: Any) -> _kda_chunks.Chunks:
        cuts.append(lay_out(*args, **options | {"processors": 16}))
        return cuts[-1]

    monkeypatch.setattr("assay.optimized._kda_plan.lay_out", seen)
    answer = call(given, "triton", **{} if initial else {"initial_state": None})
    assert cuts[0].cut
    assert cuts[0].segments[:, 0].tolist().count(0) >= 3
    assert failures(given, answer) == {}


def test_rows_of_one_projection_are_read_in_place_and_results_go_where_they_belong() -> None:
    given = kda_inputs([5, 33], dtype=torch.float16, seed=8, state_dtype=torch.bfloat16, **SMALL)
    expected = call(given, "triton")
    widths = [given[name][0].numel() for name in TOKENS]
    rows = torch.cat([given[name].flatten(1) for name in TOKENS] + [torch.full((41, 55), torch.nan).half()], 1)
    parts = rows.split([*widths, 55], dim=1)
    views = {name: part.unflatten(1, given[name].shape[1:]) for name, part in zip(TOKENS, parts, strict=False)}
    # the output between columns that stay, the states in a pool, value columns first
    out = parts[-1][:, 3:51].unflatten(1, (2, 24))
    before = rows.clone()
    pool = torch.full((5, 2, 24, 20), 7.0, dtype=torch.bfloat16)
    pool[1::2] = given["initial_state"].transpose(2, 3)
    given |= views
    got = call(given, "triton", shape={"state_layout": "VK"}, initial_state=pool[1::2], final_state=pool[1::2], out=out)
    assert got[0] is out
    assert torch.equal(out, expected[0])
    assert torch.equal(pool[1::2].transpose(2, 3), expected[1])
    assert bool((pool[::2] == 7.0).all())
    before[:, -52:-4] = rows[:, -52:-4]
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_nan_of_the_next_sequence_does_not_reach_this_one(implementation: str) -> None:
    given = kda_inputs([5, 20], heads=(1, 1), dims=(16, 16), dtype=torch.float32, seed=9)
    out, final, _ = call(given, implementation)
    for name in TOKENS:
        given[name][5:] = torch.nan
    poisoned, states, _ = call(given, implementation)
    assert torch.equal(poisoned[:5], out[:5])
    assert torch.equal(states[0], final[0])
    assert poisoned[5:].isnan().all()
    assert states[1].isnan().all()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_past_depends_on_nothing_later(implementation: str) -> None:
    given = kda_inputs([40], heads=(1, 1), dims=(16, 16), dtype=torch.float16, seed=10)
    out, _, _ = call(given, implementation)
    for name, place in itertools.product(("k", "g"), (20, 13)):
        changed = given[name].clone()
        changed[place:] += 1.0
        later, _, _ = call(given | {name: changed}, implementation)
        assert torch.equal(later[:place], out[:place])
        assert not torch.equal(later[place:], out[place:])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_order_and_company_of_sequences_change_no_bit(implementation: str) -> None:
    lengths = [3, 0, 34]
    given = kda_inputs(lengths, heads=(1, 1), dims=(16, 16), dtype=torch.float32, seed=11)
    out, final, _ = call(given, implementation)
    again = call(given, implementation)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], final)
    order = [2, 0, 1]
    rows = torch.cat([torch.arange(37)[3:], torch.arange(3)])
    moved = {name: given[name][rows] for name in TOKENS} | {"cu_seqlens": offsets([lengths[n] for n in order])}
    moved |= {"initial_state": given["initial_state"][order]}
    other, states, _ = call(given | moved, implementation)
    assert torch.equal(other, out[rows])
    assert torch.equal(states, final[order])


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_sequences_without_tokens_hand_their_states_on(implementation: str) -> None:
    given = kda_inputs([0, 0], heads=(1, 1), dims=(16, 16), dtype=torch.float32, seed=12)
    given["checkpoints"] = torch.tensor([[1, 0]])
    out, final, kept = call(given, implementation)
    assert out.shape == (0, 1, 16)
    assert torch.equal(final, given["initial_state"])
    assert torch.equal(kept, given["initial_state"][1:])
    assert not call(given, implementation, initial_state=None)[1].any()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_one_hot_keys_are_a_table_bit_for_bit(implementation: str) -> None:
    """``g = 0``, ``beta`` 0 or 1: nothing is rounded, the state holds the last value written under each key."""
    generator = torch.Generator().manual_seed(13)
    which = torch.randint(16, (45,), generator=generator)
    k = torch.eye(16)[which][:, None].half()
    v = torch.randint(-8, 9, (45, 1, 16), generator=generator).half()
    beta = torch.randint(2, (45, 1), generator=generator).half()
    given: dict[str, Any] = {"q": k, "k": k, "v": v, "g": torch.zeros_like(k), "beta": beta, "scale": 1.0}
    given |= {"cu_seqlens": offsets([45]), "gate": "log", "beta_is_logits": False, "qk_l2norm": False}
    given |= {"initial_state": torch.zeros(1, 1, 16, 16)}
    out, final, _ = call(given, implementation)
    expected = oracle(given)
    assert torch.equal(out.double(), expected[0])
    assert torch.equal(final.double(), expected[1])
