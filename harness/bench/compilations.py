"""How often Triton compiled in this process: a kernel that compiles per length is slow where nobody looks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Count:
    """Specialisations of ``@triton.jit`` functions made so far, from the disk's cache or anew; None without Triton."""

    made: int | None = 0


@contextmanager
def counted_compilations() -> Iterator[Count]:
    """Count within the block, beside whatever hook is installed already.

    Kernels that torch.compile generates, and the plans of cuDNN, are made elsewhere and not counted.
    """
    count = Count()
    try:
        from triton import knobs
    except ImportError:
        count.made = None
        yield count
        return
    earlier = knobs.runtime.jit_post_compile_hook

    def hook(**info: Any) -> Any:
        count.made = (count.made or 0) + 1
        return None if earlier is None else earlier(**info)

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield count
    finally:
        knobs.runtime.jit_post_compile_hook = earlier
