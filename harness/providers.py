"""Which attention providers this machine can judge, and why not the others."""

import importlib.util
from pathlib import Path

import torch

from ..optimized.attention import AttentionShape, find_provider

# a tile of the interpreted Triton kernel takes tens of milliseconds
INTERPRETED_TILES = 400
INTERPRETED_TILE = 64

_LIBRARIES = {
    "fa3": ("flash_attn_interface", "vllm"),
    "fa4": ("flash_attn.cute",),
    "flashinfer": ("flashinfer",),
}
# part of torch, so always found, but no kernel of the house
BY_NAME = ("flex",)


def available_providers() -> list[str]:
    """The providers of the house, then those of libraries that can be found here; none is imported."""
    found = [name for name, modules in _LIBRARIES.items() if any(_findable(module) for module in modules)]
    return ["torch", "sdpa", "triton", *found]


def known_providers() -> list[str]:
    """All that can be named here: the available ones, then those that are judged only when they are named."""
    return [*available_providers(), *BY_NAME]


def provider_refusal(
    name: str, shape: AttentionShape, *, causal: bool, query_lens: list[int], key_lens: list[int]
) -> str | None:
    """The provider's own reason not to serve a request, or None."""
    reason = find_provider(name).refusal(shape, causal, tuple(query_lens), tuple(key_lens))
    return None if reason is None else f"{name} refuses: {reason}"


def interpreted_tiles_refusal(
    name: str, device: torch.device, *, heads: int, query_lens: list[int], key_lens: list[int]
) -> str | None:
    """Why a Triton kernel would take too long here, or None: on a CPU its tiles are interpreted one by one."""
    if name != "triton" or device.type != "cpu":
        return None
    longest = -(-max(query_lens, default=0) // INTERPRETED_TILE)
    steps = sum(max(1, -(-keys // INTERPRETED_TILE)) for keys in key_lens)
    tiles = heads * longest * steps
    if tiles <= INTERPRETED_TILES:
        return None
    return (
        f"interpreted on the CPU, {tiles} tiles are more than the {INTERPRETED_TILES} that fit the time; needs a device"
    )


def _findable(module: str) -> bool:
    """Whether a module could be imported; only the folder of its package is looked at, nothing is imported."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not rest:
        return spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return any((folder / rest).exists() or (folder / f"{rest}.py").exists() for folder in folders)
