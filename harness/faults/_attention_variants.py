"""Correct forms of ``attention`` that compute in another order or another way; none may be rejected."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..case import Case
from ..contract import Contract, default_contract
from ..plugin import kernel
from . import _softmax, variant
from ._chunked import State, attention_twin, merge, softmax
from ._softmax import Online, even_tiles

OP = "attention"


@variant(OP)
def clean(**arguments: Any) -> State:
    """The clean twin, from which every fault differs by one step."""
    return attention_twin(arguments)


@variant(OP)
def tiles_of_13(**arguments: Any) -> State:
    """Online softmax over a tile size that divides nothing."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(13)))


@variant(OP)
def tiles_of_64(**arguments: Any) -> State:
    """Online softmax over the usual tile size."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(64)))


@variant(OP)
def tiles_from_last_to_first(**arguments: Any) -> State:
    """Online softmax from the diagonal backwards, as causal kernels do."""
    return attention_twin(arguments, softmax=Online(tiles=lambda keys: reversed(even_tiles(16)(keys))))


@variant(OP)
def base_2(**arguments: Any) -> State:
    """``exp2`` with the scale folded in."""
    return attention_twin(arguments, softmax=_softmax.from_base_2)


@variant(OP)
def weights_normalised_first(**arguments: Any) -> State:
    """Weights are divided by the denominator before they are rounded."""
    return attention_twin(arguments, softmax=_softmax.normalised_first)


@variant(OP)
def weights_from_lse(**arguments: Any) -> State:
    """Normalised weights are ``exp(z - lse)``."""
    return attention_twin(arguments, softmax=_softmax.weights_from_lse)


@variant(OP)
def heads_first_layout(**arguments: Any) -> State:
    """Both results are transposed views of ``[H, T, ...]`` buffers."""
    out, lse = attention_twin(arguments)
    return out.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T


def _promising(**promises: Any) -> Callable[[Case], Contract]:
    """The contract of a kernel that declares none, with other promises."""
    return lambda case: default_contract(case.dtype, projected=False, splits=False).promising(**promises)


def _splitting(**promises: Any) -> Callable[[Case], Contract]:
    """The same of one that merges partial results, stored in the dtype of the inputs."""
    return lambda case: default_contract(case.dtype, projected=False, splits=True).promising(**promises)


def stored_in_parts(count: int) -> Callable[[Tensor, Tensor], State]:
    """The softmax step with the keys in ``count`` stretches, each result rounded to the dtype of the values."""

    def split(logits: Tensor, v: Tensor) -> State:
        merged: State | None = None
        for piece in zip(logits.tensor_split(count, dim=2), v.tensor_split(count), strict=True):
            out, lse = softmax(*piece)
            part = out.to(v.dtype), lse
            merged = part if merged is None else merge(*merged, *part)
        return merged or softmax(logits, v)

    return split


@variant(OP)
@kernel(contract=_splitting(splits_store="fp32", splits=3))
def split_keys(**arguments: Any) -> State:
    """Three stretches of keys, their float32 results merged."""
    return attention_twin(arguments, softmax=_softmax.split_in_parts(3))


@variant(OP)
@kernel(contract=_splitting(splits=3))
def split_keys_stored(**arguments: Any) -> State:
    """Split-KV with three partial results in the dtype of the inputs, and a contract that says how many."""
    return attention_twin(arguments, softmax=stored_in_parts(3))


@variant(OP)
@kernel(contract=_splitting())
def split_keys_as_planned(**arguments: Any) -> State:
    """The same with as many partial results as a scheduler likes, which its contract leaves open."""
    return attention_twin(arguments, softmax=stored_in_parts(7))


@variant(OP)
@kernel(contract=_promising(l="from_p"))
def total_of_rounded(**arguments: Any) -> State:
    """The denominator sums the rounded weights."""
    return attention_twin(arguments, softmax=_softmax.total_of_rounded)
