"""What ``attention`` refuses. Part of ``optimized/attention.py``; call it from there."""

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import AttentionPlan


def lengths(name: str, offsets: Tensor) -> tuple[int, ...]:
    """Read the lengths out of packed offsets, checking each value; synchronises if they are on a device."""
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(f"{name} must have shape [N + 1] with N >= 1, got {tuple(offsets.shape)}")
    values: list[int] = offsets.tolist()
    lengths = tuple(stop - start for start, stop in itertools.pairwise(values))
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    if min(lengths) < 0:
        raise ValueError(
            f"{name} must not decrease, got a step of {min(lengths)} at request {lengths.index(min(lengths))}"
        )
    if values[-1] > torch.iinfo(torch.int32).max:
        raise ValueError(f"{name} must end below 2**31, got {values[-1]}")
    return lengths


def check_inputs(q: Tensor, k: Tensor, v: Tensor, plan: "AttentionPlan") -> None:
    """Compare shapes, dtypes and devices with the plan; reads no value."""
    shape = plan.shape
    expected = {
        "q": (q, (plan.num_queries, shape.num_heads, shape.head_dim_qk)),
        "k": (k, (plan.num_keys, shape.num_kv_heads, shape.head_dim_qk)),
        "v": (v, (plan.num_keys, shape.num_kv_heads, shape.head_dim_v)),
    }
    for name, (tensor, sizes) in expected.items():
        if tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} must have shape {sizes} as planned, got {tuple(tensor.shape)}")
        if tensor.dtype != shape.dtype:
            raise TypeError(f"{name} must be {shape.dtype} as planned, got {tensor.dtype}")
        if tensor.device != plan.cu_seqlens_q.device:
            raise ValueError(f"{name} must be on {plan.cu_seqlens_q.device} as planned, got {tensor.device}")


def check_scale(softmax_scale: float) -> None:
    """Refuse a scale on a device (reading it would synchronise) and one that is not finite."""
    if not isinstance(softmax_scale, int | float):
        raise TypeError(f"softmax_scale must be a number of the host, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")


def check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Compare the four operands of a merge with each other; reads no value."""
    if out_a.dim() != 3:
        raise ValueError(f"out must have shape [T, H, Dv], got {tuple(out_a.shape)}")
    rows = tuple(out_a.shape[:2])
    for name, tensor, sizes in (
        ("the second out", out_b, tuple(out_a.shape)),
        ("the first lse", lse_a, rows),
        ("the second lse", lse_b, rows),
    ):
        if tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} must have shape {sizes}, got {tuple(tensor.shape)}")
        if tensor.device != out_a.device:
            raise ValueError(f"{name} must be on {out_a.device}, got {tensor.device}")
    for name, tensor in (("out", out_a), ("lse", lse_a), ("the second out", out_b), ("the second lse", lse_b)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating, got {tensor.dtype}")
