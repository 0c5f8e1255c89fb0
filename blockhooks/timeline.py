"""Where the time of a step goes, and what autograd keeps: the measuring parts of a profile.

A `Timeline` holds the spans of one step. Its marks are clock readings on the CPU and events on an accelerator, which
are resolved when figures are asked for, so that nothing waits for the device. `saved_in_graph` and `saved_through`
count what autograd saves for a block; `FlopCounter` counts operations. None of them keeps a tensor (R8).
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cache, partial
from operator import itemgetter
from threading import get_ident
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from blockhooks.report.figures import PHASES, BlockStep, StepFigures
from blockhooks.structure import parts_of

__all__ = [
    "BACKWARD",
    "FORWARD",
    "RECOMPUTE",
    "FlopCounter",
    "Sizes",
    "Span",
    "Step",
    "Storage",
    "Timeline",
    "Watch",
    "autograd_is_plain",
    "nodes_since",
    "saved_in_graph",
    "saved_through",
    "sequence_number",
    "sizes",
]

FORWARD, RECOMPUTE, BACKWARD = range(3)

POINTS: Final = 2000  # of a picture of live bytes


class Mark(NamedTuple):
    """A point in time: of the host's clock, and an event of the device if there is one."""

    ns: int
    event: Any = None


class Span:
    """A stretch of time that belongs to one block in one phase, inside of the span that was open when it began."""

    __slots__ = ("begin", "block", "end", "parent", "phase", "range", "task")

    def __init__(
        self, block: str, phase: int, parent: Span | None, task: tuple[int, object] | None
    ) -> None:
        self.block = block
        self.phase = phase
        self.parent = parent
        self.task = task
        self.begin: Mark
        self.end: Mark | None = None
        self.range: Any = None

    @property
    def depth(self) -> int:
        """Number of spans around this one."""
        return 0 if self.parent is None else 1 + self.parent.depth


class Timeline:
    """The spans of one step.

    Args:
        device: Device of x. Marks are events on an accelerator, and the clock of the host elsewhere.
        ranges: Whether each span is also a range of `torch.profiler.record_function`.

    Attributes:
        begin: When the step began.
        end: When the last run, span or backward ended.
        spans: All spans in the order in which they began.
        backwards: Number of backward passes that reached a block and have ended.
        on_backward: Called before the first block of each.
    """

    def __init__(self, device: torch.device, ranges: bool = False) -> None:
        self.device = device
        self.spans: list[Span] = []
        self.backwards = 0
        self._ranges = ranges
        self._on_host = device.type in ("cpu", "meta")
        self._open: defaultdict[int, list[Span]] = defaultdict(list)  # for each thread
        self._tasks: set[int] = set()
        self.on_backward: Callable[[], None] | None = None
        self.begin = self.end = self.now()

    def now(self) -> Mark:
        """Mark this point in time."""
        if self._on_host:
            return Mark(time.perf_counter_ns())
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return Mark(time.perf_counter_ns(), event)

    def innermost(self) -> Span | None:
        """The innermost span that is open in this thread."""
        stack = self._open[get_ident()]
        return stack[-1] if stack else None

    def open(self, block: str, phase: int, task: tuple[int, object] | None = None) -> Span:
        """Begin a span within the innermost open one of this thread."""
        stack = self._open[get_ident()]
        span = Span(block, phase, stack[-1] if stack else None, task)
        stack.append(span)
        self.spans.append(span)
        if self._ranges:
            span.range = record_function(f"{block} {PHASES[phase]}")
            span.range.__enter__()
        span.begin = self.now()
        return span

    def close(self, span: Span) -> None:
        """End a span, and those within it that an exception left open."""
        self.end = self.now()
        stack = self._open[get_ident()]
        while stack and span.end is None:
            self._pop(stack)

    def _pop(self, stack: list[Span]) -> None:
        span = stack.pop()
        span.end = self.end
        if span.range is not None:
            span.range.__exit__(None, None, None)
            span.range = None

    def backward_begins(self, watch: Watch) -> None:
        """Begin the backward of a block, which ends that of the block before it."""
        graph_task = torch._C._current_graph_task_id()
        open_span = self.innermost()
        if open_span is not None and open_span.task is not None and open_span.task[0] == graph_task:
            if open_span.task[1] is watch:
                return
            self.close(open_span)
        watch.waiting = watch.inputs
        if graph_task not in self._tasks:
            self._tasks.add(graph_task)
            if self.on_backward is not None:
                self.on_backward()
            engine: Any = Variable._execution_engine
            engine.queue_callback(partial(self._backward_ends, graph_task))
        self.open(watch.block, BACKWARD, (graph_task, watch))

    def block_ends(self, watch: Watch) -> None:
        """End the backward of a block once the gradient has reached all of its inputs."""
        watch.waiting -= 1
        span = self.innermost()
        if watch.waiting <= 0 and span is not None and span.task and span.task[1] is watch:
            self.close(span)

    def _backward_ends(self, graph_task: int) -> None:
        self._tasks.discard(graph_task)
        self.backwards += 1
        self.end = self.now()
        for stack in self._open.values():
            while stack and stack[-1].task is not None and stack[-1].task[0] == graph_task:
                self._pop(stack)

    @property
    def done(self) -> bool:
        """Whether the device has passed the last mark; never waits."""
        return self._on_host or bool(self.end.event.query())

    def resolve(self) -> None:
        """Wait until the device has passed the last mark."""
        if not self.done:
            self.end.event.synchronize()

    def elapsed(self, begin: Mark, end: Mark) -> float:
        """Milliseconds between two marks that the device has passed."""
        if begin.event is None or end.event is None:
            return (end.ns - begin.ns) / 1e6
        return float(begin.event.elapsed_time(end.event))

    def closed(self) -> Iterator[tuple[Span, float, float]]:
        """Yield each span that has ended with its begin and end, in ms from the beginning of the step."""
        for span in self.spans:
            if span.end is not None:
                begin = self.elapsed(self.begin, span.begin)
                yield span, begin, begin + self.elapsed(span.begin, span.end)


class Watch:
    """Tells a timeline when the backward of one block begins and ends, from hooks on autograd's nodes.

    Holds no node and no tensor, so the graph is freed as without it.

    Args:
        timeline: Where the spans go.
        block: Name of the block.
        inputs: Number of nodes that the gradient leaves the block by.
    """

    __slots__ = ("block", "inputs", "timeline", "waiting")

    def __init__(self, timeline: Timeline, block: str, inputs: int) -> None:
        self.timeline = timeline
        self.block = block
        self.inputs = self.waiting = inputs

    def begin(self, _: object) -> None:
        """Before the first node of the block."""
        self.timeline.backward_begins(self)

    def end(self, _: object) -> None:
        """Before a node that made one of the block's inputs."""
        self.timeline.block_ends(self)


# ------------------------------------------------------------------------------------------------------------- FLOPs


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count floating-point operations for the span that is open, by the formulas of `torch.utils.flop_counter`.

    Args:
        timeline: Whose spans.

    Attributes:
        flops: Operations by name of the block and phase.
    """

    supports_higher_order_operators = True

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[tuple[str, int]] = Counter()
        self._timeline = timeline
        self._depths: Counter[int] = Counter()  # for each thread

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: what is counted must be what runs without the counter."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        span = self._timeline.innermost()
        if formula is not None and span is not None:
            self.flops[span.block, span.phase] += formula(*args, **(kwargs or {}), out_val=result)
        return result

    @classmethod
    def prepare(cls) -> None:
        """Count an operation, so that what torch imports for seconds then is no time of a block."""
        with cls(Timeline(torch.device("cpu"))).counting():
            torch.empty(0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within a ``with`` statement."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    # Once on the stack of modes, whatever nests: a recompute runs within a node of a backward.

    def _begin(self, _: object = None) -> None:
        self._depths[get_ident()] += 1
        if self._depths[get_ident()] == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: object) -> None:
        self._depths[get_ident()] -= 1
        if self._depths[get_ident()] == 0:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def watch(self, nodes: Iterable[Node]) -> None:
        """Count in the backward of nodes: one by one, since autograd resets a thread's modes before each."""
        for node in nodes:
            node.register_prehook(self._begin)
            node.register_hook(self._end)


# -------------------------------------------------------------------------------------------------------------- steps


class Step:
    """What is recorded of one step.

    Args:
        number: The step's number, from 0.
        timeline: Where its spans go.
        recorded: Whether there will be any.

    Attributes:
        blocks: What is known of each block besides its spans, by name.
        names: The blocks that have run or will.
        runs: Runs that have begun and not ended.
        tokens: Tokens that went through the first of them, where x tells.
        flops: Counts operations, if they are counted in this step.
        counted: The blocks whose operations are counted.
        storages: Those whose bytes are counted already.
        unsettled: What is known of bytes once all segments have dropped what they drop: when a backward begins.
    """

    def __init__(self, number: int, timeline: Timeline, recorded: bool) -> None:
        self.number = number
        self.timeline = timeline
        self.recorded = recorded
        self.blocks: dict[str, BlockStep] = {}
        self.names: set[str] = set()
        self.runs = 0
        self.tokens: int | None = None
        self.flops: FlopCounter | None = None
        self.counted: set[str] = set()
        self.storages: set[Storage] = set()
        self.unsettled: list[Callable[[], None]] = []
        timeline.on_backward = self.settle

    def block(self, index: int, name: str) -> BlockStep:
        """Return what is known of a block."""
        if name not in self.blocks:
            self.blocks[name] = BlockStep(index, name)
        return self.blocks[name]

    def count_flops(self, name: str) -> None:
        """Count the operations of a block in this step."""
        self.flops = self.flops or FlopCounter(self.timeline)
        self.counted.add(name)

    def counting(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the operations of a block are counted, if they are to be."""
        return (
            nullcontext()
            if self.flops is None or name not in self.counted
            else self.flops.counting()
        )

    def settle(self) -> None:
        """Take down what is known now of bytes."""
        for settle in self.unsettled:
            settle()
        self.unsettled.clear()

    @property
    def wall_ms(self) -> float:
        """Milliseconds from the beginning to the end."""
        return self.timeline.elapsed(self.timeline.begin, self.timeline.end)

    def figures(self) -> StepFigures:
        """Return the figures as far as they are known; waits for the device."""
        self.settle()
        self.timeline.resolve()
        blocks = {name: copy(block) for name, block in self.blocks.items()}
        for name, block in blocks.items():
            block.ms, block.calls = [0.0] * 3, [0] * 3
            if self.flops is not None and name in self.counted:
                block.flops = [self.flops.flops[name, phase] for phase in range(3)]
        for span, begin, end in self.timeline.closed():
            blocks[span.block].ms[span.phase] += end - begin
            blocks[span.block].calls[span.phase] += 1
            if span.parent is not None and span.parent.end is not None:
                blocks[span.parent.block].ms[span.parent.phase] -= end - begin
        return StepFigures(self.number, self.wall_ms, blocks, self.tokens)

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans as plain numbers and strings, in milliseconds from the beginning."""
        self.timeline.resolve()
        return [_describe(span, begin, end) for span, begin, end in self.timeline.closed()]

    def trace(self, origin_ns: int) -> dict[str, Any]:
        """Return what a trace shows of this step.

        Args:
            origin_ns: Where the trace begins, by the host's clock.
        """
        return {
            "number": self.number,
            "begin_ms": (self.timeline.begin.ns - origin_ns) / 1e6,
            "wall_ms": self.wall_ms,
            "spans": self.spans(),
        }

    def memory(
        self, samples: Sequence[tuple[int, int]], peak: int, began_ns: int, ended_ns: int
    ) -> dict[str, Any]:
        """Return the live bytes over time, and the most that were live during each block.

        Args:
            samples: Times by the host's clock and live bytes, one for each change.
            peak: The most bytes that were live at once.
            began_ns: When the measurement began.
            ended_ns: When it ended.
        """
        self.timeline.resolve()
        times = [at for at, _ in samples]
        spans, peaks = [], dict.fromkeys(self.blocks, 0)
        for span in self.timeline.spans:
            if span.end is None:
                continue
            first, last = bisect_right(times, span.begin.ns), bisect_right(times, span.end.ns)
            live = [nbytes for _, nbytes in samples[max(first - 1, 0) : last]]
            peaks[span.block] = max(peaks[span.block], *live, 0)
            ends = ((mark.ns - began_ns) / 1e6 for mark in (span.begin, span.end))
            spans.append(_describe(span, *ends))
        return {
            "peak_bytes": peak,
            "block_peak_bytes": peaks,
            "wall_ms": (ended_ns - began_ns) / 1e6,
            "spans": spans,
            "live": [[(at - began_ns) / 1e6, live] for at, live in _thinned(samples)],
        }


def _describe(span: Span, begin: float, end: float) -> dict[str, Any]:
    return {
        "block": span.block,
        "phase": PHASES[span.phase],
        "begin_ms": begin,
        "end_ms": end,
        "depth": span.depth,
    }


def _thinned(samples: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the lowest and the highest of each few samples, in order of time: a picture shows no more."""
    few = max(1, 2 * len(samples) // POINTS)
    for start in range(0, len(samples), few):
        part = samples[start : start + few]
        ends = {min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}
        yield from sorted(ends)


# ---------------------------------------------------------------------------------------------------- saved tensors


Storage = weakref.ref[torch.UntypedStorage]
"""Tells a storage apart even when it is gone and its address is used again, and does not keep it."""

Sizes = dict[Storage, int]
"""Bytes of storages."""


@contextmanager
def saved_through(hooks: tuple[Any, Any]) -> Iterator[Sizes]:
    """Count the distinct storages that go to a pair of saved-tensor hooks within a ``with`` statement.

    Each tensor is handed on to that pair, so what a segment drops is dropped and what an offloader moves is moved.

    Args:
        hooks: The active pair, from `blockhooks.saved.hooks_around`.
    """
    seen: Sizes = {}
    pack, unpack = hooks

    def hand_on(tensor: Tensor) -> Any:
        _see(tensor, seen)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(hand_on, unpack):
        yield seen


def saved_in_graph(nodes: Iterable[Node]) -> Sizes:
    """Return the distinct storages that nodes of autograd's graph hold.

    Only looks, where `saved_through` would take autograd's place: hooks change which functions can be called.
    """
    seen: Sizes = {}
    for node in nodes:
        for name in _names_of_saved(type(node)):
            value = getattr(node, name) or ()
            for saved in value if isinstance(value, tuple) else (value,):
                if isinstance(saved.data, Tensor):
                    _see(saved.data, seen)
    return seen


@cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _see(tensor: Tensor, seen: Sizes) -> None:
    parameter = tensor.is_leaf and tensor.requires_grad  # known or not
    for storage in storages(tensor):
        seen.setdefault(weakref.ref(storage), 0 if parameter else storage.nbytes())


def sizes(tensors: Iterable[Tensor]) -> Sizes:
    """Return the storages of tensors."""
    return {weakref.ref(s): s.nbytes() for tensor in tensors for s in storages(tensor)}


def autograd_is_plain() -> bool:
    """Whether autograd records here, and is not that of torch.func's transforms."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def sequence_number() -> int:
    """Return a number that no node made so far in this thread has, but the next one."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def nodes_since(number: int, outputs: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that lead to some, as far as they were made since a `sequence_number`; without leaves."""
    seen: set[Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node in seen or node._sequence_nr() < number or hasattr(node, "variable"):
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions if following is not None]


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: one, or those of its parts if it is sparse or a wrapper around others."""
    parts = parts_of(tensor)
    if parts is not None:
        for part in parts:
            yield from storages(part)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())
