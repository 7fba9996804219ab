"""The oracle's answer together with the sums that bound how far an honest kernel may be from it.

Everything comes from the same masked logits as the oracle (``reference.attention.masked_logits``). Notation, per row:
``z`` scaled logits, ``p`` softmax weights, ``o`` output, ``d`` a value dimension, ``j`` a key.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..reference.attention import masked_logits, softmax_with_lse
from ._companions_absorbed import Absorbed
from ._companions_listed import Listed
from ._companions_sums import Block, freedom_sums, logit_sums, lse_sums, operand_sums, scale_sums, value_sums
from .operation import Rows

# elements of the largest [rows, keys, dims] intermediate
BLOCK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Sums per row (``[n, h]``) or per element (``[n, h, Dv]``), float64. Unit roundoffs are left to the gates.

    Where a kernel absorbs the projection (``_companions_absorbed``) queries and keys are those of the latent space, and
    what is said of projected keys and values here holds of projected queries and outputs.

    Attributes:
        out: The oracle's output ``o``.
        lse: The oracle's log-sum-exp, without a sink.
        max_logits: The highest of its logits; ``-inf`` where no key is visible.
        share: What a sink leaves of the weight; 1 without one.
        sink: ``p |z|`` of the sink, what its own logit can move; 0 without one.
        visible: Number of visible keys.
        keys: Number of keys of the request, hidden ones included.
        total: ``l = sum exp(z - max z)``, the denominator in units of the largest weight.
        n_eff: ``1 / sum p^2``, keys that share what a sink leaves of the weight.
        weight_dof: Degrees of freedom of ``sum_j e_j p_j v_j`` over the value dimensions, ``e`` independent: few where
            the weight lies on few keys, or where the values are alike.
        spread_dof: The same of ``sum_j e_j p_j (v_j - o)``.
        key_dof: The same of ``sum_j e_j p_j sqrt(sum_d q_d^2 k_jd^2) (v_j - o)``.
        query_dof: The same of errors of the query dimensions, ``sum_d e_d q_d sum_j p_j k_jd (v_j - o)``.
        value_dof: Of rounded outputs in the latent space; 1 without.
        magnitude: ``A = sum p |v|``.
        stored_magnitude: What rounding projected values, or latent outputs, is relative to: ``A``, or ``|W_uv| |p c|``.
        sum_magnitude: What their sums are accurate against: ``A``, or ``|W_uv| (p |c|)``.
        power: ``B^2 = sum p^2 v^2``.
        value_power: As ``stored_magnitude``, in quadrature.
        weight_spread: ``sum p^2 (v - o)^2``.
        visible_power: ``sum v^2`` over visible keys.
        visible_spread: ``sum (v - o)^2`` over visible keys.
        spread: ``C = sum p |v - o|``.
        products: ``|scale| max_j sum_d |q_d k_jd|``.
        projected_products: The same over the projected key dimensions, without what all keys have in common if it is
            the query that is projected.
        lse_projected: The same with it.
        value_max: ``max |v|`` over all keys.
        logit_max: ``max |z|`` over visible keys.
        logit_range: ``max |z - max z|`` over visible keys.
        key_spread: ``scale^2 sum_j p^2 (sum_d q_d^2 k_jd^2) (v - o)^2`` over projected key dimensions; of projected
            queries ``scale^2 sum_d q_d^2 (sum_j p_j k_jd (v_j - o))^2``.
        logit_spread: ``sum p^2 z^2 (v - o)^2``.
        fp32_spread: ``sum p^2 s^2 (v - o)^2``, ``s = |scale| sqrt(D) / 2 sqrt(sum_d q_d^2 k_jd^2) + 2 |z|``.
        operand_spread: ``key_spread`` over all key dimensions.
        query_spread: The same of all query dimensions.
        cut_spread: ``(sum p z (v - o))^2``, what one factor on all logits does.
        split_power: ``sum_c (sum_{j in c} p v)^2`` over the stretches between merges.
        split_spread: ``sum_c (sum_{j in c} p (v - o))^2``.
        range_power: ``R^2``, ``R`` from the lowest to the highest of the sums ``sum_{j <= k} p v``, 0 among them: no
            stretch of keys sums to more than ``R``.
        range_magnitude: ``R A``.
        sum_power: ``sum_k (sum_{j <= k} p v)^2``, what a running sum over the keys is accurate against.
        value_terms: ``sum p v_terms``; 0 without a projection, as all ``*_terms``.
        value_terms_power: ``sum p^2 v_terms^2``.
        key_terms: ``|scale| max_j sum_d |q_d| k_terms_jd``.
        key_terms_spread: ``scale^2 sum_j p^2 (sum_d q_d^2 k_terms_jd^2) (v - o)^2``.
        scale_p: ``sum p^2 w^2`` with ``w_j = <v_j, o> / |o|^2``; the ``scale_*`` are the same sums projected on ``o``.
        scale_weight: ``sum p^2 (w - 1)^2``.
        scale_visible: ``sum w^2`` over visible keys.
        scale_visible_spread: ``sum (w - 1)^2`` over visible keys.
        scale_out: ``sum_d o^4 / |o|^4``.
        scale_input: ``sum_j p^2 sum_d v^2 o^2 / |o|^4``.
        scale_value: The same of projected values.
        scale_key: ``scale^2 sum_j p^2 (sum_d q_d^2 k_jd^2) (w - 1)^2``.
        scale_logits: ``sum p^2 z^2 (w - 1)^2``.
        scale_fp32: ``sum p^2 s^2 (w - 1)^2``.
        scale_operand: ``scale_key`` over all key dimensions.
        scale_query: ``scale^2 sum_d q_d^2 (sum_j p_j k_jd (w_j - 1))^2``.
        scale_cut: ``|sum p z (w - 1)|``.
        scale_key_terms: ``scale^2 sum_j p^2 (sum_d q_d^2 k_terms_jd^2) (w - 1)^2``.
        scale_value_terms: ``sum_j p^2 sum_d v_terms^2 o^2 / |o|^4``.
        scale_sum: ``sum_k sum_d (sum_{j <= k} p v)^2 o^2 / |o|^4``.
        scale_merge: ``sum_c (sum_{j in c} p (w - 1))^2``.
        scale_split: ``sum_c sum_d (sum_{j in c} p v)^2 o^2 / |o|^4``.
        lse_key: ``|scale| sum_j p sqrt(sum_d q_d^2 k_jd^2)`` over projected key dimensions, the largest
            standard deviation that their rounding can give.
        lse_key_power: ``scale^2 sum_j p^2 sum_d q_d^2 k_jd^2``, the variance if each key errs by itself.
        lse_fp32: ``sum p s``.
        lse_fp32_power: ``sum p^2 s^2``.
        lse_logits_power: ``sum p^2 z^2``.
        lse_operand_power: ``lse_key_power`` over all key dimensions, and ``scale^2 sum_d q_d^2 (sum_j p_j k_jd)^2``.
        lse_cut: ``|sum p z|``.
        split_means: ``[n, h, splits, Dv]``, what a kernel stores before each merge; the output where nothing is merged.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor
    share: Tensor
    sink: Tensor
    visible: Tensor
    keys: Tensor
    total: Tensor
    n_eff: Tensor
    weight_dof: Tensor
    spread_dof: Tensor
    key_dof: Tensor
    query_dof: Tensor
    value_dof: Tensor
    magnitude: Tensor
    stored_magnitude: Tensor
    sum_magnitude: Tensor
    power: Tensor
    value_power: Tensor
    weight_spread: Tensor
    visible_power: Tensor
    visible_spread: Tensor
    spread: Tensor
    products: Tensor
    projected_products: Tensor
    lse_projected: Tensor
    value_max: Tensor
    logit_max: Tensor
    logit_range: Tensor
    key_spread: Tensor
    logit_spread: Tensor
    fp32_spread: Tensor
    operand_spread: Tensor
    query_spread: Tensor
    cut_spread: Tensor
    split_power: Tensor
    split_spread: Tensor
    range_power: Tensor
    range_magnitude: Tensor
    sum_power: Tensor
    value_terms: Tensor
    value_terms_power: Tensor
    key_terms: Tensor
    key_terms_spread: Tensor
    scale_p: Tensor
    scale_weight: Tensor
    scale_visible: Tensor
    scale_visible_spread: Tensor
    scale_out: Tensor
    scale_input: Tensor
    scale_value: Tensor
    scale_key: Tensor
    scale_logits: Tensor
    scale_fp32: Tensor
    scale_operand: Tensor
    scale_query: Tensor
    scale_cut: Tensor
    scale_key_terms: Tensor
    scale_value_terms: Tensor
    scale_sum: Tensor
    scale_merge: Tensor
    scale_split: Tensor
    lse_key: Tensor
    lse_key_power: Tensor
    lse_fp32: Tensor
    lse_fp32_power: Tensor
    lse_logits_power: Tensor
    lse_operand_power: Tensor
    lse_cut: Tensor
    split_means: Tensor


def companions(rows: Rows, *, absorbed: bool = False) -> Companions:
    """Compute them head by head and a few queries at a time, so that memory stays bounded.

    Args:
        rows: Of one request.
        absorbed: Whether for a kernel that absorbs the projection; without a projection that makes no difference.

    Raises:
        ValueError: If the rows are projected from latents that they do not carry.
    """
    if rows.lists is not None:
        return _listed_companions(rows, rows.lists)
    absorbed = absorbed and rows.projection_depth > 0
    # an absorbed query is as wide as a latent row
    width = rows.q.shape[-1] + (rows.projection_depth if absorbed else 0)
    elements = max(rows.k.shape[0], width) * max(rows.v.shape[-1], width if absorbed else 1)
    step = max(1, BLOCK_ELEMENTS[rows.k.device.type] // max(1, elements))
    by_head = []
    for head in range(len(rows.heads)):
        parts = [
            _companions_block(rows, head, slice(at, at + step), absorbed=absorbed)
            for at in range(0, len(rows.tokens), step)
        ]
        by_head.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    names = [field.name for field in fields(Companions)]
    return Companions(**{name: torch.stack([block[name] for block in by_head], dim=1) for name in names})


def _companions_block(rows: Rows, head: int, queries: slice, *, absorbed: bool) -> dict[str, Tensor]:
    """The sums of a few queries of one head; tensors ``[n]``, ``[n, Dv]`` or ``[n, splits, Dv]``."""
    q, last_key = rows.q[queries, head : head + 1], rows.last_key[queries]
    k, v, scale = rows.k[:, head : head + 1], rows.v[:, head : head + 1], rows.softmax_scale
    logits = masked_logits(q, k, last_key, softmax_scale=scale)
    if rows.selected is not None:
        logits = logits.masked_fill(~rows.selected[queries, None], float("-inf"))
    out, lse = softmax_with_lse(logits, v)
    seen = logits[:, 0] > float("-inf")
    z, out, lse = logits[:, 0].masked_fill(~seen, 0.0), out[:, 0], lse[:, 0]
    p = torch.exp(z - lse[:, None]).masked_fill(~seen, 0.0)
    visible, heaviest = seen.sum(-1).to(out.dtype), p.amax(-1) if p.shape[1] else p.sum(-1)
    block = Block(
        q=q[:, 0], k=k[:, 0], v=v[:, 0], z=z, seen=seen, p=p, out=out, scale=abs(scale), projected=rows.projected_dims
    )
    found = {
        "out": out,
        "lse": lse,
        "max_logits": logits[:, 0].amax(-1) if len(k) else lse,
        "share": torch.ones_like(lse),
        "sink": torch.zeros_like(lse),
        "visible": visible,
        "keys": torch.full_like(visible, len(k)),
        "total": torch.where(visible > 0, 1 / heaviest.clamp(min=1e-300), 0.0),
        "n_eff": 1 / p.square().sum(-1).clamp(min=1e-300),
    }
    if not absorbed:
        return found | _sums(rows, head, block, block)
    latent = Absorbed.of(rows, head, block)
    sums = _sums(replace(rows, k_terms=None, v_terms=None), head, latent.block, latent.block)
    return found | sums | latent.sums(rows, sums["key_dof"])


def _listed_companions(rows: Rows, lists: Tensor) -> Companions:
    """Query by query, for each has keys of its own, and as many heads at once as fit; all heads share these keys."""
    parts: list[dict[str, Tensor]] = []
    for query, entries in enumerate(lists):
        elements = max(1, int((entries >= 0).sum())) * max(rows.v.shape[-1], rows.q.shape[-1])
        step = max(1, BLOCK_ELEMENTS[rows.k.device.type] // elements)
        blocks = []
        for at in range(0, len(rows.heads), step):
            listed = Listed.of(rows, query, slice(at, at + step))
            blocks.append(listed.found | _sums(rows, 0, listed.block, listed.alone) | listed.in_any_order())
        parts.append({name: torch.cat([block[name] for block in blocks]) for name in blocks[0]})
    names = [field.name for field in fields(Companions)]
    return Companions(**{name: torch.stack([part[name] for part in parts]) for name in names})


def _sums(rows: Rows, head: int, block: Block, alone: Block) -> dict[str, Tensor]:
    """Of a block, and for the log-sum-exp of the same one without a sink."""
    values = value_sums(rows, head, block)
    return (
        values
        | freedom_sums(block)
        | logit_sums(rows, head, block)
        | operand_sums(block)
        | scale_sums(rows, head, block, values)
        | lse_sums(alone)
    )
