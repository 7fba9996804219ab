"""Each family keeps its promise: exact ones are exact in every dtype, the others have the shape that shows a fault."""

import math
from typing import Any

import pytest
import torch
from builders import arguments_of, attention_case, in_dtype, mla_case, rows_of, true_answer
from torch import Tensor

from assay.harness import families
from assay.harness.case import Case
from assay.harness.companions import companions
from assay.harness.families import FAMILIES, RARE_FAMILIES, Tokens, attention_values, latent_values, tokens_of
from assay.harness.poison import same_bits
from assay.reference.attention import masked_logits
from assay.reference.mla_prefill import expand_latent

HALVES = ("float16", "bfloat16")
MAKERS = (attention_case, mla_case)
SIZES: dict[str, Any] = {"num_heads": 3, "softmax_scale": 0.25}
ATTENTION_SIZES = SIZES | {"num_kv_heads": 3, "d_qk": 12, "d_v": 8}
LATENT_SIZES = SIZES | {"kv_lora_rank": 24, "d_nope": 12, "d_rope": 6, "d_v": 8}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_tokens() -> Tokens:
    return tokens_of([3, 2], [7, 2], causal=True, generator=seeded(0))


def projected(case: Case) -> tuple[Tensor, Tensor]:
    """Keys and values of the cache in float64, from the stored inputs; slots of no token are NaN."""
    given = in_dtype(arguments_of(case), torch.float64)
    weights = given["kv_b_proj"].split([case.sizes["d_nope"], case.sizes["d_v"]], dim=1)
    k, v = expand_latent(given["kv_c"], given["k_pe"], *weights)
    owned = ~v.isnan().flatten(1).any(1)
    return k[owned], v[owned]


def logits_of(case: Case) -> list[Tensor]:
    return [masked_logits(rows.q, rows.k, rows.last_key, softmax_scale=rows.softmax_scale) for rows in rows_of(case)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_one_key_holds_all_weight_in_the_one_hot_family(make: Any, dtype: str) -> None:
    for logits in logits_of(make("exact-one-hot", dtype)):
        visible = (logits > -math.inf).sum(-1)
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        gap = best - second
        assert bool((visible > 1).any())
        assert float(gap[visible > 1].min()) >= families.ONE_HOT_GAP


@pytest.mark.parametrize("make", MAKERS)
def test_a_one_hot_output_is_the_value_of_its_key_and_names_it(make: Any) -> None:
    case = make("exact-one-hot", "bfloat16")
    for rows in rows_of(case):
        logits = masked_logits(rows.q, rows.k, rows.last_key, softmax_scale=rows.softmax_scale)
        chosen = logits.argmax(-1)
        out = companions(rows).out
        for query in range(len(rows.tokens)):
            for head in range(len(rows.heads)):
                assert torch.equal(out[query, head], rows.v[chosen[query, head], head])
        # no two keys have the same value
        assert len({tuple(row) for row in rows.v[:, 0].tolist()}) == len(rows.v)
        # the last key is chosen by every other query, and not by all
        last = chosen[:, 0] == rows.last_key
        assert bool(last.any())
        assert bool(last.all()) == (len(rows.v) == len(rows.tokens) == 1) or bool((~last).any())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", families.EXACT_FAMILIES)
def test_projections_of_exact_families_are_exact_in_half_precision(family: str, dtype: str) -> None:
    for tensor in projected(mla_case(family, dtype)):
        assert torch.equal(tensor.to(getattr(torch, dtype)).double(), tensor)


@pytest.mark.parametrize("make", MAKERS)
def test_uniform_weights_are_equal_and_alternating_columns_average_five(make: Any) -> None:
    case = make("exact-uniform", "bfloat16", query_lens=[4], **{_context(make): [16]})
    out, lse = true_answer(case)
    # the query that sees all 16 keys
    torch.testing.assert_close(lse[-1], torch.full_like(lse[-1], math.log(16)), rtol=0, atol=1e-14)
    assert float((out[-1, 0, 1] - 5).abs()) < 1e-14
    (rows,) = rows_of(case)
    values = rows.v
    assert values.min() >= 1
    assert values.max() <= 7
    assert set(values[:, 0, 1].tolist()) == {4.0, 6.0}
    assert len(set(values[:, 0, 0].tolist())) > 2


def _context(make: Any) -> str:
    return "key_lens" if make is attention_case else "context_lens"


@pytest.mark.parametrize("make", MAKERS)
def test_the_peaked_family_concentrates_what_the_diffuse_one_spreads(make: Any) -> None:
    shared = {}
    for family in ("diffuse", "peaked"):
        case = make(family, query_lens=[32], **{_context(make): [96]}, num_heads=4)
        (rows,) = rows_of(case)
        shared[family] = float((companions(rows).n_eff / companions(rows).visible).median())
    assert shared["diffuse"] > 0.25
    assert shared["peaked"] < 0.05


@pytest.mark.parametrize("make", MAKERS)
def test_logits_have_unit_variance_whatever_the_scale(make: Any) -> None:
    for scale in (0.02, 1.5):
        case = make(query_lens=[32], **{_context(make): [96]}, num_heads=4, softmax_scale=scale)
        (logits,) = logits_of(case)
        assert 0.7 < float(logits[logits > -math.inf].std()) < 1.4


@pytest.mark.parametrize("make", MAKERS)
def test_shifted_logits_lie_around_plus_and_minus_eighty(make: Any) -> None:
    for logits in logits_of(make("shifted")):
        for head, sign in ((0, 1), (1, -1)):
            seen = logits[:, head][logits[:, head] > -math.inf]
            assert float((seen - sign * families.LOGIT_SHIFT).abs().max()) < 8


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", ["constant-v", "ramp-v"])
def test_values_follow_one_constant_per_column_spread_over_a_binade(make: Any, family: str) -> None:
    case = make(family, query_lens=[1], **{_context(make): [65]}, d_v=64)
    (rows,) = rows_of(case)
    slope = (
        torch.linspace(-1, 1, 65, dtype=torch.float64)[:, None] if family == "ramp-v" else torch.ones(65, 1).double()
    )
    v = rows.v[:, 0]
    constants = (slope * v).sum(0) / slope.square().sum()
    # what is left is the noise
    assert float((v - slope * constants).std()) == pytest.approx(families.NOISE, rel=0.5)
    magnitude = constants.abs()
    assert 0.95 < float(magnitude.min()) < 1.15
    assert 1.75 < float(magnitude.max()) < 2.05
    assert 16 <= int((constants < 0).sum()) <= 48


def test_latent_channels_hold_the_constant_and_the_ramp_alone() -> None:
    tokens = small_tokens()
    for family, channel in (("constant-v", 0), ("ramp-v", 1)):
        q, kv_c, k_pe, weights = latent_values(family, tokens, generator=seeded(3), **LATENT_SIZES)
        assert torch.equal(kv_c[:, 0], torch.ones(9))
        assert torch.equal(kv_c[:, 1], tokens.ramp)
        # keys do not see them, so that logits stay diffuse
        assert float(weights[:, :12, :2].abs().max()) == 0.0
        assert bool((weights[:, 12:, channel].abs() >= 1).all())
        assert float(weights[:, 12:, 1 - channel].abs().max()) < 0.1
        assert (q.shape, k_pe.shape) == ((5, 3, 18), (9, 6))


def test_the_shifting_dimension_is_projected_exactly() -> None:
    # beside a rope part it is one of its dimensions, which are not projected at all
    for sizes, dim in (({}, -1), ({"d_rope": 0}, 0)):
        k, _ = projected(mla_case("shifted", "bfloat16", **sizes))
        assert torch.equal(k[..., dim], torch.full_like(k[..., dim], 8.0))
        assert not torch.equal(k[..., 1].bfloat16().double(), k[..., 1])


@pytest.mark.parametrize("family", FAMILIES + RARE_FAMILIES)
def test_a_seed_gives_the_same_values_and_another_seed_others(family: str) -> None:
    def draw(seed: int) -> list[Tensor]:
        drawn = attention_values(family, small_tokens(), generator=seeded(seed), **ATTENTION_SIZES)
        return [*drawn, *latent_values(family, small_tokens(), generator=seeded(seed), **LATENT_SIZES)]

    assert all(same_bits(a, b) for a, b in zip(draw(1), draw(1), strict=True))
    if family != "exact-one-hot":
        # one-hot values are decided by the tokens alone
        assert not all(torch.equal(a, b) for a, b in zip(draw(1), draw(2), strict=True))


def test_an_unknown_family_is_refused() -> None:
    expected = "family must be one of diffuse, .*, nonfinite-v, got 'gaussian'"
    with pytest.raises(ValueError, match=expected):
        attention_values("gaussian", small_tokens(), generator=seeded(0), **ATTENTION_SIZES)
    with pytest.raises(ValueError, match=expected):
        latent_values("gaussian", small_tokens(), generator=seeded(0), **LATENT_SIZES)


@pytest.mark.parametrize("causal", [True, False])
def test_targets_are_keys_that_their_query_sees(causal: bool) -> None:
    # a request without queries, one without keys, and one whose first query sees nothing when causal
    query_lens, key_lens = [4, 0, 2, 3, 8], [9, 5, 0, 2, 8]
    tokens = tokens_of(query_lens, key_lens, causal=causal, generator=seeded(1))
    starts_q, starts_k = [0, 4, 4, 6, 9], [0, 9, 14, 14, 16]
    assert len(tokens.targets) == 17
    assert len(tokens.ramp) == 24
    for start_q, start_k, n, m in zip(starts_q, starts_k, query_lens, key_lens, strict=True):
        for i in range(n):
            last = i + m - n if causal else m - 1
            target = int(tokens.targets[start_q + i])
            if last < 0:
                assert target == -1
            elif i % 2 == 0:
                assert target == start_k + last
            else:
                assert start_k <= target <= start_k + last


def test_the_ramp_rises_over_each_request() -> None:
    ramp = tokens_of([1, 1, 1], [5, 1, 3], causal=True, generator=seeded(0)).ramp
    assert ramp.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0, 1.0, -1.0, 0.0, 1.0]


def test_codes_tell_numbers_apart() -> None:
    assert [families.code_bits(count) for count in (0, 1, 2, 3, 8, 9, 1024, 1025)] == [1, 1, 1, 2, 3, 4, 10, 11]
    code = families.sign_code(torch.tensor([0, 5, 7]), 4, 3)
    assert code.tolist() == [[-1, -1, -1, -1], [1, -1, 1, 1], [1, 1, 1, 1]]
    values = families.token_values(300, 6, 9)
    assert values[0, :2].tolist() == [1.0, 1.0]
    assert values[299, :2].tolist() == [44.0, 3.0]


def test_widths_that_cannot_hold_the_code_are_refused() -> None:
    with pytest.raises(ValueError, match="the key width must be at least the 6 bits of the code, got 5"):
        families.one_hot_strength(5, 6, 0.1)
    narrow = LATENT_SIZES | {"kv_lora_rank": 9}
    with pytest.raises(ValueError, match="kv_lora_rank must be at least 10 for 9 keys, got 9"):
        latent_values("exact-one-hot", small_tokens(), generator=seeded(0), **narrow)


def test_a_latent_too_narrow_for_its_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_lora_rank must be at least 2"):
        latent_values("ramp-v", small_tokens(), generator=seeded(0), **LATENT_SIZES | {"kv_lora_rank": 1})


def test_the_strength_of_a_query_is_the_smallest_power_of_two_that_reaches_the_gap() -> None:
    for width, bits, scale in ((24, 5, 0.17), (6, 6, 1.0), (128, 7, 0.07)):
        strength = families.one_hot_strength(width, bits, scale)
        reached = strength * 2 * (width // bits) * scale
        assert families.ONE_HOT_GAP <= reached < 2 * families.ONE_HOT_GAP
        assert math.log2(strength).is_integer()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_overflowing_keys_give_logits_of_both_signs_near_the_largest_of_float16(make: Any, dtype: str) -> None:
    case = make("overflow", dtype, query_lens=[4], **{_context(make): [60]})
    (logits,), (rows,) = logits_of(case), rows_of(case)
    seen = logits[logits > -math.inf]
    assert float((seen.abs() - 60000).abs().max()) < 400
    assert 0.25 < float((seen > 0).double().mean()) < 0.75
    assert float(rows.k.abs().max()) == families.LARGE_KEY
    assert bool(torch.isfinite(torch.tensor(families.LARGE_KEY).to(torch.float16)))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("sizes", [{}, {"d_rope": 0}], ids=["rope", "no rope"])
@pytest.mark.parametrize(("family", "depth"), [("sunken", families.LOGIT_DEPTH), ("shifted", families.LOGIT_SHIFT)])
@pytest.mark.parametrize("softmax_scale", [1e-3, 5e-5])
def test_a_small_scale_moves_logits_as_far_with_numbers_of_float16(
    make: Any, sizes: dict[str, int], family: str, depth: float, softmax_scale: float
) -> None:
    case = make(family, "float16", softmax_scale=softmax_scale, **(sizes if make is mla_case else {}))
    for rows in rows_of(case):
        assert bool(torch.isfinite(rows.q).all())
        assert bool(torch.isfinite(rows.k).all())
    for logits in logits_of(case):
        seen = logits[logits > -math.inf]
        assert float((seen.abs() / abs(depth) - 1).abs().max()) < 0.1


@pytest.mark.parametrize("family", [name for name in FAMILIES + RARE_FAMILIES if name != "exact-uniform"])
def test_a_scale_is_refused_that_asks_for_queries_beyond_float16(family: str) -> None:
    expected = "softmax_scale must be so large that float16 holds the queries, got 1e-07"
    with pytest.raises(ValueError, match=expected):
        attention_values(family, small_tokens(), generator=seeded(0), **ATTENTION_SIZES | {"softmax_scale": 1e-7})
    with pytest.raises(ValueError, match=expected):
        latent_values(family, small_tokens(), generator=seeded(0), **LATENT_SIZES | {"softmax_scale": 1e-7})


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_a_scale_that_makes_all_logits_alike_or_none_is_refused(scale: float) -> None:
    for family in ("diffuse", "exact-one-hot"):
        with pytest.raises(ValueError, match=f"softmax_scale must be a number other than 0, got {scale}"):
            attention_values(family, small_tokens(), generator=seeded(0), **ATTENTION_SIZES | {"softmax_scale": scale})
        with pytest.raises(ValueError, match=f"softmax_scale must be a number other than 0, got {scale}"):
            latent_values(family, small_tokens(), generator=seeded(0), **LATENT_SIZES | {"softmax_scale": scale})


def test_without_a_rope_part_the_large_keys_are_projected_exactly() -> None:
    k, _ = projected(mla_case("overflow", "float16", d_rope=0))
    assert set(k[..., 0].unique().tolist()) == {-families.LARGE_KEY, families.LARGE_KEY}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_leverage_draws_a_query_to_a_key_that_has_an_equal_one(make: Any, dtype: str) -> None:
    case = make("leverage", dtype, query_lens=[6], **{_context(make): [50]})
    (rows,), (logits,) = rows_of(case), logits_of(case)
    # a key and the one that is as far from the other end
    assert torch.equal(rows.k, rows.k.flip(0))
    assert not torch.equal(rows.v, rows.v.flip(0))
    weights = logits.softmax(-1)
    # every other query is drawn to the last key it sees; with its twin it holds half of the weight, not nearly all
    held = torch.stack(
        [weights[at, :, int(rows.last_key[at])] + weights[at, :, 49 - int(rows.last_key[at])] for at in (0, 2, 4)]
    )
    assert 0.3 < float(held.mean()) < 0.7
    assert torch.equal(weights[5, :, 0], weights[5, :, 49])
    largest = weights.topk(2).values
    assert bool((largest[..., 0] == largest[..., 1]).any())
    assert float(largest.sum(-1).max()) < 0.95
    # rounding in one direction adds up only if values have one sign
    assert float((rows.v[..., ::2] > 0).double().mean()) > 0.8


@pytest.mark.parametrize("d_v", [1, 2, 3, 16])
def test_undefined_dimensions_begin_with_the_last(d_v: int) -> None:
    dims = families.nonfinite_dims(d_v)
    assert math.isnan(dims[d_v - 1])
    assert set(dims) <= set(range(d_v))
    assert len(dims) == min(3, d_v)
    assert dict(dims).get(0, math.inf) == math.inf or d_v == 1


def test_a_key_seen_by_all_lies_in_the_request_with_the_fewest_queries() -> None:
    assert families.key_seen_by_all([0, 5, 2, 9], [4, 9, 8, 3]) == (2, 3)
    # no request has as many keys as queries
    assert families.key_seen_by_all([0, 5], [4, 3]) is None


def test_shared_prefixes_are_parts_of_both_histories() -> None:
    assert families.shared_prefixes([1, 2, 5, 1, 1], [9, 7, 5, 40, 3]) == [0, 4, 0, 0, 0]
    assert families.shared_prefixes([1], [9]) == [0]
    tokens = tokens_of([1, 2], [5, 6], causal=True, generator=seeded(0), prefixes=[0, 3])
    assert tokens.shared.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 8, 9, 10]
    assert tokens.twins.tolist() == [4, 3, 2, 1, 0, 10, 9, 8, 7, 6, 5]
    assert tokens.visible.tolist() == [5, 5, 6]
    assert tokens_of([2], [2], causal=False, generator=seeded(0)).twins.tolist() == [0, 1]


@pytest.mark.parametrize("family", families.EXACT_FAMILIES)
def test_values_that_name_their_token_are_not_shared(family: str) -> None:
    tokens = tokens_of([1, 2], [5, 6], causal=True, generator=seeded(0), prefixes=[0, 3])
    with pytest.raises(ValueError, match=f"layout must not share slots in {family}"):
        latent_values(family, tokens, generator=seeded(0), **LATENT_SIZES)
