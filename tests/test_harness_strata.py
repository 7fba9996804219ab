"""The scale statistic finds a bias that no element shows, in the stratum where it lies, and knows shared errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import (
    Style,
    attention_case,
    emulated,
    failing,
    gates_of,
    mla_case,
    operation_of,
    rows_of,
    stored,
    true_answer,
)
from torch import Tensor

from assay.harness.case import Case
from assay.harness.companions import companions
from assay.harness.contract import Contract, default_contract
from assay.harness.gates import SCALE_ROW_SIGMAS, Roundoffs, judge
from assay.harness.record import GateResult
from assay.harness.strata import POOLED_SIGMAS, ScaleRows, pooled_scale

POOLED = {f"G6 pooled scale by {kind}" for kind in ("all", "head", "request", "position", "last tile", "last queries")}
MARGIN = 2.0**-8 / 256
BF16 = Contract(p="bf16", out="bf16")


def mean_of(gate: GateResult) -> float:
    """The pooled scale error that a gate reports."""
    return float(gate.text.partition("mean scale error ")[2].partition(",")[0])


def limit_of(gate: GateResult) -> float:
    return float(gate.text.partition("limit ")[2].partition(",")[0])


def test_g6_finds_a_scale_that_elements_and_rows_do_not_show() -> None:
    case = attention_case("diffuse", "bfloat16", query_lens=[128], key_lens=[128], d_v=32)
    out, lse = emulated(case, Style())
    assert failing(gates_of(case, (out, lse))) == set()
    exact, _ = true_answer(case)
    gates = gates_of(case, stored((1.004 * exact, lse), case))
    assert failing(gates)
    assert failing(gates) <= POOLED
    assert gates["G6 pooled scale by all"].ratio > 1.5
    assert mean_of(gates["G6 pooled scale by all"]) == pytest.approx(0.004, rel=0.1)


def test_g6_finds_a_padding_key_in_the_denominator() -> None:
    case = attention_case("diffuse", "bfloat16", query_lens=[64], key_lens=[300], d_v=32)
    _, lse = true_answer(case)
    # one more key of logit 0, without a value
    surplus = torch.exp(-lse)[..., None]
    out, _ = true_answer(case)
    gates = gates_of(case, stored((out / (1 + surplus), lse), case))
    assert failing(gates)
    assert failing(gates) <= POOLED


def test_g6_finds_a_bias_of_the_last_tile_alone() -> None:
    case = attention_case("diffuse", "bfloat16", query_lens=[512], key_lens=[512], d_v=32, num_heads=4)
    out, lse = true_answer(case)
    out[-64:] *= 1.0006
    gates = gates_of(case, stored((out, lse), case))
    assert failing(gates) == {"G6 pooled scale by last tile", "G6 pooled scale by last queries"}
    found = gates["G6 pooled scale by last tile"]
    assert found.text.startswith("last tile 1: ")
    assert mean_of(found) == pytest.approx(0.0006, rel=0.2)
    assert found.where is not None
    assert found.where.token is not None
    assert found.where.token >= 448


def scale_rows(alpha: list[float], *, heads: list[int] | None = None, **given: Any) -> ScaleRows:
    """Rows with unit variance, all independent, unless told otherwise."""
    count = len(alpha)

    def column(name: str, default: float) -> Tensor:
        return torch.tensor(given.get(name, [default] * count), dtype=torch.float64)

    def labels(name: str) -> Tensor:
        return torch.tensor(given.get(name, [0] * count))

    return ScaleRows(
        alpha=torch.tensor(alpha, dtype=torch.float64),
        independent=column("independent", 1.0),
        shared=column("shared", 0.0),
        drift=column("drift", 0.0),
        rounding=column("rounding", 0.0),
        used=torch.tensor(given.get("used", [True] * count)),
        labels={
            "head": torch.tensor(heads or [0] * count),
            "request": labels("request"),
            "position": labels("position"),
            "last tile": labels("last_tile"),
            "last queries": labels("last_queries"),
        },
        tokens=torch.arange(count),
    )


def pooled(*blocks: ScaleRows) -> dict[str, GateResult]:
    return {gate.gate.removeprefix("G6 pooled scale by "): gate for gate in pooled_scale(list(blocks), BF16)}


def test_independent_errors_average_out() -> None:
    gate = pooled(scale_rows([1.0] * 16))["all"]
    assert mean_of(gate) == pytest.approx(1.0)
    assert limit_of(gate) == pytest.approx(POOLED_SIGMAS / 4 + MARGIN, rel=1e-2)
    assert gate.ratio == pytest.approx(1 / (POOLED_SIGMAS / 4 + MARGIN))


def test_rows_count_by_the_inverse_of_their_variance() -> None:
    gate = pooled(scale_rows([1.0, 4.0], independent=[1.0, 3.0]))["all"]
    assert mean_of(gate) == pytest.approx(0.75 * 1.0 + 0.25 * 4.0)
    assert gate.ratio == pytest.approx(1.75 / (POOLED_SIGMAS * math.sqrt(1 / (1 + 1 / 3)) + MARGIN))


def test_errors_shared_by_a_head_of_a_request_do_not_average_out_within_it() -> None:
    same = scale_rows([1.0] * 4, independent=[0.0] * 4, shared=[1.0] * 4)
    apart = scale_rows([1.0] * 4, independent=[0.0] * 4, shared=[1.0] * 4, heads=[0, 1, 0, 1], request=[0, 0, 1, 1])
    assert pooled(same)["all"].ratio == pytest.approx(1 / (POOLED_SIGMAS + MARGIN))
    assert pooled(apart)["all"].ratio == pytest.approx(1 / (POOLED_SIGMAS / 2 + MARGIN))


def test_drift_is_allowed_in_full() -> None:
    gate = pooled(scale_rows([1.0] * 4, drift=[0.5] * 4))["all"]
    assert gate.ratio == pytest.approx(1 / (POOLED_SIGMAS / 2 + 4 * 0.5 + MARGIN))
    rows = scale_rows([6.0, -3.0], drift=[0.5, 0.5])
    assert rows.ratio(7.0).tolist() == pytest.approx([6 / 9, 3 / 9])


def test_the_margin_is_what_rounding_leaves_of_a_bias() -> None:
    """Of weights over several binades, as diffuse logits give them, e4m3 loses a sixth of ``u^2``."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(20000, 300, generator=generator).exp()
    weights = weights / weights.amax(1, keepdim=True)
    lost = 1 - weights.to(torch.float8_e4m3fn).double().sum() / weights.double().sum()
    unit = 2.0**-4
    assert float(lost) == pytest.approx(unit**2 / 6, rel=0.1)
    still = scale_rows([float(-lost)] * 4, independent=[0.0] * 4)
    for p, within in (("e4m3", True), ("bf16", False)):
        gates = pooled_scale([still], BF16.promising(p=p))
        assert all(gate.passed == within for gate in gates)
        limit = unit**2 / 5 if within else MARGIN
        assert limit_of(gates[0]) == pytest.approx(limit, rel=1e-2)


def test_what_rounding_does_is_allowed_in_its_own_direction() -> None:
    limit = POOLED_SIGMAS / 2 + MARGIN
    biased = [0.5] * 4
    assert pooled(scale_rows([2.0] * 4, rounding=biased))["all"].ratio == pytest.approx(2 / (limit + 0.5))
    assert pooled(scale_rows([-2.0] * 4, rounding=biased))["all"].ratio == pytest.approx(2 / limit)
    assert pooled(scale_rows([-2.0] * 4, rounding=[-0.5] * 4))["all"].ratio == pytest.approx(2 / (limit + 0.5))
    rows = scale_rows([6.0, -6.0], rounding=[0.5, 0.5])
    assert rows.ratio(7.0).tolist() == pytest.approx([6 / 7.5, 6 / 7])


def test_the_rounded_oracle_is_right_where_one_key_holds_the_weight() -> None:
    """Outputs next to the value of one key are rounded to it in every row: a bias, and no fault."""
    sizes: dict[str, Any] = {"query_lens": [64], "key_lens": [64], "d_v": 512, "num_heads": 4, "num_kv_heads": 4}
    (rows,) = rows_of(attention_case("peaked", "bfloat16", **sizes))
    rows = replace(rows, q=2 * rows.q)
    c, contract = companions(rows), BF16.promising(l="from_p")
    answer = c.out.bfloat16(), c.lse.float()
    assert all(gate.passed for gate in judge(*answer, [rows], contract=contract, family="peaked").results())
    u = Roundoffs.of(contract, rows)
    scale = ScaleRows.of(c, u, rows, answer[0].double())
    assert float(scale.rounding.mean()) == pytest.approx(float(scale.alpha.mean()), rel=1e-3)
    noise = replace(scale, rounding=torch.zeros_like(scale.rounding))
    assert pooled(noise)["all"].ratio > 1
    assert float(noise.ratio(SCALE_ROW_SIGMAS).max()) > 1
    # a kernel as far off to the other side has no such excuse
    other = ScaleRows.of(c, u, rows, 2 * c.out - answer[0].double())
    assert pooled(other)["all"].ratio > 1


def test_each_kind_reports_its_worst_stratum_and_the_worst_row_of_it() -> None:
    rows = scale_rows(
        [0.1, 0.1, -5.0, -7.0], heads=[0, 0, 3, 3], request=[0, 1, 0, 1], position=[4, 5, 4, 5], last_tile=[0, 0, 0, 1]
    )
    gates = pooled(rows)
    assert gates["head"].text.startswith("head 3: mean scale error -6")
    assert gates["head"].where is not None
    assert (gates["head"].where.head, gates["head"].where.token) == (3, 3)
    assert gates["request"].text.startswith("request 1: ")
    assert gates["request"].where is not None
    assert (gates["request"].where.request, gates["request"].where.token) == (1, 3)
    assert gates["last tile"].text.startswith("last tile 1: mean scale error -7")
    assert gates["position"].text.startswith("position 5: ")


def test_rows_without_a_scale_are_left_out() -> None:
    rows = scale_rows([0.5, math.nan], used=[True, False])
    assert pooled(rows)["all"].text.endswith("1 rows")
    assert rows.ratio(7.0).tolist() == pytest.approx([0.5 / 7, 0.0])
    assert pooled(scale_rows([1.0], used=[False])) == {}
    assert pooled() == {}


def test_a_scale_that_is_no_number_is_beyond_every_limit() -> None:
    gates = pooled(scale_rows([0.5, math.nan]))
    assert {gate.ratio for gate in gates.values()} == {math.inf}


def test_blocks_are_pooled_together() -> None:
    one, two = scale_rows([1.0] * 8), scale_rows([1.0] * 8)
    assert pooled(one, two)["all"].ratio == pooled(scale_rows([1.0] * 16))["all"].ratio


def test_the_statistics_of_a_block_are_those_of_its_rows() -> None:
    case = attention_case(dtype="bfloat16", query_lens=[80], key_lens=[90])
    (rows,) = rows_of(case)
    out, _ = true_answer(case)
    c, contract = companions(rows), default_contract("bfloat16", projected=False, splits=False)
    u = Roundoffs.of(contract, rows)
    scale = ScaleRows.of(c, u, rows, 1.01 * out)
    torch.testing.assert_close(scale.alpha, torch.full_like(scale.alpha, 0.01), rtol=1e-9, atol=0)
    unit = 2.0**-8
    sums = 2.0**-48 * (c.scale_sum + c.scale_logits)
    expected = ((unit**2 + u.ex2**2) * c.scale_p + unit**2 * c.scale_out + sums) / 3
    expected = expected + 2.0**-48 * c.scale_fp32
    torch.testing.assert_close(scale.independent, expected.flatten(), rtol=1e-9, atol=0)
    # nothing is projected, so that no row shares an error
    assert float(scale.shared.abs().max()) == 0.0
    assert scale.labels["head"].tolist() == [0, 1] * 80
    assert scale.labels["position"].tolist() == [int(math.log2(11 + i // 2)) for i in range(160)]
    # 90 keys: the second tile of 64 starts at key 64, which query 54 is the first to see
    assert scale.labels["last tile"].tolist() == [int(i // 2 >= 54) for i in range(160)]
    assert scale.labels["last queries"].tolist() == [int(i // 2 >= 16) for i in range(160)]
    assert scale.tokens.tolist() == [i // 2 for i in range(160)]


def labels_of(case: Case, kept: slice = slice(None)) -> dict[str, Tensor]:
    """The strata of the rows of the first head, of some queries only."""
    (rows,) = rows_of(case)
    rows = replace(
        rows,
        tokens=rows.tokens[kept],
        positions=rows.positions[kept],
        q=rows.q[kept],
        last_key=rows.last_key[kept],
    )
    c, (out, _) = companions(rows), true_answer(case)
    u = Roundoffs.of(operation_of(case).default_contract(case), rows)
    scale = ScaleRows.of(c, u, rows, out[rows.tokens])
    return {name: label.view(len(rows.tokens), -1)[:, 0] for name, label in scale.labels.items()}


def test_the_last_tile_is_that_of_the_keys_whichever_rows_are_judged() -> None:
    case = attention_case(query_lens=[100], key_lens=[200])
    # keys 192 to 199; the first queries do not see that far
    assert labels_of(case)["last tile"].tolist() == [0] * 92 + [1] * 8
    assert labels_of(case, slice(0, 40))["last tile"].tolist() == [0] * 40
    # a last tile that is full
    full = attention_case(query_lens=[100], key_lens=[192])
    assert labels_of(full)["last tile"].tolist() == [0] * 36 + [1] * 64
    # without causality every query sees the last tile, and the last queries have a stratum of their own
    whole = attention_case(query_lens=[100], key_lens=[200], causal=False)
    assert labels_of(whole)["last tile"].tolist() == [1] * 100
    assert labels_of(whole)["last queries"].tolist() == [0] * 36 + [1] * 64


def test_g6_finds_a_bias_of_the_last_queries_alone() -> None:
    case = attention_case("diffuse", "bfloat16", query_lens=[512], key_lens=[256], causal=False, d_v=32, num_heads=4)
    out, lse = true_answer(case)
    out[-64:] *= 1.0006
    gates = gates_of(case, stored((out, lse), case))
    assert failing(gates) == {"G6 pooled scale by last queries"}
    assert gates["G6 pooled scale by last queries"].text.startswith("last queries 1: ")


def test_a_bias_is_seen_beside_an_accumulator_of_half_precision() -> None:
    """Sums that round to nearest err in no direction, so their format is no excuse for one."""
    case = attention_case("constant-v", "bfloat16", query_lens=[128], key_lens=[128], d_v=32)
    contract = operation_of(case).default_contract(case).promising(pv_acc="bf16")
    out, lse = true_answer(case)
    assert failing(gates_of(case, stored((out, lse), case), contract)) == set()
    gates = gates_of(case, stored((1.02 * out, lse), case), contract)
    assert failing(gates) >= {"G6 pooled scale by all", "G6 pooled scale by last tile"}
    rows = rows_of(case)[0]
    c = companions(rows)
    sums = [
        ScaleRows.of(c, Roundoffs.of(contract.promising(pv_acc=acc), rows), rows, out).drift for acc in ("fp32", "bf16")
    ]
    torch.testing.assert_close(sums[0], sums[1])
    torch.testing.assert_close(sums[0], (2.0**-24 * (c.visible.sqrt() + c.lse.abs() / 2)).flatten())


def test_rounded_projections_are_shared_errors() -> None:
    case = mla_case(dtype="bfloat16")
    rows = rows_of(case)[0]
    out, _ = true_answer(case)
    c = companions(rows)
    u = Roundoffs.of(operation_of(case).default_contract(case), rows)
    scale = ScaleRows.of(c, u, rows, out[rows.tokens])
    unit, projection = 2.0**-8, 2.0**-24 * math.sqrt(32)
    expected = unit**2 * (c.scale_value + c.scale_key)
    expected = expected + projection**2 * (c.scale_value_terms + c.scale_key_terms)
    torch.testing.assert_close(scale.shared, expected.flatten() / 3, rtol=1e-9, atol=0)


def test_a_row_without_keys_has_no_scale() -> None:
    case = attention_case(query_lens=[4], key_lens=[2])
    (rows,) = rows_of(case)
    out, _ = true_answer(case)
    c = companions(rows)
    scale = ScaleRows.of(c, Roundoffs.of(operation_of(case).default_contract(case), rows), rows, out)
    assert scale.used.view(4, 2).all(1).tolist() == [False, False, True, True]
    assert bool(scale.ratio(7.0).isfinite().all())
