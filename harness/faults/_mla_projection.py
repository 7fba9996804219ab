"""Faults of ``mla_prefill`` between latent rows and the keys and values of each head."""

from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import State, expand, mla_prefill_twin

OP = "mla_prefill"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="rope width 0 assumed")
def rope_dropped(**arguments: Any) -> State:
    """The rotated part of the keys counts as 0."""
    return mla_prefill_twin({**arguments, "k_pe": torch.zeros_like(arguments["k_pe"])}, gather=_zero_rope)


def _zero_rope(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    return kv_c[own], k_pe.new_zeros(len(own), k_pe.shape[1])


@planted(OP, NUMERIC, source="K concat without a broadcast")
def rope_for_head_0_only(**arguments: Any) -> State:
    """The rotated part reaches the first head alone."""

    def first_head(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        k, v = expand(latent, rope, kv_b_proj, d_nope)
        k[:, 1:, d_nope:] = 0
        return k, v

    return mla_prefill_twin(arguments, expand=first_head)


@planted(OP, NUMERIC, source="order of the concatenation")
def rope_before_nope(**arguments: Any) -> State:
    """Keys hold the rotated part first, queries last."""

    def swapped(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        k, v = expand(latent, rope, kv_b_proj, d_nope)
        return torch.cat([k[..., d_nope:], k[..., :d_nope]], dim=-1), v

    return mla_prefill_twin(arguments, expand=swapped)


@planted(OP, NUMERIC, source="W_UK and W_UV exchanged")
def k_and_v_halves_swapped(**arguments: Any) -> State:
    """Values come from the first rows of the projection, keys from the last."""

    def swapped(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        return expand(latent, rope, kv_b_proj.roll(d_nope, dims=1), d_nope)

    return mla_prefill_twin(arguments, expand=swapped)


@planted(OP, NUMERIC, source="tensor-parallel shards joined in the wrong order")
def projected_heads_reversed(**arguments: Any) -> State:
    """Head ``h`` gets the keys and values of head ``H - 1 - h``."""
    return mla_prefill_twin({**arguments, "kv_b_proj": arguments["kv_b_proj"].flip(0)})


@planted(OP, NUMERIC, source="weight viewed as [Dn + Dv, H, R]")
def projection_rows_interleaved(**arguments: Any) -> State:
    """The rows of the projection are read dimension by dimension instead of head by head."""
    weight = arguments["kv_b_proj"]
    interleaved = weight.reshape(weight.shape[1], weight.shape[0], weight.shape[2]).transpose(0, 1)
    return mla_prefill_twin({**arguments, "kv_b_proj": interleaved})


@planted(OP, NUMERIC, source="chunked prefill with the queries' weights of one rank")
def projection_of_head_0_for_all(**arguments: Any) -> State:
    """Every head gets the keys and values of head 0."""
    weight = arguments["kv_b_proj"]
    return mla_prefill_twin({**arguments, "kv_b_proj": weight[:1].expand_as(weight)})


def _projected(latent: Tensor, kv_b_proj: Tensor) -> Tensor:
    """``[m, H, Dn + Dv]``, contiguous, in the dtype of the latents."""
    return torch.einsum("sr,hdr->shd", latent.float(), kv_b_proj.float()).to(latent.dtype).contiguous()


def _with_rope(k: Tensor, rope: Tensor) -> Tensor:
    return torch.cat([k, rope[:, None, :].expand(-1, k.shape[1], -1)], dim=-1)


@planted(OP, NUMERIC, rows=("F11", "F26"))
def v_read_as_contiguous(**arguments: Any) -> State:
    """Values are a view of the projection, and are read as if they had no keys between them."""

    def contiguous_v(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        both = _projected(latent, kv_b_proj)
        m, num_heads, width = both.shape
        d_v = width - d_nope
        v = both.as_strided((m, num_heads, d_v), (num_heads * d_v, d_v, 1), d_nope)
        return _with_rope(both[..., :d_nope], rope), v

    return mla_prefill_twin(arguments, expand=contiguous_v)


@planted(OP, NUMERIC, rows=("F26",), source="Dao-AILab/flash-attention#2665")
def k_view_read_as_contiguous(**arguments: Any) -> State:
    """Without a rope part keys are a view of the projection, and are read as if they had no values between them."""

    def contiguous_k(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        both = _projected(latent, kv_b_proj)
        m, num_heads, _ = both.shape
        k, v = both.as_strided((m, num_heads, d_nope), (num_heads * d_nope, d_nope, 1)), both[..., d_nope:]
        return (k, v) if not rope.shape[1] else (_with_rope(both[..., :d_nope], rope), v)

    return mla_prefill_twin(arguments, expand=contiguous_k)


@planted(OP, NUMERIC, rows=("F25",))
def padding_of_k_written_into_v(**arguments: Any) -> State:
    """Keys are a view of the projection; the zeros that widen them for the tile fall on the values."""

    def widened(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        both = _projected(latent, kv_b_proj)
        both[..., d_nope : d_nope + 4] = 0
        return _with_rope(both[..., :d_nope], rope), both[..., d_nope:]

    return mla_prefill_twin(arguments, expand=widened)


@planted(OP, NONFINITE, source="undefined values cleaned after the projection")
def nan_in_values_swallowed(**arguments: Any) -> State:
    """A projected value that is NaN counts as 0, so that broken weights look like a result."""

    def cleaned(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        k, v = expand(latent, rope, kv_b_proj, d_nope)
        return k, torch.where(v.isnan(), 0.0, v)

    return mla_prefill_twin(arguments, expand=cleaned)


@planted(OP, NUMERIC, Verdict.PRECISION_DOWNGRADE, source="GEMM with a half-precision accumulator")
def projection_accumulated_in_input_dtype(**arguments: Any) -> State:
    """The sums of the projection are rounded after every 16 products."""

    def coarse(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, d_nope: int) -> tuple[Tensor, Tensor]:
        total = latent.new_zeros(len(latent), *kv_b_proj.shape[:2])
        for part, weight in zip(latent.split(16, dim=1), kv_b_proj.split(16, dim=2), strict=True):
            total = (total.float() + torch.einsum("sr,hdr->shd", part.float(), weight.float())).to(latent.dtype)
        return _with_rope(total[..., :d_nope], rope), total[..., d_nope:]

    return mla_prefill_twin(arguments, expand=coarse)


@planted(OP, NUMERIC, rows=(), source="cache read through fp8")
def latents_in_e4m3(**arguments: Any) -> State:
    """Latent rows pass through e4m3 before the projection."""

    def quantised(kv_c: Tensor, k_pe: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return kv_c[own].to(torch.float8_e4m3fn).to(kv_c.dtype), k_pe[own]

    return mla_prefill_twin(arguments, gather=quantised)
