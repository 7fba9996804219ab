"""A contract accepts only formats with a known roundoff, and the default one follows from the dtype."""

from typing import Any

import pytest
import torch

from assay.harness.contract import (
    PRECISION_OF_DTYPE,
    SUBNORMAL,
    UNIT_ROUNDOFF,
    Contract,
    default_contract,
)

TORCH = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", TORCH)
def test_roundoff_and_subnormal_are_those_of_the_format(name: str) -> None:
    info = torch.finfo(TORCH[name])
    # rounding to nearest errs by half of the distance between numbers
    assert UNIT_ROUNDOFF[name] == info.eps / 2
    assert SUBNORMAL[name] == info.smallest_normal * info.eps


def test_formats_without_a_store_have_the_roundoff_of_their_mantissa() -> None:
    # 10 bits of mantissa, cut rather than rounded, and 3 bits of mantissa, rounded
    assert UNIT_ROUNDOFF["tf32"] == 2.0**-10
    assert UNIT_ROUNDOFF["e4m3"] == torch.finfo(torch.float8_e4m3fn).eps / 2


@pytest.mark.parametrize("dtype", PRECISION_OF_DTYPE)
def test_the_default_stores_in_the_dtype_of_the_inputs(dtype: str) -> None:
    contract = default_contract(dtype, projected=True, splits=True)
    stored = UNIT_ROUNDOFF[PRECISION_OF_DTYPE[dtype]]
    for name in ("p", "out", "projected", "splits_store"):
        assert contract.roundoff(name) == stored
    sums = 2.0**-53 if dtype == "float64" else 2.0**-24
    for name in ("lse", "qk_acc", "logits", "pv_acc"):
        assert contract.roundoff(name) == sums
    assert (contract.l, contract.deterministic, contract.capturable) == ("exact", True, False)


def test_without_projection_or_merge_nothing_is_rounded_there() -> None:
    contract = default_contract("bfloat16", projected=False, splits=False)
    assert (contract.projected, contract.splits_store) == (None, None)
    assert contract.roundoff("projected") == contract.roundoff("splits_store") == 0.0


def test_a_promise_changes_one_field_and_leaves_the_original() -> None:
    contract = Contract(p="bf16", out="bf16")
    loose = contract.promising(l="from_p", deterministic=False)
    assert (loose.l, loose.deterministic, loose.p) == ("from_p", False, "bf16")
    assert (contract.l, contract.deterministic) == ("exact", True)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("p", "fp8", "p must be one of fp64, fp32, tf32, fp16, bf16, e4m3, got 'fp8'"),
        ("out", None, "out must be one of"),
        ("lse", "float32", "lse must be one of"),
        ("projected", "int8", "projected must be one of"),
        ("l", "rounded", "l must be 'exact' or 'from_p', got 'rounded'"),
    ],
)
def test_an_unknown_format_is_refused_by_name(field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Contract(**({"p": "bf16", "out": "bf16"} | {field: value}))
