"""The oracle of the gated delta rule against plain floats, closed forms, and its chunkwise and affine forms."""

import math
from typing import Any

import pytest
import torch
from kda_inputs import GATES, LENGTHS, kda_inputs, offsets
from torch import Tensor

from assay.reference._kda_chunkwise import ORDERS, affine_map, chunkwise_kda
from assay.reference.kda import kda, log_decay, normalised, recurrent_kda, transformed

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
FAMILIES = ("normal", "slow", "u01", "runs", "fast", "alternating")


def numbers(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert got.shape == expected.shape
    assert got.dtype == torch.float64
    assert not expected.numel() or float((got - expected).abs().max()) <= tolerance * scale


def looped(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The definition in Python floats: one number at a time, ``S_t = (I - beta k k^T) diag(a) S + beta k v^T``."""
    rows = {name: given[name].tolist() for name in ("q", "k", "v", "g", "beta")}
    h, hv = given["q"].shape[1], given["v"].shape[1]
    d_k, d_v = given["q"].shape[2], given["v"].shape[2]
    out = torch.zeros_like(given["v"])
    states = given["initial_state"].clone()
    bounds = given["cu_seqlens"].tolist()
    for n in range(len(bounds) - 1):
        for head in range(hv):
            state = states[n, head].tolist()
            for t in range(bounds[n], bounds[n + 1]):
                q, k = (unit(rows[name][t][head * h // hv]) for name in ("q", "k"))
                beta = 1.0 / (1.0 + math.exp(-rows["beta"][t][head]))
                decay = [math.exp(gate_of(given, rows["g"][t][head][d], head, d)) for d in range(d_k)]
                faded = [[decay[d] * x for x in state[d]] for d in range(d_k)]
                told = [sum(k[d] * faded[d][e] for d in range(d_k)) for e in range(d_v)]
                value = rows["v"][t][head]
                state = [[faded[d][e] + beta * k[d] * (value[e] - told[e]) for e in range(d_v)] for d in range(d_k)]
                for e in range(d_v):
                    out[t, head, e] = given["scale"] * sum(q[d] * state[d][e] for d in range(d_k))
            states[n, head] = torch.tensor(state, dtype=torch.float64)
    return out, states


def unit(x: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in x) + 1e-6)
    return [value / length for value in x]


def gate_of(given: dict[str, Any], logit: float, head: int, channel: int) -> float:
    if given["gate"] == "log":
        return logit
    x = logit + float(given["dt_bias"][head, channel])
    amplitude = math.exp(float(given["A_log"][head]))
    if given["gate"] == "softplus":
        return -amplitude * math.log1p(math.exp(x))
    return float(given["lower_bound"]) / (1.0 + math.exp(-amplitude * x))


def one_sequence(lengths: list[int], **options: Any) -> tuple[Rows, Tensor, float]:
    """What the recurrence takes, of the first sequence: ``q, k, v, g, beta``, its state, the scale."""
    given = kda_inputs(lengths, **options)
    names = ("gate", "A_log", "dt_bias", "lower_bound")
    gate: dict[str, Any] = {name: given.get(name) for name in names}
    q, k, g, beta = transformed(
        given["q"], given["k"], given["g"], given["beta"], beta_is_logits=True, qk_l2norm=True, **gate
    )
    return (q, k, given["v"], g, beta), given["initial_state"][0], given["scale"]


@pytest.mark.parametrize("gate", GATES)
def test_loops_over_plain_floats_give_the_same(gate: str) -> None:
    given = kda_inputs([3, 0, 6], heads=(2, 4), dims=(3, 5), gate=gate, seed=1)
    out, final_state, _ = kda(**given)
    expected, states = looped(given)
    close(out, expected, 1e-14)
    close(final_state, states, 1e-14)
    assert torch.equal(final_state[1], given["initial_state"][1])


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_chunkwise_orders_are_equal_to_the_recurrence(family: str, order: str, chunk_size: int) -> None:
    rows, state, scale = one_sequence([67], family=family, seed=2)
    out, final_state = recurrent_kda(*rows, state, scale=scale)
    chunked, chunked_state = chunkwise_kda(*rows, state, scale=scale, chunk_size=chunk_size, order=order)
    close(chunked, out)
    close(chunked_state, final_state)


@pytest.mark.parametrize("gate", GATES)
def test_chunks_serve_every_gate_also_where_a_channel_forgets_all(gate: str) -> None:
    rows, state, scale = one_sequence([50], gate=gate, seed=3)
    # as of a document boundary within a sequence
    rows[3][[9, 20, 21]] = -1000.0
    out, final_state = recurrent_kda(*rows, state, scale=scale)
    assert torch.isfinite(out).all()
    for order in ORDERS:
        chunked, chunked_state = chunkwise_kda(*rows, state, scale=scale, chunk_size=16, order=order)
        close(chunked, out)
        close(chunked_state, final_state)


def test_an_order_without_a_name_is_refused() -> None:
    rows, state, scale = one_sequence([3])
    with pytest.raises(ValueError, match="order must be one of wy, inverse_last, got 'last'"):
        chunkwise_kda(*rows, state, scale=scale, chunk_size=16, order="last")


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_are_affine_maps_of_the_state(family: str) -> None:
    rows, state, scale = one_sequence([60], family=family, seed=4)
    _, final_state = recurrent_kda(*rows, state, scale=scale)
    for start, stop in ((0, 23), (23, 24), (24, 24), (24, 60)):
        matrix, added = affine_map(*(x[start:stop] for x in rows[1:]))
        state = matrix @ state + added
    close(state, final_state)


def test_a_map_is_what_the_recurrence_makes_of_the_identity_without_values() -> None:
    rows, _, scale = one_sequence([30], seed=5)
    _, heads, width = rows[0].shape
    matrix, _ = affine_map(*rows[1:])
    identity = torch.eye(width).double().expand(heads, width, width)
    nothing = torch.zeros(30, heads, width, dtype=torch.float64)
    _, moved = recurrent_kda(rows[0], rows[1], nothing, rows[3], rows[4], identity, scale=scale)
    close(moved, matrix)


@pytest.mark.parametrize("cut", [0, 1, 16, 39, 40])
def test_a_sequence_in_two_parts_is_the_whole_bit_for_bit(cut: int) -> None:
    given = kda_inputs([40], seed=6)
    out, final_state, states = kda(**given, checkpoints=torch.tensor([[0, cut], [0, 40], [0, cut]]))
    parts = []
    state = given["initial_state"]
    for rows in (slice(0, cut), slice(cut, 40)):
        part = {name: given[name][rows] for name in ("q", "k", "v", "g", "beta")}
        now, state, _ = kda(
            **given | part | {"cu_seqlens": torch.tensor([0, rows.stop - rows.start]), "initial_state": state}
        )
        if rows.stop == cut:
            assert torch.equal(states[0], state[0])
        parts.append(now)
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(state, final_state)
    assert torch.equal(states[1], final_state[0])
    assert torch.equal(states[2], states[0])


def test_sequences_do_not_meet_and_rows_past_the_last_are_zero() -> None:
    given = kda_inputs(seed=7, tail=3)
    out, final_state, states = kda(**given, checkpoints=torch.tensor([[5, 33], [1, 0], [4, 17]]))
    start = 0
    for n, length in enumerate(LENGTHS):
        rows = slice(start, start + length)
        part = {name: given[name][rows] for name in ("q", "k", "v", "g", "beta")}
        part |= {"cu_seqlens": offsets([length]), "initial_state": given["initial_state"][n : n + 1]}
        alone, state, _ = kda(**given | part)
        assert torch.equal(alone, out[rows])
        assert torch.equal(state[0], final_state[n])
        start += length
    assert torch.equal(out[start:], torch.zeros(3, 4, 12).double())
    assert torch.equal(states[1], given["initial_state"][1])
    assert torch.equal(states[2], final_state[4])


def test_without_a_state_it_starts_from_zero() -> None:
    given = kda_inputs(seed=8)
    given["initial_state"] = torch.zeros_like(given["initial_state"])
    with_zeros = kda(**given)
    del given["initial_state"]
    for got, expected in zip(kda(**given), with_zeros, strict=True):
        assert torch.equal(got, expected)


def test_the_past_depends_on_nothing_later() -> None:
    given = kda_inputs([24], seed=9)
    out, _, _ = kda(**given)
    for name in ("q", "k", "v", "g", "beta"):
        changed = given[name].clone()
        changed[20:] += 1.0
        assert torch.equal(kda(**given | {name: changed})[0][:20], out[:20])


def test_full_writes_of_one_hot_keys_are_a_table() -> None:
    """Without decay and with ``beta = 1`` a key's row of the state is the last value written; with 0 nothing is."""
    k = torch.eye(4).double()[[0, 1, 0, 3, 1]][:, None]
    v = torch.arange(10).double().view(5, 1, 2) + 1.0
    beta = numbers([1.0, 1.0, 1.0, 0.0, 1.0])[:, None]
    layer: dict[str, Any] = {"gate": "log", "beta_is_logits": False, "qk_l2norm": False, "scale": 1.0}
    out, state, _ = kda(k, k, v, torch.zeros_like(k), beta, cu_seqlens=torch.tensor([0, 5]), **layer)
    assert state[0, 0].tolist() == [[5.0, 6.0], [9.0, 10.0], [0.0, 0.0], [0.0, 0.0]]
    assert out[:, 0].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [0.0, 0.0], [9.0, 10.0]]


def test_decay_comes_before_the_error() -> None:
    one = torch.ones(1, 1, 1).double()
    state = torch.full((1, 1, 1, 1), 8.0).double()
    out, after, _ = kda(
        one,
        one,
        2.0 * one,
        math.log(0.5) * one,
        numbers([[0.25]]),
        scale=3.0,
        cu_seqlens=torch.tensor([0, 1]),
        gate="log",
        beta_is_logits=False,
        qk_l2norm=False,
        initial_state=state,
    )
    # 8 fades to 4, the error is 2 - 4, a quarter of it is written
    assert float(after) == pytest.approx(3.5, abs=1e-15)
    assert float(out) == pytest.approx(10.5, abs=1e-14)


def test_gates_have_their_closed_forms() -> None:
    zero = torch.zeros(1, 2, 1).double()
    a_log = numbers([0.0, math.log(3.0)])
    assert log_decay(zero, gate="bounded", A_log=a_log, lower_bound=-4.0).tolist() == [[[-2.0], [-2.0]]]
    soft = log_decay(zero, gate="softplus", A_log=a_log)[0, :, 0].tolist()
    assert soft == pytest.approx([-math.log(2.0), -3.0 * math.log(2.0)], rel=1e-15)
    bias = numbers([[1.0], [-2.0]])
    shifted = log_decay(zero, gate="bounded", A_log=a_log, dt_bias=bias, lower_bound=-5.0)[0, :, 0].tolist()
    assert shifted == pytest.approx([-5.0 / (1.0 + math.exp(-1.0)), -5.0 / (1.0 + math.exp(6.0))], rel=1e-14)
    assert log_decay(zero, gate="bounded", lower_bound=-5.0).tolist() == [[[-2.5], [-2.5]]]
    # far out: neither overflows, and a slow channel keeps its digits
    far = numbers([[[-800.0], [800.0]]])
    assert log_decay(far, gate="softplus").tolist() == [[[0.0], [-800.0]]]
    assert log_decay(far, gate="bounded", lower_bound=-5.0).tolist() == [[[0.0], [-5.0]]]
    slow = log_decay(zero - 30.0, gate="softplus")
    assert float(slow[0, 0, 0]) == pytest.approx(-math.exp(-30.0), rel=1e-12)


@pytest.mark.parametrize(
    ("gate", "lower_bound", "text"),
    [
        ("Softplus", None, "gate must be one of bounded, softplus, log, got 'Softplus'"),
        ("", -5.0, "gate must be one of bounded, softplus, log, got ''"),
        ("bounded", None, "lower_bound must be given for a bounded gate, got None"),
        ("bounded", -5.01, r"lower_bound must be in \[-5, 0\), got -5.01"),
        ("bounded", 0.0, r"lower_bound must be in \[-5, 0\), got 0.0"),
        ("bounded", math.nan, r"lower_bound must be in \[-5, 0\), got nan"),
        ("softplus", -5.0, "lower_bound must be None for the gate softplus, got -5.0"),
        ("log", -5.0, "lower_bound must be None for the gate log, got -5.0"),
    ],
)
def test_gates_that_are_refused(gate: str, lower_bound: float | None, text: str) -> None:
    given = kda_inputs([3]) | {"gate": gate, "lower_bound": lower_bound}
    with pytest.raises(ValueError, match=text):
        kda(**given)


@pytest.mark.parametrize("checkpoint", [[2, 0], [-1, 0], [0, 4], [1, 1], [0, -1]])
def test_checkpoints_that_are_nowhere_are_refused(checkpoint: list[int]) -> None:
    given = kda_inputs([3, 0])
    with pytest.raises(ValueError, match=rf"checkpoints must .* got \[{checkpoint[0]}, {checkpoint[1]}\]"):
        kda(**given, checkpoints=torch.tensor([[0, 3], [1, 0], checkpoint]))


@pytest.mark.parametrize("states", [1, 3])
def test_more_or_fewer_states_than_sequences_are_refused(states: int) -> None:
    given = kda_inputs([3, 2])
    given["initial_state"] = given["initial_state"][:1].expand(states, -1, -1, -1)
    with pytest.raises(ValueError, match=f"initial_state must have 2 states, one a sequence, got {states}"):
        kda(**given)


def test_the_root_holds_the_epsilon() -> None:
    rows = numbers([[0.0, 0.0], [3e-4, 4e-4], [3.0, 4.0]])
    expected = [0.0, 0.0, 3e-4 / math.sqrt(1.25e-6), 4e-4 / math.sqrt(1.25e-6)]
    assert normalised(rows)[:2].flatten().tolist() == pytest.approx(expected, rel=1e-14)
    assert float(normalised(rows)[2].norm()) == pytest.approx(1.0 - 2e-8, rel=1e-10)


def test_gradients_pass_through() -> None:
    given = kda_inputs([4], heads=(1, 2), dims=(2, 3), seed=10)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    tensors = [given[name].requires_grad_() for name in names]

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        return kda(**given | dict(zip(names, values, strict=True)))[:2]

    assert torch.autograd.gradcheck(call, tensors)
