"""Modules that run through a hook chain: a list of blocks, and a single block inside of anybody's loop."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from blockhooks.apply import apply_blocks
from blockhooks.calls import call_block
from blockhooks.chain import HookChain, Hooks
from blockhooks.errors import HookError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.lowering import lower, may_recompute, traced_checkpoint
from blockhooks.run import Hidden, Run

__all__ = ["Checkpointed", "HookedBlock", "HookedBlocks"]


class HookedBlocks(nn.ModuleList):
    """A list of blocks whose forward is `apply_blocks`.

    Its `state_dict` has the keys of an `nn.ModuleList` of the same blocks.

    Args:
        blocks: The blocks.
        hooks: A plugin, a sequence of plugins (the first is outermost), or a `HookChain`. Built once.
    """

    def __init__(self, blocks: Iterable[nn.Module] | None = None, *, hooks: Hooks = ()) -> None:
        super().__init__(blocks)
        self.chain = _chain(hooks)

    def forward(self, x: Hidden, *args: Any, **kwargs: Any) -> Hidden:
        """Run the blocks through the hook chain.

        Args:
            x: The hidden state.
            *args: Side inputs.
            **kwargs: Side inputs by keyword.

        Returns:
            The last x.
        """
        return apply_blocks(
            self, x, *args, hooks=() if self.chain is None else self.chain, **kwargs
        )

    def __getitem__(self, index: Any) -> Any:
        """One block, or for a slice the blocks of it with the same hook chain."""
        found = super().__getitem__(index)
        if isinstance(index, slice):
            found.chain = self.chain
        return found


def _chain(hooks: Hooks) -> HookChain | None:
    """Build a chain once; None where there are no hooks, so that the plain loop stays one."""
    if isinstance(hooks, HookChain):
        return hooks
    return None if isinstance(hooks, (tuple, list)) and not hooks else HookChain(hooks)


class HookedBlock(nn.Module):
    """One block that runs through a hook chain, inside of anybody's loop.

    It *is* the block in all but its call: it shares the block's attributes, parameters, buffers, children and module
    hooks (the very same dict), and its class is one made of the block's class, so that `state_dict`, `repr`,
    `isinstance`, indexing and whatever methods the block overrides are those of the block. What the block returns is
    returned as it is; hooks see its first argument as x, and the first element of its output.

    Args:
        block: An `nn.Module`.
        hooks: A plugin, a sequence of plugins (the first is outermost), or a `HookChain`. Built once.
    """

    # Beside the dict that is shared with the block.
    __slots__ = ("_hook_chain", "_hooked")
    _hooked: nn.Module
    _hook_chain: HookChain | None
    _kind: type[HookedBlock]

    def __new__(cls, block: nn.Module, *args: Any, **kwargs: Any) -> HookedBlock:
        """Make an instance of a class that is both ours and the block's."""
        if not isinstance(block, nn.Module):
            raise HookError(
                f"{cls.__name__}(block) expected an nn.Module, found {block!r}; run plain callables with apply_blocks."
            )
        while isinstance(block, HookedBlock):
            block = block._hooked
        hooked: HookedBlock = object.__new__(_class(cls, type(block)))
        return hooked

    def __init__(self, block: nn.Module, *, hooks: Hooks = ()) -> None:
        object.__setattr__(self, "__dict__", block.__dict__)
        object.__setattr__(self, "_hooked", block)
        object.__setattr__(self, "_hook_chain", _chain(hooks))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block's forward through the hook chain, with its own arguments."""
        if self._hook_chain is None:
            return self._hooked.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _compiled(self, args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._hook_chain is not None
        hooks, blocks = self._hook_chain.hooks, (self._hooked,)
        run = Run(blocks, args, kwargs, hooks)
        (segment,) = hooks.plan_segments(run)
        output, _ = call_block(
            self._hooked.forward, args, kwargs, hooks=hooks, blocks=blocks, segment=segment
        )
        return output

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy and pickle as the block and the chain, which are joined anew."""
        return _rejoined, (self._kind, self._hooked, self._hook_chain)


_classes: dict[tuple[type[HookedBlock], type[nn.Module]], type[HookedBlock]] = {}


def _class(kind: type[HookedBlock], shown: type[nn.Module]) -> type[HookedBlock]:
    """The class of a hooked block: `kind` before the block's own class, under the latter's name."""
    if (kind, shown) in _classes:
        return _classes[kind, shown]
    names = {name: getattr(shown, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type[HookedBlock] = types.new_class(
        shown.__name__,
        (kind, shown),
        exec_body=lambda namespace: namespace.update(names, __slots__=(), _kind=kind),
    )
    _classes[kind, shown] = made
    return made


def _compiled(block: HookedBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower the block's call (R10), or leave it between two graphs."""
    assert block._hook_chain is not None
    plan = lower(block._hook_chain.plugins, (block._hooked,))
    recompute = None if plan is None else may_recompute((block._hooked,))
    if plan is None or recompute is None:
        return _uncompiled(block, args, kwargs)
    if recompute and any(dropped for _, _, dropped, _ in plan) and torch.is_grad_enabled():
        return traced_checkpoint(block._hooked.forward, *args, **kwargs)
    return block._hooked.forward(*args, **kwargs)


_uncompiled = torch._disable_dynamo(HookedBlock._run)  # type: ignore[attr-defined]


def _rejoined(kind: type[HookedBlock], block: nn.Module, chain: HookChain | None) -> HookedBlock:
    hooked = kind.__new__(kind, block)
    HookedBlock.__init__(hooked, block, hooks=() if chain is None else chain)
    return hooked


class Checkpointed(HookedBlock):
    """One block under activation checkpointing: ``nn.ModuleList(map(Checkpointed, blocks))``.

    Args:
        block: An `nn.Module`.
        **options: Options of `Checkpoint`.
    """

    __slots__ = ()

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__(block, hooks=Checkpoint(**options))
