"""Runs as ``assay eval run`` would leave them, made up without asking a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.eval.arms import Arm, read_arm
from assay.eval.compare import compare
from assay.eval.comparison import Comparison
from assay.eval.run_folder import SCHEMA, Item, RunFolder
from assay.eval.scoring import score_run
from assay.eval.settings import fingerprint
from assay.eval.suite import Suite, parse_suite, suite_content

Record = dict[str, Any]


def suite_of(tasks: Sequence[str] = ("gsm8k_cot",), **gates: Any) -> Suite:
    """A suite with a gate on scores, or the gates given as ``metric=margin``."""
    wanted = gates or {"score": 1.0}
    tables = [{"name": metric, "metric": metric, "margin": float(margin)} for metric, margin in wanted.items()]
    return parse_suite({"name": "made", "description": "made up", "tasks": list(tasks), "gates": tables})


def item(task: str, at: int, **fields: Any) -> Item:
    """A sample whose gold answer is 1, or the words a b c d."""
    answers = ("#### 1",) if task.startswith("gsm8k") else ("p q r s",)
    defaults: dict[str, Any] = {
        "answers": answers,
        "cluster": f"{task} {at}",
        "prompt_sha256": f"prompt {task} {at}",
        "gold_sha256": f"gold {task} {at}",
        "prompt_tokens": 100 + at,
    }
    return Item(task=task, id=f"s{at:04d}", index=at, **(defaults | fields))


def answer(task: str, at: int, score: float = 1.0, **fields: Any) -> Record:
    """A good answer of that score: 0 or 1 for numbers, else a multiple of 0.25, which is recall at full precision."""
    if task.startswith("gsm8k"):
        text = "#### 1" if score else "#### 0"
    else:
        text = {0.0: "none", 0.4: "p", 1.0: "p q r s"}[score]
    defaults: Record = {
        "task": task,
        "sample_id": f"s{at:04d}",
        "status": "ok",
        "error": None,
        "output_text": text,
        "output_ids": [ord(letter) for letter in text],
        "finish_reason": "stop",
        "gaps": [0.1] * len(text),
        "gold_nll": 1.0,
        "probes": [[at % 300 + 1, -1.0]],
        "kernel_calls": {},
        "attempt": 1,
    }
    return defaults | fields


def failure(task: str, at: int, status: str = "error") -> Record:
    """A sample that was not answered."""
    return {"task": task, "sample_id": f"s{at:04d}", "status": status, "error": "it broke", "attempt": 1}


def write_run(
    path: Path,
    records: Sequence[Record],
    *,
    suite: Suite | None = None,
    items: Sequence[Item] | None = None,
    score: bool = True,
    **fields: Any,
) -> RunFolder:
    """A run folder; ``fields`` replace parts of its manifest."""
    suite = suite or suite_of()
    if items is None:
        items = [item(record["task"], int(record["sample_id"][1:])) for record in records]
    folder, content = RunFolder(path), suite_content(suite)
    tasks = {name: {"samples": sum(one.task == name for one in items)} for name in suite.tasks}
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "label": path.name,
        "factors": {},
        "fingerprint": fingerprint(content),
        "model": {"name": "made up"},
        "settings": {"suite": content, "kernels": []},
        "comparable": {"suite": content},
        "suite": content,
        "tasks": tasks,
        "unloaded": {},
        "notes": [],
    }
    folder.create(manifest | fields, items)
    folder.append(list(records))
    if score:
        score_run(folder)
    return folder


def write_arm(path: Path, records: Sequence[Record], **fields: Any) -> Arm:
    """The same, read for a comparison."""
    return read_arm(write_run(path, records, **fields).path)


def flipped(path: Path, n: int, wrong: Sequence[int], **fields: Any) -> Arm:
    """A run of ``n`` questions of GSM8K of which those in ``wrong`` are answered wrong."""
    return write_arm(path, [answer("gsm8k_cot", at, float(at not in wrong)) for at in range(n)], **fields)


def with_losses(path: Path, losses: Mapping[str, Sequence[float]], **fields: Any) -> Arm:
    """A run with these losses of gold answers, by task."""
    records = [answer(task, at, gold_nll=loss) for task, values in losses.items() for at, loss in enumerate(values)]
    return write_arm(path, records, **fields)


def two(tmp_path: Path, before: Sequence[Record], after: Sequence[Record], **fields: Any) -> Comparison:
    """Two runs of these records, compared."""
    return compare([write_arm(tmp_path / "old", before, **fields), write_arm(tmp_path / "new", after, **fields)])


def gate(comparison: Comparison, at: int = 0, pair: int = 0) -> Any:
    """What one gate found of one pair of runs."""
    return comparison.pairs[pair].gates[at]
