"""Small cases of ``sparse_mla`` for the tests of its judge."""

from typing import Any

from builders import CPU

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.kernels import wrap_function
from assay.harness.record import Record
from assay.harness.runner import run_case

OPERATION: Any = operations.load("sparse_mla")
PLAIN: dict[str, Any] = {
    "num_heads": 4,
    "d_qk": 48,
    "d_v": 32,
    "softmax_scale": 0.31,
    "query_lens": [7, 3],
    "context_lens": [60, 9],
    "topk": 40,
    "source": "uniform",
    "order": "shuffled",
    "holes": "none",
    "repeats": "none",
    "lengths": "all",
    "tail": "padding",
    "sink": "none",
    "layout": "packed",
}


def sparse_case(family: str = "diffuse", dtype: str = "float32", seed: int = 0, **sizes: Any) -> Case:
    """A small case of plain lists, with other sizes where given."""
    return Case(op="sparse_mla", family=family, dtype=dtype, seed=seed, sizes=PLAIN | sizes)


def sparse_arguments(case: Case) -> dict[str, Any]:
    """The arguments of a kernel."""
    arguments: dict[str, Any] = OPERATION.inputs(case, CPU).arguments
    return arguments


def judged_sparse(case: Case, function: Any) -> Record:
    """The verdict on a function."""
    return run_case(OPERATION, wrap_function(function, OPERATION), case, CPU)
