"""What changes where queries are projected into the latent space and outputs out of it, ``Contract.absorbed``.

The logits are then ``<q W_uk, c_j> + <q_rope, k_rope>`` and the output is ``W_uv sum_j p_j c_j``, ``c`` being latent
rows. What is rounded after a projection is one query for all keys, and one output for all value dimensions, so errors
that the other form has key by key are here the same in all logits of a row, or in all elements of an output.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._companions_freedom import freedom_of, freedom_of_factors
from ._companions_sums import Block, largest, running_range, split_sums
from .operation import Latent, Rows


@dataclass(frozen=True, kw_only=True)
class Absorbed:
    """One head in the latent space.

    Attributes:
        block: Its softmax, the queries ``[n, R + Dr]`` absorbed and the keys latent.
        rows: ``[S, R]``.
        w_uv: ``[Dv, R]``.
        query: ``[n, R]``, absorbed queries without their rope part.
        query_terms: ``[n, R]``, what the float32 sums of that projection are accurate against.
        depth_ratio: Root of the length of those sums over that of the projection of keys.
    """

    block: Block
    rows: Tensor
    w_uv: Tensor
    query: Tensor
    query_terms: Tensor
    depth_ratio: float

    @classmethod
    def of(cls, rows: Rows, head: int, block: Block) -> "Absorbed":
        """The same head and queries as ``block``.

        Raises:
            ValueError: If the rows do not say what their keys are projected from.
        """
        latent: Latent | None = rows.latent
        if latent is None:
            raise ValueError("latent must be given for rows whose keys come out of a projection, got None")
        nope, w_uk = block.q[:, : rows.projected_dims], latent.w_uk[head]
        query, rank = nope @ w_uk, latent.rows.shape[1]
        wide = replace(
            block,
            q=torch.cat([query, block.q[:, rows.projected_dims :]], dim=1),
            k=torch.cat([latent.rows, block.k[:, rows.projected_dims :]], dim=1),
            projected=rank,
        )
        return cls(
            block=wide,
            rows=latent.rows,
            w_uv=latent.w_uv[head],
            query=query,
            query_terms=(nope.square() @ w_uk.square()).sqrt(),
            depth_ratio=(rows.projected_dims / rank) ** 0.5,
        )

    def sums(self, rows: Rows, key_dof: Tensor) -> dict[str, Tensor]:
        """The companions that differ; ``key_dof`` is that of errors key by key."""
        return self._logits(key_dof) | self._values(rows)

    def _logits(self, key_dof: Tensor) -> dict[str, Tensor]:
        block, c, scale = self.block, self.rows, self.block.scale
        query, query_terms = scale * self.query, scale * self.depth_ratio * self.query_terms
        moved, shifted, mean = block.covariance(c), block.covariance_scale(c), block.p @ c
        # a logit error that all keys share changes no weight: only what the latents differ by does
        differing = c - c.mean(0) if len(c) else c
        alike = (query * mean).square().sum(-1)
        return {
            "projected_products": largest(block.absolute(differing, self.query)),
            "lse_projected": largest(block.absolute(c, self.query)),
            "key_terms": self.depth_ratio * largest(block.absolute(c, self.query_terms)),
            "key_spread": (query[:, :, None] * moved).square().sum(1),
            "key_terms_spread": (query_terms[:, :, None] * moved).square().sum(1),
            "key_dof": torch.minimum(key_dof, freedom_of_factors(query[:, :, None] * moved)),
            "scale_key": (query * shifted).square().sum(-1),
            "scale_key_terms": (query_terms * shifted).square().sum(-1),
            "lse_key": alike.sqrt(),
            "lse_key_power": alike,
        }

    def _values(self, rows: Rows) -> dict[str, Tensor]:
        block, c, w2 = self.block, self.rows, self.w_uv.square().T
        mean, magnitude = block.p @ c, block.p @ c.abs()
        running = (block.p[:, :, None] * c[None]).cumsum(1)
        reach, sums = running_range(running), running.square().sum(1)
        parts = split_sums(block.p, c, rows.split_ends)[0].square().sum(1)
        # what an error of one latent dimension does to the scale of the row
        along = ((block.out @ self.w_uv) / block.norm).square()
        power = mean.square() @ w2
        return {
            "stored_magnitude": mean.abs() @ self.w_uv.abs().T,
            "sum_magnitude": magnitude @ self.w_uv.abs().T,
            "value_power": power,
            "value_terms": power.sqrt(),
            "value_terms_power": power,
            "value_dof": self._freedom(mean.square()),
            "sum_power": sums @ w2,
            "split_power": parts @ w2,
            "range_power": reach.square() @ w2,
            "range_magnitude": (reach * magnitude) @ w2,
            "scale_value": (mean.square() * along).sum(-1),
            "scale_value_terms": block.along_out(power),
            "scale_sum": (sums * along).sum(-1),
            "scale_split": (parts * along).sum(-1),
        }

    def _freedom(self, variances: Tensor) -> Tensor:
        """Of independent errors of the latent dimensions, ``[n, R]``, as the projection spreads them over elements."""
        products = (self.w_uv.T @ self.w_uv).square()
        return freedom_of(variances @ self.w_uv.square().sum(0), ((variances @ products) * variances).sum(-1))
