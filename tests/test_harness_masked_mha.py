"""The cases of masked attention: who sees what in them, what is said of that, and what the kernels make of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from masked_cases import CPU, EVERYTHING, INF, OPERATION, SMOKE, arguments_of, case_of, drawn, true_answer
from masked_inputs import shape_of

from assay.harness.case import Case
from assay.harness.companions import companions
from assay.harness.faults._masked import masked_twin
from assay.harness.gates import Roundoffs, exact_elements
from assay.harness.operations._masked_mha_kernels import _Tiles
from assay.harness.operations._masked_mha_selection import packed, selected_bits, visible_keys
from assay.harness.operations._sizes import checked_sizes
from assay.harness.operations.masked_mha import BAIT
from assay.harness.poison import GUARD_ELEMENTS
from assay.harness.record import Verdict
from assay.harness.runner import run_case
from assay.optimized.masked_mha import plan_masked_mha
from assay.reference.topk_mask import selected_keys, tile_map

# who sees what


def test_a_row_of_bits_depends_on_its_request_and_position_alone() -> None:
    whole = selected_bits(7, 40, 30, 160, hole=32, counted=False)
    assert torch.equal(selected_bits(7, 55, 3, 160, hole=32, counted=False), whole[15:18])
    assert not torch.equal(selected_bits(8, 40, 30, 160, hole=32, counted=False), whole)
    before = selected_bits(7, -2, 4, 160, hole=0, counted=False)
    assert bool(before[:2].any())
    assert selected_bits(7, 3, 0, 64, hole=0, counted=False).shape == (0, 64)


def test_bits_are_of_every_kind() -> None:
    bits = selected_bits(1, 200, 400, 640, hole=0, counted=False)
    past = [row[: position + 1] for position, row in enumerate(bits, start=200)]
    counts = [int(row.sum()) for row in past]
    ends = [bool(row[31::32].all() & row[::32].all()) and int(row.sum()) < 60 for row in past]
    shares = np.array([count / len(row) for count, row in zip(counts, past, strict=True)])
    kinds = {"none": np.array(counts) == 0, "one": np.array(counts) == 1, "ends": np.array(ends), "all": shares == 1}
    kinds |= {"half": (shares > 0.4) & (shares < 0.6), "eighth": (shares > 0.08) & (shares < 0.18)}
    kinds["recent"] = np.array([bool(row[-16:].all()) and int(row.sum()) == 20 for row in past])
    assert all(20 < where.sum() < 120 for where in kinds.values()), {name: where.sum() for name, where in kinds.items()}
    # half of the future is selected as well, by whom nothing of the past is
    future = [row[position + 1 :].double().mean() for position, row in enumerate(bits[:300], start=200)]
    assert 0.4 < float(torch.stack(future).mean()) < 0.6


def test_counted_rows_see_a_power_of_two_of_keys_or_none() -> None:
    bits = selected_bits(1, 0, 130, 160, hole=32, counted=True)
    counts = {int(row[: position + 1].sum()) for position, row in enumerate(bits)}
    assert counts <= {0, 1, 2, 4, 8, 16, 32, 64}
    assert counts >= {0, 1, 2, 4, 8}


def test_holes_are_whole_tiles_of_which_nobody_selects_anything() -> None:
    bits = selected_bits(3, 100, 64, 640, hole=64, counted=False)
    columns = bits.unflatten(1, (10, 64)).any(-1)
    assert not columns[:, 0].any()
    assert 2 <= int((~columns.any(0)).sum()) <= 6
    # neighbours have more holes in common than the request has, at multiples of 16 positions
    tiles = [part.any(0) for part in columns.split([12, 16, 16, 16, 4])]
    assert len({tuple(tile.tolist()) for tile in tiles}) > 2


def test_packed_bits_are_read_back_by_the_oracle_of_masks() -> None:
    bits = selected_bits(2, 50, 40, 96, hole=0, counted=False)
    words = packed(bits)
    assert words.dtype == torch.int32
    assert int(words.min()) < 0
    assert torch.equal(selected_keys(words, 96), bits)


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.id)
def test_what_is_said_of_a_case_is_what_the_oracle_says_of_its_bits(case: Case) -> None:
    arguments, outline = arguments_of(case), OPERATION.outline(case)
    out, lse = true_answer(arguments)
    nan_rows = outline.nan_rows
    assert nan_rows is not None
    assert torch.equal((lse == -INF).all(1), outline.empty_rows)
    assert torch.equal((lse == -INF).any(1), outline.empty_rows)
    assert torch.equal(lse.isnan().any(1), nan_rows)
    undefined = torch.zeros(out.shape, dtype=torch.bool)
    for column in outline.undefined_columns:
        undefined[column.rows, column.heads, column.dim] = True
    assert torch.equal(~torch.isfinite(out), undefined | nan_rows[:, None, None])
    judged = torch.zeros(lse.shape, dtype=torch.bool)
    for rows in OPERATION.rows(case, arguments, budget=EVERYTHING):
        c = companions(rows)
        at = rows.tokens[:, None], rows.heads[None]
        torch.testing.assert_close(c.lse, lse[at], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(c.out, out[at], rtol=1e-11, atol=1e-11)
        assert torch.equal(c.visible, rows.selected.sum(1, keepdim=True).expand_as(c.visible).double())  # type: ignore[union-attr]
        judged[at] = True
    # all others hold what no oracle can be asked about
    assert bool((judged | nan_rows[:, None] | undefined.any(2) | undefined.any(2).any(0)).all())


def test_smoke_cases_hold_what_masks_are_wrong_in() -> None:
    sizes = [case.sizes for case in SMOKE]
    starts = {start % 32 for size in sizes for start in size["key_starts"]}
    assert starts >= {0, 1, 31, 8}
    assert {size["layout"] for size in sizes} == {"packed", "strided", "beside"}
    assert {size["num_heads"] // size["num_kv_heads"] for size in sizes} >= {1, 2, 3, 8}
    assert any(0 in size["query_lens"] for size in sizes)
    assert any(0 in size["key_lens"] for size in sizes)
    assert max(max(size["key_lens"]) for size in sizes) > 1024
    assert {hole for size in sizes for hole in size["key_holes"]} == {0, 32, 64, 128}
    # a word more than the keys need, and none
    spare = {
        size["mask_words"] - -(-max(map(sum, zip(size["key_starts"], size["key_lens"], strict=True))) // 32)
        for size in sizes
    }
    assert spare >= {0, 1}
    visible = [visible_keys(size, at, counted=False) for size in sizes for at in range(len(size["query_lens"]))]
    tall = [keys for keys in visible if min(keys.shape) > 1]
    assert any(not keys.any() for keys in tall)
    assert sum(int((keys.sum(1) == 1).sum()) for keys in tall) > 20
    # chunks before the first query and behind the last one
    behind = [
        (s + n, k)
        for size in sizes
        for s, n, k in zip(size["query_starts"], size["query_lens"], size["key_starts"], strict=True)
    ]
    assert any(end <= key for end, key in behind)
    history = [
        n and k + m <= s
        for size in sizes
        for n, s, k, m in zip(
            size["query_lens"], size["query_starts"], size["key_starts"], size["key_lens"], strict=True
        )
    ]
    assert any(history)


def test_the_full_tier_holds_the_geometries_and_tile_edges() -> None:
    cases = drawn("full")
    assert cases[: len(SMOKE)] == SMOKE
    assert {(case.sizes["d_qk"], case.sizes["d_v"]) for case in cases} >= {(192, 128), (128, 128), (256, 256), (72, 40)}
    lengths = {length for case in cases for name in ("query_lens", "key_lens") for length in case.sizes[name]}
    assert lengths >= {1, 63, 64, 65, 129}
    assert (
        {case.family for case in cases}
        > {case.family for case in SMOKE}
        == {case.family for case in SMOKE} - {"captured"}
    )
    nightly = drawn("nightly")
    assert nightly[: len(cases)] == cases
    assert len(nightly) == len(cases) + 60


@pytest.mark.parametrize("layout", ["packed", "strided", "beside"])
def test_guards_select_everything_and_unseen_keys_are_undefined(layout: str) -> None:
    case = case_of(layout=layout, query_lens=[2, 0], selection_seeds=[4, 6])
    inputs = OPERATION.inputs(case, CPU)
    k, v, mask = (inputs.arguments[name] for name in ("k", "v", "mask"))
    unseen = ~visible_keys(case.sizes, 0, counted=False).any(0)
    assert 5 < int(unseen.sum()) < 50
    assert torch.equal(k[:50].isnan().all(2).all(1), unseen)
    assert torch.equal((v[:50] == BAIT).all(2).all(1), unseen)
    assert bool(v[50:].isnan().all())
    assert bool(k[50:].isnan().all())
    assert bool((inputs.ledger.buffers["mask"][:GUARD_ELEMENTS] == -1).all())
    wide = inputs.ledger.buffers["mask"][GUARD_ELEMENTS:-GUARD_ELEMENTS]
    assert len(wide) == 2 * (3 if layout == "packed" else 4)
    assert mask.stride() == ((3, 1) if layout == "packed" else (4, 1))
    assert (k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()) == (layout == "beside")
    if layout == "beside":
        assert k.stride(1) == v.stride(1) == 24 + 16
        assert set(inputs.ledger.buffers) >= {"kv", "q", "mask"}


def test_an_unknown_layout_and_a_mask_without_a_bit_for_a_key_are_invalid() -> None:
    with pytest.raises(ValueError, match=r"layout must be one of .*, got 'fused'"):
        arguments_of(case_of(layout="fused"))
    with pytest.raises(ValueError, match="mask_words must hold 83 bits, got 2 words"):
        OPERATION.outline(case_of(mask_words=2))
    sizes = case_of().sizes
    assert checked_sizes(sizes, SMOKE) == sizes
    with pytest.raises(ValueError, match=r"mask_words must be such that .* each key up to 83, got 2"):
        checked_sizes(sizes | {"mask_words": 2}, SMOKE)
    with pytest.raises(ValueError, match="the length of selection_seeds must be that of query_lens, 2, got 1"):
        checked_sizes(sizes | {"selection_seeds": [5]}, SMOKE)


def test_large_cases_are_sampled() -> None:
    case = case_of(
        query_lens=[300, 200], key_lens=[400, 300], query_starts=[100, 100], key_starts=[0, 0], mask_words=13
    )
    arguments = arguments_of(case)
    everything, some = (list(OPERATION.rows(case, arguments, budget=budget)) for budget in (EVERYTHING, 1000))
    assert [len(rows.tokens) for rows in everything] == [300, 200]
    assert all(10 < len(rows.tokens) < 60 for rows in some)
    for part, whole in zip(some, everything, strict=True):
        at = part.tokens - int(whole.tokens[0])
        assert torch.equal(part.selected, whole.selected[at])  # type: ignore[index, arg-type]
        torch.testing.assert_close(companions(part).out, companions(whole).out[at])


def test_companions_of_selected_keys_are_those_of_the_keys_alone() -> None:
    (rows, _) = OPERATION.rows(case_of(dtype="float32"), arguments_of(case_of(dtype="float32")), budget=EVERYTHING)
    c = companions(rows)
    for query in (0, 3, 7, 11):
        seen = rows.selected[query].nonzero()[:, 0]  # type: ignore[index]
        if not len(seen):
            continue
        one = slice(query, query + 1)
        alone = replace(
            rows,
            q=rows.q[one],
            k=rows.k[seen],
            v=rows.v[seen],
            tokens=rows.tokens[one],
            positions=rows.positions[one],
            last_key=torch.tensor([len(seen) - 1]),
            selected=None,
        )
        own = companions(alone)
        # these speak of all keys of a request; and a running sum stands at hidden keys, too, where it was
        for name in sorted(set(own.__dataclass_fields__) - {"keys", "value_max", "sum_power", "scale_sum"}):
            expected, found = getattr(own, name)[0], getattr(c, name)[query]
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12), name


def test_exact_means_are_known_by_how_many_keys_are_selected() -> None:
    case = case_of("exact-uniform", key_starts=[0, 0], query_starts=[30, 31])
    for rows in OPERATION.rows(case, arguments_of(case), budget=EVERYTHING):
        c = companions(rows)
        exact = exact_elements(
            c, rows, Roundoffs.of(OPERATION.default_contract(case), rows), torch.bfloat16, case.family
        )
        counts = rows.selected.sum(1)  # type: ignore[union-attr]
        powers = (counts > 0) & (counts & (counts - 1) == 0)
        assert bool(powers.any())
        assert torch.equal(exact.any(2).any(1), powers)
        split = replace(rows, split_ends=(17, len(rows.k)))
        parts = torch.stack([rows.selected[:, :17].sum(1), rows.selected[:, 17:].sum(1)])  # type: ignore[index]
        both = powers & ((parts == 0) | (parts & (parts - 1) == 0)).all(0)
        again = exact_elements(
            companions(split), split, Roundoffs.of(OPERATION.default_contract(case), split), torch.bfloat16, case.family
        )
        assert not bool((again.any(2).any(1) & ~both).any())


# the kernels


@pytest.mark.parametrize("case", SMOKE[:9] + SMOKE[-4:], ids=lambda case: case.id)
def test_the_clean_twin_is_the_oracle(case: Case) -> None:
    arguments = arguments_of(case)
    out, lse = masked_twin({name: a.float() if name in ("q", "k", "v") else a for name, a in arguments.items()})
    expected = true_answer(arguments)
    finite = torch.isfinite(expected[0]) & (expected[0].abs() < 1e30)
    assert torch.equal(torch.isfinite(out), torch.isfinite(expected[0]))
    assert torch.equal(lse == -INF, expected[1] == -INF)
    tolerance = 2.0**-8 * float(arguments["v"].float().nan_to_num(0.0, 0.0, 0.0).abs().clamp(max=8.0).max())
    assert float((out.double() - expected[0])[finite].abs().max()) < tolerance


def test_a_map_at_hand_is_that_of_the_oracle() -> None:
    case = case_of(dtype="float32", key_holes=[64, 0], query_lens=[40, 70], query_starts=[60, 0], key_lens=[50, 80])
    arguments = arguments_of(case)
    (mapped,) = (one for one in OPERATION.kernels() if one.name == "masked_mha[triton-mapped]")
    plan = replace(
        plan_masked_mha(
            arguments["cu_seqlens_q"],
            arguments["cu_seqlens_k"],
            shape=shape_of(arguments),
            implementation="torch",
        ),
        tile=(16, 64),
    )
    found = _Tiles(plan).holding_bits(arguments["mask"])
    expected = tile_map(arguments["mask"], cu_seqlens_q=arguments["cu_seqlens_q"], tile_queries=16, tile_keys=64)
    assert torch.equal(found, expected)
    assert 0 < int((~expected).sum()) < expected.numel()
    assert mapped.unsupported(case, torch.device("cuda")) is None


@pytest.mark.parametrize("name", ["torch", "torch-chunked", "triton-chunked", "triton", "triton-mapped"])
def test_each_kernel_passes_where_it_serves(name: str) -> None:
    """Interpreted ones on the first case alone that is small enough for them."""
    (one,) = (found for found in OPERATION.kernels() if found.name == f"masked_mha[{name}]")
    tiny = case_of("peaked", "float32", query_lens=[3], query_starts=[37], key_lens=[40], key_starts=[0], num_heads=1)
    small = {"selection_seeds": [9], "key_holes": [32 if name == "triton-mapped" else 0], "mask_words": 2}
    cases = [replace(tiny, sizes=tiny.sizes | small)]
    if name.startswith("torch"):
        cases += [case for case in SMOKE if case.dtype == "bfloat16"]
    verdicts = [run_case(OPERATION, one, case, CPU).verdict for case in cases]
    assert verdicts[0] is Verdict.PASS
    assert set(verdicts) <= {Verdict.PASS, *([Verdict.UNSUPPORTED] if name == "torch-chunked" else [])}


def test_chunks_are_refused_where_keys_are_not_whole_contexts() -> None:
    (one,) = (found for found in OPERATION.kernels() if found.name == "masked_mha[torch-chunked]")
    whole = case_of(key_starts=[0, 0], query_starts=[30, 31])
    assert one.unsupported(whole, CPU) is None
    for change in (
        {"key_starts": [1, 0]},
        {"query_starts": [29, 31]},
        {"query_lens": [60, 9], "query_starts": [-10, 31]},
    ):
        refused = one.unsupported(replace(whole, sizes=whole.sizes | change), CPU)
        assert refused == "keys of whole contexts only, the queries the last tokens of them"
