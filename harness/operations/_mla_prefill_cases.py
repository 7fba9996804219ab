"""The cases of ``mla_prefill`` by tier."""

from typing import Any

import numpy as np

from ..activations import captured_sizes
from ..batches import Batch, uneven_batch
from ..case import Case
from ..families import FAMILIES
from ..operation import CaseRequest

# (R, Dn, Dr, Dv, heads): small ones for every machine, then models as one GPU sees them
SMALL = (64, 32, 16, 24, 3)
SMALL_NOPE = (64, 32, 0, 32, 2)
MODELS = (
    (512, 128, 64, 128, 16),  # DeepSeek-V3.2, 8 GPUs
    (512, 128, 64, 128, 128),  # DeepSeek-V3.2, one GPU
    (512, 192, 64, 256, 20),  # GLM-4.7-Flash
    (512, 256, 0, 256, 16),  # GLM-5.3-Flash, 4 GPUs: no rope part
)
CHUNK_SIZES = (1, 17, 64, 4096, 16384)
# family, longest context and history chunk of the cases at model sizes
LONG_CASES = (
    ("diffuse", 8192, 4096),
    ("constant-v", 4096, 1024),
    ("ramp-v", 4096, 64),
    ("exact-one-hot", 3000, 17 * 16),
    ("peaked", 65536, 16384),
    ("diffuse", 65536, 16384),
)
# the float64 oracle and the twins together stay within seconds below this on two cores
CPU_PRODUCTS = 1 << 31


def mla_prefill_cases(request: CaseRequest) -> list[Case]:
    """Smoke: every family and every chunk size on small batches, and real activations. Full: models, long contexts."""
    draw = _Draw(request)
    for dtype in request.dtypes:
        for at, family in enumerate(FAMILIES):
            draw.add(
                family, dtype, SMALL, draw.batch(requests=5, longest=129, most_queries=33, chunk=17), chunk=17, at=at
            )
        draw.add("ramp-v", dtype, SMALL, Batch(query_lens=[3, 1], context_lens=[343, 2]), chunk=17)
        draw.add("exact-uniform", dtype, SMALL, Batch(query_lens=[8, 1, 64], context_lens=[64, 65, 128]), chunk=64)
        # passes over more keys than a low-precision sum can count, and longer than one tile can hide
        draw.add("exact-uniform", dtype, SMALL, Batch(query_lens=[1], context_lens=[304]), chunk=4096)
        draw.add("ramp-v", dtype, SMALL, Batch(query_lens=[8], context_lens=[700]), chunk=4096)
        # more requests and queries than a tile counts, equal lengths, a history of exactly two and of many chunks
        queries, contexts = [2, 1, 130, 2, 2, 1, 3, 1, 1, 4], [34, 1, 130, 34, 40, 600, 3, 17, 17, 20]
        draw.add("diffuse", dtype, SMALL, Batch(query_lens=queries, context_lens=contexts), chunk=16)
        for chunk in CHUNK_SIZES:
            longest = 20 if chunk == 1 else 65 if chunk == 17 else 193
            batch = draw.batch(requests=3, longest=longest, most_queries=17, chunk=chunk)
            draw.add("diffuse", dtype, SMALL_NOPE if chunk == 64 else SMALL, batch, chunk=chunk)
        draw.captured(dtype, queries=70, tokens=384, chunk=64)
    if request.tier != "smoke":
        _full_cases(draw)
    return draw.cases


def _full_cases(draw: "_Draw") -> None:
    for dtype in draw.request.dtypes:
        for family in FAMILIES:
            for chunk, longest in ((17, 300), (64, 700), (4096, 700)):
                batch = draw.batch(requests=8, longest=longest, most_queries=129, chunk=chunk)
                draw.add(family, dtype, SMALL, batch, chunk=chunk, at=chunk)
        draw.captured(dtype, queries=384, tokens=384, chunk=64)
        draw.captured(dtype, queries=17, tokens=384, chunk=17)
        for model in MODELS:
            # the peaked small batch runs on a CPU as well; the long ones are for a device
            draw.add(
                "peaked", dtype, model, Batch(query_lens=[5, 1], context_lens=[70, 33]), chunk=64, device_cap=False
            )
            # nobody keeps a float32 latent cache of that length
            for family, longest, chunk in LONG_CASES if dtype != "float32" else ():
                batch = draw.batch(requests=6, longest=longest, most_queries=min(1024, longest), chunk=chunk)
                draw.add(family, dtype, model, batch, chunk=chunk)


class _Draw:
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest) -> None:
        self.request = request
        self.cases: list[Case] = []
        self._rng = np.random.default_rng([request.seed, 2])

    def batch(self, *, requests: int, longest: int, most_queries: int, chunk: int) -> Batch:
        return uneven_batch(self._rng, requests=requests, longest=longest, most_queries=most_queries, chunk=chunk)

    def add(
        self,
        family: str,
        dtype: str,
        model: tuple[int, ...],
        batch: Batch,
        *,
        chunk: int,
        at: int = 0,
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
            # never the default factor, so that a kernel that ignores the argument is found
            "softmax_scale": 0.83 * (d_nope + d_rope) ** -0.5,
            "query_lens": batch.query_lens,
            "context_lens": batch.context_lens,
            "history_chunk_size": chunk,
            "layout": "bundled" if at % 2 else "split",
        }
        expansion = sum(batch.context_lens) * heads * rank * (d_nope + d_v)
        pairs = sum(n * c for n, c in zip(batch.query_lens, batch.context_lens, strict=True))
        products = expansion + pairs * heads * (d_nope + d_rope + d_v)
        self._append(family, dtype, sizes, needs_device=device_cap and products > CPU_PRODUCTS)

    def captured(self, dtype: str, *, queries: int, tokens: int, chunk: int) -> None:
        if self.request.geometry or self.request.heads:
            return
        sizes = captured_sizes("mla_smollm2") | {"query_lens": [queries], "context_lens": [tokens]}
        self._append("captured", dtype, sizes | {"history_chunk_size": chunk, "layout": "bundled"}, needs_device=False)

    def _append(self, family: str, dtype: str, sizes: dict[str, Any], *, needs_device: bool) -> None:
        seed = int(self._rng.integers(2**31))
        case = Case(op="mla_prefill", family=family, dtype=dtype, seed=seed, sizes=sizes, needs_device=needs_device)
        self.cases.append(case)
