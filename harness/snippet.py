"""A failure as a Python program: rebuilds the inputs, calls the kernel and the oracle, prints the worst element."""

from pprint import pformat

from .case import Case
from .operation import AnyOutline, Operation
from .operations import NAMES
from .record import Location

_PROGRAM = '''\
"""{title}"""

import os

import torch

if not torch.cuda.is_available():
    # before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.kernels import find_kernels
from assay.harness.answers import tensors_of
from assay.harness.layouts import prepared, restated
from assay.harness.poison import poisoned_allocations
from assay.reference.{op} import {op} as oracle

KERNEL = {kernel!r}
CASE = {case}
# the element that the judge named, in the result of as many dimensions; None if it named none
JUDGED = {judged!r}

operation, case = operations.load({op!r}), Case.from_json(CASE)
inputs = operation.inputs(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

# the oracle in float64, on the stored inputs
exact = {{name: inputs.arguments[name] for name in operation.arguments if name not in operation.optional_arguments}}
for name, value in exact.items():
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        exact[name] = value.double()
expected = tensors_of(oracle(**exact))

# the kernel, in its own conventions; memory that it asks for and leaves unwritten is NaN
kernel, outline = find_kernels(operation, KERNEL)[0], operation.outline(case)
given = prepared(inputs, kernel, case, kernel.contract(case), outline)
with poisoned_allocations(float("nan")):
    got = tensors_of(kernel.bind(given.arguments)())
if hasattr(outline, "empty_rows"):
    got = restated(got, kernel.conventions, outline.empty_rows)


def show(label, name, a, b, index):
    print(f"{{label}}: {{name}}{{list(index)}} is {{float(a[index]):.9g}}, must be {{float(b[index]):.9g}}")


# an oracle may have no word for what a kernel can be asked for beside its result
for name, a, b in zip(operation.results, got, expected, strict=False):
    if a.shape != b.shape:
        raise SystemExit(f"{{name}} has shape {{tuple(a.shape)}}, must have {{tuple(b.shape)}}")
    error = torch.where(a.double() == b, 0.0, (a.double() - b).abs()).nan_to_num(nan=float("inf"))
    if JUDGED is not None and len(JUDGED) == a.dim():
        show("judged", name, a, b, JUDGED)
    if error.numel():
        show("worst", name, a, b, tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape)))
print("inputs that the kernel wrote:", ", ".join(given.ledger.written()) or "none")
'''


def snippet(operation: Operation, case: Case, kernel_spec: str, where: Location | None = None) -> str:
    """A program that needs only torch, assay and the kernel, to be run where the kernel can be imported.

    Args:
        operation: To which the case belongs.
        case: As small as it gets, see ``harness.shrink``.
        kernel_spec: What ``--kernel`` takes, such as ``my_kernels.py:attend``.
        where: The element that the judge named; it is shown beside the one with the largest absolute error.

    Raises:
        NotImplementedError: If the operation is not one of the house, whose oracles are functions of the same name.
    """
    if operation.name not in NAMES:
        raise NotImplementedError(f"a snippet needs one of the oracles of {', '.join(NAMES)}, got {operation.name!r}")
    return _PROGRAM.format(
        title=f"Shows where a kernel differs from the oracle of {operation.name}, on case {case.id}.",
        op=operation.name,
        kernel=kernel_spec,
        case=pformat(case.to_json(), sort_dicts=False, width=100),
        judged=_index(operation.outline(case), where),
    )


def _index(outline: AnyOutline, where: Location | None) -> tuple[int, ...] | None:
    """The place in the result that has as many dimensions as it names, the largest; None for a place of no element."""
    for result in sorted(outline.results, key=lambda one: -len(one.axes)):
        index = [place for axis in result.axes if (place := getattr(where, axis, None)) is not None]
        if len(index) == len(result.axes):
            return tuple(index)
    return None
