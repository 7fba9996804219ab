"""How a stranger's kernel declares itself: the decorator, and what it attaches to a function."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from .contract import Contract
from .conventions import Conventions

if TYPE_CHECKING:
    from .case import Case

# raised when a kernel written for the old interface would be called wrongly by the new one
API = 1
ATTRIBUTE = "assay_kernel"
UNNAMED = "kernel"

Style = Literal["return", "dps"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a kernel does not serve a case: counted and shown, never a pass."""

    reason: str

    def __post_init__(self) -> None:
        """Refuse a reason that says nothing."""
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(f"reason must be a text, got {self.reason!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a kernel says of itself; see ``kernel`` for the fields."""

    name: str
    op: str | None = None
    style: Style = "return"
    contract: "Contract | Callable[[Case], Contract] | None" = None
    conventions: Conventions = field(default_factory=Conventions)
    supports: "Callable[[Case], bool | Unsupported] | None" = None
    mutates: tuple[str, ...] = ()
    api: int = API

    def __post_init__(self) -> None:
        """Refuse what the judge would only stumble over later."""
        if self.api != API:
            raise ValueError(f"api must be {API}, the only version that this assay serves, got {self.api!r}")
        for name, value in (("name", self.name), ("op", self.op)):
            if not (isinstance(value, str) and value) and not (name == "op" and value is None):
                raise TypeError(f"{name} must be a text, got {value!r}")
        if self.style not in get_args(Style):
            raise ValueError(f"style must be 'return' or 'dps', got {self.style!r}")
        if self.contract is not None and not isinstance(self.contract, Contract) and not callable(self.contract):
            kind = type(self.contract).__name__
            raise TypeError(
                f"contract must be a Contract, got {kind}; a function from a case to a Contract will do, too"
            )
        if not isinstance(self.conventions, Conventions):
            raise TypeError(f"conventions must be a Conventions, got {type(self.conventions).__name__}")
        if self.supports is not None and not callable(self.supports):
            raise TypeError(f"supports must be a function of a case, got {type(self.supports).__name__}")
        if not isinstance(self.mutates, tuple) or not all(isinstance(name, str) for name in self.mutates):
            raise TypeError(f"mutates must be a tuple of argument names, got {self.mutates!r}")


def kernel(
    op: str | None = None,
    *,
    name: str | None = None,
    style: Style = "return",
    contract: "Contract | Callable[[Case], Contract] | None" = None,
    conventions: Conventions | None = None,
    supports: "Callable[[Case], bool | Unsupported] | None" = None,
    mutates: tuple[str, ...] = (),
    api: int = API,
) -> Callable[[Function], Function]:
    """Attach a declaration to a function that takes the operation's arguments by name.

    Without it a kernel returns ``(out, lse)`` in the oracle's conventions and is held to
    ``harness.contract.default_contract``: every store in the dtype of its inputs, sums in float32, deterministic.

    Args:
        op: The operation that it computes; None if the caller says so.
        name: How reports call it; the name of the function if None.
        style: ``"return"`` returns ``(out, lse)``. ``"dps"`` (destination passing) writes them into tensors that the
            judge allocates, poisons and guards, and passes as keywords ``out`` and ``lse``; what it returns is ignored.
        contract: What the kernel promises of its arithmetic, the same for all cases or computed from the case.
        conventions: Where its arguments and answers differ from the oracle's.
        supports: From a ``harness.case.Case`` to True or ``Unsupported(reason)``.
        mutates: Arguments that it may write, besides those of its contract.
        api: Version of this interface that the kernel was written for.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If ``style`` or ``api`` is unknown.
    """
    if callable(op):
        raise TypeError("kernel must be called: write @kernel() rather than @kernel")

    declaration = Declaration(
        name=UNNAMED if name is None else name,
        op=op,
        style=style,
        contract=contract,
        conventions=Conventions() if conventions is None else conventions,
        supports=supports,
        mutates=mutates,
        api=api,
    )

    def attach(function: Function) -> Function:
        named = replace(declaration, name=_name_of(function)) if name is None else declaration
        try:
            setattr(function, ATTRIBUTE, named)
        except AttributeError as error:
            kind = type(function).__name__
            raise TypeError(f"kernel must decorate a function that takes attributes, got {kind}; wrap it") from error
        return function

    return attach


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """What ``function`` declares, or what stands for a function that declares nothing.

    Raises:
        TypeError: If it carries a declaration of another kind, such as that of another copy of this package.
    """
    declared = getattr(function, ATTRIBUTE, None)
    if declared is None:
        return Declaration(name=_name_of(function))
    if not isinstance(declared, Declaration):
        raise TypeError(f"{ATTRIBUTE} of {_name_of(function)} must be set by @kernel, got {type(declared)!r}")
    return declared


def is_declared(function: object) -> bool:
    """Whether ``function`` was decorated with ``kernel``."""
    return getattr(function, ATTRIBUTE, None) is not None


def _name_of(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
