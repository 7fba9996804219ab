"""Faults in the softmax of any attention: scales, maxima, denominators, precision; planted in a clean twin.

In an operation that attends in several passes each pass has the fault, and is merged by what came out of it.
"""

from typing import Any

import torch

from ..answers import Answer
from ..record import Verdict
from . import _scores, _softmax, common
from ._memory import Twin
from ._softmax import Online, even_tiles

NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
# one field of the contract a step lower explains all that it does
DOWNGRADE = Verdict.PRECISION_DOWNGRADE
# it is rounded too often, or to too little, for that to be sure
LESS_PRECISE = (NUMERIC, DOWNGRADE)


def _scaled(twin: Twin, arguments: dict[str, Any], scale: float) -> Answer:
    return twin({**arguments, "softmax_scale": scale})


@common(NUMERIC, source="default used although a scale was given")
def softmax_scale_ignored(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """``Dq ** -0.5``, whatever was asked for."""
    return _scaled(twin, arguments, arguments["q"].shape[2] ** -0.5)


@common(NUMERIC, source="folded into the queries and applied again")
def scale_applied_twice(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The scale squared."""
    return _scaled(twin, arguments, arguments["softmax_scale"] ** 2)


@common(NUMERIC, source="scales above 1 taken for a mistake")
def scale_at_most_1(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """A larger scale is cut to 1."""
    return _scaled(twin, arguments, min(arguments["softmax_scale"], 1.0))


@common(NUMERIC, NONFINITE, rows=("FC-015",))
def running_max_starts_at_minus_5e4(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """A row of lower logits counts as empty."""
    return twin(arguments, softmax=_softmax.max_from_5e4)


@common(NUMERIC, NONFINITE, source="exponentials of raw logits")
def no_running_max(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The exponentials overflow or vanish."""
    return twin(arguments, softmax=_softmax.no_maximum)


@common(NUMERIC, NONFINITE, source="maximum not updated in the loop")
def max_of_first_tile(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The maximum of the first 16 keys is taken for that of all."""
    return twin(arguments, softmax=_softmax.maximum_of_first_tile)


@common(NUMERIC, source="online softmax without its correction")
def sums_not_rescaled(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Sums keep the unit of the old maximum when a new one is found."""
    return twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.not_rescaled))


@common(NUMERIC, source="exp2 with a natural argument")
def sums_rescaled_in_base_2(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The correction uses the wrong exponential."""
    return twin(arguments, softmax=Online(tiles=even_tiles(16), rescale=_softmax.rescaled_in_base_2))


@common(NUMERIC, NONFINITE, source="row sum taken before the mask")
def denominator_before_mask(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Hidden keys count in the denominator."""
    wrong = _softmax.UnmaskedTotal()
    return twin(arguments, mask=wrong.mask, softmax=wrong.softmax)


@common(NUMERIC, source="the shift not added back")
def lse_without_maximum(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The log of the shifted sum."""
    return twin(arguments, softmax=_softmax.lse_without_maximum)


@common(NUMERIC, source="wrong register stored")
def largest_logit_as_lse(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The maximum instead of the log-sum-exp."""
    return twin(arguments, softmax=_softmax.largest_logit_as_lse)


@common(NUMERIC, source="null kernel")
def all_zeros(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """No output; the log-sum-exp is right."""
    out, *others = twin(arguments)
    return out.zero_(), *others


@common(NUMERIC, source="null kernel")
def mean_of_values(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Every visible key weighs the same; the log-sum-exp is right."""
    return twin(arguments, softmax=_softmax.uniform_weights)


@common(NUMERIC, source="null kernel")
def value_of_nearest_key(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The key of the largest logit takes all; the log-sum-exp is right."""
    return twin(arguments, softmax=_softmax.largest_only)


@common(NUMERIC, source="block-sparse shortcut with too bold a threshold")
def light_tiles_skipped(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Tiles whose weights are all below 1e-3 of the largest are left out."""
    return twin(arguments, softmax=_softmax.light_tiles_skipped)


@common(NUMERIC, NONFINITE, source="clipping against overflow")
def logits_clipped(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Logits are held within +-50."""
    return twin(arguments, logits=_scores.clipped)


@common(NUMERIC, NONFINITE, source="finite stand-in for infinity used as a bound")
def large_logits_clamped(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Logits above 5e4 are all the same."""
    return twin(arguments, logits=_scores.clamped_at_5e4)


@common(NUMERIC, source="attribute of another model left on")
def soft_cap_left_on(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Logits go through a soft cap at 50."""
    return twin(arguments, logits=_scores.soft_capped)


@common(NUMERIC, source="log1p of the sum beside the largest logit")
def equal_maxima_counted_once(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Of several equal largest logits one counts in the denominator."""
    return twin(arguments, softmax=_softmax.equal_maxima_counted_once)


@common(NUMERIC, source="scores kept in a buffer of fixed length")
def keys_past_1024_dropped(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Only 1024 keys of a request take part."""
    return twin(arguments, softmax=_softmax.first_1024_keys)


@common(NUMERIC, NONFINITE, source="sum taken one lane short")
def last_key_not_in_denominator(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The last key counts in the output, not in the denominator."""
    return twin(arguments, softmax=_softmax.last_key_not_in_total)


@common(NUMERIC, NONFINITE, source="loop begun at 1")
def first_key_lost(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The first of several keys, often a sink, takes no part."""
    return twin(arguments, softmax=_softmax.first_key_lost)


@common(NUMERIC, source="scale handed over as a half-precision tensor")
def softmax_scale_in_input_dtype(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The scale is rounded."""
    scale = torch.tensor(arguments["softmax_scale"]).to(arguments["q"].dtype)
    return _scaled(twin, arguments, float(scale))


@common(DOWNGRADE, source="first product stored in half precision")
def logits_rounded_to_input_dtype(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The logits are rounded."""
    return twin(arguments, logits=_scores.rounded)


@common(*LESS_PRECISE, NONFINITE, source="first product stored in half precision before the scale")
def products_rounded_to_input_dtype(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The products are rounded, then scaled."""
    return twin(arguments, logits=_scores.rounded_unscaled)


@common(DOWNGRADE, source="tf32 left on")
def products_in_tf32(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Operands of the first product lose 13 bits; only float32 inputs notice."""
    return twin(arguments, logits=_scores.cut_to_tf32)


@common(DOWNGRADE, rows=("FC-007",))
def weights_in_e4m3(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Weights are stored in e4m3, where small ones vanish."""
    return twin(arguments, softmax=_softmax.e4m3_weights)


@common(DOWNGRADE, source="one code path for all half-precision inputs")
def weights_in_bfloat16(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """Weights are stored in bfloat16 for float16 and float32 inputs as well."""
    return twin(arguments, softmax=_softmax.bfloat16_weights)


@common(NUMERIC, source="row sum stored in half precision")
def denominator_in_input_dtype(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The denominator is rounded."""
    return twin(arguments, softmax=_softmax.rounded_total)


@common(*LESS_PRECISE, source="accumulator kept in half precision between tiles")
def output_accumulated_in_input_dtype(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The accumulated output is rounded after every 16 keys."""
    return twin(arguments, softmax=Online(tiles=even_tiles(16), keep=_softmax.to_dtype_of_values))


@common(NUMERIC, source="fast exponential")
def coarse_exponential(twin: Twin, arguments: dict[str, Any]) -> Answer:
    """The exponential is good to 2^-11."""
    return twin(arguments, softmax=_softmax.coarse_exponential)
