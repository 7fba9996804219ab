"""Inputs of both operations: where tensors lie, what is undefined in them, and what the judge then asks for."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CPU, arguments_of, attention_case, honest_attention, honest_mla, judged, mla_case, operation_of
from builders import rows_of as rows_by_request
from torch import Tensor
from typer.testing import CliRunner

from assay.harness import cli, operations
from assay.harness.case import Case
from assay.harness.operation import CaseRequest
from assay.harness.operations import _mla_prefill_layout
from assay.harness.options import seed_of
from assay.harness.plan import DTYPES
from assay.harness.poison import GUARD_ELEMENTS
from assay.harness.record import Verdict

LAYOUTS = {"attention": {"packed", "strided", "fused"}, "mla_prefill": {"split", "bundled", "shared", "vast"}}


def drawn(op: str, tier: str, dtypes: tuple[str, ...] = DTYPES) -> list[Case]:
    return operations.load(op).cases(CaseRequest(tier=tier, seed=0, dtypes=dtypes))


@pytest.mark.parametrize("op", LAYOUTS)
def test_each_tier_holds_the_one_before_and_the_full_one_every_layout(op: str) -> None:
    smoke, full, nightly = (drawn(op, tier) for tier in ("smoke", "full", "nightly"))
    assert full[: len(smoke)] == smoke
    assert nightly[: len(full)] == full
    assert {case.sizes["layout"] for case in full} == LAYOUTS[op]
    assert len(nightly) == len(full) + 60
    # sizes are drawn, not chosen
    sizes = [case.sizes for case in nightly[len(full) :]]
    assert len({size["softmax_scale"] for size in sizes}) > 50
    assert len({size["d_v"] for size in sizes}) > 20
    assert min(size["softmax_scale"] for size in sizes) < 0.1
    assert max(size["softmax_scale"] for size in sizes) > 1
    assert {case.dtype for case in nightly[len(full) :]} == set(DTYPES)
    assert len({case.family for case in nightly[len(full) :]}) > 9


def test_only_a_nightly_run_draws_its_own_seed() -> None:
    assert [seed_of(tier, None) for tier in ("smoke", "full")] == [0, 0]
    assert [seed_of(tier, 7) for tier in ("smoke", "full", "nightly")] == [7, 7, 7]
    assert len({seed_of("nightly", None) for _ in range(4)}) == 4


def printed_plan(*options: str) -> tuple[str, str]:
    """Seed and digest that ``assay check`` prints first."""
    result = CliRunner().invoke(cli.app, ["check", "attention", "--device", "cpu", "--list-cases", *options])
    found = re.match(r"seed (\d+), \d+ cases, plan (\w+),", result.output)
    assert found is not None
    return found[1], found[2]


def test_a_nightly_plan_is_fresh_and_repeated_by_the_seed_that_it_prints() -> None:
    seed, plan = printed_plan("--tier", "nightly")
    assert printed_plan("--tier", "nightly", "--seed", seed) == (seed, plan)
    assert printed_plan("--tier", "nightly")[0] != seed
    assert printed_plan() == ("0", printed_plan("--seed", "0")[1])


def test_a_nightly_failure_becomes_a_capsule_that_names_its_seed(tmp_path: Path) -> None:
    (tmp_path / "zeros.py").write_text(
        "def zeros(q, k, v, **given):\n"
        "    return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[:2]).float()\n"
    )
    options = ["check", "attention", "--kernel", f"{tmp_path / 'zeros.py'}:zeros", "--in-process", "--device", "cpu"]
    options += ["--tier", "nightly", "--family", "exact-uniform", "--dtype", "float32", "--fail-fast"]
    result = CliRunner().invoke(cli.app, [*options, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    seed = re.match(r"seed (\d+),", result.output)
    # of the case, and of the smallest one
    runs = [json.loads(path.read_text())["run"] for path in (tmp_path / "run" / "capsules").glob("*.json")]
    assert seed is not None
    assert runs
    assert all(run == {"seed": int(seed[1]), "tier": "nightly"} for run in runs)
    assert f"--tier nightly --seed {seed[1]}" in result.output


def test_groups_of_every_size_are_drawn() -> None:
    groups = {case.sizes["num_heads"] // case.sizes["num_kv_heads"] for case in drawn("attention", "full")}
    assert groups == {1, 2, 3, 4, 8}


@pytest.mark.parametrize("op", LAYOUTS)
def test_there_are_batches_of_one_and_batches_that_only_decode(op: str) -> None:
    lens = [case.sizes["query_lens"] for case in drawn(op, "smoke")]
    assert [1, 1, 1] in [one[:3] for one in lens if set(one) == {1}]
    assert any(len(one) == 1 for one in lens)


@pytest.mark.parametrize("dtypes", [DTYPES, *((dtype,) for dtype in DTYPES)], ids="-".join)
@pytest.mark.parametrize("op", operations.NAMES)
def test_more_requests_than_a_table_of_16_holds_are_judged_on_a_cpu(op: str, dtypes: tuple[str, ...]) -> None:
    cases = [case for case in drawn(op, "smoke", dtypes) if not case.needs_device]
    # a kernel of sparse_mla sees no requests, and its tables are of queries
    if op == "sparse_mla":
        assert max(sum(case.sizes["query_lens"]) for case in cases) > 64
        return
    lens = [case.sizes.get("query_lens") or case.sizes.get("seq_lens") or case.sizes["context_lens"] for case in cases]
    many = [length for case in lens for length in case[16:]]
    assert any(many)


def test_more_chunks_and_keys_than_small_tables_hold_are_judged_on_a_cpu() -> None:
    cases = [case.sizes for case in drawn("mla_prefill", "smoke")]
    chunks = [(max(size["context_lens"]) - 1) // size["history_chunk_size"] for size in cases]
    assert max(chunks) > 32
    assert max(max(size["context_lens"]) for size in cases) > 1024
    assert max(max(case.sizes["key_lens"]) for case in drawn("attention", "smoke")) > 1024


def test_fused_rows_hold_q_k_and_v_side_by_side() -> None:
    case = attention_case(layout="fused", num_heads=4, num_kv_heads=2, query_lens=[9, 5], key_lens=[40, 5])
    inputs, packed = (
        operation_of(case).inputs(case, CPU),
        arguments_of(attention_case(**case.sizes | {"layout": "packed"})),
    )
    width = 4 * 24 + 2 * 24 + 2 * 16
    for name, column in (("q", 0), ("k", 4 * 24), ("v", 4 * 24 + 2 * 24)):
        tensor = inputs.arguments[name]
        assert torch.equal(tensor, packed[name])
        assert tensor.stride() == (width, tensor.shape[2], 1)
        assert tensor.storage_offset() == GUARD_ELEMENTS + column
    assert set(inputs.ledger.buffers) == {"qkv", "cu_seqlens_q", "cu_seqlens_k"}
    # rows of keys without a query are NaN where the query would be
    buffer = inputs.ledger.buffers["qkv"][GUARD_ELEMENTS:-GUARD_ELEMENTS].view(45, width)
    assert bool(buffer[14:, : 4 * 24].isnan().all())
    assert bool(torch.isfinite(buffer[:, 4 * 24 :]).all())


@pytest.mark.parametrize("layout", ["packed", "strided", "fused"])
@pytest.mark.parametrize("causal", [True, False])
def test_an_honest_kernel_passes_in_every_layout_of_attention(layout: str, causal: bool) -> None:
    # heads and widths that divide neither each other nor the row
    sizes: dict[str, Any] = {"num_heads": 3, "d_v": 20, "query_lens": [9, 5, 4], "key_lens": [40, 5, 4]}
    record = judged(honest_attention, attention_case("peaked", layout=layout, causal=causal, **sizes))
    assert (record.verdict, record.text) == (Verdict.PASS, "")


@pytest.mark.parametrize("make", [attention_case, mla_case])
def test_an_unknown_layout_is_an_invalid_case(make: Any) -> None:
    case = make(layout="diagonal")
    with pytest.raises(ValueError, match=r"layout must be one of .*, got 'diagonal'"):
        operation_of(case).inputs(case, CPU)


SHARING: dict[str, Any] = {"layout": "shared", "query_lens": [3, 2, 1], "context_lens": [30, 40, 9]}


def own_slots(arguments: dict[str, Any]) -> list[list[int]]:
    rows, lens = arguments["request_rows"].tolist(), arguments["context_lens"].tolist()
    return [arguments["slot_table"][row, :length].tolist() for row, length in zip(rows, lens, strict=True)]


@pytest.mark.parametrize("family", ["diffuse", "leverage", "peaked"])
def test_requests_share_slots_of_their_prefix_and_nothing_else(family: str) -> None:
    arguments = arguments_of(mla_case(family, **SHARING))
    first, second, third = own_slots(arguments)
    assert first[:21] == second[:21]
    assert len({*first, *second, *third}) == 30 + 40 + 9 - 21
    # a slot of no token is NaN: the second request's own places for the prefix are gone
    lures = 2 if family == "leverage" else 0
    held = int((~arguments["kv_c"].isnan().any(1)).sum())
    assert 58 <= held <= 58 + lures
    rows = rows_by_request(mla_case(family, **SHARING))
    assert torch.equal(rows[0].k[:21], rows[1].k[:21])


@pytest.mark.parametrize("family", ["diffuse", "leverage", "peaked"])
def test_an_honest_kernel_passes_on_shared_prefixes(family: str) -> None:
    record = judged(honest_mla, mla_case(family, **SHARING))
    assert (record.verdict, record.text) == (Verdict.PASS, "")


@pytest.mark.parametrize("family", ["visible-nan", "exact-uniform", "exact-one-hot"])
def test_families_that_single_a_token_out_share_none(family: str) -> None:
    assert judged(honest_mla, mla_case(family, **SHARING)).verdict is Verdict.INVALID_CASE


def test_a_vast_cache_reaches_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mla_case(layout="vast")
    with pytest.raises(ValueError, match="layout must not be vast on a CPU"):
        operation_of(case).inputs(case, CPU)
    # as many elements as 16 bits count
    monkeypatch.setattr(_mla_prefill_layout, "VAST_ELEMENTS", 1 << 15)
    arguments = arguments_of(case)
    offsets = [slot * arguments["kv_c"].stride(0) for slot in itertools.chain(*own_slots(arguments))]
    assert arguments["kv_c"].numel() > 1 << 15
    assert min(offsets) < 1 << 12
    beyond = sum(offset >= 1 << 15 for offset in offsets)
    assert 15 <= beyond <= 35
    assert not arguments["slot_table"].max() >= len(arguments["kv_c"])
    assert judged(honest_mla, case).verdict is Verdict.PASS

    def narrow(**given: Any) -> tuple[Tensor, Tensor]:
        # the row where a 16-bit offset of the latent leads
        latent, wrong = given["kv_c"], torch.arange(len(given["kv_c"])) * given["kv_c"].stride(0)
        return honest_mla(**given | {"kv_c": latent[(wrong.short().long() // latent.stride(0)) % len(latent)]})

    assert judged(narrow, case).verdict is not Verdict.PASS


def lured(seed: int) -> dict[str, Any]:
    return arguments_of(mla_case("leverage", seed=seed))


def test_a_lure_in_an_end_slot_is_a_key_that_queries_are_drawn_to() -> None:
    kept = [lured(seed) for seed in range(8)]
    free = [given for given in kept if not {0, len(given["kv_c"]) - 1} & set(itertools.chain(*own_slots(given)))]
    assert 1 <= len(free) <= 7
    for given in free:
        slots = own_slots(given)
        # the first query sees 37 of 45 keys, the last one all of the second request's
        for lure, token in ((0, slots[0][36]), (len(given["kv_c"]) - 1, slots[1][4])):
            for name in ("kv_c", "k_pe"):
                assert torch.equal(given[name][lure], given[name][token])
    for given in kept:
        assert bool(torch.isfinite(given["kv_c"][[0, -1]]).all())


UNDEFINED: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "query_lens": [9, 0, 3], "key_lens": [40, 6, 30]}


def test_undefined_values_of_attention_lie_at_one_visible_key_and_at_keys_of_nobody() -> None:
    case = attention_case("nonfinite-v", **UNDEFINED)
    given = arguments_of(case)
    k, v = given["k"], given["v"]
    # the third request has the fewest queries: its key 13, in the last head alone
    assert math.isnan(v[46 + 13, 1, 15])
    assert (v[46 + 13, 1, 0], v[46 + 13, 1, 8]) == (math.inf, -math.inf)
    assert k[:40].isfinite().all()
    assert k[46:].isfinite().all()
    assert int((~v[46:].isfinite()).sum()) == 3
    assert v[:40].isfinite().all()
    # nobody's keys: undefined in the keys alone, then in the values alone
    assert k[40:46].isnan().all(-1).all(-1).tolist() == [True, False] * 3
    assert v[40:46].isnan().all(-1).all(-1).tolist() == [False, True] * 3


def test_undefined_values_show_in_their_column_alone() -> None:
    for case, answer in (
        (attention_case("nonfinite-v", **UNDEFINED), honest_attention),
        (mla_case("nonfinite-v", num_heads=3), honest_mla),
    ):
        out, lse = answer(**arguments_of(case))
        assert bool(torch.isfinite(lse).all())
        expected = torch.zeros(out.shape, dtype=torch.bool)
        for column in operation_of(case).outline(case).undefined_columns:
            place = (column.rows, column.heads, column.dim)
            expected[place] = True
            assert bool(out[place].isnan().all() if math.isnan(column.value) else (out[place] == column.value).all())
        assert torch.equal(~torch.isfinite(out), expected)
        assert 0 < int(expected.sum()) < expected.numel() / 10
        assert judged(answer, case).verdict is Verdict.PASS
        # heads that see none of it are judged in all their elements
        assert all(len(rows.heads) and bool(torch.isfinite(rows.v).all()) for rows in rows_by_request(case))


WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "cleaned": lambda out, lse: (out.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), lse),
    "infinity gives NaN": lambda out, lse: (torch.where(out.isinf(), math.nan, out), lse),
    "sign lost": lambda out, lse: (torch.where(out == -math.inf, math.inf, out), lse),
    "spread over the row": lambda out, lse: (out + (0 * out).sum(-1, keepdim=True), lse),
    "lse undefined": lambda out, lse: (out, lse + (0 * out).sum(-1)),
    "heads of the group before": lambda out, lse: (out.roll(2, dims=1), lse),
}


@pytest.mark.parametrize("which", WRONG)
def test_an_undefined_value_that_is_lost_or_spreads_is_found(which: str) -> None:
    case = attention_case("nonfinite-v", **UNDEFINED)
    record = judged(lambda **given: WRONG[which](*honest_attention(**given)), case)
    assert record.verdict is Verdict.NONFINITE
    worst = record.worst
    assert worst is not None
    assert worst.gate == ("G1 lse" if which == "lse undefined" else "G1 out")


def test_the_place_of_a_lost_infinity_says_which_one() -> None:
    case = attention_case("nonfinite-v", **UNDEFINED)
    record = judged(lambda **given: WRONG["sign lost"](*honest_attention(**given)), case)
    assert record.worst is not None
    assert "token 9, head 2, dim 8, got inf, must be -inf" in str(record.worst.where)


def test_captured_activations_are_those_of_the_latents() -> None:
    (case,) = [case for case in drawn("attention", "full") if case.family == "captured"]
    (latent,) = [case for case in drawn("mla_prefill", "smoke", dtypes=("float32",)) if case.family == "captured"]
    rows, expanded = rows_by_request(case), rows_by_request(latent)
    assert case.sizes["query_lens"] == latent.sizes["query_lens"]
    assert torch.equal(rows[0].q.bfloat16(), expanded[0].q.bfloat16())
    torch.testing.assert_close(rows[0].k, expanded[0].k, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(rows[0].v, expanded[0].v, rtol=2**-7, atol=1e-2)
