"""docs/your-kernel.md says what happens: its files are written, its commands run, its failure is the one it shows."""

import json
import re
import shlex
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import assay.harness.session
import assay.reference.attention  # noqa: F401  # before pytester, which forgets what its tests import first
from assay.harness import cli
from assay.harness.contract import Contract
from assay.harness.conventions import CHOICES, Conventions
from assay.harness.pytest_plugin import MARKER_ARGUMENTS
from assay.harness.record import Verdict
from assay.harness.waivers import load_waivers

pytest_plugins = ["pytester"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "your-kernel.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(PAGE.read_text()) if kind == language]


def named_files() -> dict[str, str]:
    """The blocks whose first line is a comment with a file name."""
    found = {}
    for kind in ("python", "toml", "yaml"):
        for text in blocks(kind):
            name = re.match(r"# (\S+)\n", text)
            assert name is not None, f"a block of {kind} begins with its file name, got {text.splitlines()[0]}"
            found[name[1]] = text
    return found


def commands(program: str) -> list[list[str]]:
    lines = [line for text in blocks("bash") for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, as a reader would write them, and the reader in their folder."""
    for name, text in named_files().items():
        if not name.startswith("."):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "console", Console(width=200))
    return tmp_path


def assay_command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def test_the_page_has_its_files_and_commands() -> None:
    assert set(named_files()) == {
        "my_attention.py", "my_mla_prefill.py", "my_scores.py", "my_declared.py", "my_engine.py", "test_my_kernels.py",
        "waivers.toml", "pyproject.toml", ".github/workflows/kernels.yml",
    }  # fmt: skip
    assert [command[0] for command in commands("assay")] == ["list", *["check"] * 7, "report"]


@pytest.mark.parametrize("at", range(5))
def test_every_kernel_of_the_page_passes_by_the_command_below_it(at: int, folder: Path) -> None:
    check = [command for command in commands("assay") if command[0] == "check" and "--shard" not in command][at]
    result = assay_command(*check, "--device", "cpu", "--out", "run")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()[1:]]
    # float32, float16 and bfloat16, and nothing skipped
    assert {record["case"]["dtype"] for record in records} == {"float32", "float16", "bfloat16"}
    assert {record["verdict"] for record in records} == {"PASS"}


def test_the_broken_line_fails_as_the_page_shows(folder: Path) -> None:
    right = (folder / "my_mla_prefill.py").read_text()
    broken = right.replace(".triu(context - n + 1)", ".triu(context - n + 2)")
    assert broken != right
    assert ".triu(context - n + 2)" in PAGE.read_text()
    (folder / "my_mla_prefill.py").write_text(broken)
    shown = blocks("text")[0].splitlines()
    options = ["--device", "cpu", "--family", "peaked", "--dtype", "bfloat16"]
    result = assay_command("check", "mla_prefill", "--kernel", "my_mla_prefill.py:prefill", *options, "--out", "run")
    assert result.exit_code == 1, result.output
    (record,) = [json.loads(line) for line in (folder / "run" / "records.jsonl").read_text().splitlines()[1:]]
    assert record["verdict"] == "NUMERIC"
    assert shown[0] == f"NUMERIC  prefill  {record['case']['id']}"
    place = (
        r"  G\d .* its limit: request \d+, token \d+, head \d+, dim \d+, position \d+ -> slot \d+, got .*, must be .*"
    )
    assert re.fullmatch(place, shown[2])
    printed = result.output.splitlines()
    assert any(re.fullmatch(place, line.rstrip()) for line in printed)
    assert any(line.startswith(shown[3].removesuffix("...").rstrip()) for line in printed)


def test_the_parts_of_the_page_are_merged_into_the_whole(folder: Path) -> None:
    *parts, merge = commands("assay")[-3:]
    for part in parts:
        assert "--shard" in part
        result = assay_command(*part, "--device", "cpu", "--family", "exact-one-hot", "--in-process")
        assert result.exit_code == 0, result.output
    result = assay_command(*merge)
    assert result.exit_code == 0, result.output
    header, *records = [
        json.loads(line) for line in (folder / "runs" / "all" / "records.jsonl").read_text().splitlines()
    ]
    assert header["run"]["cases"] == len(records) == 4
    assert {record["case"]["dtype"] for record in records} == {"float32", "float16", "bfloat16"}


def test_the_tests_of_the_page_pass(pytester: pytest.Pytester) -> None:
    for name, text in named_files().items():
        if name.endswith(".py"):
            (pytester.path / name).write_text(text)
    # an installed distribution may bring the plugin already
    installed = any(point.value == "assay.harness.pytest_plugin" for point in entry_points(group="pytest11"))
    (arguments,) = commands("pytest")
    plugin = [] if installed else ["-p", "assay.harness.pytest_plugin"]
    result = pytester.runpytest_inprocess(*plugin, *arguments)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["mla_prefill  engine: * PASS (seed 0, *"])


def test_the_waiver_of_the_page_is_read(folder: Path) -> None:
    (waiver,) = load_waivers(folder / "waivers.toml")
    assert (waiver.kernel, waiver.verdict) == ("acme.*", Verdict.NUMERIC)


def test_the_entry_points_of_the_page_are_the_groups_that_are_read() -> None:
    groups = tomllib.loads(named_files()["pyproject.toml"])["project"]["entry-points"]
    assert set(groups) == {"assay.kernels", "assay.cases", "assay.operations"}


def rows_of_table(heading: str) -> list[str]:
    """First cells of the table below a header."""
    lines = PAGE.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} "))
    cells = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append(line.split("|")[1].strip())
    return [cell for cell in cells if cell]


def test_the_tables_name_what_exists() -> None:
    assert {cell.strip("`") for cell in rows_of_table("field")} == set(Conventions.__dataclass_fields__)
    verdicts = {name.strip("` ") for cell in rows_of_table("verdict") for name in cell.split(",")}
    assert verdicts <= {verdict.value for verdict in Verdict}
    options = {cell.strip("`").split()[0] for cell in rows_of_table("option of pytest")}
    assert options == {f"--assay-{name}" for name in ("seed", "replay", "kernels", "strict-skips", "waivers")}
    assert set(CHOICES["cache"]) == {"slots", "blocks", "indptr"}
    assert {"l", "p", "deterministic"} <= set(Contract.__dataclass_fields__)
    assert {"op", "tier", "dtypes"} <= set(MARKER_ARGUMENTS)


def test_the_workflow_runs_commands_that_exist() -> None:
    workflow = named_files()[".github/workflows/kernels.yml"]
    assert "assay check attention --kernel acme.attend --tier full --device cuda --out results" in workflow
    assert "pytest --assay-waivers waivers.toml --junitxml report.xml" in workflow
