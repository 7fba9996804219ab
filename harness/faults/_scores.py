"""Wrong forms of the steps before the softmax, for the faults of every operation: logits and masks."""

import torch
from torch import Tensor

from ._chunked import NEVER, hide_after, logits, mask


def rounded(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Logits kept in the dtype of the queries."""
    return logits(q, k, softmax_scale).to(q.dtype).float()


def rounded_unscaled(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Products kept in the dtype of the queries, and scaled afterwards: the same roundoff, fp16 overflows sooner."""
    return softmax_scale * logits(q, k, 1.0).to(q.dtype).float()


def cut_to_tf32(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Operands with the 10 bits of tf32: float32 loses, half precision does not."""
    return logits(_tf32(q), _tf32(k), softmax_scale)


def _tf32(operand: Tensor) -> Tensor:
    bits = operand.float().contiguous().view(torch.int32)
    return (bits & ~0x1FFF).view(torch.float32)


def clipped(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Logits held within +-50, so that no exponential overflows."""
    return logits(q, k, softmax_scale).clamp(-50.0, 50.0)


def clamped_at_5e4(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Logits above 5e4 become 5e4, the stand-in of a format without infinity."""
    return logits(q, k, softmax_scale).clamp(max=5e4)


def soft_capped(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Logits go through the soft cap of another model, at 50."""
    return 50.0 * torch.tanh(logits(q, k, softmax_scale) / 50.0)


def filled_with_minus_1e4(scores: Tensor, causal: bool) -> Tensor:
    """Bottom right; a hidden logit is -1e4, which is not below every visible one."""
    hidden = mask(torch.zeros_like(scores), causal) == NEVER
    return scores.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -1e4).masked_fill(
        hidden.all(-1, keepdim=True), NEVER
    )


def later_tiles_see_one_more(scores: Tensor, causal: bool) -> Tensor:
    """Bottom right, but queries past the first tile of 64 see one key too many."""
    n, m = scores.shape[0], scores.shape[2]
    queries = torch.arange(n, device=scores.device)
    return hide_after(scores, queries + m - n + (queries >= 64).long()) if causal else scores


def top_left(scores: Tensor, causal: bool) -> Tensor:
    """Query ``i`` sees keys ``0 .. i``, however many keys there are."""
    return hide_after(scores, torch.arange(len(scores), device=scores.device)) if causal else scores


def shifted_limit(keys: int, scores: Tensor, causal: bool) -> Tensor:
    """Bottom right, but each query's last key moved by ``keys``."""
    n, m = scores.shape[0], scores.shape[2]
    return hide_after(scores, torch.arange(n, device=scores.device) + m - n + keys) if causal else scores


def up_to_the_tile(scores: Tensor, causal: bool) -> Tensor:
    """A query sees its whole tile of 16 keys: whole tiles are skipped, the diagonal one is not masked."""
    n, m = scores.shape[0], scores.shape[2]
    last_key = torch.arange(n, device=scores.device) + m - n
    return hide_after(scores, torch.where(last_key < 0, last_key, last_key | 15)) if causal else scores


def unmasked(scores: Tensor, causal: bool) -> Tensor:
    """Every query sees every key."""
    return scores


def always_causal(scores: Tensor, causal: bool) -> Tensor:
    """Bottom right, asked for or not."""
    return mask(scores, True)


def always_top_left(scores: Tensor, causal: bool) -> Tensor:
    """Top left, asked for or not."""
    return top_left(scores, True)


def narrow_positions(dtype: torch.dtype, scores: Tensor, causal: bool) -> Tensor:
    """Bottom right, with positions compared in an integer dtype that they may not fit."""
    if not causal:
        return scores
    n, m = scores.shape[0], scores.shape[2]
    keys, last_key = torch.arange(m, device=scores.device), torch.arange(n, device=scores.device) + m - n
    hidden = keys.to(dtype) > last_key.to(dtype)[:, None]
    return scores.masked_fill(hidden[:, None, :], NEVER)
