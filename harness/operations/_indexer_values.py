"""Index queries, keys and weights by family: drawn ones, and whole numbers whose scores no honest kernel rounds."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..case import Case

# scores that no arithmetic rounds: every key its own one; the later the higher; few different ones; all of them 0
EXACT_FAMILIES = ("exact-codes", "exact-rising", "exact-ties", "exact-dead")
# weights of either sign; above 0 as of trained models; below 0, so that no score is above 0; neighbouring keys alike;
# all keys a few roundings apart; products beyond what half precision holds
FAMILIES = ("diffuse", "positive", "negative", "clustered", "near", "large", *EXACT_FAMILIES)
CLUSTER = 8
# a code is two digits to this base: whole numbers that every dtype holds
BASE = 64

Values = tuple[Tensor, Tensor, Tensor]


def drawn_values(case: Case) -> Values:
    """``q``, ``[T, H, D]``, ``k``, ``[S, D]``, both in the dtype of the case, and ``weights``, ``[T, H]``, float32.

    Queries that see no key, and keys that no query sees, are NaN.

    Raises:
        ValueError: If there is no such family, or a code does not fit in a head.
    """
    if case.family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {case.family!r}")
    sizes, dtype = case.sizes, getattr(torch, case.dtype)
    if case.family in ("exact-codes", "exact-rising") and sizes["head_dim"] < 3:
        raise ValueError(f"head_dim must be at least 3 for a code of three digits, got {sizes['head_dim']}")
    generator = torch.Generator().manual_seed(case.seed)
    draw = _EXACT.get(case.family, _rounded)
    parts = []
    for n, m in zip(sizes["query_lens"], sizes["key_lens"], strict=True):
        q, k, weights = draw(case, n, m, generator)
        blind = torch.arange(n) + m - n < 0
        q[blind], weights[blind] = math.nan, math.nan
        parts.append((q.to(dtype), k.to(dtype) if n else torch.full_like(k, math.nan).to(dtype), weights.float()))
    q, k, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return q, k, weights


def _rounded(case: Case, n: int, m: int, generator: torch.Generator) -> Values:
    heads, width = case.sizes["num_heads"], case.sizes["head_dim"]
    q, k, weights = (torch.randn(size, generator=generator) for size in ((n, heads, width), (m, width), (n, heads)))
    weights *= (heads * width) ** -0.5
    if case.family == "positive":
        weights = weights.abs()
    elif case.family == "negative":
        weights = -weights.abs()
    elif case.family == "clustered":
        k = k[torch.arange(m) // CLUSTER] + 0.05 * k
    elif case.family == "near":
        # as far apart, all in all, as the roundings of a float32 score may hide; half precision knows no steps so small
        eps, steps = torch.finfo(getattr(torch, case.dtype)).eps, 64 if case.dtype == "float32" else 2
        # the first head sees them all
        q[:, 0] *= torch.where(q[:, 0] @ k[:1].T < 0, -1.0, 1.0)
        k = k[:1] * (1 + eps * torch.randint(-steps, steps + 1, k.shape, generator=generator))
    elif case.family == "large":
        q, k = 128 * q, 128 * k
    return q, k, weights


def _codes(case: Case, n: int, m: int, generator: torch.Generator) -> Values:
    """Key ``s`` scores a number of its own; each query its scores, or their negatives, times a power of two."""
    order = torch.randperm(m, generator=generator)
    q, k, weights = _coded(case, n, order)
    weights *= 1 - 2 * torch.randint(2, (n, 1), generator=generator)
    return q, k, weights * torch.exp2(torch.randint(-3, 4, (n, 1), generator=generator).float())


def _rising(case: Case, n: int, m: int, generator: torch.Generator) -> Values:
    """Each key scores more than all before it: a query's best one is itself, the next best one its future."""
    return _coded(case, n, torch.arange(m))


def _coded(case: Case, n: int, scores: Tensor) -> Values:
    """Three digits to the base of 64, each of which another head reads as far as there are heads; all else is 0."""
    heads, width = case.sizes["num_heads"], case.sizes["head_dim"]
    q, k, weights = torch.zeros(n, heads, width), torch.zeros(len(scores), width), torch.zeros(n, heads)
    for digit in range(3):
        head = digit % heads
        k[:, digit] = (scores // BASE**digit % BASE).float()
        q[:, head, digit] = float(BASE**digit)
        weights[:, head] = 1.0
    return q, k, weights


def _ties(case: Case, n: int, m: int, generator: torch.Generator) -> Values:
    """Whole numbers from -1 to 1: many scores are equal, of either sign and 0."""
    heads, width = case.sizes["num_heads"], case.sizes["head_dim"]
    q, k, weights = (
        torch.randint(-1, 2, size, generator=generator).float() for size in ((n, heads, width), (m, width), (n, heads))
    )
    # some head has a say
    weights[:, 0] = 1.0 - 2.0 * torch.randint(2, (n,), generator=generator)
    return q, k, weights


def _dead(case: Case, n: int, m: int, generator: torch.Generator) -> Values:
    """No product is above 0, so that every score is 0, whatever the weights; some are -0 in floating point."""
    q, k, weights = _ties(case, n, m, generator)
    return q.abs(), -k.abs(), weights


_EXACT: dict[str, Callable[[Case, int, int, torch.Generator], Values]] = {
    "exact-codes": _codes,
    "exact-rising": _rising,
    "exact-ties": _ties,
    "exact-dead": _dead,
}
