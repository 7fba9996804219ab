"""Token scores as Triton kernels: a maximum over expanded keys, or one or two scans of the latent rows.

Part of ``optimized/token_scores.py``; call it from there. No length is an argument of a kernel: they lie in a table on
the device, one row a span, so that new lengths compile nothing.
"""

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from ._attention_triton import _shared_memory, block_widths
from ._mla_prefill_plan import MlaPrefillPlan
from ._token_scores_spans import Span
from ._token_scores_triton_kernel import denominator_kernel, join_kernel, logits_kernel, probability_kernel

if TYPE_CHECKING:
    from ._token_scores_collect import LatentScan

_LOG2_E = math.log2(math.e)

# columns of the table of spans: those that the kernels read, and padding up to a multiple of 16 bytes
_FIELDS = 16

# the candidates of a request are cut into stretches until its rows keep so many programs busy
_DENOMINATOR_PROGRAMS = 640
# one after the other: enough that several stretches are joined
_INTERPRETED_PROGRAMS = 6
_MAX_STRETCHES = 64

_JOIN_ROWS = 128

# decided when the kernels were decorated, from TRITON_INTERPRET
INTERPRETED = not isinstance(logits_kernel, triton.runtime.JITFunction)


class Tile(NamedTuple):
    """Launch configuration: ``outer`` rows stay with a program, ``inner`` ones pass by at every step."""

    outer: int
    inner: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A tile for each kernel.

    Attributes:
        logits: Keys of a head, then queries.
        denominator: Rows, an observed query and a head each, then keys.
        probability: Keys, then queries of a head.
    """

    logits: Tile
    denominator: Tile
    probability: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTable:
    """The spans of one pass on the device, and what the host needs for its launches.

    Attributes:
        table: ``[spans, 16]``, int64: the fields of a span in their order, then the stretches of its candidates, and
            where their parts of the denominators begin.
        max_keys: Of any span.
        max_rows: Observed queries times heads, of any span.
        max_stretches: Of any span.
        num_parts: Of the denominators, of all spans.
        tiles: For the sizes of the layer.
    """

    table: Tensor
    max_keys: int
    max_rows: int
    max_stretches: int
    num_parts: int
    tiles: Tiles


def refusal(plan: MlaPrefillPlan) -> str | None:
    """Why the kernels cannot serve a step, or None."""
    if plan.dtype == torch.float64:
        return "float64 is not served: the kernels sum in float32"
    if INTERPRETED and plan.dtype == torch.bfloat16:
        return "bfloat16 is not served under TRITON_INTERPRET: the interpreter multiplies its bit patterns"
    if not INTERPRETED and plan.device.type != "cuda":
        return f"a CUDA device is needed (or TRITON_INTERPRET=1 before the import), got {plan.device}"
    if not INTERPRETED and torch.cuda.get_device_capability(plan.device) < (8, 0):
        return f"compute capability 8.0 is needed, got {torch.cuda.get_device_capability(plan.device)}"
    if len(plan.context_lens) > 65535:
        return f"at most 65535 requests fit in a grid, got {len(plan.context_lens)}"
    if choose_tiles(plan) is None:
        return f"no tile of {plan.shape} fits in shared memory"
    return None


def choose_tiles(plan: MlaPrefillPlan) -> Tiles | None:
    """For each kernel the first configuration, best first, that fits in shared memory; None if one has none."""
    shape = plan.shape
    if INTERPRETED:
        return Tiles(logits=Tile(32, 16, 1, 4), denominator=Tile(32, 32, 1, 4), probability=Tile(32, 16, 1, 4))
    keys = sum(block_widths(shape.d_nope + shape.d_rope, 1)[:2])
    rows = _block(shape.kv_lora_rank) + (_block(shape.d_rope) if shape.d_rope else 0)
    if plan.dtype.itemsize == 4:
        latent = (Tile(32, 32, 1, 8), Tile(16, 16, 1, 4))
        chosen = _fitting(keys, (Tile(32, 32, 1, 4), Tile(16, 16, 1, 4)), plan), *[_fitting(rows, latent, plan)] * 2
    else:
        smallest = (Tile(64, 32, 1, 4), Tile(32, 16, 1, 4))
        chosen = (
            _fitting(keys, (Tile(64, 32, 2, 4), *smallest), plan),
            _fitting(rows, (Tile(64, 64, 2, 4), Tile(64, 32, 2, 4), *smallest), plan),
            _fitting(rows, (Tile(128, 32, 2, 8), Tile(64, 32, 2, 4), *smallest), plan),
        )
    logits, denominator, probability = chosen
    if logits is None or denominator is None or probability is None:
        return None
    return Tiles(logits=logits, denominator=denominator, probability=probability)


def prepare(spans: tuple[Span, ...], plan: MlaPrefillPlan) -> SpanTable:
    """Lay out the table of one pass."""
    tiles = choose_tiles(plan)
    if tiles is None:
        raise NotImplementedError(f"no tile of these kernels serves {plan.shape}")
    counts = [span.num_queries * plan.shape.num_heads for span in spans]
    stretches = [_num_stretches(triton.cdiv(count, tiles.denominator.outer)) for count in counts]
    rows: list[list[int]] = []
    num_parts = 0
    for span, count, pieces in zip(spans, counts, stretches, strict=True):
        fields = [*astuple(span), pieces, num_parts]
        rows.append(fields + [0] * (_FIELDS - len(fields)))
        num_parts += count * pieces
    return SpanTable(
        table=torch.tensor(rows, dtype=torch.int64).to(plan.device),
        max_keys=max(span.num_keys for span in spans),
        max_rows=max(counts),
        max_stretches=max(stretches),
        num_parts=num_parts,
        tiles=tiles,
    )


def scratch_bytes(prepared: SpanTable) -> int:
    """The parts of the denominators, float32; they do not grow with the keys."""
    return 4 * prepared.num_parts


def raise_to_logits(scores: Tensor, q: Tensor, k: Tensor, spans: tuple[Span, ...], prepared: SpanTable) -> None:
    """Raise the scores in one launch; arguments as in ``_token_scores_torch``."""
    tile, heads = prepared.tiles.logits, q.shape[1]
    main, rest, _ = block_widths(q.shape[2], 1)
    with torch.cuda.device_of(q):
        logits_kernel[(triton.cdiv(prepared.max_keys, tile.outer) * heads, len(spans))](
            q,
            k,
            scores,
            prepared.table,
            heads,
            *q.stride(),
            *k.stride(),
            *scores.stride(),
            FIELDS=_FIELDS,
            WIDTH=q.shape[2],
            BLOCK_KEYS=tile.outer,
            BLOCK_QUERIES=tile.inner,
            BLOCK_MAIN=main,
            BLOCK_REST=rest,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )


def denominators(scan: "LatentScan", spans: tuple[Span, ...], prepared: SpanTable) -> Tensor:
    """Scan the stretches of each request, then join them; arguments and result as in ``_token_scores_torch``."""
    tile, (queries, heads, _) = prepared.tiles.denominator, scan.absorbed.shape
    lse = torch.empty(queries, heads, dtype=torch.float32, device=scan.absorbed.device)
    parts = torch.empty(prepared.num_parts, dtype=torch.float32, device=lse.device)
    row_tiles = triton.cdiv(prepared.max_rows, tile.outer)
    with torch.cuda.device_of(lse):
        denominator_kernel[(row_tiles, prepared.max_stretches, len(spans))](
            *_latent_arguments(scan),
            parts,
            prepared.table,
            scan.softmax_scale * _LOG2_E,
            heads,
            *_latent_strides(scan),
            BLOCK_ROWS=tile.outer,
            BLOCK_KEYS=tile.inner,
            **_latent_sizes(scan),
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )
        join_kernel[(triton.cdiv(prepared.max_rows, _JOIN_ROWS), len(spans))](
            parts, lse, prepared.table, heads, FIELDS=_FIELDS, BLOCK_ROWS=_JOIN_ROWS, num_warps=4
        )
    return lse


def write_probabilities(
    scores: Tensor, scan: "LatentScan", lse: Tensor, spans: tuple[Span, ...], prepared: SpanTable
) -> None:
    """Write the scores in one launch; arguments as in ``_token_scores_torch``, ``lse`` contiguous."""
    tile, heads = prepared.tiles.probability, scan.absorbed.shape[1]
    with torch.cuda.device_of(scores):
        probability_kernel[(triton.cdiv(prepared.max_keys, tile.outer), len(spans))](
            *_latent_arguments(scan),
            lse,
            scores,
            prepared.table,
            scan.softmax_scale * _LOG2_E,
            heads,
            *_latent_strides(scan),
            *scores.stride(),
            BLOCK_KEYS=tile.outer,
            BLOCK_QUERIES=tile.inner,
            **_latent_sizes(scan),
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )


def _latent_arguments(scan: "LatentScan") -> tuple[Tensor, ...]:
    """Tensors of a scan; where there is no rope part, the kernels never look at what stands in for it."""
    if scan.rope.shape[2] == 0:
        return scan.absorbed, scan.absorbed, scan.kv_c, scan.kv_c, scan.slots
    return scan.absorbed, scan.rope, scan.kv_c, scan.k_pe, scan.slots


def _latent_strides(scan: "LatentScan") -> tuple[int, ...]:
    """Their strides, in the order of the kernels."""
    absorbed, rope, kv_c, k_pe, _ = _latent_arguments(scan)
    return *absorbed.stride(), *rope.stride(), *kv_c.stride(), *k_pe.stride()


def _latent_sizes(scan: "LatentScan") -> dict[str, Any]:
    """Their widths, which the kernels know when they are compiled."""
    rank, rope = scan.kv_c.shape[1], scan.rope.shape[2]
    blocks = {"BLOCK_RANK": _block(rank), "BLOCK_ROPE": _block(rope) if rope else 0}
    return {"FIELDS": _FIELDS, "RANK": rank, "ROPE": rope} | blocks


def _num_stretches(row_tiles: int) -> int:
    """Stretches of the candidates of a request whose rows fill so many tiles; no matter how many keys there are."""
    programs = _INTERPRETED_PROGRAMS if INTERPRETED else _DENOMINATOR_PROGRAMS
    return max(1, min(_MAX_STRETCHES, programs // row_tiles))


def _fitting(width: int, tiles: tuple[Tile, ...], plan: MlaPrefillPlan) -> Tile | None:
    """The first tile whose outer rows and pipelined inner ones, ``width`` wide, fit in shared memory."""
    available = _shared_memory(plan.device)
    for tile in tiles:
        if (tile.outer + tile.num_stages * tile.inner) * width * plan.dtype.itemsize + 2048 <= available:
            return tile
    return None


def _block(width: int) -> int:
    """The power of two that covers a width, at least 16."""
    return max(16, 1 << (width - 1).bit_length())
