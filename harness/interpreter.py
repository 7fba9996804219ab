"""Triton on a machine without a GPU: its interpreter, and the kernels that it would compute wrongly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class InterpretedBfloat16Error(NotImplementedError):
    """A Triton kernel got bfloat16 tensors while interpreted: what it computes then says nothing about the kernel."""


@contextmanager
def no_interpreted_bfloat16() -> Iterator[None]:
    """Refuse the launch of an interpreted Triton kernel on bfloat16 tensors, by whomever it is written.

    Raises:
        InterpretedBfloat16Error: At such a launch, within the block.
    """
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    launch = GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in _flat((args, tuple(kwargs.values()))):
            base = getattr(value, "base", value)
            if isinstance(base, torch.Tensor) and base.dtype == torch.bfloat16:
                raise InterpretedBfloat16Error(
                    "a Triton kernel on bfloat16 tensors needs a GPU: the interpreter computes bfloat16 wrongly"
                )
        return launch(self, *args, **kwargs)

    GridExecutor.__call__ = checked
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def _flat(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists: a kernel may take its tensors in tuples."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
