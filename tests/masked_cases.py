"""Cases of masked attention, their inputs, and what the oracle says of them, that several tests share."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from assay.harness.case import Case
from assay.harness.operation import AttentionOperation, CaseRequest
from assay.harness.operations import masked_mha
from assay.harness.plan import DTYPES
from assay.optimized.sparse_mla import SparseMlaShape, plan_sparse_mla
from assay.optimized.sparse_mla import sparse_mla as sparse_twin
from assay.reference import masked_mha as oracle
from assay.reference.topk_mask import selected_keys

CPU = torch.device("cpu")
OPERATION = cast(AttentionOperation, masked_mha.OPERATION)
INF = math.inf
EVERYTHING = 1 << 40
State = tuple[Tensor, Tensor]


def drawn(tier: str = "smoke", dtypes: tuple[str, ...] = DTYPES, seed: int = 0) -> list[Case]:
    return OPERATION.cases(CaseRequest(tier=tier, seed=seed, dtypes=dtypes))


SMOKE = drawn()
# a value that is no number times the 0 of a query is one that no list can keep out of a logit
FINITE_VALUES = [case for case in SMOKE if case.family != "nonfinite-v"]


def case_of(family: str = "diffuse", dtype: str = "bfloat16", **sizes: Any) -> Case:
    """Two requests: a chunk that begins and ends within a word, and a whole context."""
    small = {
        "softmax_scale": 0.17,
        "layout": "packed",
        "d_qk": 24,
        "d_v": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "query_lens": [20, 9],
        "key_lens": [50, 40],
        "query_starts": [70, 31],
        "key_starts": [33, 0],
        "mask_words": 3,
        "selection_seeds": [5, 6],
        "key_holes": [0, 0],
    }
    return Case(op="masked_mha", family=family, dtype=dtype, seed=3, sizes=small | sizes)


def arguments_of(case: Case) -> dict[str, Any]:
    return OPERATION.inputs(case, CPU).arguments


def true_answer(arguments: dict[str, Any]) -> State:
    """The oracle in float64 on the stored inputs; it reads bits, not the selection that they were made of."""
    wide = {name: arguments[name].double() for name in ("q", "k", "v")}
    return oracle.masked_mha(**arguments | wide)


def by_sparse_attention(answer: Any, listed: Any = lambda lists: lists) -> Any:
    """Masked attention as sparse attention to lists without repetition, head by head of the keys.

    A row of the cache is a value and its key, of which a query multiplies the key alone.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        softmax_scale: float,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
    ) -> State:
        group = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=wide, device=q.device)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), query_starts.tolist(), key_starts.tolist()
        for request, (query, key) in enumerate(zip(ends[2], ends[3], strict=True)):
            rows, keys = (slice(*end[request : request + 2]) for end in ends[:2])
            n, m = rows.stop - rows.start, keys.stop - keys.start
            if not n or not m:
                continue
            position = torch.arange(m, device=q.device) + key
            seen = selected_keys(mask[rows], m, key) & (position <= torch.arange(n, device=q.device)[:, None] + query)
            lists = listed(torch.where(seen, torch.arange(m, device=q.device), -1).int())
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                cache = torch.cat([v[keys, head], k[keys, head]], dim=-1)
                asked = torch.cat([q.new_zeros(n, group, v.shape[2]), q[rows, heads]], dim=-1)
                out[rows, heads], lse[rows, heads] = answer(asked, cache, lists, softmax_scale, v.shape[2])
        return out, lse

    return attend


def by_twin(implementation: str) -> Any:
    def answer(q: Tensor, cache: Tensor, lists: Tensor, scale: float, d_v: int) -> State:
        sizes = {"s_q": len(q), "s_kv": len(cache), "h_q": q.shape[1], "d_qk": q.shape[2], "d_v": d_v}
        shape = SparseMlaShape(device=q.device, dtype=q.dtype, topk=lists.shape[1], **sizes)
        plan = plan_sparse_mla(shape, implementation=implementation)
        return sparse_twin(q, cache, lists, softmax_scale=scale, plan=plan)[:2]

    return answer
