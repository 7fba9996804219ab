"""The cases of ``topk_mask`` by tier: lists of every kind, over whole requests and over chunks of their keys."""

from dataclasses import dataclass
from typing import Any

from ..batches import Batch, crowd, edge_batch, log_uniform
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._topk_mask_lists import FAMILIES

# rows of the mask and keys of a tile of the map; none
TILES = ((16, 32), (16, 128), (0, 0), (64, 64), (128, 128))
# rows one after the other; with more entries behind each than the list has; a list's entries a row apart
LAYOUTS = ("packed", "strided", "columns")
NIGHTLY_CASES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The keys that a mask speaks of: the first request's chunk begins at ``start``, each further one's a key later.

    A ``size`` of 0 stands for all keys from ``start`` on.
    """

    start: int = 0
    size: int = 0


WHOLE = Chunk()
# in the middle of a word, and across its end; at its last bit; the chunk behind one that fits words; none fits words
CHUNKS = (Chunk(start=17, size=40), Chunk(start=31, size=33), Chunk(start=32, size=64), Chunk(start=33))

_SHORT = Batch(query_lens=[1, 2, 3], context_lens=[1, 31, 33])
_WORDS = Batch(query_lens=[3, 2, 4, 2], context_lens=[32, 64, 65, 63])
# one request alone is what the builder of single requests is for
_ALONE = Batch(query_lens=[19], context_lens=[97])
# a request without queries, one without keys, more queries than keys
_ODD = Batch(query_lens=[5, 0, 3, 7], context_lens=[40, 9, 0, 4])
# tiles of 16 and 64 queries end beside these
_TILES = Batch(query_lens=[17, 16, 15], context_lens=[129, 127, 128])
_TALL = Batch(query_lens=[130], context_lens=[140])
_LONG = Batch(query_lens=[2, 1], context_lens=[70001, 33])
_BATCHES = (_SHORT, _WORDS, _ALONE, _TILES)


def topk_mask_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family, chunk, tile and layout on few rows. Full: production lengths. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for turn, family in enumerate(FAMILIES):
        draw.add(family, _BATCHES[turn % 4], topk=(24, 7, 40, 64)[turn % 4], turn=turn)
        # of one shape with the one before: what that left behind is in its way
        draw.add(FAMILIES[turn - 1], _BATCHES[turn % 4], topk=(24, 7, 40, 64)[turn % 4], turn=turn)
        draw.add(family, draw.batch(requests=3, longest=150, most_queries=9, chunk=31), topk=24, turn=turn + 1)
        if family != "indexed":
            draw.add(
                family, draw.batch(requests=3, longest=110, most_queries=9, chunk=31), topk=40, turn=turn + 2, at=turn
            )
    draw.add("diffuse", _ODD, topk=5, turn=0)
    draw.add("holes", _ODD, topk=5, turn=1, at=0)
    # lists of keys of others where there is no key
    draw.add("outside", _ODD, topk=9, turn=2)
    draw.add("duplicates", _ALONE, topk=1, turn=0)
    draw.add("outside", _ALONE, topk=130, turn=1, at=1)
    # tiles of words that are negative and nothing else
    draw.add("signs", _TILES, topk=7, turn=0)
    # a tile of 128 queries, the last of which alone see keys of the second one; tiles that begin with a chunk
    draw.add("clustered", _TALL, topk=40, turn=4)
    draw.add("late", _TILES, topk=7, turn=3, chunk=CHUNKS[3])
    draw.add("signs", _LONG, topk=33, turn=1)
    draw.add("late", _LONG, topk=70, turn=0)
    # more entries than one block of threads has
    draw.add("diffuse", Batch(query_lens=[2], context_lens=[1500]), topk=1100, turn=0)
    # past the end of a table of 16
    draw.add("full", crowd(17), topk=5, turn=0)
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _full_cases(draw: "_Draw") -> None:
    for turn, family in enumerate(FAMILIES):
        for at in (None, turn, turn + 1):
            batch = draw.batch(requests=5, longest=700, most_queries=40, chunk=31)
            draw.add(family, batch, topk=(64, 129, 200)[turn % 3], turn=turn, at=None if family == "indexed" else at)
        edges = edge_batch(draw.rng, requests=5, most_queries=65, longest=129)
        draw.add(family, edges, topk=(1, 16, 33, 65)[turn % 4], turn=turn + 2)
        for layout in LAYOUTS:
            draw.add(family, _TILES, topk=33, turn=turn + 3, layout=layout)
    for turn, (topk, queries, context) in enumerate(((512, 33, 4096), (2048, 20, 8192), (2176, 9, 16411))):
        for family in ("clustered", "holes", "full"):
            draw.add(family, Batch(query_lens=[queries, 1], context_lens=[context, 37]), topk=topk, turn=turn)
    # a prefill of 16K; the most that a mask may take by default; rows too wide for shared memory
    draw.add("clustered", Batch(query_lens=[16384], context_lens=[16384]), topk=2048, turn=4, device=True)
    draw.add("diffuse", Batch(query_lens=[8192, 8192], context_lens=[32768, 32767]), topk=512, turn=1, device=True)
    draw.add("holes", Batch(query_lens=[20, 3], context_lens=[270000, 5]), topk=2048, turn=1, device=True)
    draw.add("outside", Batch(query_lens=[70000], context_lens=[90]), topk=16, turn=3, device=True)


def _nightly_case(draw: "_Draw") -> None:
    rng = draw.rng
    longest = log_uniform(rng, 32, 20000)
    batch = draw.batch(requests=log_uniform(rng, 1, 12), longest=longest, most_queries=60, chunk=31)
    chunk = None
    if rng.integers(2):
        chunk = Chunk(start=int(rng.integers(longest // 2)), size=log_uniform(rng, 1, longest))
    families = [family for family in FAMILIES if family != "indexed"]
    family, turn = families[int(rng.integers(len(families)))], int(rng.integers(30))
    draw.add(family, batch, topk=log_uniform(rng, 1, 300), turn=turn, chunk=chunk)


class _Draw(Draw):
    """The cases so far, and what the next one is drawn from."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [5])

    def add(
        self,
        family: str,
        batch: Batch,
        *,
        topk: int,
        turn: int,
        at: int | None = None,
        chunk: Chunk | None = None,
        layout: str | None = None,
        device: bool = False,
    ) -> None:
        """Add a case; ``turn`` picks tile, layout, cap and dtype, ``at`` one of ``CHUNKS``."""
        part = chunk or (WHOLE if at is None else CHUNKS[at % len(CHUNKS)])
        tile = TILES[turn % len(TILES)]
        sizes: dict[str, Any] = {
            "query_lens": batch.query_lens,
            "context_lens": batch.context_lens,
            "topk": topk,
            "chunk_start": part.start,
            "chunk_size": part.size,
            "tile_queries": tile[0],
            "tile_keys": tile[1],
            "layout": layout or LAYOUTS[turn % len(LAYOUTS)],
            "exact_cap": turn % 2 == 0,
        }
        # no index has the dtype of the step; the cases share them, so that a run of one dtype has some
        self.append(family, self.dtype(len(self.cases)), sizes, needs_device=device)
