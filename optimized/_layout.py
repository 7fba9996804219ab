"""What the copy engine of a GPU asks of a tensor's layout."""

from torch import Tensor


def copy_engine_objection(name: str, tensor: Tensor) -> str | None:
    """Why a packed tensor cannot be loaded by bulk tensor copies, or None.

    The last dimension must be contiguous; the start, the tokens and the heads must lie multiples of 16 bytes apart.
    cuDNN does not check this: on an H200 it returned wrong values, and no error, for a value tensor 2 bytes late.

    Args:
        name: Of the tensor, for the text.
        tensor: ``[T, H, D]``.
    """
    size = tensor.element_size()
    token, head, last = tensor.stride()
    if last != 1:
        return f"{name} must be contiguous in its last dimension, got stride {last}"
    if tensor.data_ptr() % 16 or token * size % 16 or head * size % 16:
        return (
            f"{name} must start at a multiple of 16 bytes, its tokens and heads multiples of 16 bytes apart, "
            f"got {tensor.data_ptr() % 16} bytes past, {token * size} and {head * size} bytes"
        )
    if tensor.numel() == 0 or token == 0:
        return f"{name} must have tokens that lie apart, got shape {tuple(tensor.shape)} and stride {token}"
    return None
