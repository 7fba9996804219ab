"""The metamorphic moves of ``sparse_mla``: what its lists, which belong to a case, leave free."""

from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..operation import Inputs
from .moves import Moves, ranges


def _relabel(inputs: Inputs, generator: torch.Generator) -> None:
    """Rows move to other places in the same order, into the first and the last one, too; lists follow them."""
    kv, indices = inputs.arguments["kv"], inputs.arguments["indices"]
    used = (~kv.isnan().all(1)).nonzero()[:, 0]
    count = len(used)
    places = torch.randperm(len(kv), generator=generator)[:count].sort().values.to(kv.device)
    if count > 1:
        places[0], places[-1] = 0, len(kv) - 1
    names = torch.arange(len(kv), device=kv.device)
    names[used] = places
    # what nobody may read is anywhere else
    free = torch.ones(len(kv), dtype=torch.bool, device=kv.device)
    free[places] = False
    names[kv.isnan().all(1)] = free.nonzero()[:, 0]
    rows = kv[used]
    kv.fill_(torch.nan)
    kv[places] = rows
    inside = (indices >= 0) & (indices < len(kv))
    indices.copy_(torch.where(inside, names[indices.clamp(0, len(kv) - 1).long()].to(indices.dtype), indices))


def _poison(case: Case, inputs: Inputs, requests: set[int], value: float) -> None:
    """Their queries, and the rows that they list and nobody else does."""
    kv, indices = inputs.arguments["kv"], inputs.arguments["indices"]
    theirs, others = torch.zeros(2, len(kv) + 1, dtype=torch.bool, device=kv.device)
    # what is no row is one behind the last
    named = torch.where((indices >= 0) & (indices < len(kv)), indices, len(kv)).long()
    for request, queries in enumerate(ranges(case.sizes["query_lens"])):
        own = theirs if request in requests else others
        own[named[queries].flatten()] = True
        if request in requests:
            inputs.arguments["q"][queries] = value
    kv[(theirs & ~others)[:-1]] = value


def _largest_value(arguments: dict[str, Any]) -> float:
    """No room in float16: what rows gain their queries lose, and small ones have nothing to lose."""
    kv: Tensor = arguments["kv"]
    return torch.finfo(torch.float16).max if kv.dtype == torch.float16 else float(kv.nan_to_num(nan=0.0).abs().max())


def _scale_values(arguments: dict[str, Any], factor: float) -> None:
    """The values are the keys: queries are divided, so that no logit changes."""
    arguments["kv"].mul_(factor)
    arguments["q"].div_(factor)


MOVES = Moves(
    query_lens=lambda case: list(case.sizes["query_lens"]),
    key_lens=lambda case: list(case.sizes["context_lens"]),
    permute=None,
    poison=_poison,
    largest_value=_largest_value,
    scale_values=_scale_values,
    split=None,
    alone=None,
    relabel=_relabel,
    # neighbours of one group may gather together, and what one lists is then in the sums of the other
    company="may",
)
