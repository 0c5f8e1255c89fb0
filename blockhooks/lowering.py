"""What `apply_blocks` is under ``torch.compile``: a plain loop with torch's own checkpoint per segment (R10).

The compiler knows `torch.utils.checkpoint`, and functionalises random numbers and buffers itself; it cannot follow
hooks. So a chain of `Checkpoint` and the default plugins is lowered to that loop, which traces with ``fullgraph=True``.
Whatever cannot be lowered (other plugins, blocks with buffers, which not every back end updates once) runs eagerly between
two graphs, with all of its hooks; with ``fullgraph=True`` the compiler then says so. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.hooks.state import StateSnapshot
from blockhooks.hooks.versions import VersionGuard
from blockhooks.run import Block, Hidden, carried

__all__ = ["Lowered", "lower", "run_lowered"]

Lowered = tuple[tuple[int, int, bool, Any], ...]
"""A plan in plain tuples: (start, stop, whether to recompute, children)."""


def lower(plugins: Iterable[Any], blocks: tuple[Block, ...]) -> Lowered | None:
    """Give the plan to be traced, or None where the run has to stay eager."""
    checkpoint = None
    for plugin in plugins:
        if isinstance(plugin, Checkpoint) and checkpoint is None:
            checkpoint = plugin
        elif not isinstance(plugin, (RNGSnapshot, StateSnapshot, VersionGuard)):
            return None
    for block in blocks:
        if not isinstance(block, nn.Module):
            return None
        for _ in block.buffers():
            return None
    if checkpoint is None:
        return tuple((i, i + 1, False, ()) for i in range(len(blocks)))
    return _tuples(checkpoint.plan(len(blocks)))


def _tuples(segments: Iterable[Any]) -> Lowered:
    return tuple((s.start, s.stop, s.mode == "recompute", _tuples(s.children)) for s in segments)


def run_lowered(
    plan: Lowered,
    blocks: tuple[Block, ...],
    x: Hidden,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carry: Callable[[Any], Hidden] | None,
    collect: Callable[[Hidden, Any], Hidden] | None,
) -> Hidden:
    """Run the plain loop that the compiler traces."""
    if carry is None and isinstance(x, Tensor):
        carry = carried

    def segment(x: Hidden, start: int, stop: int, children: Lowered) -> Hidden:
        if children:
            return loop(children, x)
        for block in blocks[start:stop]:
            output = block(x, *args, **kwargs)
            output = output if carry is None else carry(output)
            x = output if collect is None else collect(x, output)
        return x

    def loop(plan: Lowered, x: Hidden) -> Hidden:
        for start, stop, recompute, children in plan:
            if recompute and torch.is_grad_enabled():
                x = torch_checkpoint(segment, x, start, stop, children, use_reentrant=False)
            else:
                x = segment(x, start, stop, children)
        return x

    return loop(plan, x)
