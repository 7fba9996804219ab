"""Where a model calls an operation of the house: who serves it, and who looks at what it is given.

The arguments are those by name that ``assay check`` gives to a kernel, so a kernel that is judged there can take its
place here, and what is seen here can be judged there.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

Arguments = dict[str, Any]
# is given the number of the layer and the arguments of the call
Watch = Callable[[int, Arguments], None]


class Seam:
    """One operation in all layers of a model.

    Attributes:
        op: The operation.
        name: Of what serves it, for the counts of calls.
        watch: Shown every call before it is served; None for nobody.
    """

    def __init__(self, op: str, kernel: str = "") -> None:
        """Have the house serve ``op``, or a kernel of yours: ``module:function`` or ``file.py:function``.

        Raises:
            ValueError: If there is no such kernel.
            TypeError: If it does not take the arguments of the operation.
            NotImplementedError: If it wants them in conventions of its own.
        """
        self.op, self.name = op, op
        self.watch: Watch | None = None
        self._described: dict[str, str] = {}
        self._kernel = None
        if kernel:
            # the judge is imported where a kernel of yours is, and not otherwise
            from ...harness.discovery import load_operation
            from ...harness.kernels import find_kernels

            found = find_kernels(load_operation(op), kernel)
            if len(found) != 1:
                raise ValueError(f"kernel must name one kernel, got {kernel!r} for {len(found)}")
            if found[0].conventions.rearranges or found[0].style != "return":
                raise NotImplementedError(f"a kernel in a model must have the oracle's conventions, got {kernel}")
            self._kernel, self.name = found[0], found[0].name
            self._described = {"kernel": kernel, "kernel_sha256": _source_digest(kernel)}

    def describe(self) -> dict[str, str]:
        """The kernel of yours with the digest of its file; nothing for the house, which the commit tells."""
        return dict(self._described)

    def serve(self, layer: int, arguments: Arguments, house: Callable[[], Tensor]) -> Tensor:
        """The output ``[T, H, Dv]`` of one call.

        Args:
            layer: Of the model.
            arguments: Of the operation, by name.
            house: Computes it with a plan that was made for all layers.

        Raises:
            TypeError: If a kernel of yours returns no output of that form.
        """
        if self.watch is not None:
            self.watch(layer, arguments)
        if self._kernel is None:
            return house()
        answer = self._kernel.bind(arguments)()
        out = answer[0] if isinstance(answer, tuple) and answer else answer
        rows = arguments["q"].shape[:2]
        if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != rows:
            form = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"{self.name} must return out [{rows[0]}, {rows[1]}, Dv] and lse, got {form}")
        return out


def _source_digest(kernel: str) -> str:
    """Of the file that the kernel is in; empty where it has none that can be read."""
    place, _, _ = kernel.rpartition(":")
    if place.endswith(".py"):
        return hashlib.sha256(Path(place).read_bytes()).hexdigest()
    module = sys.modules.get(place)
    file = inspect.getsourcefile(module) if module is not None else None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
