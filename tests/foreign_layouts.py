"""Layouts that engines use, and kernels that take them: read key by key, in another way than the judge writes them."""

import itertools
import math
from typing import Any

import torch
from builders import CPU, Answer, honest_mla
from torch import Tensor

from assay.harness import Conventions, kernel, operations
from assay.harness.case import Case
from assay.harness.kernels import wrap_function
from assay.harness.layouts import prepared
from assay.harness.operation import Inputs

LAYOUTS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"cache": "blocks", "page_size": 16},
    "blocks of 64": {"cache": "blocks", "page_size": 64},
    "blocks of 16 with gaps": {"cache": "blocks", "page_size": 16, "row_gap": 24},
    "bundled blocks": {"cache": "blocks", "page_size": 64, "bundled": True, "row_gap": 7},
    "pointers to pages": {"cache": "indptr", "page_size": 16},
    "pointers to slots": {"cache": "indptr"},
    "bundled pointers": {"cache": "indptr", "bundled": True, "row_gap": 3},
}


def given_to(case: Case, conventions: Conventions) -> Inputs:
    """What the judge hands to a kernel of these conventions."""
    operation = operations.load(case.op)
    stranger = wrap_function(kernel(conventions=conventions)(lambda **given: None), operation)
    inputs = operation.inputs(case, CPU)
    return prepared(inputs, stranger, case, operation.default_contract(case), operation.outline(case))


def gathered(given: dict[str, Any], name: str, request: int, length: int, page_size: int | None) -> Tensor:
    """The rows of a request's keys, found key by key as a serving engine would."""
    rows, size = [], page_size or 1
    for position in range(length):
        if "block_table" in given:
            page = int(given["block_table"][request, position // size])
        else:
            page = int(given["kv_indices"][int(given["kv_indptr"][request]) + position // size])
        cache = given[name]
        rows.append(cache[page] if page_size is None else cache[page, position % size])
    return torch.stack(rows) if rows else given[name].new_empty(0)


def paged_rows(given: dict[str, Any], conventions: Conventions) -> dict[str, Any]:
    """Undo a layout in another way than the judge does it: the arguments of the oracle, slots numbered afresh."""
    names = ["kv_cache"] if conventions.bundled else ["kv_c", "k_pe"]
    lens = given["context_lens"].tolist()
    parts = {
        name: [gathered(given, name, r, length, conventions.page_size) for r, length in enumerate(lens)]
        for name in names
    }
    caches = {name: torch.cat(rows) for name, rows in parts.items()}
    if conventions.bundled:
        rank = given["kv_b_proj"].shape[-1]
        caches = {"kv_c": caches["kv_cache"][:, :rank], "k_pe": caches["kv_cache"][:, rank:]}
    table = torch.full((len(lens), max(lens)), -1)
    for request, (start, end) in enumerate(itertools.pairwise(itertools.accumulate(lens, initial=0))):
        table[request, : end - start] = torch.arange(start, end)
    index = {"slot_table": table, "request_rows": torch.arange(len(lens)), "context_lens": given["context_lens"]}
    kept = {name: given[name] for name in ("q", "kv_b_proj", "softmax_scale", "cu_seqlens")}
    if conventions.flat_projection:
        kept["kv_b_proj"] = kept["kv_b_proj"].view(kept["q"].shape[1], -1, kept["kv_b_proj"].shape[-1])
    return kept | caches | index


def foreign_mla(conventions: Conventions, scale: float = 1.0) -> Any:
    """A right kernel of these conventions, whose answer is then multiplied by ``scale``."""

    @kernel("mla_prefill", conventions=conventions)
    def attend(**given: Any) -> Answer:
        out, lse = honest_mla(**paged_rows(given, conventions))
        if conventions.lse_base == "2":
            lse = (lse.double() / math.log(2.0)).float()
        return out * scale, lse.T.contiguous() if conventions.lse_layout == "HT" else lse

    return attend
