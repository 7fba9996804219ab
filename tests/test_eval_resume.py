"""A run goes on after any end: killed, interrupted, failed or finished; and never with other settings."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eval_models import SUITE, DigestModel, ask_suite, samples, scores

from assay.eval.exit_code import ExitCode
from assay.eval.run_folder import RunFolder, RunFolderError

MODELS = Path(__file__).parent / "eval_models.py"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(asking=""))
    return path


@pytest.fixture
def ask(tmp_path: Path, suite: Path) -> Callable[..., tuple[int, str, DigestModel]]:
    """Runs the suite with a model of ours; returns exit code, output and model."""

    def run(out: str = "run", model: DigestModel | None = None, **options: Any) -> tuple[int, str, DigestModel]:
        model = model or DigestModel()
        code, output = ask_suite(options.pop("suite", suite), tmp_path / out, model, **options)
        return code, output, model

    return run


def test_a_finished_run_asks_nothing_more(ask: Any, tmp_path: Path) -> None:
    ask()
    before = scores(tmp_path / "run")
    code, output, model = ask()
    assert (code, model.calls) == (ExitCode.PASSED, [])
    assert "0 samples in 0 batches, 18 of 18 are done" in output
    assert scores(tmp_path / "run") == before


def test_other_settings_are_refused_with_a_list(ask: Any, tmp_path: Path, suite: Path) -> None:
    ask()
    before = scores(tmp_path / "run")
    # another model does not answer for this one: it is not even asked
    code, output, model = ask(model=DigestModel("other"))
    assert (code, model.calls) == (ExitCode.SETTINGS_DIFFER, [])
    assert 'model.name: "digest" against "other"' in output
    assert scores(tmp_path / "run") == before
    code, output, _ = ask(batch_size=2)
    assert code == ExitCode.SETTINGS_DIFFER
    assert "suite.asking.batch_size: 3 against 2" in output
    suite.write_text(SUITE.format(asking="max_target_tokens = 5"))
    assert ask()[0] == ExitCode.SETTINGS_DIFFER


def test_other_code_or_another_name_is_refused(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(factors={"kernel": "old"})
    code, output, _ = ask(factors={"kernel": "new"})
    assert code == ExitCode.SETTINGS_DIFFER
    assert 'factors.kernel: "old" against "new"' in output
    code, output, _ = ask(factors={"kernel": "old"}, label="other")
    assert code == ExitCode.SETTINGS_DIFFER
    assert 'label: "run" against "other"' in output
    # a kernel of the house that was changed meanwhile answers otherwise
    monkeypatch.setattr("assay.eval.manifest._sources", lambda: "changed")
    code, output, _ = ask(factors={"kernel": "old"})
    assert code == ExitCode.SETTINGS_DIFFER
    assert 'against "changed"' in output


def test_only_what_failed_is_asked_again(ask: Any, tmp_path: Path) -> None:
    ask(model=DigestModel(late="Remember them"))
    code, output, model = ask(model=DigestModel())
    assert code == ExitCode.PASSED
    assert "4 samples in 2 batches, 14 of 18 are done" in output
    asked = [prompt for prompt in model.prompts if "Remember them" in prompt]
    assert len(asked) == len(model.prompts) == 4 + 3
    latest = RunFolder(tmp_path / "run").latest("needle")
    assert {(record["status"], record["attempt"]) for record in latest.values()} == {("ok", 2)}


def test_a_second_process_is_kept_out(ask: Any, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").lock(), pytest.raises(RunFolderError, match=rf"got process {os.getpid()}"):
        ask()


def test_an_interrupted_run_keeps_what_was_answered(ask: Any, tmp_path: Path) -> None:
    class Interrupted(DigestModel):
        def generate(self, requests: Any) -> Any:
            if len(self.calls) == 5:
                raise KeyboardInterrupt
            return super().generate(requests)

    code, output, _ = ask(model=Interrupted())
    assert code == ExitCode.INTERRUPTED
    assert "the same command goes on" in output
    assert len({record["batch_id"] for record in samples(tmp_path / "run")}) == 2
    assert ask()[0] == ExitCode.PASSED


def command(suite: Path, out: Path, *options: str) -> list[str]:
    start = [sys.executable, "-m", "assay.eval.cli", "run", str(suite), "--model", f"{MODELS}:load"]
    return [*start, "--out", str(out), *options]


@pytest.mark.parametrize("stop_at", [4, 5, 8])
def test_a_killed_run_goes_on_and_scores_the_same_bytes(suite: Path, tmp_path: Path, stop_at: int) -> None:
    whole, killed, marker = tmp_path / "whole", tmp_path / "killed", tmp_path / "marker"
    subprocess.run(command(suite, whole), check=True, capture_output=True, timeout=120)
    options = ["-o", f"stop_at={stop_at}", "-o", f"marker={marker}"]
    process = subprocess.Popen(command(suite, killed, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not marker.exists():
            assert process.poll() is None, "it must stop in its batch, and ended"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    # three calls are the estimate's; each batch before the one in flight is kept
    assert len({record["batch_id"] for record in samples(killed)}) == stop_at - 4
    result = subprocess.run(command(suite, killed), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert scores(killed) == scores(whole)
    assert len(samples(killed)) == 18


@pytest.mark.parametrize("cut", [1, 20, 400, 1500])
def test_a_torn_file_is_mended_and_scores_the_same_bytes(ask: Any, tmp_path: Path, cut: int) -> None:
    ask("whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    shutil.rmtree(tmp_path / "torn" / "scores")
    file = tmp_path / "torn" / "samples" / "synthetic_qasper.jsonl"
    os.truncate(file, file.stat().st_size - cut)
    code, output, model = ask("torn", label="whole")
    assert code == ExitCode.PASSED
    assert "of an unfinished line were cut off" in output
    assert sum(model.calls) > 3
    assert scores(tmp_path / "torn") == scores(tmp_path / "whole")
    latest = RunFolder(tmp_path / "torn").latest("synthetic_qasper")
    assert {record["status"] for record in latest.values()} == {"ok"}
