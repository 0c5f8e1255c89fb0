"""What each block costs: the time of forward, recompute and backward apart, and the bytes that autograd keeps."""

from __future__ import annotations

import copy
import json
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerAction
from torch.utils._pytree import tree_leaves

from blockhooks import memory
from blockhooks.errors import BlockhooksError, HookError, check_flag
from blockhooks.hookspecs import hookimpl
from blockhooks.report import table as tables
from blockhooks.report.figures import BlockStep, Figures, compare, scalars
from blockhooks.report.live import Strip
from blockhooks.report.page import write_page
from blockhooks.report.trace import chrome_trace
from blockhooks.saved import hooks_around
from blockhooks.timeline import (
    FORWARD,
    RECOMPUTE,
    FlopCounter,
    Sizes,
    Step,
    Storage,
    Timeline,
    Watch,
    autograd_is_plain,
    nodes_since,
    saved_in_graph,
    saved_through,
    sequence_number,
    sizes,
)

if TYPE_CHECKING:
    from rich.table import Table

    from blockhooks.plan import Mode, Segment
    from blockhooks.run import Block, Hidden, Run

__all__ = ["Profile"]

# Steps whose spans are kept for a trace, and steps that may wait for a backward that perhaps never comes.
TRACED: Final = 3
PENDING: Final = 16
# Bytes and operations hardly change from step to step, and counting them costs more than taking the time.
COUNT_EVERY: Final = 32

Schedule = Callable[[int], Any]
_Plan = tuple[tuple["Segment", tuple[str, ...]], ...]  # segments with the names of their blocks


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
        flops: Also count floating-point operations, by the formulas of `torch.utils.flop_counter`.
        ranges: Make each execution a range of `torch.profiler.record_function`, as in ``"3: Layer recompute"``, which
            torch's profiler and NVTX show.
        live: Show blocks as a heat strip while training, refreshed at most four times a second; needs rich.

    Raises:
        HookError: If an argument is none of these.

    Side: outside (the run) and inside, in the forward and in each recompute. Keeps no tensor (R8).

    Note:
        Bytes and operations are counted in the first step, whenever x, the plan or the mode of a block has changed, and
        in every 32nd step; the times of such a step are a little longer.
    """

    def __init__(
        self,
        *,
        schedule: Schedule | int | None = None,
        flops: bool = False,
        ranges: bool = False,
        live: bool = False,
    ) -> None:
        self._options: dict[str, Any] = {
            "schedule": schedule,
            "flops": flops,
            "ranges": ranges,
            "live": live,
        }
        for option in ("flops", "ranges", "live"):
            check_flag(self._options[option], f"Profile({option}=...)")
        self._schedule = _schedule(schedule)
        self._flops = flops
        if flops:
            FlopCounter.prepare()
        self._ranges = ranges
        self._strip = Strip() if live else None
        self._figures = Figures()
        self._pending: deque[Step] = deque()
        self._traced: deque[Step] = deque(maxlen=TRACED)
        self._step: Step | None = None
        self._number = -1
        self._by_hand = False
        self._counted: dict[str, _Counted] = {}
        self._plans: dict[str, _Plan] = {}  # by their first block
        self._measuring = False
        self._measured: Step | None = None
        self._memory: dict[str, Any] | None = None
        self._device = torch.device("cpu")
        self._chain = ""

    # ------------------------------------------------------------------------------------------------------- hooks

    @hookimpl(wrapper=True)
    def run_blocks(self, run: Run, x: Hidden) -> Generator[None, Any, Any]:
        """Find the step that this run belongs to."""
        if not run.blocks:
            return (yield)
        names = _labels(run)
        # Those that this run executes: one of a stack, where an attached model calls its blocks one by one.
        executed = [names[index] for segment in run.segments for index in segment.indices]
        step = self._step_of(executed, x)
        if not step.recorded:
            return (yield)
        segments = run.segments if run.planned is None else (run.planned,)
        planned = tuple((segment, names[segment.start : segment.stop]) for segment in segments)
        if self._note_plan(planned):
            for name in executed:
                self._counted.pop(name, None)
        run.state[self] = _Recording(step, names)
        step.runs += 1
        try:
            return (yield)
        except BaseException:
            # Nobody knows what became of what was saved.
            step.unsettled.clear()
            self._counted.clear()
            raise
        finally:
            step.runs -= 1
            step.timeline.end = step.timeline.now()
            self._chain = run.hooks.describe()

    @hookimpl(wrapper=True)
    def run_segment(
        self, run: Run, segment: Segment, recomputing: bool
    ) -> Generator[None, Any, Any]:
        """Know the segments around a block."""
        recording: _Recording | None = run.state.get(self)
        if recording is None or recomputing:
            return (yield)
        recording.segments.append(segment)
        try:
            return (yield)
        finally:
            recording.segments.pop()

    @hookimpl(wrapper=True)
    def run_block(
        self, run: Run, index: int, block: Block, x: Hidden, recomputing: bool
    ) -> Generator[None, Any, Any]:
        """Take the time of one execution, and in the forward see to the backward's."""
        recording: _Recording | None = run.state.get(self)
        if recording is None:
            return (yield)
        if recomputing or not autograd_is_plain():
            with recording.timed(index, RECOMPUTE if recomputing else FORWARD):
                return (yield)
        inputs, hooks = _nodes(x), hooks_around()
        mode = _Mode.of(block, x, dropping=hooks is not None)
        x_sizes = None if self._is_counted(recording, index, mode) else sizes(_tensors(x))
        began = sequence_number()
        if x_sizes is None or hooks is None:
            seen = None
            with recording.timed(index, FORWARD):
                result = yield
        else:
            with saved_through(hooks) as seen, recording.timed(index, FORWARD):
                result = yield
        outputs = [node for node in _nodes(result) if node._sequence_nr() >= began]
        if x_sizes is not None:
            if seen is None:
                seen = saved_in_graph(nodes_since(began, outputs))
            saved = _Saved(
                mode.dropping, seen, _not_counted(run, block), x_sizes, sizes(_tensors(result))
            )
            recording.note_saved(index, saved)
            recording.count_flops(index, nodes_since(began, outputs))
        recording.watch(index, inputs, outputs)
        self._refresh(recording.step)
        return result

    def _note_plan(self, planned: _Plan) -> bool:
        """Keep a plan in place of those that were made for its blocks before, and tell whether it is new."""
        first = planned[0][1][0]
        if self._plans.get(first) == planned:
            return False
        names = {name for _, held in planned for name in held}
        for key, before in list(self._plans.items()):
            if any(name in names for _, held in before for name in held):
                del self._plans[key]
        self._plans[first] = planned
        return True

    def _is_counted(self, recording: _Recording, index: int, mode: _Mode) -> bool:
        """Take the bytes and operations of a block from a step before, unless they are to be counted in this one."""
        name, step = recording.names[index], recording.step
        block = step.block(index, name)
        before = self._counted.get(name)
        if before and before.mode == mode and step.number - before.step < COUNT_EVERY:
            block.take_counted(before.block)
            return True
        self._counted[name] = _Counted(mode, step.number, block)
        if self._flops:
            step.count_flops(name)
        return False

    def _refresh(self, step: Step) -> None:
        if self._strip is not None and self._strip.due():
            steps = (*self._traced, *self._pending)
            done = [s for s in steps if s is not step and s.blocks and s.timeline.done]
            if done:
                self._strip.show(done[-1].figures())

    # ----------------------------------------------------------------------------------------------------- figures

    def step(self) -> None:
        """Begin a step: for steps of several runs, such as accumulated gradients.

        From the first call on steps begin here alone, so their wall time is that from call to call.
        """
        self._by_hand = True
        if self._step is not None:
            self._step.timeline.end = self._step.timeline.now()
        self._begin_step(self._device)

    def close(self) -> None:
        """End the live display, and leave its last picture in the terminal."""
        if self._strip is not None:
            self._strip.close()

    @contextmanager
    def measure(self, device: torch.device | str | None = None) -> Iterator[None]:
        """Measure the live bytes of the step within a ``with`` statement: forward and backward.

        Gives the peak of each block and of the step, and the picture of live bytes over time. The step is slower, so
        its times are left out where others were recorded.

        Args:
            device: Where to measure, as for `blockhooks.memory.peak`.

        Raises:
            BlockhooksError: If no block ran within the statement.
        """
        self._step, self._measuring, self._measured = None, True, None
        try:
            with memory.peak(device, timeline=True) as meter:
                began_ns = time.perf_counter_ns()
                yield
                ended_ns = time.perf_counter_ns()
            self._memory = self._live_bytes(meter, began_ns, ended_ns)
        finally:
            self._step, self._measuring = None, False

    def _live_bytes(self, meter: memory.Meter, began_ns: int, ended_ns: int) -> dict[str, Any]:
        if self._measured is None:
            raise BlockhooksError(
                "Profile.measure() expected a step within the with statement, found no run with this profile in its "
                "chain; call the model there, and its backward."
            )
        return self._measured.memory(meter.timeline, meter.peak, began_ns, ended_ns)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain numbers, strings, lists and dicts, for JSON or an experiment tracker.

        Times are in milliseconds per step (``mean``, ``p50``, ``p95``), sizes in bytes. Waits for the device.
        """
        figures, steps = self._read()
        return {
            **figures.to_dict(self._memory),
            "device": _device_name(self._device),
            "versions": _versions(),
            "chain": self._chain,
            "plan": [
                {**segment.to_dict(), "blocks": list(names)}
                for planned in self._plans.values()
                for segment, names in planned
            ],
            "timeline": steps[-1].spans() if steps else [],
            "memory": self._memory,
        }

    def scalars(self) -> dict[str, float]:
        """Return the figures that are numbers by a path, such as ``"blocks/3: Layer/recompute_ms"``.

        For experiment trackers: ``wandb.log(profile.scalars())``, ``mlflow.log_metrics(profile.scalars())``.
        """
        return scalars(self.to_dict())

    def log_to(self, writer: Any, step: int | None = None) -> None:
        """Write all scalars and the table to a TensorBoard ``SummaryWriter``.

        Args:
            writer: Anything with ``add_scalar`` and ``add_text``.
            step: Number of the training step.
        """
        figures = self.to_dict()
        for path, value in scalars(figures).items():
            writer.add_scalar(f"blockhooks/{path}", value, step)
        writer.add_text("blockhooks/table", tables.markdown_table(figures), step)

    def table(self) -> str:
        """Return a table with a line for each block; drawn by rich where that is installed."""
        figures = self.to_dict()
        try:
            return tables.drawn_table(figures)
        except ModuleNotFoundError:
            return tables.text_table(figures)

    def compare(self, other: Profile) -> dict[str, Any]:
        """Compare this profile with another one: ratios of times, this divided by the other, and bytes more.

        Returns:
            ``"totals"`` for a step and ``"blocks"`` for those that both have, by name.

        Raises:
            HookError: If `other` is no `Profile`.
        """
        return compare(self.to_dict(), _profile(other, "compare(other)").to_dict())

    def chrome_trace(self, path: str | Path) -> None:
        """Write the spans of the last steps as a trace that https://ui.perfetto.dev opens.

        Blocks are called by name, and recompute is a track of its own.

        Args:
            path: The file to write, by custom ``*.json``.
        """
        _, steps = self._read()
        origin_ns = steps[0].timeline.begin.ns if steps else 0
        trace = chrome_trace([step.trace(origin_ns) for step in steps], _versions())
        Path(path).write_text(json.dumps(trace))

    def report(
        self,
        path: str | Path,
        others: Mapping[str, Profile] | None = None,
        *,
        name: str = "this run",
        pareto: Any = None,
        plan: Any = None,
    ) -> None:
        """Write a page with all figures and charts, which opens from disk in any browser.

        Args:
            path: The file to write, by custom ``*.html``.
            others: Other profiles by name, to stand before this one on the page; differences are to the first.
            name: What this run is called there.
            pareto: What `blockhooks.budget.pareto` found, for a curve of time against memory.
            plan: The plan in use, to be marked on that curve; such as ``checkpoint.planner.plans[0]``.

        Raises:
            HookError: If `others`, `pareto` or `plan` is something else.
            MissingExtraError: If plotly is not installed.
        """
        if others is not None and not isinstance(others, Mapping):
            raise HookError(
                f"report(others=...) expected profiles by name, as in {{'plain': profile}}; found {others!r}."
            )
        runs = {
            key: _profile(other, f"report(others={{{key!r}: ...}})").to_dict()
            for key, other in (others or {}).items()
        } | {name: self.to_dict()}
        for option, given, maker in (("pareto", pareto, "pareto"), ("plan", plan, "solve")):
            if given is not None and not hasattr(given, "to_dict"):
                raise HookError(
                    f"report({option}=...) expected what blockhooks.budget.{maker} returns, found {given!r}."
                )
        curve, today = (None if each is None else each.to_dict() for each in (pareto, plan))
        write_page(path, runs, curve, today)

    def __deepcopy__(self, memo: dict[int, Any]) -> Profile:
        """A copy, as of a model with this profile, has seen no step."""
        return Profile(**self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Profile, **self._options), ()

    def __rich__(self) -> Table:
        return tables.rich_table(self.to_dict())

    def _repr_html_(self) -> str:
        return tables.html_table(self.to_dict())

    def __repr__(self) -> str:
        return f"Profile(steps={self._read()[0].steps})"

    # ------------------------------------------------------------------------------------------------------- steps

    def _step_of(self, names: Sequence[str], x: Hidden) -> Step:
        step = self._step
        again = step is not None and not step.runs and not step.names.isdisjoint(names)
        if step is None or (again and not self._by_hand):
            step = self._begin_step(_device(x))
        if step.names.issuperset(names[:1]) or not step.names:
            step.tokens = _tokens(x, step.tokens)
        step.names.update(names)
        return step

    def _begin_step(self, device: torch.device) -> Step:
        if self._step is not None:
            self._step.settle()
        self._device = device
        self._number += 1
        recorded = self._measuring or self._schedule(self._number)
        self._step = step = Step(self._number, Timeline(device, self._ranges), recorded)
        self._settle()
        if self._measuring:
            self._measured = step
        elif recorded:
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
            self._figures.add(step.figures())

    def _read(self) -> tuple[Figures, list[Step]]:
        """Return the figures with the steps that still may change, and the last steps."""
        figures = copy.deepcopy(self._figures)
        for step in self._pending:
            figures.add(step.figures())
        steps = [step for step in (*self._traced, *self._pending) if step.blocks]
        if not figures.steps and self._measured is not None:
            steps = [self._measured]
            figures.add(self._measured.figures())
        return figures, steps[-TRACED:]


class _Mode(NamedTuple):
    """What the bytes and operations of a block depend on, as far as can be seen from outside."""

    dropping: bool
    training: bool | None
    autocast: bool
    x: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    @classmethod
    def of(cls, block: Block, x: Hidden, dropping: bool) -> _Mode:
        """Look at a block that is about to be executed."""
        tensors = _tensors(x)
        return cls(
            dropping,
            getattr(block, "training", None),
            torch._C._is_any_autocast_enabled(),
            tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
        )


class _Counted(NamedTuple):
    """The step in which a block's bytes and operations were counted."""

    mode: _Mode
    step: int
    block: BlockStep


class _Saved(NamedTuple):
    """What autograd saved in the forward of a block.

    Attributes:
        dropping: Whether it went to hooks that may have dropped it.
        seen: The storages.
        without: Those that are not counted.
        x: Those of the block's input.
        result: Those of its result.
    """

    dropping: bool
    seen: Sizes
    without: Collection[Storage]
    x: Sizes
    result: Collection[Storage]


class _Recording:
    """One run in a step that is recorded: what the hooks know of it.

    Args:
        step: The step that the run belongs to.
        names: What its blocks are called in the figures.

    Attributes:
        segments: The segments around the block that is executed in the forward.
    """

    def __init__(self, step: Step, names: tuple[str, ...]) -> None:
        self.step = step
        self.names = names
        self.segments: list[Segment] = []

    @contextmanager
    def timed(self, index: int, phase: int) -> Iterator[None]:
        """Take the time of one execution of a block, and count its operations if they are to be counted."""
        name, step = self.names[index], self.step
        block = step.block(index, name)
        if phase == RECOMPUTE and block.dropped_bytes:
            block.mode = "recompute"  # whatever else keeps a part of it alive
        span = step.timeline.open(name, phase)
        try:
            with step.counting(name):
                yield
        finally:
            step.timeline.close(span)

    def note_saved(self, index: int, saved: _Saved) -> None:
        """Note what autograd saved in the forward of a block, to be settled when all segments have dropped theirs."""
        modes = (segment.mode for segment in reversed(self.segments) if segment.mode != "keep")
        block = self.step.block(index, self.names[index])
        self.step.unsettled.append(partial(self._settle, block, saved, next(modes, "recompute")))

    def _settle(self, block: BlockStep, saved: _Saved, mode: Mode) -> None:
        """Divide what was saved into what was dropped, what is kept, and x."""
        x, counted = saved.x, self.step.storages
        kept = dropped = of_x = inside = 0
        for storage, nbytes in saved.seen.items():
            if storage in counted or (storage in saved.without and storage not in x):
                continue
            if saved.dropping and storage() is None:
                dropped += nbytes
                continue
            counted.add(storage)
            if storage in x:
                of_x += x[storage]
            else:
                kept += nbytes
                inside += 0 if storage in saved.result else nbytes
        if dropped and not inside:
            # A region keeps its input, whether or not the block would have (R2).
            others = {storage for storage in x if storage not in counted and storage() is not None}
            of_x += sum(x[storage] for storage in others)
            counted |= others
        block.kept_bytes, block.dropped_bytes, block.x_bytes = kept, dropped, of_x
        # A plugin that drops a part of what is saved needs no segment of another mode for it.
        partly = inside > 0 and mode == "recompute"
        block.mode = "keep" if not dropped else "selective" if partly else mode

    def count_flops(self, index: int, nodes: Iterable[Node]) -> None:
        """Count the operations of a block's backward, if those of the block are counted in this step."""
        if self.step.flops is not None and self.names[index] in self.step.counted:
            self.step.flops.watch(nodes)

    def watch(self, index: int, inputs: Collection[Node], outputs: Sequence[Node]) -> None:
        """Take the time of the block's backward, whenever it comes.

        Args:
            index: The block's index.
            inputs: The nodes that made x.
            outputs: The nodes of the block that made its result.
        """
        if outputs:
            watch = Watch(self.step.timeline, self.names[index], len(inputs))
            for node in outputs:
                node.register_prehook(watch.begin)
            for node in inputs:
                node.register_prehook(watch.end)


def _labels(run: Run) -> tuple[str, ...]:
    """Return a name of its own for each block: the run's names, with the index where they are not."""
    names = run.names
    if len(names) > 1 and len(set(names)) == len(names):
        return names
    return tuple(f"{index}: {name}" for index, name in enumerate(names))


def _profile(other: Any, argument: str) -> Profile:
    if not isinstance(other, Profile):
        raise HookError(f"{argument} expected a Profile, found {other!r}.")
    return other


def _schedule(schedule: Schedule | int | None) -> Callable[[int], bool]:
    if schedule is None:
        return lambda number: True
    if callable(schedule) and not isinstance(schedule, type):
        recorded = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE, True)
        return lambda number: schedule(number) in recorded
    if isinstance(schedule, bool) or not isinstance(schedule, int) or schedule < 1:
        raise HookError(
            "Profile(schedule=...) expected n of at least 1, to record every n-th step, or a function of the step's "
            f"number such as torch.profiler.schedule(...); found {schedule!r}."
        )
    return lambda number: number % schedule == 0


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


def _tokens(x: Any, before: int | None) -> int | None:
    """Add the tokens of x, where it is ``(batch, tokens, width)`` as in a transformer."""
    shape = _tensors(x)[0].shape if _tensors(x) else ()
    return (before or 0) + shape[0] * shape[1] if len(shape) == 3 else before


def _device_name(device: torch.device) -> str:
    return (
        f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    )


def _not_counted(run: Run, block: Block) -> Sizes:
    """Return the storages that a block does not keep: parameters, buffers, and side inputs."""
    own = chain(block.parameters(), block.buffers()) if isinstance(block, nn.Module) else ()
    return sizes(chain(own, _tensors((run.args, run.kwargs))))


def _versions() -> dict[str, str]:
    try:
        own = version("blockhooks")
    except PackageNotFoundError:  # on the path without being installed
        own = "not installed"
    return {"blockhooks": own, "torch": torch.__version__, "python": platform.python_version()}
