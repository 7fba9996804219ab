"""The paths that ``routing`` chooses among, each from latent rows to the outputs of the heads, and their warm-up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._routing_tables import MlaGeometry
from ._sparse_mla_plan import IMPLEMENTATIONS, refusal
from .attention import AttentionShape, attention, plan_attention
from .masked_mha import masked_mha, plan_masked_mha
from .sparse_mla import SparseMlaShape, plan_sparse_mla, sparse_mla
from .topk_mask import plan_topk_mask, topk_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The tensors of one request, all heads of a rank.

    Attributes:
        geometry: Of the model.
        q: ``[T, H, Dn + Dr]``, of the last ``T`` tokens; the part without RoPE first.
        latent: ``[S, R + Dr]``, of all tokens; of a unified head ``[S, R]``.
        kv_b_proj: ``[H, Dn + Dv, R]``, per head ``W_UK`` above ``W_UV``; None for a unified head.
        indices: ``[T, topk]``, int32, positions up to each query's own.
    """

    geometry: MlaGeometry
    q: Tensor
    latent: Tensor
    kv_b_proj: Tensor | None
    indices: Tensor

    @property
    def softmax_scale(self) -> float:
        """Of the head size before absorption."""
        return float(self.q.shape[2] ** -0.5)


def random_prefill(
    geometry: MlaGeometry,
    *,
    num_heads: int,
    query_len: int,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Prefill:
    """A request with normal contents and a uniform selection of each query's past, in which rows may repeat.

    Raises:
        ValueError: If the model selects nothing, or there are more queries than tokens.
    """
    if geometry.topk is None:
        raise ValueError(f"geometry must be one that selects rows, got {geometry.name}")
    if not 1 <= query_len <= seq_len:
        raise ValueError(f"query_len must be 1 to seq_len = {seq_len}, got {query_len}")
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator).to(dtype)

    rank, unified = geometry.kv_lora_rank, geometry.unified
    past = torch.arange(seq_len - query_len + 1, seq_len + 1, device=device)[:, None]
    drawn = torch.rand(query_len, geometry.topk, device=device, generator=generator) * past
    weight = None if unified else normal(num_heads, geometry.d_nope + geometry.d_v, rank) / rank**0.5
    return Prefill(
        geometry=geometry,
        q=normal(query_len, num_heads, geometry.d_nope + geometry.d_rope),
        latent=normal(seq_len, geometry.row_width),
        kv_b_proj=weight,
        indices=torch.minimum(drawn.int(), past.int() - 1),
    )


def dense_call(given: Prefill) -> Callable[[], Tensor]:
    """Expand keys and values of all tokens, and attend to the past: exact where everything is selected."""
    (query_len, heads, d_qk), seq_len = given.q.shape, len(given.latent)
    plan = plan_attention(
        torch.tensor([0, query_len]), torch.tensor([0, seq_len]), causal=True, shape=_expanded_shape(given, heads, d_qk)
    )

    def call() -> Tensor:
        k, v = _expanded(given)
        return attention(given.q, k, v, softmax_scale=given.softmax_scale, plan=plan)[0]

    return call


def masked_call(given: Prefill) -> Callable[[], Tensor]:
    """Build the mask, expand keys and values of all tokens, and attend to what is selected of the past, once each."""
    (query_len, heads, d_qk), seq_len = given.q.shape, len(given.latent)
    starts, ends = torch.tensor([0, query_len]), torch.tensor([0, seq_len])
    plan = plan_masked_mha(starts, ends, shape=_expanded_shape(given, heads, d_qk))
    mask_plan = plan_topk_mask(
        starts,
        torch.tensor([seq_len]),
        topk=given.indices.shape[1],
        device=given.q.device,
        tile=plan.tile,
        max_bytes=1 << 40,
    )

    def call() -> Tensor:
        mask, tile_map = topk_mask(given.indices, plan=mask_plan)
        k, v = _expanded(given)
        scale = given.softmax_scale
        return masked_mha(given.q, k, v, mask, softmax_scale=scale, plan=plan, tile_map=tile_map)[0]

    return call


def sparse_call(
    given: Prefill, *, implementation: str = "auto", lengths: bool = False, sinks: bool = False
) -> Callable[[], Tensor]:
    """Absorb the queries, attend to the selected latent rows as often as they are listed, and bring the values up.

    Args:
        given: The request.
        implementation: As in ``plan_sparse_mla``.
        lengths: Whether a length of each list is passed, here all of it.
        sinks: Whether sinks are passed, here without weight.
    """
    query_len, heads, _ = given.q.shape
    shape = _sparse_shape(given, query_len, heads)
    device = given.q.device
    topk_length = torch.full((query_len,), shape.topk, dtype=torch.int32, device=device) if lengths else None
    plan = plan_sparse_mla(shape, topk_length=topk_length, indices=given.indices, implementation=implementation)
    sink = torch.full((heads,), -torch.inf, dtype=shape.accumulator_dtype, device=device) if sinks else None
    d_nope, weight = given.geometry.d_nope, given.kv_b_proj

    def call() -> Tensor:
        q = given.q
        if weight is not None:
            absorbed = torch.einsum("thd,hdr->thr", q[..., :d_nope], weight[:, :d_nope])
            q = torch.cat([absorbed, q[..., d_nope:]], dim=-1) if given.geometry.d_rope else absorbed
        out, _, _ = sparse_mla(
            q, given.latent, given.indices, softmax_scale=given.softmax_scale, plan=plan, attn_sink=sink
        )
        return out if weight is None else torch.einsum("thr,hvr->thv", out, weight[:, d_nope:])

    return call


def warmup(
    geometry: MlaGeometry,
    lengths: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> list[str]:
    """Run once whatever ``routing`` may choose for a model, so that no request waits for a compiler.

    Expanded attention, dense and masked, runs at each pair of lengths: its tiles and its provider may depend on them.
    Every implementation of sparse attention that serves runs with and without lengths of the lists and sinks; nothing
    in it is compiled for a number of queries or tokens.

    Args:
        geometry: Of the model.
        lengths: ``(query_len, seq_len)`` of requests as they will come; one of each kind is enough.
        num_heads: On this rank.
        device: To compile for.
        dtype: Of the tensors.

    Returns:
        What has run, a line each.
    """
    if not lengths:
        raise ValueError("lengths must hold at least one pair, got none")
    done: list[str] = []

    def run(name: str, call: Callable[[], Tensor]) -> None:
        call()
        done.append(name)

    for query_len, seq_len in lengths:
        given = random_prefill(
            geometry, num_heads=num_heads, query_len=query_len, seq_len=seq_len, device=device, dtype=dtype
        )
        if not geometry.unified:
            run(f"dense_mha {query_len} of {seq_len}", dense_call(given))
            run(f"masked_mha {query_len} of {seq_len}", masked_call(given))
    shape = _sparse_shape(given, query_len, num_heads)
    for name in (name for name in IMPLEMENTATIONS if refusal(name, shape) is None):
        for listed, sunk in ((False, False), (True, False), (False, True), (True, True)):
            call = sparse_call(given, implementation=name, lengths=listed, sinks=sunk)
            run(f"sparse {name}{', lengths' if listed else ''}{', sinks' if sunk else ''}", call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return done


def _sparse_shape(given: Prefill, query_len: int, heads: int) -> SparseMlaShape:
    return SparseMlaShape(
        device=given.q.device,
        dtype=given.q.dtype,
        s_q=query_len,
        s_kv=len(given.latent),
        h_q=heads,
        d_qk=given.geometry.row_width,
        d_v=given.geometry.kv_lora_rank,
        topk=given.indices.shape[1],
    )


def _expanded_shape(given: Prefill, heads: int, d_qk: int) -> AttentionShape:
    """Of attention over expanded keys.

    Raises:
        NotImplementedError: If there is nothing to expand.
    """
    if given.kv_b_proj is None:
        raise NotImplementedError(f"the heads of {given.geometry.name} are unified: there is nothing to expand")
    return AttentionShape(
        device=given.q.device,
        dtype=given.q.dtype,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim_qk=d_qk,
        head_dim_v=given.geometry.d_v,
    )


def _expanded(given: Prefill) -> tuple[Tensor, Tensor]:
    """``k``, ``[S, H, Dn + Dr]``, which is a view beside the values where there is no rope part, and ``v``."""
    weight, geometry = given.kv_b_proj, given.geometry
    if weight is None:
        raise NotImplementedError("there is nothing to expand")
    heads, width, rank = weight.shape
    both = (given.latent[:, :rank] @ weight.flatten(0, 1).T).view(-1, heads, width)
    k_nope, v = both.split([geometry.d_nope, geometry.d_v], dim=-1)
    if geometry.d_rope == 0:
        return k_nope, v
    rope = given.latent[:, None, rank:].expand(-1, heads, -1)
    return torch.cat([k_nope, rope], dim=-1), v
