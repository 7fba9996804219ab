"""Decoding over latent rows: against expanded keys and values, in closed form and inside a model."""

from pathlib import Path

import pytest
import torch
from tiny_models import generated, made, save_llama, scored, values

from assay.eval.models._hf_absorbed import absorbed_attention
from assay.optimized.mla_prefill import MlaShape

SHAPE = MlaShape(num_heads=3, kv_lora_rank=10, d_nope=5, d_rope=4, d_v=6)
ABSORBED = {"decode": "absorbed"}
FORMS = [
    {"rope_frequencies": "0"},
    {"rope_frequencies": "4"},
    {"rope_frequencies": "2", "attention": "attention", "step": "3"},
    {"rope_frequencies": "2", "attention": "mla_prefill", "chunk": "2", "step": "3"},
    {"rope_frequencies": "2", "attention": "masked_mha", "topk": "3"},
    {"geometry": "28/12/4/8"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the extra `model` is not installed")
    return save_llama(tmp_path_factory.mktemp("llama"))


def drawn(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "masked"), [(1, False), (1, True), (4, True)])
def test_it_is_attention_over_expanded_keys_and_values(tokens: int, masked: bool) -> None:
    batch, context, scale = 2, 7, 0.3
    query = drawn(0, batch, SHAPE.num_heads, tokens, SHAPE.d_nope + SHAPE.d_rope)
    kv_c, k_pe = drawn(1, batch, 1, context, SHAPE.kv_lora_rank), drawn(2, batch, 1, context, SHAPE.d_rope)
    weight = drawn(3, SHAPE.num_heads, SHAPE.d_nope + SHAPE.d_v, SHAPE.kv_lora_rank)
    # a token sees itself and what is before it, and the second row begins two columns later
    seen = torch.ones(batch, 1, tokens, context, dtype=torch.bool).tril(context - tokens)
    seen[1, ..., :2] = False
    mask = torch.where(seen, 0.0, -torch.inf).double() if masked else None
    found = absorbed_attention(query, kv_c, k_pe, weight, mask, scale=scale, shape=SHAPE)
    assert found.shape == (batch, tokens, SHAPE.num_heads, SHAPE.d_v)
    for row in range(batch):
        for head in range(SHAPE.num_heads):
            both = kv_c[row, 0] @ weight[head].T
            keys = torch.cat([both[:, : SHAPE.d_nope], k_pe[row, 0]], dim=1)
            for at in range(tokens):
                open_to = seen[row, 0, at] if masked else slice(None)
                shares = (scale * keys[open_to] @ query[row, head, at]).softmax(dim=0)
                expected = shares @ both[open_to, SHAPE.d_nope :]
                torch.testing.assert_close(found[row, at, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_plain_decoding(folder: Path, form: dict[str, str]) -> None:
    plain, absorbed = (
        generated(made(folder, **form, **way), min_new_tokens=6, max_new_tokens=12) for way in ({}, ABSORBED)
    )
    assert [one.ids for one in absorbed] == [one.ids for one in plain]
    for one, other in zip(absorbed, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.gaps), torch.tensor(other.gaps), rtol=0, atol=1e-4)
        prefill = {name: count for name, count in other.kernel_calls.items() if name.startswith("prefill/")}
        assert one.kernel_calls == prefill | {"decode/absorbed": other.kernel_calls["decode/eager"]}
    torch.testing.assert_close(
        values(scored(made(folder, **form, **ABSORBED))), values(scored(made(folder, **form))), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("scores", ["logits", "probability"])
def test_targets_behind_a_selection_are_scored_together(folder: Path, scores: str) -> None:
    rule = {"attention": "mla_prefill", "step": "3", "selection": "snapkv", "window": "2", "budget": "6", "sink": "1"}
    made_with = {"rope_frequencies": "2", "scores": scores, **rule}
    plain, absorbed = (scored(made(folder, **made_with, **way)) for way in ({}, ABSORBED))
    torch.testing.assert_close(values(absorbed), values(plain), rtol=0, atol=1e-5)
    # three layers decode all tokens of a target behind its first at once
    assert [one.kernel_calls["decode/absorbed"] for one in absorbed] == [3, 3, 3]
    whole = scored(made(folder, **{"rope_frequencies": "2", "attention": "mla_prefill", "step": "3"}, **ABSORBED))
    assert (values(absorbed) - values(whole)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "latent"}, "decode must be absorbed, beside eager attention, or none, got latent beside eager"),
        ({"attention": "sdpa", **ABSORBED}, "or none, got absorbed beside sdpa"),
        ({"attention": "attention", "plain": "sdpa", **ABSORBED}, "or none, got absorbed beside sdpa"),
        (ABSORBED, "absorbed decoding must have latent attention, got LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_decoded_so_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        made(folder, **options)


def test_the_description_says_how_tokens_are_decoded(folder: Path) -> None:
    form = {"rope_frequencies": "4", "attention": "mla_prefill"}
    assert made(folder, **form, **ABSORBED).describe()["decode"] == "absorbed"
    assert made(folder, **form).describe()["decode"] == "eager"
