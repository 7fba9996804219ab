"""The folder of a run: a manifest, the plan, samples that are only appended, and what is derived from them."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MANIFEST, STATUS, SUMMARY, LOCK = "manifest.json", "status.json", "summary.json", "run.lock"
ITEMS, SAMPLES, SCORES = "items", "samples", "scores"
SCHEMA = 1
OK, SKIPPED = "ok", "skipped"
Record = dict[str, Any]


class RunFolderError(ValueError):
    """A folder that is no run, or one that another process is writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sample of the plan: all that scoring and pairing need, without the prompt itself.

    Attributes:
        task: Name of the task.
        id: Within the task.
        index: Position in the source.
        answers: Accepted answers.
        classes: Of a classification task.
        cluster: Digest of what samples share.
        length: As published.
        stratum: Part of the task.
        prompt_sha256: Of the prompt as the model is given it.
        gold_sha256: Of answers and classes.
        prompt_tokens: Length of the prompt.
        tokens_before: Length before truncation.
        truncated: Whether something was taken out.
        broken: Why the record cannot be asked; empty if it can.
    """

    task: str
    id: str
    index: int
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    cluster: str = ""
    length: int | None = None
    stratum: str = ""
    prompt_sha256: str = ""
    gold_sha256: str = ""
    prompt_tokens: int = 0
    tokens_before: int = 0
    truncated: bool = False
    broken: str = ""


class RunFolder:
    """Reads and writes one run; a line that was appended is on the disk before the next batch is asked."""

    def __init__(self, path: Path) -> None:
        """The folder at ``path``, which need not exist yet."""
        self.path = path

    @property
    def exists(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / MANIFEST).is_file()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other process from writing; the lock goes with the process, however it ends.

        Raises:
            RunFolderError: If another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a+", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                stream.seek(0)
                holder = stream.read().strip() or "unknown"
                raise RunFolderError(
                    f"{self.path} must not be written by two processes, got process {holder}"
                ) from error
            stream.truncate(0)
            stream.write(str(os.getpid()))
            stream.flush()
            yield

    def create(self, manifest: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Write the plan, then the manifest, whose presence makes the folder a run."""
        for folder in (ITEMS, SAMPLES, SCORES):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        for task in dict.fromkeys(item.task for item in items):
            mine = (item for item in items if item.task == task)
            self.write_lines(Path(ITEMS) / f"{task}.jsonl", [dataclasses.asdict(item) for item in mine])
        self.write_json(MANIFEST, manifest)

    def manifest(self) -> Record:
        """What the run was made with.

        Raises:
            RunFolderError: If the folder is no run of this version.
        """
        path = self.path / MANIFEST
        if not path.is_file():
            found = "a file" if self.path.is_file() else "a folder without it" if self.path.is_dir() else "nothing"
            raise RunFolderError(f"a run must be a folder with {MANIFEST}, got {found} at {self.path}")
        content = _parse(path.read_text(encoding="utf-8"), str(path))
        if content.get("schema") != SCHEMA:
            raise RunFolderError(f"{path} must have schema {SCHEMA}, got {content.get('schema')!r}")
        return content

    def tasks(self) -> list[str]:
        """Names, in the order of the suite."""
        return list(self.manifest()["tasks"])

    def items(self, task: str) -> list[Item]:
        """The plan of a task."""
        known = {one.name for one in dataclasses.fields(Item)}
        rows: list[Record] = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key in known}
            for row in self._lines(self.path / ITEMS / f"{task}.jsonl")
        ]
        return [Item(**row) for row in rows]

    def append(self, records: Sequence[Record]) -> None:
        """Add attempts, and return when they are on the disk; the records of a task go out in one write."""
        for task in dict.fromkeys(record["task"] for record in records):
            mine = [record for record in records if record["task"] == task]
            with (self.path / SAMPLES / f"{task}.jsonl").open("ab") as stream:
                stream.write(b"".join(_line(record) for record in mine))
                stream.flush()
                os.fsync(stream.fileno())

    def heal(self) -> list[str]:
        """Cut off the last line of a file where a killed process left it unfinished; say what was cut."""
        notes = []
        for path in sorted((self.path / SAMPLES).glob("*.jsonl")):
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            # a block of the disk may have been left empty behind the last line that was written
            while whole and not _is_record(whole.rstrip(b"\n").rsplit(b"\n", 1)[-1]):
                whole = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
                notes.append(f"{path.name}: {len(content) - len(whole)} bytes of an unfinished line were cut off")
        return notes

    def attempts(self, task: str) -> list[Record]:
        """All attempts, in the order of their writing."""
        return self._lines(self.path / SAMPLES / f"{task}.jsonl")

    def latest(self, task: str) -> dict[str, Record]:
        """The last good attempt of each sample, or else its last one."""
        found: dict[str, Record] = {}
        for record in self.attempts(task):
            if record["status"] == OK or found.get(record["sample_id"], record)["status"] != OK:
                found[record["sample_id"]] = record
        return found

    def write_json(self, name: str, content: Any) -> None:
        """Replace a file as a whole, so that a reader finds the old one or the new one."""
        self._replace(
            self.path / name, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        )

    def read_json(self, name: str) -> Record:
        """A file that ``write_json`` wrote; empty if there is none."""
        path = self.path / name
        return _parse(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}

    def write_lines(self, name: Path, rows: Sequence[Record]) -> None:
        """Replace a file of JSON lines."""
        self._replace(self.path / name, b"".join(_line(row) for row in rows))

    def read_lines(self, name: Path) -> list[Record]:
        """A file of JSON lines; empty if there is none."""
        return self._lines(self.path / name)

    def _replace(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".new")
        with draft.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)

    def _lines(self, path: Path) -> list[Record]:
        if not path.is_file():
            return []
        stream: IO[str]
        with path.open(encoding="utf-8", newline="\n") as stream:
            lines = stream.read().split("\n")
        # whatever stands behind the last end of line is not finished, and not read
        return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines[:-1], start=1)]


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, sort_keys=True, allow_nan=False).encode() + b"\n"


def _parse(text: str, place: str) -> Record:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{place} must be JSON, got {text[:60]!r}: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{place} must be an object of JSON, got {type(content).__name__}")
    return content


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
