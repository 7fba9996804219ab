"""The scores of the indexer in torch, a head at a time. Part of ``optimized/indexer.py``; call it from there."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._attention_torch import accumulation_dtype

if TYPE_CHECKING:
    from .indexer import IndexerShape


def refusal(shape: "IndexerShape") -> str | None:
    """None: any device, dtype and size is served."""
    return None


def score(q: Tensor, k: Tensor, weights: Tensor, first: int) -> Tensor:
    """Score the keys of one request for some of its queries.

    Args:
        q: ``[n, H, D]``.
        k: ``[m, D]``.
        weights: ``[n, H]``.
        first: Position of the first query among the keys; negative if it comes before them.

    Returns:
        ``[n, m]``, dtype of ``weights``, ``-inf`` in a query's future.
    """
    wide = accumulation_dtype(q.dtype)
    scores = torch.zeros(len(q), len(k), dtype=wide, device=q.device)
    turned = k.to(wide).t()
    for head in range(q.shape[1]):
        scores += weights[:, head, None] * torch.relu(q[:, head].to(wide) @ turned)
    position = torch.arange(first, first + len(q), device=q.device)
    return scores.masked_fill_(torch.arange(len(k), device=q.device) > position[:, None], float("-inf"))
