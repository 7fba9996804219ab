"""The host's part of masked attention: every value check, where queries and keys stand, and who will compute.

Part of ``optimized/masked_mha.py``; call it from there.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ._attention_checks import lengths
from .attention import AttentionShape

_MODULES = {"torch": "._masked_mha_torch", "triton": "._masked_mha_triton"}
IMPLEMENTATIONS = tuple(_MODULES)
# a position and a tile behind it are far from wrapping
_MAX_POSITION = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedMhaPlan:
    """What the host decides once a step; every value in it has been checked.

    Attributes:
        shape: Of the tensors that will be passed.
        query_lens: ``N`` query counts.
        key_lens: ``N`` key counts.
        query_starts: ``N`` positions of first queries, counted from bit 0; may be negative.
        key_starts: ``N`` positions of first keys.
        cu_seqlens_q: ``[N + 1]``, int32, on ``shape.device``.
        cu_seqlens_k: The same for keys and values.
        tile: ``(queries, keys)`` of a tile of the map that the implementation skips by, or None if by none.
        starts: ``[N, 3]``, int32, on ``shape.device``: positions of first query and key, first row of the map.
        implementation: One of ``IMPLEMENTATIONS``.
        choice: Its name, or for ``auto`` what was taken and why.
    """

    shape: AttentionShape
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tile: tuple[int, int] | None
    starts: Tensor
    implementation: str
    choice: str

    @property
    def module(self) -> ModuleType:
        """The functions of the implementation."""
        return find_implementation(self.implementation)

    @property
    def num_queries(self) -> int:
        """``T``, queries of all requests."""
        return sum(self.query_lens)

    @property
    def num_keys(self) -> int:
        """``S``, keys of all requests."""
        return sum(self.key_lens)

    @property
    def num_bits(self) -> int:
        """Bits that a row of the mask must have; 0 without keys."""
        ends = zip(self.key_starts, self.key_lens, strict=True)
        return max(start + length if length else 0 for start, length in ends)

    @property
    def num_tiles(self) -> int:
        """Rows of the map."""
        if self.tile is None:
            return 0
        return sum(-(-length // self.tile[0]) for length in self.query_lens)


def plan_masked_mha(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    shape: AttentionShape,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
    implementation: str = "auto",
) -> MaskedMhaPlan:
    """Check the lengths and choose the implementation, once a step. This may synchronise; ``masked_mha`` does not.

    Args:
        cu_seqlens_q: ``[N + 1]``, int32 or int64, any device; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        cu_seqlens_k: ``[N + 1]``, the same for keys and values.
        shape: Of the tensors that ``masked_mha`` will get.
        query_starts: ``[N]``, int32 or int64, position of each request's first query, counted from bit 0; if None the
            last query has the position of the last key.
        key_starts: ``[N]``, int32 or int64, at least 0, position of each request's first key, any number: a chunk of
            keys may begin within a word. 0 if None.
        implementation: One of ``IMPLEMENTATIONS``, or ``auto``: ``triton`` on a CUDA device where it serves, else
            ``torch``. A name is never replaced by another.

    Returns:
        The plan, valid for any tensors of this shape and these lengths.

    Raises:
        TypeError: If offsets or positions are not int32 or int64.
        ValueError: If lengths or positions are out of range, or there is no such implementation.
        NotImplementedError: If the named implementation does not serve the shape.
    """
    query_lens, key_lens = lengths("cu_seqlens_q", cu_seqlens_q), lengths("cu_seqlens_k", cu_seqlens_k)
    if len(query_lens) != len(key_lens):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same requests, got {len(query_lens)} and {len(key_lens)}"
        )
    first_keys = (0,) * len(key_lens) if key_starts is None else _positions("key_starts", key_starts, len(key_lens))
    if min(first_keys) < 0:
        raise ValueError(f"key_starts must not be negative, got {min(first_keys)}")
    if query_starts is None:
        first_queries = tuple(s + m - n for s, m, n in zip(first_keys, key_lens, query_lens, strict=True))
    else:
        first_queries = _positions("query_starts", query_starts, len(query_lens))
    for name, starts, lens in (("key", first_keys, key_lens), ("query", first_queries, query_lens)):
        last = max(start + length for start, length in zip(starts, lens, strict=True))
        if last > _MAX_POSITION or min(starts) < -_MAX_POSITION:
            raise ValueError(f"{name} positions must be at most 2**30 in size, got {min(starts)} to {last}")
    name, choice = _resolve(implementation, shape, len(query_lens))
    tile = find_implementation(name).map_tile(shape)
    rows = [0]
    for length in query_lens:
        rows.append(rows[-1] + (0 if tile is None else -(-length // tile[0])))
    starts_table = torch.tensor([*zip(first_queries, first_keys, rows, strict=False)], dtype=torch.int32)
    return MaskedMhaPlan(
        shape=shape,
        query_lens=query_lens,
        key_lens=key_lens,
        query_starts=first_queries,
        key_starts=first_keys,
        cu_seqlens_q=cu_seqlens_q.to(device=shape.device, dtype=torch.int32, copy=True),
        cu_seqlens_k=cu_seqlens_k.to(device=shape.device, dtype=torch.int32, copy=True),
        tile=tile,
        starts=starts_table.to(shape.device),
        implementation=name,
        choice=choice,
    )


def find_implementation(name: str) -> ModuleType:
    """The module of an implementation, imported when it is first asked for.

    Raises:
        ValueError: If there is no such implementation.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(_MODULES[name], __package__)


def check_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, tile_map: Tensor | None, plan: MaskedMhaPlan) -> None:
    """Compare shapes, dtypes and devices with the plan; reads no value."""
    shape, device = plan.shape, plan.cu_seqlens_q.device
    for name, tensor, sizes in (
        ("q", q, (plan.num_queries, shape.num_heads, shape.head_dim_qk)),
        ("k", k, (plan.num_keys, shape.num_kv_heads, shape.head_dim_qk)),
        ("v", v, (plan.num_keys, shape.num_kv_heads, shape.head_dim_v)),
    ):
        if tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} must have shape {sizes} as planned, got {tuple(tensor.shape)}")
        if tensor.dtype != shape.dtype:
            raise TypeError(f"{name} must be {shape.dtype} as planned, got {tensor.dtype}")
    if mask.dtype != torch.int32:
        raise TypeError(f"mask must be int32, got {mask.dtype}")
    if mask.dim() != 2 or mask.shape[0] != plan.num_queries or 32 * mask.shape[1] < plan.num_bits:
        raise ValueError(
            f"mask must have shape [T, W] with T = {plan.num_queries} and W at least {-(-plan.num_bits // 32)}, "
            f"got {tuple(mask.shape)}"
        )
    if tile_map is not None:
        _check_map(tile_map, mask, plan)
    for name, given in (("q", q), ("k", k), ("v", v), ("mask", mask), ("tile_map", tile_map)):
        if given is not None and given.device != device:
            raise ValueError(f"{name} must be on {device} as planned, got {given.device}")


def _check_map(tile_map: Tensor, mask: Tensor, plan: MaskedMhaPlan) -> None:
    """Refuse a map that is not cut as the implementation goes."""
    if plan.tile is None:
        raise ValueError(f"tile_map must be None, as implementation {plan.implementation!r} has no tiles, got one")
    if tile_map.dtype != torch.bool:
        raise TypeError(f"tile_map must be bool, got {tile_map.dtype}")
    sizes = plan.num_tiles, -(-32 * mask.shape[1] // plan.tile[1])
    if tuple(tile_map.shape) != sizes:
        raise ValueError(
            f"tile_map must have shape {sizes}, of tiles of {plan.tile[0]} queries and {plan.tile[1]} keys, "
            f"got {tuple(tile_map.shape)}"
        )


def _positions(name: str, values: Tensor, num_requests: int) -> tuple[int, ...]:
    """Read one position a request; synchronises if they are on a device."""
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {values.dtype}")
    if tuple(values.shape) != (num_requests,):
        raise ValueError(f"{name} must have shape [N] = {(num_requests,)}, got {tuple(values.shape)}")
    return tuple(int(value) for value in values.tolist())


def _resolve(name: str, shape: AttentionShape, num_requests: int) -> tuple[str, str]:
    """The implementation that will serve, and the account of the choice."""
    if name != "auto":
        reason = _refusal(name, shape, num_requests)
        if reason is not None:
            raise NotImplementedError(f"implementation {name!r} cannot serve this request; {reason}")
        return name, name
    if shape.device.type != "cuda":
        return "torch", "auto took torch"
    reason = _refusal("triton", shape, num_requests)
    if reason is None:
        return "triton", "auto took triton"
    return "torch", f"auto took torch; refused: triton: {reason}"


def _refusal(name: str, shape: AttentionShape, num_requests: int) -> str | None:
    """Why an implementation cannot serve, or None."""
    try:
        reason: str | None = find_implementation(name).refusal(shape, num_requests)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"
    return reason
