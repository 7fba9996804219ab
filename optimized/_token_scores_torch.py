"""The clean torch twin of ``token_scores``: one request and one head at a time, the precision of the kernels.

Part of ``optimized/token_scores.py``; call it from there.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._mla_prefill_plan import MlaPrefillPlan
from ._token_scores_spans import Span

if TYPE_CHECKING:
    from ._token_scores_collect import LatentScan

NEVER = float("-inf")


def refusal(plan: MlaPrefillPlan) -> str | None:
    """None: any device, dtype, size and length is served."""
    return None


def prepare(spans: tuple[Span, ...], plan: MlaPrefillPlan) -> None:
    """Nothing: the spans say it all."""


def scratch_bytes(prepared: None) -> int:
    """0: the float32 copies of one head at a time are not counted."""
    return 0


def raise_to_logits(scores: Tensor, q: Tensor, k: Tensor, spans: tuple[Span, ...], prepared: None) -> None:
    """Raise the score of each key of the spans to its highest product with an observed query that may look at it.

    Args:
        scores: ``[N, max_context]``, float32 or float64; raised.
        q: ``[T, H, Dq]``.
        k: ``[n, H, Dq]``, the keys of the pass.
        spans: Of the pass.
        prepared: None.
    """
    for span in spans:
        hidden = _hidden(span, 0, span.num_keys, scores.device)
        target = scores[span.request, span.position : span.position + span.num_keys]
        for head in range(q.shape[1]):
            queries = q[_queries(span), head].to(scores.dtype)
            logits = queries @ k[span.first_key : span.first_key + span.num_keys, head].to(scores.dtype).T
            target.copy_(torch.maximum(target, logits.masked_fill(hidden, NEVER).amax(0)))


def denominators(scan: "LatentScan", spans: tuple[Span, ...], prepared: None) -> Tensor:
    """Log-sum-exp of each observed query and head over the keys of the spans that it may look at.

    Blocks of keys are joined by their log-sum-exp, never by weights of their own.

    Args:
        scan: Queries and cache.
        spans: One for each request that has any.
        prepared: None.

    Returns:
        ``[w, H]``, natural log of the scaled logits; ``-inf`` where a query may look at none.
    """
    wide = torch.promote_types(scan.absorbed.dtype, torch.float32)
    lse = torch.full(scan.absorbed.shape[:2], NEVER, dtype=wide, device=scan.absorbed.device)
    for span in spans:
        for first, stop in _blocks(span, scan.block_size):
            for head in range(lse.shape[1]):
                row = lse[_queries(span), head]
                row.copy_(torch.logaddexp(row, torch.logsumexp(_latent_logits(scan, span, first, stop, head), 1)))
    return lse


def write_probabilities(
    scores: Tensor, scan: "LatentScan", lse: Tensor, spans: tuple[Span, ...], prepared: None
) -> None:
    """Write the mean weight over the observed queries of a request, at most over the heads, of each key of the spans.

    Args:
        scores: ``[N, max_context]``, float32 or float64; written where the spans are.
        scan: Queries and cache.
        lse: ``[w, H]``, natural log: the denominators.
        spans: One for each request that has any.
        prepared: None.
    """
    for span in spans:
        for first, stop in _blocks(span, scan.block_size):
            highest = torch.zeros(stop - first, dtype=scores.dtype, device=scores.device)
            for head in range(lse.shape[1]):
                logits = _latent_logits(scan, span, first, stop, head)
                weights = torch.exp(logits - lse[_queries(span), head, None])
                # a query that may look at nothing has no denominator either
                total = weights.masked_fill(logits == NEVER, 0.0).sum(0)
                highest = torch.maximum(highest, total)
            scores[span.request, span.position + first : span.position + stop] = highest / span.num_queries


def _latent_logits(scan: "LatentScan", span: Span, first: int, stop: int, head: int) -> Tensor:
    """``[queries, stop - first]``, scaled logits of one head in the dtype of accumulation, ``-inf`` where hidden."""
    wide = torch.promote_types(scan.absorbed.dtype, torch.float32)
    slots = scan.slots[span.first_key + first : span.first_key + stop]
    queries = _queries(span)
    logits = scan.absorbed[queries, head].to(wide) @ scan.kv_c.index_select(0, slots).to(wide).T
    logits = logits + scan.rope[queries, head].to(wide) @ scan.k_pe.index_select(0, slots).to(wide).T
    return (scan.softmax_scale * logits).masked_fill(_hidden(span, first, stop, logits.device), NEVER)


def _queries(span: Span) -> slice:
    """Rows of the observed queries."""
    return slice(span.first_query, span.first_query + span.num_queries)


def _blocks(span: Span, size: int) -> list[tuple[int, int]]:
    """The keys of a span, ``size`` at a time."""
    return [(first, min(first + size, span.num_keys)) for first in range(0, span.num_keys, size)]


def _hidden(span: Span, first: int, stop: int, device: torch.device) -> Tensor:
    """``[queries, stop - first]``, True where a key lies in the future of a query."""
    queries = torch.arange(span.num_queries, device=device) + span.query_position
    return torch.arange(span.position + first, span.position + stop, device=device) > queries[:, None]
