"""Faults of ``indexer`` between scores and lists: order, ties, what is chosen. And variants."""

from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted, variant
from ._indexes import NEVER, Lists, best, hidden, index_twin, padded, ranked

OP = "indexer"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="ties broken from the end")
def later_of_equal_first(**arguments: Any) -> Lists:
    """Of equal scores the higher position comes first."""

    def turned(found: Tensor, topk: int) -> Lists:
        keys, ordered = ranked(found.flip(1))
        return padded(found.shape[1] - 1 - keys, ordered, topk)

    return index_twin(arguments, best=turned)


@planted(OP, NUMERIC, source="equal scores in the order in which a heap leaves them")
def ties_in_no_order(**arguments: Any) -> Lists:
    """Equal scores come in an order of the chooser's own."""

    def shuffled(found: Tensor, topk: int) -> Lists:
        order = torch.randperm(found.shape[1], generator=torch.Generator().manual_seed(3)).to(found.device)
        keys, ordered = ranked(found[:, order])
        return padded(order[keys], ordered, topk)

    return index_twin(arguments, best=shuffled)


@planted(OP, NUMERIC, source="floats compared as integers")
def negative_scores_in_reverse(**arguments: Any) -> Lists:
    """Bits of a float are compared as an integer, which orders negative ones the other way round."""

    def by_bits(found: Tensor, topk: int) -> Lists:
        bits = (found + 0.0).contiguous().view(torch.int32).long()
        # hidden ones are out of the way all the same
        keys = bits.masked_fill(found == NEVER, torch.iinfo(torch.int64).min).sort(dim=1, descending=True, stable=True)
        return padded(keys.indices, found.gather(1, keys.indices), topk)

    return index_twin(arguments, best=by_bits)


@planted(OP, NUMERIC, source="sorted the wrong way round")
def lowest_first(**arguments: Any) -> Lists:
    """The lowest visible scores are chosen."""

    def lowest(found: Tensor, topk: int) -> Lists:
        keys, ordered = ranked(torch.where(found == NEVER, found, -found))
        return padded(keys, torch.where(ordered == NEVER, ordered, -ordered), topk)

    return index_twin(arguments, best=lowest)


@planted(OP, NUMERIC, source="an unsorted selection")
def in_order_of_position(**arguments: Any) -> Lists:
    """The right keys, in order of their positions."""

    def by_position(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        order = torch.where(keys < 0, 1 << 40, keys).argsort(dim=1, stable=True)
        return keys.gather(1, order), ordered.gather(1, order)

    return index_twin(arguments, best=by_position)


@planted(OP, NUMERIC, source="scores sorted, indices not")
def scores_of_other_keys(**arguments: Any) -> Lists:
    """Keys in order of position beside scores in order."""

    def apart(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        return torch.where(keys < 0, 1 << 40, keys).sort(dim=1).values.masked_fill_(ordered == NEVER, -1), ordered

    return index_twin(arguments, best=apart)


@planted(OP, NUMERIC, NONFINITE, source="the best of all keys, then the mask")
def chosen_before_the_mask(**arguments: Any) -> Lists:
    """The best keys are chosen among all, and those in the future dropped: places are lost to them."""

    def open_choice(found: Tensor, last: Tensor) -> Tensor:
        every, _ = ranked(found)
        place = torch.empty_like(every).scatter_(1, every, torch.arange(found.shape[1]).expand_as(every).to(every))
        return hidden(found, last).masked_fill(place >= arguments["topk"], NEVER)

    return index_twin(arguments, hidden=open_choice)


@planted(OP, NUMERIC, NONFINITE, source="hidden keys fill the list")
def hidden_keys_listed(**arguments: Any) -> Lists:
    """Where too few keys are visible the list goes on with hidden ones."""

    def filled(found: Tensor, topk: int) -> Lists:
        keys, ordered = ranked(found)
        missing = max(0, topk - keys.shape[1])
        pad = torch.nn.functional.pad
        return pad(keys[:, :topk], (0, missing), value=-1), pad(ordered[:, :topk], (0, missing), value=NEVER)

    return index_twin(arguments, best=filled)


@planted(OP, NUMERIC, rows=("FC-068",), source="a buffer for equal scores that is too small")
def equal_scores_cut_off(**arguments: Any) -> Lists:
    """Of the keys that score as the last chosen one a single one is kept, and the list ends."""

    def capped(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        equal = (ordered == ordered[:, -1:]) & (ordered != NEVER)
        late = equal & (equal.cumsum(1) > 1)
        return keys.masked_fill(late, -1), ordered.masked_fill(late, NEVER)

    return index_twin(arguments, best=capped)


@planted(OP, NUMERIC, source="one entry too few")
def last_entry_left_out(**arguments: Any) -> Lists:
    """A full list lacks its last key."""

    def shorter(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        keys[:, -1], ordered[:, -1] = -1, NEVER
        return keys, ordered

    return index_twin(arguments, best=shorter)


@planted(OP, NUMERIC, source="the best of each chunk, not of all")
def chunks_not_merged(**arguments: Any) -> Lists:
    """The best of each chunk of 16 keys stand one after the other."""

    def by_chunk(found: Tensor, topk: int) -> Lists:
        parts = [best(part, min(topk, part.shape[1])) for part in found.split(16, dim=1)] or [best(found, topk)]
        keys = torch.cat([torch.where(part < 0, -1, part + 16 * at) for at, (part, _) in enumerate(parts)], dim=1)
        ordered = torch.cat([part for _, part in parts], dim=1)
        # the visible ones first, chunk by chunk
        order = (ordered == NEVER).long().argsort(dim=1, stable=True)
        return padded(keys.gather(1, order), ordered.gather(1, order), topk)

    return index_twin(arguments, best=by_chunk)


@planted(OP, NUMERIC, rows=("F5",))
def last_partial_tile_of_keys_dropped(**arguments: Any) -> Lists:
    """Keys behind the last whole tile of 32 are not looked at, where there is one."""

    def whole(found: Tensor, topk: int) -> Lists:
        return best(found[:, : found.shape[1] // 32 * 32] if found.shape[1] > 32 else found, topk)

    return index_twin(arguments, best=whole)


@planted(OP, NUMERIC, source="as many keys as one block sorts")
def keys_past_1024_dropped(**arguments: Any) -> Lists:
    """Only 1024 keys of a request are looked at."""
    return index_twin(arguments, best=lambda found, topk: best(found[:, :1024], topk))


@planted(OP, NUMERIC, source="as many candidates as a block keeps")
def lists_end_at_128(**arguments: Any) -> Lists:
    """Longer lists go on with nothing."""

    def shorter(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        keys[:, 128:], ordered[:, 128:] = -1, NEVER
        return keys, ordered

    return index_twin(arguments, best=shorter)


@planted(OP, NUMERIC, source="chosen by the upper half of the bits")
def chosen_in_bfloat16(**arguments: Any) -> Lists:
    """Keys are ranked by scores in bfloat16, and reported with the exact ones."""

    def coarse(found: Tensor, topk: int) -> Lists:
        keys, _ = ranked(found.bfloat16().float())
        return padded(keys, found.gather(1, keys), topk)

    return index_twin(arguments, best=coarse)


@planted(OP, NUMERIC, source="candidates by a coarse score, ranked by the exact one")
def candidates_in_bfloat16(**arguments: Any) -> Lists:
    """As many keys as the list holds are found by scores in bfloat16, then ordered by the exact ones."""

    def found_coarsely(found: Tensor, topk: int) -> Lists:
        keys, _ = ranked(found.bfloat16().float())
        kept = keys[:, :topk].sort(dim=1).values
        place, ordered = ranked(found.gather(1, kept))
        return padded(kept.gather(1, place), ordered, topk)

    return index_twin(arguments, best=found_coarsely)


@planted(OP, NUMERIC, source="overlapping chunks of keys")
def best_key_listed_twice(**arguments: Any) -> Lists:
    """The best key is found by two chunks, and pushes the last one out."""

    def doubled(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        return torch.cat([keys[:, :1], keys], 1)[:, :topk], torch.cat([ordered[:, :1], ordered], 1)[:, :topk]

    return index_twin(arguments, best=doubled)


@planted(OP, NUMERIC, source="the sink forced into the list")
def first_key_always_listed(**arguments: Any) -> Lists:
    """Key 0 takes the last place if it has none."""

    def forced(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found, topk)
        if found.shape[1]:
            absent = ~(keys == 0).any(1) & (keys[:, -1] >= 0)
            keys[:, -1] = torch.where(absent, 0, keys[:, -1])
            ordered[:, -1] = torch.where(absent, found[:, 0], ordered[:, -1])
        return keys, ordered

    return index_twin(arguments, best=forced)


@variant(OP)
def merged_chunk_by_chunk(**arguments: Any) -> Lists:
    """The best so far are held against one chunk of 13 keys after the other."""

    def running(found: Tensor, topk: int) -> Lists:
        keys, ordered = best(found[:, :0], topk)
        for at, part in enumerate(found.split(13, dim=1)):
            own = (torch.arange(part.shape[1], device=part.device) + 13 * at).expand_as(part)
            joined = torch.cat([keys, own.masked_fill(part == NEVER, -1)], dim=1)
            # earlier keys stand first, and a stable order leaves them there
            place, values = ranked(torch.cat([ordered, part + 0.0], dim=1))
            keys, ordered = padded(joined.gather(1, place), values, topk)
        return keys, ordered

    return index_twin(arguments, best=running)


@variant(OP)
def one_key_after_the_other(**arguments: Any) -> Lists:
    """The first of the highest is taken out, as often as the list has places."""

    def taken(found: Tensor, topk: int) -> Lists:
        left, keys, values = found.clone(), [], []
        for _ in range(min(topk, found.shape[1])):
            value = left.amax(1, keepdim=True)
            key = (left == value).long().argmax(1, keepdim=True)
            keys.append(key)
            values.append(value)
            left.scatter_(1, key, NEVER)
        if not keys:
            return best(found, topk)
        return padded(torch.cat(keys, 1), torch.cat(values, 1), topk)

    return index_twin(arguments, best=taken)
