"""Faults of ``mla_prefill`` in the softmax of a pass: scales, maxima, denominators, precision."""

from typing import Any

import torch

from ..record import Verdict
from . import _scores, _softmax, planted
from ._chunked import State, mla_prefill_twin
from ._softmax import Online, even_tiles, overlapping, without_last_tile

OP = "mla_prefill"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
# one field of the contract a step lower explains all that it does
DOWNGRADE = Verdict.PRECISION_DOWNGRADE
# it is rounded too often, or to too little, for that to be sure
LESS_PRECISE = (NUMERIC, DOWNGRADE)


def _scaled(arguments: dict[str, Any], scale: float) -> State:
    return mla_prefill_twin({**arguments, "softmax_scale": scale})


@planted(OP, NUMERIC, source="default used although a scale was given")
def softmax_scale_ignored(**arguments: Any) -> State:
    """``(Dn + Dr) ** -0.5``, whatever was asked for."""
    return _scaled(arguments, arguments["q"].shape[2] ** -0.5)


@planted(OP, NUMERIC, rows=("F24",))
def scale_of_absorbed_width(**arguments: Any) -> State:
    """``(R + Dr) ** -0.5``: the width of the absorbed keys."""
    return _scaled(arguments, (arguments["kv_c"].shape[1] + arguments["k_pe"].shape[1]) ** -0.5)


@planted(OP, NUMERIC, source="rope part left out of the width")
def scale_of_nope_width(**arguments: Any) -> State:
    """The scale that would fit without the rope part."""
    width, d_rope = arguments["q"].shape[2], arguments["k_pe"].shape[1]
    return _scaled(arguments, arguments["softmax_scale"] * (width / (width - d_rope)) ** 0.5)


@planted(OP, NUMERIC, source="folded into the queries and applied again")
def scale_applied_twice(**arguments: Any) -> State:
    """The scale squared."""
    return _scaled(arguments, arguments["softmax_scale"] ** 2)


@planted(OP, NUMERIC, source="scales above 1 taken for a mistake")
def scale_at_most_1(**arguments: Any) -> State:
    """A larger scale is cut to 1."""
    return _scaled(arguments, min(arguments["softmax_scale"], 1.0))


@planted(OP, NUMERIC, source="keys // tile instead of the ceiling")
def tail_tile_dropped(**arguments: Any) -> State:
    """A last tile of a pass that is not full is never visited."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=without_last_tile))


@planted(OP, NUMERIC, source="inclusive tile bounds")
def tiles_overlap_by_one(**arguments: Any) -> State:
    """The first key of each later tile is counted twice."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=overlapping))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-015",))
def running_max_starts_at_minus_5e4(**arguments: Any) -> State:
    """A row of lower logits counts as empty."""
    return mla_prefill_twin(arguments, softmax=_softmax.max_from_5e4)


@planted(OP, NUMERIC, NONFINITE, source="exponentials of raw logits")
def no_running_max(**arguments: Any) -> State:
    """The exponentials overflow or vanish."""
    return mla_prefill_twin(arguments, softmax=_softmax.no_maximum)


@planted(OP, NUMERIC, NONFINITE, source="maximum not updated in the loop")
def max_of_first_tile(**arguments: Any) -> State:
    """The maximum of the first 16 keys of a pass is taken for that of all."""
    return mla_prefill_twin(arguments, softmax=_softmax.maximum_of_first_tile)


@planted(OP, NUMERIC, source="online softmax without its correction")
def sums_not_rescaled(**arguments: Any) -> State:
    """Sums keep the unit of the old maximum when a new one is found."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.not_rescaled))


@planted(OP, NUMERIC, source="exp2 with a natural argument")
def sums_rescaled_in_base_2(**arguments: Any) -> State:
    """The correction uses the wrong exponential."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.rescaled_in_base_2))


@planted(OP, NUMERIC, NONFINITE, source="row sum taken before the mask")
def denominator_before_mask(**arguments: Any) -> State:
    """Hidden keys count in the denominator."""
    wrong = _softmax.UnmaskedTotal()
    return mla_prefill_twin(arguments, mask=wrong.mask, softmax=wrong.softmax)


@planted(OP, NUMERIC, source="the shift not added back")
def lse_without_maximum(**arguments: Any) -> State:
    """Partial results carry the log of the shifted sum, and are merged by it."""
    return mla_prefill_twin(arguments, softmax=_softmax.lse_without_maximum)


@planted(OP, NUMERIC, source="wrong register stored")
def largest_logit_as_lse(**arguments: Any) -> State:
    """Partial results carry their maximum, and are merged by it."""
    return mla_prefill_twin(arguments, softmax=_softmax.largest_logit_as_lse)


@planted(OP, NUMERIC, source="null kernel")
def all_zeros(**arguments: Any) -> State:
    """No output; the log-sum-exp is right."""
    out, lse = mla_prefill_twin(arguments)
    return out.zero_(), lse


@planted(OP, NUMERIC, source="null kernel")
def mean_of_values(**arguments: Any) -> State:
    """Within a pass every visible key weighs the same; the log-sum-exp is right."""
    return mla_prefill_twin(arguments, softmax=_softmax.uniform_weights)


@planted(OP, NUMERIC, source="null kernel")
def value_of_nearest_key(**arguments: Any) -> State:
    """Within a pass the key of the largest logit takes all; the log-sum-exp is right."""
    return mla_prefill_twin(arguments, softmax=_softmax.largest_only)


@planted(OP, NUMERIC, source="block-sparse shortcut with too bold a threshold")
def light_tiles_skipped(**arguments: Any) -> State:
    """Tiles of a pass whose weights are all below 1e-3 of the largest are left out."""
    return mla_prefill_twin(arguments, softmax=_softmax.light_tiles_skipped)


@planted(OP, NUMERIC, NONFINITE, source="clipping against overflow")
def logits_clipped(**arguments: Any) -> State:
    """Logits are held within +-50."""
    return mla_prefill_twin(arguments, logits=_scores.clipped)


@planted(OP, NUMERIC, NONFINITE, source="finite stand-in for infinity used as a bound")
def large_logits_clamped(**arguments: Any) -> State:
    """Logits above 5e4 are all the same."""
    return mla_prefill_twin(arguments, logits=_scores.clamped_at_5e4)


@planted(OP, NUMERIC, source="attribute of another model left on")
def soft_cap_left_on(**arguments: Any) -> State:
    """Logits go through a soft cap at 50."""
    return mla_prefill_twin(arguments, logits=_scores.soft_capped)


@planted(OP, NUMERIC, source="log1p of the sum beside the largest logit")
def equal_maxima_counted_once(**arguments: Any) -> State:
    """Of several equal largest logits of a pass one counts in the denominator."""
    return mla_prefill_twin(arguments, softmax=_softmax.equal_maxima_counted_once)


@planted(OP, NUMERIC, source="scores kept in a buffer of fixed length")
def keys_past_1024_dropped(**arguments: Any) -> State:
    """Only 1024 keys of a pass take part."""
    return mla_prefill_twin(arguments, softmax=_softmax.first_1024_keys)


@planted(OP, NUMERIC, NONFINITE, source="sum taken one lane short")
def last_key_not_in_denominator(**arguments: Any) -> State:
    """The last key counts in the output, not in the denominator."""
    return mla_prefill_twin(arguments, softmax=_softmax.last_key_not_in_total)


@planted(OP, NUMERIC, NONFINITE, source="loop begun at 1")
def first_key_lost(**arguments: Any) -> State:
    """The first of several keys, often a sink, takes no part."""
    return mla_prefill_twin(arguments, softmax=_softmax.first_key_lost)


@planted(OP, NUMERIC, source="scale handed over as a half-precision tensor")
def softmax_scale_in_input_dtype(**arguments: Any) -> State:
    """The scale is rounded."""
    scale = torch.tensor(arguments["softmax_scale"]).to(arguments["q"].dtype)
    return _scaled(arguments, float(scale))


@planted(OP, DOWNGRADE, source="first product stored in half precision")
def logits_rounded_to_input_dtype(**arguments: Any) -> State:
    """The logits are rounded."""
    return mla_prefill_twin(arguments, logits=_scores.rounded)


@planted(OP, *LESS_PRECISE, NONFINITE, source="first product stored in half precision before the scale")
def products_rounded_to_input_dtype(**arguments: Any) -> State:
    """The products are rounded, then scaled."""
    return mla_prefill_twin(arguments, logits=_scores.rounded_unscaled)


@planted(OP, DOWNGRADE, source="tf32 left on")
def products_in_tf32(**arguments: Any) -> State:
    """Operands of the first product lose 13 bits; only float32 inputs notice."""
    return mla_prefill_twin(arguments, logits=_scores.cut_to_tf32)


@planted(OP, DOWNGRADE, rows=("FC-007",))
def weights_in_e4m3(**arguments: Any) -> State:
    """Weights are stored in e4m3, where small ones vanish."""
    return mla_prefill_twin(arguments, softmax=_softmax.e4m3_weights)


@planted(OP, DOWNGRADE, source="one code path for all half-precision inputs")
def weights_in_bfloat16(**arguments: Any) -> State:
    """Weights are stored in bfloat16 for float16 and float32 inputs as well."""
    return mla_prefill_twin(arguments, softmax=_softmax.bfloat16_weights)


@planted(OP, NUMERIC, source="row sum stored in half precision")
def denominator_in_input_dtype(**arguments: Any) -> State:
    """The denominator is rounded."""
    return mla_prefill_twin(arguments, softmax=_softmax.rounded_total)


@planted(OP, *LESS_PRECISE, source="accumulator kept in half precision between tiles")
def output_accumulated_in_input_dtype(**arguments: Any) -> State:
    """The accumulated output of a pass is rounded after every 16 keys."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=even_tiles(16), keep=_softmax.to_dtype_of_values))


@planted(OP, NUMERIC, source="fast exponential")
def coarse_exponential(**arguments: Any) -> State:
    """The exponential is good to 2^-11."""
    return mla_prefill_twin(arguments, softmax=_softmax.coarse_exponential)
