"""The host's part of chunked MLA prefill: every value check, the slots of every pass, and the workspace estimate."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .attention import AttentionPlan, AttentionShape, plan_attention

# tensor descriptors, offsets and the rounding of allocations
PROVIDER_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """The sizes of an MLA layer: heads on this device, latent rank ``R``, and ``Dn``, ``Dr``, ``Dv``."""

    num_heads: int
    kv_lora_rank: int
    d_nope: int
    d_rope: int
    d_v: int

    def __post_init__(self) -> None:
        """Refuse sizes that no layer has; only the rope part may be empty."""
        for name in ("num_heads", "kv_lora_rank", "d_nope", "d_rope", "d_v"):
            size, least = getattr(self, name), 0 if name == "d_rope" else 1
            if type(size) is not int:
                raise TypeError(f"{name} must be an int, got {type(size).__name__}")
            if size < least:
                raise ValueError(f"{name} must be at least {least}, got {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryChunk:
    """One pass over a part of the history of one request: ``offset`` is the position of its first token."""

    request: int
    offset: int
    queries: slice
    slots: Tensor
    plan: AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaPrefillPlan:
    """What one step does, the same for each of its layers; its slots are a copy, so nothing in it goes stale.

    ``slots`` are those of all tokens, request by request; ``max_context`` is the width of the slot table.
    """

    shape: MlaShape
    dtype: torch.dtype
    device: torch.device
    num_slots: int
    num_tokens: int
    context_lens: tuple[int, ...]
    max_context: int
    history_chunk_size: int
    slots: Tensor
    current_slots: Tensor
    current: AttentionPlan
    chunks: tuple[HistoryChunk, ...]
    workspace_bytes: int
    choice: str = field(repr=False)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype in which partial results are merged."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def projected_rows(self) -> int:
        """Latent rows that one layer projects: the sum of ``context_lens``."""
        return len(self.current_slots) + sum(len(chunk.slots) for chunk in self.chunks)


def plan_mla_prefill(
    cu_seqlens: Tensor,
    slot_table: Tensor,
    request_rows: Tensor,
    context_lens: Tensor,
    *,
    shape: MlaShape,
    dtype: torch.dtype,
    num_slots: int,
    history_chunk_size: int = 16384,
    provider: str = "auto",
    workspace_limit_bytes: int | None = None,
) -> MlaPrefillPlan:
    """Check the values of a step and lay out its passes; made once and passed to every layer.

    The history of each request is cut at multiples of ``history_chunk_size``. Reads the lengths back to the host, so
    it synchronises; the forward pass does not.

    Args:
        cu_seqlens: ``[N + 1]``, int32 or int64; starts at 0, strictly increasing: each request has a current token.
        slot_table: ``[rows, max_context]``, int32 or int64, token position to cache slot, -1 where unused.
        request_rows: ``[N]``, int32 or int64, the row of ``slot_table`` of each request.
        context_lens: ``[N]``, int32 or int64, tokens of each request, the current ones included.
        shape: Of the layer.
        dtype: Of queries, caches and weights: float16, bfloat16, float32, or float64 where the provider serves it.
        num_slots: Rows of the cache.
        history_chunk_size: Most history tokens that are expanded at once; independent of every other size.
        provider: Of the partial attention: ``auto``, ``torch``, ``sdpa``, ``triton``, ``fa3``, ``fa4``, ``flashinfer``.
        workspace_limit_bytes: Refuse a plan that needs more than this.

    Returns:
        The plan; ``workspace_bytes`` is the peak of tensors that the forward holds beside its inputs, ``choice`` says
        which provider was taken and why others were refused.

    Raises:
        ValueError: If a value or shape is out of range, or the workspace exceeds its limit.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If the provider does not serve the request.
    """
    _check_index_tensors(cu_seqlens, slot_table, request_rows, context_lens)
    _check_positive_int("history_chunk_size", history_chunk_size)
    _check_positive_int("num_slots", num_slots)
    starts, rows, contexts = cu_seqlens.tolist(), request_rows.tolist(), context_lens.tolist()
    _check_lengths(starts, rows, contexts, table_shape=tuple(slot_table.shape))
    slots = _own_slots(slot_table, rows, contexts, num_slots)

    device = slots.device
    attention_shape = AttentionShape(
        device=device,
        dtype=dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        head_dim_qk=shape.d_nope + shape.d_rope,
        head_dim_v=shape.d_v,
    )
    current_plan = plan_attention(cu_seqlens, cu_seqlens, causal=True, shape=attention_shape, provider=provider)
    current_slots, chunks = [], []
    for request, (queries, request_slots) in enumerate(_requests(starts, contexts, slots)):
        history = len(request_slots) - (queries.stop - queries.start)
        current_slots.append(request_slots[history:])
        for offset in range(0, history, history_chunk_size):
            part = request_slots[offset : min(offset + history_chunk_size, history)]
            passes = _one_pass(queries, part, attention_shape, provider)
            chunks.append(HistoryChunk(request=request, offset=offset, queries=queries, slots=part, plan=passes))
    workspace_bytes = _workspace_bytes(
        shape, dtype, starts[-1], [(chunk.queries, len(chunk.slots)) for chunk in chunks]
    )
    if workspace_limit_bytes is not None and workspace_bytes > workspace_limit_bytes:
        raise ValueError(
            f"workspace_limit_bytes must be at least the {workspace_bytes} bytes that {starts[-1]} current tokens "
            f"and history_chunk_size {history_chunk_size} need, got {workspace_limit_bytes}; lower either size"
        )
    return MlaPrefillPlan(
        shape=shape,
        dtype=dtype,
        device=device,
        num_slots=num_slots,
        num_tokens=starts[-1],
        context_lens=tuple(contexts),
        max_context=slot_table.shape[1],
        history_chunk_size=history_chunk_size,
        slots=slots,
        current_slots=torch.cat(current_slots),
        current=current_plan,
        chunks=tuple(chunks),
        workspace_bytes=workspace_bytes,
        choice="\n".join(dict.fromkeys([current_plan.choice, *(chunk.plan.choice for chunk in chunks)])),
    )


def _one_pass(queries: slice, slots: Tensor, shape: AttentionShape, provider: str) -> AttentionPlan:
    """The unmasked attention of one request's queries over one chunk."""
    cu_seqlens_q = torch.tensor([0, queries.stop - queries.start], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, len(slots)], dtype=torch.int32)
    return plan_attention(cu_seqlens_q, cu_seqlens_k, causal=False, shape=shape, provider=provider)


def _requests(starts: list[int], contexts: list[int], slots: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The query range and the slots of all tokens of each request."""
    for start, stop, request_slots in zip(starts[:-1], starts[1:], slots.split(contexts), strict=True):
        yield slice(start, stop), request_slots


def _check_positive_int(name: str, value: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")


def _check_index_tensors(cu_seqlens: Tensor, slot_table: Tensor, request_rows: Tensor, context_lens: Tensor) -> None:
    """Refuse index tensors of the wrong dtype, rank or mutual length."""
    ranks = {"cu_seqlens": (cu_seqlens, 1), "slot_table": (slot_table, 2)}
    ranks |= {"request_rows": (request_rows, 1), "context_lens": (context_lens, 1)}
    for name, (tensor, rank) in ranks.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimension(s), got shape {tuple(tensor.shape)}")
    requests = len(context_lens)
    if requests == 0:
        raise ValueError("context_lens must name at least one request, got none")
    if len(cu_seqlens) != requests + 1:
        raise ValueError(f"cu_seqlens must have shape {(requests + 1,)}, got {tuple(cu_seqlens.shape)}")
    if len(request_rows) != requests:
        raise ValueError(f"request_rows must have shape {(requests,)}, got {tuple(request_rows.shape)}")


def _check_lengths(starts: list[int], rows: list[int], contexts: list[int], *, table_shape: tuple[int, ...]) -> None:
    """Refuse lengths and rows that do not fit together, naming the request."""
    num_rows, width = table_shape
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {starts[0]}")
    for request, (start, stop, row, context) in enumerate(zip(starts[:-1], starts[1:], rows, contexts, strict=True)):
        if stop <= start:
            raise ValueError(f"cu_seqlens must increase strictly, got {start} then {stop} at request {request}")
        if not 0 <= row < num_rows:
            raise ValueError(f"request_rows must lie in [0, {num_rows}), got {row} at request {request}")
        if context < stop - start:
            raise ValueError(
                f"context_lens must be at least the {stop - start} current tokens, got {context} at request {request}"
            )
        if context > width:
            raise ValueError(f"context_lens must be at most {width}, slot_table's width, got {context} at {request=}")


def _own_slots(slot_table: Tensor, rows: list[int], contexts: list[int], num_slots: int) -> Tensor:
    """A private copy of the slots of all tokens, request by request, each known to lie in the cache."""
    slots = torch.cat([slot_table[row, :context] for row, context in zip(rows, contexts, strict=True)])
    bad = (slots < 0) | (slots >= num_slots)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"slot_table must hold slots in [0, {num_slots}) for every token of a request, got {int(slots[first])} at "
            f"packed token {first}"
        )
    return slots


def _workspace_bytes(shape: MlaShape, dtype: torch.dtype, tokens: int, passes: list[tuple[slice, int]]) -> int:
    """Peak of the tensors alive at once in the forward, the outputs included, the inputs not.

    Each pass over ``n`` rows projects (latent rows and projection alive), copies keys (projection, keys and gathered
    rope rows), then attends (projection, keys, partial output, and its lse twice: providers bring it to our layout).
    """
    element = dtype.itemsize
    accumulator = torch.promote_types(dtype, torch.float32).itemsize
    heads = shape.num_heads

    def expand(rows: int, attended: int) -> int:
        projection = rows * heads * (shape.d_nope + shape.d_v) * element
        keys = rows * heads * (shape.d_nope + shape.d_rope) * element if shape.d_rope else 0
        project = rows * shape.kv_lora_rank * element + projection
        copy = projection + keys + rows * shape.d_rope * element
        partial = attended * heads * (shape.d_v * element + 2 * accumulator)
        return max(project, copy, projection + keys + partial)

    out, total, lse = (tokens * heads * size for size in (shape.d_v * element, shape.d_v * accumulator, accumulator))
    phases = [expand(tokens, tokens), out + lse]
    if passes:
        cast = 0 if element == accumulator else out
        phases.append(total + lse + cast)
        phases += [total + lse + expand(rows, queries.stop - queries.start) for queries, rows in passes]
    return max(phases) + PROVIDER_SCRATCH_BYTES
