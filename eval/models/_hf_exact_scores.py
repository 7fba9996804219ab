"""What an indexer would choose that knew the attention: the best tokens of each query by exact scores.

No weights of a trained indexer go with a model that was trained without one. Absorbed queries against latent rows give
the logits of every head themselves, so the choice needs none; it is the same whatever kernel then serves it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...optimized.indexer import IndexerShape, best_keys, indexer, plan_indexer
from ...optimized.mla_prefill import MlaShape
from ...optimized.token_scores import Mode
from ._hf_latent import LatentRows
from ._hf_selection import MODES

# of the logits of a block of queries
BLOCK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkRule:
    """What each query looks at, its own token and those before it competing.

    Attributes:
        topk: Tokens at most.
        scores: ``probability`` for the weights of attention, added up over the heads, which is what a DSA indexer is
            trained to order tokens by; ``logits`` for the indexer itself, ``sum_h relu(z_h)`` of the exact logits.
    """

    topk: int
    scores: Mode

    def __post_init__(self) -> None:
        """Refuse what chooses nothing."""
        if self.topk < 1:
            raise ValueError(f"topk must be at least 1, got {self.topk}")
        if self.scores not in MODES:
            raise ValueError(f"scores must be one of {', '.join(MODES)}, got {self.scores!r}")


def absorbed_queries(q: Tensor, weight: Tensor, shape: MlaShape) -> Tensor:
    """Queries ``[T, H, Dn + Dr]`` as those of latent rows, ``[T, H, R + Dr]``; ``weight`` is ``[H, Dn + Dv, R]``."""
    absorbed = torch.einsum("thd,hdr->thr", q[..., : shape.d_nope], weight[:, : shape.d_nope])
    return torch.cat([absorbed, q[..., shape.d_nope :]], dim=-1)


def exact_selection(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    *,
    scale: float,
    width: int,
    rule: TopkRule,
    rows: LatentRows,
    shape: MlaShape,
) -> Tensor:
    """Choose for each query; return positions in its own request, ``[T, width]``, int32, then -1.

    Args:
        q: ``[T, H, Dn + Dr]``, packed.
        latent: ``[slots, R + Dr]``, dtype of ``q``.
        weight: ``[H, Dn + Dv, R]``, dtype of ``q``.
        scale: Factor on the logits.
        width: Of a list, at least ``topk`` or the longest context.
        rule: Of the choice.
        rows: Where the requests stand.
        shape: Of a layer.

    Precision: ``probability`` in float32 (float64 for float64) from the stored rows, ``logits`` as ``indexer`` says.
    Equal scores go to the earlier token.
    """
    kept = min(rule.topk, width)
    if rule.scores == "logits":
        found = _by_logits(absorbed_queries(q, weight, shape), latent, scale, kept, rows)
    else:
        found = _by_probability(q, latent, weight, scale, kept, rows, shape)
    return torch.nn.functional.pad(found, (0, width - kept), value=-1)


def _by_logits(q: Tensor, latent: Tensor, scale: float, topk: int, rows: LatentRows) -> Tensor:
    sizes = IndexerShape(device=q.device, dtype=q.dtype, num_heads=q.shape[1], head_dim=q.shape[2], topk=topk)
    plan = plan_indexer(rows.cu_seqlens_q, rows.cu_seqlens_k, shape=sizes)
    weights = q.new_full(q.shape[:2], scale, dtype=sizes.score_dtype)
    return indexer(q, latent[rows.slots], weights, plan=plan)[0]


def _by_probability(
    q: Tensor, latent: Tensor, weight: Tensor, scale: float, topk: int, rows: LatentRows, shape: MlaShape
) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, found = q.shape[1], []
    requests = zip(q.split(rows.query_lens), rows.table, rows.context_lens, strict=True)
    for queries, slots, context in requests:
        keys = latent[slots[:context]].to(wide)
        first = context - len(queries)
        size = max(1, BLOCK_BYTES // (heads * context * wide.itemsize))
        for begin in range(0, len(queries), size):
            absorbed = absorbed_queries(queries[begin : begin + size].to(wide), weight.to(wide), shape)
            # keys behind the last query of a block are hidden from all of it
            own = torch.arange(first + begin, first + begin + len(absorbed), device=q.device)
            seen = keys[: first + begin + len(absorbed)]
            future = torch.arange(len(seen), device=q.device) > own[:, None]
            logits = scale * torch.einsum("nhd,md->nhm", absorbed, seen)
            mass = logits.masked_fill(future[:, None], -torch.inf).softmax(dim=-1).sum(dim=1)
            found.append(best_keys(mass.masked_fill(future, -torch.inf), topk)[0])
    return torch.cat(found)
