"""Suites as files, settings and their differences, secrets."""

import tomllib
from typing import Any

import pytest

from assay.eval.redaction import redacted
from assay.eval.settings import canonical, differences, fingerprint
from assay.eval.statistics import flip_bound, macro_flip_bound
from assay.eval.suite import Gate, SuiteError, load_suite, parse_suite, suite_content, suite_names
from assay.eval.tasks import Loading, find_task, load_task

MADE = """
name = "made"
description = "made up"
tasks = ["synthetic_qasper", "needle"]
[generated]
samples = 3
[needle]
lengths = [100]
[prompt]
max_tokens = 500
[asking]
limit = 2
[[gates]]
name = "answers"
metric = "nll"
margin = 1
tasks = ["needle"]
"""


def made(old: str = "", new: str = "") -> dict[str, Any]:
    assert old in MADE
    return tomllib.loads(MADE.replace(old, new, 1))


def test_the_suites_of_the_project_are_these() -> None:
    assert suite_names() == [
        "embedded",
        "embedded-chinese",
        "gsm8k-full",
        "longbench-full",
        "longbench-mini",
        "longbench-six",
        "smoke",
    ]
    full, six = load_suite("longbench-full"), load_suite("longbench-six")
    counted = {
        name: sum(find_task(task).num_samples or 0 for task in suite.tasks)
        for name, suite in (("full", full), ("six", six))
    }
    assert counted == {"full": 4750, "six": 1500}
    assert len(full.tasks) == 21
    assert set(six.tasks) == {
        *("hotpotqa", "passage_retrieval_en", "repobench-p", "qasper", "multifieldqa_zh", "gov_report"),
    }
    assert load_suite("gsm8k-full").tasks == ("gsm8k_cot",)
    margins = {
        (gate.metric, gate.margin) for name in ("longbench-full", "gsm8k-full") for gate in load_suite(name).gates
    }
    assert margins == {("score", 0.5), ("score", 1.0), ("nll", 0.01)}


def test_smoke_needs_no_data_and_can_say_equivalent() -> None:
    suite = load_suite("smoke")
    assert not suite.needs_data
    counts = [len(load_task(name, suite.loading).samples) for name in suite.tasks]
    assert sum(counts) == 64
    assert {gate.metric for gate in suite.gates} == {"nll", "agreement"}
    # two runs that agree in everything must not come out as inconclusive
    for gate in suite.gates:
        assert macro_flip_bound(counts) * gate.scale < gate.loss
    assert macro_flip_bound(counts) == pytest.approx(flip_bound(64))


@pytest.mark.parametrize("name", ["smoke", "longbench-six", "gsm8k-full"])
def test_a_suite_survives_its_manifest(name: str) -> None:
    suite = load_suite(name)
    assert parse_suite(suite_content(suite)) == suite
    assert fingerprint(suite_content(suite)) == fingerprint(suite_content(parse_suite(suite_content(suite))))


def test_a_file_of_yours_is_read() -> None:
    suite = parse_suite(made())
    assert suite.asking.limit == 2
    assert suite.loading == Loading(generation=suite.loading.generation, grid=suite.loading.grid)
    assert (suite.loading.generation.samples, suite.loading.grid.lengths) == (3, (100,))
    assert suite.gates == (Gate(name="answers", metric="nll", margin=1.0, tasks=("needle",)),)
    assert suite.tasks_of(suite.gates[0]) == ("needle",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "made"', "", "name must be a text, got None"),
        ('"needle"]', "3]", "tasks must be a list of texts"),
        ('"needle"]', '"nedle"]', "a task must be one of .* such as needle"),
        ('"needle"]', '"needle", "needle"]', "each once, got"),
        ("samples = 3", "sample = 3", "generated: keys must be among samples, length, seed, got sample"),
        ("samples = 3", 'samples = "3"', "generated.samples must be a int, got '3'"),
        ("samples = 3", "samples = true", "generated.samples must be a int, got True"),
        ("lengths = [100]", "lengths = [0.5]", "needle.lengths must be a list of whole numbers"),
        ("max_tokens = 500", "max_tokens = 1", "max_tokens must be at least 2, got 1"),
        ("limit = 2", "limit = 0", "must be at least 1, got limit = 0"),
        ("limit = 2", "generate = false\nscore = false", "generate or score must be true, got neither"),
        ("limit = 2", "score = false", "gate answers needs asking.score = true, got false"),
        ('metric = "nll"', 'metric = "bleu"', "metric must be one of score, nll, agreement, got 'bleu'"),
        ('metric = "nll"', 'metric = "nll"\ntie = 0.1', "tie must be positive, and of agreement, got 0.1 of nll"),
        ('metric = "nll"', 'metric = "agreement"\ntie = -1', "tie must be positive, and of agreement, got -1"),
        ("margin = 1", "margin = 0", "margin and scale must be positive, got 0.0 and 1.0"),
        ("margin = 1", "", "gates: .*margin"),
        ('tasks = ["needle"]\n', 'tasks = ["qasper"]\n', "gate answers: tasks must be of the suite, got qasper"),
        ("[[gates]]", "[gates]", r"gates must be tables \[\[gates\]\]"),
        ("[asking]", "[askign]", "keys must be among .*, got askign"),
        ('place = "x"', "", "unused"),
    ],
)
def test_what_is_not_understood_is_named(old: str, new: str, message: str) -> None:
    if message == "unused":
        with pytest.raises(ValueError, match="data: keys must be among longbench_hub, gsm8k_hub, partial, got place"):
            parse_suite(made() | {"data": {"place": "/somewhere"}})
        return
    with pytest.raises(ValueError, match=message):
        parse_suite(made(old, new))


def test_real_and_synthetic_tasks_are_never_averaged() -> None:
    content = made('"needle"]', '"qasper"]') | {"gates": [{"name": "both", "metric": "nll", "margin": 1.0}]}
    with pytest.raises(ValueError, match="gate both must average real tasks or synthetic ones, got both"):
        parse_suite(content)


def test_a_suite_that_is_not_there_names_those_that_are(tmp_path: Any) -> None:
    with pytest.raises(SuiteError, match=r"a suite must be one of embedded, .*smoke, or a TOML file, got 'smok'"):
        load_suite("smok")
    path = tmp_path / "mine.toml"
    path.write_text("name = ")
    with pytest.raises(SuiteError, match=r"suite .*mine.toml: "):
        load_suite(str(path))
    path.write_text(MADE)
    assert load_suite(str(path)).name == "made"


def test_differences_name_the_path_and_both_values() -> None:
    first = {"a": {"b": 1, "same": [1, 2]}, "gates": [{"m": 1}, {"m": 2}], "gone": "x"}
    second = {"a": {"b": 2, "same": [1, 2]}, "gates": [{"m": 1}, {"m": 3}], "new": None}
    assert differences(first, second) == [
        "a.b: 1 against 2",
        "gates[1].m: 2 against 3",
        'gone: "x" against nothing',
        "new: nothing against null",
    ]
    assert differences(first, first) == []
    assert differences({"a": (1, 2)}, {"a": [1, 2]}) == []


def test_equal_settings_have_one_fingerprint() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical(float("nan"))


def test_secrets_and_users_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "tok-12345678")
    monkeypatch.setenv("MY_SECRET", "tok-12345678-long")
    monkeypatch.setenv("SHORT_KEY", "abc")
    found = redacted({"a": ["x tok-12345678-long y", 3, None], "tok-12345678": "abc", "url": "http://u:p@host/v1"})
    assert found == {
        "a": ["x [redacted] y", 3, None],
        "[redacted]": "abc",
        "url": "http://[redacted]@host/v1",
    }
