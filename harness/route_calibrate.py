"""``assay route --calibrate``: time the paths of a prefill on this GPU, and make a routing table of what was found."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..optimized._sparse_mla_plan import refusal
from ..optimized.prefill_paths import masked_call, random_prefill, sparse_call
from ..optimized.routing import MlaGeometry, RoutingTable, table_from
from ..optimized.sparse_mla import SparseMlaShape

# contexts at whose end a bucket of the table ends, and the queries that are tried in each
SEQ_LENS = (4096, 8192, 16384, 32768)
QUERY_LENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# queries of a step that are tried for native heads
NATIVE_QUERIES = (64, 256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 7

# milliseconds of a path for so many queries at the end of a context of that length, or why it does not serve
Timing = float | str
Clocked = Callable[[str, int, int], Timing]


def calibrated(
    geometry: MlaGeometry, *, tp: int, device_family: int, backend: str, name: str, source: str, clocked: Clocked
) -> RoutingTable:
    """Ask for the time of each path at each length, and write down from where on which is faster.

    A threshold is the least of the queries tried from which on a path was faster at all of them; a path that was faster
    here and slower there above has none below that.

    Args:
        geometry: Of the model.
        tp: Tensor-parallel ranks.
        device_family: Of this GPU.
        backend: Name of the sparse MQA that the others are compared with.
        name: Of the table.
        source: Where and with what it was measured.
        clocked: Times ``masked_mha``, ``native_heads`` or ``sparse_mqa``.
    """
    masked = _masked_thresholds(clocked)
    native = _native_threshold(clocked)
    sizes = [geometry.num_heads, geometry.kv_lora_rank, *geometry.prefill]
    row = {
        "backend": backend,
        "head_dims": list(geometry.head_dims),
        "tp": tp,
        "seq_lens": list(SEQ_LENS),
        "min_query_lens": masked,
    }
    return table_from(
        {
            "name": name,
            "source": source,
            "device_families": [device_family],
            "flash_attention": None,
            "prefill_geometries": [list(geometry.prefill)],
            "masked_geometries": [] if masked is None else [sizes],
            "masked": [] if masked is None else [row],
            "native": {
                "device_families": [] if native is None else [device_family],
                "widths": [geometry.row_width],
                "max_heads": geometry.num_heads // tp,
                "min_queries": native or 0,
            },
        }
    )


def _masked_thresholds(clocked: Clocked) -> list[int | None] | None:
    """Of each bucket; None if masked MHA does not serve at all."""
    thresholds: list[int | None] = []
    for seq_len in SEQ_LENS:
        faster: dict[int, bool] = {}
        for query_len in (length for length in QUERY_LENS if length <= seq_len):
            masked = clocked("masked_mha", query_len, seq_len)
            if isinstance(masked, str):
                return None
            faster[query_len] = masked < _number(clocked("sparse_mqa", query_len, seq_len))
        thresholds.append(_least(faster))
    return thresholds


def _native_threshold(clocked: Clocked) -> int | None:
    """Least queries for native heads at the longest context; None if they do not serve or are never faster."""
    faster: dict[int, bool] = {}
    for queries in NATIVE_QUERIES:
        native = clocked("native_heads", queries, SEQ_LENS[-1])
        if isinstance(native, str):
            return None
        faster[queries] = native < _number(clocked("sparse_mqa", queries, SEQ_LENS[-1]))
    return _least(faster)


def _least(faster: Mapping[int, bool]) -> int | None:
    """The least length from which on every one was faster."""
    slower = [length for length, yes in faster.items() if not yes]
    above = [length for length in faster if not slower or length > max(slower)]
    return min(above, default=None)


def _number(timing: Timing) -> float:
    if isinstance(timing, str):
        raise NotImplementedError(f"sparse_mqa must serve to be compared with, got: {timing}")
    return timing


class DeviceClock:
    """Times the paths on a CUDA device, from latent rows to the outputs of the heads, each length once.

    A captured call from a cold cache, the median of some. The selection is uniform, as nothing better is known of it.
    """

    def __init__(self, geometry: MlaGeometry, *, tp: int, device: torch.device) -> None:
        """Find the sparse MQA with padded heads that there is.

        Raises:
            ValueError: If the model selects nothing.
        """
        from .bench.cuda import CudaClock

        if geometry.topk is None:
            raise ValueError(f"geometry must be one that selects rows, got {geometry.name}")
        self._geometry, self._heads, self._device = geometry, geometry.num_heads // tp, device
        self._clock = CudaClock(device)
        self._known: dict[tuple[str, int, int], Timing] = {}
        shape = SparseMlaShape(
            device=device,
            dtype=torch.bfloat16,
            s_q=1,
            s_kv=1,
            h_q=self._heads,
            d_qk=geometry.row_width,
            d_v=geometry.kv_lora_rank,
            topk=geometry.topk,
        )
        self._padded = "flashmla" if refusal("flashmla", shape) is None else "padded"
        self.backend = {"flashmla": "FLASHMLA_SPARSE", "padded": "PADDED"}[self._padded]

    def __call__(self, path: str, query_len: int, seq_len: int) -> Timing:
        """Milliseconds of a path, or why it does not serve."""
        key = path, query_len, seq_len
        if key not in self._known:
            self._known[key] = self._timed(*key)
        return self._known[key]

    def _timed(self, path: str, query_len: int, seq_len: int) -> Timing:
        given = random_prefill(
            self._geometry, num_heads=self._heads, query_len=query_len, seq_len=seq_len, device=self._device
        )
        try:
            if path == "masked_mha":
                return self._milliseconds(masked_call(given))
            implementation = "auto" if path == "native_heads" else self._padded
            return self._milliseconds(sparse_call(given, implementation=implementation))
        except NotImplementedError as error:
            return str(error)

    def _milliseconds(self, run: Callable[[], Any]) -> float:
        replay, _ = self._clock.capture(run)
        samples = []
        for _ in range(ROUNDS):
            self._clock.flush()
            start = self._clock.record()
            replay()
            end = self._clock.record()
            samples.append(self._clock.elapsed(start, end))
        return statistics.median(samples)
