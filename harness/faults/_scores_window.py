"""Faults of ``token_scores`` in who looks, and at what: windows, candidates, slots, memory."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import gather
from ._memory import TableByAddress
from ._windows import IDENTITIES, Window, candidates, eligible, token_scores_twin

OP = "token_scores"
INDICES = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
NUMERIC, NONFINITE, WRITE_SCOPE = Verdict.NUMERIC, Verdict.NONFINITE, Verdict.WRITE_SCOPE


@planted(OP, NUMERIC, NONFINITE, source="the whole context instead of the candidates")
def sinks_are_candidates(**arguments: Any) -> Tensor:
    """The first tokens are scored as well."""
    return token_scores_twin({**arguments, "candidate_start": 0})


@planted(OP, NUMERIC, NONFINITE, source="the whole context instead of the candidates")
def recent_tokens_are_candidates(**arguments: Any) -> Tensor:
    """The last tokens are scored as well."""
    return token_scores_twin({**arguments, "recent_keep_tokens": 0})


@planted(OP, NUMERIC, NONFINITE, source="ranges read as start and length")
def candidate_ranges_are_lengths(**arguments: Any) -> Tensor:
    """The end of a range of candidates is taken for its length."""

    def measured(arguments: Mapping[str, Any], request: int, context: int) -> tuple[int, int]:
        start, stop = candidates(arguments, request, context)
        return (start, stop) if arguments["candidate_ranges"] is None else (start, min(start + stop, context))

    return token_scores_twin(arguments, candidates=measured)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-137",))
def local_index_of_candidates(**arguments: Any) -> Tensor:
    """Scores are written from the start of the row instead of from the first candidate."""
    scores = token_scores_twin(arguments)
    shifted = torch.full_like(scores, IDENTITIES[arguments["mode"]])
    for request, context in enumerate(arguments["context_lens"].tolist()):
        start = max(0, candidates(arguments, request, context)[0])
        shifted[request, : scores.shape[1] - start] = scores[request, start:]
    return shifted


@planted(OP, NUMERIC, NONFINITE, source="tables sized for a fixed number of requests")
def requests_past_the_sixteenth_left_out(**arguments: Any) -> Tensor:
    """Later requests have no scores."""
    scores = token_scores_twin(arguments)
    scores[16:] = IDENTITIES[arguments["mode"]]
    return scores


@planted(OP, NUMERIC, NONFINITE, source="no causal mask within the window")
def window_sees_its_future(**arguments: Any) -> Tensor:
    """Every observed query may look at all candidates."""

    def everything(window: Window, count: int) -> Tensor:
        tokens = torch.arange(count, device=window.q.device)
        inside = (tokens >= window.candidates[0]) & (tokens < window.candidates[1])
        return inside.expand(len(window.positions), -1)

    return token_scores_twin(arguments, eligible=everything)


@planted(OP, NUMERIC, NONFINITE, source="a query's own token left out")
def own_token_not_seen(**arguments: Any) -> Tensor:
    """A query looks at the tokens before it alone."""

    def before(window: Window, count: int) -> Tensor:
        own = torch.arange(count, device=window.q.device) == window.positions[:, None]
        return eligible(window, count) & ~own

    return token_scores_twin(arguments, eligible=before)


@planted(OP, NUMERIC, NONFINITE, source="the window taken from the end of the step")
def window_is_always_last(**arguments: Any) -> Tensor:
    """As many queries as asked, but the last ones."""
    return token_scores_twin(
        arguments,
        observed=lambda start, stop, queries, context: (context - (stop - start) if stop else 0, context * (stop > 0)),
    )


@planted(OP, NUMERIC, NONFINITE, rows=("FC-149",))
def window_one_short(**arguments: Any) -> Tensor:
    """The first observed query is left out, and with it a window of one."""
    return token_scores_twin(arguments, observed=lambda start, stop, queries, context: (start + 1, stop))


@planted(OP, NUMERIC, NONFINITE, rows=("FC-133",))
def first_request_for_all(**arguments: Any) -> Tensor:
    """Every request gets the scores of the first."""
    scores = token_scores_twin(arguments)
    return scores[:1].expand_as(scores).contiguous()


@planted(OP, NUMERIC, NONFINITE, source="buffer not reset between calls")
def buffer_not_reset(**arguments: Any) -> Tensor:
    """What the buffer held before raises the scores, and stays where nothing looks."""
    shape = len(arguments["context_lens"]), arguments["slot_table"].shape[1]
    stale = torch.full(shape, 1.0, device=arguments["q"].device)
    return torch.maximum(stale, token_scores_twin(arguments))


@planted(OP, WRITE_SCOPE, source="requests without a window skipped")
def unobserved_requests_unwritten(**arguments: Any) -> Tensor:
    """Only observed requests are written."""
    shape = len(arguments["context_lens"]), arguments["slot_table"].shape[1]
    buffer = torch.empty(shape, device=arguments["q"].device)
    for row, (start, stop) in zip(buffer, arguments["query_ranges"].tolist(), strict=True):
        if start < stop:
            row.fill_(IDENTITIES[arguments["mode"]])
    return token_scores_twin(arguments, buffer=buffer)


@planted(OP, WRITE_SCOPE, source="columns past the context left as they were")
def past_the_context_unwritten(**arguments: Any) -> Tensor:
    """Columns past the context are not written."""
    shape = len(arguments["context_lens"]), arguments["slot_table"].shape[1]
    buffer = torch.empty(shape, device=arguments["q"].device)
    for row, context in zip(buffer, arguments["context_lens"].tolist(), strict=True):
        row[:context].fill_(IDENTITIES[arguments["mode"]])
    return token_scores_twin(arguments, buffer=buffer)


@planted(OP, Verdict.MUTATED_INPUT, rows=("FC-146",))
def queries_scaled_in_place(**arguments: Any) -> Tensor:
    """The queries are scaled where they lie."""
    arguments["q"].mul_(arguments["softmax_scale"])
    return token_scores_twin({**arguments, "softmax_scale": 1.0})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-148",))
def cache_rows_taken_for_contiguous(**arguments: Any) -> Tensor:
    """The row stride of the latent cache is ignored."""
    cache = arguments["kv_c"]
    flat = cache.as_strided(cache.shape, (cache.shape[1], 1), cache.storage_offset())
    return token_scores_twin({**arguments, "kv_c": flat})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-159",))
def regathered_from_the_start(**arguments: Any) -> Tensor:
    """Every sub-chunk of 16 tokens reads the first one's rows."""

    def first(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        again = own[torch.arange(len(own), device=own.device) % 16]
        return gather(kv_c, k_pe, again)

    return token_scores_twin(arguments, gather=first)


@planted(OP, NUMERIC, NONFINITE, source="row of the slot table mixed up with the request")
def row_is_request_index(**arguments: Any) -> Tensor:
    """Request ``r`` reads row ``r`` of the slot table."""
    rows = torch.arange(len(arguments["request_rows"]), device=arguments["q"].device)
    return token_scores_twin({**arguments, "request_rows": rows})


_TABLES: defaultdict[str, TableByAddress] = defaultdict(TableByAddress)


def _remembering(arguments: Mapping[str, Any], *names: str) -> Tensor:
    """The twin with some tables as they first were; queries that are none of the request's are not read."""
    a = arguments
    sizes = a["context_lens"], a["cu_seqlens"].diff(), a["slot_table"].flatten()
    known = {name: _TABLES[name](a[name], *sizes) for name in names if a[name] is not None}
    return token_scores_twin(
        {**a, **known},
        observed=lambda start, stop, queries, context: (max(start, context - queries), min(stop, context)),
    )


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def plan_known_by_address(**arguments: Any) -> Tensor:
    """All that describes the requests is read once for every place in memory."""
    return _remembering(arguments, *INDICES, "query_ranges", "candidate_ranges")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def offsets_known_by_address(**arguments: Any) -> Tensor:
    """Offsets are read once for every place in memory."""
    return _remembering(arguments, "cu_seqlens")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the lengths")
def contexts_known_by_address(**arguments: Any) -> Tensor:
    """Lengths of contexts are read once for every place in memory."""
    return _remembering(arguments, "context_lens")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the ranges")
def query_ranges_known_by_address(**arguments: Any) -> Tensor:
    """Observed ranges are read once for every place in memory."""
    return _remembering(arguments, "query_ranges")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the ranges")
def candidate_ranges_known_by_address(**arguments: Any) -> Tensor:
    """Ranges of candidates are read once for every place in memory."""
    return _remembering(arguments, "candidate_ranges")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the tables")
def rows_known_by_address(**arguments: Any) -> Tensor:
    """The row of each request in the slot table is read once for every place in memory."""
    return _remembering(arguments, "request_rows")


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the tables")
def slots_known_by_address(**arguments: Any) -> Tensor:
    """The slot table is read once for every place in memory."""
    return _remembering(arguments, "slot_table")
