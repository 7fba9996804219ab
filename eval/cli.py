"""The commands behind ``assay eval``; imports neither torch nor transformers before a command needs them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

# the exit code for "cannot be compared", which is what a missing part comes to
NOT_AVAILABLE = 3
USAGE = 2

PARTS = {
    "tasks": "LongBench and GSM8K items as prompts",
    "models": "local models and OpenAI-compatible servers behind one interface",
    "scorers": "answers to scores",
    "runner": "resumable runs over tasks",
    "compare": "the old kernel's run against the new one's",
    "statistics": "intervals, margins and power",
    "report": "the comparison as JSON, Markdown, HTML and JUnit",
    "capture": "real activations as inputs of an operation",
}

app = typer.Typer(
    name="eval",
    help="Does a swapped kernel hurt a model: end-to-end quality. Not complete yet: see `assay eval status`.",
)


def missing_parts() -> list[str]:
    """The parts of this room that do not exist yet, in the order of ``PARTS``."""
    specs = {part: find_spec(f"assay.eval.{part}") for part in PARTS}
    # a folder without an __init__ has a spec too, but no origin
    return [part for part, spec in specs.items() if spec is None or spec.origin is None]


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Run ``status`` when no command is given."""
    if context.invoked_subcommand is None:
        status()


@app.command()
def status() -> None:
    """Say which parts of the evaluation exist; exit with 3 while one is missing."""
    missing = missing_parts()
    for part, purpose in PARTS.items():
        typer.echo(f"{part:11} {'does not exist yet' if part in missing else 'exists':19} {purpose}")
    if missing:
        typer.echo(f"assay eval cannot run or compare models yet: {', '.join(missing)} do not exist.", err=True)
        raise typer.Exit(NOT_AVAILABLE)


@app.command("capture")
def capture_command(
    model: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="GGUF file of a Llama-style model.")],
    model_source: Annotated[str, typer.Option(help="Name, origin and licence of the model, for the metadata.")],
    text_source: Annotated[str, typer.Option(help="Name, origin and licence of the text, for the metadata.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The safetensors file to write.")],
    gsm8k: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text: the first questions of this GSM8K file.")
    ] = None,
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Text: this file, UTF-8.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt.")] = 384,
    rope_frequencies: Annotated[int, typer.Option(min=0, help="How many frequencies keep RoPE, fastest first.")] = 16,
) -> None:
    """Store real inputs of mla_prefill: activations of a model converted to latent attention.

    Needs the extra `model`, and `eval` with --gsm8k. Nothing is downloaded.
    """
    # torch is imported here, so that `assay --help` needs none
    from . import capture

    try:
        if gsm8k is not None and text is None:
            content = capture.gsm8k_text(gsm8k)
        elif text is not None and gsm8k is None:
            content = text.read_text(encoding="utf-8")
        else:
            raise ValueError("exactly one of --gsm8k and --text must be given")
        capture.capture_file(
            model=model,
            model_source=model_source,
            text=content,
            text_source=text_source,
            out=out,
            tokens=tokens,
            rope_frequencies=rope_frequencies,
            echo=typer.echo,
        )
    except (ModuleNotFoundError, NotImplementedError, ValueError) as error:
        typer.echo(f"capture: {error}", err=True)
        raise typer.Exit(USAGE) from error
