"""The cases of ``mla_prefill`` by tier."""

from typing import Any

from ..activations import captured_sizes
from ..batches import Batch, decode_batch, draw_scale, edge_batch, log_uniform
from ..captures import Capture
from ..case import Case
from ..families import FAMILIES, RARE_FAMILIES
from ..operation import CaseRequest
from ._draw import Draw

LAYOUTS = ("split", "bundled", "shared", "vast")
# (R, Dn, Dr, Dv, heads): small ones for every machine, then models as one GPU sees them
SMALL = (64, 32, 16, 24, 3)
SMALL_NOPE = (64, 32, 0, 32, 2)
MODELS = (
    (512, 128, 64, 128, 16),  # DeepSeek-V3.2, 8 GPUs
    (512, 128, 64, 128, 128),  # DeepSeek-V3.2, one GPU
    (512, 192, 64, 256, 20),  # GLM-4.7-Flash
    (512, 256, 0, 256, 16),  # GLM-5.3-Flash, 4 GPUs: no rope part
)
CHUNK_SIZES = (17, 64, 4096)
# family, longest context and history chunk of the cases at model sizes
LONG_CASES = (
    ("diffuse", 8192, 4096),
    ("constant-v", 4096, 1024),
    ("ramp-v", 4096, 64),
    ("exact-one-hot", 3000, 17 * 16),
    ("peaked", 65536, 16384),
    ("diffuse", 65536, 16384),
)
# cuDNN plans each of its many shapes anew: one dtype at full length is enough
SHORTENED = {("peaked", "float16"): 9000}
# the float64 oracle and the twins together stay within seconds below this on two cores
CPU_PRODUCTS = 1 << 31
NIGHTLY_CASES = 60


def mla_prefill_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family and chunk size on small batches, real activations. Full: models. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for dtype in request.dtypes:
        for at, family in enumerate(FAMILIES):
            batch = draw.batch(requests=4, longest=129, most_queries=33, chunk=17)
            draw.add(family, dtype, SMALL, batch, chunk=17, layout=LAYOUTS[at % 2])
        draw.add("ramp-v", dtype, SMALL, Batch(query_lens=[3, 1], context_lens=[343, 2]), chunk=17)
        draw.add("exact-uniform", dtype, SMALL, Batch(query_lens=[8, 1, 64], context_lens=[64, 65, 128]), chunk=64)
        # passes over more keys than a low-precision sum can count, and longer than one tile or table can hide
        draw.add("exact-uniform", dtype, SMALL, Batch(query_lens=[1], context_lens=[304]), chunk=4096)
        draw.add("ramp-v", dtype, SMALL, Batch(query_lens=[8], context_lens=[1100]), chunk=4096)
        # more requests and queries than a tile counts, equal lengths, a history of exactly two and of many chunks
        queries, contexts = [2, 1, 130, 2, 2, 1, 3, 1, 1, 4], [34, 1, 130, 34, 40, 600, 3, 17, 17, 20]
        if dtype == draw.dtype(2):
            # past the end of a table of 16
            queries, contexts = [*queries, 1, 2, 1, 1, 1, 1, 2], [*contexts, 3, 5, 1, 2, 9, 1, 2]
        draw.add("diffuse", dtype, SMALL, Batch(query_lens=queries, context_lens=contexts), chunk=16)
        for chunk in CHUNK_SIZES:
            batch = draw.batch(requests=3, longest=65 if chunk == 17 else 193, most_queries=17, chunk=chunk)
            draw.add("diffuse", dtype, SMALL_NOPE if chunk == 64 else SMALL, batch, chunk=chunk)
        draw.captured(dtype, queries=70, tokens=384, chunk=64)
    # more chunks than a table of 32 can name
    for dtype in dict.fromkeys((draw.dtype(1), draw.dtype(2))):
        draw.add("diffuse", dtype, SMALL, Batch(query_lens=[1, 2], context_lens=[35, 4]), chunk=1)
    # what a path of its own may be wrong in: decoding, prefixes that two requests share
    decoding = Batch(query_lens=[1, 1, 1], context_lens=[30, 41, 1])
    draw.add("leverage", draw.dtype(1), SMALL, decoding, chunk=17, layout="shared")
    for turn, family in ((1, "overflow"), (0, "nonfinite-v")):
        batch = draw.batch(requests=2, longest=40, most_queries=9, chunk=17)
        draw.add(family, draw.dtype(turn), SMALL, batch, chunk=17)
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def expanded_products(sizes: dict[str, Any]) -> int:
    """Multiplications of a case whose history is expanded."""
    heads, d_v = sizes["num_heads"], sizes["d_v"]
    expansion = sum(sizes["context_lens"]) * heads * sizes["kv_lora_rank"] * (sizes["d_nope"] + d_v)
    pairs = sum(n * c for n, c in zip(sizes["query_lens"], sizes["context_lens"], strict=True))
    return int(expansion + pairs * heads * (sizes["d_nope"] + sizes["d_rope"] + d_v))


def captured_call(capture: Capture) -> dict[str, Any]:
    """The sizes of a captured call."""
    sizes, numbers = capture.sizes, capture.numbers
    d_nope = sizes["Dq"] - sizes["Dr"]
    return {
        "captured": capture.name,
        "num_heads": sizes["H"],
        "kv_lora_rank": sizes["R"],
        "d_nope": d_nope,
        "d_rope": sizes["Dr"],
        "d_v": sizes["Db"] - d_nope,
        "softmax_scale": float(numbers["softmax_scale"]),
        "query_lens": [sizes["n"]],
        "context_lens": [sizes["T"]],
        "history_chunk_size": int(numbers["history_chunk_size"]),
        "layout": "split",
    }


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for which, family in enumerate((*FAMILIES, *RARE_FAMILIES)):
            for turn, (chunk, longest) in enumerate(((17, 150), (64, 300), (4096, 700))):
                # one dtype is enough for the longer chunks, and one chunk for what a few sizes show
                if dtype == draw.dtype(which + turn) or (chunk == 17 and family in FAMILIES):
                    batch = draw.batch(requests=5, longest=longest, most_queries=129, chunk=chunk)
                    draw.add(family, dtype, SMALL, batch, chunk=chunk, layout=LAYOUTS[chunk % 2])
        draw.captured(dtype, queries=384, tokens=384, chunk=64)
        draw.captured(dtype, queries=17, tokens=384, chunk=17)
        for which, model in enumerate(MODELS):
            # the small batch runs on a CPU as well; the long ones are for a device
            family = "peaked" if dtype == "float32" or (which + at) % 2 else "leverage"
            small = Batch(query_lens=[5, 1], context_lens=[69, 33])
            draw.add(family, dtype, model, small, chunk=64, device_cap=False)
            # nobody keeps a float32 latent cache of that length
            for family, longest, chunk in LONG_CASES if dtype != "float32" else ():
                longest = SHORTENED.get((family, dtype), longest)
                batch = draw.batch(requests=6, longest=longest, most_queries=min(1024, longest), chunk=chunk)
                draw.add(family, dtype, model, batch, chunk=chunk)
    _path_cases(draw)


def _path_cases(draw: "_Draw") -> None:
    """Batches for which kernels have paths of their own; the dtypes take turns."""
    edges = edge_batch(draw.rng, requests=10, most_queries=129, longest=129)
    draw.add("diffuse", draw.dtype(0), SMALL, edges, chunk=64, layout="shared")
    prefixes = draw.batch(requests=6, longest=300, most_queries=33, chunk=17)
    draw.add("peaked", draw.dtype(2), SMALL, prefixes, chunk=17, layout="shared")
    decoding = decode_batch(draw.rng, requests=12, longest=1500)
    draw.add("peaked", draw.dtype(1), SMALL_NOPE, decoding, chunk=256)
    draw.add("leverage", draw.dtype(2), SMALL, decoding, chunk=64, layout="bundled")
    draw.add("ramp-v", draw.dtype(1), SMALL, Batch(query_lens=[7], context_lens=[1100]), chunk=16)
    draw.add("diffuse", draw.dtype(1), SMALL, Batch(query_lens=[3, 1], context_lens=[300, 5]), chunk=16384)
    tiny = draw.batch(requests=2, longest=3000, most_queries=33, chunk=512)
    tiny.query_lens.extend([1] * 30)
    tiny.context_lens.extend(log_uniform(draw.rng, 1, 9) for _ in range(30))
    draw.add("diffuse", draw.dtype(0), SMALL_NOPE, tiny, chunk=512)
    vast = draw.batch(requests=3, longest=200, most_queries=17, chunk=64)
    draw.add("diffuse", draw.dtype(2), MODELS[0], vast, chunk=64, layout="vast")


def _nightly_case(draw: "_Draw") -> None:
    """One case of which nothing is chosen: family, sizes, scale, layout, chunk and batch are drawn."""
    rng = draw.rng
    families = (*FAMILIES, *RARE_FAMILIES)
    family = families[int(rng.integers(len(families)))]
    # a token's code takes so much of the latent
    rank, d_nope = log_uniform(rng, 40, 512), log_uniform(rng, 24, 256)
    model = (rank, d_nope, 8 * int(rng.integers(9)), log_uniform(rng, 1, 256), log_uniform(rng, 1, 32))
    requests, longest, chunk = log_uniform(rng, 1, 24), log_uniform(rng, 32, 8192), log_uniform(rng, 1, 8192)
    # no kernel is asked for thousands of passes
    chunk = max(chunk, longest // 64)
    if rng.integers(3):
        most = log_uniform(rng, 8, 512)
        batch = draw.batch(requests=requests, longest=longest, most_queries=most, chunk=chunk)
    else:
        batch = decode_batch(rng, requests=requests, longest=longest)
    alone = family in ("visible-nan", "exact-uniform", "exact-one-hot")
    layout = LAYOUTS[int(rng.integers(2 if alone else 3))]
    draw.add(family, draw.dtype(int(rng.integers(3))), model, batch, chunk=chunk, layout=layout)


class _Draw(Draw):
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [2])

    def add(
        self,
        family: str,
        dtype: str,
        model: tuple[int, ...],
        batch: Batch,
        *,
        chunk: int,
        layout: str = "split",
        device_cap: bool = True,
    ) -> None:
        rank, d_nope, d_rope, d_v, heads = model
        if self.request.geometry:
            rank, d_nope, d_rope, d_v = self.request.geometry
        heads = self.request.heads or heads
        sizes: dict[str, Any] = {
            "num_heads": heads,
            "kv_lora_rank": rank,
            "d_nope": d_nope,
            "d_rope": d_rope,
            "d_v": d_v,
            "softmax_scale": draw_scale(self.rng, d_nope + d_rope),
            "query_lens": batch.query_lens,
            "context_lens": batch.context_lens,
            "history_chunk_size": chunk,
            "layout": layout,
        }
        large = device_cap and expanded_products(sizes) > CPU_PRODUCTS
        self.append(family, dtype, sizes, needs_device=layout == "vast" or large)

    def captured(self, dtype: str, *, queries: int, tokens: int, chunk: int) -> None:
        if self.request.geometry or self.request.heads:
            return
        sizes = captured_sizes("mla_smollm2") | {"query_lens": [queries], "context_lens": [tokens]}
        self.append("captured", dtype, sizes | {"history_chunk_size": chunk, "layout": "bundled"}, needs_device=False)
