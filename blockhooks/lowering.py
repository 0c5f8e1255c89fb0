"""What `apply_blocks` is under ``torch.compile``: a plain loop with torch's own checkpoint per segment (R10).

The compiler knows `torch.utils.checkpoint`; it cannot follow hooks. So a chain of `Checkpoint` and the default plugins is
lowered to that loop, which traces with ``fullgraph=True``. Whatever cannot be lowered (other plugins, blocks with buffers)
runs eagerly between two graphs, with all of its hooks; with ``fullgraph=True`` the compiler then says so. Nothing is dropped.

The recompute of a compiled region draws the same random numbers only where the back end functionalises them, as inductor
and the others on AOTAutograd do. Under any other (``backend="eager"``, one of the user's own) a run stays eager; with
``fullgraph=True``, where it cannot, blocks with dropout keep what autograd saves, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from blockhooks.errors import BlockhooksWarning, RecomputeError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.hooks.state import StateSnapshot
from blockhooks.hooks.versions import VersionGuard
from blockhooks.run import Block, Hidden, carried

__all__ = [
    "Lowered",
    "lower",
    "may_recompute",
    "run_lowered",
    "torchs_checkpoint",
    "traced_checkpoint",
]

Lowered = tuple[tuple[int, int, bool, Any], ...]
"""A plan in plain tuples: (start, stop, whether to recompute, children)."""


_FUNCTIONALISING = ("inductor", "aot", "cudagraphs", "tvm", "openxla")


def _compiler() -> tuple[str, bool]:
    """Name the back end that is compiling, and tell whether it must not break the graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator = InstructionTranslator.current_tx()
    backend = translator.output.compiler_fn
    names = [getattr(backend, "compiler_name", None)]
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
        names.append(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None))
    return next((name for name in names if name), ""), bool(translator.one_graph)


def _warn_kept() -> bool:
    warnings.warn(
        "blocks with dropout are compiled in one graph by a back end that does not functionalise random numbers, so that a "
        "recompute would draw others: they keep what autograd saves. Expected a back end on AOTAutograd, such as inductor.",
        BlockhooksWarning,
        stacklevel=2,
    )
    return True


# To the compiler their results are constants, as with torch.compiler.assume_constant_result, whose call would import the
# whole compiler with this library.
_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_warn_kept._dynamo_marked_constant = True  # type: ignore[attr-defined]


def may_recompute(blocks: Iterable[Any]) -> bool | None:
    """Whether compiled blocks may be recomputed; None if the run has to stay eager. To be asked while they are traced."""
    if (
        not torch.compiler.is_dynamo_compiling()
    ):  # torch.export without Dynamo executes what it is given
        return True
    backend, one_graph = _compiler()
    if backend.startswith(_FUNCTIONALISING):
        return True
    if not one_graph:
        return None
    for block in blocks:
        for module in block.modules():
            if module.training and _draws(module):
                return not _warn_kept()
    return True


def _draws(module: nn.Module) -> bool:
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
        return module.p > 0
    if isinstance(
        module, (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d)
    ):
        return True
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return bool(module.dropout > 0)
    return False


def lower(plugins: Iterable[Any], blocks: tuple[Block, ...]) -> Lowered | None:
    """Give the plan to be traced, or None where the run has to stay eager."""
    checkpoint = None
    for plugin in plugins:
        if isinstance(plugin, Checkpoint) and checkpoint is None:
            if plugin.save is not None or plugin.planner is not None:
                return None
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


_TORCHS_OWN = torch_checkpoint.checkpoint


def torchs_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Call torch's own checkpoint, also where ``torch.utils.checkpoint.checkpoint`` has been replaced by ours.

    Dynamo knows whatever has that name, and no other; tracers below it execute what they are given.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch_checkpoint.checkpoint(*args, **kwargs)
    return _TORCHS_OWN(*args, **kwargs)


def traced_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the compiler trace torch's checkpoint. It must not run eagerly: torch's would not keep the law."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise RecomputeError(
                "a checkpointed segment could not be compiled: its blocks break the graph, or have side effects on objects "
                "outside. Expected blocks that torch.compile traces in one graph; compile the blocks instead of the model "
                "around apply_blocks or attach, or leave these blocks out of the plan."
            )
        return function(*args, **kwargs)

    return torchs_checkpoint(traced, *args, use_reentrant=False, **kwargs)


def run_lowered(
    plan: Lowered,
    blocks: tuple[Block, ...],
    x: Hidden,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carry: Callable[[Any], Hidden] | None,
    collect: Callable[[Hidden, Any], Hidden] | None,
    recompute: bool,
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
        for start, stop, dropped, children in plan:
            if dropped and recompute and torch.is_grad_enabled():
                x = traced_checkpoint(segment, x, start, stop, children)
            else:
                x = segment(x, start, stop, children)
        return x

    return loop(plan, x)
