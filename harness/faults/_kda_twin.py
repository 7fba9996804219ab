"""A clean twin of the gated delta rule in chunks, every step exchangeable: what the faults of ``kda`` are made of."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Answer = tuple[Tensor, Tensor, Tensor]
# q, k, v, g, beta of some tokens, heads first, float32, and the state before them -> outputs and the state after them
Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK = 16
EPSILON = 1e-6


def normalised(x: Tensor) -> Tensor:
    """Rows of length 1, but for those that are next to nothing."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def log_decay(a: Arguments, g: Tensor) -> Tensor:
    """Natural log of the decay."""
    if a["gate"] == "log":
        return g
    logits = g if a["dt_bias"] is None else g + a["dt_bias"]
    amplitude = 1.0 if a["A_log"] is None else a["A_log"].exp()[:, None]
    if a["gate"] == "softplus":
        return -amplitude * torch.logaddexp(logits, torch.zeros_like(logits))
    decay: Tensor = a["lower_bound"] * torch.sigmoid(amplitude * logits)
    return decay


def strength(a: Arguments, beta: Tensor) -> Tensor:
    """How much of the error is written."""
    return beta.sigmoid() if a["beta_is_logits"] else beta


def grouped(x: Tensor, value_heads: int) -> Tensor:
    """Each key head for its group of value heads."""
    return x.repeat_interleave(value_heads // x.shape[1], dim=1)


def between(total: Tensor) -> Tensor:
    """Decay from token ``j`` to token ``i``, ``[h, i, j, K]``, 0 where ``i`` comes first."""
    later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
    return (total[:, :, None] - total[:, None]).masked_fill(later[:, :, None], -torch.inf).exp()


def inverse(gram: Tensor) -> Tensor:
    """Of ``1 + gram``, by substitution."""
    one = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    found: Tensor = torch.linalg.solve_triangular(one + gram, one.expand_as(gram), upper=False, unitriangular=True)
    return found


def same(x: Tensor) -> Tensor:
    """Nothing is rounded."""
    return x


def bfloat16(x: Tensor) -> Tensor:
    """Rounded once."""
    return x.bfloat16().float()


def cut_off(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 in half precision, towards zero."""
    nearest = x.to(dtype)
    larger = nearest.float().abs() > x.abs()
    # one less in the bits is the next number towards zero, whatever the sign
    return (nearest.view(torch.int16) - larger.short()).view(dtype)


def chunk_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    invert: Callable[[Tensor], Tensor] = inverse,
    decays: Callable[[Tensor], Tensor] = between,
    operand: Callable[[Tensor], Tensor] = same,
) -> tuple[Tensor, Tensor]:
    """A chunk at once, the inverse applied last; ``operand`` rounds what enters a product.

    Args:
        q: ``[h, C, K]``, scaled.
        k: ``[h, C, K]``.
        v: ``[h, C, V]``.
        g: ``[h, C, K]``.
        beta: ``[h, C]``.
        state: ``[h, K, V]``.
        invert: Of the triangle.
        decays: Between the tokens, from the sums of log decays.
        operand: A format.
    """
    total = g.double().cumsum(1)
    start, end = total.exp().float(), (total[:, -1:] - total).exp().float()
    decay = decays(total).float()
    gram = beta[:, :, None] * torch.einsum("hid,hjd,hijd->hij", k, k, decay).tril(-1)
    seen = operand(state)
    error = beta[:, :, None] * (v - operand(k * start) @ seen)
    written = operand(operand(invert(gram)) @ operand(error))
    read = operand(torch.einsum("hid,hjd,hijd->hij", q, k, decay).tril())
    out = operand(q * start) @ seen + read @ written
    return out, start[:, -1, :, None] * state + operand(k * end).mT @ written


def token_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        error = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t]))
        state = state + k[:, t, :, None] * error[:, None]
        out[:, t] = torch.einsum("hkv,hk->hv", state, q[:, t])
    return out, state


def transformed(
    a: Arguments,
    rows: slice,
    *,
    normalise: Callable[[Tensor], Tensor] = normalised,
    decay: Callable[[Arguments, Tensor], Tensor] = log_decay,
    strengthen: Callable[[Arguments, Tensor], Tensor] = strength,
    group: Callable[[Tensor, int], Tensor] = grouped,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``q, k, v, g, beta`` of some rows, heads first; ``q`` is scaled."""
    q, k, v, g, beta = (a[name][rows].float() for name in ("q", "k", "v", "g", "beta"))
    if a["qk_l2norm"]:
        q, k = normalise(q), normalise(k)
    q, k = (group(x, v.shape[1]) for x in (q * a["scale"], k))
    g, beta = decay(a, g), strengthen(a, beta)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), g.transpose(0, 1), beta.T


def initial_state(a: Arguments, sequence: int) -> Tensor:
    """Of a sequence, ``[HV, K, V]``, float32."""
    if a["initial_state"] is None:
        return torch.zeros(a["v"].shape[1], a["q"].shape[2], a["v"].shape[2], device=a["v"].device)
    state: Tensor = a["initial_state"][sequence].float()
    return state


def kda_twin(
    a: Arguments,
    *,
    chunk: int = CHUNK,
    step: Step = chunk_step,
    enter: Callable[[Arguments, int], Tensor] = initial_state,
    carry: Callable[[Tensor], Tensor] = same,
    **transforms: Any,
) -> Answer:
    """The clean twin: sequence by sequence, chunk by chunk; each chunk ends where a state is kept.

    Args:
        a: Of a kernel.
        chunk: Tokens of a chunk.
        step: What a chunk does.
        enter: With what a sequence begins.
        carry: What becomes of a state between two chunks.
        transforms: Of ``transformed``.
    """
    out, final, kept = empty_answer(a)
    out.zero_()
    bounds = a["cu_seqlens"].tolist()
    for sequence, (start, stop) in enumerate(itertools.pairwise(bounds)):
        state = enter(a, sequence)
        places = places_of(a, sequence)
        for first, last in chunks(stop - start, chunk, [tokens for tokens, _ in places]):
            rows = slice(start + first, start + last)
            keep(kept, places, first, state)
            if last > first:
                answer, state = step(*transformed(a, rows, **transforms), state)
                out[rows] = answer.transpose(0, 1).to(out.dtype)
                state = carry(state)
        keep(kept, places, stop - start, state)
        final[sequence] = state.to(final.dtype)
    return out, final, kept


def empty_answer(a: Arguments) -> Answer:
    """Memory for all results, uninitialised."""
    heads, widths = a["v"].shape[1], (a["q"].shape[2], a["v"].shape[2])
    count, wanted = len(a["cu_seqlens"]) - 1, 0 if a["checkpoints"] is None else len(a["checkpoints"])
    options = {"dtype": a["state_dtype"], "device": a["v"].device}
    # like the kernels of the house, of a view into wider rows as well
    out = torch.empty(a["v"].shape, dtype=a["v"].dtype, device=a["v"].device)
    return out, torch.empty(count, heads, *widths, **options), torch.empty(wanted, heads, *widths, **options)


def places_of(a: Arguments, sequence: int) -> list[tuple[int, int]]:
    """``(tokens, index)`` of the states of a sequence that are kept."""
    wanted = [] if a["checkpoints"] is None else a["checkpoints"].tolist()
    return [(tokens, index) for index, (owner, tokens) in enumerate(wanted) if owner == sequence]


def chunks(length: int, chunk: int, stops: list[int]) -> list[tuple[int, int]]:
    """Where chunks begin and end: full ones from every stop on."""
    edges = sorted({0, length, *stops})
    cut = [range(first, last, chunk) for first, last in itertools.pairwise(edges)]
    begins = [begin for part in cut for begin in part]
    return list(itertools.pairwise([*begins, length]))


def keep(kept: Tensor, places: list[tuple[int, int]], tokens: int, state: Tensor) -> None:
    """Store the state after so many tokens where it is wanted."""
    for wanted, index in places:
        if wanted == tokens:
            kept[index] = state.to(kept.dtype)
