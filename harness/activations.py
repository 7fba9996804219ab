"""Captured inputs: activations of a real model, kept beside the code; see captured/README.md for their origin."""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


@functools.cache
def _load(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of ``captured/<name>.safetensors``."""
    with safe_open(Path(__file__).parent / "captured" / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()


def captured_sizes(name: str) -> dict[str, Any]:
    """The sizes of a captured MLA layer, as the cases of ``mla_prefill`` name them."""
    tensors, metadata = _load(name)
    heads, expanded, rank = tensors["kv_b_proj"].shape
    d_rope = tensors["k_pe"].shape[1]
    d_nope = tensors["q"].shape[2] - d_rope
    return {
        "captured": name,
        "num_heads": heads,
        "kv_lora_rank": rank,
        "d_nope": d_nope,
        "d_rope": d_rope,
        "d_v": expanded - d_nope,
        "softmax_scale": float(metadata["softmax_scale"]),
    }


def captured_latents(
    name: str, query_lens: list[int], context_lens: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q``, ``kv_c``, ``k_pe`` and ``kv_b_proj`` of requests that each start at the first captured token.

    Raises:
        ValueError: If a request is longer than the capture.
    """
    tensors, _ = _load(name)
    available = len(tensors["kv_c"])
    if max(context_lens) > available:
        raise ValueError(f"context_lens must be at most the {available} captured tokens, got {max(context_lens)}")
    q = [tensors["q"][context - queries : context] for queries, context in zip(query_lens, context_lens, strict=True)]
    caches = [torch.cat([tensors[key][:context] for context in context_lens]) for key in ("kv_c", "k_pe")]
    return torch.cat(q), caches[0], caches[1], tensors["kv_b_proj"]
