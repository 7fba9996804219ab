"""Faults of ``attention`` in who attends to whom: packed boundaries, heads, masks, strides."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import _scores, planted
from ._chunked import NEVER, State, attention_twin, mask, segments, softmax
from ._softmax import Online, even_tiles, overlapping, without_last_tile

OP = "attention"
NUMERIC, NONFINITE, WRITE_SCOPE = Verdict.NUMERIC, Verdict.NONFINITE, Verdict.WRITE_SCOPE


@planted(OP, NUMERIC, NONFINITE, rows=("FC-002",))
def packed_boundaries_ignored(**arguments: Any) -> State:
    """The whole batch is one request, each query limited by its position in the pack."""

    def one_segment(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        return [(slice(0, int(cu_seqlens_q[-1])), slice(0, int(cu_seqlens_k[-1])))]

    return attention_twin(arguments, segments=one_segment)


@planted(OP, NUMERIC, source="mixed up in review of varlen kernels")
def keys_at_query_offsets(**arguments: Any) -> State:
    """The keys of a request are looked for where its queries begin."""

    def shifted(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        found, last = segments(cu_seqlens_q, cu_seqlens_k), int(cu_seqlens_k[-1])
        starts = [min(queries.start, last - (keys.stop - keys.start)) for queries, keys in found]
        return [(q, slice(at, at + k.stop - k.start)) for (q, k), at in zip(found, starts, strict=True)]

    return attention_twin(arguments, segments=shifted)


@planted(OP, NUMERIC, NONFINITE, source="zero-length segments squeezed out of one of the two offset lists")
def zero_length_request_misaligned(**arguments: Any) -> State:
    """Requests without queries are dropped from the query offsets only: the keys of later ones are a neighbour's."""

    def squeezed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        found = segments(cu_seqlens_q, cu_seqlens_k)
        queries = [query for query, _ in found if query.stop > query.start]
        return list(zip(queries, [keys for _, keys in found], strict=False))

    return attention_twin(arguments, segments=squeezed)


@planted(OP, NONFINITE, WRITE_SCOPE, source="facebookresearch/xformers#492")
def request_without_keys_skipped(**arguments: Any) -> State:
    """Nothing is stored for a request that has no keys."""

    def with_keys(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        return [(q, k) for q, k in segments(cu_seqlens_q, cu_seqlens_k) if k.stop > k.start]

    return attention_twin(arguments, segments=with_keys)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-049",))
def tail_masked_by_longest_request(**arguments: Any) -> State:
    """Keys are hidden past the longest request of the batch: a shorter one reads into its neighbour."""

    def as_long_as_the_longest(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        found, last = segments(cu_seqlens_q, cu_seqlens_k), int(cu_seqlens_k[-1])
        longest = max(keys.stop - keys.start for _, keys in found)
        return [(queries, slice(keys.start, min(keys.start + longest, last))) for queries, keys in found]

    return attention_twin(arguments, segments=as_long_as_the_longest)


@planted(OP, NUMERIC, NONFINITE, source="load mask forgotten in the key loop")
def tail_tile_unmasked(**arguments: Any) -> State:
    """The last tile of 16 keys is used to its end, whoever owns the rest; causal rows hide it by chance."""

    def whole_tiles(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        last = int(cu_seqlens_k[-1])
        found = segments(cu_seqlens_q, cu_seqlens_k)
        return [(q, slice(k.start, min(k.start - (k.start - k.stop) // 16 * 16, last))) for q, k in found]

    return attention_twin(arguments, segments=whole_tiles)


@planted(OP, NONFINITE, rows=("FC-016",))
def garbage_times_zero(**arguments: Any) -> State:
    """The tile past the last key is hidden, but its values are loaded: 0 times NaN."""
    v = arguments["v"]
    spare = v.untyped_storage().nbytes() // v.element_size() - v.storage_offset()
    extra = min(8, max(0, (spare - v.shape[1] * v.stride(1)) // v.stride(0) + 1 - len(v)))
    beyond = v.as_strided((len(v) + extra, *v.shape[1:]), v.stride())[len(v) :]

    def with_tail(scores: Tensor, own_v: Tensor) -> State:
        more = beyond.repeat_interleave(own_v.shape[1] // beyond.shape[1], dim=1)
        hidden = scores.new_full((*scores.shape[:2], len(more)), NEVER)
        return softmax(torch.cat([scores, hidden], dim=2), torch.cat([own_v, more]))

    return attention_twin(arguments, softmax=with_tail)


class _WholeTiles:
    """Steps that read the last tile of 16 keys to its end and hide the neighbour's keys in it."""

    def __init__(self, hide: Callable[[Tensor], Tensor]) -> None:
        """``hide`` makes hidden logits of the neighbour's."""
        self._hide, self._lengths = hide, iter([0])

    def segments(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
        """Whole tiles of keys, as far as there are any."""
        found, last = segments(cu_seqlens_q, cu_seqlens_k), int(cu_seqlens_k[-1])
        self._lengths = iter([keys.stop - keys.start for _, keys in found])
        return [(q, slice(k.start, min(k.start - (k.start - k.stop) // 16 * 16, last))) for q, k in found]

    def mask(self, scores: Tensor, causal: bool) -> Tensor:
        """The clean mask on the request's own keys."""
        own = next(self._lengths)
        return torch.cat([mask(scores[..., :own], causal), self._hide(scores[..., own:])], dim=2)


@planted(OP, NONFINITE, Verdict.METAMORPHIC, rows=("FC-016",), source="values of a tile loaded without a mask")
def neighbours_values_times_zero(**arguments: Any) -> State:
    """Weights of a neighbour's keys are 0, which its values survive if they are undefined."""
    wrong = _WholeTiles(lambda scores: torch.full_like(scores, NEVER))
    return attention_twin(arguments, segments=wrong.segments, mask=wrong.mask)


@planted(OP, NONFINITE, Verdict.METAMORPHIC, source="mask added to the logits")
def neighbours_keys_masked_by_a_sum(**arguments: Any) -> State:
    """``-inf`` is added to a neighbour's logits, which hides all but the undefined ones."""
    wrong = _WholeTiles(lambda scores: scores + NEVER)
    return attention_twin(arguments, segments=wrong.segments, mask=wrong.mask)


@planted(OP, NUMERIC, source="split-KV path with splits of whole tiles")
def decode_path_drops_the_tail(**arguments: Any) -> State:
    """A last tile that is not full is never visited, but only where every request has one query."""
    decoding = bool((arguments["cu_seqlens_q"].diff() == 1).all())
    return attention_twin(arguments, softmax=Online(tiles=without_last_tile) if decoding else softmax)


@planted(OP, NUMERIC, NONFINITE, source="fixed-length path taken for a batch of one")
def single_request_masked_top_left(**arguments: Any) -> State:
    """The causal mask is aligned to the first key where there is one request."""
    alone = len(arguments["cu_seqlens_q"]) == 2
    return attention_twin(arguments, mask=_scores.top_left if alone else mask)


@planted(OP, NUMERIC, NONFINITE, source="keys // tile instead of the ceiling")
def tail_tile_dropped(**arguments: Any) -> State:
    """A last tile that is not full is never visited."""
    return attention_twin(arguments, softmax=Online(tiles=without_last_tile))


@planted(OP, NUMERIC, source="inclusive tile bounds")
def tiles_overlap_by_one(**arguments: Any) -> State:
    """The first key of each later tile is counted twice."""
    return attention_twin(arguments, softmax=Online(tiles=overlapping))


@planted(OP, NUMERIC, source="the usual wrong guess of the group map")
def query_heads_interleaved(**arguments: Any) -> State:
    """Query head ``h`` takes key head ``h % H_kv``."""
    return attention_twin(arguments, heads=lambda kv, num_heads: kv.repeat(1, num_heads // kv.shape[1], 1))


@planted(OP, NUMERIC, source="a kernel tried with one key head only")
def first_key_head_for_all(**arguments: Any) -> State:
    """Every query head takes key head 0."""
    return attention_twin(arguments, heads=lambda kv, num_heads: kv[:, :1].expand(-1, num_heads, -1))


@planted(OP, NUMERIC, source="head axis reversed by a layout change")
def heads_reversed(**arguments: Any) -> State:
    """The output of head ``h`` is stored as that of head ``H - 1 - h``."""
    out, lse = attention_twin(arguments)
    return out.flip(1), lse.flip(1)


@planted(OP, NUMERIC, NONFINITE, rows=("F4",))
def top_left_causal(**arguments: Any) -> State:
    """The causal mask is aligned to the first key."""
    return attention_twin(arguments, mask=_scores.top_left)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-009",))
def sees_one_future_key(**arguments: Any) -> State:
    """The causal limit lies one key too far."""
    return attention_twin(arguments, mask=functools.partial(_scores.shifted_limit, 1))


@planted(OP, NUMERIC, NONFINITE, source="< for <=")
def misses_its_own_key(**arguments: Any) -> State:
    """The causal limit lies one key too early."""
    return attention_twin(arguments, mask=functools.partial(_scores.shifted_limit, -1))


@planted(OP, NUMERIC, source="diagonal tile taken for a full one")
def diagonal_tile_unmasked(**arguments: Any) -> State:
    """Causality holds between tiles of 16 keys, not within one."""
    return attention_twin(arguments, mask=_scores.up_to_the_tile)


@planted(OP, NUMERIC, source="flashinfer-ai/flashinfer#5095: wrong above 64 query tokens only")
def second_query_tile_sees_one_more(**arguments: Any) -> State:
    """Queries of a request past its first 64 see one key too many."""
    return attention_twin(arguments, mask=_scores.later_tiles_see_one_more)


@planted(OP, NUMERIC, NONFINITE, source="flag not passed on")
def causal_flag_ignored(**arguments: Any) -> State:
    """Never causal."""
    return attention_twin(arguments, mask=_scores.unmasked)


@planted(OP, NUMERIC, NONFINITE, source="flag not passed on")
def always_causal(**arguments: Any) -> State:
    """Causal where every key should be seen."""
    return attention_twin(arguments, mask=_scores.always_causal)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-022",), source="scaled from 16 bits to 8, as cases for a CPU are short")
def key_position_in_8_bits(**arguments: Any) -> State:
    """Positions from 128 on are negative in the mask."""
    return attention_twin(arguments, mask=functools.partial(_scores.narrow_positions, torch.int8))


@planted(OP, NUMERIC, NONFINITE, rows=("F11", "F26"))
def v_read_as_contiguous(**arguments: Any) -> State:
    """Values are addressed by the strides of a contiguous tensor, whatever their own."""
    return attention_twin({**arguments, "v": _packed_from(arguments["v"])})


@planted(OP, NUMERIC, NONFINITE, rows=("F26",))
def k_read_with_strides_of_q(**arguments: Any) -> State:
    """Keys are addressed by the strides of the queries."""
    q, k = arguments["q"], arguments["k"]
    reach = (k.untyped_storage().nbytes() // k.element_size() - k.storage_offset() - k.shape[2]) // q.stride(0)
    read = k.as_strided((min(len(k), reach), *k.shape[1:]), (q.stride(0), q.stride(1), 1))
    missing = k.new_zeros(len(k) - len(read), *k.shape[1:])
    return attention_twin({**arguments, "k": torch.cat([read, missing])})


@planted(OP, NUMERIC, NONFINITE, source="token stride computed from that of a head")
def rows_of_whole_heads_assumed(**arguments: Any) -> State:
    """Tokens are taken to lie as many head strides apart as there are heads: not so in fused rows of q, k and v."""
    return attention_twin({**arguments, **{name: _rows_of_heads(arguments[name]) for name in ("q", "k", "v")}})


@planted(OP, NUMERIC, NONFINITE, source="head dimension padded to a power of two without a mask")
def padded_head_dimension_read(**arguments: Any) -> State:
    """Products run over the next 8 elements past the head's own, in queries and keys alike."""
    q, k = (_widened(arguments[name], 8) for name in ("q", "k"))
    return attention_twin({**arguments, "q": q, "k": k})


@planted(OP, NONFINITE, rows=("F31",))
def first_tile_hidden_gives_nan(**arguments: Any) -> State:
    """A row whose tiles so far are all hidden is shifted by its maximum, ``-inf``."""
    return attention_twin(arguments, softmax=Online(tiles=even_tiles(16), guarded=False))


def _packed_from(tensor: Tensor) -> Tensor:
    """What lies at the tensor's address, read without gaps."""
    _, num_heads, width = tensor.shape
    return tensor.as_strided(tensor.shape, (num_heads * width, width, 1))


def _rows_of_heads(tensor: Tensor) -> Tensor:
    """The same heads, tokens following each other without a gap."""
    stride = tensor.stride(1)
    return tensor.as_strided(tensor.shape, (tensor.shape[1] * stride, stride, 1))


def _widened(tensor: Tensor, extra: int) -> Tensor:
    """The same rows with what follows each of them in memory; zeros past the buffer."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    width = tensor.shape[2] + extra
    needed = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    roomy = torch.cat([storage, storage.new_zeros(max(0, needed + extra + 1 - len(storage)))])
    return roomy.as_strided((*tensor.shape[:2], width), tensor.stride(), tensor.storage_offset())
