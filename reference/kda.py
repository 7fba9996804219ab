"""Kimi Delta Attention: gate, normalisation and the recurrence itself, one token at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

GATES = ("bounded", "softplus", "log")
# of a bounded gate
LEAST_LOWER_BOUND = -5.0
NORM_EPS = 1e-6


def normalised(x: Tensor) -> Tensor:
    """Divide by the Euclidean norm of the last axis, ``x / sqrt(sum x^2 + 1e-6)``; a zero row stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def log_decay(
    g: Tensor,
    *,
    gate: str,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Natural logarithm of the decay of each channel, at most 0.

    ::

        bounded    lower_bound * sigmoid(exp(A_log) * (g + dt_bias))
        softplus   -exp(A_log) * ln(1 + exp(g + dt_bias))
        log        g

    Args:
        g: ``[T, HV, K]``, raw logits; under ``log`` the decay itself.
        gate: ``bounded``, ``softplus`` or ``log``.
        A_log: ``[HV]``, dtype of ``g``, logarithm of an amplitude; None for an amplitude of 1. Not read under ``log``.
        dt_bias: ``[HV, K]``, dtype of ``g``, added to the logits; None for none. Not read under ``log``.
        lower_bound: Of the decay under ``bounded``, in ``[-5, 0)``; None else.

    Returns:
        ``[T, HV, K]``, dtype of ``g``.

    Raises:
        ValueError: If there is no such gate, a bounded one has no lower bound or one outside ``[-5, 0)``, or another
            has one.
    """
    if gate not in GATES:
        raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    if gate != "bounded" and lower_bound is not None:
        raise ValueError(f"lower_bound must be None for the gate {gate}, got {lower_bound}")
    if gate == "log":
        return g
    logits = g if dt_bias is None else g + dt_bias
    amplitude = g.new_ones(g.shape[1], 1) if A_log is None else A_log.exp()[:, None]
    if gate == "softplus":
        return -amplitude * torch.logaddexp(logits, torch.zeros_like(logits))
    if lower_bound is None:
        raise ValueError("lower_bound must be given for a bounded gate, got None")
    if not LEAST_LOWER_BOUND <= lower_bound < 0:
        raise ValueError(f"lower_bound must be in [{LEAST_LOWER_BOUND:g}, 0), got {lower_bound}")
    return lower_bound * torch.sigmoid(amplitude * logits)


def transformed(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: str,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    beta_is_logits: bool,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the recurrence takes: queries and keys of every value head, the log decay, the write strength.

    All tensors have one floating dtype, and so have the results.

    Args:
        q: ``[T, H, K]``; value head ``h`` uses head ``h // (HV / H)``, as of ``k``.
        k: ``[T, H, K]``.
        g: ``[T, HV, K]``.
        beta: ``[T, HV]``.
        gate: See ``log_decay``, as ``A_log``, ``dt_bias`` and ``lower_bound``.
        A_log: ``[HV]`` or None.
        dt_bias: ``[HV, K]`` or None.
        lower_bound: Or None.
        beta_is_logits: Whether ``beta`` goes through a sigmoid.
        qk_l2norm: Whether queries and keys are normalised.

    Returns:
        ``q`` and ``k``, ``[T, HV, K]``, ``g``, ``[T, HV, K]``, natural log, and ``beta``, ``[T, HV]``.

    Raises:
        ValueError: As ``log_decay``.
    """
    if qk_l2norm:
        q, k = normalised(q), normalised(k)
    group = g.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    g = log_decay(g, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    return q, k, g, torch.sigmoid(beta) if beta_is_logits else beta


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Apply the gated delta rule to one sequence; give ``(out, state)`` of one token after the other.

    Each head keeps a state ``S``, ``[K, V]``, a linear map from keys to values::

        S   = diag(exp(g_t)) S                     forget, each key channel at its own rate
        S   = S + beta_t k_t (v_t - S^T k_t)^T     correct what S recalls for k_t
        o_t = scale S^T q_t                        read

    All tensors have one floating dtype, and so have the results.

    Args:
        q: ``[T, HV, K]``.
        k: ``[T, HV, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``, natural log of the decay.
        beta: ``[T, HV]``, write strength.
        state: ``[HV, K, V]``, before the first token.
        scale: Factor on the output.

    Yields:
        ``o_t``, ``[HV, V]``, and the state after token ``t``, ``[HV, K, V]``.
    """
    for t in range(len(q)):
        state = g[t].exp()[:, :, None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        yield scale * torch.einsum("hkv,hk->hv", state, q[t]), state


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one sequence; return ``(out, final_state)``, arguments as in ``recurrence``."""
    out = torch.zeros_like(v)
    for t, (row, after) in enumerate(recurrence(q, k, v, g, beta, state, scale=scale)):
        out[t], state = row, after
    return out, state


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor,
    gate: str = "bounded",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_logits: bool = True,
    qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    checkpoints: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the gated delta rule to each sequence of a packed batch; return ``(out, final_state, checkpoint_states)``.

    The rule is that of ``recurrence``. A sequence without tokens hands its initial state on. Rows past the
    last sequence are read by nobody, and are zero in the output. All tensors but the integer ones have one floating
    dtype, and so have the results.

    Args:
        q: ``[T, H, K]``, packed; before normalisation, if ``qk_l2norm``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``; ``HV`` is a multiple of ``H``, and value head ``h`` uses head ``h // (HV / H)``.
        g: ``[T, HV, K]``, raw logits of the gate; under ``log`` the natural log of the decay, at most 0.
        beta: ``[T, HV]``, logits of the write strength, or itself.
        scale: Factor on the output, ``K ** -0.5`` in the models.
        cu_seqlens: ``[N + 1]``, integer; sequence ``n`` owns rows ``cu[n] .. cu[n + 1] - 1``.
        gate: ``bounded``, ``softplus`` or ``log``, see ``log_decay``.
        A_log: ``[HV]`` or None.
        dt_bias: ``[HV, K]`` or None.
        lower_bound: Of a bounded gate, in ``[-5, 0)``; None else.
        beta_is_logits: Whether ``beta`` goes through a sigmoid.
        qk_l2norm: Whether queries and keys are divided by ``sqrt(sum x^2 + 1e-6)``.
        initial_state: ``[N, HV, K, V]``; zeros without.
        checkpoints: ``[M, 2]``, integer: of which sequence, and after how many of its tokens, a state is wanted;
            0 for the initial one.

    Returns:
        ``out``, ``[T, HV, V]``, ``final_state``, ``[N, HV, K, V]``, and ``checkpoint_states``, ``[M, HV, K, V]``.

    Raises:
        ValueError: As ``log_decay``, or if there is not one initial state a sequence, or a checkpoint names a sequence
            or a number of tokens that there is not.

    Source: Kimi Linear (arXiv 2510.26692).
    """
    q, k, g, beta = transformed(
        q,
        k,
        g,
        beta,
        gate=gate,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        beta_is_logits=beta_is_logits,
        qk_l2norm=qk_l2norm,
    )
    bounds = cu_seqlens.tolist()
    size = len(bounds) - 1, v.shape[1], q.shape[2], v.shape[2]
    state = v.new_zeros(size) if initial_state is None else initial_state
    out, final_state = torch.zeros_like(v), torch.zeros_like(state)
    wanted = [] if checkpoints is None else checkpoints.tolist()
    if len(state) != size[0]:
        raise ValueError(f"initial_state must have {size[0]} states, one a sequence, got {len(state)}")
    for owner, tokens in wanted:
        if not (0 <= owner < size[0] and 0 <= tokens <= bounds[owner + 1] - bounds[owner]):
            raise ValueError(f"checkpoints must name a sequence and at most its tokens, got {[owner, tokens]}")
    checkpoint_states = state.new_zeros(len(wanted), *size[1:])
    for sequence in range(size[0]):
        first, current = bounds[sequence], state[sequence]
        rows = slice(first, bounds[sequence + 1])
        places = [(index, tokens) for index, (owner, tokens) in enumerate(wanted) if owner == sequence]
        _keep(checkpoint_states, places, 0, current)
        steps = recurrence(q[rows], k[rows], v[rows], g[rows], beta[rows], current, scale=scale)
        for t, (row, current) in enumerate(steps, start=1):
            out[first + t - 1] = row
            _keep(checkpoint_states, places, t, current)
        final_state[sequence] = current
    return out, final_state, checkpoint_states


def _keep(checkpoint_states: Tensor, places: list[tuple[int, int]], tokens: int, state: Tensor) -> None:
    """Write the state after so many tokens where it is wanted."""
    for index, wanted in places:
        if wanted == tokens:
            checkpoint_states[index] = state
