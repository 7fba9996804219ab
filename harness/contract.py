"""What a kernel promises about its arithmetic: the only place where a tolerance can come from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "e4m3"]
# float32 operands as two bfloat16 numbers each, three products of four
Products = Precision | Literal["bf16x3"]

# largest relative error of one rounding to nearest; tf32 operands may be truncated, hence a full ulp
UNIT_ROUNDOFF: dict[str, float] = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "tf32": 2.0**-10,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
}
# what two bfloat16 numbers leave of a float32 operand
BF16X3_ROUNDOFF = 2.0**-16

# smallest positive number of each storage format: an error below it is underflow, not a fault
SUBNORMAL: dict[str, float] = {"fp64": 2.0**-1074, "fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}

PRECISION_OF_DTYPE: dict[str, Precision] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}

# an exponential that errs by more than one rounding to bfloat16 is not one of a softmax in any format that has a name
COARSEST_EXPONENTIAL = 2.0**-8

REQUIRED_FORMATS = ("p", "out", "lse", "logits", "pv_acc")
OPTIONAL_FORMATS = ("inputs", "state", "state_store", "projected", "splits_store")
PROMISES = ("absorbed", "deterministic", "batch_invariant", "capturable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Precision and behaviour that a kernel declares, and is held to.

    Attributes:
        p: Format of the softmax weights when they meet the values.
        out: Format of the output.
        lse: Format of the log-sum-exp.
        inputs: Format to which the kernel rounds its inputs before it computes; None if it takes them as they are.
        qk_acc: Products of queries and keys: ``tf32`` when their operands may be cut to tf32, ``bf16x3`` when each is
            split in two bfloat16 numbers, otherwise the format of their sum.
        logits: Format in which logits are kept before the exponential.
        pv_acc: Accumulator of weights times values.
        l: ``exact`` when the denominator sums unrounded weights, ``from_p`` when it sums the rounded ones that meet the
            values.
        projected: Format to which keys and values are rounded after a projection inside the kernel, or, if it is
            ``absorbed``, projected queries and outputs in the latent space; None if there is no such projection.
        absorbed: Whether queries are projected into the latent space and outputs out of it, instead of the keys and
            values of all tokens.
        state: Format of a recurrent state between the steps or chunks of a sequence; None if there is none.
        state_store: Format of states that are handed out, and stay in memory from one call to the next; None if none
            are.
        splits_store: Format of partial results that are merged; None if the kernel merges none.
        splits: Most partial results that are merged into one row, wherever they end. None for the stretches of the
            operation's own plan, and for any number of them where it has none.
        ex2_rel: Relative error of the exponential.
        deterministic: Whether the same call gives the same bits.
        batch_invariant: Whether a row's bits are independent of its company.
        capturable: Whether the forward can be captured in a CUDA graph and replayed on changed contents.
        mutates: Names of the inputs that the kernel may write.
        workspace_bytes: Most scratch memory that the kernel takes; None if undeclared.
    """

    p: Precision
    out: Precision
    lse: Precision = "fp32"
    inputs: Precision | None = None
    qk_acc: Products = "fp32"
    logits: Precision = "fp32"
    pv_acc: Precision = "fp32"
    l: Literal["exact", "from_p"] = "exact"  # noqa: E741  # the field's name for the denominator
    projected: Precision | None = None
    absorbed: bool = False
    state: Precision | None = None
    state_store: Precision | None = None
    splits_store: Precision | None = None
    splits: int | None = None
    ex2_rel: float = 2.0**-22
    deterministic: bool = True
    batch_invariant: bool = False
    capturable: bool = False
    mutates: tuple[str, ...] = ()
    workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the gates know nothing about, and promises without a subject."""
        _check_formats(self)
        _check_counts(self)
        if self.l not in ("exact", "from_p"):
            raise ValueError(f"l must be 'exact' or 'from_p', got {self.l!r}")
        if not (isinstance(self.ex2_rel, float) and 0 < self.ex2_rel <= COARSEST_EXPONENTIAL):
            raise ValueError(f"ex2_rel must be a float above 0 and at most 2^-8, got {self.ex2_rel!r}")
        for name in PROMISES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not (isinstance(self.mutates, tuple) and all(isinstance(name, str) for name in self.mutates)):
            raise TypeError(f"mutates must be a tuple of argument names, got {self.mutates!r}")
        if self.absorbed and self.projected is None:
            raise ValueError("projected must name the format of absorbed queries when absorbed is set, got None")
        if self.splits is not None and self.splits_store is None:
            raise ValueError(f"splits_store must name the format of the {self.splits} partial results, got None")

    def promising(self, **promises: Any) -> "Contract":
        """The same contract with some fields changed."""
        return replace(self, **promises)

    def roundoff(self, name: str) -> float:
        """Unit roundoff of the field ``name``; 0 where nothing is rounded."""
        value = getattr(self, name)
        if value == "bf16x3":
            return BF16X3_ROUNDOFF
        return 0.0 if value is None else UNIT_ROUNDOFF[value]

    def formats(self, fields: Mapping[str, str]) -> dict[str, Precision]:
        """The formats of places that obey a field each: the sites of a recurrence, or its results.

        Args:
            fields: From the name of a place to that of a field, such as ``{"final state": "state"}``.

        Raises:
            ValueError: If a field is none of the formats, or is not declared.
        """
        known = (*REQUIRED_FORMATS, *OPTIONAL_FORMATS)
        for place, name in fields.items():
            if name not in known:
                raise ValueError(f"the field of {place} must be one of {', '.join(known)}, got {name!r}")
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be declared for {place}, got None")
        return {place: getattr(self, name) for place, name in fields.items()}


def _check_formats(contract: Contract) -> None:
    for name in (*REQUIRED_FORMATS, *OPTIONAL_FORMATS, "qk_acc"):
        value = getattr(contract, name)
        if value is None and name in OPTIONAL_FORMATS:
            continue
        known = (*UNIT_ROUNDOFF, "bf16x3") if name == "qk_acc" else tuple(UNIT_ROUNDOFF)
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check_counts(contract: Contract) -> None:
    for name, least in (("splits", 1), ("workspace_bytes", 0)):
        value = getattr(contract, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer or None, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def default_contract(dtype: str, *, projected: bool, splits: bool) -> Contract:
    """The contract of a kernel that declares none: every store in the dtype of its inputs, sums in float32.

    Args:
        dtype: Of the inputs, such as ``bfloat16``.
        projected: Whether the operation projects keys and values inside the kernel.
        splits: Whether the operation merges partial results.
    """
    stored = PRECISION_OF_DTYPE[dtype]
    contract = Contract(
        p=stored, out=stored, projected=stored if projected else None, splits_store=stored if splits else None
    )
    if stored == "fp64":
        return replace(contract, lse="fp64", qk_acc="fp64", logits="fp64", pv_acc="fp64", ex2_rel=2.0**-52)
    return contract
