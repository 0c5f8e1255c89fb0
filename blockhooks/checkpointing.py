"""`checkpoint`: a drop-in for `torch.utils.checkpoint.checkpoint` on the mechanism of this library."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from blockhooks.chain import HookChain
from blockhooks.errors import HookError, RecomputeError
from blockhooks.lowering import may_recompute, torchs_checkpoint
from blockhooks.plan import Segment
from blockhooks.recompute import Check, can_recompute, checkpointed
from blockhooks.run import Region, Run

__all__ = ["checkpoint"]

Context = contextlib.AbstractContextManager[Any]

_CHECKS: dict[str, Check] = {"default": "shapes", "none": "none"}
_SEGMENT = Segment(0, 1)
_WITH_RNG = HookChain(())
_WITHOUT_RNG = HookChain((), without=("RNGSnapshot",))


class _Options(NamedTuple):
    """What `checkpoint` is told beside the function and its arguments."""

    preserve_rng_state: bool
    context_fn: Callable[[], tuple[Context, Context]] | None
    determinism_check: str
    debug: bool
    early_stop: bool
    respect_saved_tensors_hooks: bool | None


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Context, Context]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Checkpoint one call: drop what autograd saves inside, and recompute it in the backward.

    A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, for code that takes a checkpoint
    function. It carries more than torch's: see `RNGSnapshot`, `StateSnapshot` and `VersionGuard`.

    Args:
        function: What to call. Any callable. Without a function, a decorator with the other options is returned.
        *args: Its arguments, of any kind but iterators.
        use_reentrant: Must be False (or None); the reentrant way cannot keep the law.
        preserve_rng_state: Draw the same random numbers in the recompute.
        context_fn: Called once, gives two context managers: one entered around the forward, one around each recompute
            (such as `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes).
        determinism_check: ``"default"`` compares shape, dtype and device of each saved tensor, ``"none"`` nothing.
        debug: Log the operators of forward and recompute, and show them when the two differ.
            `torch.utils.checkpoint.set_checkpoint_debug_enabled` goes before it.
        early_stop: End a recompute once all saved tensors are back. `torch.utils.checkpoint.set_checkpoint_early_stop`
            goes before it.
        respect_saved_tensors_hooks: Whether what a selective `context_fn` keeps goes through the saved-tensor hooks
            around the call (torch 2.14; before, it never does).
        **kwargs: Keyword arguments of the function.

    Returns:
        What the function returns.

    Raises:
        HookError: If `function` is no callable, `use_reentrant` is true, or an argument is an iterator.
        ValueError: If `determinism_check` is neither of the two, or `debug` comes with a `context_fn`.
        RecomputeError: In the backward, if the function was not executed as in the forward.

    Note:
        Under ``torch.compile`` the call is traced as torch's own checkpoint with the same options, which the compiler
        knows; where the back end would let the recompute draw other random numbers, it runs eagerly between two graphs.
        Under torch.func's transforms and forward-mode derivatives the function is called plainly.
    """
    if use_reentrant:
        raise HookError(
            f"checkpoint(use_reentrant={use_reentrant!r}): expected False; it is only supported when use_reentrant=False. "
            "The reentrant way runs the forward without a graph, loses keyword and nested tensors, and cannot keep "
            "gradients the same; leave the argument out."
        )
    options = _Options(
        preserve_rng_state,
        context_fn,
        determinism_check,
        debug,
        early_stop,
        respect_saved_tensors_hooks,
    )
    if function is None and not args:
        if kwargs:
            raise ValueError(
                f"checkpoint() as a decorator: Unexpected keyword arguments: {', '.join(kwargs)}. Expected options "
                "alone; the function's arguments belong to its call."
            )
        return functools.partial(_decorated, options)
    if not callable(function):
        raise HookError(f"checkpoint(function, ...) expected a callable, found {function!r}.")
    return _call(function, args, kwargs, options)


def _decorated(options: _Options, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function, or method, that is checkpointed at each call."""

    @functools.wraps(function, updated=())
    def checkpointed_function(*args: Any, **kwargs: Any) -> Any:
        return _call(function, args, kwargs, options)

    return checkpointed_function


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
) -> Any:
    if not torch.compiler.is_compiling():
        return _run(function, args, kwargs, options)
    owner = getattr(function, "__self__", function)
    recompute = may_recompute([owner] if isinstance(owner, nn.Module) else [])
    if recompute is None:
        return _uncompiled(function, args, kwargs, options)
    return _traced(function, args, kwargs, options) if recompute else function(*args, **kwargs)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
) -> Any:
    debug, context_fn = _debug(options), options.context_fn
    if context_fn is torch_checkpoint.noop_context_fn:
        context_fn = None
    if options.determinism_check not in list(_CHECKS):
        raise ValueError(
            f"checkpoint: determinism_check should be one of {list(_CHECKS)}, but got {options.determinism_check!r}."
        )
    if debug and context_fn is not None:
        raise ValueError(
            "checkpoint: debug=True is incompatible with non-default context_fn; expected one or the other."
        )
    if not can_recompute():
        return function(*args, **kwargs)
    show = None
    if debug:
        context_fn, show = torch_checkpoint._get_debug_context_and_cb()
    run = Run((function,), (), {}, _chain(options).hooks)
    factories = Region(run, _SEGMENT).capture((args, kwargs))
    forward_context = None
    if context_fn is not None:
        around, again = context_fn()
        if hasattr(around, "respect_saved_tensors_hooks"):  # torch's selective context
            around.respect_saved_tensors_hooks = options.respect_saved_tensors_hooks
        forward_context = _NotSuppressing(around)
        factories.append(lambda: again)
    return checkpointed(
        function,
        args,
        kwargs,
        contexts=factories,
        early_stop=_early_stop(options),
        check=_CHECKS[options.determinism_check],
        describe=lambda: _describe(function, show),
        forward_context=forward_context,
    )


_uncompiled = torch._disable_dynamo(_run)  # type: ignore[attr-defined]


def _traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
) -> Any:
    """Call torch's own checkpoint, for the compiler to trace (R10). Options that are not given are left out."""
    given: dict[str, Any] = {}
    if options.context_fn is not None:
        given["context_fn"] = options.context_fn
    if options.respect_saved_tensors_hooks is not None:
        given["respect_saved_tensors_hooks"] = options.respect_saved_tensors_hooks
    return torchs_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        determinism_check=options.determinism_check,
        debug=options.debug,
        early_stop=options.early_stop,
        **given,
        **kwargs,
    )


def _chain(options: _Options) -> HookChain:
    return _WITH_RNG if options.preserve_rng_state else _WITHOUT_RNG


def _early_stop(options: _Options) -> bool:
    """The option, unless `set_checkpoint_early_stop` of torch says otherwise."""
    switch: bool | None = torch_checkpoint._enable_checkpoint_early_stop
    return options.early_stop if switch is None else switch


def _debug(options: _Options) -> bool:
    """The option, unless `set_checkpoint_debug_enabled` of torch says otherwise."""
    switch: bool | None = torch_checkpoint._checkpoint_debug_enabled
    return options.debug if switch is None else switch


def _describe(function: Callable[..., Any], show: Callable[[Any], None] | None) -> str:
    name = getattr(function, "__name__", None) or type(function).__name__
    return f"checkpoint of {name}" + ("" if show is None else f"\n{_log(show)}\n")


def _log(show: Callable[[Any], None]) -> str:
    """What torch has logged of the forward's and the recompute's operators; nothing before both have begun."""
    try:
        show(torch_checkpoint.CheckpointError())
    except (torch_checkpoint.CheckpointError, AssertionError) as log:
        return str(log)
    return ""


class _NotSuppressing(contextlib.AbstractContextManager[Any]):
    """A forward context that may see an exception, but not swallow it: there would be no result to return."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._context.__exit__(*exception) and exception[0] is not None:
            raise RecomputeError(
                "checkpoint(context_fn=...): the forward context suppressed an exception raised by the function, so "
                "that there is nothing to return. Let exceptions pass in its __exit__."
            ) from exception[1]
