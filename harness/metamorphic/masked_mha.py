"""The metamorphic moves of ``masked_mha``; bits and positions stay with their queries and keys."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..case import PER_REQUEST, Case
from ..operation import Inputs
from ..poison import Ledger
from .attention import OFFSETS
from .moves import Moves, Part, Split, offsets, placed, ranges

STARTS = ("query_starts", "key_starts")


def _of_requests(case: Case) -> list[str]:
    """The sizes that have one entry per request."""
    return [name for name in case.sizes if name.endswith(PER_REQUEST)]


def _permute(case: Case, inputs: Inputs, order: list[int]) -> Case:
    arguments, sizes = inputs.arguments, case.sizes
    for name, lens in (("q", "query_lens"), ("mask", "query_lens"), ("k", "key_lens"), ("v", "key_lens")):
        parts, tensor = ranges(sizes[lens]), arguments[name]
        tensor.copy_(torch.cat([tensor[parts[request]] for request in order]))
    own = {name: [sizes[name][request] for request in order] for name in _of_requests(case)}
    for name, lens in OFFSETS.items():
        arguments[name].copy_(offsets(own[lens], arguments[name]))
    for name in STARTS:
        arguments[name].copy_(torch.tensor(own[name]))
    return replace(case, sizes=sizes | own)


def _poison(case: Case, inputs: Inputs, requests: set[int], value: float) -> None:
    queries, keys = ranges(case.sizes["query_lens"]), ranges(case.sizes["key_lens"])
    for request in requests:
        inputs.arguments["q"][queries[request]] = value
        inputs.arguments["k"][keys[request]] = value
        inputs.arguments["v"][keys[request]] = value
        # the bits of a neighbour are nobody else's either
        inputs.arguments["mask"][queries[request]] = -1


def _largest_value(arguments: dict[str, Any]) -> float:
    v: Tensor = arguments["v"]
    return float(v.double().nan_to_num(nan=0.0).abs().max()) if v.numel() else 0.0


def _scale_values(arguments: dict[str, Any], factor: float) -> None:
    arguments["v"].mul_(factor)


def _part(case: Case, inputs: Inputs, queries: list[slice], keys: list[slice], own: dict[str, list[int]]) -> Part:
    """Some queries and keys of some requests as a case of their own, in the same memory layout."""
    given, ledger, arguments = inputs.arguments, Ledger(), dict(inputs.arguments)
    for name, parts in (("q", queries), ("mask", queries), ("k", keys), ("v", keys)):
        arguments[name] = placed(ledger, name, torch.cat([given[name][part] for part in parts]), given[name])
    own |= {name: [part.stop - part.start for part in parts] for name, parts in _lengths(queries, keys)}
    for name, lens in OFFSETS.items():
        arguments[name] = ledger.guarded(name, offsets(own[lens], given[name]), given[name].device)
    for name in STARTS:
        starts = torch.tensor(own[name], dtype=given[name].dtype)
        arguments[name] = ledger.guarded(name, starts, given[name].device)
    return replace(case, sizes=case.sizes | own), Inputs(arguments=arguments, ledger=ledger)


def _lengths(queries: list[slice], keys: list[slice]) -> tuple[tuple[str, list[slice]], ...]:
    return ("query_lens", queries), ("key_lens", keys)


def _split(case: Case, inputs: Inputs, generator: torch.Generator) -> Split | None:
    """Every request's keys in two chunks, cut anywhere: at no multiple of 32, in queries' futures, beside holes."""
    sizes = case.sizes
    cuts = [1 + int(torch.randint(m - 1, (), generator=generator)) if m > 1 else 0 for m in sizes["key_lens"]]
    if not any(cuts):
        return None
    queries, keys = ranges(sizes["query_lens"]), ranges(sizes["key_lens"])
    same = {name: list(sizes[name]) for name in _of_requests(case)}
    first = [slice(part.start, part.start + cut) for part, cut in zip(keys, cuts, strict=True)]
    second = [slice(part.start + cut, part.stop) for part, cut in zip(keys, cuts, strict=True)]
    moved = {"key_starts": [start + cut for start, cut in zip(sizes["key_starts"], cuts, strict=True)]}
    parts = _part(case, inputs, queries, first, dict(same)), _part(case, inputs, queries, second, same | moved)
    ends = [(cut, m) if cut else (m,) for cut, m in zip(cuts, sizes["key_lens"], strict=True)]
    return Split(parts=parts, whole=(case, inputs), ends=ends)


def _one(case: Case, inputs: Inputs, request: int, queries: slice, first_query: int) -> Part:
    own = {name: [case.sizes[name][request]] for name in _of_requests(case)}
    keys = ranges(case.sizes["key_lens"])[request]
    return _part(case, inputs, [queries], [keys], own | {"query_starts": [first_query]})


def _alone(case: Case, inputs: Inputs, request: int) -> tuple[Part, slice]:
    queries = ranges(case.sizes["query_lens"])[request]
    return _one(case, inputs, request, queries, case.sizes["query_starts"][request]), queries


def _last_query(case: Case, inputs: Inputs, request: int) -> tuple[Part, slice]:
    queries = ranges(case.sizes["query_lens"])[request]
    last = slice(queries.stop - 1, queries.stop)
    return _one(case, inputs, request, last, case.sizes["query_starts"][request] + last.start - queries.start), last


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
