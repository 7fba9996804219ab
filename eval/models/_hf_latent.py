"""A step of a left-padded batch over the latent rows of a cache, and its service by ``mla_prefill``."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill
from ._hf_selection import Observed, Scoring
from .seam import Arguments, Seam


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """Where the tokens of columns ``start .. stop - 1`` stand, and those of all columns before.

    Attributes:
        rows: Of the batch that have a token here: the requests of the step.
        query_lens: Tokens of each in these columns.
        context_lens: Tokens of each up to column ``stop``.
        current: ``[B, stop - start]``, bool, where its tokens stand.
        table: ``[N, max_context]``, int64, position to row of the cache, seen as ``[B * stop, R]``; -1 where unused.
        slots: ``[S]``, int64, its used entries, request by request.
        num_slots: ``B * stop``.
    """

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    current: Tensor
    table: Tensor
    slots: Tensor
    num_slots: int

    @classmethod
    def of(cls, pads: Sequence[int], start: int, stop: int, device: torch.device) -> "LatentRows":
        """``pads`` are the columns without a token, by row; a row that has not begun is no request."""
        served = [row for row, pad in enumerate(pads) if pad < stop]
        contexts = [stop - pads[row] for row in served]
        # the cache is [B, 1, stop, R]: the token of row r in column c has the slot r * stop + c
        table = torch.full((len(served), max(contexts)), -1, dtype=torch.int64)
        for at, (row, context) in enumerate(zip(served, contexts, strict=True)):
            table[at, :context] = row * stop + pads[row] + torch.arange(context)
        return cls(
            rows=tuple(served),
            query_lens=tuple(stop - max(start, pads[row]) for row in served),
            context_lens=tuple(contexts),
            current=(torch.arange(start, stop) >= torch.tensor(pads)[:, None]).to(device),
            table=table.to(device),
            slots=table[table >= 0].to(device),
            num_slots=len(pads) * stop,
        )

    @property
    def cu_seqlens_q(self) -> Tensor:
        """``[N + 1]``, int64, on the CPU."""
        return torch.tensor([0, *itertools.accumulate(self.query_lens)])

    @property
    def cu_seqlens_k(self) -> Tensor:
        """``[N + 1]``, int64, on the CPU, of whole contexts."""
        return torch.tensor([0, *itertools.accumulate(self.context_lens)])

    def spread(self, served: Tensor) -> Tensor:
        """Outputs ``[T, H, Dv]`` as ``[B, columns, H, Dv]``; columns without a token are zero."""
        out = served.new_zeros(*self.current.shape, *served.shape[1:])
        out[self.current] = served
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """A step that ``mla_prefill`` serves, the same for every layer.

    Attributes:
        rows: Its tokens.
        plan: Of the operation.
        arguments: Of the operation, those that are no tensors of a layer.
        scoring: Of the tokens on the way, if any of them is observed.
    """

    rows: LatentRows
    plan: MlaPrefillPlan
    arguments: Arguments
    scoring: Scoring | None

    @classmethod
    def of(
        cls,
        rows: LatentRows,
        *,
        shape: MlaShape,
        dtype: torch.dtype,
        chunk: int,
        provider: str,
        observed: Observed | None,
    ) -> "PrefillStep":
        """Plan it; ``chunk`` is the most history that is expanded at once, ``observed`` gathers scores."""
        integers = {
            "cu_seqlens": rows.cu_seqlens_q,
            "slot_table": rows.table,
            "request_rows": torch.arange(len(rows.rows)),
            "context_lens": torch.tensor(rows.context_lens),
        }
        plan = plan_mla_prefill(
            *integers.values(),
            shape=shape,
            dtype=dtype,
            num_slots=rows.num_slots,
            history_chunk_size=chunk,
            provider=provider,
        )
        # as the judge gives them
        arguments: Arguments = {name: tensor.to(rows.table.device, torch.int32) for name, tensor in integers.items()}
        return cls(
            rows=rows,
            plan=plan,
            arguments=arguments | {"history_chunk_size": chunk},
            scoring=None if observed is None else observed.scoring(plan, rows.rows),
        )

    def attend(self, seam: Seam, module: Any, query: Tensor, kv_c: Tensor, k_pe: Tensor, scale: float) -> Tensor:
        """One call for all tokens of the step.

        Args:
            seam: Serves ``mla_prefill``.
            module: The layer.
            query: ``[B, H, columns, Dn + Dr]``.
            kv_c: ``[B, 1, stop, R]``.
            k_pe: ``[B, 1, stop, Dr]``.
            scale: Factor on the logits.

        Returns:
            ``[B, columns, H, Dv]``.
        """
        shape, layer = self.plan.shape, module.layer_idx
        tensors = {
            "q": query.transpose(1, 2)[self.rows.current],
            "kv_c": kv_c.reshape(-1, shape.kv_lora_rank),
            "k_pe": k_pe.reshape(-1, shape.d_rope),
            "kv_b_proj": up_projection(module, shape),
        }

        def house() -> Tensor:
            options: dict[str, Any] = {"softmax_scale": scale, "plan": self.plan, "return_lse": False}
            if self.scoring is None:
                return mla_prefill(*tensors.values(), **options)[0]
            scores = query.new_empty(self.scoring.plan.score_shape, dtype=self.scoring.plan.score_dtype)
            out, _ = mla_prefill(*tensors.values(), **options, scores=scores, score_plan=self.scoring.plan)
            self.scoring.note(layer, scores)
            return out

        served = seam.serve(layer, tensors | {"softmax_scale": scale} | self.arguments, house)
        return self.rows.spread(served)


def latent_layers(network: Any, kernel: str) -> list[Any]:
    """The layers of a model whose cache holds latent rows, for a kernel that is to serve them.

    Raises:
        NotImplementedError: If there is none, or one that chooses for itself what its queries look at.
    """
    layers = [module for module in network.modules() if hasattr(module, "expand_kv")]
    if not layers:
        raise NotImplementedError(f"{kernel} must have latent attention, got {type(network).__name__}")
    if any(hasattr(layer, "indexer") for layer in layers):
        raise NotImplementedError(f"{kernel} must have latent attention to all tokens, got {type(network).__name__}")
    return layers


def latent_shape(layers: Sequence[Any]) -> MlaShape:
    """The sizes that all the layers have.

    Raises:
        NotImplementedError: If they differ.
    """
    shapes = {
        MlaShape(
            num_heads=layer.num_heads,
            kv_lora_rank=layer.kv_lora_rank,
            d_nope=layer.qk_nope_head_dim,
            d_rope=layer.qk_rope_head_dim,
            d_v=layer.v_head_dim,
        )
        for layer in layers
    }
    if len(shapes) != 1:
        raise NotImplementedError(f"latent layers must have the same sizes, got {len(shapes)} of them")
    return shapes.pop()


def up_projection(module: Any, shape: MlaShape) -> Tensor:
    """``W_UK`` above ``W_UV`` of a layer, ``[H, Dn + Dv, R]``."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(shape.num_heads, shape.d_nope + shape.d_v, shape.kv_lora_rank)
