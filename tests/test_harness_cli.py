"""The command line: exit codes, selections, a stranger's kernel, and records that survive an interrupt."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from builders import attention_case
from rich.console import Console
from typer.testing import CliRunner

from assay.harness import cli, operations
from assay.harness.case import plan_digest
from assay.harness.operation import CaseRequest

STRANGERS = """
import os
import sys
import torch
from assay.reference.attention import attention
from assay.reference.mla_prefill import mla_prefill

def widened(given):
    return {n: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in given.items()}

def right(**given):
    out, lse = attention(**widened(given))
    return out.to(given["q"].dtype), lse.float()

def wrong(**given):
    out, lse = right(**given)
    out[0] += 1.0
    return out, lse

def elsewhere(**given):
    raise NotImplementedError("serves heads of 128 only")

def interrupted(**given):
    if len(given["q"]) != INTERRUPTED:
        return right(**given)
    raise KeyboardInterrupt

def dying(**given):
    print("last words", flush=True)
    os._exit(0)

def lacking(q, k, v):
    return None

def wrong_latent(q, kv_c, k_pe, kv_b_proj, softmax_scale, cu_seqlens, slot_table, request_rows, context_lens):
    given = dict(locals())
    out, lse = mla_prefill(**widened(given))
    out[5, 1, 3] += 1.0
    return out.to(q.dtype), lse.float()
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A file of strangers' kernels."""
    (tmp_path / "strangers.py").write_text(STRANGERS)
    return tmp_path / "strangers.py"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "console", Console(width=300))
    monkeypatch.setattr(cli, "errors", Console(width=300, stderr=True))


def assay(*arguments: object) -> Any:
    """Run the command in this process."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def check(*arguments: object) -> Any:
    """Judge on the CPU, and in this process, which is quicker than starting another."""
    return assay("check", "--device", "cpu", "--in-process", *arguments)


def records_of(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return header["run"], records


def test_a_right_kernel_exits_with_zero_and_leaves_records(kernels: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = check(
        "attention",
        "--kernel",
        f"{kernels}:right",
        "--family",
        "peaked",
        "--dtype",
        "float32",
        "--seed",
        5,
        "--out",
        out,
    )
    assert result.exit_code == 0, result.stdout
    header, records = records_of(out)
    cases = operations.load("attention").cases(CaseRequest(tier="smoke", seed=5, dtypes=("float32",)))
    wanted = [case for case in cases if case.family == "peaked"]
    assert [record["case"]["id"] for record in records] == [case.id for case in wanted]
    assert {record["verdict"] for record in records} == {"PASS"}
    assert (header["seed"], header["plan"], header["cases"]) == (5, plan_digest(wanted), len(wanted))
    assert header["versions"]["torch"]
    assert f"seed 5, {len(wanted)} cases, plan {plan_digest(wanted)}" in result.stdout


def test_the_twins_of_the_house_pass() -> None:
    result = check("--kernel", "torch", "--family", "exact-one-hot", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stdout
    assert "attention[torch]" in result.stdout
    assert "mla_prefill[torch]" in result.stdout


def test_a_wrong_kernel_exits_with_one_and_can_be_judged_again_by_the_printed_command(kernels: Path) -> None:
    result = check("attention", "--kernel", f"{kernels}:wrong", "--family", "diffuse", "--dtype", "float32")
    assert result.exit_code == 1
    assert "NUMERIC  wrong  attention-diffuse-float32-" in result.stdout
    (command,) = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("assay check")][:1]
    again = assay(*shlex.split(command)[1:])
    assert again.exit_code == 1
    assert "seed 0, 1 cases" in again.stdout


def test_a_failure_shows_its_place_down_to_the_slot(kernels: Path, tmp_path: Path) -> None:
    result = check(
        "mla_prefill",
        "--kernel",
        f"{kernels}:wrong_latent",
        "--family",
        "peaked",
        "--dtype",
        "float32",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 1
    _, (record,) = records_of(tmp_path)
    (failed,) = [gate for gate in record["gates"] if gate["gate"] == "G4 envelope"]
    where = failed["where"]
    assert (where["token"], where["head"], where["dim"]) == (5, 1, 3)
    place = f"request {where['request']}, token 5, head 1, dim 3, position {where['position']} -> slot {where['slot']}"
    assert place in result.stdout


def test_fail_fast_stops_at_the_first_failure(kernels: Path, tmp_path: Path) -> None:
    counts = {}
    for flags in ((), ("--fail-fast",)):
        result = check(
            "attention",
            "--kernel",
            f"{kernels}:wrong",
            "--dtype",
            "float32",
            "--family",
            "peaked",
            "--out",
            tmp_path,
            *flags,
        )
        assert result.exit_code == 1
        counts[flags] = len(records_of(tmp_path)[1])
    assert counts == {(): 2, ("--fail-fast",): 1}


def test_nothing_judged_exits_with_three(kernels: Path) -> None:
    result = check("attention", "--kernel", f"{kernels}:elsewhere", "--family", "diffuse")
    assert result.exit_code == 3
    assert "serves heads of 128 only" in result.stdout


def test_a_run_out_of_time_exits_with_six(kernels: Path) -> None:
    result = check("attention", "--kernel", f"{kernels}:right", "--family", "diffuse", "--max-seconds", 0)
    assert result.exit_code == 6
    assert "not started" in result.stdout


def test_an_interrupt_exits_with_130_and_leaves_whole_records(kernels: Path, tmp_path: Path) -> None:
    cases = operations.load("attention").cases(CaseRequest(tier="smoke", seed=0, dtypes=("float32",)))
    # the third case is interrupted
    kernels.write_text(STRANGERS.replace("INTERRUPTED", str(sum(cases[2].sizes["query_lens"]))))
    result = check("attention", "--kernel", f"{kernels}:interrupted", "--dtype", "float32", "--out", tmp_path)
    assert result.exit_code == 130
    assert "the records written so far are complete" in result.stderr
    header, records = records_of(tmp_path)
    assert header["cases"] == len(cases)
    assert [record["case"]["id"] for record in records] == [case.id for case in cases[:2]]


def test_a_stranger_runs_in_a_process_of_its_own_and_may_die_there(kernels: Path, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--family", "exact-uniform", "--dtype", "float32", "--out", tmp_path]
    result = assay("check", "attention", "--kernel", f"{kernels}:right", *arguments)
    assert (result.exit_code, records_of(tmp_path)[1][0]["verdict"]) == (0, "PASS")
    result = assay("check", "attention", "--kernel", f"{kernels}:dying", *arguments)
    assert (result.exit_code, records_of(tmp_path)[1][0]["verdict"]) == (1, "CRASH")
    assert "the kernel's process ended: exit code 0" in result.stdout


def test_a_kernel_file_that_exits_does_not_end_the_run_well(kernels: Path) -> None:
    kernels.write_text(STRANGERS + "sys.exit(0)\n")
    assert check("attention", "--kernel", f"{kernels}:right", "--family", "exact-uniform").exit_code == 2


USAGE = {
    "operation": (
        ["conv"],
        f"an operation must be one of {', '.join(operations.NAMES)}, got 'conv'",
    ),
    "tier": (["--tier", "weekly"], "--tier must be one of smoke, full, nightly, got 'weekly'"),
    "dtype": (["--dtype", "float64"], "--dtype must be one of float32, float16, bfloat16, got 'float64'"),
    "device": (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
    "family": (["--family", "gaussian"], "--family must be one of"),
    "case": (["--case", "zzz"], "--case must be the id of a case of tier smoke and seed 0, got 'zzz'"),
    "shapes": (["--shapes", "nowhere.toml"], "--shapes must be a TOML file, got nowhere.toml"),
    "kernel": (["attention", "--kernel", "cudnn"], "--kernel must be module:function"),
    "module": (["attention", "--kernel", "no_such:f"], "--kernel must name an importable module, got 'no_such'"),
    "two operations": (["--kernel", "a.py:f"], "a kernel of yours needs exactly one operation"),
    "geometry": (["mla_prefill", "--geometry", "64/32"], "--geometry must be R/Dn/Dr/Dv for mla_prefill, got '64/32'"),
    "letters": (["attention", "--geometry", "a/b"], "--geometry must be Dq/Dv for attention, got 'a/b'"),
    "zero": (["attention", "--geometry", "0/8"], "--geometry must have positive sizes"),
    "two geometries": (["--geometry", "64/32/16/24"], "--geometry must be Dq/Dv for attention"),
}


@pytest.mark.parametrize("which", USAGE)
def test_options_that_cannot_be_served_exit_with_two(which: str) -> None:
    arguments, text = USAGE[which]
    result = assay("check", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("", "lacks softmax_scale, causal, cu_seqlens_q, cu_seqlens_k"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_kernel_that_lacks_an_argument_or_fails_to_import_is_a_usage_error(
    kernels: Path, more: str, text: str
) -> None:
    kernels.write_text(STRANGERS + more)
    result = assay("check", "attention", "--device", "cpu", "--kernel", f"{kernels}:lacking")
    assert result.exit_code == 2
    assert text in result.stderr


def test_the_plan_is_listed_without_judging() -> None:
    result = check("attention", "--list-cases", "--dtype", "float16")
    cases = operations.load("attention").cases(CaseRequest(tier="smoke", seed=0, dtypes=("float16",)))
    assert result.exit_code == 0
    assert all(case.id in result.stdout for case in cases)
    assert "PASS" not in result.stdout


@pytest.mark.parametrize("end", ["id", "digest"])
def test_one_case_is_judged_by_its_id_or_the_end_of_it(end: str, tmp_path: Path) -> None:
    case = operations.load("mla_prefill").cases(
        CaseRequest(tier="smoke", seed=0, dtypes=("float32", "float16", "bfloat16"))
    )[3]
    result = check("--kernel", "torch", "--case", case.id if end == "id" else case.id[-8:], "--out", tmp_path)
    assert result.exit_code == 0
    assert [record["case"] for record in records_of(tmp_path)[1]] == [case.to_json()]


def test_a_geometry_and_heads_of_ones_own_are_judged(tmp_path: Path) -> None:
    result = check(
        "mla_prefill", "--kernel", "torch", "--geometry", "48/16/0/24", "--heads", 1, "--dtype", "bfloat16",
        "--family", "ramp-v", "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0
    for record in records_of(tmp_path)[1]:
        sizes = record["case"]["sizes"]
        assert [sizes[name] for name in ("kv_lora_rank", "d_nope", "d_rope", "d_v", "num_heads")] == [48, 16, 0, 24, 1]


def test_shapes_of_ones_own_are_judged(kernels: Path, tmp_path: Path) -> None:
    shapes = {**attention_case().sizes, "op": "attention", "family": "peaked"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in shapes.items()]
    (tmp_path / "shapes.toml").write_text("\n".join(["[[case]]", *lines]))
    result = check(
        "attention", "--kernel", f"{kernels}:right", "--shapes", tmp_path / "shapes.toml", "--dtype", "float16",
        "--seed", 4, "--out", tmp_path,
    )  # fmt: skip
    assert result.exit_code == 0
    (record,) = records_of(tmp_path)[1]
    assert record["case"] == attention_case("peaked", "float16", seed=4).to_json()


def test_the_operations_are_listed_with_their_arguments() -> None:
    result = assay("list")
    assert result.exit_code == 0
    for text in ("attention", "mla_prefill", "[history_chunk_size]", "mla_prefill[torch]"):
        assert text in result.stdout
