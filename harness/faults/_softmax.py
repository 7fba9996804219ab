"""Right and wrong forms of the softmax step: ``(logits, v)`` to ``(out, lse)``, see ``Steps.softmax``.

The wrong ones serve the faults of every operation; each is one deviation from ``_chunked.softmax`` or from ``Online``.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._chunked import NEVER, State, finite_shift, mask, merge, normalised, softmax, weighted

LOG2_E = math.log2(math.e)


def even_tiles(size: int) -> Callable[[int], list[slice]]:
    """Cut ``m`` keys into tiles of ``size``, the last one short."""
    return lambda keys: [slice(at, min(at + size, keys)) for at in range(0, keys, size)]


def unchanged(accumulator: Tensor, v: Tensor) -> Tensor:
    """Keep the accumulator in float32."""
    return accumulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """The softmax of fused kernels: tile by tile with a running maximum, sum and output.

    Attributes:
        tiles: Number of keys to the tiles, in the order of visit.
        lowest: Where the running maximum starts.
        rescale: Factor on sums so far, from what the maximum rose by (<= 0).
        keep: What becomes of the accumulated output between tiles, given it and the values.
        guarded: Whether a row without a visible key so far is shifted by 0 and not by ``-inf``.
    """

    tiles: Callable[[int], Iterable[slice]]
    lowest: float = NEVER
    rescale: Callable[[Tensor], Tensor] = torch.exp
    keep: Callable[[Tensor, Tensor], Tensor] = unchanged
    guarded: bool = True

    def __call__(self, logits: Tensor, v: Tensor) -> State:
        """The softmax step."""
        n, num_heads = logits.shape[:2]
        highest, total = logits.new_full((n, num_heads, 1), self.lowest), logits.new_zeros(n, num_heads, 1)
        mixed, shift = logits.new_zeros(n, num_heads, v.shape[2]), logits.new_zeros(n, num_heads, 1)
        for tile in self.tiles(logits.shape[2]):
            before, part = highest, logits[..., tile]
            highest = torch.maximum(highest, part.amax(-1, keepdim=True))
            shift = highest.masked_fill(highest == NEVER, 0.0) if self.guarded else highest
            factor, weights = self.rescale(before - shift), torch.exp(part - shift)
            total = total * factor + weights.sum(-1, keepdim=True)
            mixed = self.keep(mixed * factor + weighted(weights, v[tile]), v)
        return normalised(mixed, total, shift)


def from_base_2(logits: Tensor, v: Tensor) -> State:
    """Right: logits in base 2, as the hardware's exponential wants them; the result goes back to natural log."""
    scores = logits * LOG2_E
    shift = finite_shift(scores)
    weights = torch.exp2(scores - shift)
    total = weights.sum(-1, keepdim=True)
    out, _ = normalised(weighted(weights, v), total, shift)
    return out, ((shift + torch.log2(total)) / LOG2_E)[..., 0]


def total_of_rounded(logits: Tensor, v: Tensor) -> State:
    """Right under ``l="from_p"``: the denominator sums the weights that meet the values."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights, v), weights.to(v.dtype).float().sum(-1, keepdim=True), shift)


def normalised_first(logits: Tensor, v: Tensor) -> State:
    """Right: weights are divided by their sum before they are rounded."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    total = weights.sum(-1, keepdim=True)
    divided = weights / total.masked_fill(total == 0, 1.0)
    return weighted(divided, v), (shift + torch.log(total))[..., 0]


def weights_from_lse(logits: Tensor, v: Tensor) -> State:
    """Right: normalised weights as backward passes recompute them, ``exp(z - lse)``, at the price of ``|lse| u``."""
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None]).masked_fill(lse[..., None] == NEVER, 0.0)
    return weighted(weights, v), lse


def split_in_parts(parts: int) -> Callable[[Tensor, Tensor], State]:
    """Right: the keys in ``parts`` stretches, their float32 results merged."""

    def split(logits: Tensor, v: Tensor) -> State:
        pieces = zip(logits.tensor_split(parts, dim=2), v.tensor_split(parts), strict=True)
        merged, *others = [softmax(*piece) for piece in pieces]
        for other in others:
            merged = merge(*merged, *other)
        return merged

    return split


def e4m3_weights(logits: Tensor, v: Tensor) -> State:
    """Wrong: weights in e4m3 without a scale, so that those under 2^-10 vanish; the denominator keeps them."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    rounded = weights.to(torch.float8_e4m3fn).float()
    return normalised(weighted(rounded, v), weights.sum(-1, keepdim=True), shift)


def base_2_lse(logits: Tensor, v: Tensor) -> State:
    """Wrong: the log-sum-exp stays in base 2."""
    out, lse = softmax(logits, v)
    return out, lse * LOG2_E


def lse_without_maximum(logits: Tensor, v: Tensor) -> State:
    """Wrong: the log of the shifted sum, the shift forgotten."""
    out, lse = softmax(logits, v)
    return out, lse - finite_shift(logits)[..., 0]


def largest_logit_as_lse(logits: Tensor, v: Tensor) -> State:
    """Wrong: the running maximum is stored where its log-sum-exp belongs."""
    out, lse = softmax(logits, v)
    return out, torch.where(lse == NEVER, NEVER, finite_shift(logits)[..., 0])


def no_maximum(logits: Tensor, v: Tensor) -> State:
    """Wrong: exponentials of the logits as they are."""
    weights = torch.exp(logits)
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), logits.new_zeros(*logits.shape[:2], 1))


def leaked_sentinel(logits: Tensor, v: Tensor) -> State:
    """Wrong: hidden logits become a finite number, and an empty row averages everything."""
    return softmax(logits.clamp(min=-5e4), v)


def max_from_5e4(logits: Tensor, v: Tensor) -> State:
    """Wrong: the running maximum starts at -5e4, so that a row of lower logits counts as empty."""
    return Online(tiles=even_tiles(16), lowest=-5e4)(logits, v)


def numbers_for_nan(logits: Tensor, v: Tensor) -> State:
    """Wrong: undefined logits become 0."""
    return softmax(torch.where(logits.isnan(), 0.0, logits), v)


def coarse_exponential(logits: Tensor, v: Tensor) -> State:
    """Wrong: an exponential that is good to 2^-11, its error a wave over the argument."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    weights = weights * (1 + 2.0**-11 * torch.cos((logits - shift).clamp(min=-1e4)))
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)


def light_tiles_skipped(logits: Tensor, v: Tensor) -> State:
    """Wrong: a tile whose every weight is below 1e-3 of the largest is not computed."""
    if not logits.shape[2]:
        return softmax(logits, v)
    shift = finite_shift(logits)
    kept = torch.cat([part.amax(-1, keepdim=True).expand_as(part) for part in logits.split(16, dim=2)], dim=2)
    return softmax(logits.masked_fill(kept - shift < math.log(1e-3), NEVER), v)


def uniform_weights(logits: Tensor, v: Tensor) -> State:
    """Wrong: the mean of the visible values; the log-sum-exp is right."""
    return softmax(torch.where(logits == NEVER, NEVER, 0.0), v)[0], torch.logsumexp(logits, dim=-1)


def largest_only(logits: Tensor, v: Tensor) -> State:
    """Wrong: all weight on the largest logit; the log-sum-exp is right."""
    return softmax((logits - finite_shift(logits)) * 1e6, v)[0], torch.logsumexp(logits, dim=-1)


def bfloat16_weights(logits: Tensor, v: Tensor) -> State:
    """Wrong: weights in bfloat16, whatever the inputs are."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights.bfloat16().float(), v), weights.sum(-1, keepdim=True), shift)


def rounded_total(logits: Tensor, v: Tensor) -> State:
    """Wrong: the denominator is rounded to the dtype of the values."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True).to(v.dtype).float(), shift)


def last_key_not_in_total(logits: Tensor, v: Tensor) -> State:
    """Wrong: the weight of the last of at least 4 keys is missing from the denominator."""
    shift = finite_shift(logits)
    weights = torch.exp(logits - shift)
    counted = weights[..., :-1] if logits.shape[2] > 3 else weights
    return normalised(weighted(weights, v), counted.sum(-1, keepdim=True), shift)


def first_key_lost(logits: Tensor, v: Tensor) -> State:
    """Wrong: of several keys the first takes no part."""
    return softmax(logits[..., 1:], v[1:]) if logits.shape[2] > 1 else softmax(logits, v)


def to_dtype_of_values(accumulator: Tensor, v: Tensor) -> Tensor:
    """Wrong: the accumulated output is rounded after every tile."""
    return accumulator.to(v.dtype).float()


def without_last_tile(keys: int, size: int = 16) -> list[slice]:
    """Wrong: a last tile that is not full is never visited."""
    tiles = even_tiles(size)(keys)
    return tiles[:-1] if keys % size and len(tiles) > 1 else tiles


def overlapping(keys: int, size: int = 16) -> list[slice]:
    """Wrong: each tile begins with the last key of the one before."""
    return [slice(max(0, at - 1), min(at + size, keys)) for at in range(0, keys, size)]


def equal_maxima_counted_once(logits: Tensor, v: Tensor) -> State:
    """Wrong: the denominator is 1 for the largest logit and the sum of the smaller ones: its equals are lost."""
    shift = finite_shift(logits)
    weights, largest = torch.exp(logits - shift), logits == shift
    total = weights.masked_fill(largest, 0.0).sum(-1, keepdim=True) + largest.any(-1, keepdim=True)
    return normalised(weighted(weights, v), total, shift)


def first_1024_keys(logits: Tensor, v: Tensor) -> State:
    """Wrong: keys beyond 1024 take no part."""
    return softmax(logits[..., :1024], v[:1024])


def maximum_of_first_tile(logits: Tensor, v: Tensor) -> State:
    """Wrong: the shift is the maximum of the first tile alone."""
    shift = finite_shift(logits[..., :16])
    weights = torch.exp(logits - shift)
    return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)


def not_rescaled(rise: Tensor) -> Tensor:
    """Wrong: what was summed before the maximum rose keeps its old unit; nothing was summed before the first tile."""
    return (rise > NEVER).float()


def rescaled_in_base_2(rise: Tensor) -> Tensor:
    """Wrong: the exponential of the other base."""
    return torch.exp2(rise)


class UnmaskedTotal:
    """Wrong: the denominator is summed before the mask is applied. Both steps of one pass, in order."""

    def __init__(self) -> None:
        """Nothing is seen yet."""
        self._seen = torch.empty(0)

    def mask(self, logits: Tensor, causal: bool) -> Tensor:
        """The clean mask; what it hides is remembered."""
        self._seen = logits
        return mask(logits, causal)

    def softmax(self, logits: Tensor, v: Tensor) -> State:
        """The clean numerator over the sum of all weights."""
        shift = finite_shift(logits)
        total = torch.exp(self._seen - shift).sum(-1, keepdim=True)
        return normalised(weighted(torch.exp(logits - shift), v), total, shift)
