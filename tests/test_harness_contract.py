"""A contract accepts only what the gates know, survives its journey, and the default one follows from the dtype."""

import json
import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from assay.harness.contract import (
    BF16X3_ROUNDOFF,
    PRECISION_OF_DTYPE,
    SUBNORMAL,
    UNIT_ROUNDOFF,
    Contract,
    default_contract,
)
from assay.harness.execution import Execution
from assay.harness.messages import decode, encode

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


def test_three_bfloat16_products_have_a_roundoff_of_their_own() -> None:
    # what is left of a number after two bfloat16 ones, of 8 bits each
    assert Contract(p="fp32", out="fp32", qk_acc="bf16x3").roundoff("qk_acc") == BF16X3_ROUNDOFF == 2.0**-8 * 2.0**-8


# every field away from its default
FULL: dict[str, Any] = {
    "p": "e4m3",
    "out": "bf16",
    "lse": "fp64",
    "inputs": "fp16",
    "qk_acc": "bf16x3",
    "logits": "bf16",
    "pv_acc": "fp16",
    "l": "from_p",
    "projected": "bf16",
    "absorbed": True,
    "state": "fp32",
    "state_store": "bf16",
    "splits_store": "fp16",
    "splits": 8,
    "ex2_rel": 2.0**-9,
    "deterministic": False,
    "batch_invariant": True,
    "capturable": True,
    "mutates": ("q", "kv_c"),
    "workspace_bytes": 1 << 20,
}


def test_a_contract_survives_its_way_to_another_process() -> None:
    contract = Contract(**FULL)
    assert {field.name for field in fields(Contract)} == set(FULL)
    assert all(getattr(contract, name) != field.default for name, field in Contract.__dataclass_fields__.items())
    answer = torch.zeros(2, 1, 4), torch.zeros(2, 1)
    content, tensors = encode(Execution(contract=contract, first=answer, last=answer, gates=()))
    found = decode(json.loads(json.dumps(content)), tensors, torch.device("cpu"))
    assert isinstance(found, Execution)
    assert found.contract == contract


def test_formats_are_read_off_by_field() -> None:
    contract = Contract(**FULL)
    places = {"final state": "state", "checkpoints": "state", "out": "out"}
    assert contract.formats(places) == {"final state": "fp32", "checkpoints": "fp32", "out": "bf16"}
    with pytest.raises(ValueError, match=r"the field of update must be one of p, out, .*, got 'ex2_rel'"):
        contract.formats({"update": "ex2_rel"})
    with pytest.raises(ValueError, match="state must be declared for final state, got None"):
        Contract(p="bf16", out="bf16").formats(places)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("p", "fp8", "p must be one of fp64, fp32, tf32, fp16, bf16, e4m3, got 'fp8'"),
        ("p", "bf16x3", "p must be one of fp64, .*, got 'bf16x3'"),
        ("out", None, "out must be one of"),
        ("lse", "float32", "lse must be one of"),
        ("inputs", "float32", "inputs must be one of"),
        ("qk_acc", None, "qk_acc must be one of fp64, fp32, tf32, fp16, bf16, e4m3, bf16x3, got None"),
        ("state", "float32", "state must be one of fp64, .*, got 'float32'"),
        ("projected", "int8", "projected must be one of"),
        ("l", "rounded", "l must be 'exact' or 'from_p', got 'rounded'"),
        ("ex2_rel", 0.0, "ex2_rel must be a float above 0 and at most 2\\^-8, got 0.0"),
        ("ex2_rel", -(2.0**-22), "ex2_rel must be a float above 0"),
        ("ex2_rel", 2.0**-7, "ex2_rel must be a float above 0 and at most 2\\^-8, got 0.0078125"),
        ("ex2_rel", math.inf, "ex2_rel must be .*, got inf"),
        ("ex2_rel", math.nan, "ex2_rel must be .*, got nan"),
        ("ex2_rel", 1, "ex2_rel must be .*, got 1"),
        ("absorbed", True, "projected must name the format of absorbed queries when absorbed is set, got None"),
        ("splits", 4, "splits_store must name the format of the 4 partial results, got None"),
        ("workspace_bytes", -1, "workspace_bytes must be at least 0, got -1"),
    ],
)
def test_what_the_gates_do_not_know_is_refused_by_name(field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Contract(**({"p": "bf16", "out": "bf16"} | {field: value}))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("deterministic", 1, "deterministic must be True or False, got 1"),
        ("batch_invariant", None, "batch_invariant must be True or False, got None"),
        ("capturable", "yes", "capturable must be True or False, got 'yes'"),
        ("absorbed", 1, "absorbed must be True or False, got 1"),
        ("mutates", "q", "mutates must be a tuple of argument names, got 'q'"),
        ("mutates", ("q", 1), "mutates must be a tuple of argument names"),
        ("workspace_bytes", 1.5, "workspace_bytes must be an integer or None, got 1.5"),
        ("workspace_bytes", True, "workspace_bytes must be an integer or None, got True"),
        ("splits", 2.0, "splits must be an integer or None, got 2.0"),
    ],
)
def test_a_promise_of_another_type_is_refused_by_name(field: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Contract(**({"p": "bf16", "out": "bf16", "splits_store": "bf16"} | {field: value}))


def test_a_row_has_at_least_one_partial_result() -> None:
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        Contract(p="bf16", out="bf16", splits_store="bf16", splits=0)


@pytest.mark.parametrize("value", [2.0**-22, 2.0**-8, 5e-324])
def test_any_exponential_of_use_may_be_declared(value: float) -> None:
    assert Contract(p="bf16", out="bf16", ex2_rel=value).ex2_rel == value
