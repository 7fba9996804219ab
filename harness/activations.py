"""Captured inputs of a case: activations of a real model, kept beside the code or in a folder of yours.

See captured/README.md for the origin of the former, and ``harness.captures`` for the latter.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .captures import capture_tensors


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


def captured_tensors(name: str) -> dict[str, Tensor]:
    """What the case of that ``captured`` is cut from: the name of a file here, or ``FILE#SHA256`` of one of yours.

    Raises:
        ValueError: If a file of yours is not there, or no longer the one that the case was made of.
    """
    file, mark, sha256 = name.rpartition("#")
    return capture_tensors(file, sha256) if mark else _load(name)[0]


def captured_requests(
    tensors: dict[str, Tensor], query_lens: list[int], context_lens: list[int], caches: tuple[str, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """``q`` and both ``caches`` of requests that each start at the first captured token.

    Raises:
        ValueError: If a request is longer than the capture, or asks for a query that was not captured.
    """
    available = len(tensors[caches[0]])
    if max(context_lens) > available:
        raise ValueError(f"context_lens must be at most the {available} captured tokens, got {max(context_lens)}")
    # the captured queries are those of the last tokens
    first = available - len(tensors["q"])
    starts = [context - queries for queries, context in zip(query_lens, context_lens, strict=True)]
    if min(starts) < first:
        raise ValueError(f"the queries of a request must be of position {first} and later, got {min(starts)}")
    q = [tensors["q"][start - first : context - first] for start, context in zip(starts, context_lens, strict=True)]
    one, other = (torch.cat([tensors[name][:context] for context in context_lens]) for name in caches)
    return torch.cat(q), one, other


def captured_latents(
    name: str, query_lens: list[int], context_lens: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``q``, ``kv_c``, ``k_pe`` and ``kv_b_proj`` of such requests.

    Raises:
        ValueError: If a request is not in the capture.
    """
    tensors = captured_tensors(name)
    return *captured_requests(tensors, query_lens, context_lens, ("kv_c", "k_pe")), tensors["kv_b_proj"]
