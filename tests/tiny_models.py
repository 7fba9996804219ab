"""Models of random weights, and what their answers are asked by."""

from pathlib import Path
from typing import Any

import torch

from assay.eval.extras import require
from assay.eval.models import load_model
from assay.eval.models.interface import Generated, GenerateRequest, Scored, ScoreRequest

LETTERS = "abcdefghijklmnop\n"
END = len(LETTERS)
PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (2, 7, 1), (1, 6, 1, 8, 0, 3, 3)]
TARGETS = [(8, 9, 7), (8, 2), (9, 8, 8, 7)]


def save_llama(path: Path, **sizes: Any) -> Path:
    """Large enough that its answers differ, with a tokenizer of letters."""
    transformers = require("transformers", extra="model")
    config = transformers.LlamaConfig(
        **{
            "vocab_size": END + 1, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4,
            "eos_token_id": END, "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        }
        | sizes
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def save_kimi(path: Path, **sizes: Any) -> Path:
    """A model of Kimi's form: two linear layers around a latent one, and the same tokenizer."""
    transformers = require("transformers", extra="model")
    config = transformers.KimiLinearConfig(
        **{
            "vocab_size": END + 1, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "mlp_layer_types": ["dense"] * 3, "linear_head_dim": 8,
            "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "max_position_embeddings": 64, "initializer_range": 0.4, "eos_token_id": END, "bos_token_id": None,
            "pad_token_id": None,
        }
        | sizes
    )  # fmt: skip
    torch.manual_seed(0)
    network = transformers.KimiLinearForCausalLM(config)
    for name, weight in network.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.normal_(weight)
    network.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """One token a letter."""
    tokenizers, transformers = require("tokenizers", extra="model"), require("transformers", extra="model")

    vocabulary = {letter: at for at, letter in enumerate(LETTERS)} | {"<end>": END}
    letters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(path)


def made(folder: Path, **options: str) -> Any:
    return load_model("hf", {"model": str(folder), "cache": str(folder / "cache")} | options)


def scored(model: Any, prompts: Any = PROMPTS, targets: Any = TARGETS) -> list[Scored]:
    pairs = zip(prompts, targets, strict=True)
    return list(model.score([ScoreRequest(prompt_ids=one, target_ids=two) for one, two in pairs]))


def generated(model: Any, prompts: Any = PROMPTS, **fields: Any) -> list[Generated]:
    return list(
        model.generate([GenerateRequest(prompt_ids=one, **({"max_new_tokens": 6} | fields)) for one in prompts])
    )


def values(found: list[Scored]) -> torch.Tensor:
    return torch.tensor([value for one in found for value in (*one.prompt, *one.target)], dtype=torch.float64)
