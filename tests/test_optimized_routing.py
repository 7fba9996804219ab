"""Routing: every threshold of the published tables from both sides, every gate by its reason, hatches and bad input."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from assay.optimized import _routing_tables as tables
from assay.optimized.routing import (
    PATHS,
    Deployment,
    MlaGeometry,
    RoutingOptions,
    Step,
    find_geometry,
    geometries,
    load_table,
    route,
)

K = 1024
V32, GLM5, GLM53 = (find_geometry(name) for name in ("deepseek-v3.2", "glm-5", "GLM5.3-Flash"))
BLACKWELL = Deployment(device_family=100, flash_attention=4)
HOPPER = Deployment(device_family=90)


def prompt(query_len: int, seq_len: int | None = None) -> Step:
    return Step(query_lens=(query_len,), seq_lens=(seq_len or query_len,))


def path_of(geometry: MlaGeometry, step: Step, deployment: Deployment = BLACKWELL, **options: Any) -> str:
    return route(geometry, step, deployment, options=RoutingOptions(**options)).path


def why_not(path: str, geometry: MlaGeometry, step: Step, deployment: Deployment = BLACKWELL, **options: Any) -> str:
    return route(geometry, step, deployment, options=RoutingOptions(**options)).refused[path]


# written out from the published description, independently of the packaged file: backend, ranks -> least queries
# for contexts up to 2048, 4096, 8192, 16384 and 32768
PUBLISHED: dict[tuple[str, int], tuple[int | None, ...]] = {
    ("FLASHMLA_SPARSE", 1): (1536, 4096, None, None, None),
    ("FLASHMLA_SPARSE", 2): (512, 1024, 4096, None, None),
    ("FLASHMLA_SPARSE", 4): (512, 1024, 1536, 8192, None),
    ("FLASHMLA_SPARSE", 8): (512, 512, 1024, 2048, 16384),
    ("FLASHINFER_MLA_SPARSE", 8): (512, 1024, 1024, 2048, 32768),
}
ENDS = (2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize(("backend", "tp"), PUBLISHED, ids=str)
def test_v32_goes_masked_from_each_threshold_on(backend: str, tp: int) -> None:
    deployment = replace(BLACKWELL, backend=backend, tp=tp, mask_bytes=1 << 40)
    # dense MHA takes what is no longer than topk, so the first bucket is seen with a smaller topk
    few = replace(V32, topk=16)
    for end, least in zip(ENDS, PUBLISHED[backend, tp], strict=True):
        for seq_len in (end // 2 + 1, end):
            if least is None:
                assert "never faster" in why_not("masked_mha", few, prompt(seq_len), deployment)
                continue
            for query_len in (least - 1, least, least + 1):
                if query_len > seq_len:
                    continue
                expected = "masked_mha" if query_len >= least else "sparse_mqa"
                assert path_of(few, prompt(query_len, seq_len), deployment) == expected, (query_len, seq_len)
    assert "max_seq_len 32769 > 32768: never faster" in why_not("masked_mha", few, prompt(32769), deployment)


def test_the_end_of_a_bucket_belongs_to_it() -> None:
    deployment, few = replace(BLACKWELL, tp=8), replace(V32, topk=16)
    # 512 queries are enough up to 4096, 1024 up to 8192
    answers = {seq_len: path_of(few, prompt(600, seq_len), deployment) for seq_len in (4095, 4096, 4097)}
    assert answers == {4095: "masked_mha", 4096: "masked_mha", 4097: "sparse_mqa"}
    assert why_not("masked_mha", few, prompt(600, 4097), deployment) == (
        "max_query_len 600 < 1024 for max_seq_len 4097 <= 8192"
    )


# without history: the longest prompt known to be faster, the shortest known not to be
PURE = {
    ("FLASHMLA_SPARSE", 1): (8192, 9216),
    ("FLASHMLA_SPARSE", 2): (20480, 24576),
    ("FLASHMLA_SPARSE", 4): (48 * K, 56 * K),
    ("FLASHMLA_SPARSE", 8): (112 * K, 128 * K),
    ("FLASHINFER_MLA_SPARSE", 4): (36 * K, 40 * K),
    ("FLASHINFER_MLA_SPARSE", 8): (64 * K, 68 * K),
}
# with history, in units of 1024: queries, context, faster
HISTORY: dict[tuple[str, int], list[tuple[int, int, bool]]] = {
    ("FLASHMLA_SPARSE", 2): [(4, 6, True), (4, 8, False), (8, 10, True)],
    ("FLASHMLA_SPARSE", 4): [(16, 24, True), (16, 32, False), (32, 34, True), (32, 36, False)],
    ("FLASHMLA_SPARSE", 8): [(32, 48, True), (32, 64, False)],
    ("FLASHINFER_MLA_SPARSE", 4): [(4, 12, True), (4, 16, False), (24, 28, True), (32, 36, False)],
    ("FLASHINFER_MLA_SPARSE", 8): [
        (4, 20, True),
        (16, 32, True),
        (48, 64, True),
        (56, 72, True),
        (63, 79, False),
    ],
}


@pytest.mark.parametrize("geometry", [GLM5, GLM53], ids=lambda geometry: str(geometry.name))
@pytest.mark.parametrize(("backend", "tp"), PURE, ids=str)
def test_glm_goes_masked_where_a_published_point_says_so(backend: str, tp: int, geometry: MlaGeometry) -> None:
    deployment = replace(BLACKWELL, backend=backend, tp=tp, mask_bytes=1 << 40)
    longest, too_long = PURE[backend, tp]
    for length in (longest - 1, longest):
        assert path_of(geometry, prompt(length), deployment) == "masked_mha"
    for length in (longest + 1, too_long):
        assert path_of(geometry, prompt(length), deployment) == "sparse_mqa"
    for query_len, seq_len, faster in HISTORY.get((backend, tp), []):
        expected = "masked_mha" if faster else "sparse_mqa"
        assert path_of(geometry, prompt(query_len * K, seq_len * K), deployment) == expected
        if faster:
            assert path_of(geometry, prompt(query_len * K + 1, seq_len * K), deployment) == "masked_mha"
            # one query fewer is covered by another point or by none
            others = [(q, s) for q, s, yes in HISTORY[backend, tp] if yes and q < query_len and s >= seq_len]
            fewer = path_of(geometry, prompt(query_len * K - 1, seq_len * K), deployment)
            assert fewer == ("masked_mha" if others else "sparse_mqa")


def test_history_and_prompts_without_are_told_apart() -> None:
    # a prompt of 8192 tokens alone, and beside a request with history: the maxima are the same
    deployment = replace(BLACKWELL, mask_bytes=1 << 40)
    assert path_of(GLM5, prompt(8192), deployment) == "masked_mha"
    mixed = Step(query_lens=(8192, 100), seq_lens=(8192, 500))
    assert (mixed.max_query_len, mixed.max_seq_len, mixed.max_context_len) == (8192, 8192, 400)
    assert why_not("masked_mha", GLM5, mixed, deployment) == (
        "no published point covers max_query_len 8192 with max_seq_len 8192 with history"
    )


def test_no_published_counterexample_is_covered_by_a_published_example() -> None:
    for row in load_table("vllm").masked:
        for query_len, seq_len in row.context_no:
            assert not any(query_len >= q and seq_len <= s for q, s in row.context_yes), row
        assert row.pure_yes is None or row.pure_no is None or row.pure_yes < row.pure_no


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm5", "glm5.3-flash"])
def test_dense_up_to_topk(name: str) -> None:
    geometry = find_geometry(name)
    for deployment in (BLACKWELL, HOPPER):
        answers = [path_of(geometry, prompt(length), deployment) for length in (2047, 2048, 2049)]
        assert answers[:2] == ["dense_mha", "dense_mha"]
        assert answers[2] != "dense_mha"
    assert (
        route(geometry, prompt(2048), HOPPER).reason == "max_seq_len 2048 <= topk 2048: every selection is everything"
    )
    assert why_not("dense_mha", geometry, prompt(5, 2049)) == (
        "max_seq_len 2049 > topk 2048: a selection is not everything"
    )


def test_maxima_are_over_the_prefills_alone() -> None:
    # decodes with long contexts do not keep short prompts from dense attention
    step = Step(query_lens=(1, 1, 700, 900), seq_lens=(100000, 50000, 1800, 900))
    assert (step.prefills, step.max_query_len, step.max_seq_len, step.num_queries) == ((2, 3), 900, 1800, 1600)
    assert path_of(V32, step, HOPPER) == "dense_mha"
    assert path_of(V32, replace(step, decode_queries=0), HOPPER) == "sparse_mqa"
    drafts = Step(query_lens=(3, 4), seq_lens=(5000, 6000), decode_queries=4)
    answer = route(V32, drafts, HOPPER)
    assert (answer.path, answer.reason) == ("none", "no request has more than 4 queries")


FEW = replace(V32, topk=16)
TP8 = replace(BLACKWELL, tp=8)


@pytest.mark.parametrize(
    ("geometry", "deployment", "reason"),
    [
        (FEW, replace(TP8, kv_format="fp8_e4m3"), "the KV cache is quantised (fp8_e4m3)"),
        (FEW, replace(TP8, flash_attention=None), "FlashAttention 4 is needed, got none"),
        (FEW, replace(TP8, flash_attention=3), "FlashAttention 4 is needed, got 3"),
        (FEW, replace(TP8, device_family=90), "device family 90 is not among 100"),
        (FEW, replace(TP8, dcp=2), "decode context parallel must be 1, got 2"),
        (FEW, replace(TP8, prefill_backend=False), "there is no prefill backend"),
        (FEW, replace(TP8, mask_bytes=8 << 20), "the masks need 8388608 bytes"),
        (
            replace(FEW, d_nope=256, d_rope=64, d_v=256),
            TP8,
            "(nope, rope, v) = (256, 64, 256) is not among (128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0",
        ),
        (replace(FEW, d_rope=320), TP8, "(nope, rope, v) = (128, 320, 128) is not among"),
        (replace(FEW, num_heads=64), TP8, "(heads, rank, nope, rope, v) = (64, 512, 128, 64, 128) is not among"),
        (replace(FEW, kv_lora_rank=256), TP8, "(heads, rank, nope, rope, v) = (128, 256, 128, 64, 128) is not among"),
        (replace(FEW, d_nope=64), TP8, "(heads, rank, nope, rope, v) = (128, 512, 64, 64, 128) is not among"),
        (FEW, replace(TP8, backend="OTHER"), "table vllm knows nothing of 192/128 heads beside OTHER at TP8"),
        (FEW, replace(TP8, tp=16), "table vllm knows nothing of 192/128 heads beside FLASHMLA_SPARSE at TP16"),
    ],
)
def test_each_gate_of_masked_mha_closes_with_its_reason(
    geometry: MlaGeometry, deployment: Deployment, reason: str
) -> None:
    step = prompt(8192)
    assert path_of(FEW, step, TP8) == "masked_mha"
    if "bytes" in reason:
        # exactly the bytes that are there are enough
        assert path_of(geometry, step, deployment) == "masked_mha"
        deployment = replace(deployment, mask_bytes=deployment.mask_bytes - 1)
    answer = route(geometry, step, deployment)
    assert answer.path in ("sparse_mqa", "native_heads")
    assert reason in answer.refused["masked_mha"]


@pytest.mark.parametrize(("mask_bytes", "largest", "too_large"), [(64 << 20, 23040, 23041), (128 << 20, 32768, 32769)])
def test_the_largest_prompt_whose_masks_fit(mask_bytes: int, largest: int, too_large: int) -> None:
    deployment = replace(BLACKWELL, tp=8, mask_bytes=mask_bytes)
    assert path_of(GLM5, prompt(largest), deployment) == "masked_mha"
    assert "the masks need" in why_not("masked_mha", GLM5, prompt(too_large), deployment)


def test_native_heads_from_their_least_queries_on() -> None:
    deployment = replace(HOPPER, tp=4)
    for queries, expected in ((2047, "sparse_mqa"), (2048, "native_heads"), (2049, "native_heads")):
        assert path_of(GLM53, prompt(queries, 16384), deployment) == expected
        # of all prefills together
        several = Step(query_lens=(queries - 100, 100, 1), seq_lens=(16384, 9000, 70000))
        assert path_of(GLM53, several, deployment) == expected
    for least, queries, expected in ((0, 2, "native_heads"), (10, 9, "sparse_mqa"), (10, 10, "native_heads")):
        assert path_of(GLM53, prompt(queries, 9999), deployment, native_min_queries=least) == expected
    assert why_not("native_heads", GLM53, prompt(9, 9999), deployment, native_min_queries=10) == "9 queries < 10"


@pytest.mark.parametrize(
    ("geometry", "deployment", "options", "reason"),
    [
        (GLM53, replace(HOPPER, tp=4), {"native": False}, "switched off"),
        (GLM53, replace(HOPPER, tp=2), {}, "32 heads a rank > 16"),
        (GLM53, HOPPER, {}, "64 heads a rank > 16; 64 heads a rank need no padding to 64"),
        (GLM53, replace(HOPPER, tp=4, device_family=100), {}, "device family 100 is not among 90"),
        (GLM53, replace(HOPPER, tp=4, kv_format="fp8_ds_mla"), {}, "the KV cache is quantised (fp8_ds_mla)"),
        (GLM5, replace(HOPPER, tp=8), {}, "rows of width 576 are not among 512"),
    ],
)
def test_each_gate_of_native_heads_closes_with_its_reason(
    geometry: MlaGeometry, deployment: Deployment, options: dict[str, Any], reason: str
) -> None:
    answer = route(geometry, prompt(4096, 65536), deployment, options=RoutingOptions(**options))
    assert answer.path == "sparse_mqa"
    assert answer.refused["native_heads"] == reason


@pytest.mark.parametrize(
    ("name", "tp", "width", "heads", "expected"),
    [
        ("deepseek-v3.2", 8, 576, 16, "sparse_mqa"),
        ("glm5", 8, 576, 8, "sparse_mqa"),
        ("glm5.3-flash", 8, 512, 8, "native_heads"),
        ("deepseek-v4-flash", 8, 512, 8, "native_heads"),
        ("deepseek-v4-pro", 4, 512, 32, "sparse_mqa"),
        ("deepseek-v4.1-flash", 8, 512, 8, "native_heads"),
        ("glm4.7-flash", 1, 576, 20, "dense_mha"),
    ],
)
def test_models_on_hopper(name: str, tp: int, width: int, heads: int, expected: str) -> None:
    geometry, deployment = find_geometry(name), replace(HOPPER, tp=tp)
    assert (geometry.row_width, deployment.local_heads(geometry)) == (width, heads)
    answer = route(geometry, prompt(8192, 32768), deployment)
    assert answer.path == expected
    assert {answer.path, *answer.refused} == set(PATHS)


def test_a_forced_path_is_taken_and_said() -> None:
    step = prompt(1024, 1500)
    assert path_of(V32, step) == "dense_mha"
    masked = route(V32, step, BLACKWELL, options=RoutingOptions(force="masked"))
    assert (masked.path, masked.reason, masked.forced) == ("masked_mha", "forced", "masked")
    assert masked.refused["dense_mha"] == "masked is forced"
    mqa = route(GLM53, prompt(4096), replace(HOPPER, tp=4), options=RoutingOptions(force="mqa"))
    assert (mqa.path, mqa.forced) == ("native_heads", "mqa")
    assert mqa.refused["dense_mha"] == mqa.refused["masked_mha"] == "mqa is forced"
    assert path_of(V32, step, force="dense") == "dense_mha"
    # a threshold of the table does not stand against force
    assert path_of(V32, prompt(100, 30000), force="masked") == "masked_mha"


@pytest.mark.parametrize(
    ("geometry", "deployment", "force", "reason"),
    [
        (V32, BLACKWELL, "dense", "dense_mha is forced and cannot serve deepseek-v3.2: max_seq_len 8192 > topk 2048"),
        (replace(V32, d_rope=0), BLACKWELL, "masked", r"masked_mha is forced .* \(128, 0, 128\) is not among"),
        (V32, replace(BLACKWELL, kv_format="fp8"), "masked", r"masked_mha is forced .* quantised \(fp8\)"),
        (
            V32,
            HOPPER,
            "masked",
            "masked_mha is forced .* device family 90 is not among 100; FlashAttention 4 is needed",
        ),
    ],
)
def test_what_cannot_serve_cannot_be_forced(
    geometry: MlaGeometry, deployment: Deployment, force: str, reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        path_of(geometry, prompt(8192), deployment, force=force)


def test_no_path_at_all_is_an_error_with_every_reason() -> None:
    with pytest.raises(NotImplementedError, match=r"dense_mha: there is no prefill backend.*sparse_mqa: the model sel"):
        path_of(find_geometry("glm4.7-flash"), prompt(100), replace(HOPPER, prefill_backend=False))
    wide = replace(V32, num_heads=256)
    with pytest.raises(NotImplementedError, match="sparse_mqa: 256 heads a rank > 128"):
        path_of(wide, prompt(8192))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RoutingOptions(force="Dense"), ValueError, "one of dense, masked, mqa or None, got 'Dense'"),
        (lambda: RoutingOptions(force=""), ValueError, "force must be one of"),
        (lambda: RoutingOptions(native=cast(Any, 1)), TypeError, "native must be True or False, got 1"),
        (lambda: RoutingOptions(native_min_queries=-1), ValueError, "native_min_queries must not be negative, got -1"),
        (lambda: RoutingOptions(native_min_queries=cast(Any, "2048")), TypeError, "must be an int or None, got"),
        (lambda: RoutingOptions(native_min_queries=True), TypeError, "native_min_queries must be an int or None"),
        (lambda: Step(query_lens=(), seq_lens=()), ValueError, "at least one, got 0 and 0"),
        (lambda: Step(query_lens=(1, 2), seq_lens=(5,)), ValueError, "the same requests, at least one, got 2 and 1"),
        (lambda: prompt(9, 8), ValueError, "1 to the seq_len of the request, got 9 of 8 at request 0"),
        (lambda: prompt(0, 8), ValueError, "got 0 of 8"),
        (lambda: replace(prompt(5), decode_queries=-1), ValueError, "decode_queries must not be negative"),
        (lambda: Deployment(device_family=9), ValueError, "device_family must be such as 90 or 100, got 9"),
        (lambda: Deployment(device_family=90, tp=0), ValueError, "tp must be positive, got 0"),
        (lambda: Deployment(device_family=90, mask_bytes=-1), ValueError, "mask_bytes must not be negative"),
        (lambda: find_geometry("glm6"), ValueError, "geometry must be one of deepseek-v3.2, glm5, .*, got 'glm6'"),
        (lambda: load_table("nowhere.json"), ValueError, "table must be vllm or a JSON file, got 'nowhere.json'"),
        (lambda: path_of(GLM53, prompt(5), replace(HOPPER, tp=3)), ValueError, "tp must divide the 64 heads of glm5.3"),
        (lambda: replace(V32, topk=0), ValueError, "topk must be positive or None, got 0"),
        (lambda: replace(V32, d_rope=-1), ValueError, "d_rope must not be negative"),
        (lambda: replace(V32, num_heads=0), ValueError, "num_heads must be positive, got 0"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_and_never_a_default(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    published = load_table("vllm")
    path = tmp_path / "table.json"
    path.write_text(json.dumps(asdict(published)))
    assert load_table(path) == published
    assert route(V32, prompt(8192), BLACKWELL, table=path) == route(V32, prompt(8192), BLACKWELL, table=published)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda entries: entries.pop("native"),
        lambda entries: entries.update(surprise=1),
        lambda entries: entries["masked"][0].update(seq_lens=[4096, 2048, 1, 2, 3]),
        lambda entries: entries["masked"][0].update(min_query_lens=[1]),
        lambda entries: entries["masked"][0].update(pure_yes=5),
        lambda entries: entries["masked"][5].update(pure_yes=None),
    ],
)
def test_a_file_that_is_no_table_is_refused(break_it: Any, tmp_path: Path) -> None:
    entries = json.loads((Path(tables.__file__).parent / "routing_vllm.json").read_text())
    break_it(entries)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"must hold a routing table|must have either|must ascend"):
        load_table(path)


def test_every_answer_names_each_path_once() -> None:
    lengths = (1, 2, 600, 2048, 2049, 5000, 40000)
    deployments = (HOPPER, replace(HOPPER, tp=4), BLACKWELL, TP8, replace(TP8, kv_format="fp8"))
    for geometry, deployment in itertools.product(geometries().values(), deployments):
        if geometry.num_heads % deployment.tp:
            continue
        for query_len, seq_len in itertools.combinations_with_replacement(lengths, 2):
            answer = route(geometry, prompt(query_len, seq_len), deployment)
            if query_len == 1:
                assert answer.path == "none"
                continue
            assert [answer.path in answer.refused, sorted([answer.path, *answer.refused])] == [False, sorted(PATHS)]
            assert all([answer.reason, *answer.refused.values()])
