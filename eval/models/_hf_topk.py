"""A step of a prefill whose queries look at their best tokens alone, by the kernels that serve a sparse model.

The choice comes first and is the same for all of them. ``masked_mha`` expands keys and values and attends under the
bits of the choice; ``sparse_mla`` absorbs the queries and reads the chosen latent rows, with the heads that there are
or, as its implementation ``padded``, with 64 or 128.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optimized.attention import AttentionShape
from ...optimized.masked_mha import MaskedMhaPlan, masked_mha, plan_masked_mha
from ...optimized.mla_prefill import MlaShape
from ...optimized.sparse_mla import SparseMlaPlan, SparseMlaShape, plan_sparse_mla, sparse_mla
from ...optimized.topk_mask import TopkMaskPlan, plan_topk_mask, topk_mask
from ._hf_exact_scores import TopkRule, absorbed_queries, exact_selection
from ._hf_latent import LatentRows, up_projection
from .seam import Arguments, Seam

MASKED_MHA, SPARSE_MLA = "masked_mha", "sparse_mla"
TOPK_KERNELS = (MASKED_MHA, SPARSE_MLA)
# lists are as long as the choice, or as the longest context and what kernels want lengths to be multiples of
MULTIPLE = 128
# of rows of bits, which are an eighth of a byte a query and token
MAX_MASK_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Keys and values of all tokens, and of them those that are chosen: ``masked_mha``."""

    rows: LatentRows
    shape: MlaShape
    plan: MaskedMhaPlan
    mask: TopkMaskPlan

    @classmethod
    def of(cls, rows: LatentRows, shape: MlaShape, dtype: torch.dtype, width: int, implementation: str) -> "Masked":
        """Plan it for lists of ``width`` entries."""
        device = rows.table.device
        sizes = AttentionShape(
            device=device,
            dtype=dtype,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim_qk=shape.d_nope + shape.d_rope,
            head_dim_v=shape.d_v,
        )
        plan = plan_masked_mha(rows.cu_seqlens_q, rows.cu_seqlens_k, shape=sizes, implementation=implementation)
        mask = plan_topk_mask(
            rows.cu_seqlens_q,
            torch.tensor(rows.context_lens),
            topk=width,
            device=device,
            tile=plan.tile,
            max_bytes=MAX_MASK_BYTES,
            implementation=plan.implementation,
        )
        return cls(rows=rows, shape=shape, plan=plan, mask=mask)

    def attend(
        self, seam: Seam, layer: int, q: Tensor, latent: Tensor, weight: Tensor, chosen: Tensor, scale: float
    ) -> Tensor:
        """Queries ``[T, H, Dn + Dr]`` to outputs ``[T, H, Dv]``."""
        shape, plan = self.shape, self.plan
        mask, tile_map = topk_mask(chosen, plan=self.mask)
        context = latent[self.rows.slots]
        both = torch.nn.functional.linear(context[:, : shape.kv_lora_rank], weight.flatten(0, 1))
        k_nope, v = both.unflatten(1, (shape.num_heads, -1)).split([shape.d_nope, shape.d_v], dim=-1)
        rope = context[:, None, shape.kv_lora_rank :].expand(-1, shape.num_heads, -1)
        k = torch.cat([k_nope, rope], dim=-1)
        arguments: Arguments = {"q": q, "k": k, "v": v, "mask": mask, "softmax_scale": scale}
        arguments |= {"cu_seqlens_q": plan.cu_seqlens_q, "cu_seqlens_k": plan.cu_seqlens_k}
        query_starts, key_starts, _ = plan.starts.T.contiguous()
        arguments |= {"query_starts": query_starts, "key_starts": key_starts}

        def house() -> Tensor:
            return masked_mha(q, k, v, mask, softmax_scale=scale, plan=plan, tile_map=tile_map)[0]

        return seam.serve(layer, arguments, house)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Latent rows, and of them those that are chosen: ``sparse_mla``."""

    rows: LatentRows
    shape: MlaShape
    plan: SparseMlaPlan

    @classmethod
    def of(cls, rows: LatentRows, shape: MlaShape, dtype: torch.dtype, width: int, implementation: str) -> "Sparse":
        """Plan it for lists of ``width`` entries."""
        sizes = SparseMlaShape(
            device=rows.table.device,
            dtype=dtype,
            s_q=sum(rows.query_lens),
            s_kv=rows.num_slots,
            h_q=shape.num_heads,
            d_qk=shape.kv_lora_rank + shape.d_rope,
            d_v=shape.kv_lora_rank,
            topk=width,
        )
        return cls(rows=rows, shape=shape, plan=plan_sparse_mla(sizes, implementation=implementation))

    def attend(
        self, seam: Seam, layer: int, q: Tensor, latent: Tensor, weight: Tensor, chosen: Tensor, scale: float
    ) -> Tensor:
        """Queries ``[T, H, Dn + Dr]`` to outputs ``[T, H, Dv]``: absorbed before the call, values brought up behind."""
        shape, plan = self.shape, self.plan
        absorbed = absorbed_queries(q, weight, shape)
        # the tokens of a request lie side by side in the cache
        first = self.rows.table[:, 0].repeat_interleave(torch.tensor(self.rows.query_lens, device=q.device))
        indices = torch.where(chosen < 0, -1, chosen + first[:, None]).int()
        arguments: Arguments = {"q": absorbed, "kv": latent, "indices": indices, "softmax_scale": scale}
        arguments |= {"d_v": shape.kv_lora_rank, "topk_length": None, "attn_sink": None}

        def house() -> Tensor:
            return sparse_mla(absorbed, latent, indices, softmax_scale=scale, plan=plan)[0]

        mixed = seam.serve(layer, arguments, house)
        return torch.einsum("thr,hvr->thv", mixed, weight[:, shape.d_nope :])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkStep:
    """The step, the same for every layer.

    Attributes:
        rows: Its tokens.
        shape: Of a layer.
        rule: Of the choice.
        width: Of a list.
        kernel: That serves.
    """

    rows: LatentRows
    shape: MlaShape
    rule: TopkRule
    width: int
    kernel: Masked | Sparse

    @classmethod
    def of(
        cls, rows: LatentRows, kernel: str, *, shape: MlaShape, dtype: torch.dtype, rule: TopkRule, provider: str
    ) -> "TopkStep":
        """Plan it for a kernel of ``TOPK_KERNELS``; ``provider`` is an implementation of it, or ``auto``.

        Raises:
            ValueError: If the kernel has no such implementation.
            NotImplementedError: If the implementation does not serve the sizes.
        """
        width = min(rule.topk, -(-max(rows.context_lens) // MULTIPLE) * MULTIPLE)
        service = Masked if kernel == MASKED_MHA else Sparse
        return cls(
            rows=rows, shape=shape, rule=rule, width=width, kernel=service.of(rows, shape, dtype, width, provider)
        )

    @property
    def implementation(self) -> str:
        """Of the kernel, as it was planned."""
        return self.kernel.plan.implementation

    def attend(self, seam: Seam, module: Any, query: Tensor, kv_c: Tensor, k_pe: Tensor, scale: float) -> Tensor:
        """One choice and one call for all tokens of the step; arguments and result as of ``PrefillStep``."""
        q = query.transpose(1, 2)[self.rows.current]
        latent = torch.cat([kv_c, k_pe], dim=-1).flatten(0, 2)
        weight = up_projection(module, self.shape)
        chosen = exact_selection(
            q, latent, weight, scale=scale, width=self.width, rule=self.rule, rows=self.rows, shape=self.shape
        )
        return self.rows.spread(self.kernel.attend(seam, module.layer_idx, q, latent, weight, chosen, scale))
