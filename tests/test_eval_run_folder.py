"""The folder of a run: appended lines, mended ends, one writer, and the plan as it was."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_runs import answer, failure, item, write_run

from assay.eval.models.interface import GenerateRequest, ScoreRequest
from assay.eval.models.ngram import NgramModel
from assay.eval.plan import draw
from assay.eval.run_folder import RunFolder, RunFolderError
from assay.eval.scorers import find_scorer
from assay.eval.tasks import Generation, Loading, load_task


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "run", [answer("gsm8k_cot", at) for at in range(3)])


def test_a_plan_is_read_as_it_was_written(folder: RunFolder) -> None:
    assert folder.items("gsm8k_cot") == [item("gsm8k_cot", at) for at in range(3)]
    assert folder.tasks() == ["gsm8k_cot"]


def test_the_last_good_attempt_counts(folder: RunFolder) -> None:
    folder.append([failure("gsm8k_cot", 0), failure("gsm8k_cot", 7), failure("gsm8k_cot", 7, "timeout")])
    latest = folder.latest("gsm8k_cot")
    assert latest["s0000"]["status"] == "ok"
    assert latest["s0007"]["status"] == "timeout"


@pytest.mark.parametrize("tail", [b'{"task": "gsm', b"\x00" * 64, b"\x00" * 64 + b"\n", b'{"task": 1}', b"half\n"])
def test_an_unfinished_end_is_cut_off(folder: RunFolder, tail: bytes) -> None:
    file = folder.path / "samples" / "gsm8k_cot.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    assert folder.heal() == [f"gsm8k_cot.jsonl: {len(tail)} bytes of an unfinished line were cut off"]
    assert file.read_bytes() == whole
    assert folder.heal() == []
    assert len(folder.attempts("gsm8k_cot")) == 3


def test_a_reader_does_not_see_an_unfinished_line(folder: RunFolder) -> None:
    file = folder.path / "samples" / "gsm8k_cot.jsonl"
    file.write_bytes(file.read_bytes() + b'{"task": "gsm')
    assert len(folder.attempts("gsm8k_cot")) == 3


def test_a_broken_line_in_the_middle_is_named(folder: RunFolder) -> None:
    file = folder.path / "samples" / "gsm8k_cot.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[1] = lines[1][:40]
    file.write_bytes(b"\n".join(lines))
    assert folder.heal() == []
    with pytest.raises(RunFolderError, match=r"gsm8k_cot.jsonl:2 must be JSON, got "):
        folder.attempts("gsm8k_cot")


def test_what_is_no_run_is_refused(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"a run must be a folder with manifest.json, got nothing at"):
        RunFolder(tmp_path / "missing").manifest()
    with pytest.raises(RunFolderError, match="got a folder without it at"):
        RunFolder(tmp_path).manifest()
    path = folder.path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    with pytest.raises(RunFolderError, match="must have schema 1, got 2"):
        folder.manifest()


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom assay.eval.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"got process {process.pid}"), RunFolder(tmp_path).lock():
            pass
    finally:
        process.kill()
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()
    with RunFolder(tmp_path).lock():
        assert (tmp_path / "run.lock").read_text() == str(os.getpid())


def test_numbers_that_json_lacks_are_never_written(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        folder.append([answer("gsm8k_cot", 9, gold_nll=float("nan"))])
    assert len(folder.attempts("gsm8k_cot")) == 3


def test_a_draw_is_spread_over_lengths_and_repeatable() -> None:
    samples = [
        one
        for length in (50, 100, 200, 400)
        for one in load_task("synthetic_qasper", Loading(generation=Generation(samples=10, length=length))).samples
    ]
    samples = [replace(one, index=at) for at, one in enumerate(samples)]
    found = draw(samples, 8, seed="0 a")
    assert found == draw(samples, 8, seed="0 a")
    assert found != draw(samples, 8, seed="1 a")
    lengths = sorted(one.length or 0 for one in found)
    # two from each quarter
    assert [
        sum(low <= length < high for length in lengths) for low, high in ((0, 80), (80, 160), (160, 320), (320, 640))
    ] == [
        *(2, 2, 2, 2),
    ]
    assert [samples.index(one) for one in found] == sorted(samples.index(one) for one in found)
    assert len(draw(samples, 40, seed="0")) == 40


@pytest.mark.parametrize("count", [1, 2, 7, 16, 23, 31, 33, 40])
def test_no_sample_is_drawn_twice(count: int) -> None:
    (one,) = load_task("synthetic_qasper", Loading(generation=Generation(samples=1, length=50))).samples
    samples = [replace(one, index=at, length=at + 1) for at in range(40)]
    stretches = [40 * at // count for at in range(count + 1)]
    for seed in range(50):
        drawn = [sample.index for sample in draw(samples, count, seed=str(seed))]
        assert all(low <= at < high for at, (low, high) in zip(drawn, itertools.pairwise(stretches), strict=True))


def ngram(prompt: str, order: int = 6, **fields: Any) -> Any:
    model = NgramModel(order)
    ids = tuple(model.tokenizer.encode(prompt, special=True))
    return model.generate([GenerateRequest(prompt_ids=ids, **fields)])[0]


def test_the_ngram_model_goes_on_as_its_prompt_did() -> None:
    prompt = "The code of Bordan is 123. The code of Keljor is 456. The code of Bordan is"
    found = ngram(prompt, max_new_tokens=5)
    assert (found.text, found.finish_reason) == (" 123.", "length")
    assert len(found.ids) == len(found.gaps) == 5
    assert all(gap >= 0 for gap in found.gaps)


def test_the_ngram_model_stops_where_it_must() -> None:
    prompt = "a: one\nb: two\na:"
    found = ngram(prompt, max_new_tokens=20, stop=("\n",))
    assert (found.text, found.finish_reason, found.ids[-1]) == (" one", "stop", ord("\n"))
    # a text must not end before its shortest length
    first = ngram("x\ny\nx", max_new_tokens=3, min_new_tokens=1, stop=("\n",))
    assert len(first.ids) >= 1
    assert first.text != ""


def test_the_probabilities_of_the_ngram_model_sum_to_one() -> None:
    model = NgramModel(3)
    ids = tuple(model.tokenizer.encode("abcabcab", special=True))
    letters = [chr(one) for one in range(32, 127)]
    found = model.score([ScoreRequest(prompt_ids=ids, target_ids=(ord(letter),)) for letter in letters])
    import math

    shares = [math.exp(one.target[0]) for one in found if not hasattr(one, "reason")]
    # all others of Unicode's characters share what is left
    assert sum(shares) == pytest.approx(1.0, abs=0.06)
    assert max(shares) == shares[letters.index("c")] > 0.5
    assert len(found[0].prompt) == 8  # type: ignore[union-attr]


def test_the_ngram_model_finds_planted_facts() -> None:
    loaded = load_task("synthetic_qasper", Loading(generation=Generation(samples=6, length=100)))
    right = []
    for sample in loaded.samples:
        cue = sample.prompt[: sample.prompt.index(sample.answers[0])][-25:].rstrip()
        found = ngram(f"{sample.prompt} {cue}", order=12, max_new_tokens=6)
        right.append(find_scorer("qa_f1").score(found.text, sample.answers, []))
    assert sum(right) >= 5


def test_an_ngram_model_without_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match="order must be at least 1, got 0"):
        NgramModel(0)
