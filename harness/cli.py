"""The command line. Nothing heavy is imported until a command runs, so that help is instant."""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from .route_command import route_prefill
from .startup import starting

GROUP = "assay.commands"

console = Console()
errors = Console(stderr=True)


class _LazyGroup(TyperGroup):
    """Adds the subcommands of other rooms, which name themselves in the entry-point group ``assay.commands``."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Our own commands, then those of the other rooms."""
        return [*super().list_commands(ctx), *sorted(point.name for point in entry_points(group=GROUP))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Our own command of that name, or else another room's, imported now."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = [point for point in entry_points(group=GROUP) if point.name == cmd_name]
        return typer.main.get_command(found[0].load()) if found else None


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Prove that an attention kernel computes what its readable oracle says.",
)


@app.command("list")
def list_operations() -> None:
    """Show the operations, their oracles and the kernels that this machine can import."""
    with starting(device="cpu"):
        from .listing import operations_table, plugins_table

    console.print(operations_table())
    plugged = plugins_table()
    if plugged is not None:
        console.print(plugged)


@app.command()
def doctor() -> None:
    """Say what this machine can judge, and why not the rest."""
    with starting(device="auto"):
        from .doctor import diagnose, render

    console.print(render(diagnose()))


@app.command()
def check(
    ops: Annotated[list[str] | None, typer.Argument(help="Operations to judge; all if none is named.")] = None,
    kernel: Annotated[
        str | None,
        typer.Option(help="module:function, file.py:function, an entry point, a provider, or a pattern."),
    ] = None,
    tier: Annotated[
        str, typer.Option(help="smoke: under two minutes; full: everything; nightly: more, from a fresh seed.")
    ] = "smoke",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[list[str] | None, typer.Option(help="float32, float16 or bfloat16; repeatable.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the draw of cases and tensors; 0, in the nightly tier a fresh one.")
    ] = None,
    geometry: Annotated[str | None, typer.Option(help="R/Dn/Dr/Dv of mla_prefill, Dq/Dv of attention.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads, instead of the tier's own.")] = None,
    shapes: Annotated[Path | None, typer.Option(help="TOML file of cases to judge instead of the tier's.")] = None,
    captured: Annotated[
        Path | None, typer.Option(help="Folder of `assay eval capture`, whose calls are judged instead.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Judge this one case: its id, or the end of it.")] = None,
    family: Annotated[str | None, typer.Option(help="Judge this family only.")] = None,
    shard: Annotated[
        str | None, typer.Option(help="i/n: judge every n-th case from the i-th on; assay report merges the runs.")
    ] = None,
    list_cases: Annotated[bool, typer.Option("--list-cases", help="Show the plan and stop.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="Stop starting cases after this long.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a case may take a kernel of yours.")] = 120.0,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run a kernel of yours here, where a debugger can follow it.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cases judged side by side; up to four by default, few of them one by one."),
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option(help="TOML file of known failures, each with reason and expiry.")
    ] = None,
    cases: Annotated[
        str | None, typer.Option(help="Add the cases of an installed package, by entry-point name.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the records, and for a capsule of each failure.")] = None,
) -> None:
    """Judge kernels against their oracles.

    Exit codes: 0 all passed, 1 a verdict failed, 2 usage, 3 nothing was judged, 6 stopped before the end by
    --max-seconds, 7 harness error, 130 interrupted.
    """
    with starting(device=device):
        from .options import CheckOptions, seed_of
        from .plan import UsageError
        from .session import run_check

    if shard is not None and tier == "nightly" and seed is None:
        _usage("--seed must be given with --shard in the nightly tier, so that all shards are of one plan, got none")
    options = CheckOptions(
        ops=tuple(ops or ()),
        kernel=kernel,
        tier=tier,
        device=device,
        dtypes=tuple(dtype or ()),
        seed=seed_of(tier, seed),
        geometry=geometry,
        heads=heads,
        shapes=shapes,
        captured=captured,
        case_id=case,
        family=family,
        shard=shard,
        list_cases=list_cases,
        fail_fast=fail_fast,
        max_seconds=max_seconds,
        timeout=timeout,
        in_process=in_process,
        jobs=jobs,
        waivers=waivers,
        cases=cases,
        out=out,
    )
    try:
        code = run_check(options, console)
    except UsageError as error:
        _usage(str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; the records written so far are complete")
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Operations to time; all if none is named.")] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time the kernels of other authors that are here, too.")
    ] = False,
    kernel: Annotated[
        list[str] | None, typer.Option(help="Also time this kernel, as assay check names it; repeatable.")
    ] = None,
    shapes: Annotated[Path | None, typer.Option(help="TOML file of shapes instead of the packaged ones.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only the shape of this name; repeatable.")] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="TOML file of grids around shapes; their points are timed.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="File of accepted ratios, or the word committed for those of this GPU.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Write this run's ratios to the file of --against, or of this GPU.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the record and the page with the roofline.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the contents and of the runs whose answers are checked.")] = 0,
    rounds: Annotated[int, typer.Option(min=2, help="Of two runs of every kernel each, at least.")] = 20,
    max_seconds: Annotated[float | None, typer.Option(min=0, help="Start no shape that would end later.")] = None,
) -> None:
    """Time kernels that the judge passes, ours and the peers' interleaved, against this run's own ceilings.

    Exit codes: 0 all timed and no ratio worse than committed, 1 a verdict failed or a ratio regressed, 2 usage, 3
    nothing timed or nothing to compare with, 4 ratios of another GPU, 6 stopped before the end by --max-seconds, 7
    harness error, 130 interrupted.
    """
    with starting(device=device):
        from .bench.command import BenchOptions, run_bench
        from .plan import UsageError

    options = BenchOptions(
        ops=tuple(ops or ()),
        kernels=tuple(kernel or ()),
        peers=peers,
        shapes=shapes,
        shape=tuple(shape or ()),
        sweep=sweep,
        against=against,
        accept=accept,
        out=out,
        device=device,
        seed=seed,
        rounds=rounds,
        max_seconds=max_seconds,
    )
    try:
        code = run_bench(options, console)
    except UsageError as error:
        _usage(str(error))
    except KeyboardInterrupt:
        errors.print("interrupted; the record holds the shapes that were finished")
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def mutate(
    ops: Annotated[list[str] | None, typer.Argument(help="Operations; all if none is named.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the draw of cases and tensors.")] = 0,
    fresh_seeds: Annotated[
        int, typer.Option("--fresh-seeds", min=0, help="Run the correct variants on that many further seeds.")
    ] = 0,
    admission: Annotated[bool, typer.Option("--admission", help="Show that every case kills null kernels.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the kill matrix.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Operations side by side; up to four by default."),
    ] = None,
) -> None:
    """Judge the judge: plant known faults, which it must find, and correct variants, which it must accept.

    Exit codes: 0 all found and none rejected, 1 otherwise, 2 usage, 7 a process of the judge died, 130 interrupted.
    """
    with starting(device=device):
        from .mutation.command import MutateOptions, run_mutate
        from .plan import UsageError

    options = MutateOptions(
        ops=tuple(ops or ()),
        device=device,
        seed=seed,
        fresh_seeds=fresh_seeds,
        admission=admission,
        out=out,
        jobs=jobs,
    )
    try:
        code = run_mutate(options, console)
    except UsageError as error:
        _usage(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def replay(
    capsule: Annotated[Path, typer.Argument(help="JSON file of a failure, from the folder capsules of a run.")],
    kernel: Annotated[str | None, typer.Option(help="Another kernel than the recorded one.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the case may take.")] = 120.0,
    in_process: Annotated[bool, typer.Option("--in-process", help="Run the kernel here.")] = False,
) -> None:
    """Judge a recorded failure again.

    Exit codes: 0 it passes now, 1 it still fails, 2 usage, 3 not judged here, 7 harness error, 130 interrupted.
    """
    with starting(device=device):
        from .plan import UsageError
        from .replay_command import run_replay

    try:
        code = run_replay(capsule, kernel, device, console, timeout=timeout, in_process=in_process)
    except UsageError as error:
        _usage(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


@app.command()
def report(
    run: Annotated[list[Path], typer.Argument(help="Folder of a run; several of one plan are merged in --out.")],
    against: Annotated[Path | None, typer.Option(help="Folder of an earlier run of the same plan.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the reports; the run's own if not given.")] = None,
    form: Annotated[
        list[str] | None, typer.Option("--format", help="html, markdown or junit; repeatable; all if none is named.")
    ] = None,
) -> None:
    """Write the reports of a run, and compare it with an earlier one.

    Exit codes: 0 nothing got worse, 1 a verdict failed or regressed, 2 usage, 3 nothing in common, 4 other settings,
    6 judgements of the earlier run are missing.
    """
    with starting(device="cpu"):
        from .plan import UsageError
        from .report.command import run_report

    try:
        code = run_report(run[0], against, out, tuple(form or ()), console, others=run[1:])
    except UsageError as error:
        _usage(str(error))
    raise typer.Exit(code)


app.command("route")(route_prefill)


@app.command("compile")
def compile_kernels(
    ops: Annotated[list[str] | None, typer.Argument(help="Operations; all if none is named.")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90a or sm_100a; repeatable; all if none.")] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Commit what the compiler makes now.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the record, compile.json.")] = None,
) -> None:
    """Compile the Triton kernels of the house, without a GPU, and compare what comes out with what is committed.

    Exit codes: 0 nothing changed, 1 something did or no GPU could run it, 2 usage, 3 no baseline for these versions,
    7 harness error, 130 interrupted.
    """
    with starting(device="cpu"):
        from .counts.compile_gate import CompileOptions, run_compile

    options = CompileOptions(ops=tuple(ops or ()), archs=tuple(arch or ()), accept=accept, out=out)
    _run_gate(lambda: run_compile(options, console))


@app.command()
def cost(
    ops: Annotated[list[str] | None, typer.Argument(help="Operations; all if none is named.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Instead of the kernels of the house; as in assay check.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="File to compare with, instead of the committed one.")] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Write what is counted now into the file.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the record, cost.json.")] = None,
) -> None:
    """Count what a step costs the host, without a GPU, and compare the counts with what is committed.

    Exit codes: 0 nothing changed, 1 something did, 2 usage, 3 no baseline for these versions, 7 harness error,
    130 interrupted.
    """
    with starting(device="cpu"):
        from .counts.host_cost import CostOptions, run_cost

    options = CostOptions(ops=tuple(ops or ()), kernel=kernel, baseline=baseline, accept=accept, out=out)
    _run_gate(lambda: run_cost(options, console))


def _run_gate(gate: Callable[[], int]) -> NoReturn:
    """Exit with the code of a gate that needs no GPU."""
    from .plan import UsageError
    from .record import ExitCode

    try:
        code = gate()
    except UsageError as error:
        _usage(str(error))
    except RuntimeError as error:
        errors.print(escape(str(error)), style="red", highlight=False)
        raise typer.Exit(ExitCode.HARNESS_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    raise typer.Exit(code)


def _usage(text: str) -> NoReturn:
    errors.print(f"[bold red]usage:[/] {escape(text)}", highlight=False)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
