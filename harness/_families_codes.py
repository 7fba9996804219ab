"""Values that name their key, or whose sums are exact. Part of ``harness/families.py``."""

import math

import torch
from torch import Tensor

# other keys then weigh less than 1e-17 in all, far below any output format; larger logits would cost accuracy
ONE_HOT_GAP = 40.0


def column_constants(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One constant per column, magnitudes spread over the binade [1, 2), both signs."""
    magnitude = torch.exp2(torch.rand(shape, generator=generator))
    return magnitude * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)


def code_bits(count: int) -> int:
    """Bits that tell ``count`` keys apart."""
    return max(1, math.ceil(math.log2(max(2, count))))


def sign_code(numbers: Tensor, width: int, bits: int) -> Tensor:
    """``[len(numbers), width]`` of +1 and -1: bit ``d % bits`` of each number in column ``d``."""
    columns = torch.arange(width) % bits
    return ((numbers[:, None] >> columns) & 1).float() * 2 - 1


def one_hot_strength(width: int, bits: int, softmax_scale: float) -> float:
    """Power of two by which a query multiplies the code of its key, so that all others lie 40 below in the logit.

    Raises:
        ValueError: If the width cannot hold the code.
    """
    repeats = width // bits
    if repeats == 0:
        raise ValueError(f"the key width must be at least the {bits} bits of the code, got {width}")
    return 2.0 ** math.ceil(math.log2(ONE_HOT_GAP / (2 * repeats * softmax_scale)))


def token_values(count: int, width: int, bits: int) -> Tensor:
    """``[count, width]`` of small integers that name their row: its low and high digits, then its sign code."""
    number = torch.arange(count)
    digits = torch.stack([number % 128 + 1, number // 128 + 1], dim=1).float()
    named = torch.cat([digits, sign_code(number, bits, bits)], dim=1)
    return named[:, torch.arange(width) % named.shape[1]]


def uniform_values(count: int, width: int, generator: torch.Generator) -> Tensor:
    """``[count, width]`` of integers 1 to 7: drawn in even columns, alternating around 5 in odd ones.

    The mean of an alternating column over an even number of keys is exactly 5, so a single lost key shows.
    """
    drawn = torch.randint(1, 8, (count, width), generator=generator).float()
    alternating = 5 + (torch.arange(count) % 2 * 2 - 1).float()[:, None].expand(-1, width)
    return torch.where(torch.arange(width) % 2 == 0, drawn, alternating)
