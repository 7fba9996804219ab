"""Latent attention of given sizes: against the layer that it came from, its lost phases taken out there."""

import math
from pathlib import Path

import pytest
import torch
from tiny_models import generated, made, save_llama, scored, values
from torch import Tensor

from assay.eval.mla_conversion import GqaWeights, MlaWeights, gqa_inputs, mla_inputs
from assay.eval.mla_geometry import (
    DEEPSEEK_V3,
    MlaSizes,
    choose_components,
    convert_to_sizes,
    mean_cosine,
    mix_heads,
)

HEADS, KV_HEADS, WIDTH, HIDDEN, TOKENS = 4, 2, 8, 12, 9
FREQUENCIES = WIDTH // 2


def layer(seed: int = 0) -> GqaWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, HIDDEN, generator=generator, dtype=torch.float64)

    return GqaWeights(
        q_proj=normal(HEADS * WIDTH), k_proj=normal(KV_HEADS * WIDTH), v_proj=normal(KV_HEADS * WIDTH),
        inv_freq=torch.tensor([1.0, 0.5, 0.2, 0.05], dtype=torch.float64), num_heads=HEADS, num_kv_heads=KV_HEADS,
    )  # fmt: skip


def hidden() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def converted(gqa: GqaWeights, kept: list[int], **sizes: int) -> tuple[MlaWeights, Tensor]:
    axes, _ = mix_heads(gqa, torch.eye(HIDDEN))
    least = {"kv_lora_rank": 40, "d_nope": 20, "d_rope": 2 * sum(kept), "d_v": 11}
    damping = torch.tensor([0.1, 0.4, 0.8, 0.9], dtype=torch.float64)
    return convert_to_sizes(
        gqa, axes, kept=torch.tensor(kept), damping=damping, sizes=MlaSizes(**(least | sizes)), seed=3
    )


def latent_attention(mla: MlaWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[H, T, T]`` and outputs ``[T, H, Dv]``, straight from the definition."""
    q, kv_c, k_pe = mla_inputs(mla, x)
    d_nope = q.shape[2] - k_pe.shape[1]
    keys = torch.einsum("hdr,sr->shd", mla.kv_b_proj[:, :d_nope], kv_c)
    keys = torch.cat([keys, k_pe[:, None].expand(-1, HEADS, -1)], dim=-1)
    values = torch.einsum("hvr,sr->shv", mla.kv_b_proj[:, d_nope:], kv_c)
    logits = mla.softmax_scale * torch.einsum("thd,shd->hts", q, keys)
    return logits, torch.einsum("hts,shv->thv", weights(logits), values)


def weights(logits: Tensor) -> Tensor:
    future = torch.ones(TOKENS, TOKENS).triu(1).bool()
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def grouped_attention(gqa: GqaWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the original layer."""
    q, k, v = gqa_inputs(gqa, x)
    at = gqa.kv_head_of_head()
    logits = gqa.softmax_scale * torch.einsum("thd,shd->hts", q, k[:, at])
    return logits, torch.einsum("hts,shd->thd", weights(logits), v[:, at])


def components(gqa: GqaWeights, f: int, covariance: Tensor) -> list[tuple[Tensor, float]]:
    """Axes ``[H_kv]`` of a frequency and the energies of their products, largest first, one by one."""

    def energy(rows: Tensor) -> float:
        return float(torch.einsum("ze,ed,zd->", rows, covariance, rows))

    keys = gqa.k_proj.view(KV_HEADS, 2, FREQUENCIES, HIDDEN)[:, :, f]
    queries = gqa.q_proj.view(HEADS, 2, FREQUENCIES, HIDDEN)[:, :, f]
    gram = torch.einsum("gze,ed,hzd->gh", keys, covariance, keys)
    found = []
    for axis in torch.linalg.eigh(gram)[1].T:
        asked = sum(energy(axis[h // (HEADS // KV_HEADS)] * queries[h]) for h in range(HEADS))
        found.append((axis, energy(torch.einsum("g,gze->ze", axis, keys)) * asked))
    return sorted(found, key=lambda one: -one[1])


def test_all_components_kept_is_the_layer_itself() -> None:
    gqa, x = layer(), hidden()
    mla, basis = converted(gqa, [2, 2, 2, 2])
    logits, out = latent_attention(mla, x)
    wanted, attended = grouped_attention(gqa, x)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.einsum("hvd,thv->thd", basis, out), attended, rtol=0, atol=1e-10)
    assert mla.inv_freq.tolist() == [1.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.05, 0.05]
    assert mla.softmax_scale == WIDTH**-0.5


def test_a_component_that_is_not_kept_has_one_product_at_every_distance() -> None:
    gqa, x, kept = layer(), hidden(), [2, 1, 0, 1]
    mla, _ = converted(gqa, kept)
    logits, _ = latent_attention(mla, x)
    # the product as a sum over frequencies and components, each by plain complex numbers
    q = (x @ gqa.q_proj.T).view(TOKENS, HEADS, 2, FREQUENCIES)
    k = (x @ gqa.k_proj.T).view(TOKENS, KV_HEADS, 2, FREQUENCIES)
    damping = [0.1, 0.4, 0.8, 0.9]
    wanted = torch.zeros(HEADS, TOKENS, TOKENS, dtype=torch.float64)
    for f in range(FREQUENCIES):
        for c, (axis, _) in enumerate(components(gqa, f, torch.eye(HIDDEN).double())):
            key = torch.einsum("g,sgz->sz", axis, k[..., f])
            for h in range(HEADS):
                query = axis[h // (HEADS // KV_HEADS)] * q[:, h, :, f]
                for t in range(TOKENS):
                    for s in range(TOKENS):
                        product = complex(*query[t].tolist()) * complex(*key[s].tolist()).conjugate()
                        turn = complex(math.cos(a := (t - s) * gqa.inv_freq[f].item()), math.sin(a))
                        wanted[h, t, s] += (product * turn if c < kept[f] else damping[f] * product).real
    torch.testing.assert_close(logits, WIDTH**-0.5 * wanted, rtol=0, atol=1e-10)


def test_every_column_of_wide_sizes_is_in_use() -> None:
    gqa, x = layer(), hidden()
    mla, basis = converted(gqa, [2, 1, 0, 1])
    q, kv_c, _ = mla_inputs(mla, x)
    for tensor in (q, kv_c, mla.kv_b_proj[:, :20], mla.kv_b_proj[:, 20:], basis):
        assert (tensor.abs().flatten(0, -2).amax(0) > 1e-3).all()
    # heads of one KV head have projections of their own
    assert (mla.kv_b_proj[0] - mla.kv_b_proj[1]).abs().max() > 0.1
    torch.testing.assert_close(basis.transpose(1, 2) @ basis, torch.eye(WIDTH).double().expand(HEADS, -1, -1))


def test_one_seed_gives_one_layer() -> None:
    first, again = converted(layer(), [1, 1, 1, 1])[0], converted(layer(), [1, 1, 1, 1])[0]
    assert torch.equal(first.kv_b_proj, again.kv_b_proj)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d_rope": 6}, "d_rope must be the 8 columns of the components that keep RoPE, got 6"),
        ({"kv_lora_rank": 23}, "kv_lora_rank must be at least 24, got 23"),
        ({"d_nope": 7}, "d_nope must be at least 8, got 7"),
        ({"d_v": 7}, "d_v must be at least 8, got 7"),
    ],
)
def test_sizes_that_are_too_small_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted(layer(), [2, 1, 0, 1], **sizes)


def test_the_mean_cosine_is_the_sum_that_it_says() -> None:
    found = mean_cosine(torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64), horizon=5)
    total = sum(1 / d for d in range(1, 6))
    wanted = [sum(math.cos(w * d) / d for d in range(1, 6)) / total for w in (0.0, 0.3, 2.0)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    assert found[0] == 1


def test_axes_are_those_of_the_keys_and_come_by_their_products() -> None:
    gqa = layer(seed=5)
    x = hidden()
    covariance = x.T @ x / TOKENS
    axes, energy = mix_heads(gqa, covariance)
    for f in range(FREQUENCIES):
        wanted = components(gqa, f, covariance)
        assert energy[f].tolist() == pytest.approx([one for _, one in wanted], rel=1e-12)
        for axis, (expected, _) in zip(axes[f], wanted, strict=True):
            assert abs((axis @ expected).item()) == pytest.approx(1, abs=1e-12)


def test_large_keys_that_no_query_asks_for_come_last() -> None:
    gqa = layer()
    # at the second frequency the first KV head has keys ten times as large, and its query heads do not look there
    gqa.k_proj.view(KV_HEADS, 2, FREQUENCIES, HIDDEN)[0, :, 1] *= 10
    gqa.q_proj.view(HEADS, 2, FREQUENCIES, HIDDEN)[: HEADS // KV_HEADS, :, 1] *= 1e-3
    axes, _ = mix_heads(gqa, torch.eye(HIDDEN))
    assert axes[1, 1, 0].abs() > 0.9
    assert axes[1, 0, 1].abs() > 0.9


def test_components_that_would_lose_most_keep_their_phase() -> None:
    # shares of a layer: 6, 2, 1, 1 of 10 and 4, 4, 1, 1 of 10; the second frequency has no phase to lose
    energies = [torch.tensor(one).double() for one in ([[6.0, 2], [1, 1]], [[4.0, 4], [1, 1]])]
    inv_freq = torch.tensor([3.0, 0.0], dtype=torch.float64)
    for count, wanted in ((0, [0, 0]), (1, [1, 0]), (2, [2, 0]), (4, [2, 2])):
        assert choose_components(energies, inv_freq, count=count, horizon=64).tolist() == wanted
    # a layer whose products are a million times as large has no larger say
    loud = [energies[0], 1e6 * torch.tensor([[1.0, 1], [4, 4]]).double()]
    assert choose_components(loud, torch.tensor([3.0, 3.0]).double(), count=2, horizon=64).tolist() == [1, 1]
    with pytest.raises(ValueError, match="d_rope must be 2 columns for each of at most 4 components, got 10"):
        choose_components(energies, inv_freq, count=5, horizon=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the extra `model` is not installed")
    return save_llama(tmp_path_factory.mktemp("llama"))


def test_all_components_kept_is_the_model_itself(folder: Path) -> None:
    # 4 frequencies of 2 KV heads in 16 columns, nothing without RoPE but what one column must be
    exact = made(folder, geometry="24/1/16/12")
    torch.testing.assert_close(values(scored(exact)), values(scored(made(folder))), rtol=0, atol=1e-4)


def test_a_lossy_form_serves_all_kernels_alike(folder: Path) -> None:
    lossy = {"geometry": "40/12/8/12"}
    eager, whole = made(folder, **lossy), made(folder)
    assert (values(scored(eager)) - values(scored(whole))).abs().max() > 1e-2
    for options in (
        {"attention": "mla_prefill", "chunk": "2", "step": "3"},
        {"attention": "sparse_mla", "provider": "torch", "topk": "64"},
    ):
        model = made(folder, **lossy, **options)
        torch.testing.assert_close(values(scored(model)), values(scored(eager)), rtol=0, atol=1e-4)
        assert [one.ids for one in generated(model)] == [one.ids for one in generated(eager)]


def test_a_conversion_is_kept_and_described(folder: Path) -> None:
    first = made(folder, geometry="40/12/8/12").describe()
    (kept,) = (folder / "cache").glob("mla-2-40-12-8-12-*.safetensors")
    before = kept.stat().st_mtime_ns
    assert made(folder, geometry="40/12/8/12").describe() == first
    assert kept.stat().st_mtime_ns == before
    assert first["geometry"] == "40/12/8/12"
    assert "rope_frequencies" not in first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"geometry": "512/128/64"}, "geometry must be deepseek or four sizes R/Dn/Dr/Dv, got '512/128/64'"),
        ({"geometry": "deepseek"}, "d_rope must be 2 columns for each of at most 8 components, got 64"),
        ({"geometry": "40/12/7/12"}, "d_rope must be the 6 columns of the components that keep RoPE, got 7"),
        ({"geometry": "deepseek", "rope_frequencies": "4"}, "rope_frequencies and geometry must not come together"),
    ],
)
def test_forms_that_do_not_hold_a_model_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(folder, **options)


def test_deepseek_sizes_are_those_of_its_config() -> None:
    assert DEEPSEEK_V3 == MlaSizes(kv_lora_rank=512, d_nope=128, d_rope=64, d_v=128)
