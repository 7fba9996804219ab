"""Each gate is tripped by the defect that it is for, and by no honest kernel."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import (
    Answer,
    attention_case,
    failing,
    gates_of,
    mla_case,
    operation_of,
    rows_of,
    stored,
    true_answer,
)
from torch import Tensor

from assay.harness._gates_bounds import RMS_TAIL
from assay.harness.case import Case
from assay.harness.companions import companions
from assay.harness.contract import UNIT_ROUNDOFF, Contract, default_contract
from assay.harness.gates import (
    Roundoffs,
    Variances,
    chi_limit,
    exact_elements,
    hard_envelope,
    lse_limit,
    nonfinite_gates,
)
from assay.harness.operation import AttentionOutline, Rows

U = UNIT_ROUNDOFF["bf16"]
# many keys and wide values, so that statistics have something to count
WIDE: dict[str, Any] = {"query_lens": [64], "key_lens": [256], "d_v": 64, "causal": False}


def ulp_off(tensor: Tensor, index: tuple[int, ...]) -> None:
    """Move one element of a half-precision tensor to the next number away from zero."""
    tensor.view(torch.int16)[index] += 1


def envelope_of(rows: Rows, contract: Contract) -> Tensor:
    return hard_envelope(companions(rows), Roundoffs.of(contract, rows))


def reweighted(case: Case, weigh: Callable[[Tensor], Tensor]) -> Answer:
    """The oracle's answer with the normalised weights, ``[n, h, S]``, changed by ``weigh``; the lse stays right."""
    out, lse = true_answer(case)
    for rows in rows_of(case):
        logits = rows.softmax_scale * torch.einsum("nhd,shd->nhs", rows.q, rows.k)
        hidden = torch.arange(len(rows.k)) > rows.last_key[:, None]
        weights = torch.softmax(logits.masked_fill(hidden[:, None], -math.inf), dim=-1)
        out[rows.tokens] = torch.einsum("nhs,shd->nhd", weigh(weights), rows.v)
    return out, lse


OUTLINE = AttentionOutline(
    num_tokens=3, num_heads=2, d_v=2, empty_rows=torch.tensor([False, True, False]), requests=torch.tensor([0, 0, 1])
)


def clean_answer() -> Answer:
    out, lse = torch.ones(3, 2, 2), torch.ones(3, 2)
    out[1], lse[1] = 0.0, -math.inf
    return out, lse


@pytest.mark.parametrize(
    ("gate", "index", "value"),
    [("G1 out", (2, 1, 0), value) for value in (math.nan, math.inf, -math.inf)]
    + [("G1 lse", (2, 0), value) for value in (math.nan, math.inf, -math.inf)]
    + [("G1 lse", (1, 0), value) for value in (0.0, math.nan, math.inf)]
    + [("G1 out", (1, 1, 1), value) for value in (1e-30, math.nan)],
)
def test_g1_finds_one_value_that_breaks_the_convention(gate: str, index: tuple[int, ...], value: float) -> None:
    out, lse = clean_answer()
    assert [result.ratio for result in nonfinite_gates(out, lse, OUTLINE)] == [0.0, 0.0]
    (out if gate == "G1 out" else lse)[index] = value
    results = {result.gate: result for result in nonfinite_gates(out, lse, OUTLINE)}
    assert failing(results) == {gate}
    found = results[gate]
    assert found.text == f"1 of {12 if gate == 'G1 out' else 6} elements of {gate[3:]}"
    assert found.where is not None
    assert (found.where.token, found.where.head) == index[:2]
    assert found.where.request == OUTLINE.requests[index[0]]
    empty = bool(OUTLINE.empty_rows[index[0]])
    wanted = ("0" if gate == "G1 out" else "-inf") if empty else "finite"
    assert str(found.where).endswith(f"got {value:.6g}, must be {wanted}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [attention_case, mla_case])
def test_g3_finds_one_ulp_in_a_one_hot_row(make: Callable[..., Case], dtype: str) -> None:
    case = make("exact-one-hot", dtype)
    out, lse = stored(true_answer(case), case)
    assert failing(gates_of(case, (out, lse))) == set()
    ulp_off(out, (7, 1, 2))
    gates = gates_of(case, (out, lse))
    assert failing(gates) == {"G3 exact"}
    where = gates["G3 exact"].where
    assert where is not None
    assert (where.token, where.head, where.dim) == (7, 1, 2)


def exact_rows(case: Case) -> list[int]:
    """Visible keys of the rows of a uniform case that hold an exact element."""
    (rows,) = rows_of(case)
    u = Roundoffs.of(operation_of(case).default_contract(case), rows)
    exact = exact_elements(companions(rows), rows, u, torch.bfloat16, case.family)
    return (rows.last_key + 1)[exact.flatten(1).any(1)].tolist()


def test_g3_finds_one_ulp_in_a_uniform_row_of_a_power_of_two_of_keys() -> None:
    case = attention_case("exact-uniform", "bfloat16", query_lens=[32], key_lens=[32])
    assert 32 in exact_rows(case)
    assert set(exact_rows(case)) <= {1, 2, 4, 8, 16, 32}
    # the mean of 32 alternating values is 5, and that of 31 is not exact
    for token, expected in ((30, set()), (31, {"G3 exact"})):
        answer = stored(true_answer(case), case)
        assert failing(gates_of(case, answer)) == set()
        ulp_off(answer[0], (token, 0, 1))
        assert failing(gates_of(case, answer)) == expected


def test_g3_judges_every_uniform_row_of_a_power_of_two_of_keys() -> None:
    case = attention_case("exact-uniform", "bfloat16", query_lens=[32], key_lens=[32])
    assert exact_rows(case) == [1, 2, 4, 8, 16, 32]


def test_g3_judges_rows_whose_parts_are_all_powers_of_two() -> None:
    case = mla_case("exact-uniform", "bfloat16", query_lens=[32], context_lens=[64], history_chunk_size=16)
    (rows,) = rows_of(case)
    assert rows.split_ends == (16, 32, 64)
    # 16 and 16 of history, then 1 to 32 own tokens
    assert exact_rows(case) == [64]


def test_no_float32_element_of_a_uniform_row_is_compared_beyond_bfloat16() -> None:
    case = attention_case("exact-uniform", query_lens=[16], key_lens=[16])
    out, lse = stored(true_answer(case), case)
    noise = out * (1 + 2.0**-22)
    assert gates_of(case, (noise, lse))["G3 exact"].passed
    assert not gates_of(case, (out * (1 + 2.0**-6), lse))["G3 exact"].passed


@pytest.mark.parametrize("make", [attention_case, mla_case])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_g4_finds_one_element_beyond_its_bound(make: Callable[..., Case], dtype: str) -> None:
    case = make("peaked", dtype)
    contract = operation_of(case).default_contract(case)
    rows = rows_of(case)[0]
    c = companions(rows)
    # where few keys share the weight G5 does not judge, and an element near 0 does not change the scale
    candidates = torch.where((c.n_eff < 4)[..., None] & (c.visible > 1)[..., None], c.out.abs(), math.inf)
    index = [int(i) for i in torch.unravel_index(candidates.argmin(), candidates.shape)]
    bound = envelope_of(rows, contract)[tuple(index)]
    for factor, expected in ((0.5, set()), (2.0, {"G4 envelope"})):
        out, lse = true_answer(case)
        out[rows.tokens[index[0]], rows.heads[index[1]], index[2]] += factor * bound
        gates = gates_of(case, stored((out, lse), case))
        assert failing(gates) == expected
    where = gates["G4 envelope"].where
    assert where is not None
    place = (int(rows.tokens[index[0]]), int(rows.heads[index[1]]), index[2])
    assert (where.token, where.head, where.dim) == place


def one_key(dtype: str) -> tuple[Case, Rows]:
    case = attention_case(dtype=dtype, query_lens=[1], key_lens=[1])
    return case, rows_of(case)[0]


def test_the_envelope_of_one_key_is_that_of_its_roundings() -> None:
    case, rows = one_key("bfloat16")
    single = default_contract("bfloat16", projected=False, splits=False)
    magnitude = rows.v[0].abs()
    # weights may be divided by exp(lse), the lse being rounded first
    normaliser = 2 * 2.0**-24 * companions(rows).lse[0].abs()[:, None]
    base = (U + U + 2.0**-22 + 4 * 2.0**-24 + normaliser) * magnitude + 2.0**-133
    torch.testing.assert_close(envelope_of(rows, single)[0], base, rtol=1e-12, atol=0.0)
    # a weight that is divided by itself does not err, however it was rounded
    rounded = envelope_of(rows, single.promising(l="from_p"))[0]
    torch.testing.assert_close(rounded, base - U * magnitude, rtol=1e-12, atol=0.0)
    # half-precision weights may vanish below 2^-25
    halves = envelope_of(rows, Contract(p="fp16", out="fp16"))[0]
    relative, vanished = 2 * 2.0**-11 + 2.0**-22 + 4 * 2.0**-24 + normaliser, 2.0**-25 * rows.v.abs().amax((0, 2))
    expected = relative * magnitude + vanished[:, None] + 2.0**-24
    torch.testing.assert_close(halves, expected, rtol=1e-12, atol=0.0)
    assert case.dtype == "bfloat16"


def test_the_envelope_of_two_keys_holds_the_logit_error_times_the_spread() -> None:
    rows = rows_of(attention_case(query_lens=[1], key_lens=[2], causal=False))[0]
    contract = default_contract("float32", projected=False, splits=False)
    c, u = companions(rows), 2.0**-24
    eta = 4 * math.sqrt(24) * u * c.products + u * c.logit_max + 4 * u * c.logit_range
    weights = u + 2.0**-22 + 4 * math.sqrt(2) * u + 2 * u * c.lse.abs()[..., None]
    expected = u * c.out.abs() + weights * c.magnitude
    # to first order eta C: half of what the logits' largest factors are apart
    moved = torch.expm1(2 * eta)[..., None] / 2 * c.spread
    torch.testing.assert_close(moved, eta[..., None] * c.spread, rtol=1e-4, atol=0.0)
    expected = expected + moved + 2.0**-149
    torch.testing.assert_close(envelope_of(rows, contract), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("times", "expected"), [(1.0, set()), (2.0, {"G5 row rms", "G5 median rms"})])
def test_g5_finds_weights_of_half_the_promised_precision(times: float, expected: set[str]) -> None:
    case = attention_case("diffuse", "bfloat16", **WIDE)
    source = torch.Generator().manual_seed(3)

    def rounded(weights: Tensor) -> Tensor:
        return weights * (1 + times * U * (2 * torch.rand(weights.shape, generator=source, dtype=torch.float64) - 1))

    gates = gates_of(case, reweighted(case, rounded), Contract(p="bf16", out="fp32"))
    assert failing(gates) == expected
    # it is the noise that is measured: its size over that of the contract
    measured = float(gates["G5 median rms"].text.split()[1])
    assert measured == pytest.approx(times, rel=0.1)


def test_the_variance_of_a_row_is_the_sum_of_its_roundings() -> None:
    case = mla_case(dtype="bfloat16")
    rows = rows_of(case)[0]
    contract = operation_of(case).default_contract(case).promising(l="from_p", logits="bf16")
    c, single, projection = companions(rows), 2.0**-24, 2.0**-24 * math.sqrt(32)
    found = Variances.of(c, Roundoffs.of(contract, rows))
    # out, values and partial results are rounded element by element; sums are in float32
    element = U**2 * (c.out.square() + c.power + c.split_power)
    element = element + single**2 * c.sum_power + projection**2 * c.value_terms_power
    torch.testing.assert_close(found.element, element / 3, rtol=1e-12, atol=0.0)
    # a denominator of rounded weights cancels what all of them have in common
    weight = U**2 * c.weight_spread + 2.0**-44 * c.power
    torch.testing.assert_close(found.weight, weight / 3, rtol=1e-12, atol=0.0)
    key = U**2 * (c.key_spread + c.logit_spread) + projection**2 * c.key_terms_spread
    # four parts are merged, with weights from float32 exponentials
    merge = (2 * math.sqrt(4) * single * (1 + c.lse.abs()))[..., None].square() * c.split_spread
    torch.testing.assert_close(found.key, key / 3 + single**2 * c.fp32_spread + merge, rtol=1e-12, atol=0.0)
    row = (2 * single * c.lse.abs()[..., None] * c.out).square()
    torch.testing.assert_close(found.row, row / 3, rtol=1e-12, atol=0.0)
    total = (found.element + found.weight + found.key + found.row).sum(-1)
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=0.0)
    # nothing is absorbed, and operands are taken as they are
    assert float(found.latent.abs().max()) == float(found.query.abs().max()) == 0.0


def test_the_limit_of_a_row_is_the_tail_of_its_chi_square() -> None:
    tail = 0.5 * math.erfc(RMS_TAIL / math.sqrt(2))
    for freedom in (1.0, 4.0, 8.0, 40.0, 500.0):
        half = torch.tensor(freedom / 2, dtype=torch.float64)
        roots = torch.linspace(0.5, 8, 75_001, dtype=torch.float64)
        beyond = torch.special.gammaincc(half.expand_as(roots), roots.square() * half)
        exact = float(roots[beyond < tail][0])
        assert 0.99 < float(chi_limit(2 * half)) / exact < 1.15


def test_g6_finds_an_lse_in_base_two_and_one_without_the_scale() -> None:
    for make in (attention_case, mla_case):
        case = make("diffuse", "bfloat16")
        out, lse = stored(true_answer(case), case)
        for wrong in (lse / math.log(2), lse + math.log(case.sizes["softmax_scale"]), -lse):
            gates = gates_of(case, (out, wrong))
            assert failing(gates) == {"G6 lse"}


def test_the_limit_of_the_lse_of_one_key_is_that_of_its_logit() -> None:
    case, rows = one_key("float32")
    c, u = companions(rows), Roundoffs.of(operation_of(case).default_contract(case), rows)
    unit = 2.0**-24
    hard = 4 * math.sqrt(24) * unit * c.products + unit * c.logit_max
    alike = 4 * unit * (c.logit_max + c.lse_fp32)
    # one logit is always as near to the others as its spacing
    each = 5 * unit * (c.logit_max.square() / 3 + c.lse_fp32.square()).sqrt() + unit * c.logit_max
    expected = torch.minimum(hard, torch.minimum(alike, each)) + 2 * unit * c.lse.abs() + 4 * unit + 2.0**-22
    torch.testing.assert_close(lse_limit(c, u), expected, rtol=1e-12, atol=0.0)


def test_the_lse_of_many_keys_is_held_to_less_than_that_of_one() -> None:
    case = mla_case(dtype="bfloat16", query_lens=[1], context_lens=[300])
    rows = rows_of(case)[0]
    c = companions(rows)
    u = Roundoffs.of(operation_of(case).default_contract(case), rows)
    # keys are rounded one by one: errors of logits average out over them
    each = 5 * U / math.sqrt(3) * c.lse_key_power.sqrt()
    torch.testing.assert_close(lse_limit(c, u), each, rtol=0.02, atol=0.0)
    assert bool((c.n_eff > 50).all())
    assert bool((lse_limit(c, u) < 0.2 * U / math.sqrt(3) * 4 * c.lse_key).all())
    # one key of 300 is missing from the denominator
    out, lse = stored(true_answer(case), case)
    assert failing(gates_of(case, (out, lse))) == set()
    lost = torch.log1p(torch.full_like(lse, -1 / 300))
    assert failing(gates_of(case, (out, lse + lost))) == {"G6 lse"}
    assert bool((lost.abs() < 4 * U / math.sqrt(3) * c.lse_key).all())


def test_a_value_that_is_no_number_fails_every_gate_that_meets_it() -> None:
    case = attention_case("diffuse", "bfloat16")
    out, lse = stored(true_answer(case), case)
    out[3, 1, 4] = math.nan
    assert failing(gates_of(case, (out, lse))) >= {
        "G4 envelope",
        "G5 row rms",
        "G6 row scale",
        "G6 pooled scale by all",
    }
    out, lse = stored(true_answer(case), case)
    lse[3, 1] = math.nan
    assert failing(gates_of(case, (out, lse))) == {"G6 lse"}
