"""Faults of ``sparse_mla`` in its sinks, in the highest logit, and in queries without an entry."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import NEVER, State, normalised, softmax, weighted
from ._sparse import Three, share, sink, sparse_twin

OP = "sparse_mla"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
LOG2_E = math.log2(math.e)


def _with_sink(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Three:
    """The twin with other sinks."""
    own = arguments["attn_sink"]
    return sparse_twin({**arguments, "attn_sink": None if own is None else change(own)})


@planted(OP, NUMERIC, rows=("FC-078",))
def sink_ignored(**arguments: Any) -> Three:
    """The keys have all the weight."""
    return _with_sink(arguments, lambda own: torch.full_like(own, NEVER))


@planted(OP, NUMERIC, source="sinks indexed by the head within a tile, one off")
def sink_of_the_next_head(**arguments: Any) -> Three:
    """Each head has the sink of another."""
    return _with_sink(arguments, lambda own: own.roll(-1))


@planted(OP, NUMERIC, source="one sink loaded for a tile of heads")
def sink_of_the_first_head(**arguments: Any) -> Three:
    """All heads have the first one's sink."""
    return _with_sink(arguments, lambda own: own[:1].expand_as(own))


@planted(OP, NUMERIC, source="sink taken for an unscaled product")
def sink_scaled(**arguments: Any) -> Three:
    """The sink is multiplied by the scale of the logits."""
    return _with_sink(arguments, lambda own: own * arguments["softmax_scale"])


@planted(OP, NUMERIC, source="natural sink beside logits in base 2")
def sink_in_base_2(**arguments: Any) -> Three:
    """The sink is not brought to the base of the logits."""
    return _with_sink(arguments, lambda own: own / LOG2_E)


@planted(OP, NUMERIC, source="sinks kept with the weights of the model, in half precision")
def sink_in_input_dtype(**arguments: Any) -> Three:
    """The sink is rounded."""
    return _with_sink(arguments, lambda own: own.to(arguments["q"].dtype).float())


@planted(OP, NUMERIC, source="no sink means a sink of minus infinity, and that a padding of 0")
def sink_of_minus_infinity_is_0(**arguments: Any) -> Three:
    """A sink that must not count weighs as much as a logit of 0."""
    return _with_sink(arguments, lambda own: own.masked_fill(own == NEVER, 0.0))


@planted(OP, NONFINITE, rows=("F20",), source="exponentials of sums, as formulas are written")
def infinite_sink_gives_nan(**arguments: Any) -> Three:
    """``e^lse / (e^lse + e^sink)`` as it stands."""

    def naive(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
        # the larger of both is taken out, which is infinite where the sink is
        shift = torch.maximum(lse, attn_sink[:, None])
        part, rest = torch.exp(lse - shift), torch.exp(attn_sink[:, None] - shift)
        return out * torch.where(lse == NEVER, 0.0, part / (part + rest))[..., None]

    return sparse_twin(arguments, sink=naive)


@planted(OP, NUMERIC, NONFINITE, rows=("F19",))
def sink_in_the_lse(**arguments: Any) -> Three:
    """The log-sum-exp counts the sink, as FlashAttention's does."""
    out, lse, top = sparse_twin(arguments)
    own = arguments["attn_sink"]
    return out, lse if own is None else torch.logaddexp(lse, own), top


@planted(OP, NONFINITE, source="a learnable sink where no key is")
def sink_is_the_lse_of_no_entry(**arguments: Any) -> Three:
    """A query without an entry has the sink for its log-sum-exp, which a merge takes for weight."""
    out, lse, top = sparse_twin(arguments)
    own = arguments["attn_sink"]
    return out, lse if own is None else torch.where(lse == NEVER, own, lse), top


@planted(OP, NUMERIC, NONFINITE, source="running maximum begun at the sink")
def sink_in_max_logits(**arguments: Any) -> Three:
    """The highest logit may be the sink."""
    out, lse, top = sparse_twin(arguments)
    own = arguments["attn_sink"]
    return out, lse, top if own is None else torch.maximum(top, own)


@planted(OP, NUMERIC, rows=("FC-076",))
def sink_counted_in_each_half(**arguments: Any) -> Three:
    """Both splits of a list add the sink to their denominators."""
    return _with_sink(arguments, lambda own: own + math.log(2.0))


@planted(OP, NUMERIC, NONFINITE, source="windowed models, whose sink is a first key")
def sink_added_to_the_first_logit(**arguments: Any) -> Three:
    """The first entry is heavier, and nothing takes weight aside."""
    own = arguments["attn_sink"]

    def heavier(q: Tensor, rows: Tensor, softmax_scale: float) -> Tensor:
        z = softmax_scale * torch.einsum("nhd,mhd->nhm", q.float(), rows.float())
        if own is not None:
            z[..., 0] += own.nan_to_num(posinf=0.0, neginf=0.0)[:, None]
        return z

    return sparse_twin({**arguments, "attn_sink": None}, logits=heavier)


@planted(OP, NUMERIC, NONFINITE, source="sink folded into the denominator in units of no maximum")
def sink_not_shifted(**arguments: Any) -> Three:
    """The denominator is relative to the highest logit, the sink is not."""

    def unshifted(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
        # the sum in units of the highest logit is at least 1; taken for its logarithm 0
        return out * share(torch.where(lse == NEVER, lse, 0.0), attn_sink)[..., None]

    return sparse_twin(arguments, sink=unshifted)


@planted(OP, NUMERIC, source="sink applied in the loop over tiles")
def sink_applied_twice(**arguments: Any) -> Three:
    """The output is scaled once more."""
    return sparse_twin(arguments, sink=lambda out, lse, own: sink(sink(out, lse, own), lse, own))


def _with_top(arguments: dict[str, Any], change: Callable[[Tensor, Tensor], Tensor]) -> Three:
    """The twin with another highest logit, by ``(logits, lse)``."""
    return sparse_twin(arguments, highest=change)


@planted(OP, NUMERIC, source="the running maximum as exp2 wants it")
def max_logits_in_base_2(**arguments: Any) -> Three:
    """The highest logit is in base 2."""
    return _with_top(arguments, lambda z, lse: z.amax(-1) * LOG2_E)


@planted(OP, NUMERIC, source="scale folded into the exponential")
def max_logits_unscaled(**arguments: Any) -> Three:
    """The highest product."""
    return _with_top(arguments, lambda z, lse: z.amax(-1) / arguments["softmax_scale"])


@planted(OP, NUMERIC, NONFINITE, source="padding has a logit of 0 until it is masked")
def max_logits_of_padding(**arguments: Any) -> Three:
    """Rows of zeros count in the maximum."""
    return _with_top(arguments, lambda z, lse: z.masked_fill(z == NEVER, 0.0).amax(-1))


@planted(OP, NUMERIC, NONFINITE, source="maximum of a tile stored in the loop")
def max_logits_of_the_last_tile(**arguments: Any) -> Three:
    """Only the last 16 entries are looked at."""
    return _with_top(arguments, lambda z, lse: z[..., -16:].amax(-1))


@planted(OP, NUMERIC, source="registers of both results mixed up")
def lse_for_max_logits(**arguments: Any) -> Three:
    """The log-sum-exp is stored twice."""
    return _with_top(arguments, lambda z, lse: lse)


@planted(OP, NUMERIC, source="maximum reduced over the rows of a tile")
def max_logits_over_heads(**arguments: Any) -> Three:
    """All heads have the highest logit of any."""
    return _with_top(arguments, lambda z, lse: z.amax(-1).amax(0, keepdim=True).expand(len(z), -1))


@planted(OP, NUMERIC, source="stored through a half-precision buffer")
def max_logits_in_input_dtype(**arguments: Any) -> Three:
    """The highest logit is rounded."""
    return _with_top(arguments, lambda z, lse: z.amax(-1).to(arguments["q"].dtype).float())


@planted(OP, NUMERIC, source="absolute values, for a quantisation that never came")
def largest_magnitude_for_max_logits(**arguments: Any) -> Three:
    """The logit of the largest magnitude."""
    return _with_top(
        arguments, lambda z, lse: torch.where(lse == NEVER, lse, z.masked_fill(z == NEVER, 0.0).abs().amax(-1))
    )


@planted(OP, NUMERIC, source="FlashMLA, which returns the highest logit before the log-sum-exp")
def results_in_the_order_of_the_library(**arguments: Any) -> Three:
    """The second and the third result are exchanged."""
    out, lse, top = sparse_twin(arguments)
    return out, top, lse


@planted(OP, NONFINITE, rows=("FC-014",), source="running maximum begun at -1e30")
def sentinel_where_there_is_no_entry(**arguments: Any) -> Three:
    """A query without an entry has finite numbers for ``-inf``."""
    return sparse_twin(arguments, hide=lambda z, ok: z.masked_fill(~ok, -1e30))


@planted(OP, NONFINITE, source="FlashMLA's own convention, undeclared")
def lse_of_no_entry_is_plus_infinity(**arguments: Any) -> Three:
    """A merge takes it for all the weight there is."""
    out, lse, top = sparse_twin(arguments)
    return out, lse.masked_fill(lse == NEVER, math.inf), top


@planted(OP, NONFINITE, source="division by a sum of 0")
def nan_where_there_is_no_entry(**arguments: Any) -> Three:
    """``0 / 0``."""

    def unguarded(logits: Tensor, v: Tensor) -> State:
        out, lse = softmax(logits, v)
        return out.masked_fill(lse[..., None] == NEVER, math.nan), lse

    return sparse_twin(arguments, softmax=unguarded)


@planted(OP, Verdict.WRITE_SCOPE, NONFINITE, rows=("FC-088", "FC-101"))
def unwritten_where_there_is_no_entry(**arguments: Any) -> Three:
    """A query without an entry returns before the store."""
    results = sparse_twin(arguments)
    written = results[1] > NEVER
    lazy = tuple(torch.empty_like(result) for result in results)
    for mine, result in zip(lazy, results, strict=True):
        mine[written] = result[written]
    return lazy[0], lazy[1], lazy[2]


@planted(OP, NUMERIC, NONFINITE, rows=("FC-089",))
def maximum_over_the_tile_of_heads(**arguments: Any) -> Three:
    """One maximum for all heads: weights of a head of lower logits lose digits, or vanish."""

    def together(logits: Tensor, v: Tensor) -> State:
        shift = logits.amax((0, 2), keepdim=True)
        shift = shift.masked_fill(shift == NEVER, 0.0)
        weights = torch.exp(logits - shift)
        return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)

    return sparse_twin(arguments, softmax=together)
