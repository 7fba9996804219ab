"""``assay route``: which path serves a prefill and why no other does, or a table of this GPU's own."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .startup import starting

if TYPE_CHECKING:
    from ..optimized.routing import MlaGeometry, Route, Step

console = Console()
errors = Console(stderr=True)

# without a GPU the question is about this one
DEFAULT_FAMILY = 90


def route_prefill(
    geometry: Annotated[str, typer.Option(help="Name of a model, such as deepseek-v3.2 or glm5.3-flash.")],
    q: Annotated[str | None, typer.Option(help="Queries of each request of the step, with commas between.")] = None,
    seq: Annotated[str | None, typer.Option(help="Tokens of each request, its queries included; as --q.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    backend: Annotated[str, typer.Option(help="Of sparse MQA, as the table names it.")] = "FLASHMLA_SPARSE",
    kv_format: Annotated[str, typer.Option(help="bfloat16, float16, or a quantised format.")] = "bfloat16",
    flash_attention: Annotated[int | None, typer.Option(min=2, help="Version of FlashAttention, if any.")] = None,
    device_family: Annotated[
        int | None, typer.Option(help="90, 100 ...: 10 times the compute capability; this GPU's, or else 90.")
    ] = None,
    dcp: Annotated[int, typer.Option(min=1, help="Ranks of decode context parallelism.")] = 1,
    decode_queries: Annotated[int, typer.Option(min=0, help="Most queries of a request that is no prefill.")] = 1,
    table: Annotated[str, typer.Option(help="vllm, or a file that --calibrate wrote.")] = "vllm",
    force: Annotated[str | None, typer.Option(help="dense, masked or mqa, where that can serve.")] = None,
    native: Annotated[bool, typer.Option(help="Whether native heads may serve.")] = True,
    native_min_queries: Annotated[
        int | None,
        typer.Option(help="Queries from which on native heads serve; 0 for always; the table's if not given."),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Time the paths here and write a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the table.")] = None,
) -> None:
    """Say which path serves a prefill of sparse MLA, and why the others do not.

    Exit codes: 0 answered, 1 what is forced cannot serve or nothing can, 2 usage, 3 no GPU to calibrate.
    """
    with starting(device="auto" if calibrate else "cpu"):
        from ..optimized import routing

    try:
        model = routing.find_geometry(geometry)
        if calibrate:
            raise typer.Exit(_calibrate(model, tp, out))
        if q is None or seq is None:
            raise ValueError("--q and --seq must be given unless --calibrate is")
        step = routing.Step(
            query_lens=_lengths("--q", q), seq_lens=_lengths("--seq", seq), decode_queries=decode_queries
        )
        deployment = routing.Deployment(
            device_family=_family() if device_family is None else device_family,
            tp=tp,
            backend=backend,
            kv_format=kv_format,
            flash_attention=flash_attention,
            dcp=dcp,
        )
        options = routing.RoutingOptions(force=force, native=native, native_min_queries=native_min_queries)
        answer = routing.route(model, step, deployment, table=table, options=options)
    except ValueError as error:
        errors.print(f"[bold red]usage:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except NotImplementedError as error:
        errors.print(escape(str(error)), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    family = deployment.device_family
    console.print(_heading(model, step, f"TP{tp}, device family {family}, table {answer.table}"), soft_wrap=True)
    console.print(_rendered(answer))


def _lengths(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{name} must be whole numbers with commas between, got {text!r}")
    return tuple(int(part) for part in parts)


def _family() -> int:
    """Of this machine's GPU, or else the default."""
    import torch

    return 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else DEFAULT_FAMILY


def _heading(model: "MlaGeometry", step: "Step", where: str) -> str:
    prefills = len(step.prefills)
    return (
        f"{model.name}: {prefills} prefill{'' if prefills == 1 else 's'}, max_query_len {step.max_query_len}, "
        f"max_seq_len {step.max_seq_len}, {step.num_queries} queries; {where}"
    )


def _rendered(answer: "Route") -> Table:
    """The path that was taken, then the others in the order in which they were tried."""
    table = Table(box=SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    forced = f" (forced: {answer.forced})" if answer.forced and answer.reason != "forced" else ""
    table.add_row(f"[bold green]{answer.path}[/]", escape(answer.reason + forced))
    for path, reason in answer.refused.items():
        table.add_row(f"not {path}", escape(reason))
    return table


def _calibrate(model: "MlaGeometry", tp: int, out: Path | None) -> int:
    """Write the table of this GPU; return the exit code."""
    import torch

    if model.num_heads % tp:
        raise ValueError(f"--tp must divide the {model.num_heads} heads of {model.name}, got {tp}")
    if not torch.cuda.is_available():
        errors.print("--calibrate needs a CUDA device, and there is none", style="red")
        return 3
    import triton

    from .route_calibrate import DeviceClock, calibrated

    device = torch.device("cuda", torch.cuda.current_device())
    clocked, gpu = DeviceClock(model, tp=tp, device=device), torch.cuda.get_device_name(device)
    found = calibrated(
        model,
        tp=tp,
        device_family=_family(),
        backend=clocked.backend,
        name=f"{model.name} TP{tp} on {gpu}",
        source=f"assay route --calibrate on {gpu}, torch {torch.__version__}, triton {triton.__version__}",
        clocked=clocked,
    )
    path = out or Path(f"routing-{model.name}-tp{tp}.json")
    path.write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {path}, for --backend {clocked.backend}", soft_wrap=True)
    return 0
