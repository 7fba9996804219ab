"""The cases of ``sparse_mla`` by tier."""

from typing import Any

from ..batches import Batch, draw_scale, log_uniform
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._sparse_mla_lists import HOLES, LENGTHS, ORDERS, REPEATS, SOURCES, TAILS
from ._sparse_mla_values import FAMILIES, SINKS

LAYOUTS = ("packed", "strided", "within", "vast")
# (d_qk, d_v): small ones for every machine, one of them a unified head, one that divides into no tile
SMALL, UNIFIED, ODD = (80, 64), (64, 64), (72, 40)
# (d_qk, d_v, heads, topk) of models as one GPU sees them
MODELS = (
    (576, 512, 16, 2048),  # DeepSeek-V3.2, 8 GPUs
    (576, 512, 8, 2048),  # GLM-5, 8 GPUs
    (512, 512, 16, 2176),  # GLM-5.3-Flash, 4 GPUs: no rope part
    (512, 512, 8, 640),  # DeepSeek-V4.1-Flash, 8 GPUs: a unified head
    (512, 512, 64, 512),  # DeepSeek-V4-Flash, one GPU
    (512, 512, 128, 1024),  # DeepSeek-V4-Pro, one GPU
)
# queries around which kernels change their path
QUERY_EDGES = (63, 64, 65, 129)
HEAD_EDGES = (1, 2, 8, 16, 17, 31, 33, 64)
# what one after the other of the small cases has in its lists, and beside them
KINDS: tuple[dict[str, str], ...] = (
    {"holes": "none", "repeats": "none", "lengths": "ragged", "tail": "rows", "sink": "none"},
    {"holes": "front", "repeats": "some", "lengths": "all", "tail": "padding", "sink": "mixed"},
    {"holes": "wild", "repeats": "none", "lengths": "ragged", "tail": "huge", "sink": "finite"},
    {"holes": "between", "repeats": "some", "lengths": "ragged", "tail": "rows", "sink": "mixed"},
    {"holes": "none", "repeats": "one", "lengths": "ragged", "tail": "nan", "sink": "finite"},
    {"holes": "front", "repeats": "none", "lengths": "ragged", "tail": "rows", "sink": "none"},
    {"holes": "none", "repeats": "some", "lengths": "all", "tail": "padding", "sink": "finite"},
)
PLAIN = {"holes": "none", "repeats": "none", "lengths": "all", "tail": "padding", "sink": "none"}
SPARED = ("ramp-v", "visible-nan", "exact-one-hot", "leverage")
FEWEST_QUERIES = 6
# family and kind of cases that an interpreter gets through
TINY = (("peaked", 3), ("leverage", 1), ("diffuse", 2), ("exact-one-hot", 4), ("leverage", 3), ("peaked", 6))
# products of queries, entries, heads and columns whose companions a CPU works out within seconds
CPU_PRODUCTS, CPU_COVARIANCE = 1 << 28, 1 << 34
NIGHTLY_CASES = 60


def sparse_mla_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family, every kind of list. Full: models, edges, many queries. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for at, dtype in enumerate(request.dtypes):
        for which, family in enumerate(FAMILIES):
            if family == "overflow" and dtype != draw.dtype(1):
                continue
            # of three dtypes the second is spared what the others show
            if family in SPARED and len(request.dtypes) > 2 and at == 1:
                continue
            turn = at + which
            geometry, heads = (SMALL, UNIFIED, ODD)[turn % 3], (4, 5, 8, 3)[turn % 4]
            draw.small(family, dtype, KINDS[(which + 3 * at) % len(KINDS)], geometry, heads)
    # few enough for an interpreter: a query alone, copies, a first tile of nothing, no entry at all
    for turn, (family, kind) in enumerate(TINY):
        batch = Batch(query_lens=[2, 1], context_lens=[37, 9]) if turn % 3 else Batch(query_lens=[1], context_lens=[70])
        geometry = (ODD, SMALL, UNIFIED)[turn % 3]
        draw.add(family, draw.dtype(turn // 3), batch, geometry, 3, topk=60, **KINDS[kind], layout="within")
    # past the last query of a tile, and an entry that no table of 1024 holds
    draw.edges("diffuse", draw.dtype(2), QUERY_EDGES[int(draw.rng.integers(2, 4))], heads=2)
    draw.add("ramp-v", draw.dtype(2), Batch(query_lens=[2], context_lens=[1300]), SMALL, 2, topk=1153, **KINDS[6])
    draw.add("peaked", draw.dtype(2), Batch(query_lens=[20], context_lens=[200]), SMALL, 17, topk=129, **KINDS[3])
    draw.add("constant-v", draw.dtype(2), Batch(query_lens=[8], context_lens=[700]), SMALL, 1, topk=513, **KINDS[6])
    # rows whose numbers 16 bits do not hold
    draw.add("diffuse", draw.dtype(2), Batch(query_lens=[3], context_lens=[70001]), SMALL, 1, topk=60, **KINDS[0])
    # lists of wild numbers alone: of whole tiles of queries between others, and of all that there are
    apart = Batch(query_lens=[3, 130, 2], context_lens=[23, 150, 40])
    draw.add("exact-one-hot", draw.dtype(2), apart, SMALL, 2, topk=60, **(KINDS[3] | {"holes": "requests"}))
    nothing = Batch(query_lens=[2, 1], context_lens=[30, 9])
    draw.add("diffuse", draw.dtype(0), nothing, SMALL, 2, topk=60, **(KINDS[3] | {"holes": "all"}))
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for which, family in enumerate(FAMILIES):
            for turn in range(3):
                kind = KINDS[(which + turn + at) % len(KINDS)]
                geometry = (SMALL, UNIFIED, ODD)[(at + turn) % 3]
                draw.small(family, dtype, kind, geometry, HEAD_EDGES[(which + 3 * turn) % len(HEAD_EDGES)], longest=300)
        for edge, queries in enumerate(QUERY_EDGES):
            draw.edges(FAMILIES[(edge + at) % 4], dtype, queries, heads=(1, 3, 2, 5)[edge])
        for which, (d_qk, d_v, heads, topk) in enumerate(MODELS):
            kind, family = KINDS[(which + at) % len(KINDS)], ("diffuse", "peaked", "leverage")[(which + at) % 3]
            if at == which % len(draw.request.dtypes):
                # runs on a CPU as well
                small = Batch(query_lens=[2, 1], context_lens=[topk // 2 + 70, 33])
                draw.add(family, dtype, small, (d_qk, d_v), 3, topk=topk, **kind, layout="within")
            # nobody keeps a float32 latent cache of that length
            if dtype != "float32":
                batch = draw.batch(requests=3, longest=3 * topk, most_queries=257)
                source = SOURCES[(which + at) % 2]
                draw.add(family, dtype, batch, (d_qk, d_v), heads, topk=topk, **kind, source=source, layout="within")
                draw.add("exact-one-hot", dtype, batch, (d_qk, d_v), heads, topk=topk, **kind, source=source)
    _path_cases(draw)


def _path_cases(draw: "_Draw") -> None:
    """What kernels have paths of their own for; the dtypes take turns, the last of them is that of models."""
    dtype = draw.dtype(2)
    wide, unified = MODELS[1][:2], MODELS[3][:2]
    for at, heads in enumerate((1, 2, 7, 16, 17, 32, 33, 63, 64, 65, 128)):
        batch, kind = Batch(query_lens=[70, 3], context_lens=[900, 40]), KINDS[at % len(KINDS)]
        draw.add("peaked", dtype, batch, wide if at % 2 else unified, heads, topk=512, **kind, source="clustered")
    for queries in QUERY_EDGES:
        batch = Batch(query_lens=[queries], context_lens=[2000])
        draw.add("diffuse", dtype, batch, unified, 8, topk=640, **KINDS[5], source="clustered", layout="within")
        draw.add("leverage", dtype, batch, wide, 8, topk=1024, **KINDS[3], source="indexer")
    # whole groups of neighbours that list the same, in the order of the cache and in none
    for order in ORDERS:
        batch = Batch(query_lens=[200], context_lens=[4000])
        draw.add("diffuse", dtype, batch, unified, 8, topk=512, **PLAIN, source="clustered", order=order)
    # tiles and a whole step without anything to load
    apart = Batch(query_lens=[5, 200, 3], context_lens=[700, 900, 40])
    draw.add("peaked", dtype, apart, unified, 8, topk=512, **(KINDS[5] | {"holes": "requests"}), layout="within")
    nothing = Batch(query_lens=[70], context_lens=[900])
    draw.add("diffuse", dtype, nothing, wide, 16, topk=512, **(KINDS[3] | {"holes": "all"}))
    # more queries than a grid has places in its second dimension
    many = Batch(query_lens=[1000] * 70, context_lens=[1000] * 70)
    draw.add("peaked", dtype, many, unified, 1, topk=8, **KINDS[0])
    for geometry in (wide, unified):
        vast = Batch(query_lens=[33, 5], context_lens=[700, 20])
        draw.add("peaked", dtype, vast, geometry, 8, topk=512, **(PLAIN | {"lengths": "ragged"}), layout="vast")


def _nightly_case(draw: "_Draw") -> None:
    """One case of which nothing is chosen: family, sizes, scale, lists, layout and batch are drawn."""
    rng = draw.rng

    def one_of(choices: tuple[Any, ...]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    kind = {
        "holes": one_of((*HOLES, "requests")),
        "repeats": one_of(REPEATS),
        "lengths": one_of(LENGTHS),
        "tail": one_of(TAILS),
        "sink": one_of(SINKS),
    }
    d_v = log_uniform(rng, 48, 512)
    # a code takes as many columns as it has bits
    geometry = one_of((SMALL, UNIFIED, ODD, MODELS[0][:2], MODELS[3][:2], (d_v + 8 * int(rng.integers(2, 9)), d_v)))
    batch = draw.batch(
        requests=log_uniform(rng, 1, 12), longest=log_uniform(rng, 32, 4000), most_queries=log_uniform(rng, 1, 257)
    )
    draw.add(
        one_of(FAMILIES),
        draw.dtype(int(rng.integers(3))),
        batch,
        geometry,
        log_uniform(rng, 1, 128),
        topk=log_uniform(rng, 1, 2176),
        source=one_of(SOURCES),
        order=one_of(ORDERS),
        layout=one_of(LAYOUTS[:3]),
        **kind,
    )


class _Draw(Draw):
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [5])

    def small(
        self,
        family: str,
        dtype: str,
        kind: dict[str, str],
        geometry: tuple[int, int],
        heads: int,
        *,
        longest: int = 110,
    ) -> None:
        """A few requests; lists in any order and from any source, longer than most of what there is to list."""
        rng = self.rng
        batch = self.batch(requests=3, longest=longest, most_queries=13)
        # rows enough, of keys enough, for a median to mean something
        giant = batch.context_lens.index(longest)
        batch.query_lens[giant] = max(FEWEST_QUERIES, batch.query_lens[giant])
        turn = len(self.cases)
        self.add(
            family,
            dtype,
            batch,
            geometry,
            heads,
            topk=int(rng.integers(48, 100)) if family != "exact-uniform" else 64,
            source=SOURCES[turn % 3],
            order=ORDERS[turn % 2],
            layout=LAYOUTS[turn % 3],
            **kind,
        )

    def edges(self, family: str, dtype: str, queries: int, *, heads: int) -> None:
        """As many queries as tiles have, one more, one fewer."""
        batch = Batch(query_lens=[queries], context_lens=[queries + 20])
        self.add(family, dtype, batch, SMALL, heads, topk=40, source="clustered", layout="within", **KINDS[3])

    def add(
        self,
        family: str,
        dtype: str,
        batch: Batch,
        geometry: tuple[int, ...],
        heads: int,
        *,
        topk: int,
        source: str = "uniform",
        order: str = "shuffled",
        layout: str = "strided",
        **kind: str,
    ) -> None:
        d_qk, d_v = self.request.geometry or geometry
        heads = self.request.heads or heads
        if family == "visible-nan" and kind["sink"] == "mixed":
            # what an infinite sink leaves of a NaN is a matter of words
            kind = {**kind, "sink": "finite"}
        sizes: dict[str, Any] = {
            "num_heads": heads,
            "d_qk": d_qk,
            "d_v": d_v,
            "softmax_scale": draw_scale(self.rng, d_qk),
            "query_lens": batch.query_lens,
            "context_lens": batch.context_lens,
            "topk": topk,
            "source": source,
            "order": order,
            "layout": layout,
            **kind,
        }
        products = sum(batch.query_lens) * topk * heads * (d_qk + d_v)
        # of what rounded queries would do, for each query and head
        covariance = sum(batch.query_lens) * heads * d_qk * d_v * min(d_qk, d_v)
        large = layout == "vast" or products > CPU_PRODUCTS or covariance > CPU_COVARIANCE
        self.append(family, dtype, sizes, needs_device=large)
