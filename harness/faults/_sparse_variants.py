"""Correct forms of ``sparse_mla`` that compute in another order or another way; none may be rejected."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..contract import Contract, default_contract
from ..conventions import Conventions
from ..plugin import kernel
from . import _softmax, variant
from ._attention_variants import stored_in_parts
from ._chunked import NEVER, State, finite_shift, normalised, softmax, weighted
from ._softmax import LOG2_E, Online, even_tiles
from ._sparse import Three, sparse_twin, valid

OP = "sparse_mla"


@variant(OP)
def clean(**arguments: Any) -> Three:
    """The clean twin, from which every fault differs by one step."""
    return sparse_twin(arguments)


@variant(OP)
def tiles_of_13(**arguments: Any) -> Three:
    """Online softmax over a tile size that divides nothing."""
    return sparse_twin(arguments, softmax=Online(tiles=even_tiles(13)))


@variant(OP)
def tiles_of_64(**arguments: Any) -> Three:
    """Online softmax over the usual tile size."""
    return sparse_twin(arguments, softmax=Online(tiles=even_tiles(64)))


@variant(OP)
def tiles_from_last_to_first(**arguments: Any) -> Three:
    """Online softmax from the end of the list."""
    return sparse_twin(arguments, softmax=Online(tiles=lambda keys: reversed(even_tiles(16)(keys))))


@variant(OP)
def sorted_first(**arguments: Any) -> Three:
    """Lists in the order of the cache, padding behind them, before anything is gathered."""
    counted = valid(arguments["indices"], arguments["topk_length"], len(arguments["kv"]))
    behind = torch.where(counted, arguments["indices"], torch.iinfo(torch.int32).max)
    return sparse_twin({**arguments, "indices": behind.sort(dim=1).values, "topk_length": None})


@variant(OP)
def united_lists(**arguments: Any) -> Three:
    """Rows that either of two neighbours lists, once each, with how often each of them does."""
    indices, s_kv = arguments["indices"], len(arguments["kv"])
    counted = valid(indices, arguments["topk_length"], s_kv)
    times = torch.zeros(len(indices), s_kv + 1, device=indices.device)
    times.scatter_add_(1, torch.where(counted, indices, s_kv).long(), counted.float())
    groups = [times[at : at + 2, :s_kv] for at in range(0, len(times), 2)]
    rows = [group.any(0).nonzero()[:, 0].int() for group in groups]
    longest = max(1, *(len(own) for own in rows))
    united = torch.full((len(indices), longest), -1, dtype=torch.int32, device=indices.device)
    members = torch.zeros(len(indices), longest, device=indices.device)
    for at, (group, own) in enumerate(zip(groups, rows, strict=True)):
        united[2 * at : 2 * at + 2, : len(own)] = own
        members[2 * at : 2 * at + 2, : len(own)] = group[:, own.long()]

    def multiset(logits: Tensor, v: Tensor) -> State:
        shift = finite_shift(logits)
        weights = members * torch.exp(logits - shift)
        return normalised(weighted(weights, v), weights.sum(-1, keepdim=True), shift)

    return sparse_twin(
        {**arguments, "indices": united, "topk_length": None},
        hide=lambda z, ok: z.masked_fill(~ok | (members == 0), NEVER),
        # what only the neighbour lists is not loaded where it holds no number
        gather=lambda kv, i, ok: torch.cat([kv, kv.new_zeros(1, kv.shape[1])])[
            torch.where(ok & (members > 0), i, len(kv)).long()
        ],
        softmax=multiset,
    )


@variant(OP)
def base_2(**arguments: Any) -> Three:
    """``exp2`` with the scale folded in, and results brought back to natural logarithms."""
    return sparse_twin(
        arguments, softmax=_softmax.from_base_2, highest=lambda z, lse: (z * LOG2_E).amax(-1) * (1 / LOG2_E)
    )


@variant(OP)
def weights_normalised_first(**arguments: Any) -> Three:
    """Weights are divided by the denominator, without the sink, before they are rounded."""
    return sparse_twin(arguments, softmax=_softmax.normalised_first)


@variant(OP)
def weights_from_lse(**arguments: Any) -> Three:
    """Normalised weights are ``exp(z - lse)``."""
    return sparse_twin(arguments, softmax=_softmax.weights_from_lse)


@variant(OP)
def sink_as_a_last_logit(**arguments: Any) -> Three:
    """The sink is one more logit of the softmax, whose value is 0."""
    own = arguments["attn_sink"]

    def beside(logits: Tensor, v: Tensor) -> State:
        _, lse = softmax(logits, v)
        if own is None:
            return softmax(logits, v)
        last = own[:, None, None].expand(-1, logits.shape[1], 1).clamp(max=3e38)
        out, _ = softmax(torch.cat([logits, last], dim=-1), torch.cat([v, torch.zeros_like(v[:1])]))
        return torch.where(lse[..., None] == NEVER, 0.0, out), lse

    return sparse_twin(arguments, softmax=beside, sink=lambda out, lse, sink: out)


@variant(OP)
def padded_heads(**arguments: Any) -> Three:
    """Heads padded to 64 with queries of 0 and sinks of ``-inf``."""
    q, own = arguments["q"], arguments["attn_sink"]
    more = -q.shape[1] % 64
    padded = torch.nn.functional.pad(q, (0, 0, 0, more))
    own = own if own is None else torch.nn.functional.pad(own, (0, more), value=NEVER)
    out, lse, top = sparse_twin({**arguments, "q": padded, "attn_sink": own})
    return out[:, : q.shape[1]], lse[:, : q.shape[1]], top[:, : q.shape[1]]


@variant(OP)
@kernel(style="dps")
def written_in_place(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """Results go into given tensors, by their strides."""
    for mine, result in zip((out, lse, max_logits), sparse_twin(arguments), strict=True):
        mine.copy_(result)


@variant(OP)
def heads_first_layout(**arguments: Any) -> Three:
    """All results are transposed views of ``[H, T, ...]`` buffers."""
    out, lse, top = (result.transpose(0, 1).contiguous().transpose(0, 1) for result in sparse_twin(arguments))
    return out, lse, top


@variant(OP)
@kernel(conventions=Conventions(lse_base="2", lse_layout="HT", empty_row=("zero", "+inf")))
def conventions_of_another_library(**arguments: Any) -> Three:
    """Both statistics in base 2 and heads first; ``+inf`` for the log-sum-exp of no entry."""
    out, lse, top = sparse_twin(arguments)
    lse = lse.masked_fill(lse == NEVER, float("inf"))
    return out, (lse * LOG2_E).T, (top * LOG2_E).T


def _promising(**promises: Any) -> Callable[[Case], Contract]:
    """The contract of a kernel that declares none, with other promises."""
    return lambda case: default_contract(case.dtype, projected=False, splits=False).promising(**promises)


@variant(OP)
@kernel(contract=_promising(l="from_p"))
def total_of_rounded(**arguments: Any) -> Three:
    """The denominator sums the rounded weights."""
    return sparse_twin(arguments, softmax=_softmax.total_of_rounded)


@variant(OP)
@kernel(contract=_promising(splits_store="fp32", splits=3))
def split_lists(**arguments: Any) -> Three:
    """Three stretches of each list, their float32 results merged."""
    return sparse_twin(arguments, softmax=_softmax.split_in_parts(3))


def _stored_by_case(case: Case) -> Contract:
    return default_contract(case.dtype, projected=False, splits=True).promising(splits=3)


@variant(OP)
@kernel(contract=_stored_by_case)
def split_lists_stored(**arguments: Any) -> Three:
    """The same with partial results in the dtype of the inputs."""
    return sparse_twin(arguments, softmax=stored_in_parts(3))
