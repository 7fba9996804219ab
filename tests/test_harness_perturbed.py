"""The perturbed oracle on a small delta rule: honest low-precision forms pass, planted faults do not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.contract import UNIT_ROUNDOFF, Contract, Precision
from assay.harness.faults._kda_twin import cut_off
from assay.harness.perturbed import Recurrence, Rounded, Spread, perturbed_gates, perturbed_oracle
from assay.harness.record import GateResult

HEADS, KEYS, VALUES, CHUNK = 2, 12, 20, 16
LENGTHS = (129, 0, 1, 70)
# a chunked kernel: bfloat16 operands, a float32 state
CONTRACT = Contract(p="bf16", out="bf16", inputs="bf16", state="fp32")
FIELDS = {"decay": "logits", "key": "inputs", "query": "inputs", "operand": "p", "update": "p", "state": "state"}
RESULTS = {"out": "out", "final state": "state", "checkpoints": "state"}
SITES, STORED = CONTRACT.formats(FIELDS), CONTRACT.formats(RESULTS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Packed sequences: ``q``, ``k`` and ``g`` are ``[T, H, K]``, ``v`` is ``[T, H, V]``, ``beta`` ``[T, H]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor
    sequences: tuple[slice, ...]

    def to(self, dtype: torch.dtype) -> "Problem":
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "g", "beta", "initial")}
        return replace(self, **tensors)


def problem(seed: int, *, decay: float = 0.05, lengths: tuple[int, ...] = LENGTHS, beta: float = 1.0) -> Problem:
    """Inputs rounded to bfloat16 (the gate to float32), in float64; keys of length one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(tokens, HEADS, KEYS), dim=-1)
    g = -decay * torch.rand(tokens, HEADS, KEYS, generator=generator, dtype=torch.float64)
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return Problem(
        q=normal(tokens, HEADS, KEYS).bfloat16().double(),
        k=k.bfloat16().double(),
        v=normal(tokens, HEADS, VALUES).bfloat16().double(),
        g=g.float().double(),
        beta=(beta * torch.sigmoid(normal(tokens, HEADS))).bfloat16().double(),
        # neither square nor alike along its axes, so that a transposed state shows
        initial=normal(len(lengths), HEADS, KEYS, VALUES) * torch.linspace(0.2, 1.0, KEYS).double()[:, None],
        sequences=tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True)),
    )


def delta_rule(given: Problem, *, fault: str = "") -> Recurrence:
    """The gated delta rule token by token, with one step changed by a fault."""

    def run(rounded: Rounded) -> dict[str, Tensor]:
        out, finals, checkpoints = torch.zeros_like(given.v), [], []
        for n, part in enumerate(given.sequences):
            state = given.initial[n] * (fault != "initial state dropped")
            if fault == "state layout":
                state = state.transpose(1, 2).reshape(state.shape)
            tokens = range(part.start, part.stop)
            if fault == "tail chunk dropped":
                tokens = range(part.start, part.stop - (part.stop - part.start) % CHUNK)
            for t in tokens:
                decay = rounded("decay", given.g[t].exp())[..., None]
                # a chunked kernel rounds the key that reads and the key that writes apart
                read, write = rounded("key", given.k[t]), rounded("key", given.k[t])
                beta = given.beta[t] ** (2 if fault == "beta squared" else 1)
                if fault != "decay after update":
                    state = decay * state
                error = given.v[t] - torch.einsum("hk,hkv->hv", read, rounded("operand", state))
                update = rounded("update", beta[:, None] * error)
                state = state + torch.einsum("hk,hv->hkv", write, update)
                if fault == "decay after update":
                    state = decay * state
                state = rounded("state", state)
                out[t] = torch.einsum("hk,hkv->hv", rounded("query", given.q[t]), rounded("operand", state))
                if (t - part.start + 1) % CHUNK == 0:
                    checkpoints.append(state)
            finals.append(state)
        if fault == "tail chunk dropped":
            out = torch.where(out == 0, delta_rule(given)(rounded)["out"], out)
        return {"out": out, "final state": torch.stack(finals), "checkpoints": torch.stack(checkpoints)}

    return run


def emulated(given: Problem, *, fault: str = "", **formats: Precision) -> dict[str, Tensor]:
    """What a kernel computes that rounds to the declared formats, in float32."""
    sites = SITES | formats

    def cast(site: str, value: Tensor) -> Tensor:
        return value.to(DTYPES[sites[site]]).float()

    results = delta_rule(given.to(torch.float32), fault=fault)(cast)
    return {name: value.to(DTYPES[STORED[name]]) for name, value in results.items()}


def chunked(given: Problem) -> dict[str, Tensor]:
    """Chunks of 16 tokens, the inverse applied last, bfloat16 operands, a float32 state: right in another order."""

    def operand(value: Tensor) -> Tensor:
        return value.bfloat16().float()

    single, finals, checkpoints = given.to(torch.float32), [], []
    out = torch.zeros_like(single.v)
    for n, part in enumerate(given.sequences):
        state = single.initial[n]
        for start in range(part.start, part.stop, CHUNK):
            rows = slice(start, min(start + CHUNK, part.stop))
            q, k, v, g = (getattr(single, name)[rows].transpose(0, 1) for name in ("q", "k", "v", "g"))
            beta, total = single.beta[rows].T[..., None], g.cumsum(1)
            decayed, restored = operand(k * total.exp()), operand(k * (total[:, -1:] - total).exp())
            pairs = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
            lower = (beta * torch.einsum("hik,hjk,hijk->hij", k, k, pairs)).tril(-1)
            update = torch.linalg.solve(
                torch.eye(lower.shape[1]) + lower, operand(beta * (v - decayed @ operand(state)))
            )
            within = torch.einsum("hik,hjk,hijk->hij", operand(q), k, pairs).tril()
            out[rows] = (operand(q * total.exp()) @ operand(state) + within @ operand(update)).transpose(0, 1)
            state = total[:, -1, :, None].exp() * state + restored.mT @ operand(update)
            if rows.stop - rows.start == CHUNK:
                checkpoints.append(state)
        finals.append(state)
    return {"out": out.bfloat16(), "final state": torch.stack(finals), "checkpoints": torch.stack(checkpoints)}


def gates_of(given: Problem, answer: dict[str, Tensor], contract: Contract = CONTRACT) -> dict[str, GateResult]:
    oracle = perturbed_oracle(delta_rule(given), contract.formats(FIELDS), seed=1)
    gates = perturbed_gates(answer, oracle, stored=contract.formats(RESULTS), sequences=given.sequences)
    return {gate.gate: gate for gate in gates}


def failing(gates: dict[str, GateResult]) -> set[str]:
    return {name for name, gate in gates.items() if not gate.passed}


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_kernel_passes(seed: int) -> None:
    given = problem(seed, decay=(0.0, 0.05, 0.5, 3.0, 8.0)[seed % 5], beta=1.0 + seed % 2)
    gates = gates_of(given, emulated(given))
    assert failing(gates) == set()
    # the prediction is of the size of what an honest kernel does, not a loose bound on it
    median = gates["G5 median rms out"]
    assert float(median.text.split()[1]) > 0.3


@pytest.mark.parametrize("seed", range(8))
def test_a_chunked_kernel_with_a_float32_state_passes(seed: int) -> None:
    given = problem(100 + seed, decay=(0.0, 0.05, 0.5, 1.0)[seed % 4])
    assert failing(gates_of(given, chunked(given))) == set()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("initial state dropped", {"G4 envelope out", "G5 row rms out"}),
        ("tail chunk dropped", {"G4 envelope final state", "G5 row rms final state"}),
        ("state layout", {"G4 envelope out", "G5 row rms out"}),
        ("decay after update", {"G5 row rms out", "G5 median rms out"}),
        ("beta squared", {"G4 envelope out", "G5 row rms out", "G5 median rms out"}),
    ],
)
def test_a_fault_is_seen(fault: str, seen: set[str], seed: int) -> None:
    given = problem(200 + seed)
    assert seen <= failing(gates_of(given, emulated(given, fault=fault)))


def test_a_dropped_tail_chunk_shows_in_the_state_alone() -> None:
    given = problem(210)
    gates = gates_of(given, emulated(given, fault="tail chunk dropped"))
    assert {name.removeprefix("G4 envelope ").removeprefix("G5 row rms ") for name in failing(gates)} == {"final state"}
    where = gates["G4 envelope final state"].where
    assert where is not None
    assert where.request in (0, 2, 3)


@pytest.mark.parametrize("seed", range(3))
def test_a_state_in_bfloat16_fails_where_float32_is_declared(seed: int) -> None:
    # weak writes and slow decay: what is rounded away in one token is still missing after many
    given = problem(220 + seed, decay=0.001, beta=0.1)
    answer = emulated(given, state="bf16")
    assert {"G5 median rms out", "G5 row rms final state"} <= failing(gates_of(given, answer))
    assert failing(gates_of(given, answer, CONTRACT.promising(state="bf16"))) == set()


def test_the_state_is_held_to_its_own_format_alone() -> None:
    """A state in float16 is between the two, and what a contract says of weights is no excuse for it."""
    given = problem(240, decay=0.001, beta=0.1)
    answer = emulated(given, state="fp16")
    assert failing(gates_of(given, answer)) != set()
    assert failing(gates_of(given, answer, CONTRACT.promising(p="e4m3", state="fp32"))) != set()
    assert failing(gates_of(given, answer, CONTRACT.promising(state="fp16"))) == set()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_store_that_cuts_off_is_seen_by_its_bias(dtype: Precision) -> None:
    """Each element errs by at most twice as much as if it were rounded: gates of single elements do not mind."""
    given, stored = problem(250), STORED | {"out": dtype, "final state": dtype}
    oracle = perturbed_oracle(delta_rule(given), dict.fromkeys(SITES, "fp32"), seed=1)
    exact = {name: spread.exact for name, spread in oracle.items()}

    def gates(answer: dict[str, Tensor]) -> dict[str, GateResult]:
        found = perturbed_gates(answer, oracle, stored=stored, sequences=given.sequences)
        return {gate.gate: gate for gate in found}

    halves = ("out", "final state")
    rounded = {name: value.to(DTYPES[dtype]) if name in halves else value.float() for name, value in exact.items()}
    honest = gates(rounded)
    assert failing(honest) == set()
    # a float32 state is not stored in half precision
    assert {gate for gate in honest if gate.startswith("G6")} == {"G6 bias out", "G6 bias final state"}
    cut = rounded | {name: cut_off(exact[name].float(), DTYPES[dtype]) for name in halves}
    assert failing(gates(cut)) >= {"G6 bias out", "G6 bias final state"}
    assert "lean to zero by 0.7" in gates(cut)["G6 bias out"].text
    assert honest["G6 bias out"].ratio < 0.2
    away = gates(rounded | {"out": exact["out"] * (1 + 0.9 * UNIT_ROUNDOFF[dtype])})["G6 bias out"]
    assert "lean away from zero by 0.900" in away.text
    assert not away.passed


@pytest.mark.parametrize("seed", range(3))
def test_an_error_that_grows_on_the_prediction_is_seen_by_its_slope(seed: int) -> None:
    """Up to 1.5 of the predicted error at the end is within the limit of a row, but an honest error does not grow."""
    given = problem(230 + seed, lengths=(256,))
    answer = emulated(given)
    oracle = perturbed_oracle(delta_rule(given), SITES, seed=1)
    spread = oracle["out"]
    ramp = torch.linspace(0, 1.3, 256, dtype=torch.float64)[:, None, None]
    answer["out"] = (answer["out"].double() + ramp * spread.noisy[3]).float()
    stored = STORED | {"out": "fp32"}
    gates = {gate.gate: gate for gate in perturbed_gates(answer, oracle, stored=stored, sequences=given.sequences)}
    assert not gates["G5 slope out"].passed
    assert gates["G5 row rms out"].passed


def test_a_short_sequence_has_no_slope() -> None:
    given = problem(0, lengths=(63, 20))
    gates = gates_of(given, emulated(given))
    assert "G5 slope out" not in gates
    assert "G5 median rms out" in gates


def test_empty_and_single_token_sequences_are_judged() -> None:
    given = problem(3, lengths=(0, 1, 20))
    answer = emulated(given)
    assert failing(gates_of(given, answer)) == set()
    # the state of an empty sequence passes through
    answer["final state"][0, 1, 2, 3] += 1e-3
    gates = gates_of(given, answer)
    where = gates["G4 envelope final state"].where
    assert failing(gates) >= {"G4 envelope final state", "G5 row rms final state"}
    assert where is not None
    assert (where.request, where.head, where.dim) == (0, 1, 3)


def test_a_value_that_is_not_finite_is_seen_and_named() -> None:
    given = problem(4)
    for value in (math.nan, math.inf):
        answer = emulated(given)
        answer["out"][5, 1, 7] = value
        gates = gates_of(given, answer)
        where = gates["G1 out"].where
        assert where is not None
        assert (where.token, where.head, where.dim) == (5, 1, 7)
        assert {"G1 out", "G4 envelope out", "G5 row rms out", "G5 slope out"} <= failing(gates)


def test_a_missing_or_misshapen_result_is_seen() -> None:
    given = problem(5)
    answer = emulated(given)
    del answer["checkpoints"]
    answer["final state"] = answer["final state"].transpose(2, 3)
    gates = gates_of(given, answer)
    assert gates["G0 checkpoints"].text == "checkpoints must have shape (12, 2, 12, 20), got nothing"
    assert gates["G0 final state"].text == "final state must have shape (4, 2, 12, 20), got (4, 2, 20, 12)"
    assert failing(gates) == {"G0 checkpoints", "G0 final state"}


def one_product(size: int) -> tuple[Recurrence, Tensor]:
    """``out[t] = x[t] * y`` with one site on ``x``: its error is known in closed form."""
    x = torch.linspace(1.0, 2.0, 8, dtype=torch.float64)[:, None, None].expand(8, 1, size)

    def run(rounded: Rounded) -> dict[str, Tensor]:
        return {"out": rounded("x", x)}

    return run, x


def test_the_spread_is_that_of_uniform_noise() -> None:
    recurrence, x = one_product(4096)
    spread = perturbed_oracle(recurrence, {"x": "bf16"}, runs=16)["out"]
    torch.testing.assert_close(spread.sigma, x[..., :1] * 2.0**-8 / math.sqrt(3), rtol=0.02, atol=0)
    assert float(spread.noisy.abs().max()) <= 2 * 2.0**-8
    expected = 4096 * x[..., 0].square() * 2.0**-16 * (1 + 1 / 4**2) / 3
    torch.testing.assert_close(spread.variance(2.0**-10), expected, rtol=0.02, atol=0)


def test_elements_that_differ_in_size_within_a_row_have_limits_of_their_own() -> None:
    sizes = torch.tensor([1.0] * 15 + [100.0], dtype=torch.float64).expand(64, 1, 16)

    def uneven(rounded: Rounded) -> dict[str, Tensor]:
        return {"state": rounded("x", sizes)}

    oracle = perturbed_oracle(uneven, {"x": "bf16"})
    options: dict[str, Any] = {"stored": {"state": "fp32"}, "sequences": [slice(0, 64)]}
    worst = 100 * 2.0**-8 * torch.tensor([0.0] * 15 + [1.0], dtype=torch.float64)
    for factor, passed in ((1.0, True), (6.0, False)):
        gates = {gate.gate: gate for gate in perturbed_gates({"state": sizes + factor * worst}, oracle, **options)}
        assert gates["G4 envelope state"].passed == passed


def test_noise_of_one_scalar_leaves_a_row_one_degree_of_freedom() -> None:
    def shared(rounded: Rounded) -> dict[str, Tensor]:
        factor = rounded("x", torch.ones(200, 1, 1, dtype=torch.float64))
        return {"out": factor.expand(200, 1, 64)}

    def apart(rounded: Rounded) -> dict[str, Tensor]:
        return {"out": rounded("x", torch.ones(200, 1, 64, dtype=torch.float64))}

    # a uniform error's square varies less than a normal one's: 2.5 degrees of freedom instead of 1, and 2.5 D at most D
    assert 1.5 < float(perturbed_oracle(shared, {"x": "bf16"})["out"].freedom()) < 3.5
    assert float(perturbed_oracle(apart, {"x": "bf16"})["out"].freedom()) > 40


def test_without_noise_nothing_may_differ() -> None:
    def constant(rounded: Rounded) -> dict[str, Tensor]:
        rounded("x", torch.zeros(1, dtype=torch.float64))
        return {"out": torch.zeros(9, 1, 4, dtype=torch.float64)}

    oracle = perturbed_oracle(constant, {"x": "bf16"})
    options: dict[str, Any] = {"stored": {"out": "fp32"}, "sequences": [slice(0, 9)]}
    assert float(oracle["out"].freedom()) == 1
    assert all(gate.ratio == 0 for gate in perturbed_gates({"out": torch.zeros(9, 1, 4)}, oracle, **options))
    assert any(not gate.passed for gate in perturbed_gates({"out": torch.full((9, 1, 4), 1e-30)}, oracle, **options))


def test_the_same_seed_gives_the_same_spread() -> None:
    given = problem(6, lengths=(20,))
    once, again, other = (perturbed_oracle(delta_rule(given), SITES, seed=seed)["out"] for seed in (1, 1, 2))
    assert torch.equal(once.noisy, again.noisy)
    assert not torch.equal(once.noisy, other.noisy)
    assert isinstance(once, Spread)


def wrong_dtype(rounded: Rounded) -> dict[str, Tensor]:
    return {"out": rounded("x", torch.ones(2, 2))}


@pytest.mark.parametrize(
    ("recurrence", "sites", "runs", "error", "text"),
    [
        (one_product(3)[0], {"x": "bf16"}, 15, ValueError, "runs must be at least 16, got 15"),
        (one_product(3)[0], {}, 16, ValueError, "sites must be those that the recurrence calls, x, got none"),
        (one_product(3)[0], {"x": "bf16", "y": "bf16"}, 16, ValueError, "recurrence calls, x, got x, y"),
        (wrong_dtype, {"x": "bf16"}, 16, TypeError, "out must be float64, got torch.float32"),
    ],
)
def test_wrong_requests_are_refused(
    recurrence: Recurrence, sites: dict[str, Precision], runs: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        perturbed_oracle(recurrence, sites, runs=runs)


def test_a_recurrence_is_called_once_exactly_and_once_a_run() -> None:
    calls: list[Callable[[str, Tensor], Tensor]] = []

    def counted(rounded: Rounded) -> dict[str, Tensor]:
        calls.append(rounded)
        return one_product(3)[0](rounded)  # type: ignore[return-value]

    perturbed_oracle(counted, {"x": "bf16"}, runs=17)
    assert len(calls) == 18
