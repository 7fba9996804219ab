"""The softmax of one query over the keys that it lists, all heads at once. Part of ``harness/companions.py``.

A key that is listed twice counts twice. Its copies are equal, so that one rounding error is in both: they are one key
here, with the weight of all of them. A sink takes weight and has no value; it belongs to the output and not to the
log-sum-exp. With ``p`` the weights that it leaves, an output is ``o = sum p v``, a wrong logit moves it by
``p (v - o)``, and ``sum p (v - o)`` is no longer 0 but what goes to the sink, ``-(1 - sum p) o``, whose magnitude
belongs to ``spread``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference.sparse_mla import selected_logits, share_beside_sink, softmax_over_selection
from ._companions_sums import Block
from .operation import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The keys of a query.

    Attributes:
        block: With the weights that a sink leaves.
        alone: Without a sink, for the log-sum-exp.
        found: What the oracle answers, and counts.
    """

    block: Block
    alone: Block
    found: dict[str, Tensor]

    @classmethod
    def of(cls, rows: Rows, query: int, heads: slice) -> "Listed":
        """The oracle's own steps on the list as it stands, then the weights of different keys.

        Raises:
            ValueError: If the rows have no lists.
        """
        if rows.lists is None:
            raise ValueError("lists must be given for keys by query, got None")
        entries = rows.lists[query]
        entries = entries[entries >= 0]
        q, k, scale = rows.q[query, heads], rows.k[entries, 0], rows.softmax_scale
        valid = torch.ones_like(entries, dtype=torch.bool)
        logits = selected_logits(q[None], k[None], valid[None], softmax_scale=scale)
        out, lse = softmax_over_selection(logits, rows.v[entries, 0][None])
        out, lse, share = out[0], lse[0], torch.ones_like(lse[0])
        sink = torch.zeros_like(lse)
        if rows.attn_sink is not None:
            own = rows.attn_sink[heads]
            # an empty row has no weight to share
            share = torch.where(lse == float("-inf"), 1.0, share_beside_sink(lse[None], own)[0])
            sink = (1 - share) * torch.where(own.isfinite(), own.abs(), 0.0)
        block = _block(rows, q, entries, lse)
        alone = replace(block, out=out)
        weights = alone.p * share[:, None]
        block = replace(block, p=weights, out=out * share[:, None], aside=(1 - share) * (len(entries) > 0))
        highest = logits[0].amax(-1) if len(entries) else lse
        # of one copy, in units of which weights are rounded before they are divided
        heaviest = torch.exp(highest - lse).nan_to_num(nan=0.0) * share
        found = {
            "out": block.out,
            "lse": lse,
            "max_logits": highest,
            "share": share,
            "sink": sink,
            "visible": torch.full_like(lse, len(entries)),
            "keys": torch.full_like(lse, len(rows.lists[query])),
            "total": torch.where(torch.isfinite(lse), 1 / heaviest.clamp(min=1e-300), 0.0),
            "n_eff": 1 / alone.p.square().sum(-1).clamp(min=1e-300),
        }
        return cls(block=block, alone=alone, found=found)

    def in_any_order(self) -> dict[str, Tensor]:
        """``R``, most that a stretch of the list can sum to, whatever the order in which a kernel visits it."""
        p, v = self.block.p, self.block.v
        reach = torch.maximum(p @ v.clamp(min=0.0), p @ v.clamp(max=0.0).neg())
        return {"range_power": reach.square(), "range_magnitude": reach * (p @ v.abs())}


def _block(rows: Rows, q: Tensor, entries: Tensor, lse: Tensor) -> Block:
    """Different keys with the weight of all their copies, without a sink."""
    own, times = entries.unique(return_counts=True)
    k, v = rows.k[own, 0], rows.v[own, 0]
    z = rows.softmax_scale * (q @ k.T)
    p = times * torch.exp(z - lse[:, None])
    return Block(
        q=q,
        k=k,
        v=v,
        z=z,
        seen=torch.ones_like(z, dtype=torch.bool),
        p=p,
        out=p @ v,
        scale=abs(rows.softmax_scale),
        projected=0,
        times=times.to(p.dtype),
    )
