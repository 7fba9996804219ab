"""Faults of ``sparse_mla`` in what a query takes for its list: lengths, padding, copies, tiles, neighbours."""

from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import _softmax, planted
from ._chunked import NEVER
from ._softmax import Online, even_tiles
from ._sparse import Three, gather, sparse_twin, valid, within_length

OP = "sparse_mla"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
# whatever lies there: NaN, a lure, or the row of another request
ANY_ROW = (NUMERIC, NONFINITE)
GROUP = 2


def first_of_its_kind(indices: Tensor, counted: Tensor) -> Tensor:
    """Entries that count and were not listed before."""
    same = (indices[:, :, None] == indices[:, None, :]) & counted[:, :, None] & counted[:, None, :]
    return counted & ~same.tril(-1).any(-1)


@planted(OP, NUMERIC, rows=("F17",))
def duplicates_dropped(**arguments: Any) -> Three:
    """A set, as the bits of masked attention are, where a multiset is meant."""
    return sparse_twin(arguments, valid=lambda i, n, s: first_of_its_kind(i, valid(i, n, s)))


def empty_queries(arguments: dict[str, Any]) -> Tensor:
    """``[s]``, those without any entry."""
    a = arguments
    return ~valid(a["indices"], a["topk_length"], len(a["kv"])).any(1)


@planted(OP, Verdict.WRITE_SCOPE, source="an early exit of a tile that has nothing to load")
def tiles_without_entries_unwritten(**arguments: Any) -> Three:
    """Whole tiles of 64 queries without any entry leave their results as the memory came."""
    answer, empty = sparse_twin(arguments), empty_queries(arguments)
    tiles = empty[: len(empty) // 64 * 64].view(-1, 64).all(1).repeat_interleave(64)
    written = torch.cat([~tiles, torch.ones_like(empty[len(tiles) :])])
    out, lse, top = (torch.empty_like(result) for result in answer)
    for mine, result in zip((out, lse, top), answer, strict=True):
        mine[written] = result[written]
    return out, lse, top


@planted(OP, NONFINITE, source="an early exit where no query lists anything")
def batch_without_entries_is_zeros(**arguments: Any) -> Three:
    """Of a batch without any entry all results are 0."""
    out, lse, top = sparse_twin(arguments)
    if bool(empty_queries(arguments).all()):
        lse, top = torch.zeros_like(lse), torch.zeros_like(top)
    return out, lse, top


@planted(OP, *ANY_ROW, rows=("F15",), source="Python's index of the last row")
def padding_is_the_last_row(**arguments: Any) -> Three:
    """``-1`` wraps around."""
    last = len(arguments["kv"]) - 1
    indices = torch.where(arguments["indices"] == -1, last, arguments["indices"])
    return sparse_twin({**arguments, "indices": indices})


@planted(OP, *ANY_ROW, rows=("FC-096",))
def padding_is_the_first_row(**arguments: Any) -> Three:
    """Slot 0 stands in for padding."""
    return sparse_twin({**arguments, "indices": arguments["indices"].clamp(min=0)})


@planted(OP, *ANY_ROW, rows=("F16",))
def index_past_the_cache_is_clamped(**arguments: Any) -> Three:
    """Too large an index is the last row."""
    return sparse_twin({**arguments, "indices": arguments["indices"].clamp(max=len(arguments["kv"]) - 1)})


@planted(OP, *ANY_ROW, source="indices packed in pairs")
def rows_numbered_in_16_bits(**arguments: Any) -> Three:
    """Rows past 2^16 are looked for among the first."""
    indices = arguments["indices"]
    inside = (indices >= 0) & (indices < len(arguments["kv"]))
    return sparse_twin({**arguments, "indices": torch.where(inside, indices & 0xFFFF, indices)})


@planted(OP, *ANY_ROW, source="decode kernels, in which only -1 is padding")
def only_minus_one_is_padding(**arguments: Any) -> Three:
    """Other negative numbers count from the end."""
    indices, s_kv = arguments["indices"], len(arguments["kv"])
    return sparse_twin({**arguments, "indices": torch.where(indices < -1, indices % s_kv, indices)})


@planted(OP, *ANY_ROW, rows=("F18", "FC-094"))
def topk_length_ignored(**arguments: Any) -> Three:
    """Entries past the length count if they name a row."""
    return sparse_twin({**arguments, "topk_length": None})


@planted(OP, *ANY_ROW, source="comparison with <= instead of <")
def one_entry_too_many(**arguments: Any) -> Three:
    """The entry at the length counts, too."""
    return sparse_twin(arguments, valid=lambda i, n, s: valid(i, n if n is None else n + 1, s))


@planted(OP, *ANY_ROW, source="length of the last index")
def one_entry_too_few(**arguments: Any) -> Three:
    """The last entry within the length does not count."""
    return sparse_twin(arguments, valid=lambda i, n, s: valid(i, n if n is None else n - 1, s))


@planted(OP, *ANY_ROW, source="lengths per request taken for lengths per query")
def length_of_the_first_query(**arguments: Any) -> Three:
    """All lists are as long as the first."""
    return sparse_twin(arguments, valid=lambda i, n, s: valid(i, n if n is None else n[:1].expand_as(n), s))


@planted(OP, *ANY_ROW, rows=("FC-098",))
def list_ends_at_the_first_padding(**arguments: Any) -> Three:
    """What comes behind a -1 is lost."""
    return sparse_twin(arguments, valid=lambda i, n, s: valid(i, n, s) & ((i < 0).cumsum(1) == 0))


@planted(OP, *ANY_ROW, source="loop left at a tile without an entry")
def stops_at_an_empty_tile(**arguments: Any) -> Three:
    """The first 16 entries that are all padding end the list."""

    def until_empty(indices: Tensor, topk_length: Tensor | None, s_kv: int) -> Tensor:
        counted = valid(indices, topk_length, s_kv)
        parts = counted.split(16, dim=1)
        going = torch.cat([part.any(1, keepdim=True).expand_as(part) for part in parts], dim=1)
        return counted & (going.long().cumprod(1) > 0)

    return sparse_twin(arguments, valid=until_empty)


@planted(OP, NUMERIC, source="a list of 64 entries baked in")
def entries_past_64_dropped(**arguments: Any) -> Three:
    """Longer lists are cut."""
    return sparse_twin(arguments, valid=lambda i, n, s: valid(i, n, s) & (torch.arange(i.shape[1]).to(i.device) < 64))


@planted(OP, *ANY_ROW, source="topk // tile tiles")
def last_tile_dropped(**arguments: Any) -> Three:
    """Entries past the last whole tile of 16 are never visited."""
    return sparse_twin(arguments, softmax=Online(tiles=_softmax.without_last_tile))


@planted(OP, *ANY_ROW, source="tiles with a step of one too few")
def tiles_overlap(**arguments: Any) -> Three:
    """The last entry of a tile is seen in the next one again."""
    return sparse_twin(arguments, softmax=Online(tiles=_softmax.overlapping))


@planted(OP, NONFINITE, rows=("F31", "FC-082"))
def first_tile_of_padding_poisons(**arguments: Any) -> Three:
    """The sums are rescaled by ``exp(-inf + inf)``."""
    return sparse_twin(arguments, softmax=Online(tiles=even_tiles(16), guarded=False))


@planted(OP, NONFINITE, rows=("F32", "FC-100"))
def padding_reads_the_first_row(**arguments: Any) -> Three:
    """Slot 0 is gathered and weighs 0, which does not hide a NaN."""
    return sparse_twin(arguments, gather=lambda kv, i, ok: kv[torch.where(ok, i, 0).long()])


@planted(OP, NONFINITE, rows=("FC-099",))
def padding_reads_before_the_cache(**arguments: Any) -> Three:
    """The address comes from the index as it is, and only the score is masked."""

    def unmasked(kv: Tensor, indices: Tensor, ok: Tensor) -> Tensor:
        rows = gather(kv, indices, ok)
        before = (indices < 0)[..., None]
        # what lies there is a guard band of the judge
        return torch.where(before, torch.nan, rows)

    return sparse_twin(arguments, gather=unmasked)


@planted(OP, NONFINITE, source="rows of the tile loaded up to topk, weights of the tail 0")
def tail_is_read(**arguments: Any) -> Three:
    """Rows listed past the length weigh 0, which does not hide a NaN."""

    def whole(kv: Tensor, indices: Tensor, ok: Tensor) -> Tensor:
        return gather(kv, indices, (indices >= 0) & (indices < len(kv)))

    return sparse_twin(arguments, gather=whole)


@planted(OP, NONFINITE, rows=("FC-086",))
def nan_counts_as_padding(**arguments: Any) -> Three:
    """An undefined logit is dropped, and the answer looks like one."""
    return sparse_twin(
        arguments,
        hide=lambda z, ok: z.masked_fill(~ok | z.isnan(), NEVER),
        values=lambda rows, d_v: rows[..., :d_v].nan_to_num(nan=0.0),
    )


@planted(OP, *ANY_ROW, source="neighbours of a group share one list")
def list_of_the_neighbour(**arguments: Any) -> Three:
    """Odd queries read the list and the length of the query before them."""
    indices, length = arguments["indices"], arguments["topk_length"]
    leader = torch.arange(len(indices), device=indices.device) // GROUP * GROUP
    length = None if length is None else length[leader]
    return sparse_twin({**arguments, "indices": indices[leader], "topk_length": length})


@planted(OP, *ANY_ROW, source="membership byte of a united list shifted by one query")
def membership_of_the_neighbour(**arguments: Any) -> Three:
    """Each query of a pair attends to the entries of the other."""
    indices, length = arguments["indices"], arguments["topk_length"]
    query = torch.arange(len(indices), device=indices.device)
    other = torch.where((query ^ 1) < len(indices), query ^ 1, query)
    length = None if length is None else length[other]
    return sparse_twin({**arguments, "indices": indices[other], "topk_length": length})


@planted(OP, *ANY_ROW, source="united list without its membership bytes")
def whole_union_attended(**arguments: Any) -> Three:
    """Queries of a pair attend to what either lists."""
    indices, s_kv = arguments["indices"], len(arguments["kv"])
    own = torch.where(valid(indices, arguments["topk_length"], s_kv), indices, -1)
    query = torch.arange(len(own), device=own.device)
    other = own[torch.where((query ^ 1) < len(own), query ^ 1, query)]
    missing = ~(other[:, :, None] == own[:, None, :]).any(-1)
    united = torch.cat([own, torch.where(missing, other, -1)], dim=1)
    return sparse_twin({**arguments, "indices": united, "topk_length": None})


@planted(OP, NUMERIC, source="a bit a query in a united list, and no count")
def union_loses_multiplicity(**arguments: Any) -> Three:
    """Copies are lost of rows that a neighbour lists as well."""

    def bits(indices: Tensor, topk_length: Tensor | None, s_kv: int) -> Tensor:
        counted = valid(indices, topk_length, s_kv)
        own = torch.where(counted, indices, -1)
        query = torch.arange(len(own), device=own.device)
        other = own[torch.where((query ^ 1) < len(own), query ^ 1, query)]
        shared = (own[:, :, None] == other[:, None, :]).any(-1)
        return first_of_its_kind(indices, counted) | counted & ~shared

    return sparse_twin(arguments, valid=bits)


@planted(OP, *ANY_ROW, source="s_q // group groups")
def last_group_has_no_list(**arguments: Any) -> Three:
    """Queries behind the last whole group of 4 attend to nothing."""

    def whole_groups(indices: Tensor, topk_length: Tensor | None, s_kv: int) -> Tensor:
        covered = torch.arange(len(indices), device=indices.device) < len(indices) // 4 * 4
        return valid(indices, topk_length, s_kv) & covered[:, None]

    return sparse_twin(arguments, valid=whole_groups)


@planted(OP, *ANY_ROW, source="route switched after 64 queries, whose lanes look at the index alone")
def length_ignored_past_64_queries(**arguments: Any) -> Three:
    """The 65th query and all behind it attend to their tails."""

    def switched(indices: Tensor, topk_length: Tensor | None, s_kv: int) -> Tensor:
        late = torch.arange(len(indices), device=indices.device) >= 64
        return (indices >= 0) & (indices < s_kv) & (within_length(indices, topk_length) | late[:, None])

    return sparse_twin(arguments, valid=switched)


@planted(OP, *ANY_ROW, rows=("FC-087",), source="row pitch of lists taken for topk")
def lists_read_densely(**arguments: Any) -> Three:
    """Lists lie wider apart than they are long."""
    indices = arguments["indices"]
    dense = indices.as_strided(indices.shape, (indices.shape[1], 1))
    return sparse_twin({**arguments, "indices": dense})
