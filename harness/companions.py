"""The oracle's answer together with the sums that bound how far an honest kernel may be from it.

Everything comes from the same masked logits as the oracle (``reference.attention.masked_logits``). Notation, per row:
``z`` scaled logits, ``p`` softmax weights, ``o`` output, ``d`` a value dimension, ``j`` a key.
"""

import itertools
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..reference.attention import masked_logits, softmax_with_lse
from .operation import Rows

# elements of the largest [rows, keys, dims] intermediate
BLOCK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
# keys up to which all pairs are summed, and random directions beyond
PAIRED_KEYS = 1024
PROBES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Sums per row (``[n, h]``) or per element (``[n, h, Dv]``), float64. Unit roundoffs are left to the gates.

    Attributes:
        out: The oracle's output ``o``.
        lse: The oracle's log-sum-exp.
        visible: Number of visible keys.
        n_eff: ``1 / sum p^2``, keys that share the weight.
        weight_dof: Degrees of freedom of ``sum_j e_j p_j v_j`` over the value dimensions, ``e`` independent: few where
            the weight lies on few keys, or where the values are alike.
        key_dof: The same of ``sum_j e_j p_j sqrt(sum_d q_d^2 k_jd^2) (v_j - o)``.
        magnitude: ``A = sum p |v|``.
        power: ``B^2 = sum p^2 v^2``.
        spread: ``C = sum p |v - o|``.
        products: ``|scale| max_j sum_d |q_d k_jd|``.
        projected_products: The same over the projected key dimensions.
        value_max: ``max |v|`` over all keys.
        logit_max: ``max |z|`` over visible keys.
        logit_range: ``max |z - max z|`` over visible keys.
        key_spread: ``scale^2 sum_j p^2 (sum_d q_d^2 k_jd^2) (v - o)^2`` over projected key dimensions.
        logit_spread: ``sum p^2 z^2 (v - o)^2``.
        fp32_spread: ``sum p^2 s^2 (v - o)^2``, ``s = |scale| sqrt(D) / 2 sqrt(sum_d q_d^2 k_jd^2) + 2 |z|``.
        split_power: ``sum_c (sum_{j in c} p v)^2`` over the stretches between merges.
        split_spread: ``sum_c (sum_{j in c} p (v - o))^2``.
        sum_power: ``sum_k (sum_{j <= k} p v)^2``, what a running sum over the keys is accurate against.
        value_terms: ``sum p v_terms``; 0 without a projection, as all ``*_terms``.
        value_terms_power: ``sum p^2 v_terms^2``.
        key_terms: ``|scale| max_j sum_d |q_d| k_terms_jd``.
        key_terms_spread: ``scale^2 sum_j p^2 (sum_d q_d^2 k_terms_jd^2) (v - o)^2``.
        scale_p: ``sum p^2 w^2`` with ``w_j = <v_j, o> / |o|^2``; the ``scale_*`` are the same sums projected on ``o``.
        scale_out: ``sum_d o^4 / |o|^4``.
        scale_value: ``sum_j p^2 sum_d v^2 o^2 / |o|^4``.
        scale_key: ``scale^2 sum_j p^2 (sum_d q_d^2 k_jd^2) (w - 1)^2``.
        scale_logits: ``sum p^2 z^2 (w - 1)^2``.
        scale_fp32: ``sum p^2 s^2 (w - 1)^2``.
        scale_key_terms: ``scale^2 sum_j p^2 (sum_d q_d^2 k_terms_jd^2) (w - 1)^2``.
        scale_value_terms: ``sum_j p^2 sum_d v_terms^2 o^2 / |o|^4``.
        scale_sum: ``sum_k sum_d (sum_{j <= k} p v)^2 o^2 / |o|^4``.
        scale_merge: ``sum_c (sum_{j in c} p (w - 1))^2``.
        scale_split: ``sum_c sum_d (sum_{j in c} p v)^2 o^2 / |o|^4``.
        lse_key: ``|scale| sum_j p sqrt(sum_d q_d^2 k_jd^2)`` over projected key dimensions, the largest
            standard deviation that their rounding can give.
        lse_fp32: ``sum p s``.
        split_means: ``[n, h, splits, Dv]``, what a kernel stores before each merge; the output where nothing is merged.
    """

    out: Tensor
    lse: Tensor
    visible: Tensor
    n_eff: Tensor
    weight_dof: Tensor
    key_dof: Tensor
    magnitude: Tensor
    power: Tensor
    spread: Tensor
    products: Tensor
    projected_products: Tensor
    value_max: Tensor
    logit_max: Tensor
    logit_range: Tensor
    key_spread: Tensor
    logit_spread: Tensor
    fp32_spread: Tensor
    split_power: Tensor
    split_spread: Tensor
    sum_power: Tensor
    value_terms: Tensor
    value_terms_power: Tensor
    key_terms: Tensor
    key_terms_spread: Tensor
    scale_p: Tensor
    scale_out: Tensor
    scale_value: Tensor
    scale_key: Tensor
    scale_logits: Tensor
    scale_fp32: Tensor
    scale_key_terms: Tensor
    scale_value_terms: Tensor
    scale_sum: Tensor
    scale_merge: Tensor
    scale_split: Tensor
    lse_key: Tensor
    lse_fp32: Tensor
    split_means: Tensor


def companions(rows: Rows) -> Companions:
    """Compute them head by head and a few queries at a time, so that memory stays bounded."""
    keys, d_v = rows.k.shape[0], rows.v.shape[-1]
    step = max(1, BLOCK_ELEMENTS[rows.k.device.type] // max(1, keys * d_v))
    by_head = []
    for head in range(len(rows.heads)):
        parts = [_companions_block(rows, head, slice(at, at + step)) for at in range(0, len(rows.tokens), step)]
        by_head.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    names = [field.name for field in fields(Companions)]
    return Companions(**{name: torch.stack([block[name] for block in by_head], dim=1) for name in names})


def _companions_block(rows: Rows, head: int, queries: slice) -> dict[str, Tensor]:
    """The sums of a few queries of one head; tensors ``[n]``, ``[n, Dv]`` or ``[n, splits, Dv]``."""
    q, last_key = rows.q[queries, head : head + 1], rows.last_key[queries]
    k, v, scale = rows.k[:, head : head + 1], rows.v[:, head : head + 1], rows.softmax_scale
    logits = masked_logits(q, k, last_key, softmax_scale=scale)
    out, lse = softmax_with_lse(logits, v)
    seen = logits[:, 0] > float("-inf")
    z, out, lse = logits[:, 0].masked_fill(~seen, 0.0), out[:, 0], lse[:, 0]
    p = torch.exp(z - lse[:, None]).masked_fill(~seen, 0.0)
    keys = _KeySums(q[:, 0], k[:, 0], z, seen, scale)
    n_eff = 1 / p.square().sum(-1).clamp(min=1e-300)
    return {"out": out, "lse": lse, "visible": seen.sum(-1).to(out.dtype), "n_eff": n_eff} | (
        _freedom(rows.v[:, head], keys, p, out)
        | _logit_sums(rows, head, keys)
        | _value_sums(rows, head, keys, p, out)
        | _lse_sums(rows, keys, p)
    )


class _KeySums:
    """Per query and key, ``[n, S]``: what rounding the products of a logit, or the key itself, can do to it."""

    def __init__(self, q: Tensor, k: Tensor, z: Tensor, seen: Tensor, scale: float) -> None:
        self.q, self.k, self.z, self.seen, self.scale = q, k, z, seen, abs(scale)
        self.fp32 = self.scale * q.shape[-1] ** 0.5 / 2 * self.deviation(k) + 2 * z.abs()

    def absolute(self, k: Tensor) -> Tensor:
        """``|scale| sum_d |q_d| |k_jd|`` over as many leading dimensions as ``k`` has."""
        return self.scale * torch.where(self.seen, self.q[:, : k.shape[1]].abs() @ k.abs().T, 0.0)

    def variance(self, k: Tensor) -> Tensor:
        """``scale^2 sum_d q_d^2 k_jd^2``."""
        return self.scale**2 * torch.where(self.seen, self.q[:, : k.shape[1]].square() @ k.square().T, 0.0)

    def deviation(self, k: Tensor) -> Tensor:
        """Root of ``sum_d q_d^2 k_jd^2``."""
        return torch.where(self.seen, self.q[:, : k.shape[1]].square() @ k.square().T, 0.0).sqrt()


def _freedom(v: Tensor, keys: _KeySums, p: Tensor, out: Tensor) -> dict[str, Tensor]:
    spread = p.square() * keys.deviation(keys.k).square()
    return {
        "weight_dof": degrees_of_freedom(p.square(), v, torch.zeros_like(out)),
        "key_dof": degrees_of_freedom(spread, v, out),
    }


def degrees_of_freedom(weights: Tensor, v: Tensor, center: Tensor) -> Tensor:
    """``tr(M)^2 / tr(M^2)`` of ``M = sum_j w_j (v_j - c)(v_j - c)^T``, row by row.

    The square of an error with covariance ``M`` is spread like a chi-square of that many degrees of freedom. Over few
    keys the trace of the square is summed pair by pair; over many it is estimated from random probes, and from one step
    of the power method where one direction rules.

    Args:
        weights: ``[n, S]``, not negative.
        v: ``[S, Dv]``.
        center: ``[n, Dv]``.

    Returns:
        ``[n]``, at least 1.
    """
    total = weights.sum(-1)
    trace = weights @ v.square().sum(-1) - 2 * (center * (weights @ v)).sum(-1) + center.square().sum(-1) * total
    square = _square_by_pairs(weights, v, center) if len(v) <= PAIRED_KEYS else _square_by_probes(weights, v, center)
    return (trace.square() / square.clamp(min=1e-300)).clamp(min=1.0)


def _square_by_pairs(weights: Tensor, v: Tensor, center: Tensor) -> Tensor:
    """``sum_jk w_j w_k ((v_j - c) . (v_k - c))^2``, expanded so that the inner products are shared by all rows."""
    products, along, norm, total = v @ v.T, center @ v.T, center.square().sum(-1), weights.sum(-1)
    first, second = (weights * along).sum(-1), (weights * along.square()).sum(-1)
    shifts = 2 * total * second + 2 * first.square() - 4 * norm * total * first + (norm * total).square()
    crossed = ((weights * along) @ products * weights).sum(-1)
    plain = (weights @ products * weights).sum(-1)
    return (weights @ products.square() * weights).sum(-1) + shifts - 4 * crossed + 2 * norm * plain


def _square_by_probes(weights: Tensor, v: Tensor, center: Tensor) -> Tensor:
    """``E |M g|^2`` over normal ``g``, or ``|M d|^2`` of the strongest direction if that is larger."""

    def apply(along: Tensor) -> Tensor:
        # M g for one vector g per row: along is (v_j - c) . g, [n, S]
        weighted = weights * along
        return weighted @ v - center * weighted.sum(-1, keepdim=True)

    generator = torch.Generator().manual_seed(v.shape[-1])
    probes = torch.randn(PROBES, v.shape[-1], generator=generator, dtype=v.dtype).to(v.device)
    images = [apply((v @ probe)[None] - (center @ probe)[:, None]) for probe in probes]
    norms = [image.square().sum(-1) for image in images]
    direction = images[0] / norms[0].sqrt().clamp(min=1e-300)[:, None]
    strongest = apply(direction @ v.T - (direction * center).sum(-1, keepdim=True)).square().sum(-1)
    return torch.maximum(torch.stack(norms).mean(0), strongest)


def _logit_sums(rows: Rows, head: int, keys: _KeySums) -> dict[str, Tensor]:
    z, seen = keys.z, keys.seen
    highest = torch.where(seen, z, float("-inf"))
    highest = highest.amax(-1, keepdim=True) if z.shape[1] else z.new_zeros(len(z), 1)
    projected = keys.k[:, : rows.projected_dims]
    return {
        "products": _largest(keys.absolute(keys.k)),
        "projected_products": _largest(keys.absolute(projected)),
        "key_terms": _largest(keys.absolute(_terms(rows.k_terms, head, projected))),
        "logit_max": _largest(z.abs()),
        "logit_range": _largest(torch.where(seen, (z - highest).abs(), 0.0)),
    }


def _value_sums(rows: Rows, head: int, keys: _KeySums, p: Tensor, out: Tensor) -> dict[str, Tensor]:
    """The sums over values, each for the elements and projected on the output for the scale statistic."""
    v, z = rows.v[:, head], keys.z
    v_terms = _terms(rows.v_terms, head, v)
    projected = keys.k[:, : rows.projected_dims]
    key_terms = keys.variance(_terms(rows.k_terms, head, projected))
    # its square is a divisor, too, and must not underflow to 0 in a row without keys
    norm = out.square().sum(-1, keepdim=True).clamp(min=torch.finfo(out.dtype).tiny ** 0.5)
    direction, w = out.square() / norm.square(), (out @ v.T) / norm
    p2 = p.square()

    def around_out(weights: Tensor) -> Tensor:
        # sum_j weights (v - o)^2, expanded so that it is three products
        total = weights @ v.square() - 2 * out * (weights @ v) + out.square() * weights.sum(-1, keepdim=True)
        return total.clamp(min=0.0)

    def around_scale(weights: Tensor) -> Tensor:
        return (weights * (w - 1).square()).sum(-1)

    def along_out(element: Tensor) -> Tensor:
        return (element * direction).sum(-1)

    weighted = p[:, :, None] * v[None]
    sum_power = weighted.cumsum(1).square().sum(1)
    part_sums, part_mass = _split_sums(p, v, rows.split_ends)
    part_spread = part_sums - part_mass[..., None] * out[:, None]
    part_shift = (part_sums * out[:, None]).sum(-1) / norm - part_mass
    split_power, value_terms_power = part_sums.square().sum(1), p2 @ v_terms.square()
    return {
        "magnitude": p @ v.abs(),
        "power": p2 @ v.square(),
        "spread": (p[:, :, None] * (v[None] - out[:, None]).abs()).sum(1),
        "sum_power": sum_power,
        "value_terms": p @ v_terms,
        "value_terms_power": value_terms_power,
        "key_spread": around_out(p2 * keys.variance(projected)),
        "key_terms_spread": around_out(p2 * key_terms),
        "logit_spread": around_out(p2 * z.square()),
        "fp32_spread": around_out(p2 * keys.fp32.square()),
        "value_max": (v.abs().max() if v.numel() else v.new_zeros(())).expand(len(p)),
        "split_power": split_power,
        "split_spread": part_spread.square().sum(1),
        "split_means": part_sums / part_mass[..., None].clamp(min=torch.finfo(p.dtype).tiny),
        "scale_p": (p2 * w.square()).sum(-1),
        "scale_out": along_out(out.square()),
        "scale_value": along_out(p2 @ v.square()),
        "scale_value_terms": along_out(value_terms_power),
        "scale_key": around_scale(p2 * keys.variance(projected)),
        "scale_key_terms": around_scale(p2 * key_terms),
        "scale_logits": around_scale(p2 * z.square()),
        "scale_fp32": around_scale(p2 * keys.fp32.square()),
        "scale_sum": along_out(sum_power),
        "scale_split": along_out(split_power),
        "scale_merge": part_shift.square().sum(1),
    }


def _lse_sums(rows: Rows, keys: _KeySums, p: Tensor) -> dict[str, Tensor]:
    projected = keys.k[:, : rows.projected_dims]
    return {
        "lse_key": keys.scale * (p * keys.deviation(projected)).sum(-1),
        "lse_fp32": (p * keys.fp32).sum(-1),
    }


def _terms(terms: Tensor | None, head: int, like: Tensor) -> Tensor:
    """The terms of one head; zeros where nothing is projected."""
    return torch.zeros_like(like) if terms is None else terms[:, head]


def _largest(values: Tensor) -> Tensor:
    """Maximum over keys; 0 where there are none."""
    return values.amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def _split_sums(p: Tensor, v: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``sum p v``, ``[n, splits, Dv]``, and ``sum p``, ``[n, splits]``, of each stretch between merges."""
    stretches = list(itertools.pairwise([0, *(ends or (len(v),))]))
    sums = torch.stack([p[:, start:end] @ v[start:end] for start, end in stretches], dim=1)
    return sums, torch.stack([p[:, start:end].sum(-1) for start, end in stretches], dim=1)
