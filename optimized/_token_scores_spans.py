"""Which keys of each pass the observed queries of each request may look at.

Part of ``optimized/token_scores.py``; made by its plan.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ._mla_prefill_plan import MlaPrefillPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Keys of one pass that the observed queries of one request may look at, and those queries.

    The kernels read the fields in this order.

    Attributes:
        request: Row of the scores.
        first_key: Of the span, among the keys of the pass.
        num_keys: At least 1.
        position: Of the first key, among the tokens of the request.
        first_query: Row of the first observed query, in ``q`` or among the observed queries alone.
        query_position: Its position among the tokens of the request.
        num_queries: All observed queries of the request, those that see none of the keys included.
    """

    request: int
    first_key: int
    num_keys: int
    position: int
    first_query: int
    query_position: int
    num_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one request has observed: positions of its queries and of its candidates, half open; ``(0, 0)`` for none."""

    request: int
    window: tuple[int, int]
    candidates: tuple[int, int]

    @property
    def num_queries(self) -> int:
        """Observed queries."""
        return self.window[1] - self.window[0]

    def span(self, *, position: int, num_keys: int, first_key: int, first_query: int) -> Span | None:
        """The part of a stretch of keys that the observed queries may look at; None if there is none.

        Args:
            position: Of the first key of the stretch, among the tokens of the request.
            num_keys: Of the stretch.
            first_key: Its row among the keys of the pass.
            first_query: Row of the first observed query.
        """
        first = max(position, self.candidates[0])
        # the last observed query sees up to itself
        end = min(position + num_keys, self.candidates[1], self.window[1])
        if first >= end:
            return None
        return Span(
            request=self.request,
            first_key=first_key + first - position,
            num_keys=end - first,
            position=first,
            first_query=first_query,
            query_position=self.window[0],
            num_queries=self.num_queries,
        )


def expanded_spans(plan: MlaPrefillPlan, observations: list[Observation]) -> list[tuple[Span, ...]]:
    """Spans over the expanded keys of the current tokens of all requests, then of each history chunk."""
    query_lens = plan.current.query_lens
    current: list[Span | None] = []
    first_queries = []
    for seen, start in zip(observations, itertools.accumulate(query_lens, initial=0), strict=False):
        count = query_lens[seen.request]
        position = plan.context_lens[seen.request] - count
        first_queries.append(start + seen.window[0] - position)
        current.append(seen.span(position=position, num_keys=count, first_key=start, first_query=first_queries[-1]))
    history = [
        observations[chunk.request].span(
            position=chunk.offset,
            num_keys=len(chunk.slots),
            first_key=0,
            first_query=first_queries[chunk.request],
        )
        for chunk in plan.chunks
    ]
    return [tuple(span for span in spans if span is not None) for spans in (current, *([span] for span in history))]


def latent_spans(plan: MlaPrefillPlan, observations: list[Observation]) -> tuple[Span, ...]:
    """Spans over ``plan.slots``; queries are rows among the observed ones of all requests."""
    first_keys = itertools.accumulate(plan.context_lens, initial=0)
    first_queries = itertools.accumulate((seen.num_queries for seen in observations), initial=0)
    spans = [
        seen.span(position=0, num_keys=context, first_key=first_key, first_query=first_query)
        for seen, context, first_key, first_query in zip(
            observations, plan.context_lens, first_keys, first_queries, strict=False
        )
    ]
    return tuple(span for span in spans if span is not None)


def observed_rows(plan: MlaPrefillPlan, observations: list[Observation]) -> Tensor:
    """``[w]``, int64, rows of ``q`` of all observed queries, request by request."""
    ends = itertools.accumulate(plan.current.query_lens)
    rows = [
        torch.arange(*seen.window) + end - context
        for seen, end, context in zip(observations, ends, plan.context_lens, strict=True)
    ]
    return torch.cat(rows).to(plan.device)
