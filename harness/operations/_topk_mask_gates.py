"""Whether a mask has exactly the bits of the oracle's, and its map exactly the tiles that hold one."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...reference.topk_mask import tile_map, topk_mask
from ..answers import Answer
from ..operation import Judged
from ..record import GateResult, Location


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOracle:
    """The reference's answer; on the CPU.

    Attributes:
        mask: ``[T, W]``, int32.
        held: ``[tiles, columns]``, bool; None where no map is asked for.
        requests: ``[T]``, the owner of each row.
        first_queries: First row of each request.
    """

    mask: Tensor
    held: Tensor | None
    requests: list[int]
    first_queries: list[int]


def mask_oracle(arguments: dict[str, Any]) -> MaskOracle:
    """Build the mask bit by bit, and look at its tiles."""
    given: dict[str, Any] = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()
    }
    cu, tile = given["cu_seqlens_q"], given["tile"]
    mask = topk_mask(given["indices"], cu_seqlens_q=cu, key_lens=given["key_lens"], key_starts=given["key_starts"])
    held = None if tile is None else tile_map(mask, cu_seqlens_q=cu, tile_queries=tile[0], tile_keys=tile[1])
    counts = [after - before for before, after in itertools.pairwise(cu.tolist())]
    requests = [request for request, count in enumerate(counts) for _ in range(count)]
    return MaskOracle(mask=mask, held=held, requests=requests, first_queries=cu[:-1].tolist())


def judge_mask(oracle: MaskOracle, answer: Answer) -> Judged:
    """G3: every word, and every tile of the map where one is asked for; nothing here is ever rounded."""
    gates = [_words(oracle, answer[0].cpu())]
    if oracle.held is not None:
        gates.append(_tiles(oracle.held, answer[1].cpu()))
    return Judged(gates=gates, rows=len(oracle.mask))


def _words(oracle: MaskOracle, mask: Tensor) -> GateResult:
    wrong = mask != oracle.mask
    if not bool(wrong.any()):
        return GateResult(gate="G3 mask", ratio=0.0)
    query, word = (int(at) for at in wrong.nonzero()[0])
    got, expected = int(mask[query, word]), int(oracle.mask[query, word])
    differing = got ^ expected
    # the lowest bit in which they differ; of a negative number too
    bit = (differing & -differing).bit_length() - 1
    request = oracle.requests[query]
    text = (
        f"G3 mask: {int(wrong.any(1).sum())} of {len(mask)} rows differ; query {query - oracle.first_queries[request]} "
        f"of request {request} must {'' if expected >> bit & 1 else 'not '}have key {32 * word + bit} (bit {bit} of "
        f"word {word}), whose word is {got & 0xFFFFFFFF:#010x}, must be {expected & 0xFFFFFFFF:#010x}"
    )
    where = Location(request=request, token=query, dim=word, got=float(got), expected=float(expected))
    return GateResult(gate="G3 mask", ratio=math.inf, where=where, text=text)


def _tiles(expected: Tensor, held: Tensor) -> GateResult:
    wrong = held != expected
    if not bool(wrong.any()):
        return GateResult(gate="G3 map", ratio=0.0)
    row, column = (int(at) for at in wrong.nonzero()[0])
    truth = bool(expected[row, column])
    text = (
        f"G3 map: {int(wrong.sum())} of {wrong.numel()} tiles differ; tile {column} of row {row} holds "
        f"{'a bit' if truth else 'none'}, the map says {'a bit' if not truth else 'none'}"
    )
    where = Location(position=row, dim=column, got=float(not truth), expected=float(truth))
    return GateResult(gate="G3 map", ratio=math.inf, where=where, text=text)
