"""The attention of a transformers model: which kernel serves it, and the count of its calls.

A model asks for its attention by a name. Ours is registered under a name of its own with the mask of the plain kernel
behind it, and notes each call where the output is made; a model that would take another way leaves no count.

Latent attention is met between the cache and the output projection: where ``mla_prefill`` serves, the latents are left
as the cache holds them, and so they are what the attention function gets for keys and values.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill
from ..extras import require
from ._hf_packed import PackedStep, check_plain
from .seam import Arguments, Seam

PLAIN = ("eager", "sdpa")
ATTENTION, MLA_PREFILL = "attention", "mla_prefill"
KERNELS = (*PLAIN, ATTENTION, MLA_PREFILL)
PREFILL, DECODE = "prefill", "decode"

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A part of a prefill, the same for every layer.

    Attributes:
        plan: Of ``mla_prefill``.
        current: Where its tokens stand, ``[B, columns]``.
        arguments: Of the operation, those that are no tensors of a layer.
    """

    plan: MlaPrefillPlan
    current: Tensor
    arguments: Arguments


class Attention:
    """Serves the attention of one model.

    Attributes:
        kernel: Of ``KERNELS``: what serves a prefill. A token that is decoded goes the plain way.
        plain: Of ``PLAIN``.
        seam: Where the operation is called, if the kernel is one of the house.
    """

    def __init__(
        self, network: Any, kernel: str, *, plain: str, chunk: int, provider: str, own_kernel: str = ""
    ) -> None:
        """Take the place of the model's attention.

        Args:
            network: The model.
            kernel: Of ``KERNELS``.
            plain: What serves where the kernel does not.
            chunk: Most history tokens that ``mla_prefill`` expands at once.
            provider: Of ``attention``, or of the partial attention of ``mla_prefill``.
            own_kernel: That takes the place of the house in the operation ``kernel``.

        Raises:
            ValueError: If there is no such kernel, or one of your own without an operation that it could serve.
            NotImplementedError: If the kernel does not serve this model.
        """
        if kernel not in KERNELS or plain not in PLAIN:
            raise ValueError(
                f"attention must be one of {', '.join(KERNELS)}, got {kernel if plain in PLAIN else plain}"
            )
        if own_kernel and kernel in PLAIN:
            raise ValueError(f"a kernel of yours needs attention to be {ATTENTION} or {MLA_PREFILL}, got {kernel}")
        self.kernel, self.plain = kernel, plain
        self.seam = None if kernel in PLAIN else Seam(kernel, own_kernel)
        self._chunk, self._provider = chunk, provider
        self._stage = PREFILL
        self._step: Step | PackedStep | None = None
        self._calls: Counter[str] = Counter()
        self._shape = self._leave_latent(network) if kernel == MLA_PREFILL else None
        transformers = require("transformers", extra="model")
        name = f"assay_{plain}_{next(_numbers)}"
        masks = require("transformers.masking_utils", extra="model").ALL_MASK_ATTENTION_FUNCTIONS
        transformers.AttentionInterface.register(name, self._attend)
        transformers.AttentionMaskInterface.register(name, masks[plain])
        network.set_attn_implementation(name)
        if network.config._attn_implementation != name:
            raise NotImplementedError(f"attention of {type(network).__name__} must be exchangeable, and is not")

    def begin_prefill(self, pads: Sequence[int], start: int, stop: int, like: Tensor) -> None:
        """Columns ``start .. stop - 1`` of a left-padded batch come next, behind the ones before.

        Args:
            pads: Columns without a token, by row.
            start: First column.
            stop: Column behind the last.
            like: A tensor of the dtype and on the device of the queries.
        """
        self._stage = PREFILL
        if self.kernel == ATTENTION:
            self._step = PackedStep.of(pads, start, stop, like.device, self._provider)
        elif self._shape is not None:
            self._step = self._planned(self._shape, pads, start, stop, like)

    def begin_decode(self) -> None:
        """One token of each row comes next."""
        self._stage, self._step = DECODE, None

    def take(self) -> Counter[str]:
        """Calls since the last time, by ``stage/kernel``."""
        calls, self._calls = self._calls, Counter()
        return calls

    def _planned(self, shape: MlaShape, pads: Sequence[int], start: int, stop: int, like: Tensor) -> Step:
        served = [row for row, pad in enumerate(pads) if pad < stop]
        current = [stop - max(start, pads[row]) for row in served]
        contexts = [stop - pads[row] for row in served]
        # the cache is [B, 1, stop, R]: the token of row r in column c has the slot r * stop + c
        table = torch.full((len(served), max(contexts)), -1, dtype=torch.int64)
        for at, (row, context) in enumerate(zip(served, contexts, strict=True)):
            table[at, :context] = row * stop + pads[row] + torch.arange(context)
        columns = torch.arange(start, stop)
        integers = {
            "cu_seqlens": torch.tensor([0, *itertools.accumulate(current)]),
            "slot_table": table.to(like.device),
            "request_rows": torch.arange(len(served)),
            "context_lens": torch.tensor(contexts),
        }
        plan = plan_mla_prefill(
            *integers.values(),
            shape=shape,
            dtype=like.dtype,
            num_slots=len(pads) * stop,
            history_chunk_size=self._chunk,
            provider=self._provider,
        )
        # as the judge gives them
        arguments: Arguments = {name: tensor.to(like.device, torch.int32) for name, tensor in integers.items()}
        current_columns = (columns >= torch.tensor(pads)[:, None]).to(like.device)
        return Step(plan=plan, current=current_columns, arguments=arguments | {"history_chunk_size": self._chunk})

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers calls it: queries ``[B, H, columns, Dq]`` to outputs ``[B, columns, H, Dv]``."""
        if self.seam is not None and self._step is not None:
            if isinstance(self._step, PackedStep):
                check_plain(options)
                out = self._step.attend(self.seam, module.layer_idx, query, key, value, float(options["scaling"]))
            else:
                out = _attend_latent(self.seam, module, query, key, value, float(options["scaling"]), self._step)
            self._calls[f"{self._stage}/{self.seam.name}"] += 1
            return out, None
        if self.plain == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = require("transformers", extra="model").AttentionInterface()[self.plain]
        out, weights = function(module, query, key, value, attention_mask, **options)
        self._calls[f"{self._stage}/{self.plain}"] += 1
        return out, weights

    def _leave_latent(self, network: Any) -> MlaShape:
        """Have every layer hand over its latents while a step is planned; return the sizes of a layer."""
        layers = [module for module in network.modules() if hasattr(module, "expand_kv")]
        if not layers:
            raise NotImplementedError(f"mla_prefill must have latent attention, got {type(network).__name__}")
        for layer in layers:
            layer.expand_kv = self._expansion(layer.expand_kv)
        first = layers[0]
        return MlaShape(
            num_heads=first.num_heads,
            kv_lora_rank=first.kv_lora_rank,
            d_nope=first.qk_nope_head_dim,
            d_rope=first.qk_rope_head_dim,
            d_v=first.v_head_dim,
        )

    def _expansion(self, expand: Any) -> Any:
        def expand_kv(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            expanded: tuple[Tensor, Tensor] = expand(kv_nope, k_rot) if self._step is None else (kv_nope, k_rot)
            return expanded

        return expand_kv


def _attend_latent(
    seam: Seam, module: Any, query: Tensor, kv_c: Tensor, k_pe: Tensor, scale: float, step: Step
) -> Tensor:
    """One call for all tokens of the step; columns without a token stay zero."""
    shape = step.plan.shape
    queries = query.transpose(1, 2)
    tensors = {
        "q": queries[step.current],
        "kv_c": kv_c.reshape(-1, shape.kv_lora_rank),
        "k_pe": k_pe.reshape(-1, shape.d_rope),
        "kv_b_proj": module.kv_b_proj.weight.view(shape.num_heads, shape.d_nope + shape.d_v, shape.kv_lora_rank),
    }

    def house() -> Tensor:
        return mla_prefill(*tensors.values(), softmax_scale=scale, plan=step.plan, return_lse=False)[0]

    served = seam.serve(module.layer_idx, tensors | {"softmax_scale": scale} | step.arguments, house)
    out = query.new_zeros(*queries.shape[:3], shape.d_v)
    out[step.current] = served
    return out
