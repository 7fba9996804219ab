"""One real input for ``mla_prefill``: activations of a trained model whose attention is converted to MLA.

A Llama-style model reads a text, and one of its layers becomes latent attention by ``eval.mla_conversion``. What the
operation would be given for that text (``q``, ``kv_c``, ``k_pe``, ``kv_b_proj`` of a few heads, after RoPE) is stored
in bfloat16. Unlike random inputs, these have an attention sink, outlier channels and rows of very different size.

The variant: the fastest frequencies (16 of 32) keep RoPE, the slow ones become the nope part. The lossless variant
keeps them all, and then ``Dn = 0`` and ``W_UK`` is empty, so a kernel could drop that part unseen. With 16 all four
widths are in use and differ (``Dn`` 32, ``Dr`` 96, ``Dv`` 64, ``R`` 288), ``W_UK`` and ``W_UV`` are dense, and
``softmax_scale`` is that of the original layer, not ``(Dn + Dr) ** -0.5``. The price is that the slow phases are gone:
the script measures it, and runs the lossless variant beside it as a check of the conversion.

The rule: the layer in which the heads differ most in their sink mass, and of it the weakest head and each KV group's
strongest. The sink mass of a head is its mean weight on the first token over the queries of the second half.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..reference.attention import masked_logits, softmax_with_lse
from ..reference.mla_prefill import expand_latent, mla_prefill
from .extras import require
from .mla_conversion import GqaWeights, MlaWeights, convert_to_mla, gqa_inputs, mla_inputs

# raised whenever the same model and text would give another file
SCRIPT_VERSION = 1
MAX_BYTES = 2**20
QUESTIONS = 8
# float32 rounding of a whole layer is below 1e-5 of its largest output; another kind of attention is far above
MODEL_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one forward pass showed of the attention layers.

    Attributes:
        hidden: Per layer ``[T, E]``, float64, the input of the projections.
        attended: Per layer ``[T, H, D]``, float64, the heads' outputs.
        logits: ``[T, vocabulary]``, float64.
    """

    hidden: list[Tensor]
    attended: list[Tensor]
    logits: Tensor


def load_model(path: Path) -> tuple[Any, Any]:
    """Load tokenizer and model from a GGUF file, weights dequantised to float32; nothing is downloaded."""
    transformers = require("transformers", extra="model")
    for module in ("tokenizers", "gguf", "accelerate"):
        require(module, extra="model")
    source = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
    return tokenizer, model.eval()


def gsm8k_text(path: Path) -> str:
    """The first questions of a GSM8K file with their answers, as one text."""
    datasets = require("datasets", extra="eval")
    rows = datasets.Dataset.from_json(str(path), keep_in_memory=True)
    rows = rows.select(range(min(QUESTIONS, len(rows))))
    return "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows)


def layer_weights(model: Any, layer: int) -> GqaWeights:
    """The attention projections of one layer, float64.

    Raises:
        NotImplementedError: If the model is not of the Llama form: plain RoPE, no bias.
    """
    config, attention = model.config, model.model.layers[layer].self_attn
    if model.model.rotary_emb.rope_type != "default":
        raise NotImplementedError(f"rope_type must be 'default', got {model.model.rotary_emb.rope_type!r}")
    if config.attention_bias:
        raise NotImplementedError("attention_bias must be false, got true")
    return GqaWeights(
        q_proj=attention.q_proj.weight.detach().double(),
        k_proj=attention.k_proj.weight.detach().double(),
        v_proj=attention.v_proj.weight.detach().double(),
        inv_freq=model.model.rotary_emb.inv_freq.double(),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
    )


def record(model: Any, token_ids: Tensor) -> Recording:
    """Run the model over ``token_ids`` ``[T]`` and keep what goes into and comes out of each attention."""
    hidden: list[Tensor] = []
    attended: list[Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        for layer in model.model.layers:
            for module, kept in ((layer.self_attn.q_proj, hidden), (layer.self_attn.o_proj, attended)):
                hook = module.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0][0].double()))
                stack.callback(hook.remove)
        logits = model(token_ids[None]).logits[0].double()
    shape = (len(token_ids), model.config.num_attention_heads, -1)
    return Recording(hidden=hidden, attended=[out.view(shape) for out in attended], logits=logits)


def logits_with(model: Any, token_ids: Tensor, layer: int, attended: Tensor) -> Tensor:
    """Logits ``[T, vocabulary]`` of the model with the heads' outputs ``[T, H, D]`` of one layer replaced."""

    def replace(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (attended.flatten(1)[None].to(args[0].dtype),)

    with ExitStack() as stack, torch.no_grad():
        stack.callback(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(replace).remove)
        logits: Tensor = model(token_ids[None]).logits[0].double()
    return logits


def gqa_attention(gqa: GqaWeights, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The original layer over one prompt: causal logits ``[T, H, T]`` and outputs ``[T, H, D]``."""
    q, k, v = gqa_inputs(gqa, hidden)
    logits = masked_logits(q, k, torch.arange(q.shape[0]), softmax_scale=gqa.softmax_scale)
    return logits, softmax_with_lse(logits, v)[0]


def mla_attention(mla: MlaWeights, hidden: Tensor) -> Tensor:
    """The converted layer over one prompt, by the oracle of ``mla_prefill``: ``[T, H, Dv]``."""
    q, kv_c, k_pe = mla_inputs(mla, hidden)
    tokens = q.shape[0]
    out, _ = mla_prefill(
        q,
        kv_c,
        k_pe,
        mla.kv_b_proj,
        softmax_scale=mla.softmax_scale,
        cu_seqlens=torch.tensor([0, tokens]),
        slot_table=torch.arange(tokens)[None],
        request_rows=torch.tensor([0]),
        context_lens=torch.tensor([tokens]),
    )
    return out


def sink_mass(logits: Tensor) -> Tensor:
    """Mean weight on the first token over the queries of the second half, ``[H]``, from logits ``[T, H, T]``."""
    return logits[logits.shape[0] // 2 :].softmax(dim=-1)[..., 0].mean(dim=0)


def choose_layer(masses: Tensor) -> int:
    """The layer in which the heads' sink masses lie furthest apart; ``masses`` is ``[layers, H]``."""
    return int((masses.amax(dim=1) - masses.amin(dim=1)).argmax())


def choose_heads(masses: Tensor, num_kv_heads: int) -> list[int]:
    """The weakest head and the strongest of each KV group, in order; ``masses`` is ``[H]``."""
    groups = masses.view(num_kv_heads, -1)
    strongest = groups.argmax(dim=1) + torch.arange(num_kv_heads) * groups.shape[1]
    return sorted({int(masses.argmin()), *strongest.tolist()})


def stored_tensors(mla: MlaWeights, hidden: Tensor, heads: list[int]) -> dict[str, Tensor]:
    """The inputs of ``mla_prefill`` for the chosen heads, bfloat16."""
    q, kv_c, k_pe = mla_inputs(mla, hidden)
    tensors = {"q": q[:, heads], "kv_c": kv_c, "k_pe": k_pe, "kv_b_proj": mla.kv_b_proj[heads]}
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def stored_logits(tensors: dict[str, Tensor], softmax_scale: float) -> Tensor:
    """Causal logits ``[T, H, T]`` of the stored inputs, float64."""
    q, kv_c, k_pe, kv_b_proj = (tensors[name].double() for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
    d_nope = q.shape[-1] - k_pe.shape[-1]
    k, _ = expand_latent(kv_c, k_pe, kv_b_proj[:, :d_nope], kv_b_proj[:, d_nope:])
    return masked_logits(q, k, torch.arange(q.shape[0]), softmax_scale=softmax_scale)


def encode(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file, equal for equal content.

    Raises:
        ValueError: If they are 1 MiB or more.
    """
    content = save(tensors, metadata=metadata)
    size = int.from_bytes(content[:8], "little")
    # the library writes the metadata in the order of a randomly seeded hash map
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + content[8 + size :]
    if len(content) >= MAX_BYTES:
        raise ValueError(f"the file must be smaller than {MAX_BYTES} bytes, got {len(content)}; use fewer tokens")
    return content


def capture(
    model: Any, token_ids: Tensor, *, rope_frequencies: int, provenance: dict[str, str], echo: Callable[[str], None]
) -> bytes:
    """Choose a layer and heads, convert, verify and encode; every number on the way is printed.

    Args:
        model: A Llama-style causal language model.
        token_ids: ``[T]``, int64.
        rope_frequencies: How many frequencies keep RoPE, the fastest first.
        provenance: Metadata about model and text.
        echo: Takes the report, line by line.

    Returns:
        The content of the safetensors file.
    """
    recording = record(model, token_ids)
    masses = _sink_masses(model, recording, echo)
    layer = choose_layer(masses)
    gqa, hidden = layer_weights(model, layer), recording.hidden[layer]
    heads = choose_heads(masses[layer], gqa.num_kv_heads)
    echo(f"layer {layer} (sink masses furthest apart), heads {heads} (the weakest, and the strongest per KV group)")

    variants = {"lossless": gqa.inv_freq.shape[0], "stored": rope_frequencies}
    converted = {name: convert_to_mla(gqa, rope_frequencies=count) for name, count in variants.items()}
    for name, mla in converted.items():
        _verify(name, mla, gqa, model, token_ids, recording, layer, echo)

    mla = converted["stored"]
    tensors = stored_tensors(mla, hidden, heads)
    stored_masses = sink_mass(stored_logits(tensors, mla.softmax_scale)).tolist()
    metadata = provenance | {
        "script": f"assay.eval.capture {SCRIPT_VERSION}",
        "layer": str(layer),
        "heads": ",".join(map(str, heads)),
        "kv_heads": ",".join(map(str, gqa.kv_head_of_head()[heads].tolist())),
        "rope_frequencies": str(rope_frequencies),
        "softmax_scale": repr(mla.softmax_scale),
        "sink_mass": ",".join(f"{mass:.6f}" for mass in stored_masses),
    }
    content = encode(tensors, metadata)
    for name, tensor in tensors.items():
        echo(f"{name:10} {list(tensor.shape)} {tensor.dtype}, largest {tensor.abs().max():.4g}")
    echo(f"sink mass as stored: {metadata['sink_mass']}; softmax_scale {metadata['softmax_scale']}")
    echo(f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return content


def _sink_masses(model: Any, recording: Recording, echo: Callable[[str], None]) -> Tensor:
    """The sink mass of every head, ``[layers, H]``.

    Raises:
        NotImplementedError: If a layer of the model does not compute what our layer with its weights computes.
    """
    masses, worst = [], 0.0
    echo("sink mass per layer and head")
    for layer, (hidden, attended) in enumerate(zip(recording.hidden, recording.attended, strict=True)):
        logits, out = gqa_attention(layer_weights(model, layer), hidden)
        difference = float((out - attended).abs().max() / attended.abs().max())
        # written so that NaN fails
        if not difference <= MODEL_TOLERANCE:
            raise NotImplementedError(
                f"layer {layer} must be plain Llama attention, got outputs off by {difference:.1e} of the largest"
            )
        worst = max(worst, difference)
        masses.append(sink_mass(logits))
        echo(f"{layer:5} " + " ".join(f"{mass:.3f}" for mass in masses[-1].tolist()))
    echo(f"original layers in float64 against the model's own: largest difference {worst:.1e} of the largest output")
    return torch.stack(masses)


def _verify(
    name: str,
    mla: MlaWeights,
    gqa: GqaWeights,
    model: Any,
    token_ids: Tensor,
    recording: Recording,
    layer: int,
    echo: Callable[[str], None],
) -> None:
    """Print how far a converted layer, and the whole model with it, is from the original."""
    hidden = recording.hidden[layer]
    d_rope, rank = mla.rope_proj.shape[0], mla.latent_proj.shape[0]
    out, (_, original) = mla_attention(mla, hidden), gqa_attention(gqa, hidden)
    logits = logits_with(model, token_ids, layer, out)
    agree = (logits.argmax(dim=-1) == recording.logits.argmax(dim=-1)).double().mean()
    losses = [torch.nn.functional.cross_entropy(z[:-1], token_ids[1:]).item() for z in (recording.logits, logits)]
    echo(
        f"{name}: Dn {mla.q_proj.shape[1] - d_rope}, Dr {d_rope}, Dv {out.shape[-1]}, R {rank}\n"
        f"  attention output: max |difference| {(out - original).abs().max():.2e}, "
        f"relative {(out - original).norm() / original.norm():.2e}\n"
        f"  model with this layer: max |dlogit| {(logits - recording.logits).abs().max():.2e}, "
        f"top-1 agreement {agree:.4f}, loss {losses[0]:.4f} -> {losses[1]:.4f}"
    )


def capture_file(
    *,
    model: Path,
    model_source: str,
    text: str,
    text_source: str,
    out: Path,
    tokens: int,
    rope_frequencies: int,
    echo: Callable[[str], None],
) -> None:
    """Load the model, capture over the first ``tokens`` tokens of ``text`` and write ``out``.

    Raises:
        ModuleNotFoundError: If the extra ``model`` is not installed.
        ValueError: If the text is too short or the file would be too large.
    """
    tokenizer, network = load_model(model)
    token_ids = tokenizer(text, return_tensors="pt").input_ids[0, :tokens]
    if len(token_ids) < tokens:
        raise ValueError(f"the text must have at least {tokens} tokens, got {len(token_ids)}")
    provenance = {
        "model": model_source,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "text": text_source,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    content = capture(network, token_ids, rope_frequencies=rope_frequencies, provenance=provenance, echo=echo)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(content)
    echo(f"wrote {out}")


if __name__ == "__main__":
    import typer

    from .cli import capture_command

    typer.run(capture_command)
