"""Where published data is read from: a folder, the official archive, or a hub; always through ``datasets``.

Lines are read as text and parsed here. The JSON reader of ``datasets`` guesses types, and an answer ``2011-05-09``
would come back as ``2011-05-09 00:00:00``; read as text, every answer keeps its characters and every error its line.
"""

import glob
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extras import require

LONGBENCH, GSM8K = "longbench", "gsm8k"
ARCHIVE = "data.zip"
Record = dict[str, Any]


class DataError(ValueError):
    """Data that is missing or cannot be understood; the text names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where to look.

    Attributes:
        place: A folder with ``<task>.jsonl``, in it or in ``longbench/``, ``gsm8k/`` or ``data/``, or with the official
            ``data.zip``; or that archive itself. None asks the hub.
        longbench_hub: Name of the hub's repository, which holds ``data.zip`` or a configuration for each task.
        gsm8k_hub: Name of the hub's repository, with the configuration ``main``.
        offline: Whether the hub is read from the local cache alone.
        partial: Whether a file may hold fewer records than were published; a run on part of a task says so.
    """

    place: Path | None = None
    longbench_hub: str = "zai-org/LongBench"
    gsm8k_hub: str = "openai/gsm8k"
    offline: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The records of one file or one part of a hub's repository.

    Attributes:
        records: In their order.
        lines: Number of the line of each record in its file, from 1; its position where there is no file.
        origin: What was read, for people.
        sha256: Of the file as it is; empty where there is no file.
    """

    records: list[Record]
    lines: list[int]
    origin: str
    sha256: str = ""


def read_rows(source: DataSource, name: str, family: str) -> Rows:
    """The records of ``<name>.jsonl`` of a family, ``longbench`` or ``gsm8k``.

    Raises:
        DataError: If it is not there, or not what it should be.
    """
    if source.place is None:
        return _from_hub(source, name, family)
    place = source.place
    if place.suffix == ".zip" and place.is_file():
        return _from_archive(place, name)
    folders = [place / family, place / "data", place]
    files = [folder / f"{name}.jsonl" for folder in folders]
    found = next((file for file in files if file.is_file()), None)
    if found is not None:
        return _from_file(found, str(found))
    archive = next((folder / ARCHIVE for folder in folders if (folder / ARCHIVE).is_file()), None)
    if archive is not None:
        return _from_archive(archive, name)
    looked = ", ".join(map(str, [*files, place / ARCHIVE]))
    raise DataError(f"the data of {name} must be in one of {looked}, got none of them")


def _from_file(path: Path, origin: str) -> Rows:
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0)
        _refuse_stand_ins(stream.read(200), origin)
    records, lines = [], []
    texts = _lines(path, origin)
    for number, text in enumerate(texts, start=1):
        if text.strip():
            records.append(_parse(text, f"{origin}:{number}", last=number == len(texts)))
            lines.append(number)
    return Rows(records=records, lines=lines, origin=origin, sha256=sha256)


def _refuse_stand_ins(start: bytes, origin: str) -> None:
    """What downloads leave behind in the place of data."""
    if not start.strip():
        raise DataError(f"{origin} must hold records, got an empty file: was the download cut off?")
    if start.startswith(b"version https://git-lfs"):
        raise DataError(f"{origin} must hold records, got a Git LFS pointer: the data itself was not downloaded")
    if start.lstrip().startswith(b"<"):
        raise DataError(f"{origin} must hold records, got a page of HTML or XML, as a failed download leaves it")


def _lines(path: Path, origin: str) -> list[str]:
    datasets = require("datasets", extra="eval")
    # a cache of its own: what was read before under the same name cannot come back
    with tempfile.TemporaryDirectory(prefix="assay-data-") as cache, _quiet(datasets):
        try:
            rows = datasets.load_dataset(
                "text",
                data_files={"test": glob.escape(str(path))},
                split="test",
                cache_dir=cache,
                keep_in_memory=True,
            )
        except Exception as error:
            reason = error.__cause__ or error
            raise DataError(f"{origin} must be text in UTF-8, one record a line, got {reason}") from error
        texts: list[str] = rows["text"][:]
    return texts


def _parse(text: str, place: str, *, last: bool) -> Record:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        hint = ": the file ends in the middle of a record, so its download was cut off" if last else ""
        raise DataError(f"{place} must be a record in JSON, got {text[:60]!r}{hint}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} must be a record in JSON, got {type(record).__name__}")
    return record


def _from_archive(path: Path, name: str) -> Rows:
    """One member of the official archive, which holds ``data/<task>.jsonl``."""
    member = f"{name}.jsonl"
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="assay-data-") as folder:
            inside = next((one for one in archive.namelist() if one in (member, f"data/{member}")), None)
            if inside is None:
                raise DataError(f"{path} must hold data/{member}, got {len(archive.namelist())} other members")
            copy = Path(folder) / member
            copy.write_bytes(archive.read(inside))
            return _from_file(copy, f"{path}!{inside}")
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path} must be a whole zip archive, got {error}: was its download cut off?") from error


def _from_hub(source: DataSource, name: str, family: str) -> Rows:
    repository = source.longbench_hub if family == LONGBENCH else source.gsm8k_hub
    if family == LONGBENCH:
        archive = _hub_archive(repository, offline=source.offline)
        if archive is not None:
            return _from_archive(archive, name)
    datasets = require("datasets", extra="eval")
    config, split = (name, "test") if family == LONGBENCH else ("main", name)
    download = datasets.DownloadConfig(local_files_only=source.offline)
    try:
        with _quiet(datasets):
            rows = datasets.load_dataset(repository, config, split=split, download_config=download)
    except Exception as error:
        where = "the local cache of the hub" if source.offline else "the hub"
        raise DataError(f"{name} must be in {repository} on {where}, got {error or type(error).__name__}") from error
    records = rows.to_list()
    origin = f"hub {repository}, {config}, {split}"
    return Rows(records=records, lines=list(range(1, len(records) + 1)), origin=origin)


def _hub_archive(repository: str, *, offline: bool) -> Path | None:
    """The official archive in the cache of the hub, downloaded if need be; None where the repository has none."""
    hub = require("huggingface_hub", extra="eval")
    try:
        found = hub.hf_hub_download(repository, ARCHIVE, repo_type="dataset", local_files_only=offline)
    except hub.errors.LocalEntryNotFoundError as error:
        where = "the local cache of the hub" if offline else "the hub or its local cache"
        hint = "name a folder with --data, or run once with a network"
        raise DataError(f"{ARCHIVE} of {repository} must be in {where}, got nothing: {hint}") from error
    except hub.errors.EntryNotFoundError:
        return None
    except Exception as error:
        raise DataError(f"{ARCHIVE} of {repository} must be on the hub, got {error or type(error).__name__}") from error
    return Path(found)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars while reading: a run has one of its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
