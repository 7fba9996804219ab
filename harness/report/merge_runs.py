"""Several runs of one plan as one: its shards, judged on several GPUs or hosts, or its cases by several kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record import Record, open_records
from .run_folder import Run, unfinished

# of the header: what makes two runs parts of one
SAME = ("plan", "cases", "tier", "seed")


def merge_runs(runs: Sequence[Run], folder: Path) -> Run:
    """One run with the records of all.

    Args:
        runs: At least one, with the errors of single rows.
        folder: Where the merged run will lie.

    Raises:
        ValueError: If they are of different plans, or two of them hold the same judgement.
    """
    first = runs[0]
    for run in runs[1:]:
        for name in SAME:
            if run.header.get(name) != first.header.get(name):
                found = [f"{one.header.get(name)} in {one.folder}" for one in (first, run)]
                raise ValueError(f"runs to be merged must be of one {name}, got {found[0]} and {found[1]}")
    records = _all_records(runs)
    header: dict[str, Any] = _joined([run.header for run in runs])
    header.pop("shard", None)
    # what a shard left to the others is no longer missing
    own = [
        f"{run.folder}: {note}"
        for run in runs
        for note in run.notes
        if note not in unfinished(run.header, list(run.records))
    ]
    return Run(
        folder=folder,
        header=header,
        records=tuple(records),
        kill_tables=tuple(table for run in runs for table in run.kill_tables),
        notes=(*own, *unfinished(header, records)),
    )


def write_merged(run: Run) -> None:
    """Leave the records in the folder of the run, which thereby is one like any other."""
    with open_records(run.folder, run.header) as writer:
        for record in run.records:
            writer.write(record.to_json())


def _all_records(runs: Sequence[Run]) -> list[Record]:
    records: list[Record] = []
    holder: dict[tuple[str, str, str], Path] = {}
    for run in runs:
        for record in run.records:
            key = record.op, record.kernel, str(record.case["id"])
            if key in holder:
                found = f"{record.kernel} on {key[2]} in {holder[key]} and {run.folder}"
                raise ValueError(f"runs to be merged must hold each judgement once, got {found}")
            holder[key] = run.folder
            records.append(record)
    return records


def _joined(values: list[Any]) -> Any:
    """One value for all; where they differ, a text that lists them, name by name."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _joined([value.get(name) for value in values]) for name in names}
    return "; ".join(dict.fromkeys("none" if value is None else str(value) for value in values))
