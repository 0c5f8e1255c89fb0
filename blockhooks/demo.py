"""The main job: train a byte-level GPT on Python's own source files, plain and hooked in turn, and compare the bits.

Each step is taken once in every *way*: by the plain loop, and through hook chains. All ways begin with the same
weights and draw the same random numbers, so each loss and each gradient has to be the same, bit for bit. Afterwards one
more step of each way is measured for the picture.
"""

from __future__ import annotations

import json
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockhooks import memory
from blockhooks.apply import apply_blocks
from blockhooks.budget import pareto
from blockhooks.chain import HookChain
from blockhooks.errors import BlockhooksError, import_extra
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.profile import Profile
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.hookspecs import hookimpl
from blockhooks.models import attach
from blockhooks.targets import build_model

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["GPT", "OptionError", "Options", "Way", "run"]

HEAD_WIDTH = 32
CORPUS_BYTES = 4 << 20
MODELS = ("gpt", "gpt2", "llama", "bert", "vit")
MIB = 1 << 20


class OptionError(BlockhooksError, ValueError):
    """An option of the demo has a value that does not fit; the message names the option."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, on what, and where the results go.

    Args:
        steps: Training steps, each taken in every way.
        model: ``"gpt"``, the one below; or an architecture of transformers: ``"gpt2"``, ``"llama"``, ``"bert"``, or
            ``"vit"``, to which the bytes are pixels.
        layers: Number of blocks.
        width: Width of the hidden state, a multiple of 32.
        seq: Bytes of text in a sequence.
        batch: Sequences in a batch.
        device: A torch device, such as ``"cpu"`` or ``"cuda"``.
        seed: Seed of weights, dropout and the choice of text.
        text: A file, or a folder whose ``*.py`` files are read; by default Python's standard library.
        out: Folder for the picture, the trace and the figures.
        memory_budget: Budget of the third way, as a fraction of the plain run's activation peak; 0 leaves it out.

    Raises:
        OptionError: If a value does not fit.
    """

    steps: int = 10
    model: str = "gpt"
    layers: int = 8
    width: int = 256
    seq: int = 256
    batch: int = 4
    device: str = "cpu"
    seed: int = 0
    text: Path | None = None
    out: Path = Path("blockhooks-demo")
    memory_budget: float = 0.5

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "width", "seq", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name}: expected at least 1, found {getattr(self, name)}")
        if self.model not in MODELS:
            raise OptionError(f"--model: expected one of {', '.join(MODELS)}, found {self.model!r}")
        if self.width % HEAD_WIDTH:
            raise OptionError(
                f"--width: expected a multiple of {HEAD_WIDTH} (the width of an attention head), found {self.width}"
            )
        if not 0 <= self.memory_budget <= 1:
            raise OptionError(
                "--memory-budget: expected a fraction of the plain run's peak in (0, 1], or 0 to leave it out, "
                f"found {self.memory_budget}"
            )
        if self.text is not None and not self.text.exists():
            raise OptionError(f"--text: no file or folder at {self.text}")
        if self.out.exists() and not self.out.is_dir():
            raise OptionError(f"--out: expected a folder, found a file at {self.out}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise OptionError(
                f"--device: {self.device!r} cannot be used here ({reason}); 'cpu' always can"
            ) from error


# --- text -------------------------------------------------------------------------------------------------------------


def read_text(options: Options) -> Tensor:
    """Read the bytes to train on.

    Returns:
        At most 4 MiB of text, as int64 of shape ``(bytes,)``.

    Raises:
        OptionError: If there is less text than one sequence needs.
    """
    source = options.text or Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in [source] if source.is_file() else sorted(source.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= CORPUS_BYTES:
            break
    if len(data) < options.seq + 2:
        raise OptionError(
            f"--text: {source} holds {len(data)} bytes, a sequence needs {options.seq + 2}; "
            "give more text or a shorter --seq"
        )
    return torch.frombuffer(data[:CORPUS_BYTES], dtype=torch.uint8).long()


def batches(text: Tensor, options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of input and target bytes, each of shape ``(batch, seq)``, without an end."""
    generator = torch.Generator().manual_seed(options.seed)
    steps = torch.arange(options.seq + 1)
    while True:
        starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=generator)
        windows = text[starts + steps].to(options.device)
        yield windows[:, :-1], windows[:, 1:]


# --- model ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP, each with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map x to x, of shape ``(B, T, D)``."""
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        inner = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        branch: Tensor = self.dropout(self.mlp_out(inner))
        return x + branch


class GPT(nn.Module):
    """A byte-level language model whose blocks run in the plain loop or through a hook chain.

    Attributes:
        hooks: The chain to run the blocks through; None is the plain loop.
    """

    def __init__(self, layers: int, width: int, seq: int) -> None:
        super().__init__()
        self.hooks: HookChain | None = None
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next byte at each place.

        Args:
            ids: Bytes, of shape ``(B, T)``.

        Returns:
            Logits of shape ``(B, T, 256)``.
        """
        x = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        if self.hooks is None:
            for block in self.blocks:
                x = block(x)
        else:
            x = apply_blocks(self.blocks, x, hooks=self.hooks)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_model(options: Options) -> nn.Module:
    """Build the model; those of transformers are small, and as they come from there."""
    if options.model == "gpt":
        return GPT(options.layers, options.width, options.seq)
    heads, side = options.width // HEAD_WIDTH, isqrt(options.seq)
    blocks = {
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
    }
    text = blocks | {"vocab_size": 256, "max_position_embeddings": options.seq}
    settings: dict[str, dict[str, int]] = {
        "gpt2": {
            "vocab_size": 256,
            "n_embd": options.width,
            "n_layer": options.layers,
            "n_head": heads,
            "n_positions": options.seq,
        },
        "llama": text | {"num_key_value_heads": heads},
        "bert": text,
        "vit": blocks
        | {
            "image_size": side,
            "patch_size": max(1, side // 8),
            "num_channels": 1,
            "num_labels": 256,
        },
    }
    model: nn.Module = build_model(options.model, settings[options.model])
    return model


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Run a model forward, and return its loss.

    Args:
        model: What `make_model` has built.
        ids: Bytes, of shape ``(B, T)``.
        targets: The next byte at each place, of the same shape.
    """
    if isinstance(model, GPT):
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    if getattr(model, "main_input_name", "") == "pixel_values":
        side = isqrt(ids.shape[1])
        pixels = ids[:, : side * side].reshape(-1, 1, side, side) / 255
        output = model(pixel_values=pixels, labels=targets[:, -1])
    else:
        output = model(input_ids=ids, labels=ids)
    loss: Tensor = output.loss
    return loss


@contextmanager
def hooked(model: nn.Module, hooks: HookChain | None) -> Iterator[None]:
    """Let the blocks of a model run through a hook chain within a ``with`` statement."""
    if hooks is None:
        yield
    elif isinstance(model, GPT):
        model.hooks = hooks
        try:
            yield
        finally:
            model.hooks = None
    else:
        with attach(model, hooks):
            yield


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One training step in one way.

    Attributes:
        loss: Mean cross-entropy per byte, in nats.
        seconds: Wall time of forward and backward.
        gradients: How many gradients there are.
        equal: How many of them have the bits of the first way's.
        random_equal: Whether the generator's state afterwards is the first way's.
    """

    loss: float
    seconds: float
    gradients: int
    equal: int
    random_equal: bool


class Way:
    """One way to run the same training: a model, its optimizer, and what its steps were.

    Args:
        name: What it is called in tables and pictures.
        options: The options of the demo.
        plugins: Plugins of the hook chain, to which a profile is added; None is the plain loop.
    """

    def __init__(self, name: str, options: Options, plugins: Sequence[object] | None) -> None:
        self.name = name
        self.profile = Profile()
        self.plugins = [] if plugins is None else list(plugins)
        self.profiled = HookChain([*self.plugins, self.profile])
        self.hooks = None if plugins is None else self.profiled
        torch.manual_seed(options.seed)
        self.model = make_model(options).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps: list[Step] = []
        self.timeline = Timeline()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last step, in the order of the parameters."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self, batch: tuple[Tensor, Tensor], seed: int, first: Way) -> None:
        """Take a training step and compare it with the first way's."""
        # Gradients stay allocated from step to step, so that what a step allocates is its activations.
        self.optimizer.zero_grad(set_to_none=False)
        torch.manual_seed(seed)
        with hooked(self.model, self.hooks):
            began = clock(batch[0])
            loss = loss_of(self.model, *batch)
            torch.autograd.backward(loss)
            seconds = (clock(batch[0]) - began) / 1e9
        self.random_state = torch.get_rng_state()
        gradients = self.gradients()
        self.steps.append(
            Step(
                loss=loss.item(),
                seconds=seconds,
                gradients=len(gradients),
                equal=sum(map(torch.equal, gradients, first.gradients())),
                random_equal=torch.equal(self.random_state, first.random_state),
            )
        )
        self.optimizer.step()

    def measure(self, batch: tuple[Tensor, Tensor]) -> None:
        """Take one more step, without an update, and record its live bytes over time."""
        device, spans = batch[0].device, Spans()
        hooks: HookChain | None = None
        watched: AbstractContextManager[None] = nullcontext()
        if self.hooks is not None:
            # Outermost, so that a span covers all that the chain does for a block.
            hooks = HookChain([spans, *self.hooks.plugins])
            watched = self.profile.measure(device)
        self.optimizer.zero_grad(set_to_none=False)
        with hooked(self.model, hooks), watched, memory.peak(device, timeline=True) as meter:
            began = time.perf_counter_ns()
            forward_done = self.run(batch)
            done = clock(batch[0])
        self.timeline = Timeline(
            peak=meter.peak,
            live=[(at - began, live) for at, live in meter.timeline],
            forward_done=forward_done - began,
            done=done - began,
            recomputes=[(start - began, stop - began) for start, stop in spans.recomputes],
        )

    def complete_profile(self, batch: tuple[Tensor, Tensor]) -> None:
        """Profile some steps of the plain loop, too; its own steps were taken without any hooks."""
        if self.hooks is not None:
            return
        with hooked(self.model, self.profiled):
            for _ in range(2):
                self.run(batch)
            with self.profile.measure(batch[0].device):
                self.run(batch)

    def run(self, batch: tuple[Tensor, Tensor]) -> int:
        """Do forward and backward, and return when the forward was done, in ns."""
        loss = loss_of(self.model, *batch)
        forward_done = clock(batch[0])
        torch.autograd.backward(loss)
        return forward_done


class Spans:
    """An observer that notes when blocks are recomputed."""

    def __init__(self) -> None:
        self.recomputes: list[tuple[int, int]] = []

    @hookimpl(wrapper=True)
    def run_block(self, recomputing: bool) -> Any:
        """Note the time around a block that is recomputed, also when an early stop ends it (R5)."""
        began = time.perf_counter_ns()
        try:
            return (yield)
        finally:
            if recomputing:
                self.recomputes.append((began, time.perf_counter_ns()))


@dataclass
class Timeline:
    """Live bytes of one step over time; times in ns from its beginning.

    Attributes:
        peak: The most bytes that were live at once.
        live: Pairs of time and live bytes, one for each change.
        forward_done: When the forward ended.
        done: When the backward ended.
        recomputes: Begin and end of each recompute of a block.
    """

    peak: int = 0
    live: list[tuple[int, int]] = field(default_factory=list)
    forward_done: int = 0
    done: int = 0
    recomputes: list[tuple[int, int]] = field(default_factory=list)

    def phase(self, at: int) -> str:
        """Tell whether a time lies in the forward, in a recompute or in the backward."""
        if at < self.forward_done:
            return "forward"
        if any(start <= at < stop for start, stop in self.recomputes):
            return "recompute"
        return "backward"

    def samples(self) -> list[tuple[int, int]]:
        """Return the live bytes over time, with one sample more wherever a phase begins."""
        edges = [self.forward_done, self.done, *(at for span in self.recomputes for at in span)]
        samples, amount = [], 0
        for at, live in sorted([*((at, -1) for at in edges), *self.live]):
            amount = amount if live < 0 else live
            samples.append((at, amount))
        return samples


def clock(tensor: Tensor) -> int:
    """Read the time in ns, once the tensor's device has done its work."""
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter_ns()


def step_time(way: Way) -> float:
    """Return the median time of a way's steps, in seconds; the first step warms up."""
    return statistics.median(step.seconds for step in way.steps[1:] or way.steps)


def time_ratio(way: Way, first: Way) -> float:
    """Return the median time of a way's steps by that of the first way's."""
    return step_time(way) / step_time(first)


def bit_equal(way: Way, first: Way) -> bool:
    """Tell whether every loss, gradient and random state of a way is the first way's."""
    return all(
        a.loss == b.loss and a.equal == a.gradients == b.gradients and a.random_equal
        for a, b in zip(way.steps, first.steps, strict=True)
    )


# --- what is shown ----------------------------------------------------------------------------------------------------


def figures(options: Options, ways: Sequence[Way]) -> dict[str, Any]:
    """Collect all that was found, ready for JSON."""
    first = ways[0]
    return {
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "ways": {
            way.name: {
                "bit_equal": bit_equal(way, first),
                "peak_bytes": way.timeline.peak,
                "peak_ratio": way.timeline.peak / first.timeline.peak,
                "time_ratio": time_ratio(way, first),
                "steps": [asdict(step) for step in way.steps],
                "hooks": [] if way.hooks is None else [type(p).__name__ for p in way.hooks.plugins],
                "profile": way.profile.to_dict(),
            }
            for way in ways
        },
    }


def loss_table(ways: Sequence[Way]) -> Table:
    """Show the loss of each step, side by side."""
    table: Table = import_extra("rich.table", "demo", "the demo").Table(
        title="Loss of each step (nats per byte)"
    )
    table.add_column("step", justify="right")
    for way in ways:
        table.add_column(way.name, justify="right")
    table.add_column("gradients bit-equal", justify="right")
    for number, steps in enumerate(zip(*(way.steps for way in ways), strict=True), start=1):
        compared = steps[1:]
        equal, gradients = sum(s.equal for s in compared), sum(s.gradients for s in compared)
        table.add_row(str(number), *(f"{s.loss:.9f}" for s in steps), f"{equal} of {gradients}")
    return table


def summary_table(ways: Sequence[Way]) -> Table:
    """Show what each way costs, and whether it is bit for bit the plain loop."""
    table: Table = import_extra("rich.table", "demo", "the demo").Table(
        title="Memory and time of a step",
        caption="peaks, and the budget, are of the whole step: blocks, embeddings, logits and loss",
    )
    table.add_column("")
    for heading in ("activation peak", "of plain", "step time", "of plain", "bit for bit"):
        table.add_column(heading, justify="right")
    first = ways[0]
    for way in ways:
        table.add_row(
            way.name,
            f"{way.timeline.peak / MIB:.1f} MiB",
            f"{way.timeline.peak / first.timeline.peak:.0%}",
            f"{step_time(way) * 1e3:.0f} ms",
            f"{time_ratio(way, first):.2f}",
            "" if way is first else "yes" if bit_equal(way, first) else "NO",
        )
    return table


WRITTEN = {
    "memory.png": "live activations over one step of each way",
    "report.html": "all ways side by side, block by block; open it in a browser",
    "trace.json": "the blocks over time; open it at https://ui.perfetto.dev",
    "figures.json": "all figures",
    "pareto.png": "time against memory: what other budgets would give",
}
COLORS = {"forward": "#0072b2", "recompute": "#e69f00", "backward": "#009e73"}
HATCHES = {"forward": None, "recompute": "////", "backward": None}


def draw(options: Options, ways: Sequence[Way], path: Path) -> None:
    """Draw the live activation bytes of each way over one step, one panel below the other, as a PNG."""
    figure_type = import_extra("matplotlib.figure", "demo", "drawing the picture").Figure
    patch = import_extra("matplotlib.patches", "demo", "drawing the picture").Patch
    figure = figure_type(figsize=(10, 1.4 + 2.2 * len(ways)), dpi=160, layout="constrained")
    panels = figure.subplots(len(ways), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, way in zip(panels, ways, strict=True):
        draw_panel(axes, way, ways[0])
    panels[0].set_ylim(0, max(way.timeline.peak for way in ways) / MIB * 1.2)
    panels[0].set_xlim(0, max(way.timeline.done for way in ways) / 1e6)
    panels[-1].set_xlabel("time since the step began (ms, with the meter on)")
    figure.supylabel("live activations (MiB)", fontsize=10)
    figure.suptitle("One training step: what is alive, and when", fontsize=13, fontweight="bold")
    panels[0].set_title(
        f"{options.model}, {options.layers} blocks, width {options.width}, sequence {options.seq}, "
        f"batch {options.batch}, {options.device}",
        loc="right",
        fontsize=9,
        color="#555555",
    )
    figure.legend(
        handles=[
            patch(facecolor=COLORS[name], hatch=HATCHES[name], edgecolor="white", label=name)
            for name in COLORS
        ],
        loc="outside lower center",
        ncols=len(COLORS),
        frameon=False,
    )
    figure.savefig(path)


def draw_panel(axes: Any, way: Way, first: Way) -> None:
    """Fill the area below the live bytes of one way, coloured by phase."""
    timeline = way.timeline
    samples = timeline.samples()
    times = [at / 1e6 for at, _ in samples]
    live = [amount / MIB for _, amount in samples]
    phases = [timeline.phase(at) for at, _ in samples]
    for name, color in COLORS.items():
        axes.fill_between(
            times,
            live,
            # Up to the sample at which the next phase begins.
            where=[name in pair for pair in zip(phases, [None, *phases], strict=False)],
            step="post",
            facecolor=color,
            edgecolor="white",
            hatch=HATCHES[name],
            linewidth=0,
        )
    axes.step(times, live, where="post", color="#222222", linewidth=0.7)
    axes.axvline(timeline.forward_done / 1e6, color="#222222", linewidth=0.8, linestyle=":")
    peak = timeline.peak / MIB
    axes.axhline(peak, color="#222222", linewidth=0.8, linestyle="--")
    share = "" if way is first else f", {timeline.peak / first.timeline.peak:.0%} of {first.name}"
    axes.annotate(
        f"peak {peak:.0f} MiB{share}",
        xy=(0.995, peak),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    axes.set_title(way.name, loc="left", fontsize=10, fontweight="bold")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# --- the job ----------------------------------------------------------------------------------------------------------


def make_ways(options: Options) -> list[Way]:
    """Build the ways to compare, the plain loop first."""
    ways = [
        Way("plain", options, None),
        Way("checkpoint", options, [Checkpoint(), RNGSnapshot()]),
    ]
    if options.memory_budget:
        name = f"budget {options.memory_budget:.0%}"
        ways.append(Way(name, options, [Checkpoint(memory_budget=options.memory_budget)]))
    return ways


def train(options: Options, ways: Sequence[Way], advance: Callable[[], None]) -> None:
    """Take every step in every way in turn, then measure one more of each."""
    stream = batches(read_text(options), options)
    for number, batch in zip(range(options.steps), stream, strict=False):
        for way in ways:
            way.step(batch, options.seed + number, ways[0])
            advance()
    batch = next(stream)
    for way in ways:
        way.measure(batch)
        way.complete_profile(batch)
        advance()


def write(options: Options, ways: Sequence[Way]) -> list[str]:
    """Write all files, and return their names."""
    out = options.out
    draw(options, ways, out / "memory.png")
    ways[1].profile.chrome_trace(out / "trace.json")
    (out / "figures.json").write_text(json.dumps(figures(options, ways), indent=2) + "\n")
    planners = [p.planner for way in ways for p in way.plugins if isinstance(p, Checkpoint)]
    planner = next((planner for planner in planners if planner is not None), None)
    curve, chosen = None, None
    if planner is not None and planner.plans:
        curve, chosen = pareto(planner.profiles[0]), planner.plans[0]
        curve.plot(out / "pareto.png", chosen)
    ways[-1].profile.report(
        out / "report.html",
        {way.name: way.profile for way in ways[:-1]},
        name=ways[-1].name,
        pareto=curve,
        plan=chosen,
    )
    return [name for name in WRITTEN if name != "pareto.png" or curve is not None]


def run(options: Options, console: Console) -> bool:
    """Run the demo: train, show the tables, write the files.

    Args:
        options: What to train.
        console: Where tables and the progress bar go.

    Returns:
        Whether every loss, every gradient and every random state was bit for bit the plain loop's.
    """
    progress = import_extra("rich.progress", "demo", "the demo")
    options.out.mkdir(parents=True, exist_ok=True)
    ways = make_ways(options)
    console.print(
        f"{options.steps} steps, each in {len(ways)} ways ({', '.join(way.name for way in ways)}), and one more to measure; "
        f"files go to {options.out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    with progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("training", total=(options.steps + 1) * len(ways))
        train(options, ways, partial(bar.advance, task))
    written = write(options, ways)
    console.print(loss_table(ways), summary_table(ways))
    console.print(ways[1].profile.table(), markup=False, highlight=False, soft_wrap=True)
    for name in written:
        told = f"{options.out / name}: {WRITTEN[name]}"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    return all(bit_equal(way, ways[0]) for way in ways)
