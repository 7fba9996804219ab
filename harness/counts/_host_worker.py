"""The process that counts: ``python -m assay.harness.counts._host_worker``, a request on stdin, the answer on stdout.

The request is ``{"ops": [...], "kernel": name or null}``; the answer ``{"versions": text, "steps": {subject: fields}}``
or, where there is no such kernel, ``{"usage": text}``.
"""

import importlib.util
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from .. import operations
from ..case import Case
from ..kernels import find_kernels
from ..layouts import DESTINATION, prepared
from ..operation import Kernel, Operation
from ..plan import UsageError
from ._host_counts import StepCounts, WorkCounter, count_steps
from ._host_steps import host_steps
from .standin_device import DEVICE, standin_device, to_standin

# the providers that need nothing but torch and triton
PROVIDERS = ("torch", "sdpa", "triton")


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    steps: dict[str, dict[str, Any]] = {}
    answer: dict[str, Any]
    try:
        for name in request["ops"]:
            steps |= count_operation(operations.load(name), request["kernel"])
        answer = {"versions": versions(), "steps": steps}
    except UsageError as error:
        answer = {"usage": str(error)}
    json.dump(answer, sys.stdout)


def versions() -> str:
    """What the counts depend on: what torch is made of, and how Python compiles what it calls."""
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    python = ".".join(platform.python_version_tuple()[:2])
    return f"torch {torch.__version__.partition('+')[0]}, triton {triton}, Python {python}"


def count_operation(operation: Operation, kernel: str | None) -> dict[str, dict[str, Any]]:
    """The fields of each step of an operation, by ``kernel step: plan`` and ``kernel step: forward``."""
    found: dict[str, dict[str, Any]] = {}
    for candidate in _kernels(operation, kernel):
        for name, case in host_steps(operation.name).items():
            subject = f"{candidate.name} {name}"
            refused = _refusal(candidate, case)
            if refused is not None:
                found[subject] = {"refused": refused}
                continue
            for phase, counts in zip(("plan", "forward"), _counts(operation, candidate, case), strict=True):
                found[f"{subject}: {phase}"] = counts.fields()
    return found


def _kernels(operation: Operation, kernel: str | None) -> Iterator[Kernel]:
    for candidate in find_kernels(operation, kernel):
        if kernel is not None or candidate.name.partition("[")[2].rstrip("]") in PROVIDERS:
            yield candidate


def _refusal(kernel: Kernel, case: Case) -> str | None:
    with standin_device(WorkCounter()):
        return kernel.unsupported(case, DEVICE)


def _counts(operation: Operation, kernel: Kernel, case: Case) -> list[StepCounts]:
    """The counts of making the plan and of the forward."""
    inputs = operation.inputs(case, torch.device("cpu"))
    inputs = prepared(inputs, kernel, case, kernel.contract(case), operation.outline(case))
    arguments = {name: to_standin(value) for name, value in inputs.arguments.items()}
    if DESTINATION in arguments:
        arguments[DESTINATION] = replace(arguments[DESTINATION], device=DEVICE)
    forward: list[Any] = []

    def plan() -> None:
        forward[:] = [kernel.bind(arguments)]

    return count_steps([plan, lambda: forward[0]()])


if __name__ == "__main__":
    main()
