"""`measure`: what each block of a stack or model costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from blockhooks.apply import apply_blocks
from blockhooks.costs import ChainProfile
from blockhooks.errors import BudgetError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.models import attach

__all__ = ["measure"]


def measure(
    blocks_or_model: nn.Module | Iterable[Callable[..., Any]], *inputs: Any, **kwargs: Any
) -> ChainProfile:
    """Measure the blocks of a stack or of a model: seconds and bytes of forward and backward, in each mode.

    One forward runs, in about the memory of a single block; after each block its forward and backward are executed a
    few times on stand-ins. Parameters, gradients, buffers and random generators are left as they were.

    Args:
        blocks_or_model: Blocks (a list, an `nn.ModuleList` or an `nn.Sequential`), or a model, whose repeated blocks
            are found as by `attach`.
        *inputs: For blocks, x and the side inputs; for a model, its arguments.
        **kwargs: The same by keyword.

    Returns:
        The profile. The blocks of several stacks of a model follow each other in the order of their first calls.

    Raises:
        AttachError: If a model has no repeated blocks.
        BudgetError: If not every block was called, so that there is no profile.
    """
    checkpoint = Checkpoint(memory_budget=1.0)
    model = isinstance(blocks_or_model, nn.Module) and not isinstance(
        blocks_or_model, (nn.ModuleList, nn.Sequential)
    )
    blocks: Any = blocks_or_model if model else tuple(blocks_or_model)  # type: ignore[arg-type]
    with _untouched([blocks] if model else blocks), torch.enable_grad():
        if model:
            with attach(blocks, hooks=checkpoint):
                blocks(*inputs, **kwargs)
        else:
            apply_blocks(blocks, *inputs, hooks=checkpoint, **kwargs)
    assert checkpoint.planner is not None
    profiles = checkpoint.planner.profiles
    if not profiles:
        raise BudgetError(
            f"not every block was called and could be measured ({checkpoint.report()}); "
            "give inputs with which the whole stack runs, outside of torch.func transforms."
        )
    measured = [block for profile in profiles for block in profile.blocks]
    return ChainProfile(blocks=tuple(measured), about=profiles[0].about)


@contextlib.contextmanager
def _untouched(modules: Iterable[Any]) -> Iterator[None]:
    """Put back buffers and the generators of torch."""
    buffers = [b for m in modules if isinstance(m, nn.Module) for b in m.buffers()]
    before = [buffer.detach().clone() for buffer in buffers]
    accelerator = torch.accelerator.current_accelerator()
    devices = [] if accelerator is None else list(range(torch.accelerator.device_count()))
    kind = "cuda" if accelerator is None else accelerator.type
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in zip(buffers, before, strict=True):
                    buffer.copy_(values)
