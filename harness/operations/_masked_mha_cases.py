"""The cases of ``masked_mha`` by tier."""

from typing import Any

import numpy as np

from ..activations import captured_sizes
from ..batches import Batch, at_edge, crowd, decode_batch, draw_scale, edge_batch, log_uniform
from ..case import Case
from ..families import FAMILIES, RARE_FAMILIES
from ..operation import CaseRequest
from ._draw import PackedDraw
from ._masked_mha_selection import EVERY_KEY

LAYOUTS = ("packed", "strided", "beside")
SMALL = (24, 16)
# head dimensions as projected from a latent: GLM-4.7 and DeepSeek without rope, DeepSeek-V3.2, GLM-5 and, without rope,
# GLM-5.3-Flash, one that divides into no tile
GEOMETRIES = ((128, 128), (192, 128), (256, 256), (72, 40))
NARROW = (64, 64)
# family, longest keys, most queries and heads of the cases at these
LONG_CASES = (("diffuse", 4096, 512, 8), ("peaked", 250, 60, 4), ("ramp-v", 2049, 65, 8))
# query heads that share a key head
GROUPS = (1, 2, 3, 4, 8)
# keys of a stretch that nobody selects, whole tiles of kernels
HOLES = (32, 64, 128)
# where in its context the keys of a chunk begin, within a word or at its edge
FIRST_KEYS = (1, 31, 32, 33, 40, 63, 95)
SEEDS = 1 << 16
CPU_LOGITS = 1 << 22
NIGHTLY_CASES = 60


def masked_mha_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family on small uneven batches. Full: chunks, holes, models. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for turn, dtype in enumerate(request.dtypes):
        for at, family in enumerate(FAMILIES):
            # whole contexts and chunks, and what is small enough to be interpreted, in other dtypes each time
            add = draw.tiny if (at + turn // 2) % 2 == 0 else draw.small
            add(family, dtype, chunk=(at + turn) % 2 == 1, layout=LAYOUTS[(at + turn) % 3])
        draw.add("peaked", dtype, draw.edges(2), heads=(2, 1), chunk=True, holes=True, layout="beside")
        draw.add("ramp-v", dtype, draw.wide(65), NARROW, heads=(4, 2), holes=True)
    # what a path of its own may be wrong in
    draw.add("leverage", draw.dtype(1), decode_batch(draw.rng, requests=4, longest=65), heads=(8, 1), layout="strided")
    single = Batch(query_lens=[12], context_lens=[1088 + at_edge(draw.rng, 65)])
    draw.add("ramp-v", draw.dtype(2), single, heads=(2, 1))
    draw.small("overflow", draw.dtype(1), chunk=True)
    draw.small("nonfinite-v", draw.dtype(0), layout="beside")
    # tiles of queries that begin with their request, at no multiple of their size, with few keys in common
    skewed = Batch(query_lens=[9, 40, 23, 37], context_lens=[30, 190, 150, 230])
    draw.add("diffuse", draw.dtype(2), skewed, heads=(2, 1), holes=True)
    # whole tiles of set bits, on the diagonal and behind the last key, which a kernel may think need no mask
    short = Batch(query_lens=[33, 70, 3], context_lens=[97, 70, 40])
    draw.add("diffuse", draw.dtype(2), short, heads=(2, 1), layout="strided", dense=True)
    short = Batch(query_lens=[33, 5, 20, 9, 17, 3], context_lens=[97, 80, 70, 90, 60, 40])
    draw.add("diffuse", draw.dtype(0), short, heads=(2, 1), chunk=True, dense=True)
    # few enough tiles for keys in chunks to be interpreted, too
    draw.add("exact-one-hot", draw.dtype(0), Batch(query_lens=[3], context_lens=[50]), heads=(1, 1), layout="beside")
    # past the end of a table of 16 requests
    draw.add("exact-one-hot", draw.dtype(2), crowd(18), heads=(2, 1))
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for family in FAMILIES:
            for chunk in (False, True):
                draw.small(family, dtype, chunk=chunk, layout=LAYOUTS[chunk], longest=200, requests=5)
        for rare, family in enumerate(RARE_FAMILIES):
            draw.small(family, dtype, chunk=(at + rare) % 2 == 0, layout=LAYOUTS[rare], longest=200, requests=5)
        for which, geometry in enumerate((*GEOMETRIES, NARROW)):
            group = GROUPS[(at + which) % len(GROUPS)]
            for turn, (family, longest, queries, most_heads) in enumerate(LONG_CASES):
                if geometry != NARROW or dtype == draw.dtype(turn):
                    batch = draw.batch(requests=5, longest=longest, most_queries=queries)
                    heads = max(1, most_heads // group) * group, max(1, most_heads // group)
                    draw.add(family, dtype, batch, geometry, heads=heads, chunk=turn == 1, holes=True, layout="beside")
    _path_cases(draw)


def _path_cases(draw: "_Draw") -> None:
    """Batches for which kernels have paths of their own; the dtypes take turns."""
    rng = draw.rng
    many = edge_batch(rng, requests=12, most_queries=129, longest=129)
    draw.add("diffuse", draw.dtype(2), many, heads=(4, 4))
    draw.add("leverage", draw.dtype(0), many, NARROW, heads=(4, 2), chunk=True, layout="strided")
    # no multiple of a tile in queries or keys, one after the other
    edges = Batch(query_lens=[63, 64, 65, 129], context_lens=[129, 65, 129, 129])
    draw.add("peaked", draw.dtype(1), edges, NARROW, heads=(2, 1), holes=True)
    draw.add("exact-one-hot", draw.dtype(0), edges, NARROW, heads=(2, 2), chunk=True, holes=True, layout="beside")
    decoding = decode_batch(rng, requests=16, longest=2100)
    draw.add("peaked", draw.dtype(1), decoding, NARROW, heads=(16, 2), holes=True)
    draw.add("leverage", draw.dtype(2), decoding, NARROW, heads=(9, 3), chunk=True, layout="strided")
    draw.add("ramp-v", draw.dtype(0), Batch(query_lens=[1], context_lens=[5000]), heads=(2, 1), holes=True)
    draw.add("diffuse", draw.dtype(1), Batch(query_lens=[200], context_lens=[1500]), NARROW, heads=(2, 1), chunk=True)
    tiny = draw.batch(requests=2, longest=3000, most_queries=33)
    tiny.query_lens.extend([1] * 40)
    tiny.context_lens.extend(log_uniform(rng, 1, 9) for _ in range(40))
    draw.add("diffuse", draw.dtype(2), tiny, heads=(3, 1))
    draw.captured(draw.dtype(2), queries=70, tokens=384)


def _nightly_case(draw: "_Draw") -> None:
    """One case of which nothing is chosen: family, sizes, scale, layout and batch are drawn."""
    rng = draw.rng
    families = (*FAMILIES, *RARE_FAMILIES)
    geometry = (log_uniform(rng, 24, 256), log_uniform(rng, 1, 256))
    if rng.integers(2):
        geometry = (*GEOMETRIES, NARROW)[int(rng.integers(len(GEOMETRIES) + 1))]
    kv_heads = log_uniform(rng, 1, 4)
    draw.add(
        families[int(rng.integers(len(families)))],
        draw.dtype(int(rng.integers(3))),
        draw.any_batch(4096),
        geometry,
        heads=(kv_heads * GROUPS[int(rng.integers(len(GROUPS)))], kv_heads),
        chunk=bool(rng.integers(2)),
        holes=bool(rng.integers(2)),
        layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))],
    )


class _Draw(PackedDraw):
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [5])

    def small(
        self,
        family: str,
        dtype: str,
        *,
        chunk: bool = False,
        layout: str = "packed",
        longest: int = 70,
        requests: int = 3,
    ) -> None:
        batch = self.batch(requests=requests, longest=longest)
        group = GROUPS[int(self.rng.integers(len(GROUPS) - (longest < 200)))]
        kv_heads = 2 if group < 3 else 1
        # a request without queries and one without keys, amid the others; a single query that sees something
        if family == "nonfinite-v" or self.rng.integers(2):
            batch.query_lens[1:1], batch.context_lens[1:1] = [0, 2, 1], [5, 0, 40]
        self.add(family, dtype, batch, heads=(group * kv_heads, kv_heads), chunk=chunk, holes=True, layout=layout)

    def tiny(self, family: str, dtype: str, *, chunk: bool, layout: str) -> None:
        """Two requests of a tile or two, one of them with history."""
        batch = self.batch(requests=2, longest=70, most_queries=17)
        self.add(family, dtype, batch, heads=(2, 1), chunk=chunk, holes=bool(self.rng.integers(2)), layout=layout)

    def add(
        self,
        family: str,
        dtype: str,
        batch: Batch,
        geometry: tuple[int, ...] = SMALL,
        *,
        heads: tuple[int, int],
        chunk: bool = False,
        holes: bool = False,
        layout: str = "packed",
        dense: bool = False,
    ) -> None:
        rng, asked = self.rng, self.request.heads
        num_heads, num_kv_heads = heads if asked is None else (asked, asked)
        d_qk, d_v = self.request.geometry or geometry
        contexts = batch.context_lens
        spans = [_span(rng, n, m) if chunk else (0, m) for n, m in zip(batch.query_lens, contexts, strict=True)]
        sizes = {
            "softmax_scale": draw_scale(rng, d_qk),
            "layout": layout,
            "d_qk": d_qk,
            "d_v": d_v,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "query_lens": batch.query_lens,
            "key_lens": [stop - start for start, stop in spans],
            "query_starts": [m - n for n, m in zip(batch.query_lens, contexts, strict=True)],
            "key_starts": [start for start, _ in spans],
            "mask_words": max(1, -(-max(contexts) // 32)) + int(rng.integers(2)),
            "selection_seeds": [EVERY_KEY if dense else int(rng.integers(SEEDS)) for _ in contexts],
            "key_holes": [_hole(rng, span) if holes else 0 for span in spans],
        }
        self._append(family, dtype, sizes)

    def captured(self, dtype: str, *, queries: int, tokens: int) -> None:
        if self.request.geometry or self.request.heads:
            return
        latent = captured_sizes("mla_smollm2")
        sizes = {name: latent[name] for name in ("captured", "softmax_scale", "num_heads", "d_v")}
        sizes |= {"d_qk": latent["d_nope"] + latent["d_rope"], "num_kv_heads": latent["num_heads"]}
        sizes |= {"layout": "packed", "query_lens": [queries], "key_lens": [tokens], "key_starts": [0]}
        sizes |= {"query_starts": [tokens - queries], "mask_words": -(-tokens // 32)}
        self._append("captured", dtype, sizes | {"selection_seeds": [int(self.rng.integers(SEEDS))], "key_holes": [32]})

    def _append(self, family: str, dtype: str, sizes: dict[str, Any]) -> None:
        logits = sizes["num_heads"] * sum(n * m for n, m in zip(sizes["query_lens"], sizes["key_lens"], strict=True))
        self.append(family, dtype, sizes, needs_device=logits > CPU_LOGITS)


def _span(rng: np.random.Generator, queries: int, context: int) -> tuple[int, int]:
    """Keys of a chunk of a context: from anywhere in a word to the end of the history, of the context, or between."""
    fitting = [key for key in FIRST_KEYS if key < context]
    if not fitting:
        return 0, context
    start = fitting[int(rng.integers(len(fitting)))]
    ends = [context, context, max(start + 1, context - queries), start + 1 + int(rng.integers(context - start))]
    return start, min(context, ends[int(rng.integers(len(ends)))])


def _hole(rng: np.random.Generator, span: tuple[int, int]) -> int:
    """Keys of the stretches that nobody selects: the first leaves some keys of the chunk; 0 where none would."""
    start, stop = span
    fitting = [hole for hole in HOLES if hole <= start or hole < stop]
    return int(fitting[int(rng.integers(len(fitting)))]) if fitting else 0
