"""What the adapters of libraries for the gated delta rule share: where they run, and states in a library's layout."""

import torch
from torch import Tensor

from .._kda_checks import Layer
from .._kda_shape import KdaShape

checkpoint_refusal = "keeps no states on the way"


def device_refusal(shape: KdaShape, *, library: str, capabilities: tuple[int, ...]) -> str | None:
    """Why a library cannot run on the device of a shape, or None.

    Args:
        shape: Of the layer.
        library: Its name, for the text.
        capabilities: Major compute capabilities that it serves.
    """
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return f"{library} needs a CUDA device, got {shape.device}"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major not in capabilities:
        served = " or ".join(f"{capability}.x" for capability in capabilities)
        return f"{library} needs compute capability {served}, got {major}.{minor}"
    return None


def packed(layer: Layer, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``q, k, v, g, beta`` of the sequences, ``[1, T, ...]``, contiguous: copies of views into wider rows."""
    q, k, v, g, beta = (x[:tokens].contiguous()[None] for x in (layer.q, layer.k, layer.v, layer.g, layer.beta))
    return q, k, v, g, beta
