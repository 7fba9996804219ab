"""Why a path does not serve a prefill, gate by gate. Part of ``optimized/routing.py``; call it from there."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._routing_tables import MaskedThresholds, MlaGeometry, RoutingTable

if TYPE_CHECKING:
    from .routing import Deployment, RoutingOptions, Step

_WORD_BITS, _WORD_BYTES = 32, 4


def padded_heads(num_heads: int, device_family: int) -> int:
    """The heads that the sparse kernels of libraries ask for: 128 from compute capability 10 on, 64 or 128 before."""
    return 128 if num_heads > 64 or device_family >= 100 else 64


def mask_words(step: "Step", context_chunk: int) -> int:
    """Words of the masks of all prefills: padded queries times a bit a key, of the queries or of a history chunk."""
    tile = 128 if step.max_query_len <= 128 else 256
    rows = math.ceil(step.max_query_len / tile) * tile
    keys = max(step.max_query_len, min(step.max_context_len, context_chunk))
    return len(step.prefills) * rows * math.ceil(keys / _WORD_BITS)


def dense_objections(
    geometry: MlaGeometry, step: "Step", deployment: "Deployment", table: RoutingTable
) -> Iterator[str]:
    """Why dense MHA cannot serve: none of these can be forced away."""
    if geometry.topk is not None and step.max_seq_len > geometry.topk:
        yield f"max_seq_len {step.max_seq_len} > topk {geometry.topk}: a selection is not everything"
    yield from _expanded_objections(geometry, deployment, table)


def masked_objections(
    geometry: MlaGeometry, step: "Step", deployment: "Deployment", table: RoutingTable
) -> Iterator[str]:
    """Why masked MHA cannot serve: none of these can be forced away."""
    if geometry.topk is None:
        yield "the model selects nothing"
    if deployment.device_family not in table.device_families:
        yield f"device family {deployment.device_family} is not among {_listed(table.device_families)}"
    if deployment.kv_format not in ("bfloat16", "float16"):
        yield f"the KV cache is quantised ({deployment.kv_format})"
    if table.flash_attention is not None and deployment.flash_attention != table.flash_attention:
        yield f"FlashAttention {table.flash_attention} is needed, got {deployment.flash_attention or 'none'}"
    if deployment.dcp > 1:
        yield f"decode context parallel must be 1, got {deployment.dcp}"
    yield from _expanded_objections(geometry, deployment, table)
    sizes = (geometry.num_heads, geometry.kv_lora_rank, *geometry.prefill)
    if sizes not in table.masked_geometries:
        yield f"(heads, rank, nope, rope, v) = {sizes} is not among {_listed(table.masked_geometries)}"
    needed = _WORD_BYTES * mask_words(step, deployment.context_chunk)
    if needed > deployment.mask_bytes:
        yield f"the masks need {needed} bytes, the workspace has {deployment.mask_bytes}"


def masked_verdict(
    geometry: MlaGeometry, step: "Step", deployment: "Deployment", table: RoutingTable
) -> tuple[bool, str]:
    """Whether the table holds masked MHA for the faster path, and by which of its entries."""
    row = table.thresholds(deployment.backend, geometry.head_dims, deployment.tp)
    heads = "/".join(map(str, geometry.head_dims))
    if row is None:
        return (
            False,
            f"table {table.name} knows nothing of {heads} heads beside {deployment.backend} at TP{deployment.tp}",
        )
    return _by_points(row, step) if row.pure_yes is not None else _by_buckets(row, step)


def native_objections(
    geometry: MlaGeometry, step: "Step", deployment: "Deployment", table: RoutingTable, options: "RoutingOptions"
) -> Iterator[str]:
    """Why native heads do not serve."""
    heads, rule = deployment.local_heads(geometry), table.native
    padded = padded_heads(heads, deployment.device_family)
    if geometry.topk is None:
        yield "the model selects nothing"
    if not options.native:
        yield "switched off"
    if deployment.device_family not in rule.device_families:
        yield f"device family {deployment.device_family} is not among {_listed(rule.device_families)}"
    if deployment.kv_format not in ("bfloat16", "float16"):
        yield f"the KV cache is quantised ({deployment.kv_format})"
    if geometry.row_width not in rule.widths:
        yield f"rows of width {geometry.row_width} are not among {_listed(rule.widths)}"
    if heads > rule.max_heads:
        yield f"{heads} heads a rank > {rule.max_heads}"
    if heads >= padded:
        yield f"{heads} heads a rank need no padding to {padded}"
    least = rule.min_queries if options.native_min_queries is None else options.native_min_queries
    if step.num_queries < least:
        yield f"{step.num_queries} queries < {least}"


def mqa_objections(geometry: MlaGeometry, deployment: "Deployment") -> Iterator[str]:
    """Why sparse MQA cannot serve."""
    if geometry.topk is None:
        yield "the model selects nothing"
    if deployment.local_heads(geometry) > 128:
        yield f"{deployment.local_heads(geometry)} heads a rank > 128"


def _expanded_objections(geometry: MlaGeometry, deployment: "Deployment", table: RoutingTable) -> Iterator[str]:
    """Why attention over expanded keys cannot serve, dense or masked."""
    if not deployment.prefill_backend:
        yield "there is no prefill backend"
    if geometry.prefill not in table.prefill_geometries:
        yield f"(nope, rope, v) = {geometry.prefill} is not among {_listed(table.prefill_geometries)}"


def _by_buckets(row: MaskedThresholds, step: "Step") -> tuple[bool, str]:
    for seq_len, least in zip(row.seq_lens, row.min_query_lens, strict=True):
        if step.max_seq_len <= seq_len:
            if least is None:
                return False, f"max_seq_len {step.max_seq_len} <= {seq_len}: never faster there"
            faster = step.max_query_len >= least
            sign = ">=" if faster else "<"
            at = f"for max_seq_len {step.max_seq_len} <= {seq_len}"
            return faster, f"max_query_len {step.max_query_len} {sign} {least} {at}"
    return False, f"max_seq_len {step.max_seq_len} > {row.seq_lens[-1]}: never faster there"


def _by_points(row: MaskedThresholds, step: "Step") -> tuple[bool, str]:
    query_len, seq_len = step.max_query_len, step.max_seq_len
    if step.max_context_len == 0:
        longest = row.pure_yes or 0
        faster = seq_len <= longest
        return faster, f"max_seq_len {seq_len} {'<=' if faster else '>'} {longest} without history"
    for covered_query, covered_seq in row.context_yes:
        if query_len >= covered_query and seq_len <= covered_seq:
            return True, (
                f"max_query_len {query_len} >= {covered_query} and max_seq_len {seq_len} <= {covered_seq} with history"
            )
    return False, f"no published point covers max_query_len {query_len} with max_seq_len {seq_len} with history"


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
