"""G6: the scale of the output, row by row and pooled over heads, requests, positions and last tiles.

``alpha = <got, o> / <o, o> - 1`` measures a wrong denominator: noise averages out of it, a bias does not.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._gates_bounds import Roundoffs, finite_lse, lost_weight, merge_error, split_power
from .companions import Companions
from .contract import UNIT_ROUNDOFF, Contract
from .operation import Rows
from .record import GateResult, Location

POOLED_SIGMAS = 6.0
# what weights rounded to nearest lose or gain on average, in u^2: below a power of two the spacing is halved
BIAS_TO_NEAREST = 1 / 5
LAST_TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRows:
    """One entry per row with a key and a nonzero output, all ``[rows]``.

    Attributes:
        alpha: Relative error of scale; 0 in rows left out.
        independent: Its variance from errors that other rows do not share.
        shared: Its variance from rounded keys and values, which all rows of a request and head share.
        drift: A quarter of what float32 sums and the rounded lse may add, the same sign in every row.
        rounding: The same error of the oracle's own answer once it is rounded: a bias wherever outputs lie next to
            numbers of the format, and are rounded to these in every row.
        used: Rows that count.
        labels: Stratum of each row, by kind.
        tokens: Packed token of each row.
    """

    alpha: Tensor
    independent: Tensor
    shared: Tensor
    drift: Tensor
    rounding: Tensor
    used: Tensor
    labels: dict[str, Tensor]
    tokens: Tensor

    @classmethod
    def of(cls, c: Companions, u: Roundoffs, rows: Rows, got: Tensor) -> "ScaleRows":
        """The statistics of one block."""
        norm = c.out.square().sum(-1)
        used = (c.visible > 0) & (norm > 0)

        def along(error: Tensor) -> Tensor:
            return torch.where(used, (error * c.out).sum(-1) / norm.clamp(min=1e-300), 0.0)

        alpha = torch.where(used, along(got) - 1, 0.0)
        independent, shared = _variances(c, u)
        labels = _strata(c, rows)
        # truncated operands take the edge off all logits; the other sums are those of adders that truncate
        drift = c.visible.sqrt() * u.single + 0.5 * u.lse * (finite_lse(c) + c.sink) + u.cut * c.scale_cut / 4
        return cls(
            alpha=alpha.flatten(),
            independent=independent.flatten(),
            shared=shared.flatten(),
            drift=torch.where(used, drift, 0.0).flatten(),
            rounding=along(_rounded(c.out, u.out) - c.out).flatten(),
            used=used.flatten(),
            labels={name: label.flatten() for name, label in labels.items()},
            tokens=rows.tokens.to(alpha.device)[:, None].expand_as(alpha).flatten(),
        )

    def ratio(self, sigmas: float) -> Tensor:
        """``|alpha|`` of each row over its limit."""
        limit = sigmas * (self.independent + self.shared).sqrt() + 4 * self.drift
        limit = limit + (self.alpha.sign() * self.rounding).clamp(min=0.0)
        return torch.where(self.used, self.alpha.abs() / limit.clamp(min=1e-300), 0.0)


def _rounded(values: Tensor, roundoff: float) -> Tensor:
    """Float64 values to nearest in a format of fewer digits and any range, by the splitting of Dekker."""
    shifted = values * (roundoff / UNIT_ROUNDOFF["fp64"] + 1)
    return shifted - (shifted - values)


def _variances(c: Companions, u: Roundoffs) -> tuple[Tensor, Tensor]:
    """Of errors that rows do not share, and of those that all rows of a request and head do, ``[n, h]``."""
    rounded, lost = (c.scale_weight, c.scale_visible_spread) if u.from_p else (c.scale_p, c.scale_visible)
    weights = u.p**2 * rounded + lost_weight(c, u).square() * lost + u.ex2**2 * c.scale_p
    stored = u.pv_acc**2 * c.scale_sum + u.split**2 * _scale_split(c, u)
    row = weights + stored + u.out**2 * c.scale_out + u.logits**2 * c.scale_logits + u.operand**2 * c.scale_query
    projected = u.projected**2 * (c.scale_value + c.scale_key)
    projected = projected + u.projection**2 * (c.scale_value_terms + c.scale_key_terms)
    keys = u.operand**2 * c.scale_operand + u.inputs**2 * c.scale_input
    # an absorbed query and a latent output belong to one row, projected keys and values to all
    row, keys = (row + projected, keys) if u.absorbed else (row, keys + projected)
    merged = merge_error(c, u).square() * (_split_spread(c) if u.anywhere else c.scale_merge)
    return row / 3 + u.products**2 * c.scale_fp32 + merged, keys / 3


def _scale_split(c: Companions, u: Roundoffs) -> Tensor:
    """``split_power`` along the output; latent errors lie along it as far as they can."""
    if not u.anywhere:
        return c.scale_split
    norm, element = c.out.square().sum(-1).clamp(min=1e-150), split_power(c, u)
    if u.absorbed:
        return (element.sqrt() * c.out.abs()).sum(-1).square() / norm.square()
    return (element * c.out.square()).sum(-1) / norm.square()


def _split_spread(c: Companions) -> Tensor:
    """``sum p |w - 1|``, of which no stretch has more than half, is at most ``sum_d C_d |o_d| / |o|^2``."""
    norm = c.out.square().sum(-1).clamp(min=1e-150)
    return ((c.spread * c.out.abs()).sum(-1) / norm).square() / 2


def _strata(c: Companions, rows: Rows) -> dict[str, Tensor]:
    """The stratum of each row, by kind, ``[n, h]``."""
    heads, tokens = rows.heads.to(c.lse.device), rows.tokens.to(c.lse.device)
    last_key = rows.last_key.to(c.lse.device)[:, None].expand_as(c.lse)
    last_tile = (c.keys - 1).div(LAST_TILE, rounding_mode="floor")
    # the last query of a request is always among those judged
    behind = (tokens.max() - tokens)[:, None].expand_as(c.lse)
    return {
        "head": heads.expand_as(c.lse),
        "request": torch.full_like(c.lse, rows.request, dtype=torch.long),
        "position": torch.log2(c.visible.clamp(min=1.0)).long(),
        "last tile": (last_key.div(LAST_TILE, rounding_mode="floor") == last_tile).long(),
        "last queries": (behind < LAST_TILE).long(),
    }


def pooled_scale(blocks: list[ScaleRows], contract: Contract) -> list[GateResult]:
    """The inverse-variance mean of ``alpha`` over all rows and over each stratum, against six of its deviations."""
    if not blocks:
        return []

    def joined(name: str) -> Tensor:
        # blocks may have been judged on different devices; what follows are many small steps
        return torch.cat([getattr(block, name).cpu() for block in blocks])

    used = joined("used")
    if not bool(used.any()):
        return []
    values = {name: joined(name)[used] for name in ("alpha", "independent", "shared", "drift", "rounding", "tokens")}
    labels = {name: torch.cat([block.labels[name].cpu() for block in blocks])[used] for name in blocks[0].labels}
    u_p = contract.roundoff("p")
    margin = max(u_p / 256, BIAS_TO_NEAREST * u_p**2)
    worst: dict[str, GateResult] = {}
    groups = {"all": torch.zeros_like(labels["head"]), **labels}
    for kind, label in groups.items():
        for value in label.unique().tolist():
            member = label == value
            ratio, mean, limit = _pooled_ratio(values, labels, member, margin)
            if kind in worst and worst[kind].ratio >= ratio:
                continue
            text = f"{kind} {value}: mean scale error {mean:.3g}, limit {limit:.3g}, {int(member.sum())} rows"
            worst[kind] = GateResult(
                gate=f"G6 pooled scale by {kind}", ratio=ratio, where=_where(kind, value, values, member), text=text
            )
    return list(worst.values())


def _pooled_ratio(
    values: dict[str, Tensor], labels: dict[str, Tensor], member: Tensor, margin: float
) -> tuple[float, float, float]:
    """Ratio, mean and limit of one stratum."""
    alpha, independent, shared = (values[name][member] for name in ("alpha", "independent", "shared"))
    weight = 1 / (independent + shared).clamp(min=1e-300)
    weight = weight / weight.sum()
    # rows of one request and head round the same keys and values: within such a group deviations add up
    group = labels["request"][member] * (int(labels["head"].max()) + 1) + labels["head"][member]
    _, group = group.unique(return_inverse=True)
    grouped = torch.zeros(int(group.max()) + 1, dtype=weight.dtype, device=weight.device)
    grouped.index_add_(0, group, weight * shared.sqrt())
    variance = (weight.square() * independent).sum() + grouped.square().sum()
    drift, rounding = ((weight * values[name][member]).sum() for name in ("drift", "rounding"))
    mean = float((weight * alpha).sum())
    limit = float(POOLED_SIGMAS * variance.sqrt() + 4 * drift) + margin
    limit += max(0.0, math.copysign(1.0, mean) * float(rounding))
    ratio = abs(mean) / limit
    return (math.inf if math.isnan(ratio) else ratio), mean, limit


def _where(kind: str, value: int, values: dict[str, Tensor], member: Tensor) -> Location:
    """The stratum itself, and in it the row that is furthest off."""
    alpha = torch.where(member, values["alpha"].abs(), -1.0)
    token = int(values["tokens"][int(alpha.argmax())])
    return Location(token=token, head=value if kind == "head" else None, request=value if kind == "request" else None)
