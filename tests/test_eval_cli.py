"""The commands behind ``assay eval``: what they say, their exit codes, and what they import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import assay.eval
from assay.eval import capture, cli

ROOM = Path(assay.eval.__file__).parent
# plain text whatever the terminal: no colour, no wrapped option names
RUNNER = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"})
SOURCES = ["--model-source", "tiny", "--text-source", "this test"]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A stand-in for the weights, a text, and the place of the result."""
    (tmp_path / "model.gguf").write_bytes(b"weights")
    (tmp_path / "text.txt").write_text("naïve text", encoding="utf-8")
    return {"model": tmp_path / "model.gguf", "text": tmp_path / "text.txt", "out": tmp_path / "out.safetensors"}


@pytest.mark.parametrize("arguments", [[], ["status"]])
def test_status_names_every_part_truthfully_and_exits_with_3_while_one_is_missing(arguments: list[str]) -> None:
    result = RUNNER.invoke(cli.app, arguments)
    missing = [part for part in cli.PARTS if not ((ROOM / f"{part}.py").exists() or (ROOM / part).is_dir())]
    assert {"tasks", "runner", "compare", "statistics", "report"} <= cli.PARTS.keys()
    for part in cli.PARTS:
        line = next(line for line in result.stdout.splitlines() if line.startswith(f"{part} "))
        assert ("does not exist yet" in line) == (part in missing)
    assert result.exit_code == (3 if missing else 0)
    assert (f"{', '.join(missing)} do not exist" in result.stderr) == bool(missing)


def test_status_exits_with_0_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "PARTS", {"capture": "real inputs"})
    result = RUNNER.invoke(cli.app, ["status"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_folder_that_is_no_package_does_not_count_as_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "leftover").mkdir()
    monkeypatch.setattr(assay.eval, "__path__", [str(ROOM), str(tmp_path)])
    monkeypatch.setattr(cli, "PARTS", {"capture": "real inputs", "leftover": "nothing"})
    assert cli.missing_parts() == ["leftover"]


def test_help_needs_neither_torch_nor_transformers() -> None:
    result = run_python(
        "import sys; from assay.eval import cli; from typer.testing import CliRunner; "
        "codes = [CliRunner().invoke(cli.app, [*command, '--help']).exit_code for command in ([], ['capture'])]; "
        "print(codes, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    assert result.stdout.strip() == "[0, 0] []", result.stderr


def test_capture_module_is_a_command() -> None:
    command = [sys.executable, "-m", "assay.eval.capture", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "activations of a model converted to latent attention" in " ".join(result.stdout.split())


def test_capture_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(capture, "capture_file", seen.update)
    monkeypatch.setattr(capture, "gsm8k_text", lambda path: f"questions of {path.name}")
    paths = ["--model", str(files["model"]), "--out", str(files["out"])]
    result = RUNNER.invoke(cli.app, ["capture", *paths, *SOURCES, "--text", str(files["text"]), "--tokens", "7"])
    assert result.exit_code == 0, result.output
    assert (seen["text"], seen["tokens"], seen["rope_frequencies"]) == ("naïve text", 7, 16)
    assert (seen["model"], seen["out"]) == (files["model"], files["out"])
    assert (seen["model_source"], seen["text_source"]) == ("tiny", "this test")
    result = RUNNER.invoke(cli.app, ["capture", *paths, *SOURCES, "--gsm8k", str(files["text"])])
    assert (result.exit_code, seen["text"], seen["tokens"]) == (0, "questions of text.txt", 384)


@pytest.mark.parametrize("both", [True, False])
def test_capture_wants_exactly_one_text(files: dict[str, Path], both: bool) -> None:
    texts = ["--text", str(files["text"]), "--gsm8k", str(files["text"])] if both else []
    paths = ["--model", str(files["model"]), "--out", str(files["out"])]
    result = RUNNER.invoke(cli.app, ["capture", *paths, *SOURCES, *texts])
    assert result.exit_code == 2
    assert "exactly one of --gsm8k and --text must be given" in result.stderr


def test_capture_wants_a_source_for_model_and_text(files: dict[str, Path]) -> None:
    paths = ["--model", str(files["model"]), "--out", str(files["out"]), "--text", str(files["text"])]
    result = RUNNER.invoke(cli.app, ["capture", *paths, "--model-source", "tiny"])
    assert result.exit_code == 2
    assert "--text-source" in result.stderr


def test_capture_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    paths = ["--model", str(files["model"]), "--out", str(files["out"]), "--text", str(files["text"])]
    result = RUNNER.invoke(cli.app, ["capture", *paths, *SOURCES])
    assert result.exit_code == 2
    assert "pip install 'kernel-assay[model]'" in result.stderr
    assert not files["out"].exists()
