"""One run: the loop over segments, and the region, the loop over a segment's blocks.

A `Run` is one call of `apply_blocks`. It knows the blocks, the side inputs and the hook chain, bound into plain
functions (`HookRelay`). A `Region` is the inside of one segment: what is executed again in a recompute.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from blockhooks.errors import BlockhooksWarning
from blockhooks.plan import Segment
from blockhooks.recompute import is_recomputing, packed_elsewhere
from blockhooks.structure import tensors_in
from blockhooks.survey import Survey, survey

__all__ = ["Block", "CurrentBlock", "Hidden", "HookRelay", "Region", "Run", "current_block"]

Hidden = Any
"""The hidden state x: a tensor, or any container or object with tensors."""
Block = Callable[..., Any]
"""``block(x, *side_inputs, **side_inputs) -> x``, usually an `nn.Module`."""


class HookRelay(Protocol):
    """A hook chain's hooks as plain functions, with the arguments of their hookspecs in order."""

    def plan_segments(self, run: Run) -> tuple[Segment, ...]:
        """The segments of a run, checked."""

    def run_blocks(self, run: Run, x: Hidden) -> Hidden:
        """Execute a run."""

    def run_segment(
        self, run: Run, segment: Segment, region: Region, x: Hidden, recomputing: bool
    ) -> Hidden:
        """Execute a segment."""

    def recompute_context(
        self, run: Run, segment: Segment, x: Hidden
    ) -> list[Callable[[], AbstractContextManager[Any]]]:
        """The factories of all plugins, in the order of the chain."""

    def run_block(self, run: Run, index: int, block: Block, x: Hidden, recomputing: bool) -> Hidden:
        """Execute a block."""

    def describe(self) -> str:
        """The plugins' names, outermost first."""


# The side inputs that stand in for a run's own, innermost first: (run, args, kwargs, the next outer ones).
_SIDE_INPUTS: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "blockhooks.side_inputs", default=None
)


def carried(output: Any) -> Any:
    """The next x for a tensor x: the output, or the first element of a tuple or list."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


class Run:
    """One call of `apply_blocks`.

    Attributes:
        blocks: The blocks, in order.
        args: Positional side inputs.
        kwargs: Keyword side inputs.
        hooks: The hook chain's hooks.
        segments: The plan, once it is made.
        planned: The segment of the plan that those belong to, where somebody else's loop calls its blocks one by one.
        state: A place for plugins to keep figures of this run, by plugin. No tensors (R8).
        side_carried: Whether a `recompute_context` gives the side inputs again, so that the run lets go of them at its end.
        kept: Reasons why regions kept what autograd saved instead of dropping it, by segment.
        apart: Whether somebody's own loop calls the blocks, so that each will be a run of its own, and this one is only
            to be planned: x is not known, but among the side inputs.
    """

    __slots__ = (
        "_captured",
        "_names",
        "apart",
        "args",
        "blocks",
        "call",
        "carry",
        "collect",
        "hooks",
        "kept",
        "kwargs",
        "planned",
        "segments",
        "side_carried",
        "state",
    )

    def __init__(
        self,
        blocks: tuple[Block, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: HookRelay,
        *,
        carry: Callable[[Any], Hidden] | None = None,
        collect: Callable[[Hidden, Any], Hidden] | None = None,
        call: Callable[[Block, Hidden, tuple[Any, ...], dict[str, Any]], Any] | None = None,
        names: Sequence[str] | None = None,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.blocks, self.args, self.kwargs, self.hooks = blocks, args, kwargs, hooks
        self.carry, self.collect, self.call = carry, collect, call
        self.segments: tuple[Segment, ...] = ()
        self.planned: Segment | None = None
        self.state: dict[Any, Any] = {}
        self.kept: dict[Segment, str] = {}
        self.side_carried = False
        self._names = names
        # While a region captures: [x], then [what was found], so that all plugins share one search.
        self._captured: list[Any] | None = None

    def name(self, index: int) -> str:
        """A readable name of a block: its class or function, or its path in an attached model."""
        if self._names is not None:
            return self._names[index]
        block = self.blocks[index]
        return getattr(block, "__name__", None) or type(block).__name__

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all blocks."""
        return tuple(self.name(index) for index in range(len(self.blocks)))

    def describe(self, start: int, stop: int) -> str:
        """Name some blocks in a message: ``block 3 (Layer)`` or ``blocks 3..5 (Layer)``."""
        kinds = ", ".join(dict.fromkeys(self.name(index) for index in range(start, stop)))
        where = f"block {start}" if stop == start + 1 else f"blocks {start}..{stop - 1}"
        return f"{where} ({kinds})"

    def execute(self, x: Hidden) -> Hidden:
        """Make the plan and run through all of the hooks."""
        self.segments = self.hooks.plan_segments(self)
        if self.carry is None and isinstance(x, Tensor):
            self.carry = carried
        return self.execute_planned(x)

    def execute_planned(self, x: Hidden) -> Hidden:
        """Run through the hooks by the plan that is in `segments`."""
        try:
            return self.hooks.run_blocks(self, x)
        finally:
            if self.side_carried:
                # They may hold what the regions made (caches do), and the regions hold the run.
                self.args, self.kwargs = (), {}

    def run_segments(self, segments: Sequence[Segment], x: Hidden, recomputing: bool) -> Hidden:
        """Execute segments one after the other."""
        run_segment = self.hooks.run_segment
        for segment in segments:
            x = run_segment(self, segment, Region(self, segment), x, recomputing)
        return x

    def run_block(self, index: int, block: Block, x: Hidden, recomputing: bool) -> Hidden:
        """Call one block with x and the side inputs, and pick the next x from what it returns."""
        nothing_came = packed_elsewhere()
        args, kwargs = (self.args, self.kwargs) if _SIDE_INPUTS.get() is None else self.side()
        call, carry = self.call, self.carry
        output = block(x, *args, **kwargs) if call is None else call(block, x, args, kwargs)
        if nothing_came is not None and nothing_came():
            self._warn_shadowed(index)
        if carry is carried:  # the same, for the commonest case
            output = output[0] if isinstance(output, (tuple, list)) and output else output
        elif carry is not None:
            output = carry(output)
        return output if self.collect is None else self.collect(x, output)

    def _warn_shadowed(self, index: int) -> None:
        warnings.warn(
            f"{self.describe(index, index + 1)} is to be checkpointed, but a saved-tensor hook that a plugin has "
            "put inside of the region takes what autograd saves, so that nothing is dropped "
            f"(hooks: {self.hooks.describe()}). Expected such a hook outside: install it in run_segment, or call "
            "the pair that is on top before.",
            BlockhooksWarning,
            stacklevel=2,
        )

    def side(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The side inputs: those of the run, or in a recompute what `side_inputs` has put in their place."""
        replaced = _SIDE_INPUTS.get()
        while replaced is not None:
            run, args, kwargs, replaced = replaced
            if run is self:
                return args, kwargs
        return self.args, self.kwargs

    @contextlib.contextmanager
    def side_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Give blocks other objects as side inputs, in this thread, until the context is left.

        For a `recompute_context`: a cache that the forward has changed is given again as it was.
        """
        token = _SIDE_INPUTS.set((self, args, kwargs, _SIDE_INPUTS.get()))
        try:
            yield
        finally:
            _SIDE_INPUTS.reset(token)

    def held_elsewhere(self, segment: Segment) -> Iterator[Tensor]:
        """Give the tensors that live as long as the model or the caller wants: parameters, buffers, side inputs."""
        for block in self.blocks[segment.start : segment.stop]:
            if isinstance(block, nn.Module):
                yield from itertools.chain(block.parameters(), block.buffers())
        yield from tensors_in(self.side())

    def survey(self, segment: Segment) -> Survey:
        """The modules, objects and random generators reachable from a segment's blocks, x and the side inputs."""
        captured = self._captured
        if captured is None or type(captured[0]) is not Survey:
            x = () if captured is None else captured
            found = survey(self.blocks[segment.start : segment.stop], (*self.side(), *x))
            if captured is not None:
                captured[0] = found
            return found
        return captured[0]


class CurrentBlock:
    """What a layer can ask about the block that is being executed.

    Attributes:
        index: The block's index in its run.
    """

    __slots__ = ("_recomputing", "_run", "index")

    def __init__(self, run: Run, index: int, recomputing: bool) -> None:
        self._run, self.index, self._recomputing = run, index, recomputing

    @property
    def phase(self) -> Literal["forward", "recompute"]:
        """Whether this is the forward or a recompute, of the block or of a checkpointed call inside of it."""
        return "recompute" if self._recomputing or is_recomputing() else "forward"

    @property
    def name(self) -> str:
        """The block's name: its class or function, or its path in an attached model."""
        return self._run.name(self.index)

    def __repr__(self) -> str:
        return f"<block {self.index} ({self.name}), {self.phase}>"


_CURRENT: contextvars.ContextVar[CurrentBlock | None] = contextvars.ContextVar(
    "blockhooks.current_block", default=None
)


def current_block() -> CurrentBlock | None:
    """The block that is being executed by a run with hooks, in this thread; None outside of one."""
    return _CURRENT.get()


class Region:
    """The inside of one segment: ``region(x) -> x``. What is executed again in a recompute.

    Attributes:
        run: The run.
        segment: The segment.
    """

    __slots__ = ("_executed", "run", "segment")

    def __init__(self, run: Run, segment: Segment) -> None:
        self.run, self.segment = run, segment
        self._executed = False

    def __call__(self, x: Hidden) -> Hidden:
        """Execute the segment's children or blocks."""
        recomputing = self._executed or is_recomputing()
        self._executed = True
        if self.segment.children:
            return self.run.run_segments(self.segment.children, x, recomputing)
        run, run_block = self.run, self.run.hooks.run_block
        start, stop = self.segment.start, self.segment.stop
        index = start
        token = _CURRENT.set(CurrentBlock(run, index, recomputing))
        try:
            x = run_block(run, index, run.blocks[index], x, recomputing)
            for index in range(start + 1, stop):
                _CURRENT.set(CurrentBlock(run, index, recomputing))
                x = run_block(run, index, run.blocks[index], x, recomputing)
        except Exception as error:
            self._note(error, index, recomputing)
            raise
        finally:
            _CURRENT.reset(token)
        return x

    def capture(self, x: Hidden) -> list[Callable[[], AbstractContextManager[Any]]]:
        """Call `recompute_context` of the hook chain: what has to be entered around each recompute.

        To be called just before the region's forward, and only if it may be recomputed.
        """
        self.run._captured = [x]
        try:
            return self.run.hooks.recompute_context(self.run, self.segment, x)
        finally:
            self.run._captured = None

    def keep(self, reason: str) -> None:
        """Note that the region keeps what autograd saved, since it cannot be executed again."""
        self.run.kept[self.segment] = reason

    def __str__(self) -> str:
        hooks = self.run.hooks.describe()
        return f"{self.run.describe(self.segment.start, self.segment.stop)} (hooks: {hooks})"

    def _note(self, error: Exception, index: int, recomputing: bool) -> None:
        if any(note.startswith(_NOTES) for note in getattr(error, "__notes__", ())):
            return
        doing, when = (
            ("recomputing", "for the backward pass")
            if recomputing
            else ("running", "in the forward pass")
        )
        where = self.run.describe(index, index + 1)
        error.add_note(f"while {doing} {where} {when} (hooks: {self.run.hooks.describe()})")


_NOTES = ("while running block", "while recomputing block")
