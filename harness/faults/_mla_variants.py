"""Correct forms of ``mla_prefill`` that compute in another order or another way; none may be rejected.

Those that absorb the projection are in ``_mla_absorbed``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..contract import Contract, default_contract
from ..plugin import kernel
from . import _softmax, variant
from ._chunked import Pass, State, mla_prefill_twin, passes
from ._mla_merge import in_step
from ._softmax import Online, even_tiles

OP = "mla_prefill"


def _promising(**promises: Any) -> Callable[[Case], Contract]:
    """The contract of a kernel that declares none, with other promises."""
    return lambda case: default_contract(case.dtype, projected=True, splits=True).promising(**promises)


@variant(OP)
def clean(**arguments: Any) -> State:
    """The clean twin, from which every fault differs by one step."""
    return mla_prefill_twin(arguments)


@variant(OP)
def chunks_from_last_to_first(**arguments: Any) -> State:
    """The history backwards, the current tokens last: the order of merging does not matter."""
    return mla_prefill_twin(arguments, passes=lambda *lengths: passes(*lengths)[::-1])


@variant(OP)
def history_before_current(**arguments: Any) -> State:
    """The current tokens are merged last."""
    return mla_prefill_twin(arguments, passes=lambda *lengths: [*passes(*lengths)[1:], *passes(*lengths)[:1]])


@variant(OP)
def requests_in_step(**arguments: Any) -> State:
    """As many passes for each request as the longest history needs, some of them without keys."""
    return mla_prefill_twin(arguments, passes=in_step)


@variant(OP)
def single_pass(**arguments: Any) -> State:
    """History and current tokens at once: no chunks, no merge."""
    return mla_prefill_twin(
        arguments, passes=lambda history, current, *rest: [Pass(keys=slice(0, history + current), causal=True)]
    )


@variant(OP)
def history_in_any_order(**arguments: Any) -> State:
    """The tokens of the history are gathered in the order of their slots; softmax does not mind."""

    def by_slot(slot_table: Tensor, row: int, count: int) -> Tensor:
        own, history = slot_table[row, :count].long(), histories[row]
        return torch.cat([own[:history].sort().values, own[history:]])

    lens = arguments["context_lens"] - arguments["cu_seqlens"].diff()
    histories = dict(zip(arguments["request_rows"].tolist(), lens.tolist(), strict=True))
    return mla_prefill_twin(arguments, slots=by_slot)


@variant(OP)
def tiles_of_13(**arguments: Any) -> State:
    """Online softmax over a tile size that divides nothing."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=even_tiles(13)))


@variant(OP)
def tiles_of_64(**arguments: Any) -> State:
    """Online softmax over the usual tile size."""
    return mla_prefill_twin(arguments, softmax=Online(tiles=even_tiles(64)))


@variant(OP)
def base_2(**arguments: Any) -> State:
    """``exp2`` with the scale folded in; the log-sum-exp goes back to natural log."""
    return mla_prefill_twin(arguments, softmax=_softmax.from_base_2)


@variant(OP)
def weights_normalised_first(**arguments: Any) -> State:
    """Weights are divided by the denominator before they are rounded."""
    return mla_prefill_twin(arguments, softmax=_softmax.normalised_first)


@variant(OP)
def weights_from_lse(**arguments: Any) -> State:
    """Normalised weights are ``exp(z - lse)``."""
    return mla_prefill_twin(arguments, softmax=_softmax.weights_from_lse)


@variant(OP)
@kernel(contract=_promising(l="from_p"))
def total_of_rounded(**arguments: Any) -> State:
    """The denominator sums the rounded weights."""
    return mla_prefill_twin(arguments, softmax=_softmax.total_of_rounded)


@variant(OP)
@kernel(contract=_promising(splits_store="fp32"))
def float32_parts(**arguments: Any) -> State:
    """Split-KV: partial results stay in float32, in a pass split in three as well."""
    return mla_prefill_twin(arguments, store=lambda out, lse, dtype: (out, lse), softmax=_softmax.split_in_parts(3))
