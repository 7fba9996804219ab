"""Faults of ``indexer`` in the lists as they are handed out: padding, positions, requests, memory."""

from collections.abc import Mapping
from typing import Any

import torch

from ..record import Verdict
from . import planted
from ._indexes import Lists, index_twin, requests
from ._indexes_lists import later_of_equal_first
from ._memory import CallCounter, TableByAddress, sixteen_requests

OP = "indexer"
NUMERIC, STRUCTURE, NONFINITE = Verdict.NUMERIC, Verdict.STRUCTURE, Verdict.NONFINITE
NONDETERMINISTIC = Verdict.NONDETERMINISTIC


@planted(OP, NUMERIC, source="0 for no key")
def padded_with_0(**arguments: Any) -> Lists:
    """Where no key is left key 0 stands."""
    indices, found = index_twin(arguments)
    return indices.clamp(min=0), found


@planted(OP, NUMERIC, source="the last entry repeated")
def padded_with_the_last_key(**arguments: Any) -> Lists:
    """Where no key is left the last one is listed again."""
    indices, found = index_twin(arguments)
    count = (indices >= 0).sum(1, keepdim=True)
    return torch.where(indices < 0, indices.gather(1, (count - 1).clamp(min=0).long()), indices), found


@planted(OP, NONFINITE, source="the smallest number where no key is left")
def score_of_no_key_finite(**arguments: Any) -> Lists:
    """Where no key is left the score is the smallest finite number."""
    indices, found = index_twin(arguments)
    return indices, found.clamp(min=torch.finfo(torch.float32).min)


@planted(OP, STRUCTURE, rows=("FC-067",))
def lists_as_long_as_there_are_keys(**arguments: Any) -> Lists:
    """Lists end with the longest context."""
    longest = max(1, max(keys.stop - keys.start for _, keys in requests(arguments)))
    indices, found = index_twin(arguments)
    return indices[:, :longest].contiguous(), found[:, :longest].contiguous()


@planted(OP, Verdict.WRITE_SCOPE, rows=("FC-068",))
def tail_of_a_list_unwritten(**arguments: Any) -> Lists:
    """Only the keys that were found are written, and their scores."""
    indices, found = index_twin(arguments)
    lazy, lazy_scores = torch.empty_like(indices), torch.empty_like(found)
    some = indices >= 0
    lazy[some], lazy_scores[some] = indices[some], found[some]
    return lazy, lazy_scores


@planted(OP, NUMERIC, NONFINITE, source="tables sized for a fixed number of requests")
def requests_past_the_sixteenth_left_out(**arguments: Any) -> Lists:
    """Later requests list nothing but key 0."""
    indices, found = index_twin(arguments)
    sixteen_requests((indices, found), arguments["cu_seqlens_q"])
    return indices, found


@planted(OP, NUMERIC, source="packed positions")
def positions_among_all_keys(**arguments: Any) -> Lists:
    """Positions count through the keys of all requests."""
    indices, found = index_twin(arguments)
    for queries, keys in requests(arguments):
        indices[queries] += torch.where(indices[queries] >= 0, keys.start, 0).int()
    return indices, found


@planted(OP, NUMERIC, source="FC-137 in the indexer: places within a chunk of keys")
def positions_within_a_chunk(**arguments: Any) -> Lists:
    """Positions count from the chunk of 32 keys in which they lie."""
    indices, found = index_twin(arguments)
    return torch.where(indices >= 0, indices & 31, indices), found


@planted(OP, NUMERIC, source="requests mixed up")
def keys_of_the_first_request(**arguments: Any) -> Lists:
    """Every request looks at the first keys of all."""
    k = arguments["k"].nan_to_num(nan=0.0)
    moved = torch.cat([k[: keys.stop - keys.start] for _, keys in requests(arguments)])
    return index_twin({**arguments, "k": moved})


@planted(OP, NUMERIC, NONFINITE, source="row stride ignored")
def keys_taken_for_contiguous(**arguments: Any) -> Lists:
    """Keys are read one after the other in memory."""
    k = arguments["k"]
    flat = torch.as_strided(k, k.shape, (k.shape[1], 1), k.storage_offset())
    return index_twin({**arguments, "k": flat.nan_to_num(nan=0.0)})


@planted(OP, STRUCTURE, source="indices of 64 bits")
def indices_of_64_bits(**arguments: Any) -> Lists:
    """Indices come as a chooser of torch gives them."""
    indices, found = index_twin(arguments)
    return indices.long(), found


@planted(OP, Verdict.MUTATED_INPUT, source="weights scaled in place")
def weights_scaled_in_place(**arguments: Any) -> Lists:
    """A factor is folded into the caller's weights, and out again of the scores."""
    arguments["weights"].mul_(2.0)
    indices, found = index_twin(arguments)
    return indices, found / 2.0


_CALLS = CallCounter()


@planted(OP, NONDETERMINISTIC, NUMERIC, source="equal scores in order of arrival")
def ties_in_order_of_arrival(**arguments: Any) -> Lists:
    """Every other call takes the later of equal scores first."""
    return later_of_equal_first(**arguments) if _CALLS.next() % 2 == 0 else index_twin(arguments)


class _ByAddress:
    """The lists of the last call, given again when the queries lie where they lay."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._answer: Lists | None = None

    def __call__(self, arguments: Mapping[str, Any]) -> Lists:
        """Compute once for each place, which knows nothing of the values."""
        q = arguments["q"]
        key = q.data_ptr(), tuple(q.shape), arguments["topk"], tuple(arguments["cu_seqlens_k"].tolist())
        if key != self._key or self._answer is None:
            self._key, self._answer = key, index_twin(arguments)
        return self._answer[0].clone(), self._answer[1].clone()


_REMEMBERED = _ByAddress()


@planted(OP, NONDETERMINISTIC, source="lists cached by the address of the queries")
def lists_remembered_by_address(**arguments: Any) -> Lists:
    """Queries that changed in place are given the lists of the old ones."""
    return _REMEMBERED(arguments)


_QUERIES, _KEYS = TableByAddress(), TableByAddress()


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the offsets of queries")
def query_offsets_known_by_address(**arguments: Any) -> Lists:
    """Offsets of queries are read once for every place in memory."""
    offsets, others = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    return index_twin({**arguments, "cu_seqlens_q": _QUERIES(offsets, offsets.diff(), others.diff())})


@planted(OP, Verdict.METAMORPHIC, source="plans kept by the address of the offsets of keys")
def key_offsets_known_by_address(**arguments: Any) -> Lists:
    """Offsets of keys are read once for every place in memory."""
    offsets, others = arguments["cu_seqlens_k"], arguments["cu_seqlens_q"]
    return index_twin({**arguments, "cu_seqlens_k": _KEYS(offsets, offsets.diff(), others.diff())})
