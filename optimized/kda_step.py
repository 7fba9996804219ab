"""Decode, speculative and mixed steps of Kimi Delta Attention, in place on a pool of states."""

from typing import Any

from torch import Tensor

from ._kda_checks import check_layer, check_written, keys_first, overlap
from ._kda_mixed_plan import KdaMixedPlan, PlainPart, plan_kda_mixed_step
from ._kda_shape import Gate, KdaShape, StateLayout
from ._kda_step_plan import STEP_IMPLEMENTATIONS, KdaStepPlan, plan_kda_step, refill_kda_step
from .kda import kda

__all__ = [
    "STEP_IMPLEMENTATIONS",
    "Gate",
    "KdaMixedPlan",
    "KdaShape",
    "KdaStepPlan",
    "StateLayout",
    "kda_mixed_step",
    "kda_step",
    "plan_kda_mixed_step",
    "plan_kda_step",
    "refill_kda_step",
]


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    state_pool: Tensor,
    plan: KdaStepPlan,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the few tokens of a step through the gated delta rule, from and to slots of a pool; return ``(out, pool)``.

    Sequence ``n`` starts from the state that its last accepted token left, and the state after its token ``t`` goes to
    the slot in column ``t`` of its row. Slots that are not written stay as they are, bit for bit. Padding, and rows
    past the last sequence, become zero in the output. Under ``triton`` the call never synchronises and can be captured;
    a captured call follows ``refill_kda_step``.

    Args:
        q: ``[T, H, K]``, dtype of the shape, packed; may be columns of wider rows, read in place.
        k: ``[T, H, K]``, likewise.
        v: ``[T, HV, V]``, likewise; value head ``h`` uses key head ``h // (HV / H)``.
        g: ``[T, HV, K]``, dtype of ``q`` or float32; logits of the gate, under ``log`` the natural log of the decay.
        beta: ``[T, HV]``, dtype of ``q`` or float32; logits of the write strength, or itself.
        scale: Factor on the output, a finite number of the host.
        state_pool: ``[slots, HV, K, V]`` or ``[slots, HV, V, K]``, as the shape says, like its dtype; any strides.
            Written.
        plan: Of ``plan_kda_step``.
        A_log: ``[HV]``, float32 (float64 for float64), or None.
        dt_bias: ``[HV, K]``, float32 (float64 for float64), or None.
        out: ``[T, HV, V]``, dtype of ``q``; a new tensor without.

    Returns:
        The output, and ``state_pool``.

    Raises:
        ValueError: If a shape or device disagrees with the plan, or the pool or the output share memory with others.
        TypeError: If a dtype disagrees with the plan.
        NotImplementedError: If the implementation does not serve these strides.

    Precision: float32 throughout, also between the tokens of a sequence; outputs and stored states are rounded once.
    Deterministic. Oracle: ``reference.kda_step.kda_step``.
    """
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
        shape=plan.shape,
        num_tokens=plan.num_tokens,
    )
    _check_pool(
        state_pool, plan.shape, plan.num_slots, {"q": q, "k": k, "v": v, "g": g, "beta": beta, "out": layer.out}
    )
    reason = plan.module.strides_refusal(layer)
    if reason is not None:
        raise NotImplementedError(f"implementation {plan.implementation!r} does not serve these tensors; {reason}")
    plan.module.forward(layer, keys_first(state_pool, plan.shape), plan)
    return layer.out, state_pool


def kda_mixed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    state_pool: Tensor,
    plan: KdaMixedPlan,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take a step with speculative and plain sequences through the gated delta rule; return ``(out, pool)``.

    Speculative tokens go through ``kda_step``, the others through ``kda``. All five tensors of a part are gathered by
    the same rows, its output is scattered back by them, and slots are written only where a sequence has tokens. A part
    whose rows come first and in order is computed in place: a step without drafts writes straight into the output.

    Args:
        q: ``[T, H, K]``, in the order of the layer, as in ``kda``.
        k: ``[T, H, K]``, likewise.
        v: ``[T, HV, V]``, likewise.
        g: ``[T, HV, K]``, likewise.
        beta: ``[T, HV]``, likewise.
        scale: Factor on the output, a finite number of the host.
        state_pool: ``[slots, HV, K, V]`` or ``[slots, HV, V, K]``, as the shape says, like its dtype. Written.
        plan: Of ``plan_kda_mixed_step``.
        A_log: ``[HV]``, or None.
        dt_bias: ``[HV, K]``, or None.
        out: ``[T, HV, V]``, dtype of ``q``; a new tensor without.

    Returns:
        The output, zero in rows of no sequence, and ``state_pool``.

    Raises:
        ValueError: As ``kda`` and ``kda_step``, or if the rows are not as many as planned.
        TypeError: As they do.
        NotImplementedError: As they do.

    Precision: that of ``kda`` and of ``kda_step``. Oracle: ``reference.kda_step.kda_mixed_step``.
    """
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, tensor in tensors.items():
        if len(tensor) != plan.num_rows:
            raise ValueError(f"{name} must have {plan.num_rows} rows as planned, got {len(tensor)}")
    if out is None:
        out = v.new_empty(v.shape)
    parts = [part for part in (plan.spec, plan.plain.batch.plan if plan.plain else None) if part is not None]
    for part in parts:
        layer: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "scale": scale, "out": out}
        # before either part writes anything
        check_layer(**tensors, **layer, shape=part.shape, num_tokens=plan.num_rows)
        _check_pool(state_pool, part.shape, plan.num_slots, tensors | {"out": out})
    given: dict[str, Any] = {"scale": scale, "A_log": A_log, "dt_bias": dt_bias}
    if plan.plain is not None:
        _plain(tensors, out, state_pool, plan.plain, given)
    if plan.spec is not None:
        rows, count = plan.spec_tokens, plan.spec.num_tokens
        target = out[:count] if rows is None else out.new_empty(count, *out.shape[1:])
        kda_step(**_taken(tensors, rows, count), out=target, state_pool=state_pool, plan=plan.spec, **given)
        if rows is not None:
            out.index_copy_(0, rows, target)
    if plan.rest is not None:
        out.index_fill_(0, plan.rest, 0.0)
    return out, state_pool


def _plain(tensors: dict[str, Any], out: Tensor, pool: Tensor, part: PlainPart, given: dict[str, Any]) -> None:
    """Gather rows and states, run, scatter both; the states of all start before any is written."""
    count = part.batch.num_tokens
    states = pool.index_select(0, part.slots)
    if part.fresh is not None:
        states.masked_fill_(part.fresh, 0.0)
    target = out[:count] if part.tokens is None else out.new_empty(count, *out.shape[1:])
    kda(
        **_taken(tensors, part.tokens, count),
        out=target,
        initial_state=states,
        final_state=states,
        batch=part.batch,
        **given,
    )
    if part.tokens is not None:
        out.index_copy_(0, part.tokens, target)
    pool.index_copy_(0, part.slots, states)


def _taken(tensors: dict[str, Any], rows: Tensor | None, count: int) -> dict[str, Any]:
    """The rows of a part, of every tensor alike; a view where they come first and in order."""
    return {name: x[:count] if rows is None else x.index_select(0, rows) for name, x in tensors.items()}


def _check_pool(pool: Tensor, shape: KdaShape, num_slots: int, others: dict[str, Tensor]) -> None:
    """Refuse another pool than planned, and one that shares memory with what is read or written beside it."""
    check_written("state_pool", pool, shape.state_size(num_slots), (shape.state_dtype,), shape.device)
    for name, tensor in others.items():
        if overlap(pool, tensor):
            raise ValueError(f"state_pool must not share memory with {name}")
