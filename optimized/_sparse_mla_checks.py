"""What ``sparse_mla`` refuses before it writes anything. Part of ``optimized/sparse_mla.py``; call it from there."""

import torch
from torch import Tensor

from ._sparse_mla_plan import SparseMlaPlan, check_indices

_QUANTISED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def check_call(q: Tensor, kv: Tensor, indices: Tensor, attn_sink: Tensor | None, plan: SparseMlaPlan) -> None:
    """Compare shapes, dtypes and devices with the plan; reads no value."""
    shape = plan.shape
    for name, tensor, sizes in (
        ("q", q, (shape.s_q, shape.h_q, shape.d_qk)),
        ("kv", kv, (shape.s_kv, shape.d_qk)),
    ):
        if name == "kv" and tensor.dtype in _QUANTISED:
            raise NotImplementedError(f"kv must be dequantised to {shape.dtype} before it is attended, got {kv.dtype}")
        if tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} must have shape {sizes} as planned, got {tuple(tensor.shape)}")
        if tensor.dtype != shape.dtype:
            raise TypeError(f"{name} must be {shape.dtype} as planned, got {tensor.dtype}")
    check_indices(indices, shape)
    if attn_sink is not None:
        if attn_sink.dtype != shape.accumulator_dtype:
            raise TypeError(f"attn_sink must be {shape.accumulator_dtype}, got {attn_sink.dtype}")
        if tuple(attn_sink.shape) != (shape.h_q,):
            raise ValueError(f"attn_sink must have shape [h_q] = {(shape.h_q,)}, got {tuple(attn_sink.shape)}")
    for name, given in (("q", q), ("kv", kv), ("indices", indices), ("attn_sink", attn_sink)):
        if given is not None and given.device != shape.device:
            raise ValueError(f"{name} must be on {shape.device} as planned, got {given.device}")


def check_out(out: Tensor, inputs: dict[str, Tensor | None], plan: SparseMlaPlan) -> None:
    """Refuse a view that does not fit, that overlaps itself, or that lies over an input."""
    shape = plan.shape
    sizes = (shape.s_q, shape.h_q, shape.d_v)
    if tuple(out.shape) != sizes:
        raise ValueError(f"out must have shape [s_q, h_q, d_v] = {sizes} as planned, got {tuple(out.shape)}")
    if out.dtype != shape.dtype:
        raise TypeError(f"out must be {shape.dtype} as planned, got {out.dtype}")
    if out.device != shape.device:
        raise ValueError(f"out must be on {shape.device} as planned, got {out.device}")
    if _overlaps_itself(out):
        raise ValueError(f"out must not overlap itself, got shape {sizes} with strides {out.stride()}")
    for name, tensor in inputs.items():
        if tensor is not None and _share_memory(out, tensor):
            raise ValueError(f"out must not lie over an input, got one whose memory meets that of {name}")


def _extent(tensor: Tensor) -> int:
    """Elements from the first to behind the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the stretches of memory meet, from the first element to the last of each."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_end, b_end = (x.data_ptr() + _extent(x) * x.element_size() for x in (a, b))
    return a.data_ptr() < b_end and b.data_ptr() < a_end


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether some stride steps back into what smaller strides cover."""
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < covered:
                return True
            covered = stride * (size - 1) + covered
    return False
