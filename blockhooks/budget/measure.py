"""`measure`: what each block of a stack or model costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockhooks.apply import apply_blocks
from blockhooks.chain import HookChain
from blockhooks.costs import ChainProfile
from blockhooks.errors import BudgetError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.models import attach
from blockhooks.plan import Segment
from blockhooks.run import Run
from blockhooks.structure import contents_of, tensors_in

__all__ = ["measure"]


def measure(
    blocks_or_model: nn.Module | Iterable[Callable[..., Any]], *inputs: Any, **kwargs: Any
) -> ChainProfile:
    """Measure the blocks of a stack or of a model: seconds and bytes of forward and backward, in each mode.

    A forward runs, in about the memory of a single block; after each block its forward and backward are executed a
    few times on stand-ins. A model's backward follows, to see what lies outside of its blocks: that of its loss, if one
    of its results is a scalar, else that of the first of them. Afterwards everything is as it was: parameters, gradients,
    buffers, attributes, random generators, and what the inputs hold.

    Args:
        blocks_or_model: Blocks (a list, an `nn.ModuleList` or an `nn.Sequential`), or a model, whose repeated blocks
            are found as by `attach`.
        *inputs: For blocks, x and the side inputs; for a model, its arguments.
        **kwargs: The same by keyword.

    Returns:
        The profile; gradients of parameters are not part of it. The blocks of several stacks of a model follow each other
        in the order of their calls.

    Raises:
        AttachError: If a model has no repeated blocks.
        BudgetError: If there is no block, or not every block was called, so that there is no profile.
    """
    checkpoint = Checkpoint(memory_budget=1.0)
    assert checkpoint.planner is not None
    checkpoint.planner.new_gradients = False
    model = isinstance(blocks_or_model, nn.Module) and not isinstance(
        blocks_or_model, (nn.ModuleList, nn.Sequential)
    )
    iterable = isinstance(blocks_or_model, Iterable)
    blocks: Any = blocks_or_model if model or not iterable else tuple(blocks_or_model)  # type: ignore[arg-type]
    if not model and not (iterable and blocks):
        raise BudgetError(
            f"measure(blocks_or_model, ...) expected a model, or a sequence of at least one block; found {blocks_or_model!r}."
        )
    untouched = partial(_untouched, (blocks,) if model else blocks, inputs, kwargs)
    for _ in range(
        2
    ):  # what cannot be executed again in its first forward perhaps can in its second
        with untouched(), torch.enable_grad():
            if model:
                with attach(blocks, hooks=checkpoint):
                    root = _root(blocks(*inputs, **kwargs))
                    wanted = [p for p in blocks.parameters() if p.requires_grad]
                    if root is not None and wanted:
                        torch.autograd.grad(root, wanted, torch.ones_like(root), allow_unused=True)
                    del root
            else:
                apply_blocks(blocks, *inputs, hooks=checkpoint, **kwargs)
        profiles = checkpoint.planner.profiles
        if profiles:
            break
    if not profiles:
        raise BudgetError(
            f"not every block was called and could be measured ({checkpoint.report()}); "
            "give inputs with which the whole stack runs, outside of torch.func transforms."
        )
    if len(profiles) == 1:
        return profiles[0]
    measured = [block for profile in profiles for block in profile.blocks]
    return ChainProfile(blocks=tuple(measured), about=profiles[0].about)


def _root(output: Any) -> Tensor | None:
    results = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    scalars = [tensor for tensor in results if tensor.dim() == 0]
    return next(iter(scalars or results), None)


@contextlib.contextmanager
def _untouched(
    blocks: tuple[Any, ...], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Put back what a forward changes: all that is reached from the blocks and from what they are given."""
    run, all_blocks = Run(blocks, inputs, kwargs, HookChain(()).hooks), Segment(0, len(blocks))
    found = run.survey(all_blocks)
    owners = [*map(vars, found.modules), *found.objects, inputs, kwargs]
    contents = contents_of(owners)
    tensors = [t for t in tensors_in(owners) if not isinstance(t, nn.Parameter)]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(p, p.grad) for module in found.modules for p in module.parameters(recurse=False)]
    with RNGSnapshot().recompute_context(run, all_blocks)():
        try:
            yield
        finally:
            contents.put_back()
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
