"""Kimi Delta Attention over packed sequences: chunk by chunk, from and to states of the caller."""

import torch
from torch import Tensor

from ._kda_checks import check_distinct, check_layer, check_states, overlap
from ._kda_plan import (
    IMPLEMENTATIONS,
    KdaBatch,
    KdaPlan,
    find_implementation,
    plan_kda,
    plan_kda_batch,
    resolve_implementation,
)
from ._kda_shape import Gate, KdaShape, StateLayout

__all__ = [
    "IMPLEMENTATIONS",
    "Gate",
    "KdaBatch",
    "KdaPlan",
    "KdaShape",
    "StateLayout",
    "find_implementation",
    "kda",
    "plan_kda",
    "plan_kda_batch",
    "resolve_implementation",
]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    batch: KdaBatch,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the gated delta rule to each sequence of a batch; return ``(out, final_state, checkpoint_states)``.

    For each token of a sequence, with the log decay ``g_t`` after the gate and ``beta_t`` after the sigmoid::

        S   = diag(exp(g_t)) S
        S   = S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    A sequence without tokens hands its initial state on. Rows past the last sequence are not read, and become zero in
    the output. Nothing that follows a row in its sequence, or lies in another one, reaches its bits, as long as it is
    finite: a NaN may show in the chunk before it. The call never synchronises and can be captured.

    Args:
        q: ``[T, H, K]``, dtype of the shape, packed; may be columns of wider rows, read in place.
        k: ``[T, H, K]``, likewise.
        v: ``[T, HV, V]``, likewise; value head ``h`` uses key head ``h // (HV / H)``.
        g: ``[T, HV, K]``, dtype of ``q`` or float32; logits of the gate, under ``log`` the natural log of the decay,
            which must be at most 0.
        beta: ``[T, HV]``, dtype of ``q`` or float32; logits of the write strength, or itself.
        scale: Factor on the output, a finite number of the host; ``K ** -0.5`` in the models.
        batch: Of ``plan_kda_batch``.
        A_log: ``[HV]``, float32 (float64 for float64); logarithm of the gate's amplitude, None for 1.
        dt_bias: ``[HV, K]``, float32 (float64 for float64); added to the logits of the gate, None for none.
        initial_state: ``[N, HV, K, V]`` or ``[N, HV, V, K]``, as the shape says, like its dtype; zeros without.
        final_state: Where the states after the last tokens go; ``initial_state`` itself, memory of its own, or None for
            a new tensor.
        checkpoint_states: ``[M, ...]``, where the states that the batch keeps go; None for a new tensor.
        out: ``[T, HV, V]``, dtype of ``q``, where the output goes; may be columns of wider rows. A new tensor without.

    Returns:
        The output and the states.

    Raises:
        ValueError: If a shape or device disagrees with the plan, or a result shares memory that it must not share.
        TypeError: If a dtype disagrees with the plan.
        NotImplementedError: If the implementation does not serve these strides.

    Precision: norms, gates, sums of log decays, the inverse of the chunk's triangle and the state are float32, and the
    prediction is taken off the value before it is rounded. ``torch`` rounds nothing else; ``triton`` multiplies in
    tf32, rounded to nearest, for half-precision inputs, the inverse apart, and in float32 for float32; ``flash``
    multiplies in bfloat16 and float16.
    Deterministic. Oracle: ``reference.kda.kda``.
    """
    plan, shape = batch.plan, batch.plan.shape
    layer = check_layer(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        out=out,
        shape=shape,
        num_tokens=batch.num_tokens,
    )
    count, kept = len(batch.lengths), len(batch.checkpoints)
    initial = (
        None if initial_state is None else check_states("initial_state", initial_state, count, shape, written=False)
    )
    if final_state is None:
        final_state = torch.empty(shape.state_size(count), dtype=shape.state_dtype, device=q.device)
    if checkpoint_states is None:
        checkpoint_states = torch.empty(shape.state_size(kept), dtype=shape.state_dtype, device=q.device)
    final = check_states("final_state", final_state, count, shape, written=True)
    states = check_states("checkpoint_states", checkpoint_states, kept, shape, written=True)
    _check_apart(final_state, checkpoint_states, layer.out, initial_state)
    reason = plan.module.strides_refusal(layer)
    if reason is not None:
        raise NotImplementedError(f"implementation {plan.implementation!r} does not serve these tensors; {reason}")
    plan.module.forward(layer, initial, final, states, batch)
    if batch.num_tokens < len(layer.out):
        layer.out[batch.num_tokens :].zero_()
    return layer.out, final_state, checkpoint_states


def _check_apart(final: Tensor, checkpoints: Tensor, out: Tensor, initial: Tensor | None) -> None:
    """Refuse results that would overwrite each other, or the states from which they are computed."""
    if initial is not None:
        check_distinct("final_state", final, "initial_state", initial)
        if overlap(checkpoints, initial):
            raise ValueError("checkpoint_states must not share memory with initial_state")
    named = {"final_state": final, "checkpoint_states": checkpoints, "out": out}
    pairs = (("checkpoint_states", "final_state"), ("out", "final_state"), ("out", "checkpoint_states"))
    for name, other in pairs:
        if overlap(named[name], named[other]):
            raise ValueError(f"{name} must not share memory with {other}")
