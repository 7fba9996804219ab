"""cuDNN through NVIDIA's own front end, all requests in one call, as an attention provider.

Written against the graph API of the distribution ``nvidia-cudnn-frontend`` 1.32.0 with cuDNN 9.19. The request is one
``sdpa`` node over ragged tensors: a packed tensor is described as ``[N, H, longest, D]``, and where each request begins
in it by offsets counted in elements. ``Stats`` is the log-sum-exp in natural log, packed as ``[T, H]`` here. torch
reaches the same library a request a call, and only with the causal mask aligned to the first key.

cuDNN is not asked about rows without keys: requests that have none, or no queries, are left out of the offsets, and a
causal request with fewer keys than queries begins at its first query that sees one. An execution plan is made for each
plan of ours, strides and scale, on first call; it costs the host tens of milliseconds. Not yet run on a GPU by this
project: the graph passes the front end's own checks against cuDNN 9.19 for compute capability 9.0, and the offsets and
the change of convention are tested against a stand-in.
"""

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._partial_state import (
    Prepared,
    canonical_state,
    check_call,
    empty_rows,
    empty_state,
    find,
    library_refusal,
    prepared_of,
)

if TYPE_CHECKING:
    from ..attention import AttentionPlan, AttentionShape

# the widest heads that torch's way to cuDNN was tried with
_MAX_HEAD_DIM_QK, _MAX_HEAD_DIM_V = 576, 512


@dataclass(frozen=True, slots=True)
class _Graph:
    """One execution plan of cuDNN.

    Attributes:
        graph: Built, of the library.
        operands: Its symbols for ``q``, ``k``, ``v``, ``out`` and ``lse``.
        constants: Its symbols for lengths and offsets, and the tensors on the device that they stand for.
        workspace_bytes: Scratch of a call.
    """

    graph: Any
    operands: tuple[Any, ...]
    constants: dict[Any, Tensor]
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """The requests that have rows with keys, made once a plan.

    Attributes:
        query_starts: First query of each that sees a key, in the packed batch.
        key_starts: First key of each.
        query_lens: Queries of each that see a key.
        key_lens: Keys of each.
        graphs: Execution plans made so far, by strides and scale.
    """

    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    graphs: dict[tuple[Any, ...], _Graph] = field(default_factory=dict)


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why the cuDNN front end cannot serve a request, or None."""
    reason = library_refusal(shape, library="the cuDNN front end", capabilities=(9, 10))
    if reason is not None:
        return reason
    sizes = (shape.head_dim_qk, shape.head_dim_v)
    if sizes[0] % 8 or sizes[1] % 8 or sizes[0] > _MAX_HEAD_DIM_QK or sizes[1] > _MAX_HEAD_DIM_V:
        served = f"head sizes that are multiples of 8, up to {_MAX_HEAD_DIM_QK} and {_MAX_HEAD_DIM_V}"
        return f"the cuDNN front end is asked for {served}, got {sizes[0]} and {sizes[1]}"
    found = _find()
    return found if isinstance(found, str) else None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Find the rows without keys and the requests that have others, once a plan."""
    kept: list[tuple[int, int, int, int]] = []
    query_start = key_start = 0
    for n, m in zip(plan.query_lens, plan.key_lens, strict=True):
        blind = max(n - m, 0) if plan.causal else 0
        if n > blind and m > 0:
            kept.append((query_start + blind, key_start, n - blind, m))
        query_start, key_start = query_start + n, key_start + m
    query_starts, key_starts, query_lens, key_lens = zip(*kept, strict=True) if kept else ((), (), (), ())
    return Prepared(empty=empty_rows(plan), wrapper=_Batch(query_starts, key_starts, query_lens, key_lens))


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend by the cuDNN front end; arguments and results as in ``attention``.

    Raises:
        NotImplementedError: If the library is not importable, or does not serve the scale, the strides or the request.
    """
    check_call(q, k, v, softmax_scale, library="the cuDNN front end")
    library = _find()
    if isinstance(library, str):
        raise NotImplementedError(library)
    prepared = prepared_of(plan)
    batch = prepared.wrapper
    if not isinstance(batch, _Batch):
        raise TypeError(f"plan.prepared must be of this provider, got {type(batch).__name__}")
    if not batch.query_lens:
        return empty_state(q, v.shape[-1])
    kind = (q.stride(), k.stride(), v.stride(), softmax_scale)
    if kind not in batch.graphs:
        batch.graphs[kind] = _build(library, batch, q, k, v, softmax_scale, plan.causal)
    made = batch.graphs[kind]
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    workspace = torch.empty(max(made.workspace_bytes, 1), dtype=torch.uint8, device=q.device)
    handle = _handle(q.device)
    library.set_stream(handle, torch.cuda.current_stream(q.device).cuda_stream)
    tensors = dict(zip(made.operands, (q, k, v, out, lse), strict=True)) | made.constants
    made.graph.execute(tensors, workspace, handle=handle)
    return canonical_state(out, lse, base="e", layout="TH", empty=prepared.empty)


def _build(library: Any, batch: _Batch, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> _Graph:
    """Describe the batch to cuDNN and let it choose a kernel."""
    types, constants = library.data_type, dict[Any, Tensor]()
    elements = types.BFLOAT16 if q.dtype == torch.bfloat16 else types.HALF
    graph = library.pygraph(
        io_data_type=elements,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(q.device),
    )

    def constant(values: list[int]) -> Any:
        """A symbol for numbers that never change; of 64 bits only if they need it, which the usual kernels do not."""
        wide = values[-1] > torch.iinfo(torch.int32).max
        dtype, data_type = (torch.int64, types.INT64) if wide else (torch.int32, types.INT32)
        symbol = graph.tensor(dim=(len(values), 1, 1, 1), stride=(1, 1, 1, 1), data_type=data_type)
        constants[symbol] = torch.tensor(values, dtype=dtype, device=q.device)
        return symbol

    def offsets(starts: tuple[int, ...], lens: tuple[int, ...], token_stride: int) -> Any:
        return constant([token * token_stride for token in (*starts, starts[-1] + lens[-1])])

    def packed(tensor: Tensor, starts: tuple[int, ...], lens: tuple[int, ...]) -> Any:
        (_, heads, width), (token, head, last) = tensor.shape, tensor.stride()
        return graph.tensor(
            dim=(len(lens), heads, max(lens), width),
            stride=(max(lens) * token, head, token, last),
            data_type=elements,
            ragged_offset=offsets(starts, lens, token),
        )

    queries, keys = (batch.query_starts, batch.query_lens), (batch.key_starts, batch.key_lens)
    symbols = (packed(q, *queries), packed(k, *keys), packed(v, *keys))
    # one alignment is the other where each request has as many queries as keys, and the first is the common one
    square = batch.query_lens == batch.key_lens
    alignment = library.diagonal_alignment.TOP_LEFT if square else library.diagonal_alignment.BOTTOM_RIGHT
    mask = {"diagonal_alignment": alignment, "diagonal_band_right_bound": 0} if causal else {}
    out, lse = graph.sdpa(
        *symbols,
        attn_scale=softmax_scale,
        generate_stats=True,
        use_padding_mask=True,
        seq_len_q=constant(list(batch.query_lens)),
        seq_len_kv=constant(list(batch.key_lens)),
        **mask,
    )
    heads, longest = q.shape[1], max(batch.query_lens)
    for symbol, width, data_type in ((out, v.shape[-1], elements), (lse, 1, types.FLOAT)):
        symbol.set_output(True).set_data_type(data_type)
        symbol.set_dim((len(batch.query_lens), heads, longest, width))
        symbol.set_stride((longest * heads * width, width, heads * width, 1))
        symbol.set_ragged_offset(offsets(*queries, heads * width))
    try:
        graph.build()
    except library.cudnnGraphNotSupportedError as error:
        raise NotImplementedError(f"the cuDNN front end: {error}") from error
    return _Graph(graph, (*symbols, out, lse), constants, graph.get_workspace_size())


@functools.cache
def _handle(device: torch.device) -> Any:
    """The library's handle of a device; calls on one stream follow each other."""
    with torch.cuda.device(device):
        return _find().create_handle()


def _find() -> Any:
    """The library, or why it cannot be imported."""
    found = find("cudnn")
    return f"the cuDNN front end is not importable ({found})" if isinstance(found, str) else found
