"""The kernels of ``masked_mha``: each twin with and without a map of tiles, and over chunks of keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optimized.attention import AttentionShape
from ...optimized.masked_mha import (
    KeyChunk,
    MaskedMhaPlan,
    masked_mha,
    masked_mha_in_chunks,
    plan_masked_chunks,
    plan_masked_mha,
)
from ...optimized.topk_mask import MAX_MASK_BYTES, mask_bytes
from ...reference.topk_mask import selected_keys
from ..case import Case
from ..contract import Contract, default_contract
from ..operation import Kernel

# no multiple of 32: chunks begin and end within words
CHUNK = 45
# tiles of the interpreted kernel, of so many queries and keys, that fit the time: each takes some ten milliseconds
INTERPRETED_TILES = 12
INTERPRETED_TILE = 32


def masked_mha_kernels() -> list[Kernel]:
    """In torch; in Triton without a map of tiles and with one; keys in chunks, with a mask for each or one for all."""
    return [
        _kernel("torch"),
        _kernel("triton"),
        _kernel("triton", mapped=True),
        _chunked_kernel("torch", own_masks=True),
        _chunked_kernel("triton", own_masks=False),
    ]


def _kernel(implementation: str, *, mapped: bool = False) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, k, v, mask = (arguments[name] for name in ("q", "k", "v", "mask"))
        ends = {name: arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        starts = {name: arguments[name] for name in ("query_starts", "key_starts")}
        plan = plan_masked_mha(**ends, **starts, shape=_shape(q, k, v), implementation=implementation)
        scale, tiles = arguments["softmax_scale"], _Tiles(plan) if mapped else None

        def run() -> tuple[Tensor, Tensor]:
            held = None if tiles is None else tiles.holding_bits(mask)
            return masked_mha(q, k, v, mask, softmax_scale=scale, plan=plan, tile_map=held)

        return run

    def unsupported(case: Case, device: torch.device) -> str | None:
        # where tiles are interpreted, one form has to do
        if implementation == "triton" and device.type == "cpu" and mapped != any(case.sizes["key_holes"]):
            return "interpreted on the CPU with a map of tiles where there is a tile to skip, without one elsewhere"
        return _interpreted(
            implementation, case, device, list(zip(case.sizes["query_lens"], case.sizes["key_lens"], strict=True))
        )

    return Kernel(
        name=f"masked_mha[{implementation}{'-mapped' if mapped else ''}]",
        contract=_contract(splits=False),
        bind=bind,
        unsupported=unsupported,
    )


class _Tiles:
    """The tiles of a plan, of which a map says at each call which hold a bit."""

    def __init__(self, plan: MaskedMhaPlan) -> None:
        if plan.tile is None:
            raise NotImplementedError(f"implementation {plan.implementation} has no tiles to map")
        queries, keys = plan.tile
        counts = [-(-n // queries) for n in plan.query_lens]
        first = [sum(counts[:request]) for request in range(len(counts))]
        tiles = [at + query // queries for at, n in zip(first, plan.query_lens, strict=True) for query in range(n)]
        self._tile = torch.tensor(tiles, dtype=torch.int64, device=plan.starts.device)
        self._num_tiles, self._words = plan.num_tiles, keys // 32

    def holding_bits(self, mask: Tensor) -> Tensor:
        """``[tiles, columns]``, bool; queries in tiles of each request, keys in tiles from bit 0."""
        columns = -(-mask.shape[1] // self._words)
        marked = torch.nn.functional.pad(mask != 0, (0, columns * self._words - mask.shape[1]))
        held = marked.unflatten(1, (columns, self._words)).any(-1).int()
        counts: Tensor = held.new_zeros(self._num_tiles, columns).index_add_(0, self._tile, held)
        return counts.bool()


def _chunked_kernel(implementation: str, *, own_masks: bool) -> Kernel:
    """Current tokens, then the history in chunks; lists that name the selected keys stand for the bits."""

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, k, v, mask = (arguments[name] for name in ("q", "k", "v", "mask"))
        starts, scale = arguments["cu_seqlens_k"].tolist(), arguments["softmax_scale"]
        plan = plan_masked_chunks(
            arguments["cu_seqlens_q"],
            arguments["cu_seqlens_k"].diff(),
            shape=_shape(q, k, v),
            topk=32 * mask.shape[1],
            history_chunk_size=CHUNK,
            max_mask_bytes=_largest_part(arguments) if own_masks else MAX_MASK_BYTES,
            implementation=implementation,
        )
        key = torch.arange(32 * mask.shape[1], device=mask.device)

        def expand(chunk: KeyChunk) -> tuple[Tensor, Tensor]:
            spans = [slice(starts[request] + start, starts[request] + stop) for request, start, stop in chunk.spans]
            return torch.cat([k[span] for span in spans]), torch.cat([v[span] for span in spans])

        def run() -> tuple[Tensor, Tensor]:
            indices = torch.where(selected_keys(mask, len(key)), key, -1).int()
            return masked_mha_in_chunks(q, indices, expand, softmax_scale=scale, plan=plan)

        return run

    def unsupported(case: Case, device: torch.device) -> str | None:
        sizes = case.sizes
        histories = [m - n for n, m in zip(sizes["query_lens"], sizes["key_lens"], strict=True)]
        if any(sizes["key_starts"]) or sizes["query_starts"] != histories or min(histories) < 0:
            return "keys of whole contexts only, the queries the last tokens of them"
        passes = [(n, n) for n in sizes["query_lens"]]
        passes += [
            (n, min(CHUNK, history - at))
            for n, history in zip(sizes["query_lens"], histories, strict=True)
            for at in range(0, history, CHUNK)
        ]
        return _interpreted(implementation, case, device, passes)

    return Kernel(
        name=f"masked_mha[{implementation}-chunked]",
        contract=_contract(splits=True),
        bind=bind,
        unsupported=unsupported,
    )


def _largest_part(arguments: dict[str, Any]) -> int:
    """Bytes of the largest mask of a chunk: past that, there is one for each of them."""
    query_lens, key_lens = (arguments[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    histories = [(n, min(CHUNK, m - n)) for n, m in zip(query_lens, key_lens, strict=True)]
    return max(mask_bytes(*part) for part in [(sum(query_lens), max(query_lens)), *histories])


def _contract(*, splits: bool) -> Callable[[Case], Contract]:
    return lambda case: default_contract(case.dtype, projected=False, splits=splits).promising(capturable=True)


def _interpreted(implementation: str, case: Case, device: torch.device, passes: list[tuple[int, int]]) -> str | None:
    """Why the kernel would take too long here, or None: on a CPU its tiles are interpreted one by one.

    Args:
        implementation: Whether it is that of tiles.
        case: The inputs.
        device: Where they lie.
        passes: Queries and keys that meet.
    """
    if implementation != "triton" or device.type != "cpu":
        return None
    # to begin with a tile of queries takes as long as one of keys
    counts = [-(-n // INTERPRETED_TILE) * (1 - (-m // INTERPRETED_TILE)) for n, m in passes]
    tiles = case.sizes["num_heads"] * sum(counts)
    if tiles <= INTERPRETED_TILES:
        return None
    return f"interpreted on the CPU, more tiles than the {INTERPRETED_TILES} that fit the time; needs a device"


def _shape(q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
    return AttentionShape(
        device=q.device,
        dtype=q.dtype,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
    )
