"""One real input for ``mla_prefill``: activations of a trained model whose attention is converted to MLA.

A Llama-style model reads a text, and one of its layers becomes latent attention by ``eval.mla_conversion``. What the
operation would be given for that text (``q``, ``kv_c``, ``k_pe``, ``kv_b_proj`` of a few heads, after RoPE) is stored
in bfloat16. Unlike random inputs, these have an attention sink, outlier channels and rows of very different size.

The variant: the fastest frequencies (16 of 32) keep RoPE, the slow ones become the nope part. The lossless variant
keeps them all, and then ``Dn = 0`` and ``W_UK`` is empty, so a kernel could drop that part unseen. With 16 all four
widths are in use and differ (``Dn`` 32, ``Dr`` 96, ``Dv`` 64, ``R`` 288), ``W_UK`` and ``W_UV`` are dense, and
``softmax_scale`` is that of the original layer, not ``(Dn + Dr) ** -0.5``. The price is that the slow phases are gone:
the script measures it, and runs the lossless variant beside it as a check of the conversion.

``assay eval capture`` records any layers of any model as they run; this is the one file that ships with the judge,
whose rule must not change.

The rule: the layer in which the heads differ most in their sink mass, and of it the weakest head and each KV group's
strongest. The sink mass of a head is its mean weight on the first token over the queries of the second half.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save
from torch import Tensor

from ..reference.attention import masked_logits
from ..reference.mla_prefill import expand_latent
from .exit_code import ExitCode
from .extras import require
from .llama_layers import (
    Recording,
    gqa_attention,
    layer_weights,
    load_model,
    logits_with,
    mla_attention,
    record,
)
from .mla_conversion import GqaWeights, MlaWeights, convert_to_mla, mla_inputs

# raised whenever the same model and text would give another file
SCRIPT_VERSION = 1
MAX_BYTES = 2**20
QUESTIONS = 8
# float32 rounding of a whole layer is below 1e-5 of its largest output; another kind of attention is far above
MODEL_TOLERANCE = 1e-4


def gsm8k_text(path: Path) -> str:
    """The first questions of a GSM8K file with their answers, as one text."""
    datasets = require("datasets", extra="eval")
    rows = datasets.Dataset.from_json(str(path), keep_in_memory=True)
    rows = rows.select(range(min(QUESTIONS, len(rows))))
    return "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows)


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


def command(
    model: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="GGUF file of a Llama-style model.")],
    model_source: Annotated[str, typer.Option(help="Name, origin and licence of the model, for the metadata.")],
    text_source: Annotated[str, typer.Option(help="Name, origin and licence of the text, for the metadata.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The safetensors file to write.")],
    gsm8k: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text: the first questions of this GSM8K file.")
    ] = None,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Text: this file, UTF-8.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 384,
    rope_frequencies: Annotated[int, typer.Option(min=0, help="How many frequencies keep RoPE, fastest first.")] = 16,
) -> None:
    """Store real inputs of mla_prefill: activations of a model converted to latent attention.

    Needs the extra `model`, and `eval` with --gsm8k. Nothing is downloaded.
    """
    try:
        if gsm8k is not None and text is None:
            content = gsm8k_text(gsm8k)
        elif text is not None and gsm8k is None:
            content = text.read_text(encoding="utf-8")
        else:
            raise ValueError("exactly one of --gsm8k and --text must be given")
        capture_file(
            model=model,
            model_source=model_source,
            text=content,
            text_source=text_source,
            out=out,
            tokens=tokens,
            rope_frequencies=rope_frequencies,
            echo=typer.echo,
        )
    except (ModuleNotFoundError, NotImplementedError, ValueError) as error:
        typer.echo(f"capture: {error}", err=True)
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    typer.run(command)
