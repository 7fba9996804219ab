"""Runs: what is asked, in which order, what is kept, and what is said of what went wrong."""

import io
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from eval_models import SUITE, DigestModel, ask_suite, samples
from rich.console import Console

from assay.eval.exit_code import ExitCode
from assay.eval.models import ModelError
from assay.eval.models.interface import Generated
from assay.eval.plan import PlanError
from assay.eval.run_folder import RunFolder
from assay.eval.runner import RunOptions, run_suite

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


def test_every_sample_is_asked_once_and_kept(ask: Any, tmp_path: Path) -> None:
    code, output, model = ask()
    assert code == ExitCode.PASSED
    records = samples(tmp_path / "run")
    assert len(records) == 18
    assert {record["status"] for record in records} == {"ok"}
    first = records[0]
    assert first["kernel_calls"] == {"digest": 3}
    assert len(first["output_ids"]) == len(first["gaps"]) == len(first["output_text"])
    assert first["gold_tokens"] > 0
    assert len(first["probes"]) == 4
    assert first["attempt"] == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["counts"] == {"ok": 18}
    assert summary["tasks"]["needle"]["parts"] == {"30 words, 50 %": [2, 0.0], "60 words, 50 %": [2, 0.0]}
    assert set(summary["tasks"]["synthetic_trec"]["scores"]) == {"classification", "classification_every_match"}
    assert summary["tasks"]["needle"]["kernel_calls"] == {"digest": 12}
    assert "suite tiny: 18 samples in 8 batches" in output
    assert re.search(r"estimate: about \d+ s, measured on one prompt of \d+ tokens", output)
    # what is measured for the estimate is asked besides
    assert sum(model.calls) == 18 + 3


def test_the_longest_come_first_in_batches_of_one_task(ask: Any, tmp_path: Path) -> None:
    ask()
    records = sorted(samples(tmp_path / "run"), key=lambda one: (one["batch_id"], one["batch_position"]))
    heads = [record["prompt_tokens"] for record in records if record["batch_position"] == 0]
    assert heads == sorted(heads, reverse=True)
    by_batch: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_batch.setdefault(record["batch_id"], []).append(record)
    for members in by_batch.values():
        lengths = [record["prompt_tokens"] for record in members]
        assert lengths == sorted(lengths, reverse=True)
        assert len({record["task"] for record in members}) == 1
        assert len(members) <= 3


def test_two_models_never_share_an_answer(ask: Any, tmp_path: Path) -> None:
    class Shouting(DigestModel):
        def _answer(self, text: str, whole: int) -> Any:
            return Generated(text="LOUD", ids=(1,), finish_reason="stop")

    _, _, first = ask("one")
    _, _, second = ask("two", Shouting("shouting"))
    assert sum(second.calls) == sum(first.calls)
    assert {record["output_text"] for record in samples(tmp_path / "two")} == {"LOUD"}
    assert "LOUD" not in {record["output_text"] for record in samples(tmp_path / "one")}


def test_what_does_not_fit_is_halved_and_said(ask: Any, tmp_path: Path) -> None:
    # 1014 letters, and 128 behind them
    code, output, model = ask(model=DigestModel(fits=2500))
    assert code == ExitCode.PASSED
    text = "3 samples of up to 1142 tokens did not fit into memory: 1713 tokens at once from now on"
    assert output.count("did not fit") == output.count(text) == 1
    records = samples(tmp_path / "run")
    assert len(records) == 18
    assert json.loads((tmp_path / "run" / "status.json").read_text())["most_tokens"] == 1713
    # the batch in which it showed is asked in halves; the long ones behind it are asked alone, short ones are not
    assert [one["batch_size"] for one in records if one["batch_id"] == 0] == [2, 2, 1]
    sizes = {one["batch_id"]: one["batch_size"] for one in records if one["batch_id"]}
    assert sizes == {1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 1, 7: 1}
    assert not model.kept


def test_batches_hold_so_many_tokens(ask: Any, tmp_path: Path) -> None:
    code, _, _ = ask(batch_tokens=2500)
    assert code == ExitCode.PASSED
    records = samples(tmp_path / "run")
    by_batch: dict[int, list[int]] = {}
    for one in records:
        by_batch.setdefault(one["batch_id"], []).append(one["prompt_tokens"])
    sizes = {len(lengths) for lengths in by_batch.values()}
    assert sizes == {1, 2, 3}
    assert all(len(lengths) == 1 or len(lengths) * max(lengths) < 2500 for lengths in by_batch.values())
    code, output, _ = ask(batch_tokens=2501)
    assert code == ExitCode.SETTINGS_DIFFER
    assert "suite.asking.batch_tokens: 2500 against 2501" in output


def test_a_single_sample_that_does_not_fit_is_out_of_memory(ask: Any, tmp_path: Path) -> None:
    code, output, _ = ask(model=DigestModel(fits=0))
    assert code == ExitCode.FAILURES
    assert {record["status"] for record in samples(tmp_path / "run")} == {"oom"}
    assert "no estimate: OutOfMemoryError" in output


def test_failed_late_and_wrong_are_kept_apart(ask: Any, tmp_path: Path) -> None:
    code, output, _ = ask(model=DigestModel(broken="type of the question", late="Remember them"))
    records = samples(tmp_path / "run")
    by_task = {one["task"]: one["status"] for one in records}
    assert by_task == {"synthetic_qasper": "ok", "synthetic_trec": "error", "needle": "timeout"}
    assert code == ExitCode.FAILURES
    assert "needle 30/50/0: timeout: too late" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tasks"]["needle"]["counts"] == {"timeout": 4}
    # nothing was answered, so there is no score: not one of 0
    assert summary["tasks"]["needle"]["scores"] == {}


def test_one_broken_sample_does_not_take_its_batch_along(ask: Any, tmp_path: Path) -> None:
    ask("good")
    victim = RunFolder(tmp_path / "good").items("needle")[1]
    marker = json.loads((tmp_path / "good" / "items" / "needle.jsonl").read_text().splitlines()[1])["answers"][0]
    code, _, _ = ask("bad", DigestModel(broken=f"is {marker}."))
    records = {(record["task"], record["sample_id"]): record for record in samples(tmp_path / "bad")}
    failed = [key for key, record in records.items() if record["status"] != "ok"]
    assert failed == [("needle", victim.id)]
    assert records[failed[0]]["error"] == "ArithmeticError: it broke"
    assert code == ExitCode.FAILURES


def test_a_run_gives_up_when_nothing_answers(ask: Any, tmp_path: Path, suite: Path) -> None:
    suite.write_text(SUITE.format(asking="most_failures = 4"))
    code, output, _ = ask(model=DigestModel(late=" "))
    assert code == ExitCode.FAILURES
    assert "gave up: 4 samples failed in a row" in output
    # the batch in which the fourth failed is kept, and no other was asked
    assert len(samples(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("kernel", "calls", "reason"),
    [
        ("prefill/ours", {"prefill/ours": 30, "decode/other": 9}, None),
        ("prefill/ours", {"prefill/ours": 30, "prefill/eager": 1}, "got prefill/eager 1 times, prefill/ours 30 times"),
        ("prefill/ours", {"prefill/eager": 30}, "got prefill/eager 30 times"),
        ("prefill/ours", {}, "got no call"),
        ("prefill/ours", {"prefill/ours": 0}, "got prefill/ours 0 times"),
    ],
)
def test_a_kernel_that_was_asked_for_must_serve_every_sample(
    ask: Any, tmp_path: Path, kernel: str, calls: dict[str, int], reason: str | None
) -> None:
    class Counting(DigestModel):
        def _answer(self, text: str, whole: int) -> Any:
            return Generated(text="1", ids=(1,), finish_reason="stop", kernel_calls=calls)

        def _score(self, request: Any, whole: int) -> Any:
            return replace(super()._score(request, whole), kernel_calls={})

    code, _, _ = ask(model=Counting(), kernels=(kernel,))
    errors = {record["error"] for record in samples(tmp_path / "run")}
    assert errors == {None if reason is None else f"prefill must be served by prefill/ours alone, {reason}"}
    assert code == (ExitCode.PASSED if reason is None else ExitCode.FAILURES)


def test_a_scorer_without_its_library_stops_the_run_before_it_asks(ask: Any, suite: Path, tmp_path: Path) -> None:
    from assay.eval.scorers import segmentation

    suite.write_text(SUITE.format(asking="").replace('"synthetic_qasper"', '"synthetic_multifieldqa_zh"'))
    segmentation._tokenizer.cache_clear()
    model = DigestModel()
    with mock.patch.dict(sys.modules, {"jieba": None}), pytest.raises(ModuleNotFoundError, match=r"\[chinese\]"):
        ask(model=model)
    assert model.calls == []
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_none_are_failures(ask: Any, tmp_path: Path) -> None:
    class Undefined(DigestModel):
        def _score(self, request: Any, whole: int) -> Any:
            found = super()._score(request, whole)
            return type(found)(prompt=found.prompt, target=(float("nan"), *found.target[1:]))

    code, _, _ = ask(model=Undefined())
    assert code == ExitCode.FAILURES
    record = samples(tmp_path / "run")[0]
    assert record["status"] == "error"
    assert record["error"] == "log-probability of token 0 of the target must be finite, got nan"


def test_a_model_that_loses_answers_is_told(ask: Any, tmp_path: Path) -> None:
    class Forgetful(DigestModel):
        def generate(self, requests: Any) -> Any:
            return super().generate(requests)[1:]

    ask(model=Forgetful())
    assert samples(tmp_path / "run")[0]["error"] == "RuntimeError: the model must answer 1 requests, got 0 answers"


def test_a_prompt_that_is_too_long_is_skipped_and_named(ask: Any, tmp_path: Path) -> None:
    lengths = [item.prompt_tokens for item in _items(ask, tmp_path)]
    limit = sorted(lengths)[9] + 60
    code, output, _ = ask("short", DigestModel(context_length=limit))
    summary = json.loads((tmp_path / "short" / "summary.json").read_text())
    assert summary["counts"]["skipped"] > 0
    assert f"the prompt must fit the model's {limit} tokens" in output
    assert summary["counts"]["ok"] + summary["counts"]["skipped"] == 18
    assert code == ExitCode.PASSED


def _items(ask: Any, tmp_path: Path) -> list[Any]:
    ask("long")
    folder = RunFolder(tmp_path / "long")
    return [item for task in folder.tasks() for item in folder.items(task)]


def test_a_limit_draws_samples_that_another_run_takes_over(ask: Any, tmp_path: Path) -> None:
    def ids(out: str) -> dict[str, list[str]]:
        folder = RunFolder(tmp_path / out)
        return {task: [item.id for item in folder.items(task)] for task in folder.tasks()}

    ask("one", limit=3, seed=5)
    assert {task: len(found) for task, found in ids("one").items()} == {task: 3 for task in ids("one")}
    ask("two", limit=3, seed=5)
    assert ids("two") == ids("one")
    ask("three", limit=3, seed=6)
    assert ids("three") != ids("one")
    ask("four", ids_from=tmp_path / "one")
    assert ids("four") == ids("one")
    # a plan that names a sample twice asks it once
    drawn, folder = ids("one"), RunFolder(tmp_path / "one")
    for task in drawn:
        rows = folder.read_lines(Path("items") / f"{task}.jsonl")
        folder.write_lines(Path("items") / f"{task}.jsonl", [*rows, rows[0]])
    ask("once", ids_from=tmp_path / "one")
    assert ids("once") == drawn
    short = tmp_path / "short.toml"
    short.write_text(SUITE.format(asking="").replace("samples = 7", "samples = 2"))
    with pytest.raises(PlanError, match="must have the samples of the earlier run, got no 'made-"):
        ask("five", ids_from=tmp_path / "one", suite=short)


def test_a_task_without_its_data_is_left_out_and_said(ask: Any, tmp_path: Path, suite: Path) -> None:
    pytest.importorskip("datasets", reason="the extra `eval` is not installed")
    suite.write_text(
        SUITE.format(asking="").replace('"needle"]', '"needle", "gsm8k_cot"]\n').replace("tasks =", "tasks =")
    )
    text = suite.read_text().replace('name = "answers"', 'name = "answers"\ntasks = ["needle"]')
    suite.write_text(text)
    code, output, _ = ask(data=tmp_path)
    assert code == ExitCode.FAILURES
    assert "gsm8k_cot is left out: the data of test must be in one of" in output
    assert len(samples(tmp_path / "run")) == 18
    only = tmp_path / "only.toml"
    only.write_text(
        text.replace('"synthetic_qasper", "synthetic_trec", "needle", ', "").replace('\ntasks = ["needle"]', "")
    )
    with pytest.raises(PlanError, match="must have a sample that can be asked, got none: the data of test"):
        ask("other", suite=only, data=tmp_path)


def test_a_dry_run_writes_nothing(ask: Any, tmp_path: Path) -> None:
    code, output, model = ask(dry_run=True)
    assert (code, sum(model.calls)) == (ExitCode.PASSED, 3)
    assert "18 samples in 8 batches" in output
    assert not (tmp_path / "run").exists()


def test_secrets_of_the_environment_are_nowhere(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-1234567890abcdef"
    monkeypatch.setenv("SOME_API_KEY", secret)
    monkeypatch.setattr(sys, "argv", ["assay", f"--url=http://me:{secret}@host/v1", "http://user:pass@host"])

    class Leaking(DigestModel):
        def describe(self) -> dict[str, Any]:
            return {"name": "leaking", "header": f"Bearer {secret}"}

        def _answer(self, text: str, whole: int) -> Any:
            raise RuntimeError(f"401: the key {secret} is wrong")

    ask(model=Leaking())
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in files)
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    assert "user:pass" not in manifest
    assert "Bearer [redacted]" in manifest
    assert samples(tmp_path / "run")[0]["error"] == "RuntimeError: 401: the key [redacted] is wrong"


def test_progress_is_said_now_and_then_without_a_terminal(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 100_000, 20))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    _, output, _ = ask(model=DigestModel(late="Remember them"))
    assert re.search(r"\d+ of 18, \d failed, \d+ (s|min) left", output)


def test_time_in_the_model_is_told_from_the_runners_own(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()

    class Slow(DigestModel):
        def generate(self, requests: Any) -> Any:
            clock.now += 1.0
            return super().generate(requests)

    append = RunFolder.append

    def slow_append(folder: RunFolder, records: Any) -> None:
        clock.now += 0.25
        append(folder, records)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(RunFolder, "append", slow_append)
    _, output, _ = ask(model=Slow())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["wall_s"], summary["model_s"]) == (10.0, 8.0)
    assert "10 s, of which the runner itself 20.0%" in output


def test_the_runner_itself_takes_milliseconds_a_sample(ask: Any, suite: Path, tmp_path: Path) -> None:
    suite.write_text(SUITE.format(asking="").replace("samples = 7", "samples = 100"))
    began = time.process_time()
    ask()
    # of the processor; an answer of a real model takes a hundred times as long
    assert (time.process_time() - began) / 204 < 0.02
    assert len(samples(tmp_path / "run")) == 204


def test_a_model_that_cannot_be_made_is_refused(tmp_path: Path, suite: Path) -> None:
    def start(model: str, **options: str) -> int:
        arguments = RunOptions(suite=str(suite), model=model, model_options=options, out=tmp_path / "run")
        return run_suite(arguments, Console(file=io.StringIO()))

    with pytest.raises(ModelError, match=r"a model must be one of ngram, openai, .*got 'gpt'"):
        start("gpt")
    with pytest.raises(ModelError, match=r"a model must be in a module that imports, got nowhere.py: no such file"):
        start("nowhere.py:load")
    with pytest.raises(ModelError, match="must have a function missing"):
        start(f"{MODELS}:missing")
    with pytest.raises(ModelError, match="must take the options size, got"):
        start(f"{MODELS}:load", size="3")
    with pytest.raises(ModelError, match="must return a model with tokenizer, generate, score and describe"):
        start("builtins:dict")
    assert not (tmp_path / "run").exists()
