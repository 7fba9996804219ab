"""What a kernel hands back, as the judge holds it: one tensor for each result of the operation, in order."""

from typing import Any

import torch
from torch import Tensor

Answer = tuple[Tensor, ...]
# elements of an answer up to which a CPU judges it sooner
SMALL_ANSWER = 1 << 20


def tensors_of(returned: Any) -> Answer:
    """The results: a tensor alone is an answer of one."""
    return (returned,) if isinstance(returned, Tensor) else tuple(returned)


def copied(returned: Any) -> Answer:
    """The results by value: a kernel may hand out its own buffer again at the next call."""
    return tuple(tensor.clone() for tensor in tensors_of(returned))


def at_hand(answer: Answer) -> Answer:
    """The answer, on the CPU if it is small."""
    return answer if answer[0].numel() > SMALL_ANSWER else tuple(tensor.cpu() for tensor in answer)


def dtype_of(name: str) -> torch.dtype:
    """The dtype called so, such as ``int32``.

    Raises:
        ValueError: If there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must be the name of one of torch's, got {name!r}")
    return found
