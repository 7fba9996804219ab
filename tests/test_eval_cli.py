"""The commands behind ``assay eval``: what they say, their exit codes, and what they import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from eval_models import SUITE
from eval_runs import answer, suite_of, write_run
from typer.testing import CliRunner

from assay.eval import capture, cli

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


def test_without_a_command_the_commands_are_shown() -> None:
    result = RUNNER.invoke(cli.app, [])
    for name in ("run", "compare", "score", "suites", "tasks", "capture"):
        assert name in result.output


def test_a_suite_runs_and_compares_from_the_command_line(tmp_path: Path) -> None:
    suite = tmp_path / "tiny.toml"
    suite.write_text(SUITE.format(asking="max_new_tokens = 3").replace("margin = 0.1", "margin = 0.3"))
    for name, order in (("old", "6"), ("again", "6"), ("new", "1")):
        arguments = [
            "run",
            str(suite),
            "--out",
            str(tmp_path / name),
            "-o",
            f"order={order}",
            "--factor",
            f"order={order}",
        ]
        result = RUNNER.invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        assert "18 samples in 8 batches" in result.output
    same = RUNNER.invoke(cli.app, ["compare", str(tmp_path / "old"), str(tmp_path / "again")])
    assert (same.exit_code, same.output.splitlines()[-1]) == (0, "EQUIVALENT")
    arguments = ["compare", str(tmp_path / "old"), str(tmp_path / "new"), "--aa", str(tmp_path / "again")]
    worse = RUNNER.invoke(cli.app, [*arguments, "--out", str(tmp_path / "out")])
    assert worse.exit_code == 1, worse.output
    assert "REGRESSED" in worse.output
    assert "new against old (order: 6 → 1)" in worse.output
    assert {"report.md", "report.json", "junit.xml", "flips.jsonl"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    scored = RUNNER.invoke(cli.app, ["score", str(tmp_path / "old"), "--scorer", "qa_f1"])
    assert scored.exit_code == 0, scored.output
    assert "synthetic_qasper" in scored.output
    assert (tmp_path / "old" / "scores" / "synthetic_qasper.qa_f1.jsonl").is_file()


def test_runs_that_do_not_compare_exit_with_3_and_a_list(tmp_path: Path) -> None:
    for name, margin in (("old", 1.0), ("new", 2.0)):
        write_run(tmp_path / name, [answer("gsm8k_cot", 0)], suite=suite_of(score=margin))
    result = RUNNER.invoke(cli.app, ["compare", str(tmp_path / "old"), str(tmp_path / "new")])
    assert result.exit_code == 3
    assert "old and new: suite.gates[0].margin: 1.0 against 2.0" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "smok"], "run: a suite must be one of"),
        (["run", "smoke", "-o", "order"], "--option must be name=value, each name once, got 'order'"),
        (["run", "smoke", "-o", "order=2", "-o", "order=3"], "each name once, got 'order=3'"),
        (["run", "smoke", "--model", "gpt"], "a model must be one of"),
        (
            ["compare", "nowhere", "neither"],
            "compare: a run must be a folder with manifest.json, got nothing at nowhere",
        ),
        (["score", "nowhere"], "score: a run must be a folder"),
    ],
)
def test_what_cannot_be_served_exits_with_2(arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_suites_and_tasks_are_listed() -> None:
    suites = RUNNER.invoke(cli.app, ["suites"])
    assert suites.exit_code == 0
    assert "score: a loss of 0.5 is accepted" in suites.output
    tasks = RUNNER.invoke(cli.app, ["tasks"]).output.splitlines()
    assert len(tasks) == 21 + 13 + 2 + 21 + 4
    assert any(line.split()[:3] == ["qasper", "longbench", "qa_f1"] for line in tasks)


def test_help_needs_neither_torch_nor_transformers() -> None:
    result = run_python(
        "import sys; from assay.eval import cli; from typer.testing import CliRunner; "
        "codes = [CliRunner().invoke(cli.app, [*command, '--help']).exit_code "
        "for command in ([], ['capture'], ['run'], ['compare'])]; "
        "print(codes, [name for name in ('torch', 'transformers', 'datasets', 'scipy') if name in sys.modules])"
    )
    assert result.stdout.strip() == "[0, 0, 0, 0] []", result.stderr


def test_capture_module_is_a_command() -> None:
    command = [sys.executable, "-m", "assay.eval.capture", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "activations of a model converted to latent attention" in " ".join(result.stdout.split())


COMMAND = typer.Typer(add_completion=False)
COMMAND.command()(capture.command)


def test_capture_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(capture, "capture_file", seen.update)
    monkeypatch.setattr(capture, "gsm8k_text", lambda path: f"questions of {path.name}")
    paths = ["--model", str(files["model"]), "--out", str(files["out"])]
    result = RUNNER.invoke(COMMAND, [*paths, *SOURCES, "--text", str(files["text"]), "--tokens", "7"])
    assert result.exit_code == 0, result.output
    assert (seen["text"], seen["tokens"], seen["rope_frequencies"]) == ("naïve text", 7, 16)
    assert (seen["model"], seen["out"]) == (files["model"], files["out"])
    assert (seen["model_source"], seen["text_source"]) == ("tiny", "this test")
    result = RUNNER.invoke(COMMAND, [*paths, *SOURCES, "--gsm8k", str(files["text"])])
    assert (result.exit_code, seen["text"], seen["tokens"]) == (0, "questions of text.txt", 384)


@pytest.mark.parametrize("both", [True, False])
def test_capture_wants_exactly_one_text(files: dict[str, Path], both: bool) -> None:
    texts = ["--text", str(files["text"]), "--gsm8k", str(files["text"])] if both else []
    paths = ["--model", str(files["model"]), "--out", str(files["out"])]
    result = RUNNER.invoke(COMMAND, [*paths, *SOURCES, *texts])
    assert result.exit_code == 2
    assert "exactly one of --gsm8k and --text must be given" in result.stderr


def test_capture_wants_a_source_for_model_and_text(files: dict[str, Path]) -> None:
    paths = ["--model", str(files["model"]), "--out", str(files["out"]), "--text", str(files["text"])]
    result = RUNNER.invoke(COMMAND, [*paths, "--model-source", "tiny"])
    assert result.exit_code == 2
    assert "--text-source" in result.stderr


def test_capture_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    paths = ["--model", str(files["model"]), "--out", str(files["out"]), "--text", str(files["text"])]
    result = RUNNER.invoke(COMMAND, [*paths, *SOURCES])
    assert result.exit_code == 2
    assert "pip install 'kernel-assay[model]'" in result.stderr
    assert not files["out"].exists()
