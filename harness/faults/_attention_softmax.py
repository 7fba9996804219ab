"""Faults of ``attention`` in the softmax itself: scales, maxima, denominators, precision."""

from typing import Any

import torch

from ..record import Verdict
from . import _scores, _softmax, planted
from ._chunked import State, attention_twin
from ._softmax import Online, even_tiles

OP = "attention"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
# one field of the contract a step lower explains all that it does
DOWNGRADE = Verdict.PRECISION_DOWNGRADE
# it is rounded too often, or to too little, for that to be sure
LESS_PRECISE = (NUMERIC, DOWNGRADE)


def _scaled(arguments: dict[str, Any], scale: float) -> State:
    return attention_twin({**arguments, "softmax_scale": scale})


@planted(OP, NUMERIC, source="default used although a scale was given")
def softmax_scale_ignored(**arguments: Any) -> State:
    """``Dq ** -0.5``, whatever was asked for."""
    return _scaled(arguments, arguments["q"].shape[2] ** -0.5)


@planted(OP, NUMERIC, source="scale derived from the padded head dimension")
def scale_of_padded_width(**arguments: Any) -> State:
    """The scale of the next multiple of 16 dimensions."""
    width = arguments["q"].shape[2]
    return _scaled(arguments, arguments["softmax_scale"] * (width / (-(-width // 16) * 16)) ** 0.5)


@planted(OP, NUMERIC, source="folded into the queries and applied again")
def scale_applied_twice(**arguments: Any) -> State:
    """The scale squared."""
    return _scaled(arguments, arguments["softmax_scale"] ** 2)


@planted(OP, NUMERIC, source="scales above 1 taken for a mistake")
def scale_at_most_1(**arguments: Any) -> State:
    """A larger scale is cut to 1."""
    return _scaled(arguments, min(arguments["softmax_scale"], 1.0))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-014",))
def sentinel_in_empty_rows(**arguments: Any) -> State:
    """Hidden logits are a large negative number: a row without keys averages all values, its lse is finite."""
    return attention_twin(arguments, softmax=_softmax.leaked_sentinel)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-015",))
def running_max_starts_at_minus_5e4(**arguments: Any) -> State:
    """A row of lower logits counts as empty."""
    return attention_twin(arguments, softmax=_softmax.max_from_5e4)


@planted(OP, NUMERIC, NONFINITE, source="exponentials of raw logits")
def no_running_max(**arguments: Any) -> State:
    """The exponentials overflow or vanish."""
    return attention_twin(arguments, softmax=_softmax.no_maximum)


@planted(OP, NUMERIC, NONFINITE, source="maximum not updated in the loop")
def max_of_first_tile(**arguments: Any) -> State:
    """The maximum of the first 16 keys is taken for that of all."""
    return attention_twin(arguments, softmax=_softmax.maximum_of_first_tile)


@planted(OP, NUMERIC, source="online softmax without its correction")
def sums_not_rescaled(**arguments: Any) -> State:
    """Sums keep the unit of the old maximum when a new one is found."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.not_rescaled))


@planted(OP, NUMERIC, source="exp2 with a natural argument")
def sums_rescaled_in_base_2(**arguments: Any) -> State:
    """The correction uses the wrong exponential."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.rescaled_in_base_2))


@planted(OP, NUMERIC, NONFINITE, source="row sum taken before the mask")
def denominator_before_mask(**arguments: Any) -> State:
    """Hidden keys count in the denominator."""
    wrong = _softmax.UnmaskedTotal()
    return attention_twin(arguments, mask=wrong.mask, softmax=wrong.softmax)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-033",))
def nan_swallowed(**arguments: Any) -> State:
    """Undefined logits become 0, so that a broken input looks like a result."""
    return attention_twin(arguments, softmax=_softmax.numbers_for_nan)


@planted(OP, NONFINITE, source="undefined values cleaned when they are loaded")
def nan_in_values_swallowed(**arguments: Any) -> State:
    """A value that is NaN counts as 0."""
    v = arguments["v"]
    return attention_twin({**arguments, "v": torch.where(v.isnan(), 0.0, v)})


@planted(OP, NONFINITE, source="operands split into a high and a low part")
def infinite_value_gives_nan(**arguments: Any) -> State:
    """Values meet the weights as two parts; of an infinite one the low part is undefined."""
    v = arguments["v"]
    high = v.bfloat16().to(v.dtype)
    return attention_twin({**arguments, "v": high + (v - high)})


@planted(OP, NUMERIC, rows=("F1",))
def base_2_lse_returned(**arguments: Any) -> State:
    """The log-sum-exp is in base 2."""
    return attention_twin(arguments, softmax=_softmax.base_2_lse)


@planted(OP, NUMERIC, source="the shift not added back")
def lse_without_maximum(**arguments: Any) -> State:
    """The log of the shifted sum."""
    return attention_twin(arguments, softmax=_softmax.lse_without_maximum)


@planted(OP, NUMERIC, source="wrong register stored")
def largest_logit_as_lse(**arguments: Any) -> State:
    """The maximum instead of the log-sum-exp."""
    return attention_twin(arguments, softmax=_softmax.largest_logit_as_lse)


@planted(OP, NUMERIC, source="log-sum-exp stored through a half-precision buffer")
def lse_rounded_to_input_dtype(**arguments: Any) -> State:
    """The log-sum-exp passes through the dtype of the queries."""
    out, lse = attention_twin(arguments)
    return out, lse.to(out.dtype).float()


@planted(OP, NUMERIC, source="null kernel")
def all_zeros(**arguments: Any) -> State:
    """No output; the log-sum-exp is right."""
    out, lse = attention_twin(arguments)
    return out.zero_(), lse


@planted(OP, NUMERIC, source="null kernel")
def mean_of_values(**arguments: Any) -> State:
    """Every visible key weighs the same; the log-sum-exp is right."""
    return attention_twin(arguments, softmax=_softmax.uniform_weights)


@planted(OP, NUMERIC, source="null kernel")
def value_of_nearest_key(**arguments: Any) -> State:
    """The key of the largest logit takes all; the log-sum-exp is right."""
    return attention_twin(arguments, softmax=_softmax.largest_only)


@planted(OP, NUMERIC, source="block-sparse shortcut with too bold a threshold")
def light_tiles_skipped(**arguments: Any) -> State:
    """Tiles whose weights are all below 1e-3 of the largest are left out."""
    return attention_twin(arguments, softmax=_softmax.light_tiles_skipped)


@planted(OP, NUMERIC, NONFINITE, source="clipping against overflow")
def logits_clipped(**arguments: Any) -> State:
    """Logits are held within +-50."""
    return attention_twin(arguments, logits=_scores.clipped)


@planted(OP, NUMERIC, NONFINITE, source="finite stand-in for infinity used as a bound")
def large_logits_clamped(**arguments: Any) -> State:
    """Logits above 5e4 are all the same."""
    return attention_twin(arguments, logits=_scores.clamped_at_5e4)


@planted(OP, NUMERIC, source="attribute of another model left on")
def soft_cap_left_on(**arguments: Any) -> State:
    """Logits go through a soft cap at 50."""
    return attention_twin(arguments, logits=_scores.soft_capped)


@planted(OP, NUMERIC, source="log1p of the sum beside the largest logit")
def equal_maxima_counted_once(**arguments: Any) -> State:
    """Of several equal largest logits one counts in the denominator."""
    return attention_twin(arguments, softmax=_softmax.equal_maxima_counted_once)


@planted(OP, NUMERIC, source="scores kept in a buffer of fixed length")
def keys_past_1024_dropped(**arguments: Any) -> State:
    """Only 1024 keys of a request take part."""
    return attention_twin(arguments, softmax=_softmax.first_1024_keys)


@planted(OP, NUMERIC, NONFINITE, source="sum taken one lane short")
def last_key_not_in_denominator(**arguments: Any) -> State:
    """The last key counts in the output, not in the denominator."""
    return attention_twin(arguments, softmax=_softmax.last_key_not_in_total)


@planted(OP, NUMERIC, NONFINITE, source="loop begun at 1")
def first_key_lost(**arguments: Any) -> State:
    """The first of several keys, often a sink, takes no part."""
    return attention_twin(arguments, softmax=_softmax.first_key_lost)


@planted(OP, NUMERIC, source="scale handed over as a half-precision tensor")
def softmax_scale_in_input_dtype(**arguments: Any) -> State:
    """The scale is rounded."""
    scale = torch.tensor(arguments["softmax_scale"]).to(arguments["q"].dtype)
    return _scaled(arguments, float(scale))


@planted(OP, DOWNGRADE, source="first product stored in half precision")
def logits_rounded_to_input_dtype(**arguments: Any) -> State:
    """The logits are rounded."""
    return attention_twin(arguments, logits=_scores.rounded)


@planted(OP, *LESS_PRECISE, NONFINITE, source="first product stored in half precision before the scale")
def products_rounded_to_input_dtype(**arguments: Any) -> State:
    """The products are rounded, then scaled."""
    return attention_twin(arguments, logits=_scores.rounded_unscaled)


@planted(OP, DOWNGRADE, source="tf32 left on")
def products_in_tf32(**arguments: Any) -> State:
    """Operands of the first product lose 13 bits; only float32 inputs notice."""
    return attention_twin(arguments, logits=_scores.cut_to_tf32)


@planted(OP, DOWNGRADE, rows=("FC-007",))
def weights_in_e4m3(**arguments: Any) -> State:
    """Weights are stored in e4m3, where small ones vanish."""
    return attention_twin(arguments, softmax=_softmax.e4m3_weights)


@planted(OP, DOWNGRADE, source="one code path for all half-precision inputs")
def weights_in_bfloat16(**arguments: Any) -> State:
    """Weights are stored in bfloat16 for float16 and float32 inputs as well."""
    return attention_twin(arguments, softmax=_softmax.bfloat16_weights)


@planted(OP, NUMERIC, source="row sum stored in half precision")
def denominator_in_input_dtype(**arguments: Any) -> State:
    """The denominator is rounded."""
    return attention_twin(arguments, softmax=_softmax.rounded_total)


@planted(OP, *LESS_PRECISE, source="accumulator kept in half precision between tiles")
def output_accumulated_in_input_dtype(**arguments: Any) -> State:
    """The accumulated output is rounded after every 16 keys."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(16), keep=_softmax.to_dtype_of_values))


@planted(OP, NUMERIC, source="fast exponential")
def coarse_exponential(**arguments: Any) -> State:
    """The exponential is good to 2^-11."""
    return attention_twin(arguments, softmax=_softmax.coarse_exponential)
