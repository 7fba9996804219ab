"""``assay replay`` judges the recorded inputs again, and says whether the failure is still the recorded one."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CPU, attention_case, mla_case, operation_of
from rich.console import Console

from assay.harness import capsule as capsule_module
from assay.harness import replay_command
from assay.harness.capsule import Origin, write_capsule
from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.kernels import find_kernels
from assay.harness.operation import Inputs
from assay.harness.plan import UsageError
from assay.harness.replay_command import run_replay
from assay.harness.runner import run_case
from assay.harness.worker import isolated

KERNELS = """
import os

from assay.reference import attention as oracle

FLOATS = ("q", "k", "v")


def right(**given):
    out, lse = oracle.attention(**{name: value.double() if name in FLOATS else value for name, value in given.items()})
    return out.to(given["q"].dtype), lse.float()


def wrong(**given):
    out, lse = right(**given)
    out[2, 1, 3] += 1
    return out, lse


def nan(**given):
    out, lse = right(**given)
    out[2, 1, 3] = float("nan")
    return out, lse


def unserved(**given):
    raise NotImplementedError("only heads of 128")


def dies(**given):
    os._exit(9)


def tells(**given):
    # the process that runs it is known by a variable, and the inputs by a value
    with open(os.environ["ASSAY_TEST_LOG"], "a") as log:
        log.write(f"{os.getpid()} {float(given['q'][0, 0, 0])}\\n")
    return right(**given)
"""
CASE = attention_case()


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return path


def failure(
    folder: Path, spec: str, case: Case = CASE, *, contract: Contract | None = None, apart: bool = False
) -> Path:
    """The capsule of a kernel that failed, or else of one that did not, which a capsule need not know."""
    operation = operation_of(case)
    if apart:
        with isolated(operation, spec, CPU, timeout=60) as worker:
            record = worker.run_case(case)
    else:
        record = run_case(operation, find_kernels(operation, spec)[0], case, CPU)
    return write_capsule(folder, record, operation, CPU, Origin(kernel=spec, seed=0, tier="smoke"), contract)


def replay(path: Path, kernel: str | None = None, *, apart: bool = False) -> tuple[int, str]:
    """Exit code and report; ``apart`` as the command line does it, which takes seconds."""
    stream = io.StringIO()
    console = Console(file=stream, width=300, color_system=None)
    return run_replay(path, kernel, "cpu", console, in_process=not apart), stream.getvalue()


def test_a_kernel_that_still_fails_so_is_said_to(kernels: Path, tmp_path: Path) -> None:
    path = failure(tmp_path, f"{kernels}:wrong", apart=True)
    code, text = replay(path, apart=True)
    assert code == 1
    assert replay(path) == (code, text)
    lines = text.splitlines()
    assert lines[0].startswith(f"{CASE.id}: {kernels}:wrong failed on cpu with NUMERIC (G4 envelope: ")
    assert lines[1] == f"NUMERIC  wrong  {CASE.id}"
    assert "request 0, token 2, head 1, dim 3" in lines[3]
    assert lines[-2:] == [f"  assay replay {path} --device cpu", "  as recorded"]


def test_a_mended_kernel_passes(kernels: Path, tmp_path: Path) -> None:
    code, text = replay(failure(tmp_path, f"{kernels}:wrong"), f"{kernels}:right")
    assert code == 0
    assert text.splitlines()[-1] == f"PASS  right  {CASE.id}: passes now"


def test_another_failure_is_not_the_recorded_one(kernels: Path, tmp_path: Path) -> None:
    path = failure(tmp_path, f"{kernels}:wrong")
    code, text = replay(path, f"{kernels}:nan")
    assert code == 1
    assert f"NONFINITE  nan  {CASE.id}" in text
    assert "not the recorded failure, which was NUMERIC (G4 envelope: " in text
    assert f"assay replay {path} --kernel {kernels}:nan --device cpu" in text


def test_a_kernel_that_ends_its_process_does_not_end_the_replay(kernels: Path, tmp_path: Path) -> None:
    code, text = replay(failure(tmp_path, f"{kernels}:dies", apart=True), apart=True)
    assert code == 1
    assert "failed on cpu with CRASH (the kernel's process ended: exit code 9)" in text
    assert text.splitlines()[-1] == "  as recorded"


def test_all_kernels_of_a_pattern_are_judged(kernels: Path, tmp_path: Path) -> None:
    code, text = replay(failure(tmp_path, f"{kernels}:wrong"), "attention[t*]")
    assert code == 0
    assert [line.split()[1] for line in text.splitlines()[1:]] == ["attention[torch]", "attention[triton]"]


def test_a_kernel_that_does_not_serve_the_case_is_not_judged(kernels: Path, tmp_path: Path) -> None:
    code, text = replay(failure(tmp_path, f"{kernels}:wrong"), f"{kernels}:unserved")
    assert (code, text.splitlines()[-1]) == (3, "UNSUPPORTED  unserved: only heads of 128")


def test_a_case_for_a_device_is_not_even_drawn_without_one(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(op=CASE.op, family=CASE.family, dtype=CASE.dtype, seed=0, sizes=CASE.sizes, needs_device=True)
    path = failure(tmp_path, f"{kernels}:wrong", case)
    monkeypatch.setattr("assay.harness.operations.attention.Attention.inputs", None)
    code, text = replay(path)
    assert code == 3
    assert text.splitlines()[-1] == "UNSUPPORTED  wrong: too large for a CPU, needs a device"


def test_a_kernel_whose_library_is_not_here_is_not_judged(tmp_path: Path) -> None:
    path = failure(tmp_path, "attention[torch]")
    content = json.loads(path.read_text()) | {"kernel": "attention[fa9]"}
    path.write_text(json.dumps(content))
    code, text = replay(path)
    assert code == 3
    assert "got 'attention[fa9]'" in text
    # asked for by name it is a mistake of the user
    with pytest.raises(UsageError, match=r"got 'attention\[fa9\]'"):
        replay(path, "attention[fa9]")


def test_what_cannot_be_read_or_found_is_a_usage_error(kernels: Path, tmp_path: Path) -> None:
    path = failure(tmp_path, f"{kernels}:wrong")
    with pytest.raises(UsageError, match="must be a readable JSON file"):
        replay(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match=r"must name a function of .*, got 'nobody'"):
        replay(path, f"{kernels}:nobody")
    with pytest.raises(UsageError, match="--device must be"):
        run_replay(path, None, "tpu", Console(file=io.StringIO()))
    kernels.unlink()
    with pytest.raises(UsageError, match="must name an existing file"):
        replay(path)
    content = json.loads(path.read_text())
    case = {name: value for name, value in content["case"].items() if name != "id"} | {"op": "conv"}
    path.write_text(json.dumps(content | {"case": case}))
    with pytest.raises(UsageError, match=r"an operation must be one of .*, got 'conv'"):
        replay(path)


def test_other_versions_and_another_contract_are_said(tmp_path: Path) -> None:
    path = failure(tmp_path, "attention[torch]", contract=Contract(p="fp32", out="fp32", l="from_p"))
    content = json.loads(path.read_text())
    assert replay(path)[1].splitlines()[1:] == [
        "attention[torch] declares another contract now: l from_p -> exact, capturable False -> True",
        f"PASS  attention[torch]  {CASE.id}: passes now",
    ]
    content["versions"] |= {"torch": "1.0", "triton": None}
    path.write_text(json.dumps(content))
    assert replay(path)[1].splitlines()[1].startswith("other versions than recorded: torch 1.0 -> 2")


class Redrawn:
    """An operation that draws other inputs than it did."""

    def __init__(self) -> None:
        self._operation = operation_of(CASE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        inputs = self._operation.inputs(case, device)
        inputs.arguments["q"] += 1
        return inputs


def test_stored_inputs_are_used_where_others_are_drawn(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("ASSAY_TEST_LOG", str(log))
    path = failure(tmp_path, f"{kernels}:tells", apart=True)
    first = log.read_text().splitlines()
    log.unlink()
    assert replay(path, apart=True)[0] == 0
    elsewhere = log.read_text().splitlines()
    log.unlink()
    monkeypatch.setattr(replay_command, "load_operation", lambda name: Redrawn())
    code, text = replay(path, apart=True)
    here = log.read_text().splitlines()
    assert code == 0
    assert "inputs differ on this machine: using the stored tensors" in text
    values = [{line.split()[1] for line in lines[:1]} for lines in (first, elsewhere, here)]
    assert values[0] == values[1] == values[2]
    # only this process has the stored inputs; otherwise a stranger's kernel has its own
    processes = [{line.split()[0] for line in lines} for lines in (first, elsewhere, here)]
    assert all(len(process) == 1 for process in processes)
    assert len(set.union(*processes)) == 3
    assert processes[2] == {str(os.getpid())}


def test_other_inputs_without_stored_ones_are_a_usage_error(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capsule_module, "STORED_BYTES", 0)
    path = failure(tmp_path, f"{kernels}:wrong")
    assert replay(path)[0] == 1
    monkeypatch.setattr(replay_command, "load_operation", lambda name: Redrawn())
    with pytest.raises(UsageError, match="inputs differ on this machine, and the capsule stores none"):
        replay(path)


def test_a_fault_of_the_judge_is_not_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mla_case()
    path = failure(tmp_path, "mla_prefill[torch]", case)
    monkeypatch.setattr("assay.harness.operations.mla_prefill.MlaPrefill.rows", None)
    code, text = replay(path)
    assert code == 7
    assert "HARNESS_ERROR  mla_prefill[torch]" in text
