"""The metamorphic moves of ``mla_prefill``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..operation import Inputs
from ..poison import Ledger
from .moves import Moves, Part, Split, offsets, placed, ranges

PER_REQUEST = ("request_rows", "context_lens")
MOST_CHUNKS = 8


def _permute(case: Case, inputs: Inputs, order: list[int]) -> Case:
    arguments, sizes = inputs.arguments, case.sizes
    parts = ranges(sizes["query_lens"])
    arguments["q"].copy_(torch.cat([arguments["q"][parts[request]] for request in order]))
    lengths = {lens: [sizes[lens][request] for request in order] for lens in ("query_lens", "context_lens")}
    arguments["cu_seqlens"].copy_(offsets(lengths["query_lens"], arguments["cu_seqlens"]))
    for name in PER_REQUEST:
        arguments[name].copy_(arguments[name][torch.tensor(order, device=arguments[name].device)])
    return replace(case, sizes=sizes | lengths)


def _poison(case: Case, inputs: Inputs, requests: set[int], value: float) -> None:
    arguments, parts = inputs.arguments, ranges(case.sizes["query_lens"])
    rows = arguments["slot_table"][arguments["request_rows"].long()].long()
    slots = [row[:length] for row, length in zip(rows, case.sizes["context_lens"], strict=True)]
    # a slot that another request reads as well is not theirs alone
    others = torch.cat([own for request, own in enumerate(slots) if request not in requests] or [rows.new_empty(0)])
    for request in requests:
        alone = slots[request][~torch.isin(slots[request], others)]
        arguments["q"][parts[request]] = value
        arguments["kv_c"][alone] = value
        arguments["k_pe"][alone] = value


def _value_weights(arguments: dict[str, Any]) -> Tensor:
    """``W_UV``, ``[H, Dv, R]``, a view."""
    weights: Tensor = arguments["kv_b_proj"]
    return weights[:, arguments["q"].shape[2] - arguments["k_pe"].shape[1] :]


def _largest_value(arguments: dict[str, Any]) -> float:
    latent = arguments["kv_c"].double().nan_to_num(nan=0.0).abs().max()
    weights = _value_weights(arguments).double().abs()
    return float(torch.maximum(weights.max(), weights.sum(-1).max() * latent))


def _scale_values(arguments: dict[str, Any], factor: float) -> None:
    _value_weights(arguments).mul_(factor)


def _split(case: Case, inputs: Inputs, generator: torch.Generator) -> Split | None:
    """The history in chunks of another size: the operation merges by itself."""
    sizes = case.sizes
    history = max(c - n for n, c in zip(sizes["query_lens"], sizes["context_lens"], strict=True))
    least = max(1, -(-history // MOST_CHUNKS))
    others = [size for size in range(least, history + 1) if size != sizes["history_chunk_size"]]
    if not others:
        return None
    size = {"history_chunk_size": others[int(torch.randint(len(others), (), generator=generator))]}
    part = replace(case, sizes=sizes | size), Inputs(arguments=inputs.arguments | size, ledger=inputs.ledger)
    return Split(parts=(part,), whole=part, ends=None)


def _alone(case: Case, inputs: Inputs, request: int) -> tuple[Part, slice]:
    queries, given, ledger = ranges(case.sizes["query_lens"])[request], inputs.arguments, Ledger()
    lengths = {lens: [case.sizes[lens][request]] for lens in ("query_lens", "context_lens")}
    own: dict[str, Any] = given | {"q": placed(ledger, "q", given["q"][queries], given["q"])}
    starts = offsets(lengths["query_lens"], given["cu_seqlens"])
    own["cu_seqlens"] = ledger.guarded("cu_seqlens", starts, starts.device)
    for name in PER_REQUEST:
        own[name] = ledger.guarded(name, given[name][request : request + 1], given[name].device)
    return (replace(case, sizes=case.sizes | lengths), Inputs(arguments=own, ledger=ledger)), queries


def _relabel(inputs: Inputs, generator: torch.Generator) -> None:
    """Other slots in the same order, the first and the last slot of the cache among them, and other table rows.

    The order stays, so that a kernel that gathers by slot adds in the same order.
    """
    arguments = inputs.arguments
    table: Tensor = arguments["slot_table"]
    used, count = table[table >= 0].unique().long(), len(arguments["kv_c"])
    inner = torch.randperm(max(count - 2, 0), generator=generator)[: max(len(used) - 2, 0)] + 1
    names = torch.cat([torch.tensor([0, count - 1])[: len(used)], inner]).sort().values.to(table.device)
    renamed = torch.full((count,), -1, dtype=table.dtype, device=table.device)
    renamed[used] = names.to(table.dtype)
    for name in ("kv_c", "k_pe"):
        rows = arguments[name][used]
        arguments[name].fill_(torch.nan)
        arguments[name][names] = rows
    moved = torch.where(table >= 0, renamed[table.clamp(min=0).long()], table)
    order = torch.randperm(len(table), generator=generator).to(table.device)
    table[order] = moved
    arguments["request_rows"].copy_(order[arguments["request_rows"].long()])


MOVES = Moves(
    query_lens=lambda case: list(case.sizes["query_lens"]),
    key_lens=lambda case: list(case.sizes["context_lens"]),
    permute=_permute,
    poison=_poison,
    largest_value=_largest_value,
    scale_values=_scale_values,
    split=_split,
    alone=_alone,
    relabel=_relabel,
)
