"""A clean twin of ``sparse_mla`` in plain torch, made of small steps that a fault replaces one at a time.

Precision: logits and softmax in float32, weights rounded to the dtype of the queries before they meet the values, sums
in float32, the output rounded once. The softmax is that of ``_chunked``: there each head has keys of its own, here each
query has, so that queries take the place of heads and heads that of queries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _chunked
from ._chunked import NEVER, State

Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One function per step, in the order in which they run.

    Attributes:
        valid: ``(indices, topk_length, s_kv)`` to the entries that count, ``[s, topk]``.
        gather: ``(kv, indices, valid)`` to the rows of all entries, ``[s, topk, d_qk]``.
        values: ``(rows, d_v)`` to ``[s, topk, d_v]``.
        logits: ``(q, rows, softmax_scale)``, ``[H, s, d_qk]`` and ``[topk, s, d_qk]``, to ``[H, s, topk]``, float32.
        mask: ``(logits, False)`` to the same, before padding is hidden.
        hide: ``(logits, valid)`` to the logits with ``-inf`` where an entry does not count.
        softmax: ``(logits, values)``, the latter ``[topk, s, d_v]``, to ``out``, ``[H, s, d_v]``, and ``lse``,
            ``[H, s]``, both float32.
        sink: ``(out, lse, attn_sink)`` to what a sink leaves of the output; not called without one.
        highest: ``(logits, lse)`` to the highest logit, ``[H, s]``.
    """

    valid: Callable[[Tensor, Tensor | None, int], Tensor]
    gather: Callable[[Tensor, Tensor, Tensor], Tensor]
    values: Callable[[Tensor, int], Tensor]
    logits: Callable[[Tensor, Tensor, float], Tensor]
    mask: Callable[[Tensor, bool], Tensor]
    hide: Callable[[Tensor, Tensor], Tensor]
    softmax: Callable[[Tensor, Tensor], State]
    sink: Callable[[Tensor, Tensor, Tensor], Tensor]
    highest: Callable[[Tensor, Tensor], Tensor]


def within_length(indices: Tensor, topk_length: Tensor | None) -> Tensor:
    """Entries before the end of each list."""
    if topk_length is None:
        return torch.ones_like(indices, dtype=torch.bool)
    return torch.arange(indices.shape[1], device=indices.device) < topk_length[:, None]


def valid(indices: Tensor, topk_length: Tensor | None, s_kv: int) -> Tensor:
    """Entries within the length that name a row."""
    return (indices >= 0) & (indices < s_kv) & within_length(indices, topk_length)


def gather(kv: Tensor, indices: Tensor, valid: Tensor) -> Tensor:
    """Rows of valid entries, zeros for all others."""
    behind = torch.cat([kv, kv.new_zeros(1, kv.shape[1])])
    return behind[torch.where(valid, indices, len(kv)).long()]


def values(rows: Tensor, d_v: int) -> Tensor:
    """The leading columns."""
    return rows[..., :d_v]


def mask(logits: Tensor, causal: bool) -> Tensor:
    """Lists are not causal."""
    return logits


def hide(logits: Tensor, valid: Tensor) -> Tensor:
    """``-inf`` where an entry does not count."""
    return logits.masked_fill(~valid, NEVER)


def share(lse: Tensor, attn_sink: Tensor) -> Tensor:
    """What a sink leaves of the weight, ``[H, s]``; ``attn_sink`` is ``[H]``."""
    return torch.sigmoid((lse - attn_sink[:, None]).masked_fill(lse == NEVER, NEVER))


def sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
    """Scale by that share."""
    return out * share(lse, attn_sink)[..., None]


def highest(logits: Tensor, lse: Tensor) -> Tensor:
    """The highest logit."""
    return logits.amax(-1)


CLEAN = Steps(
    valid=valid,
    gather=gather,
    values=values,
    logits=_chunked.logits,
    mask=mask,
    hide=hide,
    softmax=_chunked.softmax,
    sink=sink,
    highest=highest,
)


def sparse_twin(arguments: Mapping[str, Any], **changes: Any) -> Three:
    """``sparse_mla`` with some steps changed.

    Args:
        arguments: Of the operation, by name.
        changes: Steps by name, see ``Steps``.
    """
    steps, a = replace(CLEAN, **changes), arguments
    q, kv, indices = a["q"], a["kv"], a["indices"]
    counted = steps.valid(indices, a["topk_length"], len(kv))
    rows = steps.gather(kv, indices, counted)
    v = steps.values(rows, a["d_v"])
    scores = steps.logits(q.transpose(0, 1), rows.transpose(0, 1), a["softmax_scale"])
    scores = steps.hide(steps.mask(scores, False), counted)
    out, lse = steps.softmax(scores, v.transpose(0, 1))
    top = steps.highest(scores, lse)
    if a["attn_sink"] is not None:
        out = steps.sink(out, lse, a["attn_sink"])
    return out.transpose(0, 1).to(q.dtype).contiguous(), lse.T.contiguous(), top.T.contiguous()
