"""`checkpoint`: a drop-in for `torch.utils.checkpoint.checkpoint` on the mechanism of this library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockhooks.chain import HookChain
from blockhooks.errors import HookError, RecomputeError
from blockhooks.plan import Segment
from blockhooks.recompute import Check, can_recompute, checkpointed
from blockhooks.run import Block, Hidden, Region, Run

__all__ = ["checkpoint"]

Context = contextlib.AbstractContextManager[Any]

_CHECKS: dict[str, Check] = {"default": "shapes", "none": "none"}
_SEGMENT = Segment(0, 1)
_WITH_RNG = HookChain(())
_WITHOUT_RNG = HookChain((), without=("RNGSnapshot",))


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Context, Context]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Checkpoint one call: drop what autograd saves inside, and recompute it in the backward.

    A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, for code that takes a checkpoint
    function. It carries more than torch's: see `RNGSnapshot`, `StateSnapshot` and `VersionGuard`.

    Args:
        function: What to call. Any callable.
        *args: Its arguments, of any kind but iterators.
        use_reentrant: Must be False (or None); the reentrant way cannot keep the law.
        preserve_rng_state: Draw the same random numbers in the recompute.
        context_fn: Called once, gives two context managers: one entered around the forward, one around each recompute
            (such as `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes).
        determinism_check: ``"default"`` compares shape, dtype and device of each saved tensor, ``"none"`` nothing.
        debug: Log the operators of forward and recompute, and show them when the two differ.
        early_stop: End a recompute once all saved tensors are back. `torch.utils.checkpoint.set_checkpoint_early_stop`
            goes before it.
        **kwargs: Keyword arguments of the function.

    Returns:
        What the function returns.

    Raises:
        HookError: If `use_reentrant` is true, or an argument is an iterator.
        ValueError: If `determinism_check` is neither of the two, or `debug` comes with a `context_fn`.
        RecomputeError: In the backward, if the function was not executed as in the forward.
    """
    if use_reentrant:
        raise HookError(
            "checkpoint(use_reentrant=True): expected False. The reentrant way runs the forward without a graph, loses "
            "keyword and nested tensors, and cannot keep gradients the same; leave the argument out."
        )
    if determinism_check not in _CHECKS:
        raise ValueError(
            f"checkpoint(determinism_check={determinism_check!r}): expected one of {', '.join(map(repr, _CHECKS))}."
        )
    torch_early_stop, torch_debug = _torch_switches()
    early_stop = early_stop if torch_early_stop is None else torch_early_stop
    debug = debug if torch_debug is None else torch_debug
    if debug and context_fn is not None:
        raise ValueError(
            "checkpoint(debug=True) is incompatible with a context_fn of your own; expected one or the other."
        )
    if not can_recompute():
        return function(*args, **kwargs)
    log = _OperatorLog() if debug else None
    context_fn = log.contexts if log is not None else context_fn
    chain = _WITH_RNG if preserve_rng_state else _WITHOUT_RNG
    run = Run((function,), (), {}, chain.hooks, call=_spread)
    region = Region(run, _SEGMENT)
    factories = region.capture((args, kwargs))
    forward_context = None
    if context_fn is not None:
        forward_context, again = context_fn()
        forward_context = _NotSuppressing(forward_context)
        factories.append(lambda: again)
    return checkpointed(
        _whole,
        (region, args, kwargs),
        contexts=factories,
        early_stop=early_stop,
        check=_CHECKS[determinism_check],
        describe=lambda: _describe(function, log),
        forward_context=forward_context,
    )


def _whole(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return region((args, kwargs))


def _spread(function: Block, x: Hidden, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with all of its arguments, which are the x of this run."""
    given, by_name = x
    return function(*given, **by_name)


def _describe(function: Callable[..., Any], log: _OperatorLog | None) -> str:
    name = getattr(function, "__name__", None) or type(function).__name__
    return f"checkpoint of {name}" + (f"\n{log}\n" if log is not None else "")


def _torch_switches() -> tuple[bool | None, bool | None]:
    """What `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` of torch say, if they were used."""
    module = sys.modules.get("torch.utils.checkpoint")
    return (
        getattr(module, "_enable_checkpoint_early_stop", None),
        getattr(module, "_checkpoint_debug_enabled", None),
    )


class _NotSuppressing(contextlib.AbstractContextManager[Any]):
    """A forward context that may see an exception, but not swallow it: there would be no result to return."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._context.__exit__(*exception) and exception[0] is not None:
            raise RecomputeError(
                "checkpoint(context_fn=...): the forward context suppressed an exception of the function, so that there "
                "is nothing to return. Let exceptions pass in its __exit__."
            ) from exception[1]


class _OperatorLog:
    """The operators of the forward and of the recompute, for ``debug=True``."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.recompute: list[str] = []

    def contexts(self) -> tuple[Context, Context]:
        return _Logging(self.forward), _Logging(self.recompute)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"operators of the forward ({len(self.forward)}):",
                *(f"  {line}" for line in self.forward),
                f"operators of the recompute ({len(self.recompute)}):",
                *(f"  {line}" for line in self.recompute),
            ]
        )


class _Logging(TorchDispatchMode):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = ", ".join(
            str(list(value.shape)) if isinstance(value, torch.Tensor) else repr(value) for value in args
        )
        self.lines.append(f"{func}({shapes})")
        return func(*args, **(kwargs or {}))
