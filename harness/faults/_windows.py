"""A clean twin of ``token_scores`` in plain torch, made of small steps that a fault replaces one at a time.

Keys are projected and rounded to the dtype of the queries; all else is float32. All keys of a request at once.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._chunked import expand, gather, slots

NEVER = float("-inf")
IDENTITIES = {"logits": NEVER, "probability": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One request: its observed queries, its keys, and who may look where.

    Attributes:
        q: ``[w, H, D]``.
        k: ``[S, H, D]``.
        positions: ``[w]``, of the observed queries.
        candidates: ``(start, stop)``.
        softmax_scale: Factor on the logits.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    candidates: tuple[int, int]
    softmax_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One function per step, in the order in which they run.

    Attributes:
        slots: ``(slot_table, row, count)`` to the slots of a request.
        gather: ``(kv_c, k_pe, slots)`` to their rows.
        expand: ``(latent, rope, kv_b_proj, d_nope)`` to keys and values.
        observed: ``(start, stop, queries, context)`` to the observed half-open range of positions.
        candidates: ``(arguments, request, context)`` to the half-open range of candidates.
        products: ``(q, k)`` to ``[w, H, S]``, float32.
        eligible: ``(window, S)`` to ``[w, S]``, bool.
        logits: ``(products, eligible)`` to ``[S]``.
        probability: ``(products, eligible, window)`` to ``[S]``.
    """

    slots: Callable[[Tensor, int, int], Tensor]
    gather: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    expand: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    observed: Callable[[int, int, int, int], tuple[int, int]]
    candidates: Callable[[Mapping[str, Any], int, int], tuple[int, int]]
    products: Callable[[Tensor, Tensor], Tensor]
    eligible: Callable[[Window, int], Tensor]
    logits: Callable[[Tensor, Tensor], Tensor]
    probability: Callable[[Tensor, Tensor, Window], Tensor]


def observed(start: int, stop: int, queries: int, context: int) -> tuple[int, int]:
    """As asked."""
    return start, stop


def candidates(arguments: Mapping[str, Any], request: int, context: int) -> tuple[int, int]:
    """Ranges of their own, or all but the first and last tokens."""
    ranges = arguments["candidate_ranges"]
    if ranges is None:
        return int(arguments["candidate_start"]), context - int(arguments["recent_keep_tokens"])
    start, stop = ranges[request].tolist()
    return start, stop


def products(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled."""
    return torch.einsum("thd,shd->ths", q.float(), k.float())


def eligible(window: Window, count: int) -> Tensor:
    """Candidates that are no later than the query."""
    tokens = torch.arange(count, device=window.q.device)
    start, stop = window.candidates
    return (tokens <= window.positions[:, None]) & (tokens >= start) & (tokens < stop)


def logits(products: Tensor, eligible: Tensor) -> Tensor:
    """The highest over queries and heads."""
    return products.masked_fill(~eligible[:, None], NEVER).amax((0, 1))


def weights(products: Tensor, eligible: Tensor, window: Window) -> Tensor:
    """Softmax of each query and head over what it may look at; 0 where that is nothing."""
    z = (window.softmax_scale * products).masked_fill(~eligible[:, None], NEVER)
    return torch.softmax(z, dim=-1).masked_fill(~eligible.any(1)[:, None, None], 0.0)


def probability(products: Tensor, eligible: Tensor, window: Window) -> Tensor:
    """The mean over queries, then the maximum over heads."""
    return weights(products, eligible, window).mean(0).amax(0)


CLEAN = Steps(
    slots=slots,
    gather=gather,
    expand=expand,
    observed=observed,
    candidates=candidates,
    products=products,
    eligible=eligible,
    logits=logits,
    probability=probability,
)


def token_scores_twin(arguments: Mapping[str, Any], *, buffer: Tensor | None = None, **changes: Any) -> Tensor:
    """``token_scores`` with some steps changed.

    Args:
        arguments: Of the operation, by name.
        buffer: Where the scores go, as it is; one full of the mode's identity if None.
        changes: Steps by name, see ``Steps``.
    """
    steps, a = replace(CLEAN, **changes), arguments
    q, weight, mode = a["q"], a["kv_b_proj"], a["mode"]
    d_nope = q.shape[2] - a["k_pe"].shape[1]
    starts, rows, contexts = (a[name].tolist() for name in ("cu_seqlens", "request_rows", "context_lens"))
    shape = len(contexts), a["slot_table"].shape[1]
    scores = torch.full(shape, IDENTITIES[mode], device=q.device) if buffer is None else buffer
    parts = zip(itertools.pairwise(starts), rows, contexts, a["query_ranges"].tolist(), strict=True)
    for request, ((first, last), row, context, ranges) in enumerate(parts):
        start, stop = steps.observed(ranges[0], ranges[1], last - first, context)
        if start >= stop:
            continue
        latent, rope = steps.gather(a["kv_c"], a["k_pe"], steps.slots(a["slot_table"], row, context))
        k, _ = steps.expand(latent, rope, weight, d_nope)
        positions = torch.arange(start, stop, device=q.device)
        window = Window(
            q=q[positions - (context - (last - first)) + first],
            k=k,
            positions=positions,
            candidates=steps.candidates(a, request, context),
            softmax_scale=a["softmax_scale"],
        )
        inside, found = steps.eligible(window, context), steps.products(window.q, window.k)
        column = steps.logits(found, inside) if mode == "logits" else steps.probability(found, inside, window)
        scores[request, :context] = column
    return scores
