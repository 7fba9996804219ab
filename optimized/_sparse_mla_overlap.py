"""What neighbouring queries share of their selections, measured in a sample, and whether shared lists repay it.

Part of ``optimized/sparse_mla.py``; call it from there. The rates are of an H200 (triton 3.6.0, bfloat16, CUDA graphs,
cold L2), fitted to runs of 2048 and 8192 queries over 8192 to 131072 rows; ``tests/test_optimized_sparse_mla_plan.py``
holds the runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# groups of neighbouring queries that are looked at
_SAMPLES = 32

# rows of a tile of the union kernel: queries of a group times heads
UNION_ROWS = 64

# nanoseconds on the whole device: of the per-query kernel for an entry of a list, by padded heads and width
_PER_QUERY_NS = {(8, 512): 0.130, (8, 576): 0.143, (16, 512): 0.170, (16, 576): 0.180}
# of the union kernel for an entry of a shared list, by width; the heads fill its tile whatever their number
_UNION_NS = {512: 0.41, 576: 0.385}
# of its builder: for marking an entry, and for scanning a byte, of which a group has one a row of the cache
_MARK_NS, _SCAN_NS = 0.015, 0.0022


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How alike the lists of neighbouring queries are.

    Attributes:
        group: Neighbouring queries that would share a list.
        listed: Valid entries of a query's list, on average.
        united: Entries of the list that a group would share, on average; a repeated row counts again.
    """

    group: int
    listed: float
    united: float


def padded_heads(h_q: int) -> int:
    """The heads of the tile that serves ``h_q`` of them: 8, 16, 32 or a power of two above."""
    return max(8, 1 << (h_q - 1).bit_length())


def union_group(h_q: int) -> int:
    """Neighbouring queries whose heads fill one tile of the union kernel."""
    return max(1, UNION_ROWS // padded_heads(h_q))


def measure_overlap(indices: Tensor, *, s_kv: int, h_q: int, topk_length: Tensor | None = None) -> Overlap:
    """Look at evenly spaced groups of neighbouring queries; synchronises.

    Args:
        indices: ``[s_q, topk]``, int32, with at least one query.
        s_kv: Rows of the cache; others are padding.
        h_q: Heads, which decide the size of a group.
        topk_length: ``[s_q]``, int32, or None.

    Returns:
        The averages over the sample.
    """
    s_q, topk = indices.shape
    group = union_group(h_q)
    num_groups = -(-s_q // group)
    sampled = torch.linspace(0, num_groups - 1, min(_SAMPLES, num_groups), device=indices.device).round().long()
    queries = sampled[:, None] * group + torch.arange(group, device=indices.device)
    inside = queries < s_q
    queries = queries.clamp(max=s_q - 1)
    rows = indices[queries].long()  # [samples, group, topk]
    valid = (rows >= 0) & (rows < s_kv) & inside[..., None]
    if topk_length is not None:
        valid &= torch.arange(topk, device=indices.device) < topk_length.to(indices.device)[queries][..., None]
    # padding sorts behind everything
    rows = rows.masked_fill(~valid, s_kv)
    repeated = valid.sum() - _distinct(rows, s_kv).sum()
    united = _distinct(rows.flatten(1), s_kv).sum() + repeated
    listed, total = torch.stack([valid.sum(), united]).tolist()
    return Overlap(group=group, listed=listed / max(1, int(inside.sum())), united=total / len(sampled))


def union_verdict(overlap: Overlap, *, s_q: int, s_kv: int, h_q: int, d_qk: int) -> str | None:
    """Why one list for each query is the faster way, or None if one for each group is."""
    rate = _PER_QUERY_NS.get((padded_heads(h_q), d_qk))
    if rate is None:
        return f"its gain is not measured for {h_q} heads of width {d_qk}"
    num_groups = -(-s_q // overlap.group)
    alone = s_q * overlap.listed * rate
    lists = s_q * overlap.listed * _MARK_NS + num_groups * s_kv * _SCAN_NS
    together = lists + num_groups * overlap.united * _UNION_NS[d_qk]
    if together < alone:
        return None
    shared = 1 - overlap.united / max(overlap.group * overlap.listed, 1.0)
    return (
        f"{overlap.group} neighbouring queries share {shared:.0%} of their entries: {together / 1e6:.3f} ms estimated "
        f"with one list a group, {alone / 1e6:.3f} ms with one a query"
    )


def _distinct(rows: Tensor, padding: int) -> Tensor:
    """How many different numbers below ``padding`` the last dimension holds."""
    ordered = rows.sort(dim=-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return (first & (ordered < padding)).sum(dim=-1)
