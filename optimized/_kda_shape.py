"""What an implementation of the gated delta rule must know of a layer. Part of ``optimized/kda.py``."""

from dataclasses import dataclass
from typing import Literal

import torch

Gate = Literal["bounded", "softplus", "log"]
StateLayout = Literal["KV", "VK"]
GATES: tuple[Gate, ...] = ("bounded", "softplus", "log")
LAYOUTS: tuple[StateLayout, ...] = ("KV", "VK")
LEAST_LOWER_BOUND = -5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaShape:
    """What an implementation must know of a layer before it sees its tensors.

    Attributes:
        device: Where the tensors live.
        dtype: Of ``q``, ``k``, ``v`` and ``out``; ``g`` and ``beta`` may be float32 instead.
        num_heads: Query and key heads ``H``.
        num_v_heads: Value heads ``HV``, a multiple of ``H``.
        head_dim_k: ``K``, width of a query and of a key.
        head_dim_v: ``V``, width of a value.
        gate: What ``g`` is: ``bounded`` and ``softplus`` take logits, ``log`` the natural log of the decay.
        lower_bound: Of the log decay under ``bounded``, in ``[-5, 0)``; None else.
        beta_is_logits: Whether ``beta`` goes through a sigmoid.
        qk_l2norm: Whether queries and keys are normalised.
        state_dtype: Of states in memory: float32 or bfloat16, float64 where ``dtype`` is. On chip they are float32.
        state_layout: ``KV`` for ``[N, HV, K, V]``, ``VK`` for ``[N, HV, V, K]``.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    gate: Gate = "bounded"
    lower_bound: float | None = None
    beta_is_logits: bool = True
    qk_l2norm: bool = True
    state_dtype: torch.dtype = torch.float32
    state_layout: StateLayout = "KV"

    def __post_init__(self) -> None:
        """Refuse what no implementation could serve."""
        for name in ("num_heads", "num_v_heads", "head_dim_k", "head_dim_v"):
            check_count(name, getattr(self, name), least=1)
        if self.num_v_heads % self.num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads {self.num_heads}, got {self.num_v_heads}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {self.dtype}")
        served = (torch.float64,) if self.dtype == torch.float64 else (torch.float32, torch.bfloat16)
        if self.state_dtype not in served:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in served)
            raise TypeError(f"state_dtype must be {names} for {self.dtype} inputs, got {self.state_dtype}")
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}, got {self.gate!r}")
        if self.state_layout not in LAYOUTS:
            raise ValueError(f"state_layout must be one of {', '.join(LAYOUTS)}, got {self.state_layout!r}")
        _check_bound(self)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Of ``A_log`` and ``dt_bias``, and the one that ``g`` and ``beta`` may have instead of ``dtype``."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def state_size(self, count: int) -> tuple[int, int, int, int]:
        """Of so many states in memory."""
        widths = (self.head_dim_k, self.head_dim_v) if self.state_layout == "KV" else (self.head_dim_v, self.head_dim_k)
        return count, self.num_v_heads, *widths


def check_count(name: str, value: int, *, least: int) -> None:
    """Refuse what is no int, or less than ``least``."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_bound(shape: KdaShape) -> None:
    """A lower bound where there is one, and no other."""
    bound = shape.lower_bound
    if shape.gate != "bounded":
        if bound is not None:
            raise ValueError(f"lower_bound must be None for the gate {shape.gate}, got {bound}")
        return
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        raise TypeError(f"lower_bound must be a number for a bounded gate, got {type(bound).__name__}")
    if not LEAST_LOWER_BOUND <= bound < 0:
        raise ValueError(f"lower_bound must be in [{LEAST_LOWER_BOUND:g}, 0), got {bound}")
