"""Faults and variants of ``token_selection``: plain loops over requests with one wrong step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...reference.token_selection import pool_scores
from ..record import Verdict
from . import planted, variant
from ._memory import TableByAddress

OP = "token_selection"
NUMERIC = Verdict.NUMERIC
Choose = Callable[[Tensor, int], list[int]]


def best(pooled: Tensor, count: int) -> list[int]:
    """The highest, of equal ones the first."""
    return sorted(sorted(range(len(pooled)), key=lambda at: (-float(pooled[at]), at))[:count])


def select(arguments: dict[str, Any], *, choose: Choose = best, whole_row: bool = False) -> Tensor:
    """The clean twin: request by request; ``whole_row`` pools before the candidates are cut out."""
    a, scores = arguments, arguments["scores"]
    budgets, sink, recent = a["budgets"].tolist(), a["sink"], a["recent"]
    kept = torch.full((len(budgets), max(budgets)), -1, dtype=torch.int32)
    options = {"kernel_size": a["kernel_size"], "pooling": a["pooling"]}
    for request, (context, budget) in enumerate(zip(a["context_lens"].tolist(), budgets, strict=True)):
        chosen = list(range(context))
        if context > budget:
            row = scores[request].cpu()
            if whole_row:
                pooled = pool_scores(row.nan_to_num(nan=9.0), **options)[sink : context - recent]
            else:
                pooled = pool_scores(row[sink : context - recent], **options)
            middle = [sink + at for at in choose(pooled, budget - sink - recent)]
            chosen = [*range(sink), *middle, *range(context - recent, context)]
        kept[request, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return kept.to(scores.device)


@planted(OP, NUMERIC, rows=("FC-134",))
def window_outscored_by_equal_candidates(**arguments: Any) -> Tensor:
    """The last tokens are given the highest score instead of a place, and lose to equal ones before them."""
    changed = dict(arguments)
    scores = arguments["scores"].clone()
    for row, context in zip(scores, arguments["context_lens"].tolist(), strict=True):
        candidates = row[arguments["sink"] : context - arguments["recent"]]
        row[context - arguments["recent"] : context] = candidates.max() if len(candidates) else 0.0
    return select(changed | {"scores": scores, "recent": 0})


@planted(OP, NUMERIC, source="tables sized for a fixed number of requests")
def requests_past_the_sixteenth_left_out(**arguments: Any) -> Tensor:
    """Later requests keep nothing."""
    kept = select(arguments)
    kept[16:] = -1
    return kept


@planted(OP, NUMERIC, rows=("FC-135",))
def recent_tokens_compete(**arguments: Any) -> Tensor:
    """The last tokens must earn their place, with a score of 0."""
    scores = arguments["scores"].nan_to_num(nan=0.0)
    return select({**arguments, "scores": scores, "recent": 0})


@planted(OP, NUMERIC, source="attention sinks scored like others")
def sinks_compete(**arguments: Any) -> Tensor:
    """The first tokens must earn their place, with a score of 0."""
    return select({**arguments, "scores": arguments["scores"].nan_to_num(nan=0.0), "sink": 0})


@planted(OP, NUMERIC, rows=("FC-151",))
def pooled_before_it_is_masked(**arguments: Any) -> Tensor:
    """Scores outside of the candidates reach into the pooled ones."""
    return select(arguments, whole_row=True)


@planted(OP, NUMERIC, source="pooling shifted")
def pooling_looks_ahead(**arguments: Any) -> Tensor:
    """The pooled scores lie one token too early."""
    return select(arguments, choose=lambda pooled, count: best(pooled.roll(-1), count))


@planted(OP, NUMERIC, source="no pooling")
def pooling_left_out(**arguments: Any) -> Tensor:
    """Scores are compared as they are."""
    return select({**arguments, "kernel_size": 1})


@planted(OP, NUMERIC, source="the other pooling")
def mean_for_maximum(**arguments: Any) -> Tensor:
    """Pools by the mean where the maximum is asked for."""
    return select({**arguments, "pooling": "avg"})


@planted(OP, NUMERIC, source="kernel halved")
def kernel_two_narrower(**arguments: Any) -> Tensor:
    """The window of the pooling lacks a token on either side."""
    return select({**arguments, "kernel_size": max(1, arguments["kernel_size"] - 2)})


@planted(OP, NUMERIC, rows=("FC-133",))
def first_scores_for_all(**arguments: Any) -> Tensor:
    """Every request is chosen for by the scores of the first."""
    scores = arguments["scores"]
    return select({**arguments, "scores": scores[:1].expand_as(scores).nan_to_num(nan=0.0)})


@planted(OP, NUMERIC, rows=("FC-137",))
def local_index_of_candidates(**arguments: Any) -> Tensor:
    """The place among the candidates is taken for the position, and the sinks come after."""
    a, kept = arguments, select(arguments)
    over = a["context_lens"] > a["budgets"]
    sink = a["sink"]
    local = torch.where(kept >= sink, kept - sink, kept).where(over[:, None] & (kept >= 0), kept)
    return local


@planted(OP, NUMERIC, source="the lowest scores stay")
def lowest_stay(**arguments: Any) -> Tensor:
    """Sorted the wrong way round."""
    return select(arguments, choose=lambda pooled, count: best(-pooled, count))


@planted(OP, NUMERIC, source="ties broken from the end")
def later_of_equal_stays(**arguments: Any) -> Tensor:
    """Of equal scores the later token is taken."""

    def last(pooled: Tensor, count: int) -> list[int]:
        return sorted(sorted(range(len(pooled)), key=lambda at: (-float(pooled[at]), -at))[:count])

    return select(arguments, choose=last)


@planted(OP, NUMERIC, source="budget without the window")
def budget_beside_the_window(**arguments: Any) -> Tensor:
    """The candidates get the whole budget, and the last of the row are cut off."""
    a, kept = arguments, select(arguments)
    wide = select({**a, "budgets": a["budgets"] + a["sink"] + a["recent"]})
    over = (a["context_lens"] > a["budgets"])[:, None]
    cut = torch.arange(kept.shape[1], device=kept.device) < a["budgets"][:, None]
    return torch.where(over, wide[:, : kept.shape[1]].masked_fill(~cut, -1), kept)


@planted(OP, NUMERIC, source="one token too few")
def one_fewer(**arguments: Any) -> Tensor:
    """The best candidates but one."""
    return select(arguments, choose=lambda pooled, count: best(pooled, max(0, count - 1)))


@planted(OP, NUMERIC, source="in order of score")
def in_order_of_score(**arguments: Any) -> Tensor:
    """Positions come in the order of their scores."""

    def ranked(pooled: Tensor, count: int) -> list[int]:
        return sorted(range(len(pooled)), key=lambda at: (-float(pooled[at]), at))[:count]

    return select(arguments, choose=ranked)


@planted(OP, NUMERIC, Verdict.CRASH, rows=("FC-148",))
def rows_taken_for_contiguous(**arguments: Any) -> Tensor:
    """The row stride of the scores is ignored."""
    scores = arguments["scores"]
    flat = scores.as_strided(scores.shape, (scores.shape[1], 1), scores.storage_offset())
    return select({**arguments, "scores": flat.nan_to_num(nan=0.0)})


@planted(OP, NUMERIC, rows=("FC-149",))
def always_one_more_than_nothing(**arguments: Any) -> Tensor:
    """A request within its budget is cut to its budget's part of it, rounded down."""
    a, kept = arguments, select(arguments)
    within = (a["context_lens"] <= a["budgets"])[:, None]
    short = torch.arange(kept.shape[1], device=kept.device) >= (a["context_lens"] // 2)[:, None]
    return kept.masked_fill(within & short, -1)


_CONTEXTS, _BUDGETS = TableByAddress(), TableByAddress()


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def contexts_known_by_address(**arguments: Any) -> Tensor:
    """Lengths of contexts are read once for every place in memory."""
    contexts = arguments["context_lens"]
    return select({**arguments, "context_lens": _CONTEXTS(contexts, contexts, arguments["budgets"])})


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the budgets")
def budgets_known_by_address(**arguments: Any) -> Tensor:
    """Budgets are read once for every place in memory."""
    budgets = arguments["budgets"]
    return select({**arguments, "budgets": _BUDGETS(budgets, arguments["context_lens"], budgets)})


@variant(OP)
def request_by_request(**arguments: Any) -> Tensor:
    """The clean twin."""
    return select(arguments)


@variant(OP)
def by_stable_sort(**arguments: Any) -> Tensor:
    """A stable sort that descends keeps the earlier of equal scores first."""

    def by_sort(pooled: Tensor, count: int) -> list[int]:
        return sorted(pooled.sort(descending=True, stable=True).indices[:count].tolist())

    return select(arguments, choose=by_sort)


@variant(OP)
def by_dropping(**arguments: Any) -> Tensor:
    """Drops the lowest one at a time, of equal scores the later first."""

    def dropped(pooled: Tensor, count: int) -> list[int]:
        left = list(range(len(pooled)))
        while len(left) > count:
            left.remove(min(left, key=lambda at: (float(pooled[at]), -at)))
        return left

    return select(arguments, choose=dropped)
