"""The data of routing: geometries of models, and tables that say from which lengths on a path is the faster one.

Part of ``optimized/routing.py``; call it from there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
PACKAGED_TABLES = ("vllm",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaGeometry:
    """The attention of a model.

    Attributes:
        name: Of the model.
        num_heads: Query heads, of all ranks.
        kv_lora_rank: ``R``, width of the latent row.
        d_nope: Width of a query's part without RoPE.
        d_rope: Width of the rotated part; 0 for none.
        d_v: Width of a value.
        topk: Rows that a query selects; None for a model without selection.
    """

    name: str
    num_heads: int
    kv_lora_rank: int
    d_nope: int
    d_rope: int
    d_v: int
    topk: int | None

    def __post_init__(self) -> None:
        """Refuse sizes that no model has."""
        for size in ("num_heads", "kv_lora_rank", "d_nope", "d_v"):
            if getattr(self, size) < 1:
                raise ValueError(f"{size} must be positive, got {getattr(self, size)}")
        if self.d_rope < 0:
            raise ValueError(f"d_rope must not be negative, got {self.d_rope}")
        if self.topk is not None and self.topk < 1:
            raise ValueError(f"topk must be positive or None, got {self.topk}")

    @property
    def prefill(self) -> tuple[int, int, int]:
        """``(Dn, Dr, Dv)``, which decides whether expanded attention has a kernel."""
        return self.d_nope, self.d_rope, self.d_v

    @property
    def head_dims(self) -> tuple[int, int]:
        """``(Dq, Dv)`` of expanded attention."""
        return self.d_nope + self.d_rope, self.d_v

    @property
    def unified(self) -> bool:
        """Whether a head is as wide as the latent row, which holds the rotated part and is the value as a whole."""
        return self.d_nope + self.d_rope == self.kv_lora_rank == self.d_v

    @property
    def row_width(self) -> int:
        """``d_qk`` of sparse attention."""
        return self.kv_lora_rank if self.unified else self.kv_lora_rank + self.d_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedThresholds:
    """Where masked MHA is the faster path for head sizes, a backend beside it, and a number of ranks.

    Either thresholds, for contexts that end at ``seq_lens``, or points that were published one by one: without history
    everything up to ``pure_yes``, with history what a point of ``context_yes`` covers, which has at most as many
    queries and at least as long a context. The other points are on record as slower.

    Attributes:
        backend: Of the sparse MQA that it is compared with.
        head_dims: ``(Dq, Dv)``.
        tp: Tensor-parallel ranks.
        seq_lens: Ends of the buckets, ascending.
        min_query_lens: Of each bucket; None for never.
        pure_yes: Longest prompt without history for which it was faster.
        pure_no: Shortest for which it was not.
        context_yes: ``(query_len, seq_len)``.
        context_no: The same.
    """

    backend: str
    head_dims: tuple[int, int]
    tp: int
    seq_lens: tuple[int, ...] = ()
    min_query_lens: tuple[int | None, ...] = ()
    pure_yes: int | None = None
    pure_no: int | None = None
    context_yes: tuple[tuple[int, int], ...] = ()
    context_no: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Refuse buckets out of order, and a row that holds neither form or both."""
        if bool(self.seq_lens) == (self.pure_yes is not None):
            raise ValueError("a row of masked must have either seq_lens or pure_yes, got both or neither")
        if len(self.seq_lens) != len(self.min_query_lens) or list(self.seq_lens) != sorted(set(self.seq_lens)):
            raise ValueError(
                f"seq_lens must ascend, with a threshold each, got {self.seq_lens} and {self.min_query_lens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRule:
    """Where native heads serve.

    Attributes:
        device_families: Such as 90.
        widths: Of a latent row.
        max_heads: On a rank, at most.
        min_queries: Of a step, at least.
    """

    device_families: tuple[int, ...]
    widths: tuple[int, ...]
    max_heads: int
    min_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """What was measured somewhere, or published.

    Attributes:
        name: For the account.
        source: Where it is from.
        device_families: On which masked MHA serves.
        flash_attention: The version of FlashAttention that masked MHA needs; None if it needs none.
        prefill_geometries: ``(Dn, Dr, Dv)`` that expanded attention has kernels for.
        masked_geometries: ``(total heads, R, Dn, Dr, Dv)`` that masked MHA serves.
        masked: Its thresholds.
        native: The rule of native heads.
    """

    name: str
    source: str
    device_families: tuple[int, ...]
    flash_attention: int | None
    prefill_geometries: tuple[tuple[int, ...], ...]
    masked_geometries: tuple[tuple[int, ...], ...]
    masked: tuple[MaskedThresholds, ...]
    native: NativeRule

    def thresholds(self, backend: str, head_dims: tuple[int, int], tp: int) -> MaskedThresholds | None:
        """The row of a deployment, or None if nothing is known of it."""
        wanted = backend, head_dims, tp
        return next((row for row in self.masked if (row.backend, row.head_dims, row.tp) == wanted), None)


def geometries() -> dict[str, MlaGeometry]:
    """The packaged geometries by name."""
    entries = json.loads((_FOLDER / "routing_geometries.json").read_text(encoding="utf-8"))
    return {name: MlaGeometry(name=name, **sizes) for name, sizes in entries.items()}


def find_geometry(name: str) -> MlaGeometry:
    """The packaged geometry of a name, in which only letters, digits and points count.

    Raises:
        ValueError: If there is none.
    """
    known = geometries()
    found = {_bare(known_name): geometry for known_name, geometry in known.items()}.get(_bare(name))
    if found is None:
        raise ValueError(f"geometry must be one of {', '.join(known)}, got {name!r}")
    return found


def load_table(source: str | Path) -> RoutingTable:
    """A packaged table by name, or the one in a JSON file.

    Raises:
        ValueError: If there is no such table, or the file does not hold one.
    """
    path = _FOLDER / f"routing_{source}.json" if source in PACKAGED_TABLES else Path(source)
    if not path.is_file():
        raise ValueError(f"table must be {', '.join(PACKAGED_TABLES)} or a JSON file, got {str(source)!r}")
    try:
        return table_from(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must hold a routing table, got {type(error).__name__}: {error}") from error


def table_from(entries: Mapping[str, Any]) -> RoutingTable:
    """A table from the values of its JSON form."""
    values = {name: _tuples(value) for name, value in entries.items()}
    values["masked"] = tuple(MaskedThresholds(**{n: _tuples(v) for n, v in row.items()}) for row in entries["masked"])
    values["native"] = NativeRule(**{name: _tuples(value) for name, value in entries["native"].items()})
    return RoutingTable(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")
