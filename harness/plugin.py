"""The decorator by which a kernel of a stranger states its contract."""

from collections.abc import Callable
from typing import Any, TypeVar

from .contract import Contract

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*, contract: Contract | None = None, name: str | None = None) -> Callable[[Function], Function]:
    """Attach a contract to a function that ``assay check OP --kernel file.py:function`` judges.

    Without it, or without ``contract``, a kernel is held to ``harness.contract.default_contract``: every store in
    the dtype of its inputs, sums in float32, deterministic.

    Args:
        contract: What the kernel promises.
        name: How reports call it; the name of the function if None.

    Raises:
        TypeError: If ``contract`` is not a ``Contract``.
    """
    if contract is not None and not isinstance(contract, Contract):
        raise TypeError(f"contract must be a Contract, got {type(contract).__name__}")

    def attach(function: Function) -> Function:
        function.__dict__["assay_contract"] = contract
        function.__dict__["assay_name"] = name or function.__name__
        return function

    return attach
