"""A Llama of transformers as the same model with latent attention, kept on disk once it was converted.

Every layer goes through ``mla_conversion`` or ``mla_geometry``; the result is transformers' DeepSeek-V3 with dense
layers alone, no norm on the latent, the frequencies that keep RoPE and the softmax scale of the original.
"""

import hashlib
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..extras import require
from ..llama_layers import layer_weights
from ..mla_conversion import MlaWeights
from ._hf_forms import Form

# raised whenever the same weights would be converted to others
VERSION = 2
CALIBRATION_TOKENS = 1024
INV_FREQ = "rotary.inv_freq"
# tied to the embedding, so it is in no file
HEAD = "lm_head.weight"


def convert_network(network: Any, form: Form) -> Any:
    """Convert every attention layer of a Llama.

    Args:
        network: The model, float32.
        form: Of the result.

    Returns:
        The converted model, float32.

    Raises:
        NotImplementedError: If it is no plain Llama.
        ValueError: If the form does not hold the model.
    """
    kind = getattr(network.config, "model_type", None)
    if kind != "llama" or network.config.mlp_bias:
        raise NotImplementedError(f"a model that is converted must be a Llama without biases, got {kind}")
    originals = [layer_weights(network, at) for at in range(network.config.num_hidden_layers)]
    layers = form.layers(originals, lambda: input_covariances(network))
    first = layers[0].mla
    converted = _skeleton(_config(network.config, first), first.inv_freq.float(), first.softmax_scale)
    target, source = converted.model, network.model
    with torch.no_grad():
        target.embed_tokens.weight.copy_(source.embed_tokens.weight)
        if not network.config.tie_word_embeddings:
            converted.lm_head.weight.copy_(network.lm_head.weight)
        target.norm.weight.copy_(source.norm.weight)
        for layer, old, new in zip(layers, source.layers, target.layers, strict=True):
            mla = layer.mla
            new.mlp.load_state_dict(old.mlp.state_dict())
            new.input_layernorm.weight.copy_(old.input_layernorm.weight)
            new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight)
            new.self_attn.q_proj.weight.copy_(mla.q_proj.flatten(0, 1))
            new.self_attn.kv_a_proj_with_mqa.weight.copy_(torch.cat([mla.latent_proj, mla.rope_proj]))
            new.self_attn.kv_b_proj.weight.copy_(mla.kv_b_proj.flatten(0, 1))
            new.self_attn.o_proj.weight.copy_(layer.output(old.self_attn.o_proj.weight.double()))
    return converted


def input_covariances(network: Any) -> list[Tensor]:
    """Mean of ``x x^T`` over the inputs of each attention layer, ``[E, E]``, float64, while tokens at random are read.

    The axes in which keys lie are those of a few loud channels and of the first token, which any text shows; keys of an
    isotropic input lie elsewhere.
    """
    length = min(CALIBRATION_TOKENS, network.config.max_position_embeddings)
    ids = torch.randint(network.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []

    def watch(_: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, 1).double()
        found.append(x.T @ x / length)

    with ExitStack() as stack, torch.no_grad():
        for layer in network.model.layers:
            stack.callback(layer.self_attn.k_proj.register_forward_pre_hook(watch).remove)
        network(ids)
    return found


def save_converted(network: Any, path: Path) -> None:
    """Write a converted model as one file, whole or not at all."""
    tensors = dict(network.state_dict())
    if network.config.tie_word_embeddings:
        del tensors[HEAD]
    tensors[INV_FREQ] = network.model.rotary_emb.inv_freq
    scale = network.model.layers[0].self_attn.scaling
    metadata = {"config": json.dumps(network.config.to_dict(), default=str), "softmax_scale": repr(scale)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, name, metadata=metadata)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def load_converted(path: Path) -> Any:
    """Read a file of ``save_converted``.

    Raises:
        ValueError: If the file does not hold the weights of the model that it describes.
    """
    transformers = require("transformers", extra="model")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    config = transformers.DeepseekV3Config.from_dict(json.loads(metadata["config"]))
    network = _skeleton(config, tensors.pop(INV_FREQ), float(metadata["softmax_scale"]))
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    allowed = {HEAD} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - allowed:
        raise ValueError(f"{path} must hold the weights of its model, got {len(missing)} missing; delete it")
    return network


def source_digest(path: Path) -> str:
    """sha256 of a GGUF file, or of the weights and configuration of a folder."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    parts = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cached_path(folder: Path, source: Path, form: Form) -> Path:
    """Where the conversion of these weights is kept."""
    return folder / f"mla-{VERSION}-{form.name}-{source_digest(source)[:32]}.safetensors"


def keep_precise(network: Any, inv_freq: Tensor) -> None:
    """Give a model its frequencies, float32 whatever its dtype: a rounded frequency is another position."""
    network.model.rotary_emb.inv_freq = inv_freq


def _config(llama: Any, mla: MlaWeights) -> Any:
    """Of the converted model: every layer dense, the expert sizes without use."""
    transformers = require("transformers", extra="model")
    d_rope, rank = mla.rope_proj.shape[0], mla.latent_proj.shape[0]
    d_nope = mla.q_proj.shape[1] - d_rope
    return transformers.DeepseekV3Config(
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        hidden_act=llama.hidden_act,
        num_hidden_layers=llama.num_hidden_layers,
        first_k_dense_replace=llama.num_hidden_layers,
        n_routed_experts=1,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=1,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_rope_head_dim=d_rope,
        qk_nope_head_dim=d_nope,
        v_head_dim=mla.kv_b_proj.shape[1] - d_nope,
        rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=llama.rms_norm_eps,
        max_position_embeddings=llama.max_position_embeddings,
        tie_word_embeddings=llama.tie_word_embeddings,
        bos_token_id=llama.bos_token_id,
        eos_token_id=llama.eos_token_id,
        pad_token_id=llama.pad_token_id,
    )


def _skeleton(config: Any, inv_freq: Tensor, softmax_scale: float) -> Any:
    """The model without its weights."""
    transformers = require("transformers", extra="model")
    network = transformers.DeepseekV3ForCausalLM(config).eval()
    for layer in network.model.layers:
        layer.self_attn.kv_a_layernorm = torch.nn.Identity()
        layer.self_attn.scaling = softmax_scale
    keep_precise(network, inv_freq)
    return network
