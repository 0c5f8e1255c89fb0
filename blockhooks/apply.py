"""`apply_blocks`: run blocks through a hook chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from blockhooks.chain import HookChain, Hooks
from blockhooks.errors import HookError
from blockhooks.lowering import lower, may_recompute, run_lowered
from blockhooks.run import Block, Hidden, Run

__all__ = ["apply_blocks"]


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
        hooks: A plugin, a sequence of plugins (the first is outermost), or a `HookChain`; nothing, or None, for none.
        carry: Picks the next x from a block's output. By default the output as it is; where x is a tensor, a tuple or
            list gives its first element.
        collect: Joins the x that a block was given and its output (after `carry`) to the next x, which is how
            intermediate results are gathered.
        **kwargs: Side inputs by keyword, passed to each block unchanged.

    Returns:
        The last x.

    Raises:
        HookError: If `blocks` is no iterable, `carry` or `collect` no function, something in `hooks` no plugin, or a hook
            returned what it must not.
        PlanError: If a plan does not cover the blocks.
        RecomputeError: In the backward, if a region could not be executed again as in the forward.
    """
    if not torch.compiler.is_compiling():
        blocks = _iterated(blocks)
        if carry is not None or collect is not None:
            _check_functions(carry=carry, collect=collect)
    if hooks is None or (isinstance(hooks, (tuple, list)) and not hooks):
        return _plain(blocks, x, args, kwargs, carry, collect)
    if torch.compiler.is_compiling():
        blocks = tuple(blocks)
        plan = lower(_plugins(hooks), blocks)
        recompute = None if plan is None else may_recompute(blocks)
        if plan is not None and recompute is not None:
            return run_lowered(plan, blocks, x, args, kwargs, carry, collect, recompute)
        return _uncompiled(blocks, x, args, kwargs, hooks, carry, collect)
    return _hooked(blocks, x, args, kwargs, hooks, carry, collect)


def _iterated(blocks: Iterable[Block]) -> Iterable[Block]:
    try:
        return iter(blocks)
    except TypeError:
        raise HookError(
            f"apply_blocks expected an iterable of blocks, found a {type(blocks).__name__}. A single block is a list of "
            "one: apply_blocks([block], x, ...)."
        ) from None


def _check_functions(**functions: Any) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise HookError(f"apply_blocks({name}=...) expected a function, found {function!r}.")


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


_uncompiled = torch._disable_dynamo(_hooked)  # type: ignore[attr-defined]


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
        side = bool(args or kwargs)
        for block in blocks:
            x = block(x, *args, **kwargs) if side else block(x)
            if type(x) is not Tensor and isinstance(x, (tuple, list)) and x:
                x = x[0]
    else:
        for block in blocks:
            x = block(x, *args, **kwargs)
    return x
