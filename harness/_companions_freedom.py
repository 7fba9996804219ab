"""Degrees of freedom of a squared error: how many independent directions its covariance has."""

import torch
from torch import Tensor

# keys up to which all pairs are summed, and random directions beyond
PAIRED_KEYS = 1024
PROBES = 32


class Directions:
    """The values of one head, seen as directions in which errors point.

    The square of an error with covariance ``M = sum_j w_j (v_j - c)(v_j - c)^T`` is spread like a chi-square of
    ``tr(M)^2 / tr(M^2)`` degrees of freedom. Over few keys the trace of the square is summed pair by pair; over many it
    is estimated from random probes, and from one step of the power method where one direction rules.
    """

    def __init__(self, v: Tensor) -> None:
        """Take ``v``, ``[S, Dv]``; what all rows share is worked out once."""
        self._v, self._paired = v, len(v) <= PAIRED_KEYS
        if self._paired:
            self._products = v @ v.T
            self._squares = self._products.square()
        else:
            generator = torch.Generator().manual_seed(v.shape[-1])
            self._probes = torch.randn(PROBES, v.shape[-1], generator=generator, dtype=v.dtype).to(v.device)
            self._along = self._probes @ v.T

    def freedom(self, weights: Tensor, center: Tensor) -> Tensor:
        """Of each row, ``[n]``, at least 1.

        Args:
            weights: ``[n, S]``, not negative.
            center: ``[n, Dv]``.
        """
        total, v = weights.sum(-1), self._v
        trace = weights @ v.square().sum(-1) - 2 * (center * (weights @ v)).sum(-1) + center.square().sum(-1) * total
        square = self._square_by_pairs(weights, center) if self._paired else self._square_by_probes(weights, center)
        return freedom_of(trace, square)

    def _square_by_pairs(self, weights: Tensor, center: Tensor) -> Tensor:
        """``sum_jk w_j w_k ((v_j - c) . (v_k - c))^2``, expanded so that the inner products are shared by all rows."""
        along, norm, total = center @ self._v.T, center.square().sum(-1), weights.sum(-1)
        first, second = (weights * along).sum(-1), (weights * along.square()).sum(-1)
        shifts = 2 * total * second + 2 * first.square() - 4 * norm * total * first + (norm * total).square()
        crossed = ((weights * along) @ self._products * weights).sum(-1)
        plain = (weights @ self._products * weights).sum(-1)
        return (weights @ self._squares * weights).sum(-1) + shifts - 4 * crossed + 2 * norm * plain

    def _square_by_probes(self, weights: Tensor, center: Tensor) -> Tensor:
        """``E |M g|^2`` over normal ``g``, or ``|M d|^2`` of the strongest direction if that is larger."""
        v = self._v

        def apply(along: Tensor) -> Tensor:
            # M g for one vector g per row: along is (v_j - c) . g, [n, S]
            weighted = weights * along
            return weighted @ v - center * weighted.sum(-1, keepdim=True)

        images = [
            apply(along[None] - (center @ probe)[:, None])
            for along, probe in zip(self._along, self._probes, strict=True)
        ]
        norms = [image.square().sum(-1) for image in images]
        direction = images[0] / norms[0].sqrt().clamp(min=1e-300)[:, None]
        strongest = apply(direction @ v.T - (direction * center).sum(-1, keepdim=True)).square().sum(-1)
        return torch.maximum(torch.stack(norms).mean(0), strongest)


def freedom_of(trace: Tensor, square: Tensor) -> Tensor:
    """``tr(M)^2 / tr(M^2)``, at least 1."""
    return (trace.square() / square.clamp(min=1e-300)).clamp(min=1.0)


def freedom_of_factors(factors: Tensor) -> Tensor:
    """The same of ``M = F^T F``, ``[n]``, for ``F`` of ``[n, sources, Dv]``: errors from a few common sources."""
    few = factors.shape[1] <= factors.shape[2]
    gram = factors @ factors.mT if few else factors.mT @ factors
    return freedom_of(factors.square().sum((1, 2)), gram.square().sum((1, 2)))
