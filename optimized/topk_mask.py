"""The keys that each query has selected, one bit a key, and which tiles of the mask hold any bit at all."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ._attention_checks import lengths

MAX_MASK_BYTES = 64 << 20
_MODULES = {"torch": "._topk_mask_torch", "triton": "._topk_mask_triton"}
IMPLEMENTATIONS = tuple(_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkMaskPlan:
    """What the host decides once a step; every value in it has been checked.

    Attributes:
        device: Where the indices live and the mask will.
        topk: Entries of each query's list.
        query_lens: ``N`` query counts.
        key_lens: ``N`` counts of positions that the mask speaks of.
        key_starts: ``N`` positions that bit 0 stands for.
        tile: ``(queries, keys)`` of a tile of the map, or None for no map.
        request_of_query: ``[T]``, int32, on ``device``.
        key_bounds: ``[N, 2]``, int32, on ``device``: first position of a request, and the one behind its last.
        tile_rows: ``[tiles, 2]``, int32, on ``device``: first query of a tile, and the one behind its last.
        implementation: One of ``IMPLEMENTATIONS``.
        choice: Its name, or for ``auto`` what was taken.
    """

    device: torch.device
    topk: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    key_starts: tuple[int, ...]
    tile: tuple[int, int] | None
    request_of_query: Tensor
    key_bounds: Tensor
    tile_rows: Tensor
    implementation: str
    choice: str

    @property
    def num_queries(self) -> int:
        """``T``, queries of all requests."""
        return sum(self.query_lens)

    @property
    def num_words(self) -> int:
        """``W``, words of a row."""
        return -(-max(self.key_lens) // 32)

    @property
    def map_shape(self) -> tuple[int, int]:
        """Tiles of queries and tiles of keys."""
        if self.tile is None:
            return 0, 0
        return len(self.tile_rows), -(-32 * self.num_words // self.tile[1])


def mask_bytes(num_queries: int, num_keys: int) -> int:
    """What a mask takes: a row of whole words for each query, wide enough for the longest request."""
    return num_queries * -(-num_keys // 32) * 4


def plan_topk_mask(
    cu_seqlens_q: Tensor,
    key_lens: Tensor,
    *,
    topk: int,
    device: torch.device,
    key_starts: Tensor | None = None,
    tile: tuple[int, int] | None = None,
    max_bytes: int = MAX_MASK_BYTES,
    implementation: str = "auto",
) -> TopkMaskPlan:
    """Check the lengths and choose the implementation, once a step. This may synchronise; ``topk_mask`` does not.

    Args:
        cu_seqlens_q: ``[N + 1]``, int32 or int64, any device; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        key_lens: ``[N]``, int32 or int64; how many positions of each request the mask speaks of, its history included.
        topk: Entries of each query's list, at least 1.
        device: Where the indices live.
        key_starts: ``[N]``, int32 or int64, at least 0: the position that bit 0 stands for, for a mask of one chunk of
            the keys; 0 if None.
        tile: ``(queries, keys)`` of a tile of the map, powers of two, at least 16 and 32; None for no map.
        max_bytes: What the mask may take; past it, a mask for one chunk of the keys at a time is smaller.
        implementation: ``auto`` (``triton`` on a CUDA device, ``torch`` elsewhere) or one of ``IMPLEMENTATIONS``.

    Returns:
        The plan, valid for any indices of this shape.

    Raises:
        TypeError: If lengths are not int32 or int64.
        ValueError: If a length or size is out of range, the mask would be too large, or there is no such
            implementation.
        NotImplementedError: If the named implementation cannot run here.
    """
    query_lens = lengths("cu_seqlens_q", cu_seqlens_q)
    key_counts = _positions("key_lens", key_lens, len(query_lens))
    starts = (0,) * len(query_lens) if key_starts is None else _positions("key_starts", key_starts, len(query_lens))
    behind = tuple(start + count for start, count in zip(starts, key_counts, strict=True))
    if max(behind) > torch.iinfo(torch.int32).max:
        raise ValueError(f"key_starts + key_lens must be below 2**31, got {max(behind)}")
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}")
    if tile is not None and (min(tile[0] - 16, tile[1] - 32) < 0 or tile[0] & (tile[0] - 1) or tile[1] & (tile[1] - 1)):
        raise ValueError(f"tile must be two powers of two, at least (16, 32), got {tile}")
    size = mask_bytes(sum(query_lens), max(key_counts))
    if size > max_bytes:
        raise ValueError(
            f"the mask must take at most max_bytes = {max_bytes} bytes, got {size} for {sum(query_lens)} queries and "
            f"{max(key_counts)} keys; build one for each chunk of the keys instead"
        )
    name = ("triton" if device.type == "cuda" else "torch") if implementation == "auto" else implementation
    reason = find_implementation(name).refusal(device)
    if reason is not None:
        raise NotImplementedError(f"implementation {name!r} cannot build this mask; {reason}")

    def table(values: list[tuple[int, int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).reshape(-1, 2).to(device)

    return TopkMaskPlan(
        device=device,
        topk=topk,
        query_lens=query_lens,
        key_lens=key_counts,
        key_starts=starts,
        tile=tile,
        request_of_query=torch.arange(len(query_lens), dtype=torch.int32)
        .repeat_interleave(torch.tensor(query_lens))
        .to(device),
        key_bounds=table(list(zip(starts, behind, strict=True))),
        tile_rows=table([] if tile is None else query_tiles(query_lens, tile[0])),
        implementation=name,
        choice=f"auto took {name}" if implementation == "auto" else name,
    )


def topk_mask(indices: Tensor, *, plan: TopkMaskPlan) -> tuple[Tensor, Tensor | None]:
    """Pack the selection of each query into bits; return ``(mask, tile_map)``.

    For query ``t`` of request ``r``, over the valid entries of its list::

        valid[t, j]  = key_starts[r] <= indices[t, j] < key_starts[r] + key_lens[r]
        k            = indices[t, j] - key_starts[r]
        mask[t, k >> 5] |= 1 << (k & 31)                            if valid[t, j]

    A position that is listed twice has one bit (a set). Everything that is not valid is padding, in any place and
    order; a word's bit 31 is its sign. Nothing is said of causality.

    Args:
        indices: ``[T, topk]``, int32, positions in the sequence of the query's own request, any strides.
        plan: Of ``plan_topk_mask``.

    Returns:
        ``mask``, ``[T, W]``, int32, where ``W`` is the number of words that the longest request needs; and
        ``tile_map``, bool, whether a tile of the mask has any bit, or None without tiles in the plan. The queries of
        each request are cut into tiles of their own, which are the rows of the map, one request after the other; keys
        are cut at multiples of the tile, counted from bit 0.

    Raises:
        TypeError: If the indices are not int32.
        ValueError: If their shape or device is not that of the plan.

    Every implementation gives the same bits. Never synchronises; CUDA graphs can capture it. Oracle:
    ``reference.topk_mask.topk_mask`` and ``tile_map``. Source: the mask of vLLM's sparse MLA prefill, without its
    padded rows.
    """
    if indices.dtype != torch.int32:
        raise TypeError(f"indices must be int32, got {indices.dtype}")
    if tuple(indices.shape) != (plan.num_queries, plan.topk):
        raise ValueError(
            f"indices must have shape [T, topk] = {(plan.num_queries, plan.topk)} as planned, "
            f"got {tuple(indices.shape)}"
        )
    if indices.device != plan.request_of_query.device:
        raise ValueError(f"indices must be on {plan.request_of_query.device} as planned, got {indices.device}")
    module = find_implementation(plan.implementation)
    build: Callable[[Tensor, TopkMaskPlan], Tensor] = module.build
    mask = build(indices, plan)
    return mask, None if plan.tile is None else module.build_map(mask, plan)


def find_implementation(name: str) -> ModuleType:
    """The module of an implementation, imported when it is first asked for.

    Raises:
        ValueError: If there is no such implementation.
        NotImplementedError: If it needs a package that is not installed.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    try:
        return importlib.import_module(_MODULES[name], __package__)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise NotImplementedError(f"implementation {name!r} cannot run; {error.name} is not installed") from error


def query_tiles(query_lens: tuple[int, ...], tile_queries: int) -> list[tuple[int, int]]:
    """First query of each tile and the one behind its last; no tile spans two requests."""
    starts = itertools.accumulate((0, *query_lens))
    return [
        (start + first, start + min(first + tile_queries, length))
        for start, length in zip(starts, query_lens, strict=False)
        for first in range(0, length, tile_queries)
    ]


def _positions(name: str, values: Tensor, num_requests: int) -> tuple[int, ...]:
    """Read one position a request, none negative; synchronises if they are on a device."""
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {values.dtype}")
    if tuple(values.shape) != (num_requests,):
        raise ValueError(f"{name} must have shape [N] = {(num_requests,)}, got {tuple(values.shape)}")
    numbers = tuple(int(value) for value in values.tolist())
    if min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, got {min(numbers)} at request {numbers.index(min(numbers))}")
    return numbers
