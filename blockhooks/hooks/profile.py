"""What each block costs: the time of forward, recompute and backward apart, and the bytes that autograd keeps."""

from __future__ import annotations

import copy
import json
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerAction
from torch.utils._pytree import tree_leaves

from blockhooks.hookspecs import hookimpl
from blockhooks.report import table as tables
from blockhooks.report.figures import PHASES, BlockStep, Figures, StepFigures, compare
from blockhooks.report.trace import chrome_trace
from blockhooks.timeline import (
    FORWARD,
    RECOMPUTE,
    SavedBytes,
    Timeline,
    Watch,
    active_hooks,
    hooks_are_possible,
    identities,
    storages,
)

if TYPE_CHECKING:
    from rich.table import Table

    from blockhooks.plan import Segment
    from blockhooks.run import Block, Hidden, Run

__all__ = ["Profile"]

# Steps whose spans are kept for a trace, and steps that may wait for a backward that perhaps never comes.
TRACED: Final = 3
PENDING: Final = 16

Schedule = Callable[[int], Any]


class Profile:
    """Measure what each block costs, and change nothing.

    For each block: milliseconds of forward, recompute and backward apart, calls, and the bytes that autograd keeps or
    that a segment dropped. Stands at any place of the chain; what is inside of it is measured with the block.

    A step begins with a run whose blocks have already run in the step before, and ends with the last backward that
    reached one of them; `step` divides by hand. Times are those of the host's clock on a CPU, and of events on an
    accelerator, which are read when figures are asked for: nothing waits for the device in a step.

    Args:
        schedule: Which steps to record: every n-th, or a function of the step's number such as
            ``torch.profiler.schedule(...)``. All by default.

    Side: outside (the run) and inside, in the forward and in each recompute. Keeps no tensor (R8).
    """

    def __init__(self, *, schedule: Schedule | int | None = None) -> None:
        self._schedule = _schedule(schedule)
        self._figures = Figures()
        self._pending: deque[_Step] = deque()
        self._step: _Step | None = None
        self._number = -1
        self._by_hand = False
        self._traced: deque[_Step] = deque(maxlen=TRACED)
        self._device = torch.device("cpu")
        self._chain = ""
        self._segments: Sequence[Segment] = ()

    # ------------------------------------------------------------------------------------------------------- hooks

    @hookimpl(wrapper=True)
    def run_blocks(self, run: Run, x: Hidden) -> Generator[None, Any, Any]:
        """Find the step that this run belongs to."""
        names = _labels(run)
        step = self._step_of(names, x)
        if not step.recorded:
            return (yield)
        run.state[self] = _Recording(step, names)
        step.runs += 1
        try:
            return (yield)
        finally:
            step.runs -= 1
            step.timeline.end = step.timeline.now()
            self._chain, self._segments = run.hooks.describe(), run.segments

    @hookimpl(wrapper=True)
    def run_segment(
        self, run: Run, segment: Segment, x: Hidden, recomputing: bool
    ) -> Generator[None, Any, Any]:
        """Know the segments around a block, and which of them dropped what autograd saved."""
        recording: _Recording | None = run.state.get(self)
        if recording is None or recomputing:
            return (yield)
        recording.enter(segment)
        try:
            return (yield)
        finally:
            recording.leave(segment, kept=segment in run.kept)

    @hookimpl(wrapper=True)
    def run_block(
        self, run: Run, index: int, block: Block, x: Hidden, recomputing: bool
    ) -> Generator[None, Any, Any]:
        """Take the time of one execution, and in the forward count what autograd saves."""
        recording: _Recording | None = run.state.get(self)
        if recording is None:
            return (yield)
        if recomputing or not hooks_are_possible():
            with recording.timed(index, RECOMPUTE if recomputing else FORWARD):
                return (yield)
        nodes, input_storages = (
            _nodes(x),
            {s._cdata: s.nbytes() for t in _tensors(x) for s in storages(t)},
        )
        outer = active_hooks()
        with SavedBytes(outer) as saved, recording.timed(index, FORWARD):
            result = yield
        counted = saved.take(_not_counted(run, block), input_storages.keys())
        recording.note_saved(index, counted, input_storages, outer)
        recording.watch(index, nodes, result)
        return result

    # ----------------------------------------------------------------------------------------------------- figures

    def step(self) -> None:
        """End a step, and begin the next: for steps of several runs, such as accumulated gradients.

        From the first call on steps end here alone, so their wall time is that from call to call.
        """
        self._by_hand = True
        if self._step is not None:
            self._step.timeline.end = self._step.timeline.now()
        self._begin_step(self._device)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain numbers, strings, lists and dicts, for JSON or an experiment tracker.

        Times are in milliseconds per step (``mean``, ``p50``, ``p95``), sizes in bytes. Waits for the device.
        """
        figures, steps = self._read()
        return {
            **figures.to_dict(),
            "device": _device_name(self._device),
            "versions": _versions(),
            "chain": self._chain,
            "plan": [segment.to_dict() for segment in self._segments],
            "timeline": steps[-1].spans() if steps else [],
        }

    def table(self) -> str:
        """Return a table with a line for each block; drawn by rich where that is installed."""
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return tables.text_table(self.to_dict())
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def compare(self, other: Profile) -> dict[str, Any]:
        """Compare this profile with another one: ratios of times, this divided by the other, and bytes more.

        Returns:
            ``"totals"`` for a step and ``"blocks"`` for those that both have, by name.
        """
        return compare(self.to_dict(), other.to_dict())

    def chrome_trace(self, path: str | Path) -> None:
        """Write the spans of the last steps as a trace that https://ui.perfetto.dev opens.

        Blocks are called by name, and recompute is a track of its own.

        Args:
            path: The file to write, by custom ``*.json``.
        """
        _, steps = self._read()
        origin = steps[0].timeline.began_ns if steps else 0
        trace = chrome_trace([step.trace(origin) for step in steps], _versions())
        Path(path).write_text(json.dumps(trace))

    def __rich__(self) -> Table:
        return tables.rich_table(self.to_dict())

    def _repr_html_(self) -> str:
        return tables.html_table(self.to_dict())

    def __repr__(self) -> str:
        return f"Profile(steps={self._read()[0].steps})"

    # ------------------------------------------------------------------------------------------------------- steps

    def _step_of(self, names: tuple[str, ...], x: Hidden) -> _Step:
        step = self._step
        again = step is not None and not step.runs and not step.names.isdisjoint(names)
        if step is None or (again and not self._by_hand):
            step = self._begin_step(_device(x))
        step.names.update(names)
        return step

    def _begin_step(self, device: torch.device) -> _Step:
        self._device = device
        self._number += 1
        self._step = step = _Step(self._number, device, self._schedule(self._number))
        self._settle()
        if step.recorded:
            self._pending.append(step)
        return step

    def _settle(self) -> None:
        """Take in the steps that are over, without waiting for the device; and some that perhaps never are."""
        while self._pending:
            step = self._pending[0]
            over = step.timeline.backwards > 0 and step.timeline.done
            if not over and len(self._pending) < PENDING:
                return
            self._pending.popleft()
            self._traced.append(step)
            step.add_to(self._figures)

    def _read(self) -> tuple[Figures, list[_Step]]:
        """Return the figures with the steps that still may change, and the last steps."""
        figures = copy.deepcopy(self._figures)
        for step in self._pending:
            step.add_to(figures)
        steps = [step for step in (*self._traced, *self._pending) if step.blocks]
        return figures, steps[-TRACED:]


class _Step:
    """What is recorded of one step.

    Attributes:
        number: From 0.
        recorded: Whether it is.
        timeline: Its spans.
        blocks: What is known of each block besides its spans.
        names: The blocks that have run.
        runs: Runs that have begun and not ended.
    """

    def __init__(self, number: int, device: torch.device, recorded: bool) -> None:
        self.number = number
        self.recorded = recorded
        self.timeline = Timeline(device)
        self.blocks: dict[str, BlockStep] = {}
        self.names: set[str] = set()
        self.runs = 0

    def add_to(self, figures: Figures) -> None:
        """Add this step's figures to others; waits for the device. Can be done again when more has come."""
        if not self.blocks:
            return
        self.timeline.resolve()
        blocks = {name: copy.copy(block) for name, block in self.blocks.items()}
        for block in blocks.values():
            block.ms, block.calls = [0.0] * 3, [0] * 3
        for span, begin, end in self.timeline.closed():
            blocks[span.block].ms[span.phase] += end - begin
            blocks[span.block].calls[span.phase] += 1
            if span.parent is not None and span.parent.end is not None:
                blocks[span.parent.block].ms[span.parent.phase] -= end - begin
        figures.add(StepFigures(self.number, self.wall_ms, blocks))

    @property
    def wall_ms(self) -> float:
        return self.timeline.elapsed(self.timeline.begin, self.timeline.end)

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans as plain numbers and strings."""
        self.timeline.resolve()
        return [
            {
                "block": span.block,
                "phase": PHASES[span.phase],
                "begin_ms": begin,
                "end_ms": end,
                "depth": span.depth,
            }
            for span, begin, end in self.timeline.closed()
        ]

    def trace(self, origin_ns: int) -> dict[str, Any]:
        """Return what a trace shows of this step."""
        return {
            "number": self.number,
            "begin_ms": (self.timeline.began_ns - origin_ns) / 1e6,
            "wall_ms": self.wall_ms,
            "spans": self.spans(),
        }


class _Recording:
    """One run in a step that is recorded: what the hooks know of it.

    Args:
        step: The step that the run belongs to.
        names: What its blocks are called in the figures.
    """

    def __init__(self, step: _Step, names: tuple[str, ...]) -> None:
        self.step = step
        self.names = names
        self._segments: list[Segment] = []
        # Not the hooks themselves: a profile keeps nothing of the user's alive.
        self._around = _identity(active_hooks())

    def enter(self, segment: Segment) -> None:
        """Begin the forward of a segment."""
        self._segments.append(segment)

    def leave(self, segment: Segment, kept: bool) -> None:
        """End the forward of a segment, which may have kept after all what its blocks seemed to drop."""
        self._segments.pop()
        if kept and not self._segments:
            for index in segment.indices:
                block = self._block(index)
                block.kept_bytes += block.dropped_bytes
                block.dropped_bytes, block.mode = 0, "keep"

    @contextmanager
    def timed(self, index: int, phase: int) -> Iterator[None]:
        """Take the time of one execution of a block."""
        self._block(index)
        span = self.step.timeline.open(self.names[index], phase)
        try:
            yield
        finally:
            self.step.timeline.close(span)

    def _block(self, index: int) -> BlockStep:
        name = self.names[index]
        if name not in self.step.blocks:
            self.step.blocks[name] = BlockStep(index, name)
        return self.step.blocks[name]

    def note_saved(
        self, index: int, counted: tuple[int, int], x: dict[int, int], outer: tuple[Any, Any] | None
    ) -> None:
        """Take down what autograd saved in the forward of a block.

        Args:
            index: The block's index.
            counted: Bytes besides x, and of x.
            x: Bytes of the storages of x.
            outer: The saved-tensor hooks that were active around the block.
        """
        block = self._block(index)
        if _identity(outer) == self._around:
            block.kept_bytes, block.x_bytes = counted
            return
        block.mode = next(
            (s.mode for s in reversed(self._segments) if s.mode != "keep"), "recompute"
        )
        if self._segments and index == self._segments[0].start:
            # A region keeps its input, whether or not the block would have (R2).
            block.dropped_bytes, block.x_bytes = counted[0], sum(x.values())
        else:
            block.dropped_bytes = sum(counted)

    def watch(self, index: int, inputs: set[Node], result: Hidden) -> None:
        """Take the time of the block's backward, whenever it comes."""
        outputs = _nodes(result) - inputs
        if outputs:
            watch = Watch(self.step.timeline, self.names[index], len(inputs))
            for node in outputs:
                node.register_prehook(watch.begin)
            for node in inputs:
                node.register_prehook(watch.end)


def _identity(hooks: tuple[Any, Any] | None) -> int | None:
    return None if hooks is None else id(hooks[0])


def _labels(run: Run) -> tuple[str, ...]:
    """Return a name of its own for each block: the run's names, with the index where they are not."""
    names = run.names
    if len(names) > 1 and len(set(names)) == len(names):
        return names
    return tuple(f"{index}: {name}" for index, name in enumerate(names))


def _schedule(schedule: Schedule | int | None) -> Callable[[int], bool]:
    if schedule is None:
        return lambda number: True
    if isinstance(schedule, int):
        if schedule < 1:
            raise ValueError(f"Profile(schedule={schedule}): every n-th step needs n of at least 1")
        return lambda number: number % schedule == 0
    recorded = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE, True)
    return lambda number: schedule(number) in recorded


def _tensors(x: Any) -> list[Tensor]:
    return (
        [x]
        if isinstance(x, Tensor)
        else [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    )


def _nodes(x: Any) -> set[Node]:
    return {tensor.grad_fn for tensor in _tensors(x) if tensor.grad_fn is not None}


def _device(x: Any) -> torch.device:
    return next((tensor.device for tensor in _tensors(x)), torch.device("cpu"))


def _device_name(device: torch.device) -> str:
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    )


def _not_counted(run: Run, block: Block) -> set[int]:
    """Return the storages that a block does not keep: parameters, buffers, and side inputs."""
    own = chain(block.parameters(), block.buffers()) if isinstance(block, nn.Module) else ()
    return identities(chain(own, _tensors((run.args, run.kwargs))))


def _versions() -> dict[str, str]:
    try:
        own = version("blockhooks")
    except PackageNotFoundError:  # on the path without being installed
        own = "not installed"
    return {"blockhooks": own, "torch": torch.__version__, "python": platform.python_version()}
