"""The gated delta rule of one sequence in other forms, equal in exact arithmetic: chunk by chunk, and as an affine map.

They share no line with the recurrence of ``kda.py``, against which they are tested.
"""

import torch
from torch import Tensor

ORDERS = ("wy", "inverse_last")


def _decayed_products(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """``[HV, C, C]``, ``sum_d a_i[d] b_j[d] exp(G_i[d] - G_j[d])`` for ``j <= i``, 0 above; no exponent is positive."""
    later = torch.ones(len(a), len(a), dtype=torch.bool, device=a.device).triu(1)
    exponents = (total[:, None] - total[None]).masked_fill(later[:, :, None, None], float("-inf"))
    return torch.einsum("ihd,jhd,ijhd->hij", a, b, exponents.exp())


def chunkwise_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float,
    chunk_size: int,
    order: str,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one sequence in chunks; return ``(out, final_state)``.

    Within a chunk, ``G`` the running sum of ``g``, ``b = diag(beta)``, ``A = b`` times the strictly lower part of the
    decayed products of keys, ``T = (I + A)^-1``, and ``P`` the lower part of those of queries and keys::

        wy            V' = T b v - (T b (k exp G)) S
        inverse_last  V' = T (b (v - (k exp G) S))

        O = scale ((q exp G) S + P V'),     S = diag(exp(G_C)) S + (k exp(G_C - G))^T V'

    All tensors have one floating dtype, and so have the results.

    Args:
        q: ``[T, HV, K]``.
        k: ``[T, HV, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``, natural log of the decay; finite, since sums of it are subtracted.
        beta: ``[T, HV]``.
        state: ``[HV, K, V]``.
        scale: Factor on the output.
        chunk_size: Tokens of a chunk; the last one may have fewer.
        order: ``wy`` or ``inverse_last``.

    Returns:
        ``out``, ``[T, HV, V]``, and the state after the last token.

    Raises:
        ValueError: If there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    out = torch.zeros_like(v)
    for start in range(0, len(q), chunk_size):
        rows = slice(start, start + chunk_size)
        # heads first: [HV, C, ...]
        queries, keys, values = (x[rows].transpose(0, 1) for x in (q, k, v))
        total, write = g[rows].cumsum(0), beta[rows].T[:, :, None]
        decay = total.transpose(0, 1).exp()
        gram = write * _decayed_products(k[rows], k[rows], total).tril(-1)
        inverse = torch.linalg.inv(gram + torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
        if order == "wy":
            new_values = inverse @ (write * values) - (inverse @ (write * (keys * decay))) @ state
        else:
            new_values = inverse @ (write * (values - (keys * decay) @ state))
        read = _decayed_products(q[rows], k[rows], total)
        out[rows] = scale * ((queries * decay) @ state + read @ new_values).transpose(0, 1)
        rest = (total[-1:] - total).transpose(0, 1).exp()
        state = decay[:, -1, :, None] * state + (keys * rest).transpose(1, 2) @ new_values
    return out, state


def affine_map(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """What a run of tokens does to a state, ``S -> M S + B``; return ``(M, B)``.

    ::

        M = prod_t (I - beta_t k_t k_t^T) diag(exp(g_t)),     B = the state that the run leaves of zero

    Later factors stand on the left. All tensors have one floating dtype, and so have the results.

    Args:
        k: ``[T, HV, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``, natural log of the decay.
        beta: ``[T, HV]``.

    Returns:
        ``M``, ``[HV, K, K]``, and ``B``, ``[HV, K, V]``.
    """
    _, heads, width = k.shape
    identity = torch.eye(width, dtype=k.dtype, device=k.device).expand(heads, width, width)
    matrix, added = identity, v.new_zeros(heads, width, v.shape[2])
    for t in range(len(k)):
        write = beta[t][:, None, None] * k[t][:, :, None]
        step = (identity - write * k[t][:, None, :]) * g[t].exp()[:, None, :]
        matrix, added = step @ matrix, step @ added + write * v[t][:, None, :]
    return matrix, added
