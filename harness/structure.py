"""G0: whether what a kernel hands out is tensors of the promised shape, dtype, device and ownership."""

from typing import Any

import torch
from torch import Tensor

from .answers import tensors_of
from .contract import PRECISION_OF_DTYPE, Contract
from .in_place import is_argument
from .operation import AnyOutline, Inputs, Result


def misshapen(answer: Any, outline: AnyOutline, contract: Contract, inputs: Inputs) -> str | None:
    """What is wrong with the form of an answer, or None.

    Args:
        answer: As the kernel returned it, whatever that is.
        outline: What it must look like.
        contract: Names the formats of its floating results.
        inputs: What the kernel was given, which results must not lie in unless they are written in place.
    """
    names = ", ".join(result.name for result in outline.results)
    alone = len(outline.results) == 1 and isinstance(answer, Tensor)
    if not alone and not (isinstance(answer, tuple) and len(answer) == len(outline.results)):
        wanted = f"({names})" if len(outline.results) > 1 else f"one tensor {names}"
        return f"a kernel must return {wanted}, got {type(answer).__name__}"
    for result, tensor in zip(outline.results, tensors_of(answer), strict=True):
        text = _misshapen_result(result, tensor, contract, inputs)
        if text is not None:
            return text
    return None


def _misshapen_result(result: Result, tensor: Any, contract: Contract, inputs: Inputs) -> str | None:
    name, buffers = result.name, inputs.ledger.buffers.values()
    if type(tensor) is not Tensor:
        return f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
    if (form := _unreadable(tensor)) is not None:
        return f"{name} must be a dense tensor that stores its values, got {form}"
    if tuple(tensor.shape) != result.shape:
        return f"{name} must have shape {result.shape}, got {tuple(tensor.shape)}"
    if result.in_place:
        # its dtype and its device are the caller's own
        same = is_argument(tensor, inputs.arguments[name])
        return None if same else f"{name} must be the given tensor, written in place, got another one"
    found = str(tensor.dtype).removeprefix("torch.")
    if result.field is None and found != result.dtype:
        return f"{name} must have the dtype {result.dtype}, got {tensor.dtype}"
    if result.field is not None and PRECISION_OF_DTYPE.get(found) != getattr(contract, result.field):
        return f"{name} must have the declared precision {getattr(contract, result.field)}, got {tensor.dtype}"
    device = next(buffer.device for buffer in buffers)
    if tensor.device != device:
        return f"{name} must be on {device}, got {tensor.device}"
    if tensor.numel() and tensor.untyped_storage().data_ptr() in {one.untyped_storage().data_ptr() for one in buffers}:
        return f"{name} must own its memory, got a view of an input"
    return None


def _unreadable(tensor: Tensor) -> str | None:
    """Why the memory of a tensor is not a plain array of its elements, or None."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"layout {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"quantized {tensor.dtype}"
    # only a flag says so, which whoever takes the address of the data never sees
    return "a negated view" if tensor.is_neg() else "a conjugated view" if tensor.is_conj() else None
