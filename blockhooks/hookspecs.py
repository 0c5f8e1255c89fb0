"""The five hooks, and the markers for writing plugins.

What belongs to which side of the recompute boundary is told by the hook's name (rules R1 to R7 in
``docs/explanation/regions.md``)::

    apply_blocks(blocks, x, *side, hooks=[...], **side)
    └ run_blocks             once per run                                         OUTSIDE
      ├ plan_segments        once; the first result wins                          OUTSIDE
      └ run_segment          once per segment and forward                         OUTSIDE
        ├ recompute_context  capture, just before the region's forward            OUTSIDE
        ╞═════════ region: what is below runs in the forward AND in each recompute ═════════
        └ run_block          once per block and execution                         INSIDE

A plugin is any object with methods marked `@hookimpl`. An implementation takes only the arguments that it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from blockhooks.plan import Segment
    from blockhooks.run import Block, Hidden, Region, Run

__all__ = ["PROJECT", "hookimpl"]

PROJECT = "blockhooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def plan_segments(run: Run) -> Sequence[Segment] | None:
    """Divide the blocks of a run into segments.

    Called once per run, before the first block.

    Side: outside.
    Result: first result. Segments that cover ``0..len(run.blocks)`` in order, without gap or overlap; None leaves it
        to the next plugin. Without any result each block is a segment of its own (all
        are one where no plugin implements `run_segment` either).

    Args:
        run: The run that begins.
    """


@hookspec(firstresult=True)
def run_blocks(run: Run, x: Hidden) -> Hidden | None:
    """Execute the whole run.

    Called once per run; mostly for wrappers that want to see the beginning and the end.

    Side: outside.
    Result: first result; what `apply_blocks` returns.

    Args:
        run: The run.
        x: The hidden state that the run was called with.
    """


@hookspec(firstresult=True)
def run_segment(
    run: Run, segment: Segment, region: Region, x: Hidden, recomputing: bool
) -> Hidden | None:
    """Execute one segment: decide *how* its region is executed.

    An implementation may call ``region(x)`` later and more than once (that is what activation checkpointing does); a
    wrapper sees the segment once per forward. Without any implementation the region is called once.

    Side: outside. For a segment inside another one that is being recomputed, the call is part of that recompute and
        `recomputing` is True.
    Result: first result; the x after the segment.

    Args:
        run: The run.
        segment: The segment, with ``start``, ``stop`` and ``children``.
        region: The callable that executes the segment's inside: ``region(x) -> x``.
        x: The hidden state before the segment.
        recomputing: Whether this call is part of the recompute of an enclosing region.
    """


@hookspec
def recompute_context(
    run: Run, segment: Segment, x: Hidden
) -> Callable[[], AbstractContextManager[Any]] | None:
    """Capture what the region's inside will read, so that a recompute can be given it again.

    Called just before the forward of a region that may be recomputed, never otherwise.

    Side: crosses the boundary: called outside; what it returns is entered around each recompute.
    Result: all results. Each is a *factory* of context managers, called and entered for every recompute in the order
        of the chain, left in reverse on every way out. None carries nothing. A factory may have a method
        ``forward_done(failed)``, called once when the region's forward has returned or raised; a string that it returns
        is a reason why the region cannot be executed again, and what autograd saved is kept.

    Args:
        run: The run.
        segment: The segment whose region is about to run.
        x: The hidden state before the segment.
    """


@hookspec(firstresult=True)
def run_block(run: Run, index: int, block: Block, x: Hidden, recomputing: bool) -> Hidden | None:
    """Execute one block.

    Value hooks and observers are wrappers of this hook. A value hook must do the same in every execution (R3); an
    observer looks at `recomputing`. In a recompute, an early stop passes through the ``yield`` as an exception that is
    not an `Exception` (R5): clean up in ``finally``.

    Side: inside; runs in the forward and in each recompute.
    Result: first result; the x after the block. An implementation that is no wrapper replaces the block for this
        call; returning x skips it.

    Args:
        run: The run.
        index: The block's index in ``run.blocks``.
        block: The block. The default implementation calls it with x and the run's side inputs.
        x: The hidden state before the block.
        recomputing: Whether this execution is a recompute.
    """
