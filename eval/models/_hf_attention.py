"""The attention of a transformers model: which kernel serves it, and the count of its calls.

A model asks for its attention by a name. Ours is registered under a name of its own with the mask of the plain kernel
behind it, and notes each call where the output is made; a model that would take another way leaves no count.

Latent attention is met between the cache and the output projection: where a kernel of latent rows serves, they are left
as the cache holds them, and so they are what the attention function gets for keys and values.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...optimized.mla_prefill import MlaShape
from ..extras import require
from ._hf_absorbed import ABSORBED, absorbed_attention
from ._hf_exact_scores import TopkRule
from ._hf_latent import LatentRows, PrefillStep, latent_layers, latent_shape, up_projection
from ._hf_packed import PackedStep, check_plain
from ._hf_selection import Observed, Selection
from ._hf_topk import TOPK_KERNELS, TopkStep
from .seam import Seam

PLAIN = ("eager", "sdpa")
ATTENTION, MLA_PREFILL = "attention", "mla_prefill"
LATENT = (MLA_PREFILL, *TOPK_KERNELS)
KERNELS = (*PLAIN, ATTENTION, *LATENT)
PREFILL, SCORES, SELECT, DECODE = "prefill", "scores", "select", "decode"
KDA = "kda"

_numbers = itertools.count()


class Attention:
    """Serves the attention of one model.

    Attributes:
        kernel: Of ``KERNELS``: what serves a prefill.
        plain: Of ``PLAIN``: what serves the rest.
        absorbed: Whether tokens are decoded over latent rows, and not the plain way.
        seam: Where the operation is called, if the kernel is one of the house.
    """

    def __init__(
        self,
        network: Any,
        kernel: str,
        *,
        plain: str,
        decode: str = "",
        chunk: int,
        provider: str,
        own_kernel: str = "",
        topk: TopkRule | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Take the place of the model's attention.

        Args:
            network: The model.
            kernel: Of ``KERNELS``.
            plain: What serves where the kernel does not.
            decode: ``absorbed`` decodes over latent rows, which ``plain`` expands for every token.
            chunk: Most history tokens that ``mla_prefill`` expands at once.
            provider: Of ``attention``, of the partial attention of ``mla_prefill``, or implementation of the kernel.
            own_kernel: That takes the place of the house in the operation ``kernel``.
            topk: What each query looks at, with a kernel of ``TOPK_KERNELS`` and no other.
            selection: What stays of a prompt once it was read, with ``mla_prefill`` of the house alone; everything
                without.

        Raises:
            ValueError: If there is no such kernel, one of your own without an operation that it could serve, or a rule
                without a kernel that follows it.
            NotImplementedError: If the kernel does not serve this model.
        """
        if kernel not in KERNELS or plain not in PLAIN:
            raise ValueError(
                f"attention must be one of {', '.join(KERNELS)}, got {kernel if plain in PLAIN else plain}"
            )
        if own_kernel and kernel in PLAIN:
            raise ValueError(f"a kernel of yours needs attention to be {ATTENTION} or {MLA_PREFILL}, got {kernel}")
        if decode not in ("", ABSORBED) or (decode and plain != "eager"):
            got = f"{decode or 'none'} beside {plain}"
            raise ValueError(f"decode must be {ABSORBED}, beside eager attention, or none, got {got}")
        if (topk is not None) != (kernel in TOPK_KERNELS):
            raise ValueError(f"topk goes with {' and '.join(TOPK_KERNELS)} and no other attention, got {kernel}")
        if selection is not None and (kernel != MLA_PREFILL or own_kernel):
            raise ValueError(f"selection needs the scores of {MLA_PREFILL} of the house, got {own_kernel or kernel}")
        self.kernel, self.plain, self.selection = kernel, plain, selection
        self.absorbed = decode == ABSORBED
        self.seam = None if kernel in PLAIN else Seam(kernel, own_kernel)
        self._chunk, self._provider, self._topk = chunk, provider, topk
        self._stage = PREFILL
        self._step: PrefillStep | TopkStep | PackedStep | None = None
        self._observed: Observed | None = None
        self._calls: Counter[str] = Counter()
        self._shape = self._leave_latent(network) if kernel in LATENT or self.absorbed else None
        transformers = require("transformers", extra="model")
        name = f"assay_{plain}_{next(_numbers)}"
        masks = require("transformers.masking_utils", extra="model").ALL_MASK_ATTENTION_FUNCTIONS
        transformers.AttentionInterface.register(name, self._attend)
        transformers.AttentionMaskInterface.register(name, masks[plain])
        network.set_attn_implementation(name)
        if network.config._attn_implementation != name:
            raise NotImplementedError(f"attention of {type(network).__name__} must be exchangeable, and is not")

    def begin_batch(self, pads: Sequence[int], length: int) -> None:
        """Prompts come next, ``length`` columns of them, with ``pads`` columns without a token, by row."""
        self._observed = None
        if self.selection is not None:
            self._observed = Observed(self.selection, pads, length, self._note_scores)

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
        elif self._shape is not None and self.kernel in LATENT:
            self._step = self._latent_step(self._shape, LatentRows.of(pads, start, stop, like.device), like.dtype)

    def keep_selected(self, cache: Any, mask: Tensor) -> Tensor:
        """Leave in the cache what the selection keeps of the prompts that were read.

        Args:
            cache: Of the model.
            mask: ``[B, S]``, int64, 1 where a token stands.

        Returns:
            The mask of what is left; that of before without a selection.
        """
        if self.selection is None or self._observed is None:
            return mask
        mask, layers = self._observed.keep(cache)
        self._observed = None
        self._calls[f"{SELECT}/{self.selection.name}"] += layers
        return mask

    def begin_decode(self) -> None:
        """One token of each row comes next, or a few that are known."""
        self._stage, self._step = DECODE, None

    def note_kda(self, kernel: str) -> None:
        """Count a call that served a layer of another kind, in a stage of its own beside that of the attention."""
        self._calls[f"{KDA}_{self._stage}/{kernel}"] += 1

    def take(self) -> Counter[str]:
        """Calls since the last time, by ``stage/kernel``."""
        calls, self._calls = self._calls, Counter()
        return calls

    def _note_scores(self, kernel: str) -> None:
        self._calls[f"{SCORES}/{kernel}"] += 1

    def _latent_step(self, shape: MlaShape, rows: LatentRows, dtype: torch.dtype) -> PrefillStep | TopkStep:
        if self._topk is not None:
            return TopkStep.of(rows, self.kernel, shape=shape, dtype=dtype, rule=self._topk, provider=self._provider)
        return PrefillStep.of(
            rows,
            shape=shape,
            dtype=dtype,
            chunk=self._chunk,
            provider=self._provider,
            observed=self._observed,
        )

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers calls it: queries ``[B, H, columns, Dq]`` to outputs ``[B, columns, H, Dv]``."""
        if self.seam is not None and self._step is not None:
            step, scale, name = self._step, float(options["scaling"]), self.seam.name
            if isinstance(step, PackedStep):
                check_plain(options)
                out = step.attend(self.seam, module.layer_idx, query, key, value, scale)
            else:
                out = step.attend(self.seam, module, query, key, value, scale)
            if isinstance(step, TopkStep) and not self.seam.describe():
                name = f"{name}/{step.implementation}"
            self._calls[f"{self._stage}/{name}"] += 1
            return out, None
        if self._shape is not None and self._decodes_absorbed():
            self._calls[f"{self._stage}/{ABSORBED}"] += 1
            weight, scale = up_projection(module, self._shape), float(options["scaling"])
            return absorbed_attention(query, key, value, weight, attention_mask, scale=scale, shape=self._shape), None
        if self.plain == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = require("transformers", extra="model").AttentionInterface()[self.plain]
        out, weights = function(module, query, key, value, attention_mask, **options)
        self._calls[f"{self._stage}/{self.plain}"] += 1
        return out, weights

    def _leave_latent(self, network: Any) -> MlaShape:
        """Have every layer hand over its latents where they are served as they are; return the sizes of a layer."""
        layers = latent_layers(network, self.kernel if self.kernel in LATENT else f"{ABSORBED} decoding")
        shape, like = latent_shape(layers), next(network.parameters())
        if self.kernel in LATENT:
            # a kernel that does not serve says so now, and not at the first sample
            self._latent_step(shape, LatentRows.of([0], 0, 1, like.device), like.dtype)
        for layer in layers:
            layer.expand_kv = self._expansion(layer.expand_kv)
        return shape

    def _expansion(self, expand: Any) -> Any:
        def expand_kv(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            served = isinstance(self._step, PrefillStep | TopkStep) or self._decodes_absorbed()
            expanded: tuple[Tensor, Tensor] = (kv_nope, k_rot) if served else expand(kv_nope, k_rot)
            return expanded

        return expand_kv

    def _decodes_absorbed(self) -> bool:
        return self.absorbed and self._stage == DECODE
