"""Which attention providers this machine can judge, and why not the others."""

import torch

from ..optimized.attention import AttentionShape, find_provider
from .peers import LIBRARIES

# a tile of the interpreted Triton kernel takes tens of milliseconds
INTERPRETED_TILES = 400
INTERPRETED_TILE = 64

_HOUSE = ("torch", "sdpa", "triton")
_OTHERS = [lib for lib in LIBRARIES if "attention" in lib.serves and lib.provider not in (*_HOUSE, None)]
# part of torch, so always found, but no kernels of the house
BY_NAME = tuple(str(library.provider) for library in _OTHERS if library.needs_naming)


def available_providers() -> list[str]:
    """The providers of the house, then those of libraries that can be found here; none is imported."""
    found = [library for library in _OTHERS if not library.needs_naming and library.home() is not None]
    return [*_HOUSE, *(str(library.provider) for library in found)]


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
