"""Linear layers of transformers' models served by ours: against the model as it was, layer and whole."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
pytest.importorskip("tokenizers", reason="the extra `model` is not installed")

from tiny_models import PROMPTS, TARGETS, generated, made, save_kimi, save_llama, scored, values  # noqa: E402

from assay.eval.models import _hf_kda  # noqa: E402
from assay.eval.models._hf_kda import CHUNK, RECURRENT, DeltaRule  # noqa: E402
from assay.eval.models.interface import GenerateRequest  # noqa: E402

KIMI = "transformers.models.kimi_linear.modeling_kimi_linear"
GLM = "transformers.models.glm5_next.modeling_glm5_next"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kimi(tmp_path_factory.mktemp("kimi"))


ARMS = [
    {"kda": "torch"},
    {"kda": "torch", "step": "4"},
    {"kda": "auto", "attention": "mla_prefill", "step": "4", "chunk": "3"},
]


@pytest.mark.parametrize("options", ARMS)
def test_answers_are_those_of_the_model_itself(folder: Path, options: dict[str, str]) -> None:
    plain, ours = made(folder), made(folder, **options)
    torch.testing.assert_close(values(scored(ours)), values(scored(plain)), rtol=0, atol=1e-4)
    assert [one.ids for one in generated(ours)] == [one.ids for one in generated(plain)]


def test_a_padded_batch_answers_as_single_prompts_do(folder: Path) -> None:
    model = made(folder, kda="torch", step="4")
    alone = [answer for prompt in PROMPTS for answer in generated(model, [prompt])]
    assert [one.ids for one in generated(model)] == [one.ids for one in alone]


@pytest.mark.parametrize("options", [{}, *ARMS])
def test_a_first_step_of_one_column_moves_no_row_that_has_not_begun(folder: Path, options: dict[str, str]) -> None:
    # 11 columns in steps of 5 and 14 in steps of 13: the first is one wide, and only the longest prompt is in it
    model = made(folder, **(options | {"step": "5"}))
    alone = [answer for prompt in PROMPTS for answer in generated(model, [prompt])]
    assert [one.ids for one in generated(model)] == [one.ids for one in alone]
    model = made(folder, **(options | {"step": "13"}))
    single = [found for pair in zip(PROMPTS, TARGETS, strict=True) for found in scored(model, *zip(pair, strict=True))]
    torch.testing.assert_close(values(scored(model)), values(single), rtol=0, atol=1e-4)


def test_states_leave_the_batch_with_their_rows(folder: Path) -> None:
    model = made(folder, kda="torch", step="4")
    requests = [
        GenerateRequest(prompt_ids=prompt, max_new_tokens=length, min_new_tokens=length)
        for prompt, length in zip(PROMPTS, (2, 3, 9), strict=True)
    ]
    alone = [model.generate([one])[0] for one in requests]
    assert [one.ids for one in model.generate(requests)] == [one.ids for one in alone]


def test_calls_are_counted_beside_those_of_the_attention(folder: Path) -> None:
    answer = generated(made(folder, kda="torch", step="4"), PROMPTS[:1], min_new_tokens=6)[0]
    # two linear layers and one other; 11 tokens in steps of 4, and 5 that are decoded
    assert answer.kernel_calls == {
        "prefill/eager": 3, "decode/eager": 5, "kda_prefill/kda/torch": 2 * 3, "kda_decode/kda_step/torch": 2 * 5,
    }  # fmt: skip
    assert generated(made(folder), PROMPTS[:1], max_new_tokens=1)[0].kernel_calls == {"prefill/eager": 1}
    assert made(folder, kda="torch").describe()["kda"] == "torch"
    assert "kda" not in made(folder).describe()


def test_a_selection_leaves_states_alone(folder: Path) -> None:
    options = {"kda": "torch", "attention": "mla_prefill", "step": "4", "selection": "h2o", "sink": "1", "recent": "2"}
    whole = made(folder, attention="mla_prefill", step="4")
    kept = made(folder, **options, budget="11")
    assert [one.ids for one in generated(kept)] == [one.ids for one in generated(whole)]
    torch.testing.assert_close(values(scored(kept)), values(scored(whole)), rtol=0, atol=1e-4)
    few = generated(made(folder, **options, budget="4"), PROMPTS[:1], min_new_tokens=2)[0]
    assert few.kernel_calls["select/h2o_probability"] == 1


def test_states_of_another_request_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = values(scored(made(folder, kda="torch", step="4")))
    kda = vars(_hf_kda)["kda"]

    def swapped(*tensors: Tensor, initial_state: Tensor | None, **rest: Any) -> Any:
        return kda(*tensors, initial_state=None if initial_state is None else initial_state.flip(0), **rest)

    monkeypatch.setattr(_hf_kda, "kda", swapped)
    assert (values(scored(made(folder, kda="torch", step="4"))) - right).abs().max() > 1e-2


@pytest.mark.parametrize("name", [KIMI, GLM])
def test_functions_compute_what_those_of_transformers_do(name: str) -> None:
    module = importlib.import_module(name)
    rule, calls = functions(name)
    generator = torch.Generator().manual_seed(2)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    for tokens in (1, 5, 70):
        tensors = [normal(2, tokens, 3, 16), normal(2, tokens, 3, 16), normal(2, tokens, 3, 8)]
        tensors += [-normal(2, tokens, 3, 16).exp(), normal(2, tokens, 3).sigmoid()]
        for state in (None, normal(2, 3, 16, 8)):
            options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            for function in (CHUNK, RECURRENT):
                plain = getattr(module, function)
                wanted = plain(*tensors, **options)
                with rule.serving():
                    assert getattr(module, function) is not plain
                    found = getattr(module, function)(*tensors, **options)
                assert getattr(module, function) is plain
                torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert set(calls) == {"kda/torch", "kda_step/torch"}
    options["output_final_state"] = False
    with rule.serving():
        assert getattr(module, CHUNK)(*tensors, **options)[1] is None


def functions(name: str) -> tuple[DeltaRule, list[str]]:
    """Of a model that has no more than a module of the right name and sizes."""
    sizes = {"num_heads": 3, "head_dim": 16, "forget_gate": None}
    layer = type("Layer", (torch.nn.Linear,), {"__module__": name, **sizes})
    calls: list[str] = []
    return DeltaRule(layer(1, 1), "torch", calls.append), calls


@pytest.mark.parametrize("tokens", [1, 5])
def test_kernels_get_channels_beside_each_other(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    rule, _ = functions(KIMI)
    strides: list[int] = []
    for name in ("kda", "kda_step"):
        serve = vars(_hf_kda)[name]

        def seen(*tensors: Tensor, serve: Any = serve, **rest: Any) -> Any:
            strides.extend(tensor.stride(-1) for tensor in tensors)
            return serve(*tensors, **rest)

        monkeypatch.setattr(_hf_kda, name, seen)
    generator = torch.Generator().manual_seed(3)
    # as a convolution over tokens leaves them
    q, k, v, g = (torch.randn(2, 3 * 16, 7, generator=generator).mT.unflatten(2, (3, 16))[:, :tokens] for _ in range(4))
    options = {"initial_state": torch.zeros(2, 3, 16, 16), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    given = q, k, v, -g.exp(), torch.full((2, tokens, 3), 0.5)
    wanted = getattr(importlib.import_module(KIMI), RECURRENT)(*given, **options)
    with rule.serving():
        found = getattr(importlib.import_module(KIMI), RECURRENT)(*given, **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert q.stride(-1) != 1
    assert set(strides) == {1}


def test_functions_are_put_back_when_a_pass_fails() -> None:
    module = importlib.import_module(KIMI)
    plain = getattr(module, CHUNK)
    rule, _ = functions(KIMI)
    with pytest.raises(ArithmeticError), rule.serving():
        raise ArithmeticError
    assert getattr(module, CHUNK) is plain
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="each row must hold one sequence, got cu_seqlens"), rule.serving():
        getattr(module, CHUNK)(x, x, x, x, x[..., 0], cu_seqlens=torch.tensor([0, 1, 2]))


def test_a_layer_of_glm_is_served_at_the_same_seam() -> None:
    module = importlib.import_module(GLM)
    config = transformers.models.glm5_next.Glm5NextTextConfig(
        hidden_size=24, linear_head_dim=8, linear_num_heads=3, linear_lower_bound=-5.0, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = module.Glm5NextTextLinearAttention(config, 0).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    calls: list[str] = []
    rule = DeltaRule(layer, "torch", calls.append)
    hidden = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1))

    def outputs() -> list[Tensor]:
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            return [layer(part, cache=cache) for part in (hidden[:, :8], hidden[:, 8:])]

    wanted = outputs()
    with rule.serving():
        found = outputs()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert calls == ["kda/torch", "kda_step/torch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kda": "flash"}, "implementation 'flash' cannot serve this shape"),
        ({"kda": "slow"}, "implementation must be 'auto' or one of"),
    ],
)
def test_what_does_not_serve_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        made(folder, **options)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="kda must have linear layers of Kimi's form, got LlamaForCausalLM"):
        made(save_llama(tmp_path), kda="torch")
