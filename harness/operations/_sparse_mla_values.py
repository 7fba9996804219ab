"""Values of ``sparse_mla``: rows whose leading columns are values and whose every column may count in a logit.

Where values must have a form of their own, queries are 0 in those columns (``quiet``), and logits come from the others.
"""

import math

import torch
from torch import Tensor

from ...reference.sparse_mla import selected_logits
from ..families import (
    NOISE,
    code_bits,
    column_constants,
    moved_logits,
    one_hot_strength,
    query_strength,
    sign_code,
    token_values,
    uniform_values,
    within_float16,
)
from ._sparse_mla_lists import Lists

FAMILIES = (
    "diffuse",
    "peaked",
    "constant-v",
    "ramp-v",
    "shifted",
    "sunken",
    "visible-nan",
    "exact-uniform",
    "exact-one-hot",
    "leverage",
    "overflow",
)
QUIET_FAMILIES = ("constant-v", "ramp-v", "exact-one-hot", "leverage")
MOVED_FAMILIES = ("shifted", "sunken", "overflow")
SINKS = ("none", "finite", "mixed")
# deviation of the logits, 1 elsewhere
STRENGTHS = {"peaked": 8.0}
# queries of which the log-sum-exp is looked at to place a sink beside it
LOOKED_AT = 16


def sparse_values(
    family: str,
    lists: Lists,
    context_lens: list[int],
    *,
    num_heads: int,
    d_qk: int,
    d_v: int,
    softmax_scale: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw ``q``, ``[T, H, d_qk]``, and the row of each packed token, ``[S, d_qk]``, float32.

    Raises:
        ValueError: If the family is unknown, a row too narrow for it, or the scale so small that float16 does not hold
            the queries.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if d_v > d_qk:
        raise ValueError(f"d_v must be at most d_qk {d_qk}, got {d_v}")
    queries, keys = len(lists.targets), sum(context_lens)
    quiet = 3 * d_v // 4 if family in QUIET_FAMILIES else 0
    q, rows = torch.randn(queries, num_heads, d_qk, generator=generator), torch.randn(keys, d_qk, generator=generator)
    q = q * query_strength(softmax_scale, d_qk - quiet)
    q[..., :quiet] = 0.0
    if family == "exact-uniform":
        q, rows = torch.zeros_like(q), uniform_values(keys, d_qk, generator)
    elif family == "exact-one-hot":
        bits = code_bits(keys)
        code = one_hot_strength(d_qk - quiet, bits, softmax_scale) * sign_code(
            lists.targets.clamp(min=0), d_qk - quiet, bits
        )
        q[..., quiet:] = code[:, None]
        rows = torch.cat([token_values(keys, quiet, bits), sign_code(torch.arange(keys), d_qk - quiet, bits)], dim=1)
    elif family in ("constant-v", "ramp-v"):
        ramp = torch.cat([torch.linspace(-1, 1, c) if c > 1 else torch.ones(c) for c in context_lens])
        slope = ramp[:, None] if family == "ramp-v" else 1.0
        rows[:, :quiet] = slope * column_constants((quiet,), generator) + NOISE * rows[:, :quiet]
    elif family in STRENGTHS:
        q *= STRENGTHS[family]
    elif family in MOVED_FAMILIES:
        q[..., -1], rows[:, -1] = moved_logits(family, num_heads, keys, softmax_scale, generator)
    elif family == "leverage":
        q, rows = _drawn_to_pairs(q, rows, quiet, lists, context_lens, softmax_scale)
    if lists.poisoned is not None:
        rows[lists.poisoned] = torch.nan
    return within_float16(q, softmax_scale), rows


def _drawn_to_pairs(
    q: Tensor, rows: Tensor, quiet: int, lists: Lists, context_lens: list[int], softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Half of each query's weight lies on its target and on the key that equals it but for the value."""
    twins = torch.cat([torch.arange(c).flip(0) + sum(context_lens[:at]) for at, c in enumerate(context_lens)])
    rows = torch.cat([1 + rows[:, :quiet].abs(), rows[torch.minimum(torch.arange(len(rows)), twins), quiet:]], dim=1)
    loud = rows[lists.targets.clamp(min=0), quiet:]
    towards = loud / loud.square().sum(-1, keepdim=True).clamp(min=1e-6)
    rise = lists.valid.sum(1).clamp(min=1).log() * (lists.targets >= 0)
    q[..., quiet:] += (rise[:, None] / softmax_scale * towards)[:, None]
    return q, rows


def sinks_of(
    kind: str, family: str, q: Tensor, rows: Tensor, lists: Lists, softmax_scale: float, generator: torch.Generator
) -> Tensor | None:
    """``[H]``, float32: each near the log-sum-exp of its head, where it takes a share of the weight; None for none.

    Of ``mixed`` the second head of four has ``-inf``, the fourth ``inf``. In exact families a sink is the log-sum-exp
    itself, and leaves half where queries have as much of it as most.

    Args:
        kind: One of ``SINKS``.
        family: Of the values.
        q: ``[T, H, d_qk]``, as stored.
        rows: ``[S, d_qk]``, as stored.
        lists: What queries list.
        softmax_scale: Factor on the logits.
        generator: Of the draw.

    Raises:
        ValueError: If there is no such kind.
    """
    if kind not in SINKS:
        raise ValueError(f"sink must be one of {', '.join(SINKS)}, got {kind!r}")
    if kind == "none":
        return None
    num_heads = q.shape[1]
    sink = torch.zeros(num_heads, dtype=torch.float64)
    seen = (~lists.empty & ~lists.undefined).nonzero()[:LOOKED_AT, 0]
    if len(seen):
        own = rows.double()[lists.tokens[seen]].nan_to_num(nan=0.0)
        logits = selected_logits(q[seen].double(), own, lists.valid[seen], softmax_scale=softmax_scale)
        sink = torch.logsumexp(logits, -1).median(0).values
    if not family.startswith("exact"):
        sink += torch.randn(num_heads, generator=generator)
    if kind == "mixed":
        sink[1::4], sink[3::4] = -math.inf, math.inf
    return sink.float()
