"""Models in bfloat16 on a device: every kernel in the sizes of DeepSeek-V3, held to how far eager attention is off."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, TARGETS, generated, made, save_kimi, save_llama, scored, values

pytestmark = pytest.mark.gpu

GEOMETRY = {"geometry": "deepseek"}
DEVICE = {"device": "cuda", "dtype": "bfloat16"}
# a long prompt between short ones, so that lists are shorter than contexts
LONG = [PROMPTS[1], PROMPTS[0] * 20, PROMPTS[2]]
ARMS = {
    "prefill/mla_prefill": {"attention": "mla_prefill", "chunk": "64"},
    "prefill/masked_mha/triton": {"attention": "masked_mha", "topk": "256"},
    "prefill/sparse_mla/triton": {"attention": "sparse_mla", "provider": "triton", "topk": "256"},
    "prefill/sparse_mla/padded": {"attention": "sparse_mla", "provider": "padded", "topk": "256"},
    "prefill/sparse_mla/gluon": {"attention": "sparse_mla", "provider": "gluon", "topk": "256"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with the heads of SmolLM2-135M."""
    pytest.importorskip("transformers", reason="the extra `model` is not installed")
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
    return save_llama(tmp_path_factory.mktemp("llama"), **sizes, max_position_embeddings=512, initializer_range=0.06)


def off(model: Any, exact: torch.Tensor) -> float:
    """Mean distance of log-probabilities."""
    return float((values(scored(model, LONG, TARGETS)) - exact).abs().mean())


@pytest.mark.parametrize("kernel", ARMS)
def test_a_kernel_is_no_farther_off_than_eager(folder: Path, kernel: str) -> None:
    exact = values(scored(made(folder, **GEOMETRY), LONG, TARGETS))
    model = made(folder, **GEOMETRY, **DEVICE, **ARMS[kernel])
    assert off(model, exact) < 2 * off(made(folder, **GEOMETRY, **DEVICE), exact) + 1e-3
    assert set(scored(model, LONG, TARGETS)[1].kernel_calls) == {kernel}


@pytest.mark.parametrize("name", ["masked_mha", "sparse_mla"])
def test_kernels_of_one_selection_agree(folder: Path, name: str) -> None:
    sparse = {"topk": "64", "step": "96"}
    exact = values(scored(made(folder, **GEOMETRY, attention=name, provider="torch", **sparse), LONG, TARGETS))
    dense = off(made(folder, **GEOMETRY, **DEVICE), exact)
    for kernel, options in ARMS.items():
        if kernel.startswith(f"prefill/{name}"):
            # a selection that is not served is as far off as the dense model is
            assert off(made(folder, **GEOMETRY, **DEVICE, **(options | sparse)), exact) < dense / 2


@pytest.mark.parametrize("selection", ["snapkv", "h2o"])
@pytest.mark.parametrize("scores", ["logits", "probability"])
def test_a_selection_is_served_by_kernels(folder: Path, selection: str, scores: str) -> None:
    rule = {"attention": "mla_prefill", "chunk": "64", "selection": selection, "scores": scores}
    whole = made(folder, **GEOMETRY, **DEVICE, attention="mla_prefill", chunk="64")
    kept = made(folder, **GEOMETRY, **DEVICE, **rule, budget="256")
    answers = generated(kept, LONG, min_new_tokens=6)
    assert [one.ids for one in answers] == [one.ids for one in generated(whole, LONG, min_new_tokens=6)]
    assert answers[1].kernel_calls["scores/token_scores/triton"] == 2 * (1 if selection == "snapkv" else 4)
    exact = values(scored(made(folder, **GEOMETRY, **rule, budget="64"), LONG, TARGETS))
    eager = off(made(folder, **GEOMETRY, **DEVICE), values(scored(made(folder, **GEOMETRY), LONG, TARGETS)))
    assert off(made(folder, **GEOMETRY, **DEVICE, **rule, budget="64"), exact) < 2 * eager + 1e-3


def test_decoding_over_latent_rows_is_no_farther_off_than_over_expanded_ones(folder: Path) -> None:
    # with a selection, targets are decoded; a budget that holds every prompt leaves the model what it is
    rule = {"attention": "mla_prefill", "chunk": "64", "selection": "snapkv", "budget": "256"}
    exact = values(scored(made(folder, **GEOMETRY, **rule), LONG, TARGETS))
    absorbed = made(folder, **GEOMETRY, **DEVICE, **rule, decode="absorbed")
    plain = made(folder, **GEOMETRY, **DEVICE, **rule)
    assert off(absorbed, exact) < 2 * off(plain, exact) + 1e-3
    assert scored(absorbed, LONG, TARGETS)[1].kernel_calls["decode/absorbed"] == 2
    answers = (generated(model, LONG, min_new_tokens=6) for model in (absorbed, plain))
    assert len({tuple(one.ids for one in some) for some in answers}) == 1


def test_linear_layers_are_served_by_kernels(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `model` is not installed")
    sizes = {"hidden_size": 256, "linear_head_dim": 128, "max_position_embeddings": 512, "initializer_range": 0.06}
    folder = save_kimi(tmp_path, **sizes)
    exact = values(scored(made(folder), LONG, TARGETS))
    model = made(folder, **DEVICE, kda="auto", step="96")
    assert off(model, exact) < 2 * off(made(folder, **DEVICE), exact) + 1e-3
    calls = generated(model, LONG[1:2], min_new_tokens=6)[0].kernel_calls
    assert calls["kda_prefill/kda/triton"] == 2 * 3
    assert calls["kda_decode/kda_step/triton"] == 2 * 5
