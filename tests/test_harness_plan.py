"""Options become a frozen list of cases, or a usage error that says what must be."""

import re
from pathlib import Path
from typing import Any

import pytest
from builders import attention_case, mla_case

from assay.harness import operations
from assay.harness.case import Case, plan_digest
from assay.harness.families import FAMILIES
from assay.harness.operation import CaseRequest, Operation
from assay.harness.plan import DTYPES, Selection, UsageError, describe, plan_cases

EVERY = [operations.load(name) for name in operations.NAMES]
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
    cases = planned(chosen=EVERY)
    drawn = {(case.op, case.family, case.dtype) for case in cases}
    dense = ("attention", "mla_prefill")
    assert {(op, family, dtype) for op in dense for family in FAMILIES for dtype in DTYPES} <= drawn
    # the others have families of their own, which share the dtypes among them
    assert {(op, dtype) for op in operations.NAMES for dtype in DTYPES} == {(op, dtype) for op, _, dtype in drawn}
    assert ("mla_prefill", "captured", "bfloat16") in drawn
    assert not any(case.needs_device for case in cases)


def test_the_full_tier_holds_larger_cases_some_for_a_device_only() -> None:
    smoke, full = planned(chosen=EVERY), planned(chosen=EVERY, tier="full")
    assert len(full) > 2 * len(smoke)
    assert any(case.needs_device for case in full)
    assert {case.op for case in full if not case.needs_device} == set(operations.NAMES)


def test_the_scale_is_never_the_default_one() -> None:
    for case in planned(chosen=EVERY, tier="full"):
        sizes = case.sizes
        if "softmax_scale" not in sizes:
            continue
        width = sizes["d_qk"] if "d_qk" in sizes else sizes["d_nope"] + sizes["d_rope"]
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


MLA_SHAPES = """
[[case]]
op = "mla_prefill"
softmax_scale = 0.1
layout = "split"
num_heads = 2
kv_lora_rank = 32
d_nope = 16
d_rope = 8
d_v = 12
query_lens = [3, 1]
context_lens = [9, 1]
history_chunk_size = 16
"""

SENSELESS = {
    "negative": (SHAPES, "d_v = 4", "d_v = -4", "d_v must be an integer of at least 1 and below 2^31, got -4"),
    "no heads": (SHAPES, "num_heads = 2", "num_heads = 0", "num_heads must be an integer of at least 1 .*, got 0"),
    "huge": (SHAPES, "d_qk = 8", "d_qk = 2147483648", "d_qk must be .* below 2^31, got 2147483648"),
    "text": (SHAPES, "d_qk = 8", 'd_qk = "8"', "d_qk must be an integer of .*, got '8'"),
    "fraction": (SHAPES, "d_qk = 8", "d_qk = 8.0", "d_qk must be an integer of .*, got 8.0"),
    "truth": (SHAPES, "num_heads = 2", "num_heads = true", "num_heads must be an integer of .*, got True"),
    "list": (SHAPES, "d_qk = 8", "d_qk = [8]", "d_qk must be an integer of .*, got [8]"),
    "causal": (SHAPES, "causal = false", "causal = 0", "causal must be true or false, got 0"),
    "scale": (SHAPES, "softmax_scale = 0.1", "softmax_scale = 0", "softmax_scale must be a positive number, got 0"),
    "nan": (SHAPES, "softmax_scale = 0.1", "softmax_scale = nan", "softmax_scale must be a positive number, got nan"),
    "endless": (SHAPES, "softmax_scale = 0.1", "softmax_scale = inf", "softmax_scale must be .*, got inf"),
    "layout": (SHAPES, '"packed"', '"heads-first"', "layout must be one of packed, .*, got 'heads-first'"),
    "family": (SHAPES, '"peaked"', '"gaussian"', "family must be one of diffuse, .*, got 'gaussian'"),
    "no family": (SHAPES, '"peaked"', "3", "family must be one of diffuse, .*, got 3"),
    "elsewhere": (SHAPES, '"peaked"', '"captured"', "family must be one of diffuse, .*, got 'captured'"),
    "groups": (SHAPES, "num_kv_heads = 2", "num_kv_heads = 3", "num_kv_heads must be a divisor of num_heads 2, got 3"),
    "a number": (SHAPES, "[3]", "3", "query_lens must be a list of at least one integer, got 3"),
    "nobody": (SHAPES, "[3]", "[]", "query_lens must be a list of at least one integer, got []"),
    "nested": (SHAPES, "[3]", "[[3]]", "query_lens[0] must be an integer of at least 0 .*, got [3]"),
    "less": (SHAPES, "[3]", "[-1]", "query_lens[0] must be an integer of at least 0 .*, got -1"),
    "no rows": (SHAPES, "[3]", "[0]", "the sum of query_lens must be at least 1, got 0"),
    "too many": (SHAPES, "[9]", "[2147483647, 1]", "the sum of key_lens must be below 2^31, got 2147483648"),
    "requests": (SHAPES, "[9]", "[9, 4]", "the length of key_lens must be that of query_lens, 1, got 2"),
    "context": (
        MLA_SHAPES, "[9, 1]", "[9, 0]", "context_lens[1] must be an integer of at least 1 and below 2^31, got 0",
    ),
    "beyond": (
        MLA_SHAPES, "[3, 1]", "[3, 2]",
        "context_lens[1] must be at least query_lens[1] 2, whose tokens are part of the context, got 1",
    ),
    "chunk": (MLA_SHAPES, "size = 16", "size = 0", "history_chunk_size must be an integer of at least 1 .*, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("which", SENSELESS)
def test_a_senseless_size_is_a_usage_error_that_names_its_place(which: str, tmp_path: Path) -> None:
    text, right, wrong, message = SENSELESS[which]
    assert text.count(right) == 1
    # the first table is sound
    selection = shapes_file(tmp_path, text + text.replace(right, wrong))
    with pytest.raises(UsageError) as caught:
        planned(selection)
    pattern = ".*".join(map(re.escape, message.split(".*")))
    assert re.fullmatch(f"--shapes {re.escape(str(selection.shapes))}, table 2: {pattern}", str(caught.value))


def test_sizes_at_their_limits_are_taken(tmp_path: Path) -> None:
    # more queries than keys, a request without either, a key without rope, a whole number as a factor
    sizes = SHAPES.replace("[3]", "[9, 0, 1]").replace("[9]", "[3, 0, 0]").replace("= 0.1", "= 1")
    latent = MLA_SHAPES.replace("d_rope = 8", "d_rope = 0").replace("[9, 1]", "[3, 1]")
    cases = planned(shapes_file(tmp_path, sizes + latent), dtypes=("float32",))
    assert [(case.op, case.sizes["query_lens"]) for case in cases] == [
        ("attention", [9, 0, 1]),
        ("mla_prefill", [3, 1]),
    ]
    assert (cases[0].sizes["softmax_scale"], type(cases[0].sizes["softmax_scale"])) == (1.0, float)
    assert cases[1].sizes["d_rope"] == 0


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
