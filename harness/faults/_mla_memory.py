"""Faults of ``mla_prefill`` in memory and in the form of the answer beyond those of ``_common_memory``."""

from typing import Any

import torch

from ..record import Verdict
from . import _memory, planted
from ._chunked import Pass, State, mla_prefill_twin, passes

OP = "mla_prefill"
STRUCTURE, WRITE_SCOPE = Verdict.STRUCTURE, Verdict.WRITE_SCOPE

_compiled = _memory.Baked()


@planted(OP, WRITE_SCOPE, source="workspace sized for the chunk, filled for the tile")
def chunk_workspace_overrun(**arguments: Any) -> State:
    """The gathered rows of a chunk are padded to a tile in a workspace of the chunk's own length."""

    def padded(kv_c: torch.Tensor, k_pe: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.empty(len(own), kv_c.shape[1], dtype=kv_c.dtype, device=kv_c.device)
        rows.copy_(kv_c[own])
        rows.as_strided((8,), (1,), rows.storage_offset() + rows.numel()).zero_()
        return rows, k_pe[own]

    return mla_prefill_twin(arguments, gather=padded)


@planted(OP, Verdict.NUMERIC, rows=("FC-023",))
def number_of_chunks_baked_in(**arguments: Any) -> State:
    """Compiled for the longest history of the first call of its class; later batches get that number of chunks."""

    def baked(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        count = _compiled(len(arguments["context_lens"]) % 2, -(-longest // chunk))
        return passes(history, current, chunk, longest)[: 1 + count]

    return mla_prefill_twin(arguments, passes=baked)


@planted(OP, Verdict.CRASH, source="results of chunks stacked")
def crash_without_history(**arguments: Any) -> State:
    """A request without history raises."""

    def stacked(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        pair = passes(history, current, chunk, longest)[:2]
        return [pair[0], pair[1], *passes(history, current, chunk, longest)[2:]]

    return mla_prefill_twin(arguments, passes=stacked)


@planted(OP, STRUCTURE, source="output written over the queries")
def output_in_the_memory_of_the_queries(**arguments: Any) -> State:
    """The output is a view of an input."""
    _, lse = mla_prefill_twin(arguments)
    d_v = arguments["kv_b_proj"].shape[1] - arguments["q"].shape[2] + arguments["k_pe"].shape[1]
    return arguments["q"][..., :d_v], lse
