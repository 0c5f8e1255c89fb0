"""`attach`: hooks on the blocks of an unmodified model."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from blockhooks.calls import call_block, in_backward
from blockhooks.chain import HookChain, Hooks
from blockhooks.errors import AttachError, BlockhooksWarning
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.lowering import Lowered, lower, may_recompute, traced_checkpoint
from blockhooks.models.find import (
    Blocks,
    Member,
    Stack,
    check_model,
    count_calls,
    find_stacks,
    inner_stacks,
    select_stacks,
)
from blockhooks.models.intercept import is_routed, route, unroute
from blockhooks.models.report import (
    AttachReport,
    BlockRecord,
    Measure,
    StackRecord,
)
from blockhooks.models.spanning import SpanningRegion, SpanningRun, spanning_checkpoint
from blockhooks.plan import Mode, Segment
from blockhooks.run import Hidden, Run
from blockhooks.saved import hooks_around

__all__ = ["Handle", "attach"]

_inside: contextvars.ContextVar[frozenset[Handle]] = contextvars.ContextVar(
    "blockhooks.inside_attached", default=frozenset()
)
"""The handles in one of whose blocks this thread is, in the forward as in a recompute."""


def attach(
    model: nn.Module,
    hooks: Hooks = (),
    *,
    blocks: Blocks | Iterable[Blocks] | None = None,
    example: Any = None,
) -> Handle:
    """Put hooks on the blocks of a model, without changing anything about the model.

    Each call that the model's own loop makes of a block goes through `run_segment` and `run_block`, with whatever
    arguments it is made, and gives back what the block returns. Parameters, names, classes, copies, pickles and
    `state_dict` are those of the model; a copy of an attached model is not attached.

    Args:
        model: Any module.
        hooks: A plugin, a sequence of plugins (the first is outermost), or a `HookChain`.
        blocks: Which modules are blocks. By default the stacks of repeated modules, found by structure. Else one or
            several of: a module path (a container stands for its members), a pattern in which ``*`` is one part of a
            path and ``**`` any number, a class or the name of one, a module, a predicate ``(path, module) -> bool``.
        example: Inputs for one real forward, of a copy without gradients, to see what is called and how often: a tuple
            or list of arguments, a dict of keywords, or one argument. Only where structure alone does not tell, as with
            one module that is applied many times.

    Returns:
        A handle with `remove` and `report`; also a context manager that removes the hooks at its end.

    Raises:
        AttachError: If no blocks are found, what is asked for does not exist, or a block has hooks already.
        HookError: If something in `hooks` is no plugin.

    Note:
        Where a block of the stack is never called as a whole but its parts are, repeated parts are taken as blocks.
    """
    check_model(model, "attach")
    chain = hooks if isinstance(hooks, HookChain) else HookChain(hooks)
    if blocks is None:
        outer = find_stacks(model, None if example is None else count_calls(model, example))
        inner = inner_stacks(outer)
    else:
        outer, inner = select_stacks(model, blocks), []
    for path, module in [member for stack in outer for member in stack.members]:
        if is_routed(module):
            raise AttachError(
                f"block {path} ({type(module).__name__}) has hooks already; remove them first: handle.remove(), or use "
                "attach(...) in a with statement."
            )
    return Handle(model, chain, outer, inner)


class Handle:
    """Hooks that are attached to a model; made by `attach`.

    Holds the model weakly: a model that is deleted takes its hooks with it.

    Attributes:
        evaluating: Whether this step is an evaluation after a training step, which is the one to be reported.
        called: Whether the model was called since the hooks were put on.
        planners: What plans for a memory budget, of which each call of a block takes its part.
    """

    def __init__(
        self, model: nn.Module, chain: HookChain, outer: Iterable[Stack], inner: Iterable[Stack]
    ) -> None:
        self.chain = chain
        self._model = weakref.ref(model)
        self._stacks = [_Attached(self, stack, inside=False) for stack in outer]
        self._stacks += [_Attached(self, stack, inside=True) for stack in inner]
        self._in_forward = 0
        self._warned = False
        self.evaluating = self.called = False
        checkpoints = [plugin for plugin in chain.plugins if isinstance(plugin, Checkpoint)]
        self.planners = [c.planner for c in checkpoints if c.planner is not None]
        for stack in self._stacks:
            stack.route()
        if not is_routed(model):
            route(model, _WholeModel(self))

    def remove(self) -> None:
        """Give the model its own calls back. Harmless when done already, and while a backward is still to come."""
        for stack in self._stacks:
            stack.unroute()
        model = self._model()
        if model is not None:
            unroute(model)

    def report(self) -> AttachReport:
        """Tell the stacks and blocks, what was asked for each, and what was really done in the last step."""
        model = self._model()
        shown = [stack.record for stack in self._stacks if not stack.inside or stack.record.called]
        name = "(deleted)" if model is None else type(model).__name__
        report = AttachReport(name, shown, self.called)
        for stack in self._stacks:
            stack.measured.clear()
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        stacks = ", ".join(
            f"{s.record.name}: {len(s.names)} x {s.record.kind}"
            for s in self._stacks
            if not s.inside
        )
        return f"<hooks {self.chain!r} on {stacks}>"

    def forward(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the model's own forward: its beginning is the beginning of a step."""
        begins, model = not self._in_forward and not in_backward(), self._model()
        assert model is not None
        if begins:
            self.called = True
            self.begin_step()
            for stack in self._stacks:
                stack.follow_classes()
                stack.list_calls()
            for planner in self.planners:
                planner.begin_model(model, args, kwargs)
        self._in_forward += 1
        output = None
        try:
            output = plain(*args, **kwargs)
            if begins:
                self._warn_if_idle()
            return output
        except BaseException:
            for stack in self._stacks:
                stack.calls.clear()  # they are not all that a step makes
            raise
        finally:
            self._in_forward -= 1
            if not self._in_forward:
                for stack in self._stacks:
                    stack.end_region()
            if begins:
                for planner in self.planners:
                    planner.end_model(output)

    def _warn_if_idle(self) -> None:
        """Tell once if a call of the model with gradients has gone past all of its blocks."""
        idle = not any(stack.record.called for stack in self._stacks)
        if idle and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            stacks = ", ".join(stack.name for stack in self._stacks if not stack.inside)
            warnings.warn(
                f"none of the blocks that hooks were attached to ({stacks}) was called in a forward of the model, so that "
                "the hooks do nothing. Expected the model to call them as modules; attach again after their `forward` was "
                "replaced, or name what is called: attach(model, hooks, blocks=...).",
                BlockhooksWarning,
                stacklevel=2,
            )

    def begin_step(self) -> None:
        """Forget what was done in the step before, unless this one has nothing to tell."""
        trained = any(stack.record.trained for stack in self._stacks)
        self.evaluating = trained and not torch.is_grad_enabled()
        for stack in self._stacks:
            stack.begin_step()

    @property
    def in_forward(self) -> bool:
        """Whether the model's own forward is running."""
        return self._in_forward > 0


class _WholeModel:
    """The route of the model itself, which only tells when a step begins."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __call__(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.handle.forward(plain, args, kwargs)

    def traced(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return plain(*args, **kwargs)


class _Attached:
    """A stack whose blocks are routed.

    Attributes:
        inside: Whether its blocks lie in blocks of another stack, and matter only if those are never called.
        calls: The blocks in the order of their calls in the model's forward, if there is a memory budget.
        measured: Blocks whose saved bytes are known, and in which mode they were measured.
        with_gradients: Whether the plan of this step was made for calls with gradients.
        planned: Whether a plugin plans.
        checkpoint: The plugin whose segments may span several blocks, if there is one.
        open: The region of several blocks that the loop is in.
    """

    def __init__(self, handle: Handle, stack: Stack, *, inside: bool) -> None:
        self.handle, self.inside, self.name = handle, inside, stack.name
        self.checkpoint = spanning_checkpoint(handle.chain.plugins)
        self.routes: list[_Block] = []
        self.plan: list[tuple[Segment, Segment]] | None = None
        self.last, self.calls, self.with_gradients = -1, list[int](), False
        self.list(stack.members)
        self.planned = any(hasattr(plugin, "plan_segments") for plugin in handle.chain.plugins)
        self.open: SpanningRegion | None = None

    def list(self, members: Iterable[Member]) -> None:
        """Set the blocks, in order."""
        self.names = [path for path, _ in members]
        self.modules = [weakref.ref(module) for _, module in members]
        self.record = StackRecord(
            self.name, [BlockRecord(path, type(module).__name__) for path, module in members]
        )
        self.record.spans = self.checkpoint is not None
        self.measured: dict[int, Mode] = {}

    def route(self) -> None:
        places: dict[int, list[int]] = {}
        for index, module in enumerate(self.blocks()):
            places.setdefault(id(module), []).append(index)
        self.routes = [_Block(self, indices) for indices in places.values()]
        for block in self.routes:
            route(self.blocks()[block.indices[0]], block)

    def follow_classes(self) -> None:
        """Route blocks anew whose class has been changed since, as `fully_shard` does."""
        for block in self.routes:
            module = self.modules[block.indices[0]]()
            if module is not None and type(module) is not block.routed:
                route(module, block)
                block.routed = type(module)

    def lowered(self, index: int) -> bool | None:
        """Whether a compiled block is recomputed; None if it cannot be compiled with its hooks."""
        plan = lower(self.handle.chain.plugins, self.blocks())
        return None if plan is None else _recomputes(plan, index)

    def unroute(self) -> None:
        self.end_region()
        for reference in self.modules:
            module = reference()
            if module is not None:
                unroute(module)

    def begin_step(self) -> None:
        self.end_region()
        self.plan, self.last = None, -1
        if not self.handle.evaluating:
            self.record.begin_step()
        for block in self.routes:
            block.next = 0

    def list_calls(self) -> None:
        """Take each call of a block for a block, where some were called several times in the step before."""
        calls, self.calls = self.calls, []
        if len(calls) > len(set(calls)) and not self.handle.evaluating:
            members = list(zip(self.names, self.blocks(), strict=True))
            never = sorted(set(range(len(members))).difference(calls))
            self.list([members[index] for index in (*calls, *never)])
            self.route()

    def call(
        self, index: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one block through the hooks."""
        if not self.handle.in_forward and not in_backward() and index <= self.last:
            self.handle.begin_step()  # parts of the model are called by themselves
        self.last = index
        if self.handle.in_forward and self.handle.planners:
            self.calls.append(index)
        blocks, outside = self.blocks(), hooks_around()
        planned, segment = self.segment_of(index, blocks, args, kwargs)
        mode, make_run = segment.mode, Run
        measure = Measure(outside, count=self.measured.get(index) != mode)
        spans = len(planned) > 1 and mode == "recompute" and self.checkpoint is not None
        if self.open is not None and (not spans or self.open.segment != planned):
            self.end_region()
        if spans:
            segment = Segment(index, index + 1, mode="keep")
            spanning = functools.partial(self.spanning, index, planned, outside)
            make_run = functools.partial(SpanningRun, spanning)  # type: ignore[assignment]
        output, run = call_block(
            plain,
            args,
            kwargs,
            hooks=self.handle.chain.hooks,
            blocks=blocks,
            names=self.names,
            segment=segment,
            planned=planned,
            around=functools.partial(self.inside_block, measure),
            make_run=make_run,
        )
        if self.handle.evaluating and not torch.is_grad_enabled():
            return output
        measure.finish(blocks[index], output, args, kwargs)
        if measure.taken is None:
            self.measured.pop(index, None)
        else:
            self.measured[index] = mode
        record = self.record.blocks[index]
        record.note_call(planned, mode if self.planned else "", run, measure)
        self.end_call(index, planned, functools.partial(record.note_end, measure), record.reason)
        return output

    def inside_block(self, measure: Measure, block: Callable[[], Any]) -> Any:
        """Call a block, in the forward (measured) or in a recompute; the calls of blocks inside of it are plain."""
        token = _inside.set(_inside.get() | {self.handle})
        try:
            with measure if not measure.done else contextlib.nullcontext():
                return block()
        finally:
            _inside.reset(token)

    def end_call(
        self,
        index: int,
        planned: Segment,
        note_end: Callable[[str | None], None],
        reason: str | None,
    ) -> None:
        """Note what was dropped: now, or when the region of several blocks ends, as it may with this one."""
        if self.open is None:
            note_end(reason)
            return
        self.open.at_end.append(note_end)
        if index == planned.stop - 1:
            self.end_region()

    def spanning(
        self, index: int, planned: Segment, outside: Any, x: Hidden
    ) -> SpanningRegion | None:
        """The region of several blocks that a call continues, or a new one; none where x is not a tensor."""
        single = isinstance(x, Tensor)
        if not single or (self.open is not None and not self.open.continues(index, x, outside)):
            self.record.divided.append(self.names[index])
            self.end_region()
        if not single:
            return None
        if self.open is None:
            assert self.checkpoint is not None
            self.open = SpanningRegion(planned, index, self.checkpoint, outside)
        return self.open

    def end_region(self) -> None:
        """Let the region of several blocks end, where the loop has left it."""
        if self.open is not None:
            region, self.open = self.open, None
            region.end()

    def segment_of(
        self,
        index: int,
        blocks: tuple[nn.Module, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Segment, Segment]:
        """The segment that the plan has for a block, and that of the block alone.

        The plan is made at the first block of a step, and again at the first with gradients.
        """
        with_gradients = torch.is_grad_enabled()
        if self.plan is None or (with_gradients and not self.with_gradients):
            hooks, self.with_gradients = self.handle.chain.hooks, with_gradients
            segments = hooks.plan_segments(
                Run(blocks, args, kwargs, hooks, names=self.names, apart=True)
            )
            self.plan = [
                (outer, Segment(place, place + 1, mode=outer.mode))
                for segment in segments
                for outer in _outermost(segment)
                for place in outer.indices
            ]
        return self.plan[index]

    def blocks(self) -> tuple[nn.Module, ...]:
        # A block that is called is alive, and its model with it.
        return tuple([reference() for reference in self.modules])  # type: ignore[misc]


def _outermost(segment: Segment) -> Iterator[Segment]:
    """The outermost segments to which something happens, and those to which nothing does."""
    if segment.mode != "keep" or not segment.children:
        yield segment
        return
    for child in segment.children:
        yield from _outermost(child)


class _Block:
    """The route of one block.

    Attributes:
        routed: The class that it was routed in.
    """

    def __init__(self, stack: _Attached, indices: list[int]) -> None:
        self.stack, self.indices = stack, indices
        self.next = 0
        self.had_gradients = False
        self.routed: type = type(stack.blocks()[indices[0]])
        self.lowered = stack.lowered(indices[0])
        self.note_compiled = _noting([stack.record.blocks[index] for index in indices])

    def __call__(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.stack.handle in _inside.get():
            return plain(*args, **kwargs)
        if in_backward():
            if not self.had_gradients:
                # Executed without gradients in the forward and again now: a reversible stack, which keeps nothing.
                self.stack.record.reversible = True
                return plain(*args, **kwargs)
        elif torch.is_grad_enabled():
            self.had_gradients = True
        index = self.indices[self.next % len(self.indices)]
        self.next += 1
        return self.stack.call(index, plain, args, kwargs)

    def traced(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The lowering of one block (R10); what cannot be lowered runs between two graphs, with all of its hooks."""
        if self.stack.inside:
            return plain(*args, **kwargs)
        recompute = None if self.lowered is None else may_recompute((plain.args[0],))  # type: ignore[attr-defined]
        if recompute is None:
            return _uncompiled(self, plain, args, kwargs)
        dropping = bool(recompute and self.lowered) and torch.is_grad_enabled()
        self.note_compiled(bool(self.lowered), dropping)
        if dropping:
            return traced_checkpoint(plain, *args, **kwargs)
        return plain(*args, **kwargs)


def _recomputes(plan: Lowered, index: int) -> bool:
    """Whether a plan drops what a block saves, in whatever segment."""
    return any(
        start <= index < stop and (dropped or _recomputes(children, index))
        for start, stop, dropped, children in plan
    )


def _noting(records: list[BlockRecord]) -> Callable[[bool, bool], None]:
    """A function that the compiler calls while it traces, as if its result were a constant; compiled code does not."""

    def note_compiled(asked: bool, dropping: bool) -> None:
        for record in records:
            record.note_compiled(asked, dropping)

    note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note_compiled


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled(
    block: _Block, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return block(plain, args, kwargs)
