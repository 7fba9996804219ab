"""What kernels mean by the same words: the base of a log-sum-exp, an empty row, the addressing of a cache."""

import itertools
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

EmptyOut = Literal["zero", "nan"]
EmptyLse = Literal["-inf", "+inf", "nan"]
Cache = Literal["slots", "blocks", "indptr"]
Duplicates = Literal["multiset", "set"]

CHOICES: dict[str, tuple[Any, ...]] = {
    "lse_base": ("e", "2"),
    "lse_layout": ("TH", "HT"),
    "duplicates": (None, *get_args(Duplicates)),
    "cache": get_args(Cache),
}
# arguments that say where the keys of a request lie, by operation: one of these sets is replaced by another layout's
SLOT_MAPPED = ("slot_table", "request_rows")
PACKED = ("cu_seqlens_k",)
INDEX_NAMES: dict[str, tuple[str, ...]] = {
    "blocks": ("block_table", "context_lens"),
    "indptr": ("kv_indptr", "kv_indices", "context_lens"),
}
LATENT_CACHES, PACKED_CACHES = ("kv_c", "k_pe"), ("k", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """How a kernel takes its inputs and states its answer, where that differs from the oracle.

    The judge rearranges the inputs before the call and restates the answer after it, so a kernel is judged as its
    callers know it. Only what is declared is translated: a row that sees keys never may hold an infinity, and an empty
    row must hold the declared values, not the oracle's.

    Attributes:
        lse_base: ``"e"`` for a natural log-sum-exp, ``"2"`` for ``log2 sum exp``.
        lse_layout: ``"TH"`` for ``lse`` of shape ``[T, H]``, ``"HT"`` for ``[H, T]``.
        empty_row: What ``out`` and ``lse`` hold in a row that sees no key: ``"zero"`` or ``"nan"``, and ``"-inf"``,
            ``"+inf"`` or ``"nan"``.
        duplicates: Whether a repeated index counts again (``"multiset"``) or not (``"set"``); None for the operation's
            own rule. Only for operations with ``indices``.
        cache: How keys and values are addressed. ``"slots"``: as the operation has it. ``"blocks"``: caches
            ``[pages, page_size, ...]`` with ``block_table``, ``[N, most pages]``, int32, a row per request, and
            ``context_lens``, ``[N]``. ``"indptr"``: the pages of request ``r`` are
            ``kv_indices[kv_indptr[r] : kv_indptr[r + 1]]``, with ``context_lens`` and, for a kernel that names it,
            ``kv_last_page_len``. Both replace ``slot_table`` and ``request_rows``, or ``cu_seqlens_k``.
        page_size: Tokens of a page for ``"blocks"`` and ``"indptr"``; None with ``"indptr"`` for a cache without pages,
            ``[slots, ...]``, whose ``kv_indices`` are slots.
        row_gap: Elements, full of NaN, between a cache row and the next: caches are then not contiguous.
        bundled: One ``kv_cache`` with rows ``[latent | rope]``, ``[..., R + Dr]``, instead of ``kv_c`` and ``k_pe``.
        flat_projection: ``kv_b_proj`` as ``[H * (Dn + Dv), R]``, as checkpoints store it.
    """

    lse_base: Literal["e", "2"] = "e"
    lse_layout: Literal["TH", "HT"] = "TH"
    empty_row: tuple[EmptyOut, EmptyLse] = ("zero", "-inf")
    duplicates: Duplicates | None = None
    cache: Cache = "slots"
    page_size: int | None = None
    row_gap: int = 0
    bundled: bool = False
    flat_projection: bool = False

    def __post_init__(self) -> None:
        """Refuse values that name no convention."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        if self.empty_row not in itertools.product(get_args(EmptyOut), get_args(EmptyLse)):
            raise ValueError(f"empty_row must be ('zero' or 'nan', '-inf', '+inf' or 'nan'), got {self.empty_row!r}")
        if not _is_count(self.row_gap, least=0):
            raise ValueError(f"row_gap must be an integer of at least 0, got {self.row_gap!r}")
        paged = self.page_size is not None
        if paged and not _is_count(self.page_size, least=1):
            raise ValueError(f"page_size must be an integer of at least 1, got {self.page_size!r}")
        if paged and self.cache == "slots":
            raise ValueError(f"page_size must be None with cache 'slots', got {self.page_size}")
        if not paged and self.cache == "blocks":
            raise ValueError("page_size must be given with cache 'blocks', got None")

    @property
    def rearranges(self) -> bool:
        """Whether any input differs from the oracle's."""
        return self.cache != "slots" or self.row_gap > 0 or self.bundled or self.flat_projection

    @property
    def note(self) -> str:
        """What differs from the oracle, for reports; empty if nothing does."""
        default = Conventions()
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def argument_names(
    required: tuple[str, ...], optional: tuple[str, ...], conventions: Conventions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the arguments under these conventions: those that a kernel must take, and those that it may take.

    Args:
        required: Those of the operation that must be taken.
        optional: The others.
        conventions: Of the kernel.

    Raises:
        ValueError: If a convention speaks of an argument that the operation lacks.
    """
    names = list(required)
    if conventions.cache != "slots":
        replaced = next((old for old in (SLOT_MAPPED, PACKED) if set(old) <= set(names)), None)
        if replaced is None:
            raise ValueError(f"cache {conventions.cache!r} needs an operation with {_either(SLOT_MAPPED, PACKED)}")
        added = [name for name in INDEX_NAMES[conventions.cache] if name not in names]
        names = [name for name in names if name not in replaced] + added
        optional = (*optional, "kv_last_page_len") if conventions.cache == "indptr" else optional
    if conventions.bundled:
        _need("bundled", LATENT_CACHES, names)
        names = ["kv_cache", *(name for name in names if name not in LATENT_CACHES)]
    elif conventions.row_gap and not any(set(caches) <= set(names) for caches in (LATENT_CACHES, PACKED_CACHES)):
        raise ValueError(f"row_gap needs an operation with {_either(LATENT_CACHES, PACKED_CACHES)}")
    if conventions.flat_projection:
        _need("flat_projection", ("kv_b_proj",), names)
    if conventions.duplicates is not None:
        _need("duplicates", ("indices",), names)
    return tuple(names), optional


def _need(convention: str, wanted: tuple[str, ...], names: list[str]) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"{convention} needs an operation with {' and '.join(wanted)}, this one lacks {missing[0]}")


def _either(*sets: tuple[str, ...]) -> str:
    return " or with ".join(" and ".join(names) for names in sets)
