"""How far an honest kernel may be from the oracle: hard bounds and variances, from a contract and the companions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .companions import Companions
from .contract import SUBNORMAL, UNIT_ROUNDOFF, Contract
from .operation import Rows

# of the log-sum-exp: deviations if all keys err alike, and if each errs by itself
LSE_SIGMAS, LSE_INDEPENDENT_SIGMAS = 4.0, 5.0
# chi-square tail, one-sided, in standard normal deviations: 1e-9 per row
RMS_TAIL = 6.0
# by how much a weight may be off where its format has no number near it; the largest weight is 1
UNDERFLOW = {"fp16": 2.0**-25, "e4m3": 2.0**-10}
# beyond it a logit error says nothing, and its exponential must stay a number
LARGEST_LOGIT_ERROR = 300.0
SINGLE = UNIT_ROUNDOFF["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundoffs:
    """The unit roundoffs of a contract as the formulas name them, for rows whose projection and splits are known.

    Attributes:
        p: Of a weight.
        out: Of the output.
        lse: Of the log-sum-exp.
        logits: Of a stored logit.
        single: Of the arithmetic of the softmax itself: float32, or float64 if that is what sums are in.
        pv_acc: Of the accumulator of weights times values.
        products: Of the sum of a logit's products.
        operand: Of each of their operands, as a root mean square.
        operand_bound: Most by which both operands together move a product.
        cut: Of operands that are truncated: their errors have one sign.
        inputs: Of values that are rounded before use.
        projected: Of storing a projected key or value, or an absorbed query or latent output.
        projection: Of the sum before it, relative to the root of its squared terms.
        split: Of a stored partial result.
        splits: Most partial results of a row; None if it may have as many as keys.
        anywhere: Whether they may end anywhere, not where the operation says.
        ex2: Of the exponential.
        from_p: Whether the denominator sums the rounded weights.
        absorbed: Whether queries and outputs are projected instead of keys and values.
        underflow: Most by which a weight is off that lies below the numbers of its format, the largest one being 1.
        divided: Whether weights may be divided by their sum before they are rounded.
        subnormal: Smallest output.
        width: Length of the inner product of a logit.
    """

    p: float
    out: float
    lse: float
    logits: float
    single: float
    pv_acc: float
    products: float
    operand: float
    operand_bound: float
    cut: float
    inputs: float
    projected: float
    projection: float
    split: float
    splits: int | None
    anywhere: bool
    ex2: float
    from_p: bool
    absorbed: bool
    underflow: float
    divided: bool
    subnormal: float
    width: int

    @classmethod
    def of(cls, contract: Contract, rows: Rows) -> "Roundoffs":
        """Read them off the contract."""
        projects, planned = rows.projection_depth > 0, len(rows.split_ends)
        absorbed, inputs = contract.absorbed and projects, contract.roundoff("inputs")
        anywhere = contract.splits_store is not None and (contract.splits is not None or not planned)
        splits = contract.splits if anywhere else max(1, planned)
        sums = UNIT_ROUNDOFF["fp64" if contract.projected == "fp64" else "fp32"]
        products, operand, operand_bound = _products(contract)
        return cls(
            p=contract.roundoff("p"),
            out=contract.roundoff("out"),
            lse=contract.roundoff("lse"),
            logits=contract.roundoff("logits"),
            single=min(SINGLE, contract.roundoff("pv_acc")),
            pv_acc=contract.roundoff("pv_acc"),
            products=products,
            operand=math.hypot(operand, inputs),
            operand_bound=operand_bound + 2 * inputs + inputs**2,
            cut=operand if contract.qk_acc == "tf32" else 0.0,
            inputs=0.0 if projects else inputs,
            projected=contract.roundoff("projected") if projects else 0.0,
            # rounded latents and weights add to each term of the sum
            projection=math.sqrt(rows.projection_depth * sums**2 + 2 * inputs**2) if projects else 0.0,
            split=0.0 if splits == 1 else contract.roundoff("splits_store"),
            splits=splits,
            anywhere=anywhere,
            ex2=contract.ex2_rel,
            from_p=contract.l == "from_p",
            absorbed=absorbed,
            underflow=UNDERFLOW.get(contract.p, 0.0),
            # in 8 bits few of them would be left
            divided=contract.p != "e4m3",
            subnormal=SUBNORMAL[contract.out],
            width=rows.q.shape[-1] + (rows.projection_depth - rows.projected_dims if absorbed else 0),
        )


def _products(contract: Contract) -> tuple[float, float, float]:
    """Of a logit: the roundoff of its sum, of each operand, and the bound on both operands together."""
    u = contract.roundoff("qk_acc")
    if contract.qk_acc == "tf32":
        return SINGLE, u, 2 * u + u**2
    if contract.qk_acc == "bf16x3":
        # what is left of each operand, and the product of the two low parts, which is not computed
        return SINGLE, u * math.sqrt(4 / 3), u * (3 + 2.0**-6)
    return u, 0.0, 0.0


def split_count(c: Companions, u: Roundoffs) -> Tensor:
    """Most partial results of each row, ``[n, h]``."""
    if u.splits is None:
        return c.visible.clamp(min=1.0)
    return torch.full_like(c.visible, u.splits)


def merge_error(c: Companions, u: Roundoffs) -> Tensor:
    """Relative error of a merge weight, ``[n, h]``."""
    splits = split_count(c, u)
    return torch.where(splits > 1, 2 * splits.sqrt() * u.lse * (1 + finite_lse(c)), 0.0)


def finite_lse(c: Companions) -> Tensor:
    """``|lse|``, 0 in rows without keys."""
    return torch.where(c.visible > 0, c.lse.abs(), 0.0)


def normaliser(c: Companions, u: Roundoffs) -> Tensor:
    """Relative error of weights that are divided by ``exp(lse)``, the lse being stored first; ``[n, h, 1]``.

    A sink is compared with it, and is stored as well.
    """
    return (u.lse * (finite_lse(c) + c.sink))[..., None]


def split_power(c: Companions, u: Roundoffs) -> Tensor:
    """``sum_c (sum_{j in c} p v)^2`` over the stretches between merges, or a bound on it where they are not known.

    At most ``S`` sums of which none exceeds the range ``R`` of the running sum, and all together not ``A``.
    """
    if not u.anywhere:
        return c.split_power
    return c.range_magnitude if u.splits is None else torch.minimum(u.splits * c.range_power, c.range_magnitude)


def split_spread(c: Companions, u: Roundoffs) -> Tensor:
    """The same of ``p (v - o)``: these sum to 0, so no stretch has more than half of their magnitude ``C``."""
    return c.spread.square() / 2 if u.anywhere else c.split_spread


def logit_error(c: Companions, u: Roundoffs, projected: Tensor) -> Tensor:
    """``eta``, ``[n, h]``: bound on the error of any logit of a row, given what rounded projections move."""
    products = (4 * math.sqrt(u.width) * u.products + u.operand_bound) * c.products
    stored = u.logits * c.logit_max + 4 * u.single * c.logit_range
    return products + stored + u.projected * projected + 4 * u.projection * c.key_terms


def reweighted(eta: Tensor) -> Tensor:
    """Most that weights with logits wrong by ``eta`` move an output, per unit of ``C``."""
    eta = eta.clamp(max=LARGEST_LOGIT_ERROR)
    return torch.minimum(torch.expm1(2 * eta) / 2, 2 * torch.expm1(eta))


def hard_envelope(c: Companions, u: Roundoffs) -> Tensor:
    """G4, ``[n, h, Dv]``: no honest kernel has an element beyond it."""
    eta = reweighted(logit_error(c, u, c.projected_products))[..., None]
    # a running sum that rounds to nearest loses no more than all that it is given
    sums = (4 * c.visible.sqrt() * u.pv_acc).clamp(max=1.0)[..., None]
    weights = u.p / (1 - u.p) * c.spread if u.from_p else u.p * c.magnitude
    return (
        u.out * c.out.abs()
        + weights
        + (u.ex2 + u.inputs + 2 * normaliser(c, u)) * c.magnitude
        + u.projected * c.stored_magnitude
        + (sums + u.split) * c.sum_magnitude
        + (eta + merge_error(c, u)[..., None]) * c.spread
        + 4 * u.projection * c.value_terms
        + _underflow(c, u)
        + u.subnormal
    )


def lost_weight(c: Companions, u: Roundoffs) -> Tensor:
    """Most by which a normalised weight is off that its format cannot hold, ``[n, h]``."""
    total = torch.ones_like(c.total) if u.divided else c.total
    # a denominator that sums rounded weights has lost them, too, but never the largest
    total = total - u.underflow * c.visible if u.from_p else total
    return u.underflow / total.clamp(min=1.0)


def _underflow(c: Companions, u: Roundoffs) -> Tensor:
    """What such weights are worth together, ``[n, h, Dv]``."""
    reach = c.value_max[..., None] + (c.out.abs() if u.from_p else 0.0)
    return (lost_weight(c, u) * c.visible)[..., None] * reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances:
    """G5, each ``[n, h, Dv]``, by where the directions come from in which errors point.

    Attributes:
        element: Independent per element.
        latent: Of outputs in the latent space.
        weight: Of rounded weights.
        key: Of rounded keys and logits.
        query: Of rounded queries.
        row: Of one error that moves the whole row.
    """

    element: Tensor
    latent: Tensor
    weight: Tensor
    key: Tensor
    query: Tensor
    row: Tensor

    @classmethod
    def of(cls, c: Companions, u: Roundoffs) -> "Variances":
        """A rounding error is uniform: its variance is a third of its bound squared."""
        stored = u.projected**2 * c.value_power + u.split**2 * split_power(c, u) + u.pv_acc**2 * c.sum_power
        element = u.out**2 * c.out.square() + u.inputs**2 * c.power + u.projection**2 * c.value_terms_power
        rounded, lost = (c.weight_spread, c.visible_spread) if u.from_p else (c.power, c.visible_power)
        weight = u.p**2 * rounded + lost_weight(c, u)[..., None].square() * lost + u.ex2**2 * c.power
        key = u.projected**2 * c.key_spread + u.logits**2 * c.logit_spread + u.projection**2 * c.key_terms_spread
        key = key + u.operand**2 * c.operand_spread
        sums = u.products**2 * c.fp32_spread + merge_error(c, u)[..., None].square() * split_spread(c, u)
        return cls(
            element=(element if u.absorbed else element + stored) / 3,
            latent=(stored if u.absorbed else torch.zeros_like(stored)) / 3,
            weight=weight / 3,
            key=key / 3 + sums,
            query=u.operand**2 * c.query_spread / 3,
            row=(2 * normaliser(c, u) * c.out).square() / 3 + u.cut**2 * c.cut_spread,
        )

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.element, self.latent, self.weight, self.key, self.query, self.row

    @property
    def total(self) -> Tensor:
        """``[n, h]``, over the row."""
        return torch.stack([part.sum(-1) for part in self.parts]).sum(0).clamp(min=1e-300)

    def freedom(self, c: Companions, u: Roundoffs) -> Tensor:
        """Degrees of freedom of the row's squared error, ``[n, h]``; parts combine as if they had one direction."""
        # each element errs by its own size: one large element among small ones is one degree of freedom
        elements = self.element.sum(-1).square() / self.element.square().sum(-1).clamp(min=1e-300)
        weights = torch.minimum(c.weight_dof, c.spread_dof) if u.from_p else c.weight_dof
        dofs = (elements.clamp(min=1.0), c.value_dof, weights, c.key_dof, c.query_dof, torch.ones_like(c.lse))
        total = self.total
        spreads = [part.sum(-1) / total / dof.sqrt() for part, dof in zip(self.parts, dofs, strict=True)]
        return 1 / torch.stack(spreads).sum(0).square()


def chi_limit(freedom: Tensor) -> Tensor:
    """Upper quantile of the root mean square of ``freedom`` normal errors, after Wilson and Hilferty."""
    spread = 2 / 9 / freedom
    return (1 - spread + RMS_TAIL * spread.sqrt()).pow(1.5)


def lse_limit(c: Companions, u: Roundoffs) -> Tensor:
    """Limit on the log-sum-exp, ``[n, h]``: the hard bound, or what is measured of honest kernels if smaller."""
    rounded = ((u.p + lost_weight(c, u) * c.visible).clamp(max=0.5) if u.from_p else torch.zeros_like(c.lse)).neg()
    hard = logit_error(c, u, c.lse_projected) - torch.log1p(rounded)
    alike = u.projected / math.sqrt(3) * c.lse_key + u.logits * c.logit_max + u.products * c.lse_fp32
    alike = LSE_SIGMAS * (alike + 4 * u.projection * c.key_terms) + u.operand_bound * c.products - torch.log1p(rounded)
    each = u.projected**2 * c.lse_key_power + u.logits**2 * c.lse_logits_power + u.operand**2 * c.lse_operand_power
    weights = u.p**2 / c.n_eff + lost_weight(c, u).square() * c.visible if u.from_p else 0.0
    each = (each + weights) / 3 + u.products**2 * c.lse_fp32_power + (u.projection * c.key_terms).square()
    # stored logits that lie closer together than the numbers of their format are all rounded to one of these
    spacing = 2 * u.logits * c.logit_max
    together = spacing / 2 * (spacing / c.logit_range.clamp(min=1e-300)).clamp(max=1.0)
    each = LSE_INDEPENDENT_SIGMAS * each.sqrt() + u.cut * c.lse_cut + together
    stored = 2 * u.lse * split_count(c, u).sqrt() * finite_lse(c) + 4 * c.visible.sqrt() * u.single + u.ex2
    return torch.minimum(hard, torch.minimum(alike, each)) + stored


def max_logits_limit(c: Companions, u: Roundoffs) -> Tensor:
    """Limit on the highest logit, ``[n, h]``: a maximum errs no more than the worst of what it is over."""
    products = (4 * math.sqrt(u.width) * u.products + u.operand_bound) * c.products + u.projected * c.lse_projected
    # scaled, to base 2 and back; then stored
    height = torch.where(c.visible > 0, c.max_logits.abs(), 0.0)
    return products + u.logits * c.logit_max + (4 * u.single + 2 * u.lse) * height + SUBNORMAL["fp32"]
