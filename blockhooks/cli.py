"""The command line ``blockhooks``.

Exit codes: 0 when all is well, 1 when the answer is no (bits differ, a budget cannot be kept), 2 for an option or a
target that does not fit, 3 when the user's own code raised.
"""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import runpy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the command line needs {error.name}, which is not installed; "
        "install it with: pip install 'blockhooks[cli]'"
    ) from error

import torch

import blockhooks
from blockhooks import budget, hookspecs
from blockhooks import demo as demo_job
from blockhooks import plan as plans
from blockhooks.chain import DEFAULT_HOOKS, HOOKS
from blockhooks.costs import budget_in_bytes
from blockhooks.errors import BlockhooksError, BudgetError, PlanError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.offload import Offload
from blockhooks.hooks.profile import Profile
from blockhooks.hooks.selective import Selective
from blockhooks.models import attach
from blockhooks.plan import PlanFunction
from blockhooks.targets import FactoryError, Target, load_target
from blockhooks.verify import verify as run_verify

__all__ = ["main"]

NO, USAGE, YOURS = 1, 2, 3

app = typer.Typer(
    name="blockhooks",
    help="Activation checkpointing, profiling and hooks on the blocks of a model, bit for bit.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
progress = Console(stderr=True)

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="module:factory or file.py:factory (a function that returns a model and its inputs), or hf:TYPE.",
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Batch size of made-up inputs (hf:).")]
Seq = Annotated[int, typer.Option(min=1, help="Tokens in a made-up sequence (hf:).")]
Config = Annotated[
    list[str] | None,
    typer.Option(help="A setting of the architecture, key=value (hf:); repeatable."),
]
PLAN = typer.Option(
    help="Checkpoint by a plan function, such as every(1), first(4), tree(2) or sqrt()."
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command(epilog="Example: blockhooks demo --steps 5 --layers 12 --out my-demo")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each way.")] = 10,
    model: Annotated[
        str, typer.Option(help="gpt, or of transformers: gpt2, llama, bert, vit (extra hf).")
    ] = "gpt",
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
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Train a byte-level GPT plain and hooked in turn, and compare the bits.

    Writes pictures, a page, a trace and all figures into the folder --out. Exits with 1 if a single bit differs,
    or no plan keeps the budget.
    """
    options = demo_job.Options(
        steps=steps,
        model=model,
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
    console = Console(quiet=as_json)
    fine = demo_job.run(options, console)
    if as_json:
        typer.echo((out / "figures.json").read_text(), nl=False)
    if not fine:
        raise typer.Exit(NO)


@app.command(epilog="Example: blockhooks profile hf:gpt2 --config n_layer=4 --plan 'first(2)'")
def profile(
    target: TargetName,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure, after one to warm up.")] = 3,
    plan: Annotated[str | None, PLAN] = None,
    batch: Batch = 2,
    seq: Seq = 128,
    config: Config = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto here.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a page for a browser here.")] = None,
    as_json: Json = False,
) -> None:
    """Measure each block of a model: forward, recompute and backward, and the bytes kept.

    The model is not changed. Without --plan nothing is checkpointed.
    """
    checkpoint = [] if plan is None else [Checkpoint(parse_plan(plan))]
    loaded = load(target, batch, seq, config)
    measured = Profile()
    take_step(loaded)  # to warm up
    with attach(loaded.model, [*checkpoint, measured]):
        for _ in track(range(steps), "measuring", console=progress, transient=True):
            take_step(loaded)
        if page is not None:
            with measured.measure():
                take_step(loaded)
            measured.report(page, name=target)
    if trace is not None:
        measured.chrome_trace(trace)
    if as_json:
        print_json(measured.to_dict())
    else:
        Console().print(measured.table(), markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: blockhooks plan hf:gpt2 --memory-budget 0.5 --picture pareto.png")
def plan(
    target: TargetName,
    memory_budget: Annotated[
        str,
        typer.Option(help="A fraction of the plain peak such as 0.5, bytes, or text such as 8GiB."),
    ] = "0.5",
    batch: Batch = 2,
    seq: Seq = 128,
    config: Config = None,
    picture: Annotated[Path | None, typer.Option(help="Draw time against memory here.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save what was measured here, as JSON.")] = None,
    meta: Annotated[
        bool,
        typer.Option("--meta", help="Measure without executing: no memory, estimated times."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the blocks of a model, and find the fastest plan within a memory budget.

    TARGET may also be a file that --save has written, so that one machine can plan for another; with --meta it can even be
    one that the model does not fit on.
    Exits with 1 if no plan keeps the budget.
    """
    given = parse_budget(memory_budget)
    budget_in_bytes(given, plain_peak=0)  # whether it is one, before anything is measured
    measured = measure(target, batch, seq, config, meta)
    if save is not None:
        measured.save(save)
    found = budget.solve(measured, given)
    if picture is not None:
        budget.pareto(measured).plot(picture, found)
    if as_json:
        print_json(found.to_dict())
    else:
        Console().print(str(found), markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: blockhooks verify my_model.py:build --plan 'every(2)'")
def verify(
    target: TargetName,
    plan: Annotated[str, PLAN] = "every(1)",
    batch: Batch = 2,
    seq: Seq = 128,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Run a model plain and checkpointed from the same seeds, and compare bit for bit.

    Loss, outputs, gradients, buffers, attributes and random generators. Exits with 1 if a single bit differs.
    """
    checkpoint = Checkpoint(parse_plan(plan))
    loaded = load(target, batch, seq, config)
    with progress.status("comparing steps"), users_code(f"a step of {target}"):
        found = run_verify(loaded.model, loaded.kwargs or loaded.args, [checkpoint])
    if as_json:
        print_json(found.to_dict())
    else:
        Console().print(str(found), markup=False, highlight=False, soft_wrap=True)
    if not found:
        raise typer.Exit(NO)


@app.command(epilog="Example: blockhooks plugins --json")
def plugins(as_json: Json = False) -> None:
    """List the plugins that come with blockhooks, and those that installed packages offer."""
    found = list(known_plugins())
    if as_json:
        print_json(found)
        return
    table = Table("plugin", "from", "hooks", "in every chain")
    for entry in found:
        always = "yes" if entry["default"] else ""
        table.add_row(entry["name"], entry["from"], ", ".join(entry["hooks"]), always)
    Console().print(table)


@app.command("version", epilog="Example: blockhooks version --json")
def show_version(as_json: Json = False) -> None:
    """Print the versions of blockhooks, torch and Python."""
    versions = {
        "blockhooks": version("blockhooks"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if as_json:
        print_json(versions)
    else:
        for name, value in versions.items():
            typer.echo(f"{name} {value}")


# --- parts ------------------------------------------------------------------------------------------------------------


def load(target: str, batch: int, seq: int, config: list[str] | None, meta: bool = False) -> Target:
    """Load a target, with a sign of life."""
    with progress.status(f"loading {target}"):
        return load_target(target, batch=batch, seq=seq, config=config or (), meta=meta)


def take_step(target: Target) -> None:
    """Do a forward and a backward; gradients stay allocated."""
    target.model.zero_grad(set_to_none=False)
    with users_code(f"a step of {target.name}"):
        torch.autograd.backward(target.loss())


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Run the user's model; what it raises is the user's.

    Raises:
        FactoryError: If the model raises.
    """
    try:
        yield
    except BlockhooksError:
        raise
    except Exception as error:
        raise FactoryError(f"{what} raised {type(error).__name__}") from error


def measure(
    target: str, batch: int, seq: int, config: list[str] | None, meta: bool
) -> budget.ChainProfile:
    """Measure a target's blocks, or load what was measured before."""
    if target.endswith(".json"):
        return budget.ChainProfile.load(target)
    loaded = load(target, batch, seq, config, meta)
    with progress.status("measuring blocks"), users_code(f"a step of {target}"):
        return budget.measure(loaded.model, *loaded.args, **loaded.kwargs)


def parse_budget(text: str) -> str | int | float:
    """Read a memory budget: a number of bytes, a fraction, or text with a unit."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_plan(text: str) -> PlanFunction:
    """Read a plan function as it is written in Python, such as ``every(2)``.

    Raises:
        PlanError: If the text is none.
    """
    names = [
        name
        for name in plans.__all__
        if name in ("every", "sqrt", "tree", "binomial", "first", "blocks")
    ]
    expected = f"--plan: expected one of {', '.join(names)} with its numbers, as in 'every(2)', found {text!r}"
    match = re.fullmatch(rf"\s*({'|'.join(names)})\s*\((.*)\)\s*", text)
    if match is None:
        raise PlanError(expected)
    try:
        numbers = ast.literal_eval(f"[{match[2]}]")
        made: PlanFunction = getattr(plans, match[1])(*numbers)
    except PlanError as error:
        raise PlanError(f"--plan: {text!r}: {error}") from error
    except (TypeError, ValueError, SyntaxError) as error:
        raise PlanError(f"{expected} ({error})") from error
    return made


def known_plugins() -> Iterator[dict[str, Any]]:
    """Describe the plugins of blockhooks, and those that entry points offer."""
    defaults = {factory.__name__ for factory in DEFAULT_HOOKS}
    built_in = (Checkpoint, Selective, Offload, Profile, *DEFAULT_HOOKS)
    for plugin in built_in:
        yield describe(plugin, "blockhooks", plugin.__name__ in defaults)
    for entry in entry_points(group=hookspecs.PROJECT):
        yield describe(entry.load(), entry.value, False)


def describe(plugin: Any, source: str, default: bool) -> dict[str, Any]:
    """Tell a plugin's name, where it comes from, and the hooks that it implements."""
    hooks = [name for name in HOOKS if hasattr(getattr(plugin, name, None), "blockhooks_impl")]
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return {"name": name, "from": source, "hooks": hooks, "default": default}


def print_json(value: Any) -> None:
    """Print a value as JSON, and nothing else."""
    typer.echo(json.dumps(value, indent=2))


def show_users_traceback(error: BaseException) -> None:
    """Print the traceback of the user's code, without the frames of ours and of torch's that lead to it."""
    shown = traceback.TracebackException.from_exception(error)
    folders = (Path(m.__file__ or "").parent for m in (blockhooks, torch, importlib))
    ours = ("<frozen", runpy.__file__, *map(str, folders))
    while shown.stack and shown.stack[0].filename.startswith(ours):
        del shown.stack[0]
    typer.echo("".join(shown.format()), err=True, nl=False)


def main() -> None:
    """Run the command line; an error is a message and an exit code, not a traceback of ours."""
    try:
        app()
    except FactoryError as error:
        if error.__cause__ is not None:
            show_users_traceback(error.__cause__)
        typer.echo(f"blockhooks: {error}", err=True)
        raise SystemExit(YOURS) from None
    except (BlockhooksError, OSError) as error:  # a file that cannot be read or written
        typer.echo(f"blockhooks: {error}", err=True)
        too_small = isinstance(error, BudgetError) and error.floor is not None
        raise SystemExit(NO if too_small else USAGE) from None
