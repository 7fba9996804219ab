"""torch's FlexAttention as an attention provider, a request a call.

Written against ``torch.nn.attention.flex_attention`` of torch 2.11 and 2.13: both return the log-sum-exp in natural log
through ``return_aux``, ``[B, H, n]``. One call over the packed batch under a mask of documents would be one launch, but
the weight 0 of another request's NaN is NaN where a tile spans two requests: each request has a call of its own.

On the CPU it runs uncompiled, in torch's reference form: logits, softmax and ``lse`` in float32 (float64 for float64),
weights normalised and then rounded to the dtype of the inputs, ``[H, n, m]`` of one request a few times over. On CUDA
it is compiled to a Triton kernel, which was not yet run by this project; the tracing, the tables of blocks and the
number of compilations are tested on the CPU.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .._attention_torch import accumulation_dtype
from ._partial_state import Prepared, canonical_state, empty_rows, prepared_of

if TYPE_CHECKING:
    from ..attention import AttentionPlan, AttentionShape

# torch's default size of a block of the mask, in queries and in keys; its tiles divide it
_BLOCK = 128
# head sizes that torch's kernel accepts, and the widest that it has tiles for
_LEAST_HEAD_DIM, _MOST_HEAD_DIM = 16, 256
# heads, head sizes, dtypes, scales and devices are compiled in; lengths fall into some ten classes, by which of them
# and of their counts of blocks are 1. torch's own limit is 8; beyond this one it raises, and never runs uncompiled
_COMPILATIONS = 256


@dataclass(frozen=True, slots=True)
class _Masks:
    """Made once a plan.

    Attributes:
        of_request: Block mask of each request; None where every query sees every key, or there is nothing to attend.
    """

    of_request: tuple[BlockMask | None, ...]


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why FlexAttention cannot serve a request, or None."""
    if shape.device.type == "cpu":
        return None
    if shape.device.type != "cuda" or not torch.cuda.is_available():
        return f"FlexAttention needs a CUDA or CPU device, got {shape.device}"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability < (8, 0):
        return f"FlexAttention needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention is compiled by triton, which is not installed"
    if shape.dtype == torch.float64:
        return "FlexAttention has no kernel for float64 on CUDA"
    if shape.dtype == torch.float32 and _is_tf32():
        return "torch multiplies float32 in TF32 here, and FlexAttention follows it"
    sizes = (shape.head_dim_qk, shape.head_dim_v)
    if min(sizes) < _LEAST_HEAD_DIM or max(sizes) > _MOST_HEAD_DIM:
        served = f"{_LEAST_HEAD_DIM} to {_MOST_HEAD_DIM}"
        return f"FlexAttention serves head sizes {served} on CUDA, got {sizes[0]} and {sizes[1]}"
    return None


def prepare(plan: "AttentionPlan") -> Prepared:
    """Lay out the blocks of each request's mask and find the rows without keys, once a plan."""
    device = plan.cu_seqlens_q.device
    lens = zip(plan.query_lens, plan.key_lens, strict=True)
    masks = tuple(causal_mask(n, m, device) if plan.causal and n and m else None for n, m in lens)
    return Prepared(empty=empty_rows(plan), wrapper=_Masks(masks))


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Query ``i`` sees keys ``0 .. i + num_keys - num_queries``; the blocks are counted, not looked for in the mask.

    Args:
        num_queries: ``n``, at least 1.
        num_keys: ``m``, at least 1.
        device: Of the tensors that will be attended.

    Returns:
        The mask, its tables int32: to each block of queries the blocks of keys that all its queries see whole, and
        those after them, up to the last that one of its queries sees, which are masked key by key.
    """
    # a tensor: a number of the host would be compiled in, once for each difference
    shift = torch.tensor(num_keys - num_queries, dtype=torch.int32, device=device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + shift

    first = torch.arange(0, num_queries, _BLOCK, dtype=torch.int32)
    behind = (first + _BLOCK).clamp(max=num_queries)
    columns = torch.arange(-(-num_keys // _BLOCK), dtype=torch.int32)
    # queries first .. behind - 1 see first + m - n + 1 .. behind + m - n keys
    seen = ((behind + num_keys - num_queries).clamp(min=0) + _BLOCK - 1) // _BLOCK
    whole = (first + num_keys - num_queries + 1).clamp(min=0) // _BLOCK
    # a ragged block of queries has no whole blocks, as in torch's own tables
    whole = torch.where(first + _BLOCK <= num_queries, whole, 0)
    # the columns behind the count are not read
    partial = (columns + whole[:, None]).clamp(max=len(columns) - 1)

    def table(values: Tensor) -> Tensor:
        return values[None, None].to(device)

    return BlockMask.from_kv_blocks(
        table(seen - whole),
        table(partial),
        table(whole),
        table(columns.repeat(len(first), 1)),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(num_queries, num_keys),
        compute_q_blocks=False,
    )


def bit_mask(words: Tensor, tile_map: Tensor, *, num_keys: int, query_start: int) -> BlockMask:
    """Query ``i`` of one request sees the keys up to ``query_start + i`` whose bit is set; empty blocks are left out.

    Args:
        words: ``[n, W]``, int32, of ``topk_mask`` over keys from position 0.
        tile_map: ``[ceil(n / 128), ceil(32 W / 128)]``, bool, of ``topk_mask`` with tiles of 128 by 128.
        num_keys: ``m``, at least 1.
        query_start: Position of the first query.
    """
    shift = torch.tensor(query_start, dtype=torch.int32, device=words.device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((words[query, key >> 5] >> (key & 31)) & 1 == 1) & (key <= query + shift)

    first_key = torch.arange(tile_map.shape[1], device=words.device) * _BLOCK
    last_query = torch.arange(1, len(tile_map) + 1, device=words.device) * _BLOCK + query_start - 1
    held = tile_map & (first_key <= last_query[:, None])
    listed = held.int().argsort(dim=1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        held.sum(dim=1, dtype=torch.int32)[None, None],
        listed[None, None],
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(len(words), num_keys),
        compute_q_blocks=False,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend request by request; arguments and results as in ``attention``."""
    prepared = prepared_of(plan)
    if not isinstance(prepared.wrapper, _Masks):
        raise TypeError(f"plan.prepared must be of this provider, got {type(prepared.wrapper).__name__}")
    query_lens, key_lens = list(plan.query_lens), list(plan.key_lens)
    attend_request = _attend_compiled if q.is_cuda else _attend_eager
    outs, lses = [], []
    for q_part, k_part, v_part, mask in zip(
        torch.split(q, query_lens),
        torch.split(k, key_lens),
        torch.split(v, key_lens),
        prepared.wrapper.of_request,
        strict=True,
    ):
        if q_part.shape[0] == 0 or k_part.shape[0] == 0:
            # whatever this is, these rows are among the empty ones
            out = q.new_zeros(*q_part.shape[:2], v.shape[-1])
            lse = torch.zeros(q_part.shape[:2], dtype=accumulation_dtype(q.dtype), device=q.device)
        else:
            out, lse = attend_request(q_part, k_part, v_part, softmax_scale, mask)
        outs.append(out)
        lses.append(lse)
    return canonical_state(torch.cat(outs), torch.cat(lses), base="e", layout="TH", empty=prepared.empty)


def attend_request(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """One request by FlexAttention, which serves grouped heads as they are; this is what is compiled.

    Args:
        q: ``[n, H, Dq]``, at least one query.
        k: ``[m, H_kv, Dq]``, at least one key.
        v: ``[m, H_kv, Dv]``.
        softmax_scale: Factor on the logits.
        mask: Of ``causal_mask`` or ``bit_mask``, or None.

    Returns:
        ``out``, ``[n, H, Dv]``, and ``lse``, ``[n, H]``.
    """
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, aux = flex_attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # one kernel for all lengths; the other one, for fewer than 128 queries, takes its tile from the first that come
        kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=True),
    )
    return out[0].transpose(0, 1), cast(Tensor, aux.lse)[0].t()


def _attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    limits = {"recompile_limit": _COMPILATIONS, "accumulated_recompile_limit": _COMPILATIONS}
    with torch._dynamo.config.patch(limits):
        return _compiled()(q, k, v, softmax_scale, mask)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """The compiled call; with ``fullgraph`` torch raises where it would otherwise run uncompiled without a word."""
    return torch.compile(attend_request, dynamic=True, fullgraph=True)


def _attend_eager(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    # called bare, FlexAttention traces itself anew for each class of lengths, and gives up after eight
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return attend_request(q, k, v, softmax_scale, mask)


def _is_tf32() -> bool:
    """Whether torch's kernel would cut float32 operands to TF32; it reads the same two settings."""
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        return torch.get_float32_matmul_precision() != "highest"
    return bool(setting != "ieee")
