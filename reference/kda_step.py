"""Decode and speculative steps of Kimi Delta Attention on a pool of states: every token leaves its state behind."""

from typing import Any

import torch
from torch import Tensor

from .kda import kda, recurrence, transformed


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    cu_seqlens: Tensor,
    state_pool: Tensor,
    slot_table: Tensor,
    num_accepted: Tensor | None = None,
    gate: str = "bounded",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_logits: bool = True,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """Take the few tokens of a step through the gated delta rule, from and to slots of a pool; return ``(out, pool)``.

    Sequence ``n`` starts from the slot ``slot_table[n, num_accepted[n] - 1]``, where its last accepted token left its
    state, and the state after its token ``t`` goes to the slot ``slot_table[n, t]``. Nothing is ever undone: the next
    step picks another column. A sequence that would start from slot -1 is padding: its output is zero, and it leaves no
    state. A state whose slot is -1 is dropped. Without tokens a sequence reads and writes nothing. All tensors but the
    integer ones have one floating dtype, and so have the results.

    Args:
        q: ``[T, H, K]``, packed.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``.
        beta: ``[T, HV]``.
        scale: Factor on the output.
        cu_seqlens: ``[N + 1]``, integer; sequence ``n`` owns rows ``cu[n] .. cu[n + 1] - 1``, at most one a column of
            the table. Rows past the last are zero in the output.
        state_pool: ``[slots, HV, K, V]``; no slot belongs to two sequences.
        slot_table: ``[N, C]``, integer, -1 to ``slots - 1``.
        num_accepted: ``[N]``, integer, 1 to ``C``; 1 for all without.
        gate: As in ``kda``, like the arguments below.
        A_log: ``[HV]`` or None.
        dt_bias: ``[HV, K]`` or None.
        lower_bound: Of a bounded gate, in ``[-5, 0)``; None else.
        beta_is_logits: Whether ``beta`` goes through a sigmoid.
        qk_l2norm: Whether queries and keys are normalised.

    Returns:
        ``out``, ``[T, HV, V]``, and the pool afterwards, a new tensor.

    Raises:
        ValueError: As ``kda`` of its gate, or if ``slot_table`` has not one row a sequence, or a number of accepted
            tokens is not one of its columns.

    Source: the state table of speculative decoding in vLLM and flash-linear-attention.
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
    out, pool = torch.zeros_like(v), state_pool.clone()
    bounds = cu_seqlens.tolist()
    sequences, columns = len(bounds) - 1, slot_table.shape[1]
    if len(slot_table) != sequences:
        raise ValueError(f"slot_table must have {sequences} rows, one a sequence, got {len(slot_table)}")
    accepted = [1] * sequences if num_accepted is None else num_accepted.tolist()
    for sequence, (slots, count) in enumerate(zip(slot_table.tolist(), accepted, strict=True)):
        if not 1 <= count <= columns:
            raise ValueError(f"num_accepted must be 1 to {columns}, got {count} at sequence {sequence}")
        rows = slice(bounds[sequence], bounds[sequence + 1])
        start = slots[count - 1]
        if start < 0:
            continue
        steps = recurrence(q[rows], k[rows], v[rows], g[rows], beta[rows], state_pool[start], scale=scale)
        for t, (row, state) in enumerate(steps):
            out[rows.start + t] = row
            if slots[t] >= 0:
                pool[slots[t]] = state
    return out, pool


def kda_mixed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_pool: Tensor,
    spec_tokens: Tensor,
    spec_cu_seqlens: Tensor,
    spec_slots: Tensor,
    num_accepted: Tensor,
    plain_tokens: Tensor,
    plain_cu_seqlens: Tensor,
    plain_slots: Tensor,
    has_initial_state: Tensor,
    scale: float,
    gate: str = "bounded",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_logits: bool = True,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """Take speculative and plain sequences of one step through the rule; return ``(out, pool)``.

    The tokens of the step lie in the order of the layer. Those named by ``spec_tokens`` are speculative and go through
    ``kda_step``. Those named by ``plain_tokens`` are prefill or plain decoding: sequence ``n`` starts from its slot, or
    from zero where ``has_initial_state[n]`` is false, whatever the slot holds, and leaves its last state there. Without
    tokens its slot stays as it is. Padding is a row that nobody names. All tensors but the tables have one floating
    dtype, and so have the results.

    Args:
        q: ``[T, H, K]``, like the other tensors in the order of the layer.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``.
        beta: ``[T, HV]``.
        state_pool: ``[slots, HV, K, V]``.
        spec_tokens: ``[Ts]``, integer, rows of the speculative tokens, sequence after sequence.
        spec_cu_seqlens: ``[Ns + 1]``, integer, offsets in ``spec_tokens``.
        spec_slots: ``[Ns, C]``, integer, as in ``kda_step``.
        num_accepted: ``[Ns]``, integer, 1 to ``C``.
        plain_tokens: ``[Tp]``, integer, rows of the other tokens.
        plain_cu_seqlens: ``[Np + 1]``, integer, offsets in ``plain_tokens``.
        plain_slots: ``[Np]``, integer, ``0 .. slots - 1``; not read of a sequence without tokens.
        has_initial_state: ``[Np]``, bool.
        scale: As in ``kda``, like the arguments below.
        gate: One of its gates.
        A_log: ``[HV]`` or None.
        dt_bias: ``[HV, K]`` or None.
        lower_bound: Of a bounded gate, in ``[-5, 0)``; None else.
        beta_is_logits: Whether ``beta`` goes through a sigmoid.
        qk_l2norm: Whether queries and keys are normalised.

    Returns:
        ``out``, ``[T, HV, V]``, zero in rows that nobody names, and the pool afterwards, a new tensor.

    Raises:
        ValueError: As ``kda`` and ``kda_step``, or if a plain sequence with tokens has a slot that the pool has not.
    """
    layer: dict[str, Any] = {
        "scale": scale,
        "gate": gate,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
    }
    layer |= {"beta_is_logits": beta_is_logits, "qk_l2norm": qk_l2norm}
    filled = plain_cu_seqlens.diff() > 0
    for slot in plain_slots[filled].tolist():
        if not 0 <= slot < len(state_pool):
            raise ValueError(f"plain_slots must hold 0 .. {len(state_pool) - 1}, got {slot}")
    spec, plain = ([x[rows] for x in (q, k, v, g, beta)] for rows in (spec_tokens, plain_tokens))
    out = torch.zeros_like(v)
    out[spec_tokens], pool = kda_step(
        *spec,
        cu_seqlens=spec_cu_seqlens,
        state_pool=state_pool,
        slot_table=spec_slots,
        num_accepted=num_accepted,
        **layer,
    )
    known = has_initial_state[:, None, None, None]
    # a sequence without tokens may name any slot
    initial_state = state_pool[plain_slots.where(filled, 0)].where(known, torch.zeros_like(state_pool[:1]))
    out[plain_tokens], final_state, _ = kda(*plain, cu_seqlens=plain_cu_seqlens, initial_state=initial_state, **layer)
    pool[plain_slots[filled]] = final_state[filled]
    return out, pool
