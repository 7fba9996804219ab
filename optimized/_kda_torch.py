"""The clean torch twin of ``kda``: one chunk of one sequence after the other, float32 throughout.

Part of ``optimized/kda.py``; call it from there. Float64 inputs are computed in float64.
"""

import itertools

import torch
from torch import Tensor

from ._kda_checks import Layer
from ._kda_plan import KdaBatch
from ._kda_shape import KdaShape

CHUNK = 32
NORM_EPS = 1e-6


def refusal(shape: KdaShape) -> str | None:
    """None: any device, dtype, size and gate is served."""
    return None


def strides_refusal(layer: Layer) -> str | None:
    """None: any strides are served."""
    return None


def parts(shape: KdaShape, max_tokens: int, max_sequences: int, max_checkpoints: int) -> dict[str, object]:
    """Nothing: what a chunk needs is made anew."""
    return {}


def log_decay(layer: Layer, rows: slice, shape: KdaShape, dtype: torch.dtype) -> Tensor:
    """Natural log of the decay of some rows, ``[C, HV, K]``."""
    g = layer.g[rows].to(dtype)
    if shape.gate == "log":
        return g
    if layer.dt_bias is not None:
        g = g + layer.dt_bias
    amplitude = 1.0 if layer.A_log is None else layer.A_log.exp()[:, None]
    if shape.gate == "softplus":
        return -amplitude * torch.logaddexp(g, torch.zeros_like(g))
    # a bounded gate has one, as the shape has checked
    return float(shape.lower_bound or 0.0) * torch.sigmoid(amplitude * g)


def transformed(layer: Layer, rows: slice, shape: KdaShape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, log decay and write strength of some rows, heads first, in the wide dtype."""
    dtype = shape.parameter_dtype
    q, k, v, beta = (x[rows].to(dtype) for x in (layer.q, layer.k, layer.v, layer.beta))
    if shape.qk_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    if shape.beta_is_logits:
        beta = torch.sigmoid(beta)
    group = shape.num_v_heads // shape.num_heads
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * layer.scale, k))
    g = log_decay(layer, rows, shape, dtype)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), g.transpose(0, 1), beta.T


def chunk_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output of a chunk and the state after it, of all heads.

    Args:
        q: ``[HV, C, K]``, scaled.
        k: ``[HV, C, K]``.
        v: ``[HV, C, V]``.
        g: ``[HV, C, K]``, natural log of the decay.
        beta: ``[HV, C]``.
        state: ``[HV, K, V]``, before the chunk.
    """
    # sums of a sequence of decays differ by little where some are huge, so they are made in float64
    total = g.double().cumsum(1)
    from_start, to_end = total.exp().to(g.dtype), (total[:, -1:] - total).exp().to(g.dtype)
    later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later[:, :, None], float("-inf")).exp().to(g.dtype)
    gram = beta[:, :, None] * torch.einsum("hid,hjd,hijd->hij", k, k, between).tril(-1)
    identity = torch.eye(g.shape[1], dtype=g.dtype, device=g.device)
    error = beta[:, :, None] * (v - (k * from_start) @ state)
    values = torch.linalg.solve_triangular(identity + gram, error, upper=False, unitriangular=True)
    read = torch.einsum("hid,hjd,hijd->hij", q, k, between).tril()
    out = (q * from_start) @ state + read @ values
    return out, from_start[:, -1, :, None] * state + (k * to_end).transpose(1, 2) @ values


def forward(layer: Layer, initial: Tensor | None, final: Tensor, checkpoints: Tensor, batch: KdaBatch) -> None:
    """Write the output, the states after the last tokens, and those that are kept on the way."""
    shape, start = batch.plan.shape, 0
    for sequence, length in enumerate(batch.lengths):
        state = layer.q.new_zeros(final.shape[1:], dtype=shape.parameter_dtype)
        if initial is not None:
            state = initial[sequence].to(shape.parameter_dtype)
        kept = sorted((tokens, index) for index, (owner, tokens) in enumerate(batch.checkpoints) if owner == sequence)
        for place, stop in itertools.pairwise([0, *[tokens for tokens, _ in kept], length]):
            for first in range(start + place, start + stop, CHUNK):
                rows = slice(first, min(first + CHUNK, start + stop))
                answer, state = chunk_step(*transformed(layer, rows, shape), state)
                layer.out[rows] = answer.transpose(0, 1).to(layer.out.dtype)
            for tokens, index in kept:
                if tokens == stop:
                    checkpoints[index] = state.to(checkpoints.dtype)
        final[sequence] = state.to(final.dtype)
        start += length
