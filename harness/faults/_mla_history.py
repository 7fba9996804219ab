"""Faults of ``mla_prefill`` in who sees what: chunks of the history, causality, packed boundaries."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import _scores, planted
from ._chunked import Pass, State, mla_prefill_twin, passes, slots

OP = "mla_prefill"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


def _with_history(arguments: dict[str, Any], change: Any) -> State:
    """The passes over the history go through ``change``, a function of their list."""

    def changed(*lengths: int) -> list[Pass]:
        current, *history = passes(*lengths)
        return [current, *change(history)]

    return mla_prefill_twin(arguments, passes=changed)


def _at_once(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
    """History and current tokens in one pass."""
    return [Pass(keys=slice(0, history + current), causal=True)]


@planted(OP, NUMERIC, source="history never attended")
def history_ignored(**arguments: Any) -> State:
    """Only the current tokens are attended."""
    return _with_history(arguments, lambda history: [])


@planted(OP, NUMERIC, rows=("F5",))
def last_short_chunk_dropped(**arguments: Any) -> State:
    """A last chunk that is not full is never visited."""
    chunk = arguments["history_chunk_size"]
    return _with_history(arguments, lambda history: [p for p in history if p.keys.stop - p.keys.start == chunk])


@planted(OP, NUMERIC, source="history // chunk where the last chunk is full")
def last_full_chunk_dropped(**arguments: Any) -> State:
    """A last chunk that is full is never visited."""
    chunk = arguments["history_chunk_size"]
    return _with_history(
        arguments, lambda history: history[:-1] if history and _length(history[-1]) == chunk else history
    )


@planted(OP, NUMERIC, source="metadata sized for a fixed number of chunks")
def chunks_past_the_eighth_dropped(**arguments: Any) -> State:
    """Only 8 chunks of a request are visited."""
    return _with_history(arguments, lambda history: history[:8])


@planted(OP, NUMERIC, source="one bit per chunk in a word of 32")
def chunks_past_the_32nd_dropped(**arguments: Any) -> State:
    """Only 32 chunks of a request are visited."""
    return _with_history(arguments, lambda history: history[:32])


@planted(OP, NUMERIC, source="decode path that splits the history in whole chunks")
def decode_path_drops_the_last_chunk(**arguments: Any) -> State:
    """The last chunk is never visited, but only where every request has one current token."""
    decoding = bool((arguments["cu_seqlens"].diff() == 1).all())
    return _with_history(arguments, lambda history: history[:-1] if decoding else history)


@planted(OP, NUMERIC, source="loop over one chunk too few")
def last_chunk_dropped(**arguments: Any) -> State:
    """The last chunk is never visited, unless it is the only one."""
    return _with_history(arguments, lambda history: history[:-1] or history)


@planted(OP, NUMERIC, source="loop over one chunk too many")
def last_chunk_visited_twice(**arguments: Any) -> State:
    """The last chunk is merged a second time."""
    return _with_history(arguments, lambda history: [*history, *history[-1:]])


@planted(OP, NUMERIC, source="inclusive chunk bounds")
def chunks_overlap_by_one(**arguments: Any) -> State:
    """Each chunk after the first begins with the last key of the one before."""
    return _with_history(
        arguments, lambda history: [Pass(keys=slice(max(0, p.keys.start - 1), p.keys.stop)) for p in history]
    )


@planted(OP, NUMERIC, source="exclusive chunk bounds twice")
def last_key_of_each_chunk_lost(**arguments: Any) -> State:
    """Chunks end one key early."""
    return _with_history(
        arguments, lambda history: [Pass(keys=slice(p.keys.start, p.keys.stop - 1)) for p in history if _length(p) > 1]
    )


def _length(one: Pass) -> int:
    return int(one.keys.stop - one.keys.start)


@planted(OP, NUMERIC, source="context_lens includes the current tokens")
def current_tokens_counted_twice(**arguments: Any) -> State:
    """The history runs to the end of the context: queries see current tokens again, future ones included."""

    def to_the_end(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        return passes(history, current, chunk, longest)[:1] + passes(history + current, 0, chunk, longest)[1:]

    return mla_prefill_twin(arguments, passes=to_the_end)


@planted(OP, NUMERIC, NONFINITE, rows=("F3",))
def causal_on_history(**arguments: Any) -> State:
    """Passes over the history are causal, aligned to the last key of the chunk."""
    return mla_prefill_twin(arguments, mask=_scores.always_causal)


@planted(OP, NUMERIC, rows=("F3",))
def top_left_causal_on_history(**arguments: Any) -> State:
    """Passes over the history are causal, aligned to the first key of the chunk."""
    return mla_prefill_twin(arguments, mask=_scores.always_top_left)


@planted(OP, NUMERIC, rows=("F4",))
def top_left_causal(**arguments: Any) -> State:
    """One pass over the whole context, its mask aligned to the first key."""
    return mla_prefill_twin(arguments, passes=_at_once, mask=_scores.top_left)


@planted(OP, NUMERIC, rows=("FC-009",))
def sees_one_future_token(**arguments: Any) -> State:
    """The causal limit lies one token too far."""
    return mla_prefill_twin(arguments, mask=functools.partial(_scores.shifted_limit, 1))


@planted(OP, NUMERIC, NONFINITE, source="< for <=")
def misses_its_own_token(**arguments: Any) -> State:
    """The causal limit lies one token too early."""
    return mla_prefill_twin(arguments, mask=functools.partial(_scores.shifted_limit, -1))


@planted(OP, NUMERIC, source="diagonal tile taken for a full one")
def diagonal_tile_unmasked(**arguments: Any) -> State:
    """Causality holds between tiles of 16 tokens, not within one."""
    return mla_prefill_twin(arguments, mask=_scores.up_to_the_tile)


@planted(OP, NUMERIC, source="flashinfer-ai/flashinfer#5095: wrong above 64 query tokens only")
def second_query_tile_sees_one_more(**arguments: Any) -> State:
    """Queries of a request past its first 64 see one token too many."""
    return mla_prefill_twin(arguments, mask=_scores.later_tiles_see_one_more)


@planted(OP, NUMERIC, source="finite number for hidden logits")
def hidden_logits_at_minus_1e4(**arguments: Any) -> State:
    """A hidden logit is -1e4: it outweighs visible ones that are lower."""
    return mla_prefill_twin(arguments, mask=_scores.filled_with_minus_1e4)


@planted(OP, NUMERIC, source="flag not passed on")
def current_tokens_not_causal(**arguments: Any) -> State:
    """Every query sees every current token of its request."""
    return mla_prefill_twin(arguments, mask=_scores.unmasked)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-022",), source="scaled from 16 bits to 8, as cases for a CPU are short")
def token_position_in_8_bits(**arguments: Any) -> State:
    """Positions from 128 on are negative in the mask of the one pass."""
    mask = functools.partial(_scores.narrow_positions, torch.int8)
    return mla_prefill_twin(arguments, passes=_at_once, mask=mask)


@planted(OP, NUMERIC, rows=("FC-002",))
def packed_boundaries_ignored(**arguments: Any) -> State:
    """Current tokens of all requests attend to each other, each up to its position in the pack."""
    pack = _Pack(arguments["cu_seqlens"].diff().tolist())
    return mla_prefill_twin(arguments, slots=pack.slots, passes=pack.passes)


class _Pack:
    """Steps that let the current tokens of earlier requests stand between a request's history and its own."""

    def __init__(self, query_lens: list[int]) -> None:
        """Nothing has come before the first request."""
        self._query_lens, self._current = iter(query_lens), torch.empty(0, dtype=torch.long)

    def slots(self, slot_table: Tensor, row: int, count: int) -> Tensor:
        """History, then all current tokens up to the last of this request."""
        history, current = slots(slot_table, row, count).tensor_split([count - next(self._query_lens)])
        self._current = torch.cat([self._current.to(current), current])
        return torch.cat([history, self._current])

    def passes(self, history: int, current: int, chunk: int, longest: int) -> list[Pass]:
        """The current pass reaches over the pack."""
        packed = Pass(keys=slice(history, history + len(self._current)), causal=True)
        return [packed, *passes(history, current, chunk, longest)[1:]]
