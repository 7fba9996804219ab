"""Sparse MLA for few heads on Hopper where neighbouring queries list much the same rows, gathered once for a group.

Part of ``optimized/sparse_mla.py``; call it from there. Four launches: mark who lists what, compact the marks into a
list a group, attend, and attend alone the queries whose answer a neighbour's NaN has spoilt. Which is faster, this or a
list a query, is told by ``_sparse_mla_overlap.py``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
from torch import Tensor

from ._sparse_mla_gluon import check_layout, num_processors, stand_in
from ._sparse_mla_gluon import refusal as refusal
from ._sparse_mla_lists_kernel import compact_kernel, mark_kernel
from ._sparse_mla_overlap import padded_heads, union_group
from ._sparse_mla_triton import LOG2_E, launch_flagged

if TYPE_CHECKING:
    from ._sparse_mla_plan import SparseMlaCall, SparseMlaPlan, SparseMlaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitedLists:
    """Scratch of the builder, and what it builds.

    Attributes:
        words: ``[groups, ceil(s_kv / 4)]``, int32, zero between calls: a byte a row, a bit a query.
        num_repeats: ``[groups]``, int32, zero between calls.
        repeat_rows: ``[groups, capacity]``, int32.
        repeat_bits: ``[groups, capacity]``, uint8.
        rows: ``[groups, capacity]``, int32, the united lists.
        members: ``[groups, capacity]``, uint8, the queries that each entry belongs to.
        count: ``[groups]``, int32, entries of each.
    """

    words: Tensor
    num_repeats: Tensor
    repeat_rows: Tensor
    repeat_bits: Tensor
    rows: Tensor
    members: Tensor
    count: Tensor

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


def prepare(shape: "SparseMlaShape") -> UnitedLists:
    """Allocate for a step; ``capacity`` holds lists that share nothing."""
    group = union_group(shape.h_q)
    num_groups, capacity = -(-shape.s_q // group), group * shape.topk
    int32: dict[str, Any] = {"dtype": torch.int32, "device": shape.device}
    uint8: dict[str, Any] = {"dtype": torch.uint8, "device": shape.device}
    return UnitedLists(
        words=torch.zeros(num_groups, -(-shape.s_kv // 4), **int32),
        num_repeats=torch.zeros(num_groups, **int32),
        repeat_rows=torch.empty(num_groups, capacity, **int32),
        repeat_bits=torch.empty(num_groups, capacity, **uint8),
        rows=torch.empty(num_groups, capacity, **int32),
        members=torch.empty(num_groups, capacity, **uint8),
        count=torch.empty(num_groups, **int32),
    )


def attend(call: "SparseMlaCall", plan: "SparseMlaPlan") -> None:
    """Write ``out``, ``lse`` and ``max_logits``."""
    from ._sparse_mla_gluon_union import union_kernel

    check_layout(call)
    shape, lists = plan.shape, cast(UnitedLists, plan.prepared)
    unite(call.indices, call.topk_length, lists, shape)
    num_groups = len(lists.count)
    flags = torch.empty(shape.s_q, shape.h_q, dtype=torch.int8, device=shape.device)
    with torch.cuda.device_of(call.q):
        union_kernel[(min(num_groups, num_processors(shape.device)),)](
            call.q,
            call.kv,
            lists.rows,
            lists.members,
            lists.count,
            stand_in(call.attn_sink, call.lse),
            call.out,
            call.lse,
            call.max_logits,
            flags,
            shape.s_q,
            shape.s_kv,
            num_groups,
            call.q.stride(0),
            call.q.stride(1),
            call.kv.stride(0),
            call.out.stride(0),
            call.out.stride(1),
            call.softmax_scale * LOG2_E,
            HEADS=shape.h_q,
            H=padded_heads(shape.h_q),
            D_QK=shape.d_qk,
            CAPACITY=lists.rows.shape[1],
            BLOCK_N=64,
            SLOTS=2,
            PRODUCER_REGISTERS=104,
            HAS_SINK=call.attn_sink is not None,
            num_warps=8,
        )
    launch_flagged(call, shape, flags)


def unite(indices: Tensor, topk_length: Tensor | None, lists: UnitedLists, shape: "SparseMlaShape") -> None:
    """Build the united lists of all groups, in two launches."""
    num_words = lists.words.shape[1]
    with torch.cuda.device_of(indices):
        mark_kernel[(shape.s_q,)](
            indices,
            topk_length,
            lists.words,
            lists.num_repeats,
            lists.repeat_rows,
            lists.repeat_bits,
            shape.s_kv,
            num_words,
            *indices.stride(),
            TOPK=shape.topk,
            GROUP=union_group(shape.h_q),
            BLOCK=min(512, triton.next_power_of_2(shape.topk)),
            num_warps=4,
        )
        compact_kernel[(len(lists.count),)](
            lists.words,
            lists.num_repeats,
            lists.repeat_rows,
            lists.repeat_bits,
            lists.rows,
            lists.members,
            lists.count,
            num_words,
            CAPACITY=lists.rows.shape[1],
            BLOCK=1024,
            BLOCK_REPEATS=16,
            BLOCK_OTHERS=64,
            num_warps=4,
        )
