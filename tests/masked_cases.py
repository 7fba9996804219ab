"""Cases of masked attention, their inputs, and what the oracle says of them, that several tests share."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from assay.harness.case import Case
from assay.harness.operation import AttentionOperation, CaseRequest
from assay.harness.operations import masked_mha
from assay.harness.plan import DTYPES
from assay.reference import masked_mha as oracle

CPU = torch.device("cpu")
OPERATION = cast(AttentionOperation, masked_mha.OPERATION)
INF = math.inf
EVERYTHING = 1 << 40
State = tuple[Tensor, Tensor]


def drawn(tier: str = "smoke", dtypes: tuple[str, ...] = DTYPES, seed: int = 0) -> list[Case]:
    return OPERATION.cases(CaseRequest(tier=tier, seed=seed, dtypes=dtypes))


SMOKE = drawn()


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
