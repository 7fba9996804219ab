"""A snippet shows a fault without the judge: the same element, in a program of its own."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from builders import CPU, attention_case, mla_case, operation_of

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.kernels import find_kernels
from assay.harness.operation import Operation
from assay.harness.record import GateResult, Location
from assay.harness.runner import run_case
from assay.harness.snippet import snippet

KERNELS = '''
"""Kernels that are right but for one planted fault each."""

import torch

from assay.harness import kernel
from assay.harness.contract import Contract
from assay.harness.conventions import Conventions
from assay.reference import attention as packed
from assay.reference import mla_prefill as latent

FLOATS = ("q", "k", "v", "kv_c", "k_pe", "kv_b_proj")


def right(oracle, given):
    given.pop("history_chunk_size", None)
    out, lse = oracle(**{name: value.double() if name in FLOATS else value for name, value in given.items()})
    return out.to(given["q"].dtype), lse.float()


def wrong_element(**given):
    out, lse = right(packed.attention, given)
    out[3, 1, 5] -= 0.25
    return out, lse


def wrong_lse(**given):
    out, lse = right(latent.mla_prefill, given)
    lse[2, 1] += 0.25
    return out, lse


def unwritten(**given):
    right_out, lse = right(latent.mla_prefill, given)
    out = torch.empty_like(right_out)
    out[:-1] = right_out[:-1]
    return out, lse


@kernel(contract=Contract(p="fp32", out="fp32"), conventions=Conventions(lse_base="2", lse_layout="HT"), style="dps")
def other_conventions(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, out, lse):
    given = dict(locals())
    right_out, right_lse = right(packed.attention, {name: given[name] for name in given if name not in ("out", "lse")})
    out.copy_(right_out)
    lse.copy_(right_lse.T / torch.tensor(2.0).log())
    out[3, 1, 5] -= 0.25


def writes(**given):
    answer = right(packed.attention, given)
    given["k"][0, 0, 0] += 1
    return answer


def flat(**given):
    out, lse = right(packed.attention, given)
    return out.flatten(1), lse
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


def deciding_gate(file: Path, name: str, case: Case) -> GateResult:
    operation = operation_of(case)
    worst = run_case(operation, find_kernels(operation, f"{file}:{name}")[0], case, CPU).worst
    assert worst is not None
    assert not worst.passed
    return worst


def run_program(text: str, folder: Path, *, code: int = 0) -> str:
    path = folder / "reproduce.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def elements(printed: str) -> dict[tuple[str, str], tuple[tuple[int, ...], float, float]]:
    """Index, value and true value by label and output."""
    number = r"(-?(?:[\d.]+(?:e-?\d+)?|inf)|nan)"
    lines = re.findall(rf"^(judged|worst): (out|lse)\[([\d, ]+)\] is {number}, must be {number}$", printed, re.M)
    return {
        (label, name): (tuple(int(i) for i in index.split(", ")), float(got), float(expected))
        for label, name, index, got, expected in lines
    }


@pytest.mark.parametrize(
    ("name", "case", "index"),
    [
        ("wrong_element", attention_case(layout="strided"), (3, 1, 5)),
        ("other_conventions", attention_case(), (3, 1, 5)),
        ("wrong_lse", mla_case(layout="bundled"), (2, 1)),
    ],
    ids=["element", "other conventions", "lse"],
)
def test_the_element_that_the_judge_named_is_shown(
    name: str, case: Case, index: tuple[int, ...], kernels: Path
) -> None:
    gate = deciding_gate(kernels, name, case)
    # a path relative to where the program runs
    printed = run_program(snippet(operation_of(case), case, f"kernels.py:{name}", gate.where), kernels.parent)
    shown, output = elements(printed), "out" if len(index) == 3 else "lse"
    assert gate.where is not None
    for label in ("judged", "worst"):
        at, got, expected = shown[label, output]
        assert at == index
        assert got == pytest.approx(gate.where.got, abs=1e-6)
        assert expected == pytest.approx(gate.where.expected, abs=1e-6)
    assert "inputs that the kernel wrote: none" in printed


def test_what_is_left_unwritten_is_nan(kernels: Path) -> None:
    case = mla_case()
    printed = run_program(snippet(operation_of(case), case, "kernels.py:unwritten"), kernels.parent)
    index, got, _ = elements(printed)["worst", "out"]
    assert index == (13, 0, 0)
    assert got != got


def test_a_written_input_is_named(kernels: Path) -> None:
    case = attention_case()
    printed = run_program(snippet(operation_of(case), case, "kernels.py:writes"), kernels.parent)
    assert "inputs that the kernel wrote: k" in printed


def test_another_shape_is_said(kernels: Path) -> None:
    case = attention_case()
    printed = run_program(snippet(operation_of(case), case, "kernels.py:flat"), kernels.parent, code=1)
    assert "out has shape (14, 32), must have (14, 2, 16)" in printed


def test_a_kernel_of_the_house_is_near_the_oracle(tmp_path: Path) -> None:
    case = mla_case(query_lens=[1], context_lens=[19])
    text = snippet(operation_of(case), case, "mla_prefill[torch]", Location(head=1))
    # a whole head is no element
    assert "JUDGED = None" in text
    shown = elements(run_program(text, tmp_path))
    assert set(shown) == {("worst", "out"), ("worst", "lse")}
    for _, got, expected in shown.values():
        assert got == pytest.approx(expected, abs=1e-5)


def test_only_oracles_of_the_house_are_called() -> None:
    foreign: Any = SimpleNamespace(name="my_op")
    with pytest.raises(
        NotImplementedError,
        match=f"needs one of the oracles of {', '.join(operations.NAMES)}, got 'my_op'",
    ):
        snippet(cast(Operation, foreign), mla_case(), "kernels.py:mine")
