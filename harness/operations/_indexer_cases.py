"""The cases of ``indexer`` by tier: packed index queries and keys, lists longer and shorter than what is visible."""

from typing import Any

from ..batches import Batch, crowd, decode_batch, edge_batch, log_uniform
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._indexer_values import EXACT_FAMILIES, FAMILIES

# one after the other; each row followed by what is no part of it; heads outside of the queries
LAYOUTS = ("packed", "strided", "heads-first")
# heads, their width: small; odd; one head
SMALL, ODD, SINGLE = (3, 24), (5, 17), (1, 32)
SHAPES = (SMALL, ODD, SINGLE, (2, 64))
# DeepSeek-V3.2, GLM-5.3-Flash
MODELS = ((64, 128), (32, 128))
TOPK = (8, 5, 33, 1, 16)
NIGHTLY_CASES = 60

# a request without queries, one without keys, more queries than keys, one token
_EDGES = Batch(query_lens=[6, 0, 3, 9, 1], context_lens=[6, 7, 0, 4, 1])
# one more than a tile of queries and of keys, a prompt shorter than one, a query behind a history
_TILES = Batch(query_lens=[33, 3, 1], context_lens=[129, 3, 65])

# queries, keys and lists of more than one block of each
_WIDE = Batch(query_lens=[70, 2], context_lens=[150, 1100])


def indexer_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family, layout and list length on short contexts. Full: models, all dtypes. Nightly: drawn."""
    draw = _Draw(request, op)
    for turn, family in enumerate(FAMILIES):
        draw.add(family, draw.batch(requests=3, longest=90, most_queries=12, chunk=16), SHAPES[turn % 4], turn=turn)
        draw.add(
            family, draw.batch(requests=3, longest=60, most_queries=20, chunk=16), SHAPES[(turn + 1) % 4], turn=turn + 1
        )
    for turn, family in enumerate(("diffuse", "negative", *EXACT_FAMILIES)):
        draw.add(family, _EDGES, SMALL, turn=turn)
        draw.add(family, _TILES, SHAPES[turn % 4], turn=turn + 2, topk=(16, 70)[turn % 2])
    for turn in range(3):
        draw.add("diffuse", decode_batch(draw.rng, requests=4, longest=200), SMALL, turn=turn, topk=64)
        draw.add("large", _TILES, (2, 64), turn=turn)
    for turn, family in enumerate(("diffuse", "exact-rising")):
        draw.add(family, _WIDE, (2, 64), turn=turn, topk=200)
    # past the end of a table of 16
    draw.add("diffuse", crowd(17), SINGLE, turn=1)
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for turn, family in enumerate(FAMILIES):
            batch = draw.batch(requests=5, longest=400, most_queries=40, chunk=16)
            draw.add(family, batch, SHAPES[(turn + at) % 4], turn=turn + at, dtype=dtype, topk=TOPK[turn % 5] * 4)
            edges = edge_batch(draw.rng, requests=5, most_queries=65, longest=129)
            draw.add(family, edges, SHAPES[(turn + at + 1) % 4], turn=turn, dtype=dtype)
        for turn, model in enumerate(MODELS):
            small = Batch(query_lens=[9, 1], context_lens=[1500, 33])
            for family in ("diffuse", "clustered", "exact-codes"):
                draw.add(family, small, model, turn=turn + at, dtype=dtype, topk=512)
            draw.add("near", Batch(query_lens=[33], context_lens=[2050]), model, turn=at, dtype=dtype, topk=2048)
            long = Batch(query_lens=[1024, 1, 257], context_lens=[32768, 20000, 257])
            for family in ("diffuse", "exact-ties", "clustered"):
                draw.add(family, long, model, turn=turn + at, dtype=dtype, topk=2048, device=True)


def _nightly_case(draw: "_Draw") -> None:
    rng = draw.rng
    shape = log_uniform(rng, 1, 16), log_uniform(rng, 3, 128)
    batch = draw.batch(requests=log_uniform(rng, 1, 10), longest=log_uniform(rng, 8, 1000), most_queries=40, chunk=16)
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    draw.add(family, batch, shape, turn=int(rng.integers(30)), topk=log_uniform(rng, 1, 300))


class _Draw(Draw):
    """The cases so far, and what the next one is drawn from."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [6])

    def add(
        self,
        family: str,
        batch: Batch,
        shape: tuple[int, int],
        *,
        turn: int,
        topk: int | None = None,
        dtype: str | None = None,
        device: bool = False,
    ) -> None:
        """Add a case; ``turn`` picks the layout, and where they are not given the dtype and the length of a list."""
        sizes: dict[str, Any] = {
            "num_heads": self.request.heads or shape[0],
            "head_dim": shape[1],
            "topk": topk or TOPK[turn % len(TOPK)],
            "query_lens": batch.query_lens,
            "key_lens": batch.context_lens,
            "layout": LAYOUTS[turn % len(LAYOUTS)],
        }
        self.append(family, dtype or self.dtype(len(self.cases)), sizes, needs_device=device)
