"""Regions that span several blocks of a loop which is not ours.

The loop calls one block after the other, and may do as it likes in between. So the region's forward comes in pieces:
around each block's region the saved-tensor hooks of one common frame are installed, and what they took is dropped when
the last block of the segment has returned. The recompute executes all pieces, each with the x that the one before it
gave. That is what the loop did only if it handed x on untouched; where it did not, the region ends there, and another
one begins.

Where segments nest, a piece is executed through the region of the child that holds its block, in the forward as in each
recompute: the child's frame lies inside of the parent's, which then drops and brings back nothing but the child's x.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.plan import Segment
from blockhooks.recompute import (
    Frame,
    as_recompute,
    can_recompute,
    forward_done,
    just_one,
    taking,
)
from blockhooks.run import Hidden, Region, Run
from blockhooks.structure import versions_of

__all__ = ["SpanningRegion", "SpanningRun", "spanning_checkpoint"]


def spanning_checkpoint(plugins: Sequence[Any]) -> Checkpoint | None:
    """The plugin that checkpoints, if it alone decides how a segment is executed; wrappers may be around it.

    None also where it saves single operations by a policy, which torch counts for each region from the beginning.
    """
    deciding = [plugin for plugin in plugins if _decides(plugin)]
    if len(deciding) != 1 or type(deciding[0]) is not Checkpoint or deciding[0].save is not None:
        return None
    return deciding[0]


def _decides(plugin: object) -> bool:
    options = getattr(getattr(plugin, "run_segment", None), "blockhooks_impl", None)
    return options is not None and not options["wrapper"]


class SpanningRegion:
    """The inside of a segment, executed block by block while the loop goes on.

    Attributes:
        segment: The segment of the plan.
        next: Index of the block that is to be called next.
        reason: Why what autograd saved is kept, if it is.
        at_end: Called with the reason when the region has ended.
    """

    def __init__(
        self, segment: Segment, start: int, checkpoint: Checkpoint, outside: Any = None
    ) -> None:
        self.segment, self.start, self.next = segment, start, start
        self.reason: str | None = None
        self.at_end: list[Callable[[str | None], None]] = []
        self._checkpoint, self._outside = checkpoint, outside
        self._children = _Children(segment, checkpoint)
        self._frame: Frame | None = None
        self._pieces: list[_Piece] = []
        self._last: tuple[weakref.ref[Tensor], list[int]] | None = None

    def continues(self, index: int, x: Tensor, outside: Any) -> bool:
        """Whether a block's call is the next piece.

        It is if it is the right block, is given the very x that the last piece gave, and runs under the same
        saved-tensor hooks (`outside`; a checkpoint of somebody else may be around each block) and ambient state.
        """
        if self._frame is None or index != self.next or self._last is None:
            return False
        tensor, version = self._last
        untouched = tensor() is x and versions_of([x]) == version
        return untouched and outside == self._outside and self._frame.ambient.holds()

    def run(self, index: int, region: Region, x: Tensor) -> Hidden:
        """Execute one piece in the forward."""
        contexts = region.capture(x)
        if self._frame is None:
            self._frame = self._begin(x, region)
        frame = self._frame
        version = versions_of([x])
        try:
            with taking(frame):
                result = self._children.run(index, region, x)
        except BaseException:
            for factory in contexts:
                forward_done(factory, failed=True)
            self.end()
            raise
        for factory in contexts:
            self.reason = forward_done(factory, failed=False) or self.reason
        if versions_of([x]) != version:
            self.reason = "it changes an input in place"
        self._pieces.append(_Piece(region, contexts))
        self.next = index + 1
        self._last = (
            (weakref.ref(result), versions_of([result])) if isinstance(result, Tensor) else None
        )
        return result

    def end(self) -> None:
        """Drop what autograd has saved."""
        self._children.end()
        frame, self._frame = self._frame, None
        if frame is not None:
            frame.close(keep=self.reason is not None)
        for call in self.at_end:
            call(self.reason)
        self.at_end.clear()

    def _begin(self, x: Tensor, region: Region) -> Frame:
        pieces, run, start = self._pieces, region.run, self.start
        segment, checkpoint = self.segment, self._checkpoint

        def again(x: Hidden) -> Hidden:
            children = _Children(segment, checkpoint)
            try:
                for piece in pieces:
                    x = piece.again(x, children)
            finally:
                children.end()
            return x

        def describe() -> str:
            return f"{run.describe(start, start + len(pieces))} (hooks: {run.hooks.describe()})"

        return Frame(again, (x,), just_one, (), checkpoint.early_stop, checkpoint.check, describe)


class _Children:
    """The regions inside of a region, in one execution of it; one after the other is open."""

    __slots__ = ("_checkpoint", "_open", "_segment")

    def __init__(self, segment: Segment, checkpoint: Checkpoint) -> None:
        self._segment, self._checkpoint = segment, checkpoint
        self._open: SpanningRegion | None = None

    def run(self, index: int, region: Region, x: Hidden) -> Hidden:
        """Execute one block, in the region of the child that holds it, if any does."""
        child = _child_of(self._segment, index)
        if child is None or not isinstance(x, Tensor):
            self.end()
            return region(x)
        if self._open is None or self._open.segment is not child:
            self.end()
            self._open = SpanningRegion(child, index, self._checkpoint)
        result = self._open.run(index, region, x)
        if index == child.stop - 1:
            self.end()
        return result

    def end(self) -> None:
        child, self._open = self._open, None
        if child is not None:
            child.end()


def _child_of(segment: Segment, index: int) -> Segment | None:
    """The outermost segment inside of a segment that holds a block and is recomputed by itself."""
    for child in segment.children:
        if index in child.indices:
            return child if child.mode == "recompute" else _child_of(child, index)
    return None


class _Piece:
    """One block's region, the factories that were captured for it, and its context variables."""

    __slots__ = ("context", "contexts", "region")

    def __init__(
        self, region: Region, contexts: list[Callable[[], AbstractContextManager[Any]]]
    ) -> None:
        self.region, self.contexts = region, contexts
        self.context = contextvars.copy_context()

    def again(self, x: Hidden, children: _Children) -> Hidden:
        return self.context.copy().run(self._execute, x, children)

    def _execute(self, x: Hidden, children: _Children) -> Hidden:
        with ExitStack() as stack:
            stack.enter_context(as_recompute())
            for factory in self.contexts:
                stack.enter_context(factory())
            return children.run(self.region.segment.start, self.region, x)


class SpanningRun(Run):
    """The run of one block whose region is a piece of a larger one.

    Attributes:
        spanning: Gives the larger region for an x that the block is called with, if there is one.
    """

    __slots__ = ("spanning",)

    def __init__(
        self, spanning: Callable[[Hidden], SpanningRegion | None], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.spanning = spanning

    def run_segments(self, segments: Sequence[Segment], x: Hidden, recomputing: bool) -> Hidden:
        """Execute the one segment, as a piece, or by itself where x is not a tensor."""
        (segment,) = segments
        if not isinstance(x, Tensor):
            self.spanning(x)
            alone = Segment(segment.start, segment.stop)
            return super().run_segments((alone,), x, recomputing)
        return self.hooks.run_segment(self, segment, _SpannedRegion(self, segment), x, recomputing)


class _SpannedRegion(Region):
    """The inside of one block, as the hooks around it know it."""

    __slots__ = ()

    run: SpanningRun

    def __call__(self, x: Hidden) -> Hidden:
        region = Region(self.run, self.segment)
        larger = self.run.spanning(x) if can_recompute() else None
        return region(x) if larger is None else larger.run(self.segment.start, region, x)
