"""What ``kda`` and ``kda_step`` refuse of tensors, and the tensors of a call put in order. Part of both.

Nothing here reads a value of a tensor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._kda_shape import KdaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What a layer hands to the rule, checked; states are seen as ``[..., K, V]`` whatever their layout.

    Attributes:
        q: ``[T, H, K]``.
        k: ``[T, H, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV, K]``.
        beta: ``[T, HV]``.
        A_log: ``[HV]`` or None.
        dt_bias: ``[HV, K]`` or None.
        scale: Factor on the output.
        out: ``[T, HV, V]``, where it goes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    scale: float
    out: Tensor


def check_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    out: Tensor | None,
    shape: KdaShape,
    num_tokens: int,
) -> Layer:
    """Compare the tensors with the planned shape; a new output if the caller brings none."""
    if q.dim() != 3 or q.shape[0] < num_tokens:
        raise ValueError(f"q must have shape [T, H, K] with T >= {num_tokens} as planned, got {tuple(q.shape)}")
    tokens, heads = q.shape[0], shape.num_v_heads
    keys, values = (tokens, shape.num_heads, shape.head_dim_k), (tokens, heads, shape.head_dim_v)
    exact, either = (shape.dtype,), (shape.dtype, shape.parameter_dtype)
    for name, tensor, size, dtypes in (
        ("q", q, keys, exact),
        ("k", k, keys, exact),
        ("v", v, values, exact),
        ("g", g, (tokens, heads, shape.head_dim_k), either),
        ("beta", beta, (tokens, heads), either),
    ):
        check_tensor(name, tensor, size, dtypes, shape.device)
    for name, parameter, parameter_size in (
        ("A_log", A_log, (heads,)),
        ("dt_bias", dt_bias, (heads, shape.head_dim_k)),
    ):
        if parameter is None:
            continue
        if shape.gate == "log":
            raise ValueError(f"{name} must be None for the gate log, got a tensor")
        check_tensor(name, parameter, parameter_size, (shape.parameter_dtype,), shape.device)
    _check_scale(scale)
    if out is None:
        out = torch.empty(values, dtype=shape.dtype, device=q.device)
    else:
        check_written("out", out, values, (shape.dtype,), shape.device)
        for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            if overlap(out, tensor):
                raise ValueError(f"out must not share memory with {name}")
    return Layer(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, scale=float(scale), out=out)


def check_states(name: str, states: Tensor, count: int, shape: KdaShape, *, written: bool) -> Tensor:
    """Compare states with the planned shape; return them as ``[count, HV, K, V]``."""
    check = check_written if written else check_tensor
    check(name, states, shape.state_size(count), (shape.state_dtype,), shape.device)
    return keys_first(states, shape)


def keys_first(states: Tensor, shape: KdaShape) -> Tensor:
    """States in memory, seen as ``[..., K, V]``."""
    return states if shape.state_layout == "KV" else states.transpose(-1, -2)


def check_tensor(
    name: str, tensor: Tensor, size: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse another shape, dtype or device than planned."""
    if tuple(tensor.shape) != size:
        raise ValueError(f"{name} must have shape {size}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{name} must be {names}, got {tensor.dtype}")
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_written(
    name: str, tensor: Tensor, size: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse as well a tensor of which two elements are one."""
    check_tensor(name, tensor, size, dtypes, device)
    if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name} must not overlap itself, got strides {tensor.stride()}")


def check_distinct(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two states that share memory, unless they are one and the same."""
    same = tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride() and tensor.shape == other.shape
    if not same and overlap(tensor, other):
        raise ValueError(f"{name} must be {other_name} itself or share no memory with it, got an overlap")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share an element; False for columns that lie apart in the rows of one tensor."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    (start_a, stop_a), (start_b, stop_b) = _bytes(a), _bytes(b)
    if stop_a <= start_b or stop_b <= start_a:
        return False
    pitch = a.stride(0) * a.element_size()
    if pitch <= 0 or b.stride(0) * b.element_size() != pitch:
        return True
    # from where a row of one begins to where the next row of it does, a row of the other must fit behind it
    (row_a, end_a), (row_b, end_b) = _bytes(a[0]), _bytes(b[0])
    behind = (row_b - row_a) % pitch
    return behind < end_a - row_a or behind + end_b - row_b > pitch


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_scale(scale: float) -> None:
    if not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number of the host, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
