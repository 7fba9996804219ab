"""The conversion to latent attention against attention written out here, and the stored capture against its claims."""

import importlib.resources
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor, nn

from assay.eval import capture
from assay.eval.llama_layers import layer_weights, load_model, logits_with, mla_attention, record
from assay.eval.mla_conversion import GqaWeights, convert_to_mla, mla_inputs
from assay.reference.mla_prefill import mla_prefill

TOKENS, HIDDEN, FREQUENCIES = 13, 32, 4
HEADS = [(4, 2), (3, 3), (4, 1)]
STORED = importlib.resources.files("assay.harness") / "captured" / "mla_smollm2.safetensors"


def random_layer(num_heads: int, num_kv_heads: int, seed: int = 0) -> tuple[GqaWeights, Tensor]:
    """A layer and hidden states, float64; the slowest frequency still turns by radians over the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gqa = GqaWeights(
        q_proj=normal(num_heads * 2 * FREQUENCIES, HIDDEN) / 4,
        k_proj=normal(num_kv_heads * 2 * FREQUENCIES, HIDDEN) / 4,
        v_proj=normal(num_kv_heads * 2 * FREQUENCIES, HIDDEN) / 4,
        inv_freq=torch.tensor([1.0, 0.6, 0.35, 0.2], dtype=torch.float64),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    return gqa, normal(TOKENS, HIDDEN)


def relative_phase_attention(gqa: GqaWeights, hidden: Tensor, inv_freq: Tensor) -> Tensor:
    """Causal attention with RoPE as one complex phase per distance, head by head: ``[T, H, D]``.

    Nothing is turned here: a pair of channels is a complex number, and the logit of query t and key s is
    the real part of ``sum_f conj(q_f) k_f exp(i w_f (s - t))``.
    """
    tokens, d = hidden.shape[0], gqa.head_dim
    positions = torch.arange(tokens, dtype=torch.float64)
    angle = (positions[None, :] - positions[:, None])[..., None] * inv_freq.double()
    phase = torch.polar(torch.ones_like(angle), angle)
    outs = []
    for head in range(gqa.num_heads):
        kv_head = head * gqa.num_kv_heads // gqa.num_heads
        q = hidden @ gqa.q_proj[head * d : (head + 1) * d].T
        k, v = (hidden @ weight[kv_head * d : (kv_head + 1) * d].T for weight in (gqa.k_proj, gqa.v_proj))
        q_pairs, k_pairs = (torch.complex(x[:, : d // 2].contiguous(), x[:, d // 2 :].contiguous()) for x in (q, k))
        logits = torch.einsum("tf,sf,tsf->ts", q_pairs.conj(), k_pairs, phase).real / d**0.5
        weights = logits.exp().tril()
        outs.append((weights / weights.sum(dim=1, keepdim=True)) @ v)
    return torch.stack(outs, dim=1)


class TinyModel:
    """As much of a Llama as the capture touches: attention and residuals, float64, random weights."""

    def __init__(self, num_heads: int = 4, num_kv_heads: int = 2, layers: int = 3, twist: float = 1.0) -> None:
        self.config = SimpleNamespace(
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, attention_bias=False
        )
        self.gqa = [random_layer(num_heads, num_kv_heads, seed=10 + layer)[0] for layer in range(layers)]
        self.model = SimpleNamespace(
            layers=[SimpleNamespace(self_attn=self._projections(gqa)) for gqa in self.gqa],
            rotary_emb=SimpleNamespace(inv_freq=self.gqa[0].inv_freq, rope_type="default"),
        )
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(50, HIDDEN, generator=generator, dtype=torch.float64)
        self.out = torch.randn(HIDDEN, num_heads * 2 * FREQUENCIES, generator=generator, dtype=torch.float64) / 4
        self.twist = twist

    @staticmethod
    def _projections(gqa: GqaWeights) -> SimpleNamespace:
        modules: dict[str, nn.Module] = {"o_proj": nn.Identity()}
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(gqa, name)
            modules[name] = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
            modules[name].weight = nn.Parameter(weight)
        return SimpleNamespace(**modules)

    def __call__(self, token_ids: Tensor) -> SimpleNamespace:
        x = self.embedding[token_ids]
        for layer, gqa in zip(self.model.layers, self.gqa, strict=True):
            # only the hooks look at this projection
            layer.self_attn.q_proj(x)
            attended = relative_phase_attention(gqa, x[0], self.twist * gqa.inv_freq)
            x = x + layer.self_attn.o_proj(attended.flatten(1)[None]) @ self.out.T
        return SimpleNamespace(logits=x @ self.embedding.T)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(0, 50, (TOKENS,), generator=torch.Generator().manual_seed(1))


def capture_bytes(model: TinyModel, token_ids: Tensor, lines: list[str] | None = None) -> bytes:
    echo = (lambda _: None) if lines is None else lines.append
    return capture.capture(model, token_ids, rope_frequencies=2, provenance={"model": "tiny"}, echo=echo)


def run_prompt(*inputs: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """The oracle over one prompt without history; ``inputs`` are q, kv_c, k_pe and kv_b_proj."""
    tokens = len(inputs[0])
    return mla_prefill(
        *inputs,
        softmax_scale=softmax_scale,
        cu_seqlens=torch.tensor([0, tokens]),
        slot_table=torch.arange(tokens)[None],
        request_rows=torch.tensor([0]),
        context_lens=torch.tensor([tokens]),
    )


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_lossless_conversion_equals_grouped_query_attention(num_heads: int, num_kv_heads: int) -> None:
    gqa, hidden = random_layer(num_heads, num_kv_heads)
    mla = convert_to_mla(gqa, rope_frequencies=FREQUENCIES)
    out, _ = run_prompt(*mla_inputs(mla, hidden), mla.kv_b_proj, softmax_scale=mla.softmax_scale)
    expected = relative_phase_attention(gqa, hidden, gqa.inv_freq)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("rope_frequencies", range(FREQUENCIES))
def test_conversion_equals_attention_without_the_dropped_phases(
    num_heads: int, num_kv_heads: int, rope_frequencies: int
) -> None:
    gqa, hidden = random_layer(num_heads, num_kv_heads)
    mla = convert_to_mla(gqa, rope_frequencies=rope_frequencies)
    out, _ = run_prompt(*mla_inputs(mla, hidden), mla.kv_b_proj, softmax_scale=mla.softmax_scale)
    kept = torch.arange(FREQUENCIES) < rope_frequencies
    expected = relative_phase_attention(gqa, hidden, gqa.inv_freq * kept)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    # these inputs can tell: the dropped phases matter here
    assert (out - relative_phase_attention(gqa, hidden, gqa.inv_freq)).abs().max() > 1e-2


def test_conversion_has_the_stated_widths_and_dense_projections() -> None:
    gqa, hidden = random_layer(4, 2)
    mla = convert_to_mla(gqa, rope_frequencies=1)
    q, kv_c, k_pe = mla_inputs(mla, hidden)
    d_nope, d_rope, d_value, rank = 6, 4, 8, 28
    assert q.shape == (TOKENS, 4, d_nope + d_rope)
    assert kv_c.shape == (TOKENS, rank)
    assert k_pe.shape == (TOKENS, d_rope)
    assert mla.kv_b_proj.shape == (4, d_nope + d_value, rank)
    assert mla.softmax_scale == 8**-0.5
    for tensor in (q, mla.kv_b_proj):
        assert tensor.abs().min() > 0
    # heads of one group share their projection, those of two groups do not
    assert torch.equal(mla.kv_b_proj[0], mla.kv_b_proj[1])
    assert (mla.kv_b_proj[1] - mla.kv_b_proj[2]).abs().max() > 0.1


def test_kv_b_proj_has_orthonormal_rows() -> None:
    mla = convert_to_mla(random_layer(3, 3)[0], rope_frequencies=2)
    rows = mla.kv_b_proj.flatten(0, 1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rope_frequencies", [-1, FREQUENCIES + 1])
def test_conversion_refuses_frequencies_out_of_range(rope_frequencies: int) -> None:
    with pytest.raises(ValueError, match=rf"rope_frequencies must be in 0 \.\. 4, got {rope_frequencies}"):
        convert_to_mla(random_layer(4, 2)[0], rope_frequencies=rope_frequencies)


def test_weights_refuse_shapes_that_disagree() -> None:
    gqa, _ = random_layer(4, 2)
    parts = {name: getattr(gqa, name) for name in ("q_proj", "k_proj", "v_proj", "inv_freq")}
    with pytest.raises(ValueError, match=r"k_proj must have shape \(8, 32\), got \(16, 32\)"):
        GqaWeights(**parts, num_heads=4, num_kv_heads=1)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads 3, got 4"):
        GqaWeights(**parts, num_heads=4, num_kv_heads=3)


def test_sink_mass_is_the_mean_weight_on_the_first_token_in_the_second_half() -> None:
    logits = torch.full((4, 1, 4), float("-inf"), dtype=torch.float64)
    logits[:, 0, 0] = 0.0
    # queries 2 and 3 give the first token 1/3 and 1/2; the first half would give it all
    logits[2, 0, 1] = torch.log(torch.tensor(2.0, dtype=torch.float64))
    logits[3, 0, 3] = 0.0
    torch.testing.assert_close(capture.sink_mass(logits), torch.tensor([5 / 12], dtype=torch.float64))


def test_rule_takes_the_layer_of_greatest_contrast_its_weakest_head_and_each_groups_strongest() -> None:
    masses = torch.tensor([[0.9, 0.8, 0.7, 0.9, 0.9, 0.8], [0.6, 0.5, 0.2, 0.1, 0.3, 0.4], [0.0] * 6])
    assert capture.choose_layer(masses) == 1
    assert capture.choose_heads(masses[1], num_kv_heads=2) == [0, 3, 5]
    assert capture.choose_heads(masses[1], num_kv_heads=3) == [0, 2, 3, 5]


def test_encode_gives_equal_bytes_that_the_library_reads() -> None:
    tensors = {"q": torch.arange(6, dtype=torch.bfloat16), "k": torch.ones(3, dtype=torch.bfloat16)}
    metadata = {name: name for name in ("text", "model", "layer", "heads", "script")}
    contents = {capture.encode(tensors, dict(order)) for order in (metadata.items(), reversed(metadata.items()))}
    assert len(contents) == 1
    content = contents.pop()
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0
    assert list(json.loads(content[8 : 8 + size])["__metadata__"].items()) == sorted(metadata.items())
    read = load(content)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_encode_refuses_a_file_of_one_mebibyte() -> None:
    with pytest.raises(ValueError, match="the file must be smaller than 1048576 bytes, got"):
        capture.encode({"q": torch.zeros(2**19, dtype=torch.bfloat16)}, {"model": "m"})


def test_capture_of_a_tiny_model_stores_what_its_attention_computes(token_ids: Tensor) -> None:
    model, lines = TinyModel(num_heads=6), list[str]()
    content = capture_bytes(model, token_ids, lines)
    assert content == capture_bytes(model, token_ids)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    layer, heads = int(metadata["layer"]), [int(head) for head in metadata["heads"].split(",")]
    assert metadata["model"] == "tiny"
    assert metadata["kv_heads"] == ",".join(str(head // 3) for head in heads)
    # otherwise the first heads and the chosen ones could not be told apart
    assert heads != list(range(len(heads)))

    hidden = model.embedding[token_ids]
    for gqa in model.gqa[:layer]:
        hidden = hidden + relative_phase_attention(gqa, hidden, gqa.inv_freq).flatten(1) @ model.out.T
    gqa = model.gqa[layer]
    expected = relative_phase_attention(gqa, hidden, gqa.inv_freq * torch.tensor([1, 1, 0, 0]))[:, heads]
    stored = load(content)
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    inputs = (stored[name].double() for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
    out, _ = run_prompt(*inputs, softmax_scale=float(metadata["softmax_scale"]))
    assert (out - expected).norm() / expected.norm() < 2e-2
    assert [line.split(":")[0] for line in lines if line.startswith(("lossless", "stored"))] == ["lossless", "stored"]


def test_lossless_variant_leaves_the_models_logits_alone(token_ids: Tensor) -> None:
    model = TinyModel()
    recording = record(model, token_ids)
    for rope_frequencies, same in ((FREQUENCIES, True), (FREQUENCIES - 1, False)):
        mla = convert_to_mla(layer_weights(model, 1), rope_frequencies=rope_frequencies)
        out = mla_attention(mla, recording.hidden[1])
        difference = (logits_with(model, token_ids, 1, out) - recording.logits).abs().max()
        assert (difference < 1e-9) == same


def test_hooks_are_gone_after_a_recording(token_ids: Tensor) -> None:
    model = TinyModel()
    before = model(token_ids[None]).logits
    capture_bytes(model, token_ids)
    assert torch.equal(model(token_ids[None]).logits, before)
    for layer in model.model.layers:
        assert not any(module._forward_pre_hooks for module in vars(layer.self_attn).values())


def test_a_model_with_another_attention_is_refused(token_ids: Tensor) -> None:
    with pytest.raises(NotImplementedError, match="layer 0 must be plain Llama attention"):
        capture_bytes(TinyModel(twist=1.01), token_ids)


def test_scaled_rope_and_bias_are_refused(token_ids: Tensor) -> None:
    model = TinyModel()
    model.config.attention_bias = True
    with pytest.raises(NotImplementedError, match="attention_bias must be false"):
        capture_bytes(model, token_ids)
    model.model.rotary_emb.rope_type = "yarn"
    with pytest.raises(NotImplementedError, match="rope_type must be 'default', got 'yarn'"):
        capture_bytes(model, token_ids)


@pytest.mark.parametrize("module", ["transformers", "gguf", "accelerate"])
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("transformers", "tokenizers", "gguf", "accelerate"):
        # None makes an import fail as if nothing were installed
        monkeypatch.setitem(sys.modules, name, None if name == module else SimpleNamespace())
    with pytest.raises(ModuleNotFoundError, match=rf"^{module} must be installed .*kernel-assay\[model\]"):
        load_model(Path("model.gguf"))


def test_capture_file_cuts_the_text_and_records_its_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token_ids: Tensor
) -> None:
    def tokenizer(text: str, *, return_tensors: str) -> Any:
        return SimpleNamespace(input_ids=torch.cat([token_ids, token_ids.flip(0)])[None])

    monkeypatch.setattr(capture, "load_model", lambda path: (tokenizer, TinyModel()))
    weights, out = tmp_path / "tiny.gguf", tmp_path / "folder" / "tiny.safetensors"
    weights.write_bytes(b"weights")
    options: dict[str, Any] = {
        "model": weights,
        "model_source": "tiny, no licence needed",
        "text": "a text",
        "text_source": "this test",
        "out": out,
        "rope_frequencies": 2,
        "echo": lambda _: None,
    }
    with pytest.raises(ValueError, match="the text must have at least 99 tokens, got 26"):
        capture.capture_file(tokens=99, **options)
    assert not out.exists()
    capture.capture_file(tokens=TOKENS, **options)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
        stored_q = file.get_tensor("q")
    assert torch.equal(stored_q, load(capture_bytes(TinyModel(), token_ids))["q"])
    assert metadata["model"] == "tiny, no licence needed"
    assert metadata["text"] == "this test"
    # sha256 of b"a text"
    assert metadata["text_sha256"] == "734194ede5b063e654d63cb95a682ca1551b45e3cc86e88f1a85c1286eedd4ac"


def test_gsm8k_text_joins_the_first_questions_and_answers(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the extra `eval` is not installed")
    rows = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(capture.QUESTIONS + 1)]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = capture.gsm8k_text(path)
    assert text.startswith("Question: 0 + 0?\nAnswer: #### 0\n\nQuestion: 1 + 1?")
    assert text.endswith("Answer: #### 14")
    path.write_text(json.dumps(rows[5]) + "\n", encoding="utf-8")
    assert capture.gsm8k_text(path) == "Question: 5 + 5?\nAnswer: #### 10"


def test_gsm8k_text_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets must be installed .*kernel-assay\[eval\]"):
        capture.gsm8k_text(tmp_path / "test.jsonl")


@pytest.fixture(scope="module")
def stored() -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Tensors, metadata and size of the captured file."""
    content = STORED.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return load(content), json.loads(content[8 : 8 + size])["__metadata__"], len(content)


Stored = tuple[dict[str, Tensor], dict[str, str], int]


def test_captured_file_has_the_documented_form(stored: Stored) -> None:
    tensors, metadata, size = stored
    assert size < 2**20
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "q": (384, 4, 32 + 96),
        "kv_c": (384, 288),
        "k_pe": (384, 96),
        "kv_b_proj": (4, 32 + 64, 288),
    }
    for tensor in tensors.values():
        assert tensor.dtype == torch.bfloat16
        assert torch.isfinite(tensor).all()
    assert float(metadata["softmax_scale"]) == 64**-0.5
    assert metadata["heads"] == "2,3,5,8"
    assert metadata["kv_heads"] == "0,1,1,2"
    for name, part in (("model", "Apache-2.0"), ("text", "MIT"), ("script", "assay.eval.capture 1"), ("layer", "18")):
        assert part in metadata[name]


def test_captured_file_has_the_stated_attention_sink(stored: Stored) -> None:
    tensors, metadata, _ = stored
    q, kv_c, k_pe, kv_b_proj = (tensors[name].double() for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
    # two probe channels through the oracle: a value of 1 on every token sums the weights of a row, and a value of 1
    # on the first token alone is the sink mass
    probes = torch.zeros(len(kv_c), 2, dtype=torch.float64)
    probes[:, 0], probes[0, 1] = 1.0, 1.0
    readers = torch.zeros(len(kv_b_proj), 2, kv_b_proj.shape[2] + 2, dtype=torch.float64)
    readers[:, 0, -2], readers[:, 1, -1] = 1.0, 1.0
    widened = torch.cat([nn.functional.pad(kv_b_proj, (0, 2)), readers], dim=1)
    latents, scale = torch.cat([kv_c, probes], dim=1), float(metadata["softmax_scale"])
    out, lse = run_prompt(q, latents, k_pe, widened, softmax_scale=scale)
    row_sums, sink_weights = out[..., -2], out[..., -1]
    assert torch.isfinite(lse).all()
    torch.testing.assert_close(row_sums, torch.ones_like(row_sums), rtol=0, atol=1e-12)
    masses = sink_weights[len(q) // 2 :].mean(dim=0)
    claimed = torch.tensor([float(mass) for mass in metadata["sink_mass"].split(",")], dtype=torch.float64)
    torch.testing.assert_close(masses, claimed, rtol=0, atol=1e-6)
    # three strong sinks and, for contrast, one head that looks elsewhere
    assert (masses > 0.3).sum() == 3
    assert masses.max() > 0.99
    assert masses.min() < 0.2
