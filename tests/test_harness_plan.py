"""Options become a frozen list of cases, or a usage error that says what must be."""

from pathlib import Path
from typing import Any

import pytest
from builders import attention_case, mla_case

from assay.harness import operations
from assay.harness.case import Case, plan_digest
from assay.harness.families import FAMILIES
from assay.harness.operation import CaseRequest, Operation
from assay.harness.plan import DTYPES, Selection, UsageError, describe, plan_cases

BOTH = [operations.load("attention"), operations.load("mla_prefill")]

SHAPES = """
[[case]]
op = "attention"
family = "peaked"
softmax_scale = 0.1
layout = "packed"
causal = false
num_heads = 2
num_kv_heads = 2
d_qk = 8
d_v = 4
query_lens = [3]
key_lens = [9]
"""


def planned(selection: Selection | None = None, chosen: list[Operation] | None = None, **request: Any) -> list[Case]:
    usual: dict[str, Any] = {"tier": "smoke", "seed": 0, "dtypes": DTYPES}
    asked = CaseRequest(**usual | request)
    return plan_cases(BOTH if chosen is None else chosen, asked, selection or Selection())


def distinct_sizes(cases: list[Case], *names: str) -> set[tuple[int, ...]]:
    return {tuple(case.sizes[name] for name in names) for case in cases}


def shapes_file(tmp_path: Path, text: str) -> Selection:
    (tmp_path / "shapes.toml").write_text(text)
    return Selection(shapes=tmp_path / "shapes.toml")


def test_every_operation_family_and_dtype_is_in_the_smoke_tier() -> None:
    drawn = {(case.op, case.family, case.dtype) for case in planned()}
    assert {(op, family, dtype) for op in operations.NAMES for family in FAMILIES for dtype in DTYPES} <= drawn
    assert ("mla_prefill", "captured", "bfloat16") in drawn
    assert not any(case.needs_device for case in planned())


def test_the_full_tier_holds_larger_cases_some_for_a_device_only() -> None:
    smoke, full = planned(), planned(tier="full")
    assert len(full) > 2 * len(smoke)
    assert any(case.needs_device for case in full)
    assert {case.op for case in full if not case.needs_device} == set(operations.NAMES)


def test_the_scale_is_never_the_default_one() -> None:
    for case in planned(tier="full"):
        sizes = case.sizes
        width = sizes["d_qk"] if case.op == "attention" else sizes["d_nope"] + sizes["d_rope"]
        if case.family != "captured":
            assert abs(sizes["softmax_scale"] * width**0.5 - 1) > 0.1


def test_a_dtype_a_geometry_and_heads_are_taken() -> None:
    cases = planned(chosen=[BOTH[1]], dtypes=("float16",), geometry=(40, 12, 4, 20), heads=5)
    assert {case.dtype for case in cases} == {"float16"}
    assert distinct_sizes(cases, "kv_lora_rank", "d_nope", "d_rope", "d_v", "num_heads") == {(40, 12, 4, 20, 5)}
    cases = planned(chosen=[BOTH[0]], geometry=(20, 12), heads=3)
    assert distinct_sizes(cases, "d_qk", "d_v", "num_heads", "num_kv_heads") == {(20, 12, 3, 3)}


def test_a_family_and_a_case_are_selected() -> None:
    whole = planned()
    assert planned(Selection(family="ramp-v")) == [case for case in whole if case.family == "ramp-v"]
    wanted = whole[7]
    assert planned(Selection(case_id=wanted.id)) == [wanted]
    assert planned(Selection(case_id=wanted.id[-8:])) == [wanted]


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        (Selection(family="gaussian"), "--family must be one of .*diffuse.*, got 'gaussian'"),
        (Selection(case_id="00000000"), "--case must be the id of a case of tier smoke and seed 0, got '00000000'"),
        (Selection(shapes=Path("nowhere.toml")), "--shapes must be a TOML file, got nowhere.toml"),
    ],
)
def test_what_selects_nothing_is_a_usage_error(selection: Selection, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        planned(selection)


def test_a_shapes_file_replaces_the_tier(tmp_path: Path) -> None:
    selection = shapes_file(tmp_path, SHAPES + SHAPES.replace("[9]", "[7]").replace('family = "peaked"\n', ""))
    cases = planned(selection, seed=11, dtypes=("float32", "bfloat16"))
    assert [(case.dtype, case.sizes["key_lens"], case.family) for case in cases] == [
        ("float32", [9], "peaked"),
        ("bfloat16", [9], "peaked"),
        ("float32", [7], "diffuse"),
        ("bfloat16", [7], "diffuse"),
    ]
    assert {case.seed for case in cases} == {11}
    assert set(cases[0].sizes) == set(attention_case().sizes)
    assert planned(Selection(shapes=selection.shapes, family="diffuse")) == planned(selection)[3:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SHAPES + "wide = 3\n", "must have the sizes .*; missing none, unknown wide"),
        (SHAPES.replace("d_v = 4\n", ""), "missing d_v, unknown none"),
        (SHAPES.replace("d_v = 4", "d_v ="), "--shapes must be valid TOML, got .*shapes.toml"),
        ("", "must leave at least one case"),
    ],
)
def test_a_shapes_file_that_is_not_understood_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(shapes_file(tmp_path, text))


@pytest.mark.parametrize(
    "text", [SHAPES + SHAPES.replace('"attention"', '"atention"'), SHAPES.replace("[[case]]", "[case]")]
)
def test_no_table_of_a_shapes_file_is_dropped(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        planned(shapes_file(tmp_path, text))


def test_options_that_a_shapes_file_overrides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        planned(shapes_file(tmp_path, SHAPES), chosen=[BOTH[0]], geometry=(20, 12), heads=3)


def test_the_plan_is_described_by_count_and_digest() -> None:
    cases = [attention_case(), mla_case()]
    assert describe(cases) == f"2 cases, plan {plan_digest(cases)}"
