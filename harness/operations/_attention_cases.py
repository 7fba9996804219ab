"""The cases of ``attention`` by tier."""

from typing import Any

from ..activations import captured_sizes
from ..batches import Batch, at_edge, crowd, decode_batch, draw_scale, edge_batch, log_uniform
from ..captures import Capture
from ..case import Case
from ..families import FAMILIES, RARE_FAMILIES
from ..operation import CaseRequest
from ._draw import PackedDraw

LAYOUTS = ("packed", "strided", "fused")
SMALL = (24, 16)
# head dimensions of models: Llama, DeepSeek-V3 expanded, GLM-5 expanded, one that divides into no tile
GEOMETRIES = ((128, 128), (192, 128), (256, 256), (72, 40))
# small models; one dtype for each family is enough
NARROW = (64, 64)
# family, longest keys, most queries and heads of the cases at these; the peaked one is rearranged, and asked often
LONG_CASES = (("diffuse", 8192, 512, 16), ("peaked", 250, 60, 8), ("ramp-v", 2049, 65, 16))
# query heads that share a key head
GROUPS = (1, 2, 3, 4, 8)
CPU_LOGITS = 1 << 22
NIGHTLY_CASES = 60


def attention_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family on small uneven batches. Full: more batches, model geometries. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for dtype in request.dtypes:
        for at, family in enumerate(FAMILIES):
            draw.small(family, dtype, causal=at % 2 == 0, layout=LAYOUTS[at % 3 == 1])
        draw.add("peaked", dtype, draw.edges(3), heads=(2, 1), causal=True)
        draw.add("ramp-v", dtype, draw.wide(129), NARROW, heads=(9, 3), causal=True)
    # what a path of its own may be wrong in: decoding from fused rows, a single request longer than a tile can hide
    decoding = decode_batch(draw.rng, requests=4, longest=65)
    draw.add("leverage", draw.dtype(1), decoding, heads=(8, 1), causal=True, layout="fused")
    single = Batch(query_lens=[5], context_lens=[1024 + at_edge(draw.rng, 129)])
    draw.add("ramp-v", draw.dtype(2), single, heads=(2, 1), causal=True)
    draw.small("overflow", draw.dtype(1), causal=True)
    draw.small("nonfinite-v", draw.dtype(0), causal=True)
    # past the end of a table of 16 requests
    draw.add("exact-one-hot", draw.dtype(2), crowd(18), heads=(2, 1), causal=True)
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def count_logits(sizes: dict[str, Any]) -> int:
    """Of all requests and heads, masked ones included."""
    pairs = zip(sizes["query_lens"], sizes["key_lens"], strict=True)
    heads: int = sizes["num_heads"]
    return heads * int(sum(n * m for n, m in pairs))


def captured_call(capture: Capture) -> dict[str, Any]:
    """The sizes of a captured call."""
    sizes = capture.sizes
    return {
        "captured": capture.name,
        "softmax_scale": float(capture.numbers["softmax_scale"]),
        "layout": "packed",
        "d_qk": sizes["Dq"],
        "d_v": sizes["Dv"],
        "num_heads": sizes["H"],
        "num_kv_heads": sizes["Hkv"],
        "causal": True,
        "query_lens": [sizes["n"]],
        "key_lens": [sizes["T"]],
    }


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for family in FAMILIES:
            for causal in (False, True):
                draw.small(family, dtype, causal=causal, layout=LAYOUTS[not causal], longest=200, requests=5)
        for rare, family in enumerate(RARE_FAMILIES):
            draw.small(family, dtype, causal=(at + rare) % 2 == 0, layout=LAYOUTS[rare], longest=200, requests=5)
        for which, geometry in enumerate((*GEOMETRIES, NARROW)):
            group = GROUPS[(at + which) % len(GROUPS)]
            for turn, (family, longest, queries, most_heads) in enumerate(LONG_CASES):
                if geometry != NARROW or dtype == draw.dtype(turn):
                    batch = draw.batch(requests=5, longest=longest, most_queries=queries)
                    heads = most_heads // group * group, most_heads // group
                    draw.add(family, dtype, batch, geometry, heads=heads, causal=True)
    _path_cases(draw)


def _path_cases(draw: "_Draw") -> None:
    """Batches for which kernels have paths of their own; the dtypes take turns."""
    rng = draw.rng
    many, few = edge_batch(rng, requests=12, most_queries=129, longest=129), draw.batch(requests=4, longest=129)
    draw.add("diffuse", draw.dtype(0), few, heads=(6, 2), causal=False, layout="fused")
    draw.add("peaked", draw.dtype(1), few, heads=(6, 2), causal=True, layout="fused")
    draw.add("diffuse", draw.dtype(2), many, heads=(4, 4), causal=True)
    draw.add("leverage", draw.dtype(0), many, NARROW, heads=(4, 2), causal=False, layout="strided")
    decoding = decode_batch(rng, requests=16, longest=2100)
    draw.add("peaked", draw.dtype(1), decoding, NARROW, heads=(16, 2), causal=True)
    draw.add("leverage", draw.dtype(2), decoding, NARROW, heads=(9, 3), causal=False, layout="fused")
    draw.add("ramp-v", draw.dtype(0), Batch(query_lens=[1], context_lens=[5000]), heads=(2, 1), causal=True)
    draw.add("diffuse", draw.dtype(1), Batch(query_lens=[200], context_lens=[1500]), NARROW, heads=(2, 1), causal=True)
    tiny = draw.batch(requests=2, longest=3000, most_queries=33)
    tiny.query_lens.extend([1] * 40)
    tiny.context_lens.extend(log_uniform(rng, 1, 9) for _ in range(40))
    draw.add("diffuse", draw.dtype(2), tiny, heads=(3, 1), causal=True)
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
        draw.any_batch(8192),
        geometry,
        heads=(kv_heads * GROUPS[int(rng.integers(len(GROUPS)))], kv_heads),
        causal=bool(rng.integers(2)),
        layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))],
    )


class _Draw(PackedDraw):
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [1])

    def small(
        self,
        family: str,
        dtype: str,
        *,
        causal: bool,
        layout: str = "packed",
        longest: int = 65,
        requests: int = 3,
    ) -> None:
        batch = self.batch(requests=requests, longest=longest)
        # groups of eight cost most where tiles are interpreted: the decoding case of the smoke tier has one
        group = GROUPS[int(self.rng.integers(len(GROUPS) - (longest < 200)))]
        kv_heads = 2 if group < 3 else 1
        # a request without queries and one without keys, amid the others; the values of the former are nobody's
        if family == "nonfinite-v" or self.rng.integers(2):
            batch.query_lens[1:1], batch.context_lens[1:1] = [0, 2], [5, 0]
        self.add(family, dtype, batch, heads=(group * kv_heads, kv_heads), causal=causal, layout=layout)

    def add(
        self,
        family: str,
        dtype: str,
        batch: Batch,
        geometry: tuple[int, ...] = SMALL,
        *,
        heads: tuple[int, int],
        causal: bool,
        layout: str = "packed",
    ) -> None:
        asked = self.request.heads
        num_heads, num_kv_heads = heads if asked is None else (asked, asked)
        d_qk, d_v = self.request.geometry or geometry
        query_lens, key_lens = batch.query_lens, batch.context_lens
        if family == "exact-uniform":
            # whole powers of two, seen whole, give the representable means that the exact gate needs
            key_lens = [2 ** log_uniform(self.rng, 1, 6) for _ in key_lens]
            query_lens = [min(pair) for pair in zip(query_lens, key_lens, strict=True)]
        sizes = {
            "softmax_scale": draw_scale(self.rng, d_qk),
            "layout": layout,
            "d_qk": d_qk,
            "d_v": d_v,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "causal": causal,
            "query_lens": query_lens,
            "key_lens": key_lens,
        }
        self.append(family, dtype, sizes, needs_device=count_logits(sizes) > CPU_LOGITS)

    def captured(self, dtype: str, *, queries: int, tokens: int) -> None:
        if self.request.geometry or self.request.heads:
            return
        latent = captured_sizes("mla_smollm2")
        sizes = {name: latent[name] for name in ("captured", "softmax_scale", "num_heads", "d_v")}
        sizes |= {"d_qk": latent["d_nope"] + latent["d_rope"], "num_kv_heads": latent["num_heads"]}
        sizes |= {"layout": "packed", "causal": True, "query_lens": [queries], "key_lens": [tokens]}
        self.append("captured", dtype, sizes, needs_device=count_logits(sizes) > CPU_LOGITS)
