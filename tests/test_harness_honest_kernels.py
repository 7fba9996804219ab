"""Kernels that keep their promises in another order of work are never rejected, and those that break one are found."""

from collections.abc import Callable

import pytest
import torch
from builders import (
    STYLES,
    Answer,
    Style,
    arguments_of,
    attention_case,
    emulated,
    emulated_mla,
    failing,
    gates_of,
    honest_attention,
    honest_mla,
    mla_case,
    operation_of,
)
from torch import Tensor

from assay.harness.case import Case
from assay.harness.contract import Contract, default_contract
from assay.harness.families import FAMILIES, RARE_FAMILIES
from assay.reference import attention as oracle
from assay.reference import mla_prefill as mla_oracle


def test_a_bfloat16_accumulator_shows_where_values_rise_over_many_chunks() -> None:
    case = mla_case("ramp-v", "bfloat16", query_lens=[4], context_lens=[324], history_chunk_size=16)
    honest = emulated_mla(case, Style())
    assert failing(gates_of(case, honest)) == set()
    gates = gates_of(case, emulated_mla(case, Style(), merge_dtype=torch.bfloat16))
    assert "G5 row rms" in failing(gates)


@pytest.mark.parametrize("family", ["diffuse", "constant-v"])
def test_weights_in_bfloat16_break_the_promise_of_float32(family: str) -> None:
    half, full = (attention_case(family, dtype) for dtype in ("bfloat16", "float32"))
    out, lse = emulated(half, Style())
    # judged on the same stored inputs, by what each contract allows
    loose = default_contract("bfloat16", projected=False, splits=False)
    assert failing(gates_of(half, (out, lse), loose)) == set()
    assert "G4 envelope" in failing(gates_of(half, (out, lse), loose.promising(p="fp32", out="fp32")))
    assert failing(gates_of(full, emulated(full, Style()))) == set()


def held_to(case: Case, style: Style) -> Contract:
    contract = operation_of(case).default_contract(case)
    return contract.promising(l="from_p") if style.from_p else contract


@pytest.mark.parametrize("make", [attention_case, mla_case])
@pytest.mark.parametrize("family", FAMILIES + RARE_FAMILIES)
def test_no_honest_kernel_is_rejected(make: Callable[..., Case], family: str) -> None:
    rejected = []
    for dtype in ("float32", "float16", "bfloat16"):
        for seed in range(20 if dtype != "float16" else 8):
            case = make(family, dtype, seed=seed)
            style = STYLES[seed % len(STYLES)]
            found = failing(gates_of(case, emulated(case, style), held_to(case, style)))
            rejected += [(dtype, seed, style, found)] if found else []
    assert rejected == []


def by_softmax(case: Case) -> Answer:
    """The oracle in float32 with weights that are divided by their sum."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (oracle, mla_oracle):
            patch.setattr(module, "softmax_with_lse", softmax_with_sum)
        return by_lse(case)


def softmax_with_sum(logits: Tensor, v: Tensor) -> Answer:
    v = v.repeat_interleave(logits.shape[1] // v.shape[1], dim=1)
    return torch.einsum("ths,shd->thd", torch.softmax(logits, dim=-1), v), torch.logsumexp(logits, dim=-1)


def by_lse(case: Case) -> Answer:
    """The oracle in float32 as it is: weights are ``exp(z - lse)``."""
    return (honest_attention if case.op == "attention" else honest_mla)(**arguments_of(case))


@pytest.mark.parametrize("make", [attention_case, mla_case])
@pytest.mark.parametrize("family", FAMILIES + RARE_FAMILIES)
def test_plain_torch_in_float32_is_not_rejected(make: Callable[..., Case], family: str) -> None:
    cases = [make(family, seed=seed) for seed in range(20)]
    assert [case.seed for case in cases if failing(gates_of(case, by_softmax(case)))] == []


@pytest.mark.parametrize("make", [attention_case, mla_case])
@pytest.mark.parametrize("family", ["constant-v", "shifted"])
def test_weights_divided_through_their_lse_are_not_rejected(make: Callable[..., Case], family: str) -> None:
    cases = [make(family, seed=seed) for seed in range(40)]
    assert [case.seed for case in cases if failing(gates_of(case, by_lse(case)))] == []
