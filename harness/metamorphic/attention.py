"""The metamorphic moves of ``attention``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..operation import Inputs
from ..poison import Ledger
from .moves import Moves, Part, Split, offsets, placed, ranges

OFFSETS = {"cu_seqlens_q": "query_lens", "cu_seqlens_k": "key_lens"}


def _permute(case: Case, inputs: Inputs, order: list[int]) -> Case:
    arguments, sizes = inputs.arguments, case.sizes
    for name, lens in (("q", "query_lens"), ("k", "key_lens"), ("v", "key_lens")):
        parts, tensor = ranges(sizes[lens]), arguments[name]
        tensor.copy_(torch.cat([tensor[parts[request]] for request in order]))
    lengths = {lens: [sizes[lens][request] for request in order] for lens in ("query_lens", "key_lens")}
    for name, lens in OFFSETS.items():
        arguments[name].copy_(offsets(lengths[lens], arguments[name]))
    return replace(case, sizes=sizes | lengths)


def _poison(case: Case, inputs: Inputs, requests: set[int], value: float) -> None:
    queries, keys = ranges(case.sizes["query_lens"]), ranges(case.sizes["key_lens"])
    for request in requests:
        inputs.arguments["q"][queries[request]] = value
        inputs.arguments["k"][keys[request]] = value
        inputs.arguments["v"][keys[request]] = value


def _largest_value(arguments: dict[str, Any]) -> float:
    v: Tensor = arguments["v"]
    return float(v.double().nan_to_num(nan=0.0).abs().max()) if v.numel() else 0.0


def _scale_values(arguments: dict[str, Any], factor: float) -> None:
    arguments["v"].mul_(factor)


def _part(case: Case, inputs: Inputs, queries: list[slice], keys: list[slice], **sizes: Any) -> Part:
    """Some queries and keys of each request as a case of their own, in the same memory layout."""
    given, ledger, own = inputs.arguments, Ledger(), dict(inputs.arguments)
    for name, parts in (("q", queries), ("k", keys), ("v", keys)):
        own[name] = placed(ledger, name, torch.cat([given[name][part] for part in parts]), given[name])
    lengths = {"query_lens": queries, "key_lens": keys}
    sizes |= {name: [part.stop - part.start for part in parts] for name, parts in lengths.items()}
    for name, lens in OFFSETS.items():
        own[name] = ledger.guarded(name, offsets(sizes[lens], given[name]), given[name].device)
    part = replace(case, sizes=case.sizes | sizes)
    return part, Inputs(arguments=own | {"causal": part.sizes["causal"]}, ledger=ledger)


def _split(case: Case, inputs: Inputs, generator: torch.Generator) -> Split | None:
    """Every request's keys in two, at a point that all of its queries see past: the first part needs no mask."""
    sizes, cuts = case.sizes, []
    for n, m in zip(sizes["query_lens"], sizes["key_lens"], strict=True):
        most = max(0, m - n) if sizes["causal"] else max(0, m - 1)
        cuts.append(1 + int(torch.randint(most, (), generator=generator)) if most else 0)
    if not any(cuts):
        return None
    queries, keys = ranges(sizes["query_lens"]), ranges(sizes["key_lens"])
    first = [slice(part.start, part.start + cut) for part, cut in zip(keys, cuts, strict=True)]
    second = [slice(part.start + cut, part.stop) for part, cut in zip(keys, cuts, strict=True)]
    parts = _part(case, inputs, queries, first, causal=False), _part(case, inputs, queries, second)
    ends = [(cut, m) if cut else (m,) for cut, m in zip(cuts, sizes["key_lens"], strict=True)]
    return Split(parts=parts, whole=(case, inputs), ends=ends)


def _alone(case: Case, inputs: Inputs, request: int) -> tuple[Part, slice]:
    queries, keys = ranges(case.sizes["query_lens"])[request], ranges(case.sizes["key_lens"])[request]
    return _part(case, inputs, [queries], [keys]), queries


def _last_query(case: Case, inputs: Inputs, request: int) -> tuple[Part, slice]:
    queries, keys = ranges(case.sizes["query_lens"])[request], ranges(case.sizes["key_lens"])[request]
    last = slice(queries.stop - 1, queries.stop)
    return _part(case, inputs, [last], [keys]), last


MOVES = Moves(
    query_lens=lambda case: list(case.sizes["query_lens"]),
    key_lens=lambda case: list(case.sizes["key_lens"]),
    permute=_permute,
    poison=_poison,
    largest_value=_largest_value,
    scale_values=_scale_values,
    split=_split,
    alone=_alone,
    last_query=_last_query,
)
