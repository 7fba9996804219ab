"""MLA prefill that expands a long latent history chunk by chunk and merges the partial results by log-sum-exp."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._mla_prefill_plan import HistoryChunk, MlaPrefillPlan, MlaShape, plan_mla_prefill
from .attention import attention, merge_into

__all__ = ["HistoryChunk", "MlaPrefillPlan", "MlaShape", "mla_prefill", "plan_mla_prefill"]


def mla_prefill(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_b_proj: Tensor,
    *,
    softmax_scale: float,
    plan: MlaPrefillPlan,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attend the current tokens of each request to its whole history and to themselves; return ``(out, lse)``.

    The current tokens of all requests go through one packed causal call. Then, for each history chunk of the
    plan: gather its latent rows, project them to keys and values, attend without a mask, merge::

        k, v       = W_UK kv_c[slots] ++ k_pe[slots], W_UV kv_c[slots]
        part, lse' = attention(q[request], k, v)
        out, lse   = merge((out, lse), (part, lse'))

    The buffers of a chunk are released before the next one is gathered, so the peak does not grow with the history.
    Exactly ``sum(context_lens)`` rows are projected. The call never synchronises and can be captured in a CUDA graph.

    Args:
        q: ``[T, H, Dn + Dr]``, float16, bfloat16 or float32; packed current tokens, the part without RoPE first.
        kv_c: ``[slots, R]``, dtype of ``q``; the latent cache, row stride free. Unused rows are never read.
        k_pe: ``[slots, Dr]``, dtype of ``q``; the rotated rope cache, ``Dr`` may be 0.
        kv_b_proj: ``[H, Dn + Dv, R]``, dtype of ``q``; per head ``W_UK`` above ``W_UV``. One that is not contiguous in
            its first two dimensions is copied at every call.
        softmax_scale: Factor on the logits, usually ``(Dn + Dr) ** -0.5``.
        plan: Of this step, from ``plan_mla_prefill``; the same for every layer.
        return_lse: Whether ``lse`` is handed out; ``out`` has the same bits either way.

    Returns:
        ``out``, ``[T, H, Dv]``, dtype of ``q``, and ``lse``, ``[T, H]``, float32, natural log of the scaled logits, or
        None.

    Raises:
        ValueError: If a shape disagrees with the plan.
        TypeError: If a dtype or device disagrees with the plan.

    Precision: keys and values are rounded to the dtype of ``q`` after a float32-accumulated projection; each partial
    result is rounded once to that dtype; merging accumulates in float32 and rounds once, and only if there is
    history. Oracle: ``reference.mla_prefill.mla_prefill``. Source: SparseEngine's history-chunked MLA prefill.
    """
    _check_inputs(q, kv_c, k_pe, kv_b_proj, plan)
    latent = _Latent(kv_c=kv_c, k_pe=k_pe, weight=kv_b_proj.flatten(0, 1), shape=plan.shape)
    k, v = latent.expand(plan.current_slots)
    out, lse = attention(q, k, v, softmax_scale=softmax_scale, plan=plan.current)
    del k, v
    if plan.chunks:
        total = out.to(plan.accumulator_dtype)
        del out
        for chunk in plan.chunks:
            k, v = latent.expand(chunk.slots)
            part, part_lse = attention(q[chunk.queries], k, v, softmax_scale=softmax_scale, plan=chunk.plan)
            # keys and values go before the merge, so that the next gather never finds them alive
            del k, v
            merge_into(total[chunk.queries], lse[chunk.queries], part, part_lse)
            del part, part_lse
        out = total.to(q.dtype)
    return out, lse if return_lse else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Latent:
    """The latent cache of one layer with its up-projection, ``weight`` being ``[H * (Dn + Dv), R]``."""

    kv_c: Tensor
    k_pe: Tensor
    weight: Tensor
    shape: MlaShape

    def expand(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather and project the rows of ``slots``, ``[n]``; return ``k``, ``[n, H, Dq]``, and ``v``, ``[n, H, Dv]``.

        ``v`` is a strided view of the projection, and so is ``k`` where there is no rope part.
        """
        shape = self.shape
        projected = torch.nn.functional.linear(self.kv_c.index_select(0, slots), self.weight)
        k_nope, v = projected.unflatten(1, (shape.num_heads, -1)).split([shape.d_nope, shape.d_v], dim=-1)
        if shape.d_rope == 0:
            return k_nope, v
        k = projected.new_empty(len(slots), shape.num_heads, shape.d_nope + shape.d_rope)
        k[..., : shape.d_nope] = k_nope
        k[..., shape.d_nope :] = self.k_pe.index_select(0, slots)[:, None, :]
        return k, v


def _check_inputs(q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_proj: Tensor, plan: MlaPrefillPlan) -> None:
    """Refuse tensors that are not what was planned for, by shape, dtype and device alone."""
    shape = plan.shape
    expected = {
        "q": (q, (plan.num_tokens, shape.num_heads, shape.d_nope + shape.d_rope)),
        "kv_c": (kv_c, (plan.num_slots, shape.kv_lora_rank)),
        "k_pe": (k_pe, (plan.num_slots, shape.d_rope)),
        "kv_b_proj": (kv_b_proj, (shape.num_heads, shape.d_nope + shape.d_v, shape.kv_lora_rank)),
    }
    for name, (tensor, size) in expected.items():
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} must have the planned shape {size}, got {tuple(tensor.shape)}")
        if tensor.dtype != plan.dtype:
            raise TypeError(f"{name} must have the planned dtype {plan.dtype}, got {tensor.dtype}")
        if tensor.device != plan.device:
            raise ValueError(f"{name} must be on the planned device {plan.device}, got {tensor.device}")
