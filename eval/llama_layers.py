"""The attention layers of a Llama-style model: its weights, what goes through it, and the same layer computed here."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..reference.attention import masked_logits, softmax_with_lse
from ..reference.mla_prefill import mla_prefill
from .extras import require
from .mla_conversion import GqaWeights, MlaWeights, gqa_inputs, mla_inputs


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
