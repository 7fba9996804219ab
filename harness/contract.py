"""What a kernel promises about its arithmetic: the only place where a tolerance can come from."""

from dataclasses import dataclass, replace
from typing import Any, Literal

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "e4m3"]

# largest relative error of one rounding to nearest; tf32 operands may be truncated, hence a full ulp
UNIT_ROUNDOFF: dict[str, float] = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "tf32": 2.0**-10,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
}

# smallest positive number of each storage format: an error below it is underflow, not a fault
SUBNORMAL: dict[str, float] = {"fp64": 2.0**-1074, "fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}

PRECISION_OF_DTYPE: dict[str, Precision] = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Precision and behaviour that a kernel declares, and is held to.

    Attributes:
        p: Format of the softmax weights when they meet the values.
        out: Format of the output.
        lse: Format of the log-sum-exp.
        qk_acc: Products of queries and keys: ``tf32`` when their operands may be cut to tf32.
        logits: Format in which logits are kept before the exponential.
        pv_acc: Accumulator of weights times values.
        l: ``exact`` when the denominator sums unrounded weights, ``from_p`` when it sums rounded ones.
        projected: Format to which keys and values are rounded after a projection inside the kernel; None if there is no
            such projection.
        splits_store: Format of partial results that are merged; None if the kernel merges none.
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
    qk_acc: Precision = "fp32"
    logits: Precision = "fp32"
    pv_acc: Precision = "fp32"
    l: Literal["exact", "from_p"] = "exact"  # noqa: E741  # the field's name for the denominator
    projected: Precision | None = None
    splits_store: Precision | None = None
    ex2_rel: float = 2.0**-22
    deterministic: bool = True
    batch_invariant: bool = False
    capturable: bool = False
    mutates: tuple[str, ...] = ()
    workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse formats that the gates know nothing about."""
        for name in ("p", "out", "lse", "qk_acc", "logits", "pv_acc", "projected", "splits_store"):
            value = getattr(self, name)
            optional = name in ("projected", "splits_store")
            if not (value in UNIT_ROUNDOFF or (optional and value is None)):
                raise ValueError(f"{name} must be one of {', '.join(UNIT_ROUNDOFF)}, got {value!r}")
        if self.l not in ("exact", "from_p"):
            raise ValueError(f"l must be 'exact' or 'from_p', got {self.l!r}")

    def promising(self, **promises: Any) -> "Contract":
        """The same contract with some fields changed."""
        return replace(self, **promises)

    def roundoff(self, name: str) -> float:
        """Unit roundoff of the field ``name``; 0 where nothing is rounded."""
        value = getattr(self, name)
        return 0.0 if value is None else UNIT_ROUNDOFF[value]


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
