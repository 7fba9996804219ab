"""A case is its content: ids do not move, JSON brings it back, and another generator's cases are refused."""

import json
from dataclasses import replace

import pytest
from builders import attention_case, mla_case

from assay.harness import operations
from assay.harness.case import GENERATOR_VERSION, Case, plan_digest
from assay.harness.operation import CaseRequest
from assay.harness.plan import TIERS

DTYPES = ("float32", "float16", "bfloat16")


def drawn(op: str, tier: str = "smoke", seed: int = 0) -> list[Case]:
    return operations.load(op).cases(CaseRequest(tier=tier, seed=seed, dtypes=DTYPES))


GOLDEN = {
    "attention": (
        "attention-diffuse-float32-24754bfd",
        "attention-exact-one-hot-float16-333a2964",
        "attention-exact-one-hot-bfloat16-efcaee12",
    ),
    "token_scores": (
        "token_scores-diffuse-float32-e7f8e128",
        "token_scores-peaked-bfloat16-2dfc244b",
        "token_scores-diffuse-bfloat16-aaab2a2c",
    ),
    "token_selection": (
        "token_selection-diffuse-float32-e68161f0",
        "token_selection-deep-float16-6833e4de",
        "token_selection-near-bfloat16-4a5b5de8",
    ),
    "sparse_mla": (
        "sparse_mla-diffuse-float32-6021669a",
        "sparse_mla-ramp-v-bfloat16-61d64a24",
        "sparse_mla-diffuse-float32-82c5b822",
    ),
    "topk_mask": (
        "topk_mask-diffuse-float32-69a5d2f5",
        "topk_mask-signs-bfloat16-826e3679",
        "topk_mask-full-float16-18955fa1",
    ),
    "indexer": (
        "indexer-diffuse-float32-514e6f75",
        "indexer-diffuse-bfloat16-ee9b4a5c",
        "indexer-diffuse-float16-7641378e",
    ),
    "masked_mha": (
        "masked_mha-diffuse-float32-42628fab",
        "masked_mha-ramp-v-float16-640da691",
        "masked_mha-exact-one-hot-bfloat16-3d5cdaf7",
    ),
    "kda": (
        "kda-diffuse-float32-4e0a16ef",
        "kda-diffuse-bfloat16-2e04d5d4",
        "kda-slow-float32-2737899b",
    ),
    "kda_step": (
        "kda_step-diffuse-float32-b4efc3dc",
        "kda_step-diffuse-bfloat16-4bb3eddf",
        "kda_step-slow-float32-a455c9a8",
    ),
    "mla_prefill": (
        "mla_prefill-diffuse-float32-63cca00f",
        "mla_prefill-exact-uniform-float16-02641cf9",
        "mla_prefill-nonfinite-v-float32-a5f5bc8a",
    ),
}
DIGESTS = {
    "token_scores": "427b53cb444a",
    "token_selection": "15ffb803711e",
    "sparse_mla": "355907a0bf2f",
    "topk_mask": "e2bb074c9572",
    "indexer": "4325ff784b7f",
    "kda": "f084273a8f1a",
    "kda_step": "c9545da80ce1",
    "attention": "6a941e82252d",
    "masked_mha": "5b2fe8716bba",
    "mla_prefill": "6de652797793",
}


@pytest.mark.parametrize("op", operations.NAMES)
def test_the_plan_of_seed_zero_does_not_move(op: str) -> None:
    # a record names its case by this id: raise GENERATOR_VERSION together with these
    cases = drawn(op)
    assert (cases[0].id, cases[len(cases) // 2].id, cases[-1].id) == GOLDEN[op]
    assert plan_digest(cases) == DIGESTS[op]


@pytest.mark.parametrize("op", operations.NAMES)
@pytest.mark.parametrize("tier", TIERS)
def test_ids_are_distinct_and_seeds_change_them(op: str, tier: str) -> None:
    cases = drawn(op, tier)
    assert len({case.id for case in cases}) == len(cases)
    assert drawn(op, tier) == cases
    assert not {case.id for case in cases} & {case.id for case in drawn(op, tier, seed=1)}


def test_a_captured_id_is_that_of_its_content() -> None:
    case = Case(op="attention", family="diffuse", dtype="float32", seed=3, sizes={"d_v": 8, "d_qk": 4})
    assert case.id == "attention-diffuse-float32-81351c65"
    assert replace(case, sizes={"d_qk": 4, "d_v": 8}).id == case.id
    for other in (
        replace(case, seed=4),
        replace(case, sizes={"d_v": 8, "d_qk": 5}),
        replace(case, dtype="float16"),
        replace(case, needs_device=True),
    ):
        assert other.id != case.id


@pytest.mark.parametrize("case", [attention_case(), mla_case("peaked", "bfloat16", seed=9)], ids=lambda case: case.op)
def test_json_brings_a_case_back(case: Case) -> None:
    back = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert back == case
    assert back.id == case.id == case.to_json()["id"]


def test_a_case_of_another_generator_is_refused() -> None:
    content = attention_case().to_json()
    with pytest.raises(ValueError, match=f"generator_version must be {GENERATOR_VERSION}, got {GENERATOR_VERSION + 1}"):
        Case.from_json(content | {"generator_version": GENERATOR_VERSION + 1})
    del content["generator_version"]
    with pytest.raises(ValueError, match="got None"):
        Case.from_json(content)


def test_an_id_that_does_not_fit_the_content_is_refused() -> None:
    content = attention_case().to_json()
    with pytest.raises(ValueError, match=r"id must be attention-diffuse-float32-.*, the digest of the content"):
        Case.from_json(content | {"seed": 1})


def test_the_digest_of_a_plan_sees_content_and_order() -> None:
    first, second = attention_case(seed=1), attention_case(seed=2)
    digest = plan_digest([first, second])
    assert digest == plan_digest([first, second])
    assert len(digest) == 12
    assert digest not in {plan_digest([second, first]), plan_digest([first]), plan_digest([])}


def test_an_operation_without_a_name_here_is_refused() -> None:
    with pytest.raises(ValueError, match=f"op must be one of {', '.join(operations.NAMES)}, got 'conv'"):
        operations.load("conv")
