"""Faults of ``kda`` before the recurrence: norms, gates, strengths, heads, scale; and of the order of its steps."""

from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._kda_twin import Answer, Arguments, kda_twin, log_decay, normalised, strength

OP = "kda"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="fla modules/l2norm.py: eps inside the root; F.normalize differs for short rows")
def epsilon_outside_of_the_root(**arguments: Any) -> Answer:
    """Rows are divided by their length plus 1e-6."""
    return kda_twin(arguments, normalise=lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6))


@planted(OP, NUMERIC, source="F.normalize taken for the norm of the models")
def length_no_less_than_epsilon(**arguments: Any) -> Answer:
    """Rows are divided by their length, or by 1e-12."""
    return kda_twin(arguments, normalise=lambda x: torch.nn.functional.normalize(x, dim=-1, eps=1e-12))


@planted(OP, NUMERIC, source="a norm with the mean of squares, as of RMSNorm")
def mean_instead_of_sum_of_squares(**arguments: Any) -> Answer:
    """Rows of root mean square 1."""
    return kda_twin(arguments, normalise=lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


@planted(OP, NUMERIC, NONFINITE, source="a norm forgotten")
def norm_left_out(**arguments: Any) -> Answer:
    """Queries and keys as they come."""
    return kda_twin(arguments, normalise=lambda x: x)


@planted(OP, NUMERIC, source="a norm of keys alone")
def queries_not_normalised(**arguments: Any) -> Answer:
    """Queries keep their length."""
    seen: list[Tensor] = []

    def keys_alone(x: Tensor) -> Tensor:
        seen.append(x)
        return x if len(seen) % 2 else normalised(x)

    return kda_twin(arguments, normalise=keys_alone)


@planted(OP, NUMERIC, NONFINITE, source="logits of beta taken for beta")
def beta_without_sigmoid(**arguments: Any) -> Answer:
    """Logits are the strength."""
    return kda_twin(arguments, strengthen=lambda a, beta: beta)


@planted(OP, NUMERIC, source="beta put through a sigmoid twice")
def sigmoid_of_a_given_beta(**arguments: Any) -> Answer:
    """A strength goes through a sigmoid like a logit."""
    return kda_twin(arguments, strengthen=lambda a, beta: beta.sigmoid())


@planted(OP, NUMERIC, source="fla allow_neg_eigval taken for granted")
def beta_doubled(**arguments: Any) -> Answer:
    """Strengths up to 2."""
    return kda_twin(arguments, strengthen=lambda a, beta: 2.0 * strength(a, beta))


@planted(OP, NUMERIC, source="scale ignored")
def scale_left_out(**arguments: Any) -> Answer:
    """The scale is 1."""
    return kda_twin(arguments | {"scale": 1.0})


@planted(OP, NUMERIC, source="scale derived inside of a kernel")
def scale_of_values(**arguments: Any) -> Answer:
    """The scale is taken from the width of a value."""
    return kda_twin(arguments | {"scale": arguments["v"].shape[2] ** -0.5})


@planted(OP, NUMERIC, source="a scale that goes with the norm")
def scale_of_normalised_rows(**arguments: Any) -> Answer:
    """Where rows are normalised the scale is taken from the width of a key."""
    return kda_twin(arguments | {"scale": scale_under_a_norm(arguments)})


@planted(OP, NUMERIC, source="FlashKDA: the scale in bfloat16 is a bias of 1e-4 of every output")
def scale_in_bfloat16(**arguments: Any) -> Answer:
    """The scale is rounded."""
    return kda_twin(arguments | {"scale": float(torch.tensor(arguments["scale"]).bfloat16())})


@planted(OP, NUMERIC, source="gate parameters forgotten")
def bias_of_the_gate_left_out(**arguments: Any) -> Answer:
    """No ``dt_bias``."""
    return kda_twin(arguments | {"dt_bias": None})


@planted(OP, NUMERIC, source="gate parameters forgotten")
def amplitude_left_out(**arguments: Any) -> Answer:
    """No ``A_log``."""
    return kda_twin(arguments | {"A_log": None})


@planted(OP, NUMERIC, source="A_log taken for the amplitude")
def logarithm_taken_for_the_amplitude(**arguments: Any) -> Answer:
    """``A_log`` is not exponentiated."""
    a_log = arguments["A_log"]
    return kda_twin(arguments | {"A_log": None if a_log is None else a_log.abs().log()})


@planted(OP, NUMERIC, source="FlashKDA #3: lower_bound ignored")
def lower_bound_ignored(**arguments: Any) -> Answer:
    """Bounded gates go down to -5, whatever their bound is."""
    bound = None if arguments["lower_bound"] is None else -5.0
    return kda_twin(arguments | {"lower_bound": bound})


@planted(OP, NUMERIC, source="FlashKDA #3: the bounded gate applied to a model with the other one")
def softplus_taken_for_a_bounded_gate(**arguments: Any) -> Answer:
    """Every gate of logits is bounded by -5."""
    if arguments["gate"] == "softplus":
        arguments |= {"gate": "bounded", "lower_bound": -5.0}
    return kda_twin(arguments)


@planted(OP, NUMERIC, source="a softplus of clamped logits")
def softplus_of_clamped_logits(**arguments: Any) -> Answer:
    """Logits above 10 count as 10."""
    return kda_twin(arguments, decay=clamped_decay)


@planted(OP, NONFINITE, NUMERIC, source="fla: softplus is its logit above 20")
def softplus_that_overflows(**arguments: Any) -> Answer:
    """The exponential of a logit leaves float32, and infinite sums are subtracted."""

    def decay(a: Arguments, g: Tensor) -> Tensor:
        if a["gate"] != "softplus":
            return log_decay(a, g)
        logits = g if a["dt_bias"] is None else g + a["dt_bias"]
        amplitude = 1.0 if a["A_log"] is None else a["A_log"].exp()[:, None]
        return -amplitude * (1.0 + logits.exp()).log()

    return kda_twin(arguments, decay=decay)


@planted(OP, NUMERIC, source="base 2 without the change of base")
def decay_in_base_2(**arguments: Any) -> Answer:
    """Powers of 2 of a natural logarithm."""
    return kda_twin(arguments, decay=lambda a, g: log_decay(a, g) * 0.6931471805599453)


@planted(OP, NUMERIC, source="the gate of GDN, one a head")
def decay_of_a_head(**arguments: Any) -> Answer:
    """All channels of a head decay like their mean."""
    return kda_twin(arguments, decay=lambda a, g: log_decay(a, g).mean(-1, keepdim=True).expand_as(g).contiguous())


@planted(OP, NUMERIC, source="bf16 prefix sums")
def decay_in_bfloat16(**arguments: Any) -> Answer:
    """Log decays are rounded before they are summed."""
    return kda_twin(arguments, decay=lambda a, g: log_decay(a, g).bfloat16().float())


@planted(OP, NUMERIC, source="GVA: h % n instead of h // n")
def value_heads_interleaved(**arguments: Any) -> Answer:
    """Value head ``h`` meets key head ``h % H``."""
    return kda_twin(arguments, group=lambda x, heads: x.repeat(1, heads // x.shape[1], 1))


@planted(OP, NUMERIC, source="GVA: the first key head for all")
def first_key_head_for_all(**arguments: Any) -> Answer:
    """Every value head meets the first key head."""
    return kda_twin(arguments, group=lambda x, heads: x[:, :1].repeat(1, heads, 1))


@planted(OP, NUMERIC, source="gate after instead of before the update")
def decay_after_the_write(**arguments: Any) -> Answer:
    """What is written decays at once."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="write, decay"))


@planted(OP, NUMERIC, source="fla #885: forget before error")
def prediction_before_the_decay(**arguments: Any) -> Answer:
    """The error is of what the state recalled before it decayed."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="predict, decay, write"))


@planted(OP, NUMERIC, source="output before the write")
def output_before_the_write(**arguments: Any) -> Answer:
    """A token does not see what it writes."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="read first"))


@planted(OP, NUMERIC, NONFINITE, source="plain linear attention")
def nothing_predicted(**arguments: Any) -> Answer:
    """Values are added to the state, whatever it recalls."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="no prediction"))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-110",))
def prediction_for_the_query(**arguments: Any) -> Answer:
    """Under one of the gates the error is of what the state recalls for the query."""
    wrong = "no key" if arguments["gate"] == "softplus" else ""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order=wrong))


@planted(OP, NUMERIC, source="FlashKDA: the prediction is rounded before it is taken off the value")
def prediction_rounded(**arguments: Any) -> Answer:
    """What is recalled is bfloat16 before the error is."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="rounded"))


@planted(OP, NUMERIC, source="beta on the value alone")
def beta_on_the_value_alone(**arguments: Any) -> Answer:
    """The prediction is taken off whole."""
    return kda_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="value alone"))


def scale_under_a_norm(arguments: Arguments) -> float:
    """Of the width of a key, where there is a norm."""
    return float(arguments["q"].shape[2] ** -0.5 if arguments["qk_l2norm"] else arguments["scale"])


def clamped_decay(a: Arguments, g: Tensor) -> Tensor:
    """Of logits no larger than 10 under a softplus."""
    bias = 0.0 if a["dt_bias"] is None else a["dt_bias"]
    return log_decay(a, (g + bias).clamp(max=10.0) - bias if a["gate"] == "softplus" else g)


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, order: str
) -> tuple[Tensor, Tensor]:
    """One token after the other, with one step wrong."""
    out = torch.empty_like(v)

    def told(state: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("hkv,hk->hv", state, x)

    for t in range(q.shape[1]):
        decay, key, strong = g[:, t].exp()[..., None], k[:, t], beta[:, t, None]
        before = state
        if order != "write, decay":
            state = decay * state
        recalled = told(before if order == "predict, decay, write" else state, q[:, t] if order == "no key" else key)
        if order == "no prediction":
            recalled = torch.zeros_like(recalled)
        if order == "rounded":
            recalled = recalled.bfloat16().float()
        error = strong * v[:, t] - recalled if order == "value alone" else strong * (v[:, t] - recalled)
        out[:, t] = told(state, q[:, t])
        state = state + key[..., None] * error[:, None]
        if order == "write, decay":
            state = decay * state
        if order != "read first":
            out[:, t] = told(state, q[:, t])
    return out, state
