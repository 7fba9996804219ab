"""The sums behind the companions, for some queries of one head; ``[n]``, ``[n, Dv]`` or ``[n, splits, Dv]``."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ._companions_freedom import Directions, freedom_of_factors
from .operation import Rows


@dataclass(frozen=True, kw_only=True)
class Block:
    """The softmax of some queries of one head, with what its logits are products of.

    Attributes:
        q: ``[n, D]``.
        k: ``[S, D]``.
        v: ``[S, Dv]``.
        z: ``[n, S]``, scaled logits, 0 where a key is hidden.
        seen: ``[n, S]``.
        p: ``[n, S]``, weights, 0 where a key is hidden.
        out: ``[n, Dv]``.
        scale: Size of the factor on the logits.
        projected: Leading dimensions of ``q . k`` that come out of a projection inside the kernel.
        times: ``[S]``, how often a key counts; None for once. ``p`` is the weight of all its copies, which err alike.
        aside: ``[n]``, weight that goes to a sink, whose value is 0; None for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    seen: Tensor
    p: Tensor
    out: Tensor
    scale: float
    projected: int
    times: Tensor | None = None
    aside: Tensor | None = None

    @cached_property
    def repeats(self) -> Tensor:
        """``[n, S]``: of a visible key, the square of how often it counts."""
        seen = self.seen.to(self.p.dtype)
        return seen if self.times is None else seen * self.times.square()

    @cached_property
    def p2(self) -> Tensor:
        """``p^2``."""
        return self.p.square()

    @cached_property
    def moving(self) -> Tensor:
        """``scale^2 sum_d q_d^2 k_jd^2``, ``[n, S]``, the variance of a logit whose operands are rounded."""
        return self.variance(self.k)

    @cached_property
    def projected_moving(self) -> Tensor:
        """The same over the projected dimensions."""
        return self.variance(self.k[:, : self.projected])

    @cached_property
    def norm(self) -> Tensor:
        """``|o|^2``, ``[n, 1]``; its square is a divisor, too, and must not underflow to 0 in a row without keys."""
        return self.out.square().sum(-1, keepdim=True).clamp(min=torch.finfo(self.out.dtype).tiny ** 0.5)

    @cached_property
    def w(self) -> Tensor:
        """``<v_j, o> / |o|^2``, ``[n, S]``."""
        return (self.out @ self.v.T) / self.norm

    @cached_property
    def weighted(self) -> Tensor:
        """``p v``, ``[n, S, Dv]``."""
        return self.p[:, :, None] * self.v[None]

    @cached_property
    def fp32(self) -> Tensor:
        """``s``, ``[n, S]``: what float32 makes of a logit, in roundoffs."""
        return math.sqrt(self.q.shape[-1]) / 2 * self.moving.sqrt() + 2 * self.z.abs()

    def absolute(self, k: Tensor, q: Tensor | None = None) -> Tensor:
        """``|scale| sum_d |q_d| |k_jd|`` over as many leading dimensions as ``k`` has."""
        q = self.q[:, : k.shape[1]] if q is None else q
        return self.scale * torch.where(self.seen, q.abs() @ k.abs().T, 0.0)

    def variance(self, k: Tensor) -> Tensor:
        """``scale^2 sum_d q_d^2 k_jd^2``."""
        return self.scale**2 * torch.where(self.seen, self.q[:, : k.shape[1]].square() @ k.square().T, 0.0)

    def around_out(self, weights: Tensor) -> Tensor:
        """``sum_j weights (v - o)^2``, expanded so that it is three products."""
        out, v = self.out, self.v
        total = weights @ v.square() - 2 * out * (weights @ v) + out.square() * weights.sum(-1, keepdim=True)
        return total.clamp(min=0.0)

    def around_scale(self, weights: Tensor) -> Tensor:
        """``sum_j weights (w - 1)^2``."""
        return (weights * (self.w - 1).square()).sum(-1)

    def along_out(self, element: Tensor) -> Tensor:
        """``sum_d element o^2 / |o|^4``."""
        return (element * self.out.square()).sum(-1) / self.norm[:, 0].square()

    def covariance(self, x: Tensor) -> Tensor:
        """``sum_j p x_j (v_j - o)``, ``[n, D, Dv]``, for ``x`` of ``[S, D]``."""
        return x.T @ self.weighted - (self.p @ x)[:, :, None] * self.out[:, None]

    def covariance_scale(self, x: Tensor) -> Tensor:
        """``sum_j p x_j (w_j - 1)``, ``[n, D]``."""
        return (self.p * (self.w - 1)) @ x


def freedom_sums(block: Block) -> dict[str, Tensor]:
    """Degrees of freedom of the errors of weights, against 0 and against the output, and of logits."""
    directions, p2 = Directions(block.v), block.p2
    zero = torch.zeros_like(block.out)
    return {
        "weight_dof": directions.freedom(p2, zero),
        "spread_dof": directions.freedom(p2, block.out),
        "key_dof": directions.freedom(p2 * block.moving, block.out),
        "value_dof": torch.ones_like(zero[:, 0]),
    }


def logit_sums(rows: Rows, head: int, block: Block) -> dict[str, Tensor]:
    """What can be wrong with a logit."""
    z, seen = block.z, block.seen
    highest = torch.where(seen, z, float("-inf"))
    highest = highest.amax(-1, keepdim=True) if z.shape[1] else z.new_zeros(len(z), 1)
    projected = block.k[:, : block.projected]
    moved = largest(block.absolute(projected))
    return {
        "products": largest(block.absolute(block.k)),
        "projected_products": moved,
        "lse_projected": moved,
        "key_terms": largest(block.absolute(terms(rows.k_terms, head, projected))),
        "logit_max": largest(z.abs()),
        "logit_range": largest(torch.where(seen, (z - highest).abs(), 0.0)),
    }


def operand_sums(block: Block) -> dict[str, Tensor]:
    """What rounding queries and keys before they are multiplied can do: each error of a query is in all its logits."""
    p2, z, q2 = block.p2, block.z, block.scale**2 * block.q.square()
    variance, cut = p2 * block.moving, block.p * z
    moved = block.covariance(block.k)
    return {
        "operand_spread": block.around_out(variance),
        "query_spread": (q2[:, :, None] * moved.square()).sum(1),
        "query_dof": freedom_of_factors(q2.sqrt()[:, :, None] * moved),
        "cut_spread": (cut @ block.v - cut.sum(-1, keepdim=True) * block.out).square(),
        "scale_operand": block.around_scale(variance),
        "scale_query": (q2 * block.covariance_scale(block.k).square()).sum(-1),
        "scale_cut": (cut * (block.w - 1)).sum(-1).abs(),
    }


def value_sums(rows: Rows, head: int, block: Block) -> dict[str, Tensor]:
    """The sums over values, element by element."""
    p, v, p2, out = block.p, block.v, block.p2, block.out
    v_terms = terms(rows.v_terms, head, v)
    magnitude, power, running = p @ v.abs(), p2 @ v.square(), block.weighted.cumsum(1)
    reach = running_range(running)
    part_sums, part_mass = split_sums(p, v, rows.split_ends)
    part_spread = part_sums - part_mass[..., None] * out[:, None]
    spread = (p[:, :, None] * (v[None] - out[:, None]).abs()).sum(1)
    return {
        "magnitude": magnitude,
        "stored_magnitude": magnitude,
        "sum_magnitude": magnitude,
        "power": power,
        "value_power": power,
        "weight_spread": block.around_out(p2),
        "visible_power": block.repeats @ v.square(),
        "visible_spread": block.around_out(block.repeats),
        "spread": spread if block.aside is None else spread + block.aside[:, None] * out.abs(),
        "sum_power": running.square().sum(1),
        "range_power": reach.square(),
        "range_magnitude": reach * magnitude,
        "value_terms": p @ v_terms,
        "value_terms_power": p2 @ v_terms.square(),
        "key_spread": block.around_out(p2 * block.projected_moving),
        "key_terms_spread": block.around_out(p2 * _moving_terms(rows, head, block)),
        "logit_spread": block.around_out(p2 * block.z.square()),
        "fp32_spread": block.around_out(p2 * block.fp32.square()),
        "value_max": (v.abs().max() if v.numel() else v.new_zeros(())).expand(len(p)),
        "split_power": part_sums.square().sum(1),
        "split_spread": part_spread.square().sum(1),
        "split_means": part_sums / part_mass[..., None].clamp(min=torch.finfo(p.dtype).tiny),
        "scale_merge": ((part_sums * out[:, None]).sum(-1) / block.norm - part_mass).square().sum(1),
    }


def scale_sums(rows: Rows, head: int, block: Block, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same projected on the output, for the scale statistic; ``sums`` are those of the elements."""
    p2 = block.p2
    return {
        "scale_p": (p2 * block.w.square()).sum(-1),
        "scale_weight": block.around_scale(p2),
        "scale_visible": (block.repeats * block.w.square()).sum(-1),
        "scale_visible_spread": block.around_scale(block.repeats),
        "scale_out": block.along_out(block.out.square()),
        "scale_input": block.along_out(sums["power"]),
        "scale_value": block.along_out(sums["value_power"]),
        "scale_value_terms": block.along_out(sums["value_terms_power"]),
        "scale_key": block.around_scale(p2 * block.projected_moving),
        "scale_key_terms": block.around_scale(p2 * _moving_terms(rows, head, block)),
        "scale_logits": block.around_scale(p2 * block.z.square()),
        "scale_fp32": block.around_scale(p2 * block.fp32.square()),
        "scale_sum": block.along_out(sums["sum_power"]),
        "scale_split": block.along_out(sums["split_power"]),
    }


def lse_sums(block: Block) -> dict[str, Tensor]:
    """What errors of logits do to their log-sum-exp, if all err alike and if each errs by itself."""
    p2, z, q2 = block.p2, block.z, block.scale**2 * block.q.square()
    return {
        "lse_key": (block.p * block.projected_moving.sqrt()).sum(-1),
        "lse_key_power": (block.p2 * block.projected_moving).sum(-1),
        "lse_fp32": (block.p * block.fp32).sum(-1),
        "lse_fp32_power": (block.p * block.fp32).square().sum(-1),
        "lse_operand_power": (p2 * block.moving).sum(-1) + (q2 * (block.p @ block.k).square()).sum(-1),
        "lse_cut": (block.p * z).sum(-1).abs(),
        "lse_logits_power": (p2 * z.square()).sum(-1),
    }


def _moving_terms(rows: Rows, head: int, block: Block) -> Tensor:
    """The variance of a logit that sums of ``rows.k_terms`` are accurate against, ``[n, S]``."""
    return block.variance(terms(rows.k_terms, head, block.k[:, : block.projected]))


def terms(found: Tensor | None, head: int, like: Tensor) -> Tensor:
    """The terms of one head; zeros where nothing is projected."""
    return torch.zeros_like(like) if found is None else found[:, head]


def largest(values: Tensor) -> Tensor:
    """Maximum over keys; 0 where there are none."""
    return values.amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])


def running_range(running: Tensor) -> Tensor:
    """Of sums over the keys so far, ``[n, S, D]``, from their lowest to their highest, 0 among them: ``[n, D]``."""
    if not running.shape[1]:
        return running.sum(1)
    return running.amax(1).clamp(min=0.0) - running.amin(1).clamp(max=0.0)


def split_sums(p: Tensor, v: Tensor, ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``sum p v``, ``[n, splits, Dv]``, and ``sum p``, ``[n, splits]``, of each stretch between merges."""
    stretches = list(itertools.pairwise([0, *(ends or (len(v),))]))
    sums = torch.stack([p[:, start:end] @ v[start:end] for start, end in stretches], dim=1)
    return sums, torch.stack([p[:, start:end].sum(-1) for start, end in stretches], dim=1)
