"""The command line ``blockhooks``.

Exit codes: 0 when all is well, 1 when the answer is no (bits differ, a budget cannot be kept), 2 for an option or a
target that does not fit, 3 when the user's own code raised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the command line needs {error.name}, which is not installed; "
        "install it with: pip install 'blockhooks[cli]'"
    ) from error

import blockhooks
from blockhooks import demo as demo_job
from blockhooks.errors import BlockhooksError

__all__ = ["main"]

app = typer.Typer(
    name="blockhooks",
    help="Activation checkpointing, profiling and hooks on the blocks of a model, bit for bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command(epilog="Example: blockhooks demo --steps 5 --layers 12 --out /tmp/demo")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each way.")] = 20,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 8,
    width: Annotated[int, typer.Option(min=32, help="Width; a multiple of 32.")] = 256,
    seq: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is random.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(help="File, or folder of *.py files; by default Python's standard library."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path(
        "blockhooks-demo"
    ),
    memory_budget: Annotated[
        float, typer.Option(help="Fraction of the plain peak for the third way; 0 leaves it out.")
    ] = 0.0,
) -> None:
    """Train a byte-level GPT plain and hooked in turn, and compare the bits.

    Writes a picture, a trace and all figures into the folder --out. Exits with 1 if a single bit differs.
    """
    options = demo_job.Options(
        steps=steps,
        layers=layers,
        width=width,
        seq=seq,
        batch=batch,
        device=device,
        seed=seed,
        text=text,
        out=out,
        memory_budget=memory_budget,
    )
    if not demo_job.run(options, Console()):
        raise typer.Exit(1)


@app.command(epilog="Example: blockhooks version --json")
def version(as_json: Json = False) -> None:
    """Print the versions of blockhooks, torch and Python."""
    import platform

    import torch

    versions = {
        "blockhooks": blockhooks.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if as_json:
        print_json(versions)
    else:
        for name, value in versions.items():
            typer.echo(f"{name} {value}")


def print_json(value: Any) -> None:
    """Print a value as JSON, and nothing else."""
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """Run the command line; an error of ours is a message and exit code 2, not a traceback."""
    try:
        app()
    except BlockhooksError as error:
        Console(stderr=True).print(
            f"blockhooks: {error}", markup=False, highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from error
