"""Published data from folders, the official archive and hubs, and what is said where it is broken."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.eval.tasks import DataError, DataSource, Loaded, Loading, load_task

datasets = pytest.importorskip("datasets", reason="the extra `eval` is not installed")

Write = Callable[..., Path]


def row(at: int, **fields: Any) -> dict[str, Any]:
    return {
        "input": "when?",
        "context": f"context {at}\u2028\u00e9",
        # a reader that guesses types would make a time of day of it
        "answers": ["2011-05-09"],
        "length": at,
        "dataset": "multi_news",
        "language": "en",
        "all_classes": None,
        "_id": f"id-{at}",
    } | fields


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [row(at) for at in range(200)]


def load(place: Path, name: str = "multi_news", **fields: Any) -> Loaded:
    return load_task(name, Loading(source=DataSource(place=place, **fields)))


@pytest.mark.parametrize("folder", ["", "longbench", "data", "odd [name] *"])
def test_a_folder_of_json_lines_is_read_to_the_letter(tmp_path: Path, rows: list[dict[str, Any]], folder: str) -> None:
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    file = place / "multi_news.jsonl"
    file.write_text(lines(rows), encoding="utf-8")
    loaded = load(tmp_path if folder in ("longbench", "data") else place)
    assert len(loaded.samples) == 200
    assert loaded.samples[7].answers == ("2011-05-09",)
    assert "context 7\u2028\u00e9" in loaded.samples[7].prompt
    assert loaded.files == {str(file): hashlib.sha256(file.read_bytes()).hexdigest()}
    assert (loaded.broken, loaded.notes) == ([], ())


def test_the_same_data_has_one_digest_wherever_it_lies(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "multi_news.jsonl").write_text(lines(rows), encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/multi_news.jsonl", lines(rows))
    from_file, from_archive = load(tmp_path), load(tmp_path / "data.zip")
    assert from_file.sha256 == from_archive.sha256
    assert from_archive.origin.endswith("data.zip!data/multi_news.jsonl")
    (tmp_path / "multi_news.jsonl").unlink()
    assert load(tmp_path).sha256 == from_file.sha256
    changed = [*rows[:-1], rows[-1] | {"answers": ["other"]}]
    (tmp_path / "multi_news.jsonl").write_text(lines(changed), encoding="utf-8")
    assert load(tmp_path).sha256 != from_file.sha256


def test_missing_data_names_every_place_that_was_searched(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"the data of qasper must be in one of .*longbench/qasper.jsonl, .*data.zip, got none"
    ):
        load(tmp_path, "qasper")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold records, got an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "got a Git LFS pointer"),
        (b"<!doctype html>\n", "got a page of HTML or XML"),
        (b"\xff\xfe{}\n", "must be text in UTF-8"),
        (b"[1]\n", r"multi_news.jsonl:1 must be a record in JSON, got list"),
    ],
)
def test_what_a_download_leaves_in_the_place_of_data_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "multi_news.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_a_file_that_is_cut_off_names_its_line(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    file = tmp_path / "multi_news.jsonl"
    file.write_text("\n" + lines(rows)[:-30], encoding="utf-8")
    with pytest.raises(DataError, match=r"multi_news.jsonl:201 must be a record in JSON, .*its download was cut off"):
        load(tmp_path)
    file.write_text("{broken\n" + lines(rows), encoding="utf-8")
    with pytest.raises(DataError, match=r"multi_news.jsonl:1 must be a record in JSON, got '\{broken'$"):
        load(tmp_path)


def test_too_few_records_are_refused_unless_said_to_be_a_part(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "multi_news.jsonl").write_text(lines(rows[:3]), encoding="utf-8")
    with pytest.raises(DataError, match="multi_news must have 200 records, got 3"):
        load(tmp_path)
    loaded = load(tmp_path, partial=True)
    assert loaded.notes == ("multi_news: 3 of 200 published records",)
    (tmp_path / "multi_news.jsonl").write_text(lines([*rows, row(200)]), encoding="utf-8")
    with pytest.raises(DataError, match="multi_news must have 200 records, got 201"):
        load(tmp_path, partial=True)


def test_a_record_without_a_field_is_set_aside_with_its_line(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    del rows[2]["context"]
    rows[4]["answers"] = []
    del rows[5]["_id"]
    (tmp_path / "multi_news.jsonl").write_text("\n" + lines(rows), encoding="utf-8")
    loaded = load(tmp_path)
    assert len(loaded.samples) == 197
    assert [(one.id, one.index) for one in loaded.broken] == [("id-2", 2), ("id-4", 4), ("record-0005", 5)]
    assert "multi_news.jsonl:4: the field 'context' must be a text, got nothing" in loaded.broken[0].reason
    assert [one.index for one in loaded.samples[:3]] == [0, 1, 3]


def test_a_record_without_classes_has_none(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    del rows[0]["all_classes"]
    rows[1]["all_classes"] = "news"
    (tmp_path / "multi_news.jsonl").write_text(lines(rows), encoding="utf-8")
    loaded = load(tmp_path)
    assert loaded.samples[0].classes == ()
    assert [(one.id, one.reason.partition(": ")[2]) for one in loaded.broken] == [
        ("id-1", "the field 'all_classes' must be a list of texts, got 'news'")
    ]


def test_a_record_with_half_a_letter_is_set_aside(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    rows[0]["input"], rows[1]["_id"], rows[2]["answers"] = "why \ud83d", "id \ude00", ["2011", "\ud83d"]
    (tmp_path / "multi_news.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    loaded = load(tmp_path)
    assert [one.id for one in loaded.broken] == ["id-0", "id \ufffd", "id-2"]
    assert "a text must hold whole letters, got half of one at 4" in loaded.broken[0].reason


def test_data_in_another_form_is_refused_as_a_whole(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    rehosted = [{"context": one["context"], "question": "Question: when?\n", "answers": one["answers"]} for one in rows]
    (tmp_path / "multi_news.jsonl").write_text(lines(rehosted), encoding="utf-8")
    with pytest.raises(DataError, match=r"must hold records of multi_news, got none: .*:1: the field '_id'"):
        load(tmp_path)


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    (tmp_path / "multi_news.jsonl").write_text(lines([*rows[:-1], rows[0]]), encoding="utf-8")
    with pytest.raises(DataError, match="must hold every id once, got 'id-0' more than once"):
        load(tmp_path)


def test_a_broken_archive_is_named(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("data/multi_news.jsonl", lines(rows))
    with pytest.raises(DataError, match=r"data.zip must hold data/qasper.jsonl, got 1 other members"):
        load(tmp_path, "qasper")
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"data.zip must be a whole zip archive, got .*was its download cut off"):
        load(tmp_path)


def gsm8k(count: int) -> list[dict[str, str]]:
    return [{"question": f"{at} + {at}?", "answer": f"It is {2 * at}.\n#### {2 * at}"} for at in range(count)]


def test_gsm8k_is_read_from_its_two_files(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(lines(gsm8k(1319)))
    assert len(load(tmp_path, "gsm8k_cot").samples) == 1319
    with pytest.raises(DataError, match="the data of train must be in one of"):
        load(tmp_path, "gsm8k")
    (tmp_path / "gsm8k" / "train.jsonl").write_text(lines(gsm8k(6)))
    with pytest.raises(DataError, match="train must have 7473 records, got 6"):
        load(tmp_path, "gsm8k")
    loaded = load(tmp_path, "gsm8k", partial=True)
    assert loaded.samples[0].prompt.startswith("Question: 0 + 0?\nAnswer: It is 0.\n#### 0\n\nQuestion: 1 + 1?")
    assert len(loaded.files) == 2


def test_a_gold_answer_without_its_mark_is_set_aside(tmp_path: Path) -> None:
    rows = [*gsm8k(2), {"question": "?", "answer": "3"}]
    (tmp_path / "test.jsonl").write_text(lines(rows))
    loaded = load(tmp_path, "gsm8k_cot", partial=True)
    assert [one.reason.split("test.jsonl")[1] for one in loaded.broken] == [
        ":3: the answer must hold '####' once, got 0 times"
    ]


def test_the_hub_is_asked_for_the_official_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    import huggingface_hub

    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("data/multi_news.jsonl", lines(rows))
    asked: list[Any] = []

    def download(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file, options))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = load_task("multi_news", Loading(source=DataSource(offline=True)))
    assert len(loaded.samples) == 200
    assert asked == [("zai-org/LongBench", "data.zip", {"repo_type": "dataset", "local_files_only": True})]


def test_a_hub_without_the_archive_is_asked_for_a_configuration(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]
) -> None:
    import huggingface_hub

    def missing(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.EntryNotFoundError("no such entry")

    asked: list[Any] = []

    def load_dataset(*names: str, **options: Any) -> Any:
        asked.append((names, options["split"], options["download_config"].local_files_only))
        assert "trust_remote_code" not in options
        return SimpleNamespace(to_list=lambda: rows if names[0] == "mine/bench" else gsm8k(1319))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_task("multi_news", Loading(source=DataSource(longbench_hub="mine/bench")))
    assert (len(loaded.samples), loaded.files) == (200, {})
    load_task("gsm8k_cot", Loading(source=DataSource(offline=True)))
    assert asked == [(("mine/bench", "multi_news"), "test", False), (("openai/gsm8k", "main"), "test", True)]


@pytest.mark.parametrize(("name", "missing"), [("qasper", "data.zip of zai-org/LongBench"), ("gsm8k_cot", "test")])
def test_offline_without_a_cache_says_so(tmp_path: Path, name: str, missing: str) -> None:
    code = (
        "from assay.eval.tasks import *\n"
        f"try: load_task({name!r}, Loading(source=DataSource(offline=True)))\n"
        "except DataError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ) | environment
    )
    assert f"{missing} must be in " in result.stdout, result.stderr
    assert "the local cache of the hub" in result.stdout


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "multi_news.jsonl").write_text(lines([row(0)]))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets must be installed .*kernel-assay\[eval\]"):
        load(tmp_path)
