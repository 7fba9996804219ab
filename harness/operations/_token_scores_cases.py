"""The cases of ``token_scores`` by tier: MLA prefill steps with an observation window and candidates by rule."""

from dataclasses import asdict, dataclass
from typing import Any

from ..batches import Batch, decode_batch, draw_scale, edge_batch, log_uniform
from ..captures import Capture
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._mla_prefill_cases import CPU_PRODUCTS, MODELS, SMALL, SMALL_NOPE

MODES = ("logits", "probability")
# families whose values or NaN only matter to outputs have nothing to say here
FAMILIES = ("diffuse", "peaked", "shifted", "sunken", "leverage", "exact-uniform", "exact-one-hot")
# per request: all tokens but the first and last few, its middle half, every other request's middle token alone
RANGES = ("all", "middle", "single")
NIGHTLY_CASES = 30
# as SnapKV observes a prompt
CAPTURED_WINDOW = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Which queries look, and at what: the sizes of a case beside those of a prefill.

    Attributes:
        window: Queries of each request that are observed, fewer where it has fewer.
        behind: Queries after them.
        unobserved: Every so manieth request is not observed; 0 for all are.
        candidate_start: Tokens at the start that are no candidates.
        recent_keep_tokens: Tokens at the end that are none.
        ranges: One of ``RANGES``; all but ``all`` are given to the kernel as ranges of their own.
    """

    window: int
    behind: int = 0
    unobserved: int = 0
    candidate_start: int = 0
    recent_keep_tokens: int = 0
    ranges: str = "all"


WHOLE = Observation(window=4)
# window, sinks and recent tokens; requests without a window beside others; ranges; a window that ends before the step
OBSERVATIONS = (
    Observation(window=8, candidate_start=3, recent_keep_tokens=5),
    Observation(window=3, unobserved=2),
    Observation(window=5, ranges="middle"),
    Observation(window=2, behind=1, ranges="single"),
    Observation(window=3, behind=2, candidate_start=20, recent_keep_tokens=5),
    Observation(window=16, recent_keep_tokens=40),
    Observation(window=7, candidate_start=4, unobserved=3),
)


def captured_observations(capture: Capture) -> list[dict[str, Any]]:
    """The sizes of a case of each mode beside those of the captured prefill."""
    window = min(CAPTURED_WINDOW, capture.sizes["n"])
    # a request that is all window has all of its tokens as candidates
    recent = window if capture.sizes["T"] > window else 0
    return [{"mode": mode, **asdict(Observation(window=window, recent_keep_tokens=recent))} for mode in MODES]


def token_scores_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family and rule on small batches. Full: all dtypes, models, long prompts. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for at, mode in enumerate(MODES):
        for turn, family in enumerate(FAMILIES):
            batch = draw.batch(requests=4, longest=100, most_queries=20, chunk=17)
            seen = WHOLE if turn % 2 == 0 or family == "sunken" else OBSERVATIONS[turn % len(OBSERVATIONS)]
            draw.add(family, draw.dtype(turn + at), SMALL, batch, mode, seen, chunk=17, layout=("split", "bundled")[at])
        for turn, seen in enumerate(OBSERVATIONS):
            batch = draw.batch(requests=4, longest=90, most_queries=20, chunk=16)
            # queries behind the window must leave it some
            batch = _BEHIND if seen.behind else batch
            draw.add("diffuse", draw.dtype(turn + at), SMALL, batch, mode, seen, chunk=16)
        for turn in range(2):
            draw.add("diffuse", draw.dtype(turn + at), SMALL_NOPE, _TILES, mode, Observation(window=70), chunk=64)
        draw.add("peaked", draw.dtype(at), SMALL, _DECODING, mode, Observation(window=1), chunk=17)
        draw.add("diffuse", draw.dtype(2), ODD, _LONG, mode, Observation(window=1), chunk=100)
    # denominators that half precision cannot count, and a mean over no power of two
    for dtype, context in (("float16", 2051), ("bfloat16", 260)):
        if dtype in request.dtypes:
            batch = Batch(query_lens=[3, 1], context_lens=[context, 5])
            draw.add("exact-uniform", dtype, SMALL, batch, "probability", Observation(window=3), chunk=1024)
    # past the end of a table of 16 requests
    many = Batch(query_lens=[1] * 18, context_lens=[30, 1, *range(2, 18)])
    draw.add("diffuse", draw.dtype(2), SMALL, many, "logits", Observation(window=1), chunk=17)
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


# a window of more queries than a tile holds, a prompt shorter than it, one query after a history
_TILES = Batch(query_lens=[70, 3, 1], context_lens=[129, 3, 65])
_BEHIND = Batch(query_lens=[9, 1, 6], context_lens=[60, 44, 30])
# one more than a tile of keys that begins with the last one
_LONG = Batch(query_lens=[1, 2], context_lens=[257, 3])
# sizes and heads that divide into no tile
ODD = (96, 24, 8, 20, 17)
_DECODING = Batch(query_lens=[1, 1, 1], context_lens=[30, 41, 1])


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for mode in MODES:
            for turn, family in enumerate(FAMILIES):
                batch = draw.batch(requests=5, longest=300, most_queries=65, chunk=64)
                seen = (WHOLE, *OBSERVATIONS)[(turn + at) % (1 + len(OBSERVATIONS))]
                # values that name their token cannot be shared
                layout = "bundled" if family.startswith("exact") or turn % 2 == 0 else "shared"
                draw.add(family, dtype, SMALL, batch, mode, seen, chunk=64, layout=layout)
            edges = edge_batch(draw.rng, requests=8, most_queries=129, longest=129)
            draw.add("diffuse", dtype, SMALL, edges, mode, Observation(window=33), chunk=64)
            for model in MODELS:
                small = Batch(query_lens=[5, 1], context_lens=[69, 33])
                draw.add("peaked", dtype, model, small, mode, Observation(window=4, candidate_start=1), chunk=64)
                # nobody keeps a float32 latent cache of that length
                for seen in (Observation(window=32), OBSERVATIONS[0]) if dtype != "float32" else ():
                    batch = draw.batch(requests=4, longest=32768, most_queries=512, chunk=8192)
                    draw.add("diffuse", dtype, model, batch, mode, seen, chunk=8192)


def _nightly_case(draw: "_Draw") -> None:
    rng = draw.rng
    rank, d_nope = log_uniform(rng, 40, 512), log_uniform(rng, 24, 256)
    model = (rank, d_nope, 8 * int(rng.integers(9)), log_uniform(rng, 1, 256), log_uniform(rng, 1, 32))
    longest, chunk = log_uniform(rng, 32, 8192), log_uniform(rng, 1, 8192)
    chunk = max(chunk, longest // 64)
    if rng.integers(3):
        batch = draw.batch(requests=log_uniform(rng, 1, 24), longest=longest, most_queries=256, chunk=chunk)
    else:
        batch = decode_batch(rng, requests=log_uniform(rng, 1, 24), longest=longest)
    seen = Observation(
        window=log_uniform(rng, 1, 256),
        behind=int(rng.integers(3)),
        unobserved=int(rng.integers(4)),
        candidate_start=int(rng.integers(9)),
        recent_keep_tokens=int(rng.integers(65)),
        ranges=RANGES[int(rng.integers(len(RANGES)))],
    )
    family, mode = FAMILIES[int(rng.integers(len(FAMILIES)))], MODES[int(rng.integers(2))]
    draw.add(family, draw.dtype(int(rng.integers(3))), model, batch, mode, seen, chunk=chunk)


class _Draw(Draw):
    """Draws cases one after the other from one generator."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, [3])

    def add(
        self,
        family: str,
        dtype: str,
        model: tuple[int, ...],
        batch: Batch,
        mode: str,
        seen: Observation,
        *,
        chunk: int,
        layout: str = "split",
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
            "mode": mode,
            "window": seen.window,
            "behind": seen.behind,
            "unobserved": seen.unobserved,
            "candidate_start": seen.candidate_start,
            "recent_keep_tokens": seen.recent_keep_tokens,
            "ranges": seen.ranges,
        }
        products = sum(batch.context_lens) * heads * rank * (d_nope + d_v)
        self.append(family, dtype, sizes, needs_device=products > CPU_PRODUCTS)
