"""Faults of ``token_scores`` between products and scores: scales, denominators, reductions, precision. And variants."""

import math
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION_OF_DTYPE, Contract
from ..plugin import kernel
from ..record import Verdict
from . import planted, variant
from ._chunked import expand
from ._windows import NEVER, Window, logits, probability, products, token_scores_twin, weights

OP = "token_scores"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="mean and maximum exchanged")
def maximum_over_queries(**arguments: Any) -> Tensor:
    """Probabilities: the maximum over queries as well."""
    return token_scores_twin(arguments, probability=lambda p, e, w: weights(p, e, w).amax((0, 1)))


@planted(OP, NUMERIC, source="mean and maximum exchanged")
def mean_over_heads(**arguments: Any) -> Tensor:
    """Probabilities: the mean over heads as well."""
    return token_scores_twin(arguments, probability=lambda p, e, w: weights(p, e, w).mean((0, 1)))


@planted(OP, NUMERIC, source="maximum before mean")
def heads_reduced_first(**arguments: Any) -> Tensor:
    """Probabilities: the maximum over heads of each query, then the mean."""
    return token_scores_twin(arguments, probability=lambda p, e, w: weights(p, e, w).amax(1).mean(0))


@planted(OP, NUMERIC, NONFINITE, source="mean and maximum exchanged")
def mean_of_logits(**arguments: Any) -> Tensor:
    """Logits: the mean over queries that may look, then the maximum."""

    def mean(found: Tensor, inside: Tensor) -> Tensor:
        count = inside.sum(0)
        total = found.masked_fill(~inside[:, None], 0.0).sum(0) / count.clamp(min=1)
        return total.amax(0).masked_fill(count == 0, NEVER)

    return token_scores_twin(arguments, logits=mean)


@planted(OP, NUMERIC, rows=("FC-145",))
def first_head_alone(**arguments: Any) -> Tensor:
    """The first head is taken for all."""
    return token_scores_twin(
        arguments,
        logits=lambda found, inside: logits(found[:, :1], inside),
        probability=lambda found, inside, window: probability(found[:, :1], inside, window),
    )


@planted(OP, NUMERIC, source="per-head write instead of a reduction")
def last_head_wins(**arguments: Any) -> Tensor:
    """Every head writes its own scores, so the last stays."""
    return token_scores_twin(
        arguments,
        logits=lambda found, inside: logits(found[:, -1:], inside),
        probability=lambda found, inside, window: probability(found[:, -1:], inside, window),
    )


@planted(OP, NUMERIC, source="denominator over all tokens instead of the candidates")
def full_denominator(**arguments: Any) -> Tensor:
    """Probabilities are over every token up to the query, whatever the candidates are."""

    def over_all(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        tokens = torch.arange(found.shape[2], device=found.device)
        causal = tokens <= window.positions[:, None]
        return weights(found, causal, window).masked_fill(~inside[:, None], 0.0).mean(0).amax(0)

    return token_scores_twin(arguments, probability=over_all)


@planted(OP, NUMERIC, source="count of valid rows only")
def mean_of_queries_that_look(**arguments: Any) -> Tensor:
    """The mean counts, token by token, only the queries that may look at it."""

    def counted(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        return (weights(found, inside, window).sum(0) / inside.sum(0).clamp(min=1)).amax(0)

    return token_scores_twin(arguments, probability=counted)


@planted(OP, NUMERIC, rows=("FC-157",))
def softmax_per_chunk(**arguments: Any) -> Tensor:
    """Probabilities are normalised within each chunk of 16 tokens."""

    def by_chunk(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        parts = zip(found.split(16, dim=2), inside.split(16, dim=1), strict=True)
        return torch.cat([weights(part, own, window).mean(0) for part, own in parts], dim=-1).amax(0)

    return token_scores_twin(arguments, probability=by_chunk)


@planted(OP, NUMERIC, rows=("FC-155",))
def softmax_over_queries(**arguments: Any) -> Tensor:
    """Probabilities are normalised over the observed queries."""

    def across(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        z = (window.softmax_scale * found).masked_fill(~inside[:, None], NEVER)
        return torch.softmax(z, dim=0).nan_to_num(0.0).mean(0).amax(0)

    return token_scores_twin(arguments, probability=across)


@planted(OP, NUMERIC, rows=("FC-156",))
def softmax_over_heads(**arguments: Any) -> Tensor:
    """Probabilities are normalised over the heads."""

    def across(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        z = (window.softmax_scale * found).masked_fill(~inside[:, None], NEVER)
        return torch.softmax(z, dim=1).nan_to_num(0.0).mean(0).amax(0)

    return token_scores_twin(arguments, probability=across)


@planted(OP, NUMERIC, rows=("FC-142",))
def probability_of_raw_logits(**arguments: Any) -> Tensor:
    """The scale is left out of the softmax."""
    return token_scores_twin({**arguments, "softmax_scale": 1.0})


@planted(OP, NUMERIC, source="scaled instead of raw logits")
def logits_scaled(**arguments: Any) -> Tensor:
    """Logits are those of the softmax, scale included."""
    scale = arguments["softmax_scale"]
    return token_scores_twin(arguments, logits=lambda found, inside: logits(scale * found, inside))


@planted(OP, NUMERIC, source="logits in base 2 without the change of base")
def softmax_in_base_2(**arguments: Any) -> Tensor:
    """Weights are powers of 2 instead of e."""
    return token_scores_twin({**arguments, "softmax_scale": arguments["softmax_scale"] * math.log(2.0)})


@planted(OP, NONFINITE, source="identity of the other mode")
def identity_of_the_other_mode(**arguments: Any) -> Tensor:
    """A token that nothing looks at scores 0 for logits."""
    scores = token_scores_twin(arguments)
    return scores.masked_fill(scores == NEVER, 0.0)


@planted(OP, NUMERIC, source="absolute logits")
def magnitude_of_logits(**arguments: Any) -> Tensor:
    """The magnitude of a logit counts."""
    return token_scores_twin(arguments, products=lambda q, k: products(q, k).abs())


@planted(OP, NUMERIC, source="rope width 0 assumed")
def rope_left_out(**arguments: Any) -> Tensor:
    """The rotated part takes no part."""
    d_rope = arguments["k_pe"].shape[1]
    cut = arguments["q"].shape[2] - d_rope
    return token_scores_twin(arguments, products=lambda q, k: products(q[..., :cut], k[..., :cut]))


@planted(OP, NUMERIC, source="scores kept in half precision")
def logits_in_bfloat16(**arguments: Any) -> Tensor:
    """Products are rounded to bfloat16 before anything else."""
    return token_scores_twin(arguments, products=lambda q, k: products(q, k).bfloat16().float())


@planted(OP, NUMERIC, rows=("FC-144",))
def heads_of_the_projection_reversed(**arguments: Any) -> Tensor:
    """Head ``h`` meets the keys of head ``H - 1 - h``."""
    return token_scores_twin({**arguments, "kv_b_proj": arguments["kv_b_proj"].flip(0)})


@variant(OP)
@kernel(contract=lambda case: _contract(case.dtype))
def keys_at_once(**arguments: Any) -> Tensor:
    """The clean twin: keys of all tokens, whatever the mode."""
    return token_scores_twin(arguments)


@variant(OP)
@kernel(contract=lambda case: _contract(case.dtype))
def heads_one_by_one(**arguments: Any) -> Tensor:
    """Heads one after the other, each raising what the others left."""

    def raised(found: Tensor, inside: Tensor) -> Tensor:
        best = torch.full_like(found[0, 0], NEVER)
        for head in range(found.shape[1]):
            best = torch.maximum(best, logits(found[:, head : head + 1], inside))
        return best

    return token_scores_twin(arguments, logits=raised)


@variant(OP)
@kernel(contract=lambda case: _contract(case.dtype))
def denominator_in_chunks(**arguments: Any) -> Tensor:
    """One scan in chunks of 13 for the denominators, another for the probabilities."""

    def twice(found: Tensor, inside: Tensor, window: Window) -> Tensor:
        z = (window.softmax_scale * found).masked_fill(~inside[:, None], NEVER)
        lse = torch.stack([torch.logsumexp(part, -1) for part in z.split(13, dim=2)], dim=-1).logsumexp(-1)
        shares = torch.exp(z - lse[..., None]).masked_fill(lse[..., None] == NEVER, 0.0)
        return (shares.sum(0) / len(z)).amax(0)

    return token_scores_twin(arguments, probability=twice)


@variant(OP)
@kernel(contract=lambda case: _contract(case.dtype, projected="fp32"))
def keys_unrounded(**arguments: Any) -> Tensor:
    """Keys stay in float32."""

    def wide(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        return expand(latent.float(), rope.float(), kv_b_proj.float(), d_nope)

    return token_scores_twin(arguments, expand=wide)


def _contract(dtype: str, projected: Any = None) -> Contract:
    return Contract(p="fp32", out="fp32", projected=projected or PRECISION_OF_DTYPE[dtype])
