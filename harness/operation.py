"""What the judge knows of an operation: its oracle, its kernels, its inputs, its cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .answers import Answer
from .case import Case
from .contract import Contract
from .conventions import Conventions
from .poison import Ledger
from .record import GateResult

if TYPE_CHECKING:
    from .metamorphic.rearranged import Rearranged


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Where projected keys and values come from, for kernels that project queries and outputs instead; float64.

    Attributes:
        rows: ``[S, R]``, shared by all heads.
        w_uk: ``[h, projected_dims, R]``, from a latent row to the leading dimensions of a key.
        w_uv: ``[h, Dv, R]``, from a latent row to a value.
    """

    rows: Tensor
    w_uk: Tensor
    w_uv: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some output rows of one request with all that their softmax depends on, in float64.

    Attributes:
        request: Index in the batch.
        tokens: ``[n]``, row of ``out`` of each query.
        positions: ``[n]``, position of each query among the tokens of its request.
        heads: ``[h]``, query heads.
        q: ``[n, h, Dq]``.
        k: ``[S, h, Dq]``.
        v: ``[S, h, Dv]``.
        last_key: ``[n]``, last key that each query may see, -1 for none.
        softmax_scale: Factor on the logits.
        projected_dims: Leading key dimensions that come out of a projection inside the kernel; 0 for none.
        projection_depth: Length of the inner products of that projection.
        k_terms: ``[S, h, projected_dims]``, root of the summed squares of each inner product's terms: what its
            float32 sum is accurate against. None without a projection.
        v_terms: ``[S, h, Dv]``, the same for the values.
        latent: What they are projected from; None without a projection.
        split_ends: End of each stretch of keys whose result a kernel may store before merging, where the operation says
            so; empty where that is left to the kernel.
        slots: ``[S]``, physical slot of each key; None without indirection.
        selected: ``[n, S]``, bool, the keys up to ``last_key`` that a query sees; None for all of them.
        lists: ``[n, L]``, the keys that each query lists, -1 behind them; one that is listed twice counts twice. Then
            ``k`` and ``v`` have one head, which all query heads share, and ``last_key`` counts the entries of a list.
            None where a query sees keys by their place.
        attn_sink: ``[h]``, a logit that takes weight and has no value; None without. Only with ``lists``.
    """

    request: int
    tokens: Tensor
    positions: Tensor
    heads: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    last_key: Tensor
    softmax_scale: float
    projected_dims: int = 0
    projection_depth: int = 0
    k_terms: Tensor | None = None
    v_terms: Tensor | None = None
    latent: Latent | None = None
    split_ends: tuple[int, ...] = ()
    slots: Tensor | None = None
    selected: Tensor | None = None
    lists: Tensor | None = None
    attn_sink: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UndefinedColumn:
    """Elements of ``out`` that are no finite numbers because a visible key has such a value in their column.

    Attributes:
        rows: ``[T]``, bool, CPU.
        heads: Query heads.
        dim: The column.
        value: NaN, or an infinity.
    """

    rows: Tensor
    heads: slice
    dim: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tensor of an answer.

    Attributes:
        name: What a kernel that writes into given tensors calls it.
        shape: Its size.
        field: The field of the contract that names its format; None for integers.
        dtype: Of integers, such as ``int32``; None otherwise.
        axes: What each of its dimensions counts, as fields of ``record.Location``.
        within: Size of the buffer in whose midst it lies for a kernel that writes into given tensors; its own if None.
        in_place: Whether it is the argument of that name after the call; a kernel may hand that out, or leave it out.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    field: str | None = None
    dtype: str | None = None
    within: tuple[int, ...] | None = None
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What an answer must look like.

    Attributes:
        results: Its tensors, in order.
        follows_contents: Whether other floating inputs must give other results; not where a rule fixes all of them.
        lists: Integer arguments that are contents as well, lists of positions that a kernel reads at each call.
        signed: Floating arguments whose sign has a meaning: other contents keep it.
    """

    results: tuple[Result, ...]
    follows_contents: bool = True
    lists: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()

    @property
    def in_place(self) -> tuple[str, ...]:
        """Names of the arguments that a kernel is asked to write."""
        return tuple(result.name for result in self.results if result.in_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOutline:
    """An ``Outline``: ``out``, ``[T, H, Dv]``, ``lse``, ``[T, H]``, and of some operations ``max_logits``, ``[T, H]``.

    Attributes:
        num_tokens: ``T``.
        num_heads: ``H``.
        d_v: ``Dv``.
        empty_rows: ``[T]``, bool, CPU, rows that see no key.
        requests: ``[T]``, the owner of each row.
        nan_rows: ``[T]``, rows that see a NaN among their keys and must say so; None for none.
        undefined_columns: Elements that must not be finite.
        max_logits: Whether the highest logit of each row is an answer, too; ``-inf`` in a row that sees no key.
        out_within: Size of the buffer that a kernel is given a part of as its ``out``; None for one of its own size.
        lists: As of an ``Outline``.
        signed: Likewise, and so is ``in_place``.
    """

    num_tokens: int
    num_heads: int
    d_v: int
    empty_rows: Tensor
    requests: Tensor
    nan_rows: Tensor | None = None
    undefined_columns: tuple[UndefinedColumn, ...] = ()
    max_logits: bool = False
    out_within: tuple[int, ...] | None = None
    lists: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()
    in_place: ClassVar[tuple[str, ...]] = ()

    @property
    def results(self) -> tuple[Result, ...]:
        """The output, its log-sum-exp, and the highest logit if it is asked for."""
        rows, axes = (self.num_tokens, self.num_heads), ("token", "head")
        names = ("lse", "max_logits") if self.max_logits else ("lse",)
        return (
            Result(name="out", shape=(*rows, self.d_v), axes=(*axes, "dim"), field="out", within=self.out_within),
            *(Result(name=name, shape=rows, axes=axes, field="lse") for name in names),
        )

    @property
    def follows_contents(self) -> bool:
        """Rows without keys, or with a NaN among them, do not."""
        fixed = self.empty_rows if self.nan_rows is None else self.empty_rows | self.nan_rows
        return not bool(fixed.all())


AnyOutline = Outline | AttentionOutline


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The arguments of a kernel by name, and the buffers behind them."""

    arguments: dict[str, Any]
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A candidate. ``bind`` does the host's work once and returns the forward, which the judge may call and capture.

    One that is ``by_name`` is judged when a name or a pattern leads to it, and left out of a run of the whole house.
    """

    name: str
    contract: Callable[[Case], Contract]
    bind: Callable[[dict[str, Any]], Callable[[], Any]]
    unsupported: Callable[[Case, torch.device], str | None] = field(default=lambda case, device: None)
    conventions: Conventions = field(default_factory=Conventions)
    style: Literal["return", "dps"] = "return"
    by_name: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What an operation's own gates say of an answer.

    Attributes:
        gates: In the order in which a failure explains later ones; those called G1 speak of values that are not finite.
        rows: How many rows were held against the oracle.
    """

    gates: list[GateResult]
    rows: int


class Operation(Protocol):
    """One operation of the house; implemented by a module in ``harness/operations`` of the same name.

    It is an ``AttentionOperation`` or a ``GatedOperation`` besides.
    """

    name: str
    arguments: tuple[str, ...]
    optional_arguments: tuple[str, ...]
    # names of the results, in order
    results: tuple[str, ...]

    def cases(self, request: "CaseRequest") -> list[Case]:
        """The cases of a tier."""
        ...

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """The arguments of a kernel, drawn from the seed of the case."""
        ...

    def outline(self, case: Case) -> AnyOutline:
        """What the answer must look like."""
        ...

    def default_contract(self, case: Case) -> Contract:
        """What a kernel is held to that declares nothing."""
        ...

    def kernels(self) -> list[Kernel]:
        """The twins of the house, and those that are judged only by name."""
        ...


@runtime_checkable
class AttentionOperation(Operation, Protocol):
    """A softmax over keys, judged row by row by ``harness.gates``: results ``out``, ``lse``, perhaps ``max_logits``."""

    def outline(self, case: Case) -> AttentionOutline:
        """What the answer must look like."""
        ...

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """Rows to be judged: all of them, or a stratified sample when there are more than ``budget`` logits."""
        ...


@runtime_checkable
class GatedOperation(Operation, Protocol):
    """Any other: it brings its own gates, derived from the contract all the same."""

    def oracle(self, case: Case, arguments: dict[str, Any]) -> Any:
        """What the gates hold an answer against, worked out once for all kernels: float64, on the device."""
        ...

    def judge(self, case: Case, oracle: Any, answer: Answer, contract: Contract) -> Judged:
        """Hold an answer of the right shapes and formats against the oracle."""
        ...


Ask = Callable[[Case, dict[str, Any]], Answer]


@runtime_checkable
class RearrangedOperation(GatedOperation, Protocol):
    """One that asks a kernel the same question in other forms, see ``harness.metamorphic.rearranged``."""

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> "Rearranged | None":
        """Ask, and compare bits; no oracle takes part.

        Args:
            case: Of the answer.
            arguments: Of the answer; to be left as they are.
            ask: A kernel's answer, by value, to a case with these arguments; raises what ``metamorphic.rearranged`` has
                for one that refuses or fails.
            first: Its answer.
            contract: What it promised.

        Returns:
            Gates of relations that bits decide, and answers in the form of the first for ``judge`` to decide; None
            where nothing is asked.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRequest:
    """What the command line asks of a tier: filters and overrides, all optional but the tier and the seed."""

    tier: str
    seed: int
    dtypes: tuple[str, ...]
    geometry: tuple[int, ...] | None = None
    heads: int | None = None
