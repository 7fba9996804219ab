"""Each field of a contract gives its kernels what they need, and no more: honest forms pass, coarser ones do not."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from builders import CPU, Answer, attention_case, failing, gates_of, operation_of, rows_of, stored, true_answer
from torch import Tensor

from assay.harness._gates_bounds import (
    Roundoffs,
    hard_envelope,
    logit_error,
    lse_limit,
    reweighted,
    split_power,
    split_spread,
)
from assay.harness.case import Case
from assay.harness.companions import Companions, companions
from assay.harness.contract import Contract, default_contract
from assay.harness.families import FAMILIES
from assay.harness.faults import _attention_variants, _scores, _softmax
from assay.harness.faults._chunked import State, attention_twin, finite_shift, normalised
from assay.harness.faults._softmax import Online, even_tiles
from assay.harness.kernels import wrap_function
from assay.harness.operation import Rows
from assay.harness.plugin import kernel
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case

# a few single keys, a row of a dozen, and more than one tile
SIZES: dict[str, Any] = {"query_lens": [3, 33, 20], "key_lens": [5, 33, 150]}


def case_of(family: str, dtype: str, seed: int) -> Case:
    # whole powers of two, seen whole, have the representable means that the exact gate needs
    uniform = {"query_lens": [4, 32, 20], "key_lens": [4, 32, 128]} if family == "exact-uniform" else {}
    return attention_case(family, dtype, seed=seed, **SIZES | uniform)


def records(function: Callable[..., State], dtype: str, seed: int, **promises: Any) -> Iterator[Record]:
    """Of a kernel with the default contract but for some promises, on a case of each family."""

    def contract(case: Case) -> Contract:
        return default_contract(case.dtype, projected=False, splits=False).promising(**promises)

    declared = kernel(contract=contract, name="form")(lambda **arguments: function(**arguments))
    for at, family in enumerate(FAMILIES):
        case = case_of(family, dtype, seed + at)
        yield run_case(operation_of(case), wrap_function(declared, operation_of(case)), case, CPU)


def rejected(found: Iterable[Record]) -> list[tuple[str, str]]:
    return [(record.case["family"], record.text) for record in found if record.verdict is not Verdict.PASS]


def split_in_bfloat16(operand: Tensor) -> tuple[Tensor, Tensor]:
    high = operand.float().bfloat16().float()
    return high, (operand.float() - high).bfloat16().float()


def three_products(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    (q_high, q_low), (k_high, k_low) = split_in_bfloat16(q), split_in_bfloat16(k)
    pairs = ((q_high, k_low), (q_low, k_high), (q_high, k_high))
    return softmax_scale * torch.stack([torch.einsum("nhd,mhd->nhm", *pair) for pair in pairs]).sum(0)


def with_logits(logits: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., State]:
    return lambda **arguments: attention_twin(arguments, logits=logits)


def with_softmax(softmax: Callable[[Tensor, Tensor], State]) -> Callable[..., State]:
    return lambda **arguments: attention_twin(arguments, softmax=softmax)


def rounding_inputs(dtype: torch.dtype) -> Callable[..., State]:
    def run(**arguments: Any) -> State:
        rounded = {name: arguments[name].to(dtype).to(arguments[name].dtype) for name in "qkv"}
        return attention_twin({**arguments, **rounded})

    return run


def accumulating_in(dtype: torch.dtype) -> Callable[..., State]:
    return with_softmax(Online(tiles=even_tiles(16), keep=lambda mixed, v: mixed.to(dtype).float()))


def e4m3_weights(*, from_p: bool) -> Callable[[Tensor, Tensor], State]:
    def softmax(logits: Tensor, v: Tensor) -> State:
        shift = finite_shift(logits)
        weights = torch.exp(logits - shift)
        rounded = weights.to(torch.float8_e4m3fn).float()
        total = (rounded if from_p else weights).sum(-1, keepdim=True)
        return normalised(torch.einsum("nhm,mhd->nhd", rounded, v.float()), total, shift)

    return softmax


FORMS: dict[str, tuple[Callable[..., State], str, dict[str, Any]]] = {
    "tf32 products": (with_logits(_scores.cut_to_tf32), "float32", {"qk_acc": "tf32"}),
    "three bfloat16 products": (with_logits(three_products), "float32", {"qk_acc": "bf16x3"}),
    "inputs cast to bfloat16": (rounding_inputs(torch.bfloat16), "float32", {"inputs": "bf16"}),
    "inputs cast to float16": (rounding_inputs(torch.float16), "float32", {"inputs": "fp16"}),
    "bfloat16 sums": (accumulating_in(torch.bfloat16), "bfloat16", {"pv_acc": "bf16"}),
    "float16 sums": (accumulating_in(torch.float16), "float16", {"pv_acc": "fp16"}),
    "e4m3 weights": (with_softmax(e4m3_weights(from_p=False)), "bfloat16", {"p": "e4m3"}),
    "e4m3 weights, also summed": (
        with_softmax(e4m3_weights(from_p=True)),
        "float16",
        {"p": "e4m3", "l": "from_p"},
    ),
    "rounded weights, also summed": (with_softmax(_softmax.total_of_rounded), "bfloat16", {"l": "from_p"}),
    "partial results in bfloat16": (
        with_softmax(_attention_variants.stored_in_parts(5)),
        "bfloat16",
        {"splits_store": "bf16", "splits": 5},
    ),
    "any number of partial results": (
        with_softmax(_attention_variants.stored_in_parts(9)),
        "float16",
        {"splits_store": "fp16"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_is_declared_passes(name: str) -> None:
    function, dtype, promises = FORMS[name]
    for seed in (0, 100):
        assert rejected(records(function, dtype, seed, **promises)) == []


@pytest.mark.parametrize(
    ("name", "promises"),
    [
        ("tf32 products", {}),
        ("tf32 products", {"qk_acc": "bf16x3"}),
        ("three bfloat16 products", {}),
        ("inputs cast to bfloat16", {"inputs": "fp16"}),
        ("inputs cast to bfloat16", {"qk_acc": "tf32"}),
        ("inputs cast to float16", {}),
        ("bfloat16 sums", {}),
        ("float16 sums", {}),
        ("e4m3 weights", {}),
        ("e4m3 weights, also summed", {"l": "from_p"}),
        ("rounded weights, also summed", {"p": "fp32"}),
        ("partial results in bfloat16", {}),
    ],
)
def test_the_same_form_under_a_narrower_promise_does_not(name: str, promises: dict[str, Any]) -> None:
    function, dtype, _ = FORMS[name]
    found = itertools.chain.from_iterable(records(function, dtype, seed, **promises) for seed in range(0, 500, 100))
    assert any(record.verdict is Verdict.NUMERIC for record in found)


def bounds(case: Case, **promises: Any) -> tuple[Rows, Companions, Roundoffs]:
    (rows,) = rows_of(case)
    contract = operation_of(case).default_contract(case).promising(**promises)
    return rows, companions(rows), Roundoffs.of(contract, rows)


ONE = attention_case(query_lens=[1], key_lens=[40], causal=False)


@pytest.mark.parametrize(
    ("promises", "factor"),
    [
        ({}, 4 * math.sqrt(24) * 2.0**-24),
        # operands are cut once each, however many products are summed in float32
        ({"qk_acc": "tf32"}, 4 * math.sqrt(24) * 2.0**-24 + 2 * 2.0**-10 + 2.0**-20),
        ({"qk_acc": "bf16x3"}, 4 * math.sqrt(24) * 2.0**-24 + (3 + 2.0**-6) * 2.0**-16),
        ({"inputs": "fp16"}, 4 * math.sqrt(24) * 2.0**-24 + 2 * 2.0**-11 + 2.0**-22),
        ({"qk_acc": "fp16"}, 4 * math.sqrt(24) * 2.0**-11),
    ],
)
def test_the_error_of_a_logit_is_that_of_its_products(promises: dict[str, Any], factor: float) -> None:
    _, c, u = bounds(ONE, **promises)
    rest = 2.0**-24 * (c.logit_max + 4 * c.logit_range)
    found = logit_error(c, u, c.projected_products) - rest
    torch.testing.assert_close(found, factor * c.products, rtol=1e-9, atol=0.0)


def test_the_argument_of_the_exponential_is_in_float32_whatever_sums_the_values() -> None:
    single, half = (logit_error(*bounds(ONE, pv_acc=acc)[1:], torch.zeros(1, 2)) for acc in ("fp32", "bf16"))
    torch.testing.assert_close(single, half)
    one, other = (lse_limit(*bounds(ONE, pv_acc=acc)[1:]) for acc in ("fp32", "bf16"))
    torch.testing.assert_close(one, other)


def test_stored_logits_that_lie_closer_than_their_format_err_alike() -> None:
    """Near -60000 bfloat16 has one number in 256: a row of logits becomes one number, and their sum errs as it does."""

    def independent(c: Companions, u: Roundoffs) -> Tensor:
        return 5 * u.logits * (c.lse_logits_power / 3).sqrt()

    sizes: dict[str, Any] = {"query_lens": [16], "key_lens": [90], "causal": False}
    farthest = 0.0
    for scale in (0.11, 0.13, 0.17, 0.19, 0.23, 0.29):
        rows, c, u = bounds(attention_case("sunken", "bfloat16", softmax_scale=scale, **sizes), logits="bf16")
        logits = rows.softmax_scale * torch.einsum("nhd,shd->nhs", rows.q, rows.k)
        error = (logits.bfloat16().double().logsumexp(-1) - c.lse).abs()
        assert bool((error <= lse_limit(c, u)).all())
        farthest = max(farthest, float((error / independent(c, u)).max()))
    # errors that average out over the keys would be smaller
    assert farthest > 1
    # where logits are spread out they do
    _, c, u = bounds(attention_case("diffuse", "bfloat16", **sizes), logits="bf16")
    assert float((lse_limit(c, u) / independent(c, u)).max()) < 1.1


def test_cut_operands_move_an_output_no_further_than_measured() -> None:
    """The worst of the products' bounds is one in which every product is cut by a full unit: nearly reached."""
    q = torch.full((1, 2, 24), 1 + 2.0**-10 - 2.0**-23)
    worst = (_scores.cut_to_tf32(q, q, 1.0) - torch.einsum("nhd,mhd->nhm", q, q)).abs() / 24
    assert 1.9 * 2.0**-10 < float(worst[0, 0, 0]) < 2 * 2.0**-10 + 2.0**-20 + 1e-6


@pytest.mark.parametrize("eta", [1e-6, 0.01, 0.5, 1.0])
def test_no_choice_of_wrong_logits_moves_an_average_further(eta: float) -> None:
    p, v = torch.tensor([1 - 1e-4, 1e-4], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean = float(p @ v)
    spread = float(p @ (v - mean).abs())
    worst = 0.0
    for signs in ([1, 1], [1, -1], [-1, 1], [-1, -1]):
        weights = p * torch.exp(eta * torch.tensor(signs, dtype=torch.float64))
        worst = max(worst, abs(float(weights @ v / weights.sum()) - mean))
    bound = float(reweighted(torch.tensor(eta, dtype=torch.float64))) * spread
    # one light key among heavy ones reaches it
    assert worst <= bound
    assert worst > 0.99 * bound
    assert bound <= 2 * math.expm1(eta) * spread


def test_a_hopeless_logit_error_is_a_number() -> None:
    found = reweighted(torch.tensor([1.2, 5.0, 1e9], dtype=torch.float64))
    assert found.tolist()[:2] == pytest.approx([2 * math.expm1(1.2), 2 * math.expm1(5.0)])
    assert math.isfinite(found[2])


def test_underflow_of_e4m3_is_relative_to_the_largest_weight() -> None:
    """Each of 256 weights may lose 2^-10 of the largest, which is little beside their sum."""
    case = attention_case("diffuse", "bfloat16", query_lens=[4], key_lens=[256], causal=False)
    rows, c, u = bounds(case, p="e4m3")
    without = bounds(case, p="bf16")
    total = torch.exp(c.lse - _largest_logit(rows))
    torch.testing.assert_close(c.total, total, rtol=1e-9, atol=0.0)
    assert bool((c.total > 14).all())
    found = hard_envelope(c, u) - hard_envelope(without[1], without[2])
    expected = (2.0**-4 - 2.0**-8) * c.magnitude + (256 * 2.0**-10 * c.value_max / c.total)[..., None]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)


def _largest_logit(rows: Rows) -> Tensor:
    return (rows.softmax_scale * torch.einsum("nhd,shd->nhs", rows.q, rows.k)).amax(-1)


def test_an_element_that_e4m3_does_not_explain_is_found() -> None:
    """By a tenth of the largest value, which 256 lost weights of 2^-10 would cover if they were not divided."""
    case = attention_case("diffuse", "bfloat16", query_lens=[4], key_lens=[256], causal=False)
    contract = operation_of(case).default_contract(case).promising(p="e4m3")
    out, lse = true_answer(case)
    assert failing(gates_of(case, stored((out, lse), case), contract)) == set()
    index = out[2, 1].abs().argmin()
    out[2, 1, index] += 0.1 * companions(rows_of(case)[0]).value_max[0, 0]
    gates = gates_of(case, stored((out, lse), case), contract)
    assert "G4 envelope" in failing(gates)
    where = gates["G4 envelope"].where
    assert where is not None
    assert (where.token, where.head, where.dim) == (2, 1, int(index))


def test_rounded_weights_that_are_also_summed_leave_near_constant_values_alone() -> None:
    case = attention_case("constant-v", "bfloat16", query_lens=[4], key_lens=[40], causal=False)
    rows, c, exact = bounds(case)
    _, _, rounded = bounds(case, l="from_p")
    u = 2.0**-8
    found = hard_envelope(c, exact) - hard_envelope(c, rounded)
    expected = u * c.magnitude - u / (1 - u) * c.spread
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
    assert float((expected / (u * c.magnitude)).median()) > 0.95
    # so what the coarser rule let pass is found
    out, lse = true_answer(case)
    contract = operation_of(case).default_contract(case).promising(l="from_p")
    wrong = out + 1.6 * u * c.magnitude * torch.sign(out)
    gates = gates_of(case, stored((wrong, lse), case), contract.promising(out="fp32"))
    assert "G4 envelope" in failing(gates)
    assert rows.request == 0


def random_ends(keys: int, splits: int, generator: torch.Generator) -> list[int]:
    cuts = torch.randperm(keys - 1, generator=generator)[: splits - 1] + 1
    return [0, *sorted(cuts.tolist()), keys]


@pytest.mark.parametrize("family", ["diffuse", "ramp-v", "constant-v", "peaked"])
def test_no_partition_of_the_keys_exceeds_the_bound_on_stored_parts(family: str) -> None:
    case = attention_case(family, query_lens=[2], key_lens=[60], causal=False)
    rows, c, _ = bounds(case)
    generator = torch.Generator().manual_seed(5)
    logits = rows.softmax_scale * torch.einsum("nhd,shd->nhs", rows.q, rows.k)
    weighted = torch.softmax(logits, dim=-1)[..., None] * rows.v.transpose(0, 1)
    around = weighted - torch.softmax(logits, dim=-1)[..., None] * c.out[:, :, None]
    closest = 0.0
    for splits in (1, 2, 3, 7, 30):
        known = bounds(case, splits_store="bf16", splits=splits)[2]
        unknown = bounds(case, splits_store="bf16")[2]
        assert bool((split_power(c, known) <= split_power(c, unknown) + 1e-15).all())
        for _ in range(20):
            ends = random_ends(60, splits, generator)
            parts = torch.stack([weighted[:, :, a:b].sum(2) for a, b in itertools.pairwise(ends)]).square()
            assert bool((parts.sum(0) <= split_power(c, known) * (1 + 1e-9)).all())
            moved = torch.stack([around[:, :, a:b].sum(2) for a, b in itertools.pairwise(ends)]).square()
            assert bool((moved.sum(0) <= split_spread(c, known) * (1 + 1e-9)).all())
            closest = max(closest, float((parts.sum(0) / split_power(c, known)).max()))
    # the bound is not far from what happens
    assert closest > 0.5


def test_the_number_of_parts_is_the_contracts_the_operations_or_unknown() -> None:
    open_ended = attention_case(query_lens=[4], key_lens=[40])
    assert bounds(open_ended)[2].splits == 1
    assert bounds(open_ended)[2].split == 0.0
    unknown = bounds(open_ended, splits_store="bf16")[2]
    assert (unknown.splits, unknown.anywhere, unknown.split) == (None, True, 2.0**-8)
    three = bounds(open_ended, splits_store="bf16", splits=3)[2]
    assert (three.splits, three.anywhere) == (3, True)
    single = bounds(open_ended, splits_store="bf16", splits=1)[2]
    assert (single.splits, single.split) == (1, 0.0)


def test_a_stored_part_is_found_where_the_contract_has_none() -> None:
    """What a merge of three bfloat16 parts adds to the envelope is one rounding of all of them."""
    _, c, none = bounds(ONE)
    _, _, three = bounds(ONE, splits_store="bf16", splits=3)
    merge = 2 * math.sqrt(3) * 2.0**-24 * (1 + c.lse.abs())[..., None]
    expected = 2.0**-8 * c.magnitude + merge * c.spread
    torch.testing.assert_close(hard_envelope(c, three) - hard_envelope(c, none), expected, rtol=1e-9, atol=0.0)


def test_uniform_rows_are_exact_only_where_no_half_precision_mean_may_be_stored() -> None:
    case = attention_case("exact-uniform", "bfloat16", query_lens=[32], key_lens=[32])
    contract = operation_of(case).default_contract(case)
    answer: Answer = stored(true_answer(case), case)
    for place, splits, seen in ((31, "bf16", False), (1, "bf16", True), (31, "fp32", True)):
        out = answer[0].clone()
        out.view(torch.int16)[place, 0, 1] += 1
        gates = gates_of(case, (out, answer[1]), contract.promising(splits_store=splits))
        assert ("G3 exact" in failing(gates)) == seen


def test_uniform_rows_are_exact_only_as_far_as_the_accumulator_counts() -> None:
    case = attention_case("exact-uniform", "bfloat16", query_lens=[64], key_lens=[64])
    contract = operation_of(case).default_contract(case)
    out, lse = stored(true_answer(case), case)
    # 64 keys of up to 7 sum to more than the 256 to which bfloat16 counts
    out.view(torch.int16)[63, 0, 1] += 1
    assert "G3 exact" in failing(gates_of(case, (out, lse), contract))
    assert "G3 exact" in failing(gates_of(case, (out, lse), contract.promising(pv_acc="fp16")))
    assert failing(gates_of(case, (out, lse), contract.promising(pv_acc="bf16"))) == set()
