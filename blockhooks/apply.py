"""`apply_blocks`: run blocks through a hook chain; and `call_block` for a single one inside of somebody's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockhooks.chain import HookChain, Hooks
from blockhooks.lowering import lower, run_lowered
from blockhooks.plan import Segment
from blockhooks.run import Block, Hidden, HookRelay, Run
from blockhooks.structure import capture

__all__ = ["apply_blocks", "call_block"]


def apply_blocks(
    blocks: Iterable[Block],
    x: Hidden,
    *args: Any,
    hooks: Hooks = (),
    carry: Callable[[Any], Hidden] | None = None,
    collect: Callable[[Hidden, Any], Hidden] | None = None,
    **kwargs: Any,
) -> Hidden:
    """Run blocks one after the other, through a hook chain.

    Each block is called as ``block(x, *args, **kwargs)``, and what it returns is the next x. Without hooks this is the
    plain loop.

    Args:
        blocks: Any iterable of callables. It is read once; with no blocks, x is returned.
        x: The hidden state: a tensor of any shape, or any container or object with tensors.
        *args: Side inputs, passed to each block unchanged.
        hooks: A plugin, a sequence of plugins (the first is outermost), or a `HookChain`.
        carry: Picks the next x from a block's output. By default the output as it is; where x is a tensor, a tuple or
            list gives its first element.
        collect: Joins the x that a block was given and its output (after `carry`) to the next x, which is how
            intermediate results are gathered.
        **kwargs: Side inputs by keyword, passed to each block unchanged.

    Returns:
        The last x.

    Raises:
        HookError: If something in `hooks` is no plugin, or a hook returned what it must not.
        PlanError: If a plan does not cover the blocks.
        RecomputeError: In the backward, if a region could not be executed again as in the forward.
    """
    if isinstance(hooks, (tuple, list)) and not hooks:
        return _plain(blocks, x, args, kwargs, carry, collect)
    if torch.compiler.is_compiling():
        blocks = tuple(blocks)
        plan = lower(_plugins(hooks), blocks)
        if plan is not None:
            return run_lowered(plan, blocks, x, args, kwargs, carry, collect)
        return _uncompiled(blocks, x, args, kwargs, hooks, carry, collect)
    return _hooked(blocks, x, args, kwargs, hooks, carry, collect)


def _hooked(
    blocks: Iterable[Block],
    x: Hidden,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hooks: Hooks,
    carry: Callable[[Any], Hidden] | None,
    collect: Callable[[Hidden, Any], Hidden] | None,
) -> Hidden:
    chain = hooks if isinstance(hooks, HookChain) else HookChain(hooks)
    run = Run(tuple(blocks), args, kwargs, chain.hooks, carry=carry, collect=collect)
    return run.execute(x)


_uncompiled = torch._disable_dynamo(_hooked)


def _plugins(hooks: Hooks) -> Iterable[Any]:
    if isinstance(hooks, HookChain):
        return hooks.plugins
    return hooks if isinstance(hooks, (tuple, list)) else (hooks,)


def _plain(
    blocks: Iterable[Block],
    x: Hidden,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carry: Callable[[Any], Hidden] | None,
    collect: Callable[[Hidden, Any], Hidden] | None,
) -> Hidden:
    if carry is not None or collect is not None:
        for block in blocks:
            output = block(x, *args, **kwargs)
            output = output if carry is None else carry(output)
            x = output if collect is None else collect(x, output)
    elif isinstance(x, Tensor):
        for block in blocks:
            x = block(x, *args, **kwargs)
            if isinstance(x, (tuple, list)) and x:
                x = x[0]
    else:
        for block in blocks:
            x = block(x, *args, **kwargs)
    return x


def call_block(
    hooks: HookRelay,
    blocks: Sequence[Block],
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    segment: Segment | None = None,
    call: Block | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Call one block of a stack, from within somebody's own loop, through `run_segment` and `run_block`.

    The hooks see as x the first positional argument, or else the first keyword argument that holds a tensor; all others
    are side inputs. As the x after the block they see the output, or its first element; what the block returns besides
    is returned untouched.

    Args:
        hooks: The hook chain's hooks.
        blocks: The stack that the block is one of.
        index: Its index.
        args: The block's arguments.
        kwargs: The block's keyword arguments.
        segment: The segment to run the block as; by default one that `plan_segments` gives a single block.
        call: What to call in the block's place (its ``forward``, so that the module's own hooks stay outside).
        names: Readable names of the blocks.

    Returns:
        What the block returned, with the first element replaced where a value hook has changed it.
    """
    function = blocks[index] if call is None else call
    segment = segment or Segment(index, index + 1)
    if torch.compiler.is_compiling():
        return _lowered_call(hooks, blocks, index, args, kwargs, segment, function, names)
    return _call_hooked(hooks, blocks, index, args, kwargs, segment, function, names)


def _call_hooked(
    hooks: HookRelay,
    blocks: Sequence[Block],
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    segment: Segment,
    function: Block,
    names: Sequence[str] | None,
) -> Any:
    place, x, side_args, side_kwargs = _take_x(args, kwargs)

    def with_x(block: Block, x: Hidden, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place == 0:
            return function(x, *args, **kwargs)
        return (
            function(*args, **kwargs) if place is None else function(*args, **{place: x}, **kwargs)
        )

    outcome = _Outcome()
    run = Run(
        tuple(blocks), side_args, side_kwargs, hooks, carry=outcome.carry, call=with_x, names=names
    )
    run.segments = (segment,)
    try:
        return outcome.joined(run.execute_planned(x))
    finally:
        outcome.close()


def _take_x(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Hidden, tuple[Any, ...], dict[str, Any]]:
    """Part a call's arguments in x and side inputs; first of all, x's place: 0, its keyword, or None without any x."""
    if args:
        return 0, args[0], args[1:], kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) or capture(value, take_tensors=True).tensors:
            return name, value, (), {key: side for key, side in kwargs.items() if key != name}
    return None, None, (), kwargs


class _Outcome:
    """What a block returned in the forward, beside x; let go of when the call is over (R8)."""

    __slots__ = ("open", "output", "x")

    def __init__(self) -> None:
        self.open = True
        self.output: Any = None
        self.x: Any = None

    def carry(self, output: Any) -> Hidden:
        x = _first(output)
        if self.open:
            self.output, self.x = output, x
        return x

    def joined(self, x: Hidden) -> Any:
        """The block's output, with x in the place of its first element."""
        if x is self.x:
            return self.output
        return _with_first(self.output, x)

    def close(self) -> None:
        self.open = False
        self.output = self.x = None


def _first(output: Any) -> Any:
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    if isinstance(output, dict) and output:
        return next(iter(output.values()))
    return output


def _with_first(output: Any, x: Any) -> Any:
    if isinstance(output, tuple) and output:
        items = (x, *output[1:])
        return type(output)(*items) if hasattr(output, "_fields") else items
    if isinstance(output, list) and output:
        return [x, *output[1:]]
    if isinstance(output, dict) and output:
        changed = copy.copy(output)
        changed[next(iter(output))] = x
        return changed
    return x
