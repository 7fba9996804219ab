"""Who the tokens of a batch are, and which of them hold no number. Part of ``harness/families.py``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Who the packed keys and queries of a batch are.

    Attributes:
        ramp: ``[S]``, position of each key within its request, from -1 to 1.
        targets: ``[T]``, one packed key that each query may see, -1 where it sees none.
        visible: ``[T]``, how many it may see.
        twins: ``[S]``, the key as far from the end of its request as this one is from the beginning; itself where there
            are only two.
        shared: ``[S]``, the key whose place in the cache this one has: its own, or that of another request's prefix.
    """

    ramp: Tensor
    targets: Tensor
    visible: Tensor
    twins: Tensor
    shared: Tensor


def tokens_of(
    query_lens: list[int],
    key_lens: list[int],
    *,
    causal: bool,
    generator: torch.Generator,
    prefixes: list[int] | None = None,
) -> Tokens:
    """Lay out a packed batch, and draw for each query a visible key, the last one for every other query.

    Args:
        query_lens: Queries of each request.
        key_lens: Keys of each request.
        causal: Whether a query is barred from later keys.
        generator: Of the draw.
        prefixes: Keys at the start of each request that it shares with the request before; None for none.
    """
    ramps, targets, visible, twins, shared, start, before = [], [], [], [], [], 0, 0
    for at, (n, m) in enumerate(zip(query_lens, key_lens, strict=True)):
        ramps.append(torch.linspace(-1, 1, m) if m > 1 else torch.ones(m))
        last_key = torch.arange(n) + m - n if causal else torch.full((n,), m - 1)
        drawn = (torch.rand(n, generator=generator) * (last_key + 1)).long()
        chosen = torch.where(torch.arange(n) % 2 == 0, last_key, drawn)
        targets.append(torch.where(last_key < 0, -1, chosen + start))
        visible.append((last_key + 1).clamp(min=0))
        keys, prefix = torch.arange(m), 0 if prefixes is None else prefixes[at]
        # two keys that are equal would give all queries the same answer, and the same error
        twins.append(start + (m - 1 - keys if m > 2 else keys))
        shared.append(torch.where(keys < prefix, before, start) + keys)
        start, before = start + m, start
    return Tokens(
        ramp=torch.cat(ramps),
        targets=torch.cat(targets),
        visible=torch.cat(visible),
        twins=torch.cat(twins),
        shared=torch.cat(shared),
    )


def shared_prefixes(query_lens: list[int], context_lens: list[int]) -> list[int]:
    """Keys that each request shares with the one before: for every other one most of the history that both have."""
    histories = [c - n for n, c in zip(query_lens, context_lens, strict=True)]
    pairs = zip([0, *histories], histories, strict=False)
    return [-(-3 * min(pair) // 4) if at % 2 else 0 for at, pair in enumerate(pairs)]


def visible_nan(family: str, query_lens: list[int], key_lens: list[int]) -> tuple[int, int] | None:
    """Request and position of the key that is NaN in ``visible-nan``, or None; all queries of the request see it."""
    return key_seen_by_all(query_lens, key_lens) if family == "visible-nan" else None


def key_seen_by_all(query_lens: list[int], key_lens: list[int]) -> tuple[int, int] | None:
    """A key of the request with the fewest queries that all of them see, or None if there is none.

    A key that causality hides from some queries of its tile is not asked about: weight 0 times NaN is NaN in the
    mathematics, too.
    """
    fitting = [at for at, (n, m) in enumerate(zip(query_lens, key_lens, strict=True)) if 1 <= n <= m]
    if not fitting:
        return None
    request = min(fitting, key=lambda at: query_lens[at])
    return request, (key_lens[request] - query_lens[request]) // 2


def nonfinite_dims(d_v: int) -> dict[int, float]:
    """Dimensions of a value that hold no finite number in ``nonfinite-v``: NaN last, then the infinities."""
    return dict(zip(dict.fromkeys((d_v - 1, 0, d_v // 2)), (math.nan, math.inf, -math.inf), strict=False))
