"""``assay bench``: device time of ours and of the peers in one run, held against the committed ratios."""

import gc
import importlib.util
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..discovery import load_operation, operation_names
from ..kernels import KernelNotFoundError
from ..operations import NAMES
from ..options import resolve_device
from ..plan import UsageError
from ..record import ExitCode, Verdict
from . import gate
from .ceilings import Gemm, measure_ceilings
from .cuda import CudaClock
from .lineup import Participant, line_up, peers_of
from .machine import describe_device, read_clocks, versions
from .results import BenchRun
from .schedule import ROUNDS
from .session import Setting, bench_shape
from .shapes import Shape, packaged_shapes, read_shapes, read_sweep
from .table import gate_table, print_run

RECORD, PAGE = "bench.json", "bench.html"
NO_DEVICE = "device time needs a CUDA device, found none: nothing was timed, but counted what a step costs the host"
_FAILS = frozenset(Verdict) - {Verdict.PASS, Verdict.UNSUPPORTED, Verdict.INVALID_CASE, Verdict.WAIVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of ``assay bench``, as given."""

    ops: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    peers: bool = False
    shapes: Path | None = None
    shape: tuple[str, ...] = ()
    sweep: Path | None = None
    against: str | None = None
    accept: bool = False
    out: Path | None = None
    device: str = "auto"
    seed: int = 0
    rounds: int = ROUNDS
    max_seconds: float | None = None


def run_bench(options: BenchOptions, console: Console) -> int:
    """Time, report, compare; return the exit code.

    Raises:
        UsageError: If the options cannot be served.
    """
    shapes = chosen_shapes(options)
    _check_libraries(options)
    device = resolve_device(options.device)
    # read before anything is timed: a file that is no baseline is better known at once
    baseline = _baseline(options, device)
    if device.type != "cuda":
        console.print(Text(NO_DEVICE, style="yellow"), soft_wrap=True)
        return _count_host_work(shapes, options, console)
    torch.cuda.set_device(device)
    with console.status("measuring ceilings"):
        setting = _setting(options, device)
    return bench(options, shapes, baseline, setting, console)


def bench(
    options: BenchOptions,
    shapes: list[Shape],
    baseline: gate.Baseline | None,
    setting: Setting,
    console: Console,
) -> int:
    """The same once there is a clock, and ceilings that it measured."""
    start, device = time.monotonic(), setting.device
    run = BenchRun(
        device=describe_device(device),
        versions=versions(),
        peers=peers_of(shape.op for shape in shapes),
        seed=options.seed,
        command=_command(options),
        ceilings=asdict(setting.ceilings),
        clocks=[setting.read_clocks()],
    )
    if baseline is not None and baseline.gpu != run.device["name"]:
        where = f"of {run.device['name']}, got those of {baseline.gpu}"
        console.print(Text(f"--against must hold the ratios {where}", style="red"), soft_wrap=True)
        return ExitCode.SETTINGS_DIFFER
    participants = _participants(options, shapes)
    with console.status("") as status:
        setting = replace(setting, say=status.update)
        for at, shape in enumerate(shapes):
            if options.max_seconds is not None and _too_late(run, start, options.max_seconds):
                run.not_started = [left.name for left in shapes[at:]]
                break
            run.shapes.append(bench_shape(load_operation(shape.op), shape, participants[shape.op], setting))
            console.print(Text(_finished(run), style="dim"), soft_wrap=True)
            _free(device)
            _write(run, options.out)
    run.clocks.append(setting.read_clocks())
    run.seconds = round(time.monotonic() - start, 1)
    print_run(console, run)
    lines = _compare(run, baseline, options, console)
    _write(run, options.out, lines=lines, page=True)
    code = _exit_code(run, lines, wanted=options.against is not None and not options.accept)
    return _accept(run, options, console, code) if options.accept else code


def _setting(options: BenchOptions, device: torch.device) -> Setting:
    clock, anchor = CudaClock(device), Gemm(device)
    return Setting(
        device=device,
        clock=clock,
        ceilings=measure_ceilings(clock, device, anchor, cache_bytes=clock.cache_bytes),
        anchor=anchor,
        seed=options.seed,
        rounds=options.rounds,
        read_clocks=partial(read_clocks, device),
    )


def _count_host_work(shapes: list[Shape], options: BenchOptions, console: Console) -> int:
    """What can be told of speed without a device: the counts of ``assay cost``. They stand in for no ratio."""
    from ..counts.host_cost import CostOptions, run_cost

    ops = [op for op in dict.fromkeys(shape.op for shape in shapes) if op in NAMES]
    if not ops:
        return ExitCode.NOTHING_JUDGED
    code = run_cost(CostOptions(ops=tuple(ops)), console)
    return ExitCode.NOTHING_JUDGED if code == ExitCode.PASSED and options.against is not None else code


def chosen_shapes(options: BenchOptions) -> list[Shape]:
    """The shapes of the named operations: the packaged ones, those of a file, or the points of a sweep.

    Raises:
        UsageError: If a file or a name is not understood, or nothing is left.
    """
    unknown = [name for name in options.ops if name not in operation_names()]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(operation_names())}, got {unknown[0]!r}")
    shapes = packaged_shapes() if options.shapes is None else read_shapes(options.shapes)
    if options.sweep is not None:
        shapes = read_sweep(options.sweep, shapes)
    names = [shape.name for shape in shapes]
    for name in options.shape:
        if name not in names:
            raise UsageError(f"--shape must be one of {', '.join(names)}, got {name!r}")
    shapes = [shape for shape in shapes if not options.shape or shape.name in options.shape]
    shapes = [shape for shape in shapes if not options.ops or shape.op in options.ops]
    if not shapes:
        raise UsageError(f"there must be a shape of {', '.join(options.ops) or 'some operation'}, got none")
    ops = {shape.op for shape in shapes}
    if options.kernels and len(ops) != 1:
        raise UsageError(f"--kernel needs the shapes of exactly one operation, got {', '.join(sorted(ops))}")
    if options.rounds < 2:
        raise UsageError(f"--rounds must be at least 2, got {options.rounds}")
    return shapes


def _check_libraries(options: BenchOptions) -> None:
    """Say before a long run what its end would need."""
    needed = ["scipy", *(["jinja2", "matplotlib"] if options.out is not None else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"assay bench must have {', '.join(needed)}, got no {missing[0]}: pip install 'kernel-assay[bench]'"
        )


def _baseline(options: BenchOptions, device: torch.device) -> gate.Baseline | None:
    """The committed ratios to compare with; None where there are none or none are wanted.

    Raises:
        UsageError: If the file that was named holds none.
    """
    if options.against is None:
        return None
    if options.against == gate.COMMITTED:
        path = gate.baseline_path(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return gate.read_baseline(path) if path is not None and path.is_file() else None
    path = Path(options.against)
    if options.accept and not path.exists():
        return None
    return gate.read_baseline(path)


def _participants(options: BenchOptions, shapes: list[Shape]) -> dict[str, list[Participant]]:
    try:
        return {
            op: line_up(load_operation(op), named=options.kernels, peers=options.peers)
            for op in dict.fromkeys(shape.op for shape in shapes)
        }
    except (KernelNotFoundError, TypeError) as error:
        raise UsageError(str(error)) from error


def _too_late(run: BenchRun, start: float, max_seconds: float) -> bool:
    """Whether a shape that takes as long as the longest before it would end after the time."""
    longest = max((shape.seconds for shape in run.shapes), default=0.0)
    return time.monotonic() - start + longest > max_seconds


def _compare(run: BenchRun, baseline: gate.Baseline | None, options: BenchOptions, console: Console) -> list[gate.Line]:
    if options.against is None:
        return []
    if baseline is None:
        if not options.accept:
            text = f"no baseline: nobody has accepted ratios for {run.device['name']}; assay bench --accept writes them"
            console.print(Text(text, style="yellow"), soft_wrap=True)
        return []
    lines = gate.compare(run, baseline)
    console.print(gate_table(lines))
    for line in lines:
        if line.status in ("regressed", "lost"):
            console.print(Text(f"{line.status}: {line}", style="red"), soft_wrap=True)
    return lines


def _exit_code(run: BenchRun, lines: list[gate.Line], *, wanted: bool) -> int:
    verdicts = {kernel.verdict for shape in run.shapes for kernel in shape.kernels}
    if Verdict.HARNESS_ERROR in verdicts:
        return ExitCode.HARNESS_ERROR
    compared = gate.exit_code(lines) if wanted else ExitCode.PASSED
    if verdicts & _FAILS or compared == ExitCode.FAILED:
        return ExitCode.FAILED
    if run.not_started:
        return ExitCode.INCONCLUSIVE
    return compared if Verdict.PASS in verdicts else ExitCode.NOTHING_JUDGED


def _finished(run: BenchRun) -> str:
    shape = run.shapes[-1]
    timed = sum(kernel.verdict is Verdict.PASS for kernel in shape.kernels)
    return f"{shape.shape}: {timed} of {len(shape.kernels)} kernels timed, {shape.seconds:.0f} s"


def _accept(run: BenchRun, options: BenchOptions, console: Console, code: int) -> int:
    """Write the ratios of a run in which nothing is wrong with ours; a peer's fault keeps only its own out."""
    ours = {kernel.verdict for shape in run.shapes for kernel in shape.kernels if kernel.role == "ours"}
    if ours & _FAILS or Verdict.PASS not in ours:
        text = f"nothing accepted: our kernels must pass, got {', '.join(sorted(ours - {Verdict.PASS})) or 'none'}"
        console.print(Text(text, style="red"), soft_wrap=True)
        return code
    name = str(run.device["name"])
    path = gate.baseline_path(name) if options.against in (None, gate.COMMITTED) else Path(str(options.against))
    count = gate.accept(run, path)
    console.print(f"accepted {count} ratios in {path}", highlight=False, soft_wrap=True)
    return code


def _write(run: BenchRun, out: Path | None, *, lines: list[gate.Line] | None = None, page: bool = False) -> None:
    """The record as far as it goes, so that an interruption leaves whole shapes; at the end the page, too."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        run.write(out / RECORD)
    except OSError as error:
        raise UsageError(f"--out must be a folder that can be written, got {out}: {error}") from error
    if page:
        from .page import html_page

        (out / PAGE).write_text(html_page(run, lines or []), encoding="utf-8")


def _free(device: torch.device) -> None:
    """Give back what a shape held, before the next one takes as much."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _command(options: BenchOptions) -> str:
    """The command line, for the record."""
    parts = ["assay bench", *options.ops]
    for flag, value in (
        ("--shapes", options.shapes),
        ("--sweep", options.sweep),
        ("--against", options.against),
        ("--seed", options.seed),
    ):
        parts += [flag, str(value)] if value is not None else []
    for flag, values in (("--kernel", options.kernels), ("--shape", options.shape)):
        parts += [part for value in values for part in (flag, value)]
    parts += [flag for flag, given in (("--peers", options.peers), ("--accept", options.accept)) if given]
    return " ".join(parts)
