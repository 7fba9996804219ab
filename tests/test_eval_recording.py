"""Calls recorded while a model reads: what is stored is what the layers were given, and the judge takes it."""

import json
import re
from pathlib import Path
from typing import Any

import eval_pointer_model
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from assay.eval import cli, recording
from assay.eval.models.interface import GenerateRequest
from assay.eval.recording import fitted
from assay.harness.captures import read_captures
from assay.harness.cli import app as judge
from assay.reference.attention import attention
from assay.reference.mla_prefill import mla_prefill

RUNNER = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"})
HERE = Path(__file__).parent
MODEL = ["--model", f"{HERE / 'eval_pointer_model.py'}:load"]
TASK = ["--task", "synthetic_qasper", "--max-tokens", "120"]


def capture(out: Path, *arguments: str) -> Any:
    """``assay eval capture`` of the copying model."""
    return RUNNER.invoke(cli.app, ["capture", *MODEL, *TASK, "--op", "mla_prefill", "--out", str(out), *arguments])


def test_the_last_call_of_a_prompt_is_stored_in_the_order_of_positions(tmp_path: Path) -> None:
    result = capture(tmp_path / "calls", "--samples", "2", "--layers", "1", "-o", "step=32")
    assert result.exit_code == 0, result.output
    assert f"assay check mla_prefill --captured {tmp_path / 'calls'}" in result.output
    captures = read_captures(tmp_path / "calls")
    assert len(captures) == 2
    for one in captures:
        described = json.loads(Path(one.name.rpartition("#")[0]).with_suffix(".json").read_text())
        origin = described["origin"]
        # an odd end, so that the last step is shorter than the others
        assert one.sizes["T"] == origin["prompt_tokens"]
        assert one.sizes["n"] == origin["prompt_tokens"] % 32 or 32
        assert (origin["layer"], origin["task"], origin["heads"]) == (1, "synthetic_qasper", [0])
        assert one.numbers == {"softmax_scale": eval_pointer_model.CONTEXT, "history_chunk_size": 32}


def test_the_stored_tensors_give_what_the_layer_gave(tmp_path: Path) -> None:
    """The oracle on the stored tensors against the output of that very layer."""
    assert capture(tmp_path / "calls", "--samples", "1", "--layers", "0,1").exit_code == 0
    paths = sorted((tmp_path / "calls").glob("*.safetensors"))
    assert [re.findall(r"layer(\d+)", path.name) for path in paths] == [["000"], ["001"]]
    model = eval_pointer_model.load()
    seen: dict[int, Tensor] = {}
    serve = model.seam.serve

    def watched(layer: int, arguments: Any, house: Any) -> Tensor:
        seen[layer] = serve(layer, arguments, house)
        return seen[layer]

    model.seam.serve = watched  # type: ignore[method-assign]
    recorder_ids = _prompt_ids(model, paths[0])
    model.generate([GenerateRequest(prompt_ids=recorder_ids, max_new_tokens=1)])
    for layer, path in enumerate(paths):
        tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
        scale = json.loads(path.with_suffix(".json").read_text())["numbers"]["softmax_scale"]
        queries, tokens = len(tensors["q"]), len(tensors["kv_c"])
        out, _ = mla_prefill(
            *(tensors[name] for name in ("q", "kv_c", "k_pe", "kv_b_proj")),
            softmax_scale=scale,
            cu_seqlens=torch.tensor([0, queries]),
            slot_table=torch.arange(tokens)[None],
            request_rows=torch.tensor([0]),
            context_lens=torch.tensor([tokens]),
        )
        torch.testing.assert_close(seen[layer].double(), out, rtol=0, atol=1e-5)


def _prompt_ids(model: Any, path: Path) -> tuple[int, ...]:
    """The prompt of a stored call, built anew."""
    from assay.eval.prompts import PromptPolicy, build_prompt
    from assay.eval.settings import text_digest
    from assay.eval.tasks import Loading, load_task

    loaded = load_task("synthetic_qasper", Loading())
    origin = json.loads(path.with_suffix(".json").read_text())["origin"]
    assert origin["data_sha256"] == loaded.sha256
    sample = next(one for one in loaded.samples if one.id == origin["sample"])
    prompt = build_prompt(loaded.task, sample, model.tokenizer, PromptPolicy(max_tokens=120), max_target=1)
    assert text_digest(prompt.text) == origin["prompt_sha256"]
    return prompt.ids


def test_the_judge_takes_what_was_recorded(tmp_path: Path) -> None:
    assert capture(tmp_path / "calls", "--samples", "1").exit_code == 0
    for kernel, code in (("torch", 0), (f"{HERE / 'planted_prefills.py'}:stale_block", 1)):
        arguments = ["--captured", str(tmp_path / "calls"), "--kernel", kernel, "--device", "cpu", "--in-process"]
        result = CliRunner().invoke(judge, ["check", "mla_prefill", *arguments])
        assert result.exit_code == code, result.output


def test_equal_recordings_are_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert capture(tmp_path / name, "--samples", "2").exit_code == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0,7"], "--layers must be among those that call mla_prefill, 0, 1, got [7]"),
        (["--layers", "0,zero"], "--layers must be numbers parted by commas, each once, got '0,zero'"),
        (["--layers", "1,1"], "each once"),
        (["--op", "sparse_mla"], "--op must be one of attention, mla_prefill, got 'sparse_mla'"),
        (["--op", "attention"], "must be served by attention, got one served by mla_prefill"),
        (["--model", "ngram"], "got one served by no operation of the house"),
        (["--task", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_recorded_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = capture(tmp_path / "calls", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "calls").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls" / "mine.txt").touch()
    result = capture(tmp_path / "calls")
    assert result.exit_code == 2
    assert "--out must be a new or empty folder" in result.stderr
    assert [path.name for path in (tmp_path / "calls").iterdir()] == ["mine.txt"]


def test_the_seam_is_left_alone_after_a_prompt_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = eval_pointer_model.load()

    def fail(requests: Any) -> Any:
        raise ValueError("it broke")

    monkeypatch.setattr(model, "generate", fail)
    monkeypatch.setattr(recording, "load_model", lambda name, options: model)
    assert capture(tmp_path / "calls").exit_code == 2
    assert model.seam.watch is None


def latent_call(heads: int, queries: int, tokens: int) -> dict[str, Tensor]:
    marks = torch.arange(heads * queries, dtype=torch.float32).view(queries, heads, 1).expand(-1, -1, 6).contiguous()
    projection = torch.arange(heads, dtype=torch.float32)[:, None, None].expand(-1, 5, 8).contiguous()
    return {"q": marks, "kv_c": torch.zeros(tokens, 8), "k_pe": torch.zeros(tokens, 2), "kv_b_proj": projection}


def test_a_call_keeps_its_heads_and_queries_as_far_as_they_fit() -> None:
    call = latent_call(heads=9, queries=40, tokens=50)
    whole, heads = fitted("mla_prefill", call, 1 << 20)
    assert heads == list(range(9))
    assert all(torch.equal(whole[name], call[name]) for name in call)
    fewer, heads = fitted("mla_prefill", call, 8000)
    assert heads == [0, 3, 5, 8]
    assert torch.equal(fewer["q"], call["q"][:, heads])
    assert torch.equal(fewer["kv_b_proj"], call["kv_b_proj"][heads])
    least, heads = fitted("mla_prefill", call, 3500)
    assert heads == [0, 8]
    # the last queries are those that see the most
    assert torch.equal(least["q"], call["q"][-20:, heads])
    assert sum(tensor.nbytes for tensor in least.values()) <= 3500
    with pytest.raises(ValueError, match=r"a call must fit its share of --max-mib, 100 bytes, got \d+ at the least"):
        fitted("mla_prefill", call, 100)


def test_query_heads_that_share_a_key_stay_together() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (20, 8, 6), "k": (30, 4, 6), "v": (30, 4, 3)}
    call = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    fewer, heads = fitted("attention", call, 10000)
    assert heads == [0, 1, 6, 7]

    def attend(tensors: dict[str, Tensor]) -> Tensor:
        ends = torch.tensor([0, 20]), torch.tensor([0, 30])
        return attention(**tensors, softmax_scale=0.4, causal=True, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])[0]

    torch.testing.assert_close(attend(fewer), attend(call)[:, heads], rtol=0, atol=1e-12)


@pytest.mark.parametrize("op", ["attention", "mla_prefill"])
def test_a_transformers_model_is_recorded(tmp_path: Path, op: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `model` is not installed")
    config = transformers.LlamaConfig(
        vocab_size=129, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4, eos_token_id=128, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    vocabulary = {chr(at): at for at in range(128)} | {"<end>": 128}
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    fast.save_pretrained(tmp_path / "llama")
    options = ["model=" + str(tmp_path / "llama"), "cache=" + str(tmp_path / "cache"), "chunk=16", "step=48"]
    options += ["rope_frequencies=3"] if op == "mla_prefill" else []
    given = [part for option in options for part in ("-o", option)]
    out = tmp_path / "calls"
    arguments = ["capture", "--model", "hf", *given, *TASK, "--op", op, "--samples", "1", "--out", str(out)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    captures = read_captures(out)
    # four of five layers, from the first to the last
    assert [re.findall(r"layer(\d+)", one.name) for one in captures] == [["000"], ["001"], ["003"], ["004"]]
    assert all(0 < one.sizes["n"] <= 48 < one.sizes["T"] for one in captures)
    judged = CliRunner().invoke(judge, ["check", op, "--captured", str(out), "--kernel", "torch", "--device", "cpu"])
    assert judged.exit_code == 0, judged.output
