"""The commands behind ``assay eval``; imports neither torch nor transformers before a command needs them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .exit_code import ExitCode

app = typer.Typer(
    name="eval",
    no_args_is_help=True,
    add_completion=False,
    help="Does a swapped kernel hurt a model: the same questions before and after, and a verdict with its uncertainty.",
)


@contextmanager
def _usage(command: str) -> Iterator[None]:
    """Say what cannot be served, and exit with 2."""
    try:
        yield
    except (ModuleNotFoundError, NotImplementedError, ValueError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(ExitCode.USAGE) from error


@app.command()
def run(
    suite: Annotated[str, typer.Argument(help="Name of a suite (see `assay eval suites`), or a TOML file.")],
    model: Annotated[str, typer.Option(help="Name of a model, or module:function or file.py:function.")] = "ngram",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="name=value for the model; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/SUITE-MODEL if not given.")] = None,
    data: Annotated[
        Path | None, typer.Option(exists=True, help="Folder of <task>.jsonl, or the official data.zip; else the hub.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Read the hub from its local cache alone.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task, drawn by the seed.")] = None,
    ids_from: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Ask the samples of this earlier run.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at once.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens at once, prompts and answers, padded to the longest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draw, and of the order of equal lengths.")] = None,
    label: Annotated[str, typer.Option(help="What reports call the run; the folder's name if not given.")] = "",
    factor: Annotated[
        list[str] | None, typer.Option(help="name=level, such as kernel=new: what is compared; repeatable.")
    ] = None,
    require_kernel: Annotated[
        list[str] | None, typer.Option(help="stage/kernel that alone must serve every sample; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and estimate, and stop.")] = False,
) -> None:
    """Run a suite, or go on with a run that was interrupted.

    Exit codes: 0 every sample was answered, 2 usage, 4 the folder holds a run of other settings, 5 samples failed, 130
    interrupted.
    """
    # what a run needs is imported here, so that help is instant
    with _usage("run"):
        from .runner import RunOptions, run_suite

        options = RunOptions(
            suite=suite,
            model=model,
            model_options=_pairs(option or [], "--option"),
            out=out or Path("runs") / f"{Path(suite).stem}-{Path(model.partition(':')[0]).stem}",
            data=data,
            offline=offline,
            limit=limit,
            ids_from=ids_from,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            seed=seed,
            label=label,
            factors=_pairs(factor or [], "--factor"),
            kernels=tuple(require_kernel or ()),
            dry_run=dry_run,
        )
        code = run_suite(options, Console())
    raise typer.Exit(code)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two runs or more; the first of a pair is the measure.")],
    repeated: Annotated[
        Path | None, typer.Option("--aa", help="The first run once more: what changes without a change.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, .md, .json, junit.xml, flips.jsonl.")
    ] = None,
) -> None:
    """Judge runs by the margins that their suite declares.

    Exit codes: 0 equivalent, improved or not worse, 1 regressed, 2 usage, 3 the runs do not compare, 5 one run failed
    where the other answered, 6 not enough to say.
    """
    with _usage("compare"):
        from .arms import NotComparableError, read_arm
        from .compare import compare as compare_runs
        from .report import print_comparison, write_reports

        console = Console()
        try:
            arms = [read_arm(path) for path in runs]
            comparison = compare_runs(arms, None if repeated is None else read_arm(repeated))
        except NotComparableError as error:
            typer.echo("compare: the runs must be of the same questions, and differ:", err=True)
            for reason in error.reasons:
                typer.echo(f"  {reason}", err=True)
            raise typer.Exit(ExitCode.NOT_COMPARABLE) from error
        print_comparison(console, comparison)
        if out is not None:
            for path in write_reports(comparison, out):
                console.print(str(path), soft_wrap=True, highlight=False)
    raise typer.Exit(comparison.exit_code)


@app.command()
def score(
    path: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    scorer: Annotated[list[str] | None, typer.Option(help="Other scorers than the tasks' own; repeatable.")] = None,
) -> None:
    """Score the stored answers of a run anew, also by other scorers than those of its tasks."""
    with _usage("score"):
        from statistics import fmean

        from .run_folder import RunFolder
        from .scorers import find_scorer
        from .scoring import score_run, scores_of
        from .tasks import find_task

        folder = RunFolder(path)
        score_run(folder, scorer or None)
        for name in folder.tasks():
            task, items, records = find_task(name), folder.items(name), folder.latest(name)
            for one in scorer or task.scorers:
                values = scores_of(folder, task, find_scorer(one), items, records)
                if values:
                    typer.echo(f"{name:28} {one:28} {100 * fmean(values.values()):6.2f}  {len(values)} answers")


@app.command()
def suites() -> None:
    """Show the suites that come with the project, with their margins."""
    with _usage("suites"):
        from .suite import load_suite, suite_names

        for name in suite_names():
            suite = load_suite(name)
            typer.echo(f"{name:18} {len(suite.tasks):2} tasks  {suite.description}")
            for gate in suite.gates:
                typer.echo(f"{'':18} {gate.metric}: a loss of {gate.margin:g} is accepted  {gate.name}")


@app.command()
def tasks() -> None:
    """Show the tasks that a suite may name."""
    with _usage("tasks"):
        from .tasks import all_tasks

        for task in all_tasks().values():
            count = "generated" if task.num_samples is None else f"{task.num_samples} records"
            typer.echo(f"{task.name:32} {task.family:12} {task.scored_by:18} {count}, {task.max_new_tokens} new tokens")


@app.command()
def capture(
    model: Annotated[str, typer.Option(help="Name of a model, or module:function or file.py:function.")],
    task: Annotated[str, typer.Option(help="Whose prompts are read; see `assay eval tasks`.")],
    op: Annotated[str, typer.Option(help="mla_prefill or attention.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the calls; new or empty.")],
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="name=value for the model; repeatable.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Such as 0,7,29; four from the first to the last if not given.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Prompts, spread over the task's lengths.")] = 8,
    max_mib: Annotated[int, typer.Option(min=1, help="Size of all calls: each has an equal share.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longer prompts lose their middle.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of prompts.")] = 0,
    data: Annotated[
        Path | None, typer.Option(exists=True, help="Folder of <task>.jsonl, or the official data.zip; else the hub.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Read the hub from its local cache alone.")] = False,
) -> None:
    """Record real inputs of an operation while a model reads a task; `assay check OP --captured DIR` judges on them."""
    with _usage("capture"):
        from .recording import RecordingOptions, record_calls

        options = RecordingOptions(
            model=model,
            model_options=_pairs(option or [], "--option"),
            task=task,
            op=op,
            out=out,
            layers=_numbers(layers),
            samples=samples,
            most_bytes=max_mib << 20,
            max_tokens=max_tokens,
            seed=seed,
            data=data,
            offline=offline,
        )
        record_calls(options, Console())


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers parted by commas."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts) or len(set(parts)) != len(parts):
        raise ValueError(f"--layers must be numbers parted by commas, each once, got {text!r}")
    return tuple(int(part) for part in parts)


def _pairs(texts: Sequence[str], name: str) -> dict[str, str]:
    """``name=value`` texts as a dictionary."""
    found = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key or key in found:
            raise ValueError(f"{name} must be name=value, each name once, got {text!r}")
        found[key] = value
    return found


if __name__ == "__main__":
    sys.exit(app())
