"""What an operation cannot avoid: the arithmetic and the bytes of a shape, counted by hand-checked formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
INDEX_BYTES = 4
LSE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one call.

    Attributes:
        flop: A product and its addition count two. Pairs that the causal mask hides are not counted.
        bytes: Every input that is needed read once, every output written once.
    """

    flop: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flop / self.bytes


def work_of(op: str, sizes: dict[str, Any], dtype: str) -> Work | None:
    """The work of a case, or None for an operation whose work nobody has counted."""
    model = MODELS.get(op)
    return None if model is None else model(sizes, ELEMENT_BYTES[dtype])


def visible_pairs(queries: int, keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that it sees; the causal mask is aligned to the end of the keys.

    Of ``n`` queries and ``m`` keys, query ``i`` sees ``i + m - n + 1``, at least none: with ``s`` queries that see
    any, that is ``s (m + 1) - s (s + 1) / 2`` in all.
    """
    if not causal:
        return queries * keys
    seeing = min(queries, keys)
    return seeing * (keys + 1) - seeing * (seeing + 1) // 2


def attention_work(sizes: dict[str, Any], element: int) -> Work:
    """Two products over the visible pairs; ``q``, ``k``, ``v`` in, ``out`` and ``lse`` out."""
    heads, kv_heads, d_qk, d_v = (sizes[name] for name in ("num_heads", "num_kv_heads", "d_qk", "d_v"))
    lens = list(zip(sizes["query_lens"], sizes["key_lens"], strict=True))
    pairs = sum(visible_pairs(n, m, causal=sizes["causal"]) for n, m in lens)
    queries = sum(n for n, _ in lens)
    # nobody looks at the keys of a request without queries
    keys = sum(m for n, m in lens if n)
    moved = queries * heads * ((d_qk + d_v) * element + LSE_BYTES) + keys * kv_heads * (d_qk + d_v) * element
    return Work(flop=2 * pairs * heads * (d_qk + d_v), bytes=moved + 2 * (len(lens) + 1) * INDEX_BYTES)


def mla_prefill_work(sizes: dict[str, Any], element: int) -> Work:
    """Per request the cheaper of two forms; the latent cache is read once.

    Expanded: every token of the context is projected to keys and values, ``R (Dn + Dv)`` products a head, and each pair
    of a query and a key costs ``Dn + Dr + Dv``. Absorbed: queries and outputs are projected instead, a pair costs
    ``2 R + Dr``.
    """
    heads, rank, d_nope, d_rope, d_v = (
        sizes[name] for name in ("num_heads", "kv_lora_rank", "d_nope", "d_rope", "d_v")
    )
    products = moved = 0
    for queries, context in zip(sizes["query_lens"], sizes["context_lens"], strict=True):
        pairs, projection = visible_pairs(queries, context, causal=True), rank * (d_nope + d_v)
        expanded = context * projection + pairs * (d_nope + d_rope + d_v)
        absorbed = queries * projection + pairs * (2 * rank + d_rope)
        products += heads * min(expanded, absorbed)
        moved += queries * heads * ((d_nope + d_rope + d_v) * element + LSE_BYTES)
        moved += context * ((rank + d_rope) * element + INDEX_BYTES)
    weight = heads * (d_nope + d_v) * rank * element
    return Work(flop=2 * products, bytes=moved + weight)


MODELS: dict[str, Callable[[dict[str, Any], int], Work]] = {
    "attention": attention_work,
    "mla_prefill": mla_prefill_work,
}
