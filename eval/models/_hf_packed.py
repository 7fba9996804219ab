"""A step of a left-padded batch as packed requests of ``attention``."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...optimized.attention import AttentionPlan, AttentionShape, attention, plan_attention
from .seam import Arguments, Seam


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Columns ``start .. stop - 1`` of a batch, the same for every layer.

    Attributes:
        current: ``[B, stop - start]``, bool, where its tokens stand.
        context: ``[B, stop]``, bool, where theirs and those of earlier steps stand.
        cu_seqlens_q: ``[B + 1]``, int32, CPU; a row that has not begun has no query.
        cu_seqlens_k: ``[B + 1]``, int32, CPU.
        provider: Of ``attention``.
        plans: By the shape of the tensors; layers of one shape share theirs.
    """

    current: Tensor
    context: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    provider: str
    plans: dict[AttentionShape, AttentionPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, pads: Sequence[int], start: int, stop: int, device: torch.device, provider: str) -> "PackedStep":
        """``pads`` are the columns without a token, by row."""
        begins = torch.tensor(pads)[:, None]
        queries = [max(0, stop - max(start, pad)) for pad in pads]
        keys = [max(0, stop - pad) for pad in pads]
        return cls(
            current=(torch.arange(start, stop) >= begins).to(device),
            context=(torch.arange(stop) >= begins).to(device),
            cu_seqlens_q=_ends(queries),
            cu_seqlens_k=_ends(keys),
            provider=provider,
        )

    def attend(self, seam: Seam, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One call for all tokens of the step: ``[B, columns, H, Dv]``, zero in columns without a token.

        Args:
            seam: Serves ``attention``.
            layer: Of the model.
            query: ``[B, H, columns, Dq]``.
            key: ``[B, H_kv, stop, Dq]``.
            value: ``[B, H_kv, stop, Dv]``.
            scale: Factor on the logits.
        """
        queries = query.transpose(1, 2)
        q, k, v = queries[self.current], key.transpose(1, 2)[self.context], value.transpose(1, 2)[self.context]
        arguments: Arguments = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": True}
        arguments |= {name: getattr(self, name).to(q.device) for name in ("cu_seqlens_q", "cu_seqlens_k")}

        def house() -> Tensor:
            return attention(q, k, v, softmax_scale=scale, plan=self._plan(q, k, v))[0]

        served = seam.serve(layer, arguments, house)
        out = query.new_zeros(*queries.shape[:3], v.shape[2])
        out[self.current] = served
        return out

    def _plan(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionPlan:
        shape = AttentionShape(
            device=q.device,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim_qk=q.shape[2],
            head_dim_v=v.shape[2],
        )
        if shape not in self.plans:
            self.plans[shape] = plan_attention(
                self.cu_seqlens_q, self.cu_seqlens_k, causal=True, shape=shape, provider=self.provider
            )
        return self.plans[shape]


def check_plain(options: dict[str, Any]) -> None:
    """Refuse what ``attention`` does not compute, in the words of transformers.

    Raises:
        NotImplementedError: If a layer has a window, a cap on its logits or sinks.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention must be causal and full, got {name} = {options[name]!r}")


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
