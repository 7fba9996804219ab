"""The clean twin of ``masked_mha`` in plain torch, made of small steps that a fault replaces one at a time.

Precision as in ``_chunked``, whose steps are used wherever the mask plays no part.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import _chunked
from ._chunked import NEVER, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a request's rows and columns are.

    Attributes:
        request: Its number.
        queries: Its rows of the queries.
        keys: Its rows of the keys.
        first_query: Position of its first query, counted from bit 0.
        first_key: Position of its first key.
    """

    request: int
    queries: slice
    keys: slice
    first_query: int
    first_key: int

    @property
    def num_queries(self) -> int:
        """``n``."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        """``m``."""
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSteps:
    """One function per step, in the order in which they run.

    Attributes:
        spans: The arguments to the spans of the requests.
        heads: ``([m, H_kv, D], H)`` to ``[m, H, D]``, the keys or values of each query head.
        words: ``(mask, span)`` to the words of the request's queries, ``[n, W]``.
        bits: ``(words, first_key, num_keys)`` to the bits of the keys, ``[n, m]``, bool.
        past: ``span`` to whether a key is in a query's past, ``[n, m]``, bool.
        logits: ``(q, k, softmax_scale)`` to ``[n, H, m]``, float32.
        mask: ``(logits, causal)`` to logits, as in ``attention``; here causality comes later, so nothing is hidden yet.
        hide: ``(logits, selected, past)`` to logits that are ``-inf`` where a query must not look.
        softmax: ``(logits, v)`` to ``out``, ``[n, H, Dv]``, and ``lse``, ``[n, H]``, both float32.
        finish: ``(out, lse, dtype)`` to what is returned for a request.
    """

    spans: Callable[[Mapping[str, Any]], Iterable[Span]]
    heads: Callable[[Tensor, int], Tensor]
    words: Callable[[Tensor, Span], Tensor]
    bits: Callable[[Tensor, int, int], Tensor]
    past: Callable[[Span], Tensor]
    logits: Callable[[Tensor, Tensor, float], Tensor]
    mask: Callable[[Tensor, bool], Tensor]
    hide: Callable[[Tensor, Tensor, Tensor], Tensor]
    softmax: Callable[[Tensor, Tensor], State]
    finish: Callable[[Tensor, Tensor, torch.dtype], State]


def spans(arguments: Mapping[str, Any]) -> list[Span]:
    """As the offsets and positions say."""
    ends = (itertools.starmap(slice, itertools.pairwise(arguments[f"cu_seqlens_{of}"].tolist())) for of in "qk")
    starts = (arguments[f"{of}_starts"].tolist() for of in ("query", "key"))
    return [
        Span(request=request, queries=queries, keys=keys, first_query=query, first_key=key)
        for request, (queries, keys, query, key) in enumerate(zip(*ends, *starts, strict=True))
    ]


def words(mask: Tensor, span: Span) -> Tensor:
    """A row for each query of the batch."""
    return mask[span.queries]


def bits(words: Tensor, first_key: int, num_keys: int) -> Tensor:
    """Key ``s`` has bit ``(first_key + s) & 31`` of word ``(first_key + s) >> 5``."""
    key = torch.arange(first_key, first_key + num_keys, device=words.device)
    return (words[:, key >> 5] >> (key & 31)) & 1 == 1


def past(span: Span) -> Tensor:
    """Positions are compared, whatever chunk of the keys this is."""
    key = torch.arange(span.num_keys) + span.first_key
    return key <= (torch.arange(span.num_queries) + span.first_query)[:, None]


def hide(logits: Tensor, selected: Tensor, past: Tensor) -> Tensor:
    """``-inf`` where a key is not selected, or not in the past."""
    return logits.masked_fill(~(selected & past.to(selected.device))[:, None], NEVER)


CLEAN = MaskedSteps(
    spans=spans,
    heads=_chunked.heads,
    words=words,
    bits=bits,
    past=past,
    logits=_chunked.logits,
    mask=_chunked.mask,
    hide=hide,
    softmax=_chunked.softmax,
    finish=_chunked.finish,
)


def masked_twin(arguments: Mapping[str, Any], **changes: Any) -> State:
    """``masked_mha`` with some steps changed.

    Args:
        arguments: Of the operation, by name.
        changes: Steps by name, see ``MaskedSteps``.
    """
    steps, a = replace(CLEAN, **changes), arguments
    q, k, v = a["q"], a["k"], a["v"]
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for span in steps.spans(a):
        own_k, own_v = (steps.heads(tensor[span.keys], q.shape[1]) for tensor in (k, v))
        scores = steps.mask(steps.logits(q[span.queries], own_k, a["softmax_scale"]), False)
        selected = steps.bits(steps.words(a["mask"], span), span.first_key, span.num_keys)
        part = steps.softmax(steps.hide(scores, selected, steps.past(span)), own_v)
        out[span.queries], lse[span.queries] = steps.finish(*part, q.dtype)
    return out, lse


def word_by_word(words: Tensor, first_key: int, num_keys: int) -> Tensor:
    """The bits from ``first_key`` on, 32 keys at a time: the end of one word and the beginning of the next."""
    shift, first = first_key & 31, first_key >> 5
    count = -(-num_keys // 32)
    wide = torch.nn.functional.pad(words, (0, 2)).long() & 0xFFFFFFFF
    low, high = wide[:, first : first + count], wide[:, first + 1 : first + 1 + count]
    return unpacked((low >> shift) | (high << (32 - shift)), num_keys)


def unpacked(words: Tensor, num_keys: int) -> Tensor:
    """The first ``num_keys`` bits of words of 32 keys, from bit 0 of each on."""
    return ((words[..., None] >> torch.arange(32, device=words.device)) & 1 == 1).flatten(1)[:, :num_keys]
