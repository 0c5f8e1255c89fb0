"""`measure`: what each block of a stack or model costs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from blockhooks.apply import apply_blocks
from blockhooks.chain import HookChain
from blockhooks.costs import ChainProfile
from blockhooks.errors import BlockhooksError, BudgetError
from blockhooks.estimating import FusedAttention, KnownValues
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.models import attach
from blockhooks.offloading import To
from blockhooks.plan import Segment
from blockhooks.run import Run
from blockhooks.structure import capture, contents_of, tensors_in

__all__ = ["measure"]

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def measure(
    blocks_or_model: nn.Module | Iterable[Callable[..., Any]],
    *inputs: Any,
    offload: To | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> ChainProfile:
    """Measure the blocks of a stack or of a model: seconds and bytes of forward and backward, in each mode.

    A forward runs, in about the memory of a single block; after each block its forward and backward are executed a
    few times on stand-ins. A model's backward follows, to see what lies outside of its blocks: that of its loss, if one
    of its results is a scalar, else that of the first of them. Afterwards everything is as it was: parameters, gradients,
    buffers, attributes, random generators, and what the inputs hold.

    Of a model on the meta device (``with torch.device("meta"): ...``) nothing is executed and nothing allocated; real
    inputs are moved there. Bytes are those of a CPU, but for what its kernels take inside themselves. Seconds are
    estimated: an operation takes the longer of its FLOPs at 312 TFLOP/s and the bytes that it reads and writes at 2 TB/s.

    Args:
        blocks_or_model: Blocks (a list, an `nn.ModuleList` or an `nn.Sequential`), or a model, whose repeated blocks
            are found as by `attach`.
        *inputs: For blocks, x and the side inputs; for a model, its arguments.
        offload: Where blocks may move what they keep, if that is to be measured too: what `Checkpoint` takes.
        **kwargs: The other inputs, by keyword.

    Returns:
        The profile; gradients of parameters are not part of it. The blocks of several stacks of a model follow each other
        in the order of their calls.

    Raises:
        AttachError: If a model has no repeated blocks.
        BudgetError: If there is no block, or not every block was called, so that there is no profile; or if an
            operation needs the values that meta tensors do not have, or they are to move.
        HookError: If `offload` is no place.
        MissingExtraError: If `offload` needs the extra ``offload``, and it is not installed.
        OffloadError: If a file cannot be written or read.
    """
    checkpoint = Checkpoint(memory_budget=1.0, offload=offload)
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
    roots = (blocks,) if model else blocks
    untouched = partial(_untouched, roots, inputs, kwargs)
    given: Callable[[_Inputs], contextlib.AbstractContextManager[_Inputs]]
    on_meta = _any_meta(roots, (inputs, kwargs))
    if on_meta and offload is not None:
        raise BudgetError(
            f"measure(..., offload={offload!r}) was given meta tensors, which have no bytes to move, so that the seconds of "
            "that are not known; measure them without offload, or a real model."
        )
    given = _on_meta if on_meta else contextlib.nullcontext
    for _ in range(
        2
    ):  # what cannot be executed again in its first forward perhaps can in its second
        with (
            untouched(),
            torch.inference_mode(False),
            torch.enable_grad(),
            given((inputs, kwargs)) as (args, named),
        ):
            if model:
                with attach(blocks, hooks=checkpoint):
                    root = _root(blocks(*args, **named))
                    wanted = [p for p in blocks.parameters() if p.requires_grad]
                    if root is not None and wanted:
                        torch.autograd.grad(root, wanted, torch.ones_like(root), allow_unused=True)
                    del root
            else:
                apply_blocks(blocks, *args, hooks=checkpoint, **named)
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


def _any_meta(blocks: tuple[Any, ...], inputs: _Inputs) -> bool:
    """Whether blocks or inputs are on the meta device.

    Raises:
        BudgetError: If they are, but would be measured wrongly; or if they are fake tensors.
    """
    modules = [block for block in blocks if isinstance(block, nn.Module)]
    parameters = (parameter for module in modules for parameter in module.parameters())
    tensors = [*parameters, *tensors_in(inputs)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise BudgetError(
            "measure() expected real or meta tensors, found a FakeTensor; make the model under torch.device('meta') instead "
            "of a FakeTensorMode."
        )
    meta = any(tensor.is_meta for tensor in tensors)
    if meta and torch._C._is_any_autocast_enabled():
        raise BudgetError(
            "measure() was given meta tensors under autocast, which torch does not apply to them, so that the bytes would be "
            "those of another dtype; give the model itself the dtype, as with model.to(torch.bfloat16), or measure real "
            "tensors."
        )
    return meta


@contextlib.contextmanager
def _on_meta(inputs: _Inputs) -> Iterator[_Inputs]:
    """Run what is on the meta device; gives the inputs as they are there.

    Raises:
        BudgetError: If an operation cannot be run there.
    """
    try:
        with KnownValues(), FusedAttention():
            given = capture(inputs, take_tensors=True)
            yield given.rebuild(list(map(_moved, given.tensors)))
    except BlockhooksError:
        raise
    except RuntimeError as error:
        where = next(iter(getattr(error, "__notes__", ())), "outside of the blocks")
        raise BudgetError(
            f"measure() was given meta tensors, which have no values, and an operation failed {where}: {error}\n"
            "Only real inputs can be asked for their values, and what is computed of them alone. Give those, or leave the "
            "operation out, perhaps by another setting of the model; or measure a real model, which takes about the memory "
            "of one block."
        ) from error


def _moved(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _untouched(
    blocks: tuple[Any, ...], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Put back what a forward changes: all that is reached from the blocks and from what they are given."""
    run, all_blocks = Run(blocks, inputs, kwargs, HookChain(()).hooks), Segment(0, len(blocks))
    found = run.survey(all_blocks)
    owners = [*map(vars, found.modules), *found.objects, inputs, kwargs]
    contents = contents_of(owners)
    tensors = [t for t in tensors_in(owners) if not (isinstance(t, nn.Parameter) or t.is_meta)]
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
