"""Which path serves the prefills of a step of a sparse MLA model, by tables, with the reasons against every other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ._routing_rules import (
    dense_objections,
    masked_objections,
    masked_verdict,
    mqa_objections,
    native_objections,
    padded_heads,
)
from ._routing_tables import (
    PACKAGED_TABLES,
    MlaGeometry,
    RoutingTable,
    find_geometry,
    geometries,
    load_table,
    table_from,
)

__all__ = [
    "PACKAGED_TABLES",
    "PATHS",
    "Deployment",
    "MlaGeometry",
    "Route",
    "RoutingOptions",
    "RoutingTable",
    "Step",
    "find_geometry",
    "geometries",
    "load_table",
    "route",
    "table_from",
]

PathName = Literal["dense_mha", "masked_mha", "native_heads", "sparse_mqa", "none"]

# in the order in which they are tried
PATHS: tuple[PathName, ...] = ("dense_mha", "masked_mha", "native_heads", "sparse_mqa")
FORCES = ("dense", "masked", "mqa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The lengths of the requests of one step, prefills and decodes mixed.

    A request with more than ``decode_queries`` queries is a prefill. Maxima are over the prefills alone, each for
    itself: the longest query and the longest context may be of different requests. A decode, however long its context,
    decides nothing.

    Attributes:
        query_lens: Queries of each request in this step.
        seq_lens: Tokens of each request, those queries included.
        decode_queries: Most queries of a decode; more than 1 under speculative decoding.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    decode_queries: int = 1

    def __post_init__(self) -> None:
        """Refuse lengths that do not belong together."""
        if len(self.query_lens) != len(self.seq_lens) or not self.query_lens:
            raise ValueError(
                f"query_lens and seq_lens must count the same requests, at least one, got {len(self.query_lens)} and "
                f"{len(self.seq_lens)}"
            )
        if self.decode_queries < 0:
            raise ValueError(f"decode_queries must not be negative, got {self.decode_queries}")
        for at, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if not 1 <= query_len <= seq_len:
                raise ValueError(
                    f"query_lens must be 1 to the seq_len of the request, got {query_len} of {seq_len} at request {at}"
                )

    @property
    def prefills(self) -> tuple[int, ...]:
        """Which requests are prefills."""
        return tuple(at for at, query_len in enumerate(self.query_lens) if query_len > self.decode_queries)

    @property
    def max_query_len(self) -> int:
        """Of the prefills; 0 if there are none."""
        return max((self.query_lens[at] for at in self.prefills), default=0)

    @property
    def max_seq_len(self) -> int:
        """Of the prefills; 0 if there are none."""
        return max((self.seq_lens[at] for at in self.prefills), default=0)

    @property
    def max_context_len(self) -> int:
        """Most tokens that a prefill has from earlier steps."""
        return max((self.seq_lens[at] - self.query_lens[at] for at in self.prefills), default=0)

    @property
    def num_queries(self) -> int:
        """Of all prefills."""
        return sum(self.query_lens[at] for at in self.prefills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a model runs on.

    Attributes:
        device_family: 10 times the major compute capability, such as 90 or 100.
        tp: Tensor-parallel ranks.
        backend: Of sparse MQA, by the name that the tables use.
        kv_format: ``bfloat16``, ``float16``, or the name of a quantised format.
        flash_attention: Version of FlashAttention for expanded attention; None if there is none.
        dcp: Ranks of decode context parallelism.
        prefill_backend: Whether there is a kernel for expanded attention at all.
        mask_bytes: Workspace of the masks.
        context_chunk: Most history tokens that are attended at a time.
    """

    device_family: int
    tp: int = 1
    backend: str = "FLASHMLA_SPARSE"
    kv_format: str = "bfloat16"
    flash_attention: int | None = None
    dcp: int = 1
    prefill_backend: bool = True
    mask_bytes: int = 128 << 20
    context_chunk: int = 65536

    def __post_init__(self) -> None:
        """Refuse counts below 1, and a device family that is a capability."""
        for name in ("tp", "dcp", "context_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.mask_bytes < 0:
            raise ValueError(f"mask_bytes must not be negative, got {self.mask_bytes}")
        if self.device_family < 10 or self.device_family % 10:
            raise ValueError(f"device_family must be such as 90 or 100, got {self.device_family}")

    def local_heads(self, geometry: MlaGeometry) -> int:
        """Heads of one rank.

        Raises:
            ValueError: If the ranks do not divide the heads.
        """
        if geometry.num_heads % self.tp:
            raise ValueError(f"tp must divide the {geometry.num_heads} heads of {geometry.name}, got {self.tp}")
        return geometry.num_heads // self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """The escape hatches. A value that is none of those below is an error, never a default.

    Attributes:
        force: ``dense``, ``masked`` or ``mqa``, or None to ask the table. What cannot serve cannot be forced.
        native: Whether native heads may serve where sparse MQA would.
        native_min_queries: Queries of a step from which on they do; 0 for always, None for the table's number.
    """

    force: str | None = None
    native: bool = True
    native_min_queries: int | None = None

    def __post_init__(self) -> None:
        """Refuse any other value."""
        if self.force is not None and self.force not in FORCES:
            raise ValueError(f"force must be one of {', '.join(FORCES)} or None, got {self.force!r}")
        if type(self.native) is not bool:
            raise TypeError(f"native must be True or False, got {self.native!r}")
        if self.native_min_queries is None:
            return
        if type(self.native_min_queries) is not int:
            raise TypeError(f"native_min_queries must be an int or None, got {self.native_min_queries!r}")
        if self.native_min_queries < 0:
            raise ValueError(f"native_min_queries must not be negative, got {self.native_min_queries}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The answer.

    Attributes:
        path: One of ``PATHS``; ``none`` for a step without prefills.
        reason: Why it was taken.
        refused: Why each other path was not, in the order in which they are tried.
        table: Name of the table.
        forced: The hatch that was used, if any.
    """

    path: PathName
    reason: str
    refused: dict[str, str] = field(default_factory=dict)
    table: str
    forced: str | None = None


def route(
    geometry: MlaGeometry,
    step: Step,
    deployment: Deployment,
    *,
    table: RoutingTable | str | Path = "vllm",
    options: RoutingOptions | None = None,
) -> Route:
    """Say which path serves the prefills of a step, and why no other does.

    Dense MHA, where every selection is everything; masked MHA, where the table holds it for faster than sparse MQA;
    native heads, where these save padding; else sparse MQA with padded heads.

    Args:
        geometry: Of the model.
        step: Its lengths.
        deployment: What it runs on.
        table: A table, the name of a packaged one, or a file that ``assay route --calibrate`` wrote.
        options: Escape hatches; none without.

    Returns:
        The path, with the reasons against all others.

    Raises:
        ValueError: If the ranks do not divide the heads, or there is no such table.
        NotImplementedError: If a forced path cannot serve, or no path can.
    """
    known = table if isinstance(table, RoutingTable) else load_table(table)
    asked = options or RoutingOptions()
    deployment.local_heads(geometry)
    if not step.prefills:
        return Route(path="none", reason=f"no request has more than {step.decode_queries} queries", table=known.name)
    refused: dict[str, str] = {}
    for path in PATHS:
        reason, against = _examined(path, geometry, step, deployment, known, asked)
        if against is None:
            return Route(
                path=path,
                reason=reason,
                refused=refused | _unasked(path),
                table=known.name,
                forced=asked.force,
            )
        refused[path] = against
    raise NotImplementedError(
        f"no path serves {geometry.name}: " + "; ".join(f"{path}: {why}" for path, why in refused.items())
    )


def _examined(
    path: PathName,
    geometry: MlaGeometry,
    step: Step,
    deployment: Deployment,
    table: RoutingTable,
    options: RoutingOptions,
) -> tuple[str, str | None]:
    """``(why it would serve, why it does not or None)``."""
    if path in ("dense_mha", "masked_mha"):
        name = "dense" if path == "dense_mha" else "masked"
        if options.force not in (None, name):
            return "", f"{options.force} is forced"
        objections = dense_objections if name == "dense" else masked_objections
        against = "; ".join(objections(geometry, step, deployment, table))
        if options.force == name:
            if against:
                raise NotImplementedError(f"{path} is forced and cannot serve {geometry.name}: {against}")
            return "forced", None
        if against:
            return "", against
        if name == "dense":
            return _all_selected(geometry, step), None
        faster, why = masked_verdict(geometry, step, deployment, table)
        return why, None if faster else why
    heads = deployment.local_heads(geometry)
    padded = padded_heads(heads, deployment.device_family)
    if path == "native_heads":
        against = "; ".join(native_objections(geometry, step, deployment, table, options))
        return f"{heads} heads instead of {padded} for {step.num_queries} queries", against or None
    against = "; ".join(mqa_objections(geometry, deployment))
    return f"{heads} heads, padded to {padded}", against or None


def _all_selected(geometry: MlaGeometry, step: Step) -> str:
    if geometry.topk is None:
        return "the model selects nothing"
    return f"max_seq_len {step.max_seq_len} <= topk {geometry.topk}: every selection is everything"


def _unasked(path: PathName) -> dict[str, str]:
    """The paths behind the one that was taken."""
    return {later: f"{path} comes before it" for later in PATHS[PATHS.index(path) + 1 :]}
