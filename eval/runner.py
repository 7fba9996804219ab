"""``assay eval run``: plan, ask batch by batch, keep what was answered, go on where an earlier process ended."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .asking import Clock, Questioner
from .exit_code import ExitCode
from .forecast import forecast
from .manifest import make_manifest
from .models import load_model
from .models.interface import Model
from .plan import Batch, Plan, make_batches, make_plan
from .progress import Reporter, duration, print_summary
from .run_folder import OK, STATUS, SUMMARY, RunFolder
from .scorers import find_scorer
from .scoring import score_run
from .settings import differences
from .suite import Suite, load_suite
from .summary import summarize
from .tasks import find_task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line said.

    Attributes:
        suite: Name or file.
        model: Name, or place of a function.
        model_options: Keywords of the model.
        out: Folder of the run.
        data: Folder or archive of published data; None asks the hub.
        offline: Whether the hub is read from its cache alone.
        limit: Samples per task instead of the suite's.
        batch_size: Samples at once instead of the suite's.
        batch_tokens: Tokens at once instead of the suite's.
        seed: Of draw and order instead of the suite's.
        ids_from: A run whose samples are asked.
        label: As reports call the run; the folder's name if empty.
        factors: Named factors, such as ``kernel`` and ``scores``.
        kernels: Kernels that must serve every sample, as ``stage/kernel``; no other may serve that stage.
        dry_run: Whether to stop after plan and estimate.
    """

    suite: str
    model: str
    out: Path
    model_options: Mapping[str, str] = field(default_factory=dict)
    data: Path | None = None
    offline: bool = False
    limit: int | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    seed: int | None = None
    ids_from: Path | None = None
    label: str = ""
    factors: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    dry_run: bool = False


def run_suite(options: RunOptions, console: Console) -> int:
    """Run a suite, or what is left of it; return the exit code.

    Raises:
        ValueError: If the options cannot be served; the subclasses say by which part.
        ModuleNotFoundError: If a library is missing, naming its extra.
    """
    suite = _suite(options)
    _check_scorers(suite)
    model = load_model(options.model, options.model_options)
    plan = make_plan(suite, model, _ids(options.ids_from))
    label = options.label or options.out.name
    manifest = make_manifest(
        suite,
        model,
        plan,
        label=label,
        factors=dict(options.factors),
        options=dict(options.model_options),
        kernels=options.kernels,
    )
    folder = RunFolder(options.out)
    asking = suite.asking
    batches = make_batches(
        plan.planned, asking.batch_size, seed=asking.seed, most_tokens=asking.batch_tokens or math.inf
    )
    for task, reason in plan.unloaded.items():
        console.print(f"{task} is left out: {reason}", style="red", soft_wrap=True, markup=False)
    if options.dry_run:
        _announce(plan, batches, batches, model, suite, console)
        return ExitCode.PASSED
    with folder.lock():
        if folder.exists:
            found = differences(_bound(folder.manifest()), _bound(manifest))
            if found:
                console.print(f"{folder.path} was begun with other settings:", style="red", soft_wrap=True)
                for one in found:
                    console.print(f"  {one}", soft_wrap=True, markup=False)
                return ExitCode.SETTINGS_DIFFER
            for note in folder.heal():
                console.print(note, style="yellow", soft_wrap=True)
        else:
            folder.create(manifest, plan.items)
        return _Run(folder, suite, model, options.kernels, console).go(plan, batches)


def _bound(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a run is continued under: its settings, and what reports call it."""
    return {**manifest["settings"], "label": manifest["label"], "factors": manifest["factors"]}


class _Run:
    """One process at work on a run."""

    def __init__(
        self, folder: RunFolder, suite: Suite, model: Model, kernels: tuple[str, ...], console: Console
    ) -> None:
        self._folder, self._suite, self._model, self._kernels = folder, suite, model, kernels
        self._console = console
        self._clock: Clock = time.perf_counter

    def go(self, plan: Plan, batches: list[Batch]) -> int:
        """Ask what is left, then score and sum up."""
        latest = {name: self._folder.latest(name) for name in plan.loaded}
        attempts = _attempts(self._folder, plan)
        left = remaining(batches, latest)
        _announce(plan, batches, left, self._model, self._suite, self._console)
        before = self._folder.read_json(STATUS)
        most = before.get("most_tokens") or math.inf
        questioner = Questioner(self._model, self._suite.asking, most, self._kernels, clock=self._clock)
        began = self._clock()
        try:
            gave_up = self._ask(left, questioner, attempts)
        except KeyboardInterrupt:
            self._console.print("interrupted; what was answered is kept, and the same command goes on")
            return ExitCode.INTERRUPTED
        wall = self._clock() - began
        score_run(self._folder)
        # a run that was interrupted took the time of all its processes
        earlier = self._folder.read_json(SUMMARY)
        summary = summarize(self._folder) | {
            "wall_s": round(earlier.get("wall_s", 0.0) + wall, 3),
            "model_s": round(earlier.get("model_s", 0.0) + questioner.model_seconds, 3),
            "batch_notes": [*earlier.get("batch_notes", []), *questioner.notes],
        }
        self._folder.write_json(SUMMARY, summary)
        print_summary(self._console, summary, self._folder.path)
        if gave_up:
            failures = self._suite.asking.most_failures
            self._console.print(f"gave up: {failures} samples failed in a row; the same command goes on", style="red")
        failed = sum(count for status, count in summary["counts"].items() if status not in (OK, "skipped"))
        return ExitCode.FAILURES if failed or plan.unloaded else ExitCode.PASSED

    def _ask(self, left: list[Batch], questioner: Questioner, attempts: dict[tuple[str, str], int]) -> bool:
        """Whether too many failed in a row to go on."""
        in_a_row = failed = asked = 0
        total = sum(len(batch.members) for batch in left)
        with Reporter(self._console, total, self._clock) as reporter:
            for batch in left:
                noted = len(questioner.notes)
                records = questioner.ask(batch, attempts)
                self._folder.append(records)
                for record in records:
                    good = record["status"] == OK
                    in_a_row = 0 if good else in_a_row + 1
                    failed += not good
                asked += len(records)
                # no number in JSON is infinite
                most = questioner.most_tokens if questioner.most_tokens < math.inf else None
                status = {"asked": asked, "of": total, "failed": failed, "most_tokens": most}
                self._folder.write_json(STATUS, status)
                for note in questioner.notes[noted:]:
                    reporter.say(note)
                reporter.advance(sum(one.item.prompt_tokens for one in batch.members), len(records), failed)
                if in_a_row >= self._suite.asking.most_failures:
                    return True
        return False


def remaining(batches: list[Batch], latest: Mapping[str, Mapping[str, Any]]) -> list[Batch]:
    """What is left to ask.

    A batch that a killed process left in parts is asked again as a whole, so that no sample meets other neighbours than
    in an unbroken run. Where all were asked and some failed, those alone are asked again.
    """
    left = []
    for batch in batches:
        found = [latest[one.item.task].get(one.item.id) for one in batch.members]
        if any(record is None for record in found):
            left.append(batch)
            continue
        failed = tuple(
            one for one, record in zip(batch.members, found, strict=True) if record and record["status"] != OK
        )
        if failed:
            left.append(replace(batch, members=failed))
    return left


def _suite(options: RunOptions) -> Suite:
    suite = load_suite(options.suite)
    asking = replace(
        suite.asking,
        limit=suite.asking.limit if options.limit is None else options.limit,
        batch_size=options.batch_size or suite.asking.batch_size,
        batch_tokens=options.batch_tokens or suite.asking.batch_tokens,
        seed=suite.asking.seed if options.seed is None else options.seed,
    )
    source = replace(suite.loading.source, place=options.data, offline=options.offline)
    return replace(suite, asking=asking, loading=replace(suite.loading, source=source))


def _check_scorers(suite: Suite) -> None:
    """Fail before the run, not after it, where a scorer lacks its library."""
    if suite.asking.generate:
        for name in suite.tasks:
            task = find_task(name)
            if task.language == "zh":
                for scorer in task.scorers:
                    find_scorer(scorer).score("段落1", ["段落1"], ["段落1"])


def _ids(path: Path | None) -> dict[str, list[str]] | None:
    if path is None:
        return None
    folder = RunFolder(path)
    return {name: [item.id for item in folder.items(name)] for name in folder.tasks()}


def _attempts(folder: RunFolder, plan: Plan) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for name in plan.loaded:
        for record in folder.attempts(name):
            key = name, record["sample_id"]
            counts[key] = counts.get(key, 0) + 1
    return counts


def _announce(
    plan: Plan, batches: list[Batch], left: list[Batch], model: Model, suite: Suite, console: Console
) -> None:
    """Counts, what is left out, and how long it will take."""
    asked = sum(len(batch.members) for batch in left)
    broken = [item for item in plan.items if item.broken]
    total = sum(len(batch.members) for batch in batches)
    done = f", {total - asked} of {total} are done" if asked < total else ""
    console.print(f"suite {suite.name}: {asked} samples in {len(left)} batches{done}", highlight=False)
    for item in broken[:3]:
        console.print(f"skipped: {item.task} {item.id}: {item.broken}", style="yellow", soft_wrap=True, markup=False)
    if len(broken) > 3:
        console.print(f"skipped: {len(broken) - 3} more", style="yellow")
    estimate = forecast(model, suite.asking, left)
    if estimate.seconds is None:
        console.print(estimate.basis, style="yellow", markup=False)
    else:
        console.print(f"estimate: about {duration(estimate.seconds)}, {estimate.basis}", highlight=False)
