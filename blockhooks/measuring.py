"""Measure what one block costs, beside a step that goes on.

The block is executed again as in a recompute, so the world is left as it was, and its backward is run on stand-ins:
x is detached, and so are the tensors among the side inputs and each parameter, whose gradient is dropped as soon as it
exists. No gradient of the user's is touched, and no backward hook on a tensor or module is called. (What is called are
the derivatives of the user's own `autograd.Function`s, and hooks that a block puts on nodes of the graph.)

In a mode that moves what autograd keeps, x is a copy that nobody else holds, so that it can be seen to go, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from blockhooks import memory
from blockhooks.costs import BlockCosts, ModeCosts
from blockhooks.errors import BudgetError
from blockhooks.estimating import Estimate
from blockhooks.outside import LEAF, nodes_behind, storage_keys
from blockhooks.plan import Mode
from blockhooks.recompute import without_hooks
from blockhooks.structure import capture, tensors_in

__all__ = ["Execute", "Measured", "measure_block"]

Execute = Callable[[Any, contextlib.AbstractContextManager[Any]], Any]
"""``execute(x, inside) -> x``: one more execution of a block; `inside` is entered innermost, around the block."""


class SideInputs(Protocol):
    """Where a block's side inputs come from: see `blockhooks.run.Run`."""

    def side(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The side inputs."""
        ...

    def side_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Give others to the block."""
        ...


ModeContext = Callable[[], contextlib.AbstractContextManager[Any]]
"""What is entered around a block in a mode."""
_PLAIN: Final[ModeContext] = contextlib.nullcontext


def measure_block(
    execute: Execute,
    x: Any,
    *,
    modules: Iterable[nn.Module],
    side: SideInputs,
    name: str = "",
    modes: Mapping[Mode, ModeContext] | None = None,
    new_gradients: bool = False,
) -> Measured:
    """Measure time and bytes of a block's forward and backward.

    Args:
        execute: Executes the block.
        x: The hidden state before it. Not changed.
        modules: The modules whose parameters the block uses.
        side: The side inputs.
        name: The block's name.
        modes: Further modes to measure: what is entered around the block in each.
        new_gradients: Whether the gradients of parameters that have none are held once they are made.

    Returns:
        Its costs. Bytes are those of the meter (`blockhooks.memory`), above what is held before the block.

    Raises:
        BudgetError: If its backward needs other processes to do something that measuring does not.
    """
    bench = _Bench(execute, x, tuple(modules), side, new_gradients)
    try:
        kept, timed = bench.weigh(_PLAIN), bench.time(_PLAIN)
    except RuntimeError as error:
        if not bench.collectives:
            raise
        raise BudgetError(
            f"{name} cannot be measured ({error}): it waits for other processes inside of itself "
            f"({bench.collectives[0]}), and is not complete without what they do for its backward. Put the hooks inside "
            "of that (attach(model, ...) does with FSDP's blocks), or give a plan in place of a budget."
        ) from error
    modes_costs = []
    for mode, around in (modes or {}).items():
        lighter = bench.weigh(around, alone=mode == "offload")
        if lighter.kept - lighter.let_go >= kept.kept:  # nothing is gained
            continue
        slower = bench.time(around, alone=mode == "offload")
        extra = slower.forward + slower.backward - timed.forward - timed.backward
        modes_costs.append(
            ModeCosts(
                mode=mode,
                kept=lighter.kept,
                forward_peak=lighter.forward_peak,
                backward_peak=lighter.backward_peak,
                extra=max(extra, 0.0),
                let_go=lighter.let_go,
                unkept=lighter.unsaved,
            )
        )
    costs = BlockCosts(
        name=name,
        forward=timed.forward,
        backward=timed.backward,
        recompute=min(timed.recompute, timed.forward),
        output=kept.output,
        kept=kept.kept,
        forward_peak=kept.forward_peak,
        backward_peak=kept.backward_peak,
        recompute_peak=kept.recompute_peak,
        gradient=kept.gradient,
        modes=tuple(modes_costs),
    )
    given = storage_keys(tensors_in((x, side.side())))
    communicates = next(iter(bench.collectives), "")
    side_kept = frozenset(given & kept.saved)
    return Measured(costs, kept.unsaved, side_kept, kept.keeps_output, communicates)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a block.

    Attributes:
        costs: Its costs.
        unsaved: Bytes that it puts into its side inputs, and that autograd does not keep.
        saved: Keys of the storages that it was given and that autograd keeps.
        keeps_output: Whether autograd keeps what the block gives, for the block itself.
        communicates: An operation of its forward that waits for other processes, or nothing.
    """

    costs: BlockCosts
    unsaved: int
    saved: frozenset[int]
    keeps_output: bool
    communicates: str


@dataclass(slots=True)
class _Bytes:
    output: int = 0
    kept: int = 0
    gradient: int = 0
    forward_peak: int = 0
    recompute_peak: int = 0
    backward_peak: int = 0
    unsaved: int = 0
    let_go: int = 0
    keeps_output: bool = False
    saved: set[int] = field(default_factory=set)  # keys of storages


@dataclass(slots=True)
class _Seconds:
    forward: float
    recompute: float
    backward: float


class _Bench:
    """Executes one block and its backward on stand-ins."""

    def __init__(
        self,
        execute: Execute,
        x: Any,
        modules: tuple[nn.Module, ...],
        side: SideInputs,
        new_gradients: bool,
    ) -> None:
        self.execute, self.modules, self.side = execute, modules, side
        self.new_gradients = new_gradients
        self.x = capture(x, take_tensors=True)
        self.collectives: list[str] = []
        device = next((t.device for t in self.x.tensors), torch.device("cpu"))
        self.clock = _clock(device)
        self.device = device

    def weigh(self, around: ModeContext, *, alone: bool = False) -> _Bytes:
        """Measure bytes.

        Args:
            around: What is entered around the block.
            alone: Whether the block alone is to hold x.
        """
        found = _Bytes()
        with memory.peak(self.device) as meter:
            begin = _get_sequence_nr()
            x = self.stand_ins(alone)
            given = _storages(x)
            copies = [
                (weakref.ref(tensor.untyped_storage()), tensor.nbytes)
                for tensor in x
                if alone and _copyable(tensor)
            ]
            copied = meter.now

            def saved(tensor: Tensor) -> Tensor:
                found.recompute_peak = meter.peak
                found.saved |= storage_keys([tensor])
                return tensor.detach()  # a result would hold itself, where no backward comes by

            with_side_inputs: list[int] = []
            with _watching_communication(self.collectives):
                y = self.forward(x, around, saved, lambda: with_side_inputs.append(meter.now))
            del x
            found.forward_peak = meter.peak - copied
            found.unsaved = with_side_inputs[0] - with_side_inputs[1]
            results = tensors_in(y)
            made = {k: n for k, n in _storages(results).items() if k not in given}
            found.output, found.keeps_output = sum(made.values()), bool(found.saved & made.keys())
            found.let_go = sum(nbytes for copy, nbytes in copies if copy() is None)
            copied -= found.let_go
            found.kept = max(meter.now - copied - found.output, 0)
            found.gradient = sum(t.nbytes for t in results if t.requires_grad)
            root = _root(results)
            del y, results
            ends = _ends(root, begin)
            held = meter.now - copied
            with memory.peak(self.device) as backward:
                self.backward(root, ends)
            found.backward_peak = held + backward.peak
        return found

    def time(self, around: ModeContext, *, alone: bool = False) -> _Seconds:
        """Measure seconds, without any meter around."""
        with self.clock.running():
            return self._time(around, alone)

    def _time(self, around: ModeContext, alone: bool) -> _Seconds:
        clock, first = self.clock, _get_sequence_nr()
        x = self.stand_ins(alone)
        begin, stop = clock.now(), clock.now()

        def saved(tensor: Tensor) -> Tensor:
            nonlocal stop
            stop = clock.now()
            return tensor.detach()

        y = self.forward(x, around, saved)
        del x
        end = clock.now()
        root = _root(tensors_in(y))
        del y
        ends = _ends(root, first)
        begin_backward = clock.now()
        self.backward(root, ends)
        end_backward = clock.now()
        return _Seconds(
            clock.between(begin, end),
            clock.between(begin, stop),
            clock.between(begin_backward, end_backward),
        )

    def stand_ins(self, alone: bool) -> list[Tensor]:
        """Return what stands in for x's tensors: they themselves without their graph, or copies if the block is alone."""
        return list(map(_copy if alone else _detached, self.x.tensors))

    def forward(
        self,
        x: list[Tensor],
        around: ModeContext,
        saved: Callable[[Tensor], Tensor],
        note: Callable[[], object] = lambda: None,
    ) -> Any:
        """Execute the block.

        Args:
            x: Stand-ins for x's tensors.
            around: What is entered around the block.
            saved: Is handed what autograd saves, if nothing else is around.
            note: Called before, and again after, what the block has put into its side inputs is let go.
        """
        # A mode has hooks of its own, which would hand on what they keep to any around them.
        watched = saved_tensors_hooks(saved, _identity) if around is _PLAIN else around()
        # Those of a region that is running around us must not see this execution.
        with torch.enable_grad(), without_hooks(object):
            stand_ins = _StandIns(self.modules, self.side, self.new_gradients, note)
            with watched, _no_hooks_on_tensors():
                y = self.execute(self.x.rebuild(x), stand_ins)
                note()
                return y

    def backward(self, root: Tensor | None, ends: Sequence[GradientEdge]) -> None:
        if root is not None and ends:
            torch.autograd.grad(root, ends, allow_unused=True)


def _identity(value: Any) -> Any:
    return value


def _ends(root: Tensor | None, begin: int) -> list[GradientEdge]:
    """Return where a graph ends that was made from a sequence number on: at leaves, and at what was there before.

    Gradients are computed up to there and no further: what is older is the step's own, and its backward is to come. So
    an end that another one leads to is none.
    """
    nodes: list[Any] = [] if root is None else [root.grad_fn]
    edges: dict[Any, None] = {}
    known: set[Any] = set()
    for node in nodes:
        for edge in node.next_functions:
            earlier = edge[0]
            if earlier is None:
                continue
            if earlier.name() == LEAF or earlier._sequence_nr() < begin:
                edges[edge] = None
            elif earlier not in known:
                known.add(earlier)
                nodes.append(earlier)
    behind = set(nodes_behind(edge[0] for edge in edges))
    return [GradientEdge(*edge) for edge in edges if edge[0] not in behind]


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that wait for other processes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what it does to its parts comes here in turn
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _watching_communication(names: list[str]) -> contextlib.AbstractContextManager[Any]:
    """Note the operations that wait for other processes, if there can be any."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return _Collectives(names)
    return contextlib.nullcontext()


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return bytes by storage."""
    storages = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
    return {storage._cdata: storage.nbytes() for storage in storages}


# ------------------------------------------------------------------------------------------------ ends of the graph


class _Source(torch.autograd.Function):
    """Gives a block's results new gradients, which nobody holds but autograd, as in a step."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.likes = [(t.shape, t.dtype, t.device) for t in results]
        return torch.zeros((), device=results[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(
            torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes
        )


def _root(results: Iterable[Tensor]) -> Tensor | None:
    needed = [t for t in results if t.requires_grad]
    return _Source.apply(*needed) if needed else None  # type: ignore[no-untyped-call]


_AT_ONCE: Final = (1 << 64) - 1
"""The sequence number of nodes that are executed as soon as they have their gradients, as those of parameters."""


class _Sink(torch.autograd.Function):
    """Stands in for a parameter; its gradient is computed and dropped, or held if it would be in a step."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, hold: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.hold = hold
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.held = gradients if ctx.hold else None
        return None, None


class _StandIns(contextlib.AbstractContextManager[None]):
    """Puts stand-ins in the place of parameters and side inputs, inside of all that restores the modules' state.

    Modules have no backward hooks meanwhile.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        side: SideInputs,
        new_gradients: bool,
        end: Callable[[], object],
    ) -> None:
        self.modules, self.side, self.new_gradients, self.end = modules, side, new_gradients, end
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            given = capture(self.side.side(), take_tensors=True)
            if any(t.requires_grad for t in given.tensors):
                others = given.rebuild(list(map(_detached, given.tensors)))
                stack.enter_context(self.side.side_inputs(*others))
            stack.callback(self.end)
            sinks: dict[int, Tensor] = {}
            for module in self.modules:
                for name, value in _NO_BACKWARD_HOOKS.items():
                    module.__dict__[name] = value
                    stack.callback(module.__dict__.pop, name)
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        stack.callback(module._parameters.__setitem__, name, parameter)
                        module._parameters[name] = self._sink(parameter, sinks)  # type: ignore[assignment]
            self._stack = stack.pop_all()

    def _sink(self, parameter: nn.Parameter, sinks: dict[int, Tensor]) -> Tensor:
        if id(parameter) not in sinks:
            hold = self.new_gradients and parameter.grad is None
            leaf = parameter.detach().requires_grad_()
            sink: Tensor = _Sink.apply(leaf, hold)  # type: ignore[no-untyped-call]
            sink.grad_fn._set_sequence_nr(_AT_ONCE)  # type: ignore[union-attr]
            sinks[id(parameter)] = sink
        return sinks[id(parameter)]

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _detached(tensor: Tensor) -> Tensor:
    """Return a tensor that is not part of the step's graph, with the attributes that the user gave it."""
    alone = tensor.detach().requires_grad_(tensor.requires_grad)
    alone.__dict__.update(tensor.__dict__)
    return alone


def _copy(tensor: Tensor) -> Tensor:
    """Return a tensor that nobody else holds, with a graph that does not either, as a result of another block is.

    A leaf, which stays where it is, and what is more than a strided tensor are not copied.
    """
    if tensor.is_leaf or not _copyable(tensor):
        return _detached(tensor)
    with torch.enable_grad():
        leaf = tensor.new_empty(()).expand(tensor.shape).requires_grad_()
        copy: Tensor = _Copy.apply(leaf, tensor.detach())  # type: ignore[no-untyped-call]
    copy.__dict__.update(tensor.__dict__)
    return copy


def _copyable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


class _Copy(torch.autograd.Function):
    """Copies a tensor; the gradient goes to a leaf that stands for it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


_NO_BACKWARD_HOOKS: Final[dict[str, Callable[[], Any]]] = {
    "_get_backward_hooks": lambda: ([], []),
    "_get_backward_pre_hooks": list,
}
"""What a call of a module asks for its backward hooks, and those of all modules."""


class _Thread(threading.local):
    measures = False


_thread = _Thread()
_register_hook: Final = Tensor.register_hook
_lock = threading.Lock()
_measuring = 0


@contextlib.contextmanager
def _no_hooks_on_tensors() -> Iterator[None]:
    """Let hooks that this thread puts on tensors be none: they are for the step's own backward."""
    global _measuring
    with _lock:
        _measuring += 1
        Tensor.register_hook = _register_no_hook  # type: ignore[method-assign]
    _thread.measures = True
    try:
        yield
    finally:
        _thread.measures = False
        with _lock:
            _measuring -= 1
            if not _measuring:
                Tensor.register_hook = _register_hook  # type: ignore[method-assign]


def _register_no_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    handle = _register_hook(tensor, hook)  # type: ignore[no-untyped-call]
    if _thread.measures:
        handle.remove()
    return handle


# ----------------------------------------------------------------------------------------------------------- clocks


class _HostClock:
    def running(self) -> contextlib.AbstractContextManager[Any]:
        return _disable_current_modes()

    def now(self) -> Any:
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class _DeviceClock(_HostClock):
    """Events on an accelerator, which are read at the end: measuring does not wait for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        event = torch.Event(self.device.type, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def between(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _clock(device: torch.device) -> _HostClock | Estimate:
    if device.type == "meta":
        return Estimate()
    return _HostClock() if device.type == "cpu" else _DeviceClock(device)
