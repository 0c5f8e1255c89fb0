"""One call of a block by somebody's own loop, as a run of one segment.

The loop decides what a block is called with and what becomes of its result. Of the arguments one is x, the rest are
side inputs; of the result one part is the next x, and the rest goes back to the loop as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockhooks.plan import Segment
from blockhooks.recompute import is_recomputing
from blockhooks.run import Block, Hidden, HookRelay, Run
from blockhooks.structure import tensors_in

__all__ = ["call_block", "in_backward"]

_FAVOURED = ("hidden_states", "hidden_state", "x", "input", "inputs", "src")
"""Keywords by which x is passed; without one of them it is the first keyword with a tensor."""


def call_block(
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    hooks: HookRelay,
    blocks: Sequence[nn.Module],
    names: Sequence[str] | None = None,
    segment: Segment,
    planned: Segment | None = None,
    around: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    make_run: Callable[..., Run] = Run,
) -> tuple[Any, Run]:
    """Run one block through the hooks, and give back what the block has returned.

    Args:
        plain: What the loop would have called.
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
        hooks: The hooks of a chain.
        blocks: The stack.
        names: The names of its blocks; by default those of their classes.
        segment: The block's segment, of one block.
        planned: The segment of the plan that holds the block; by default the same.
        around: Called in every execution with the block's call, which it makes; in the forward and in recomputes.
        make_run: Makes the run.

    Returns:
        What the block returned, with what the hooks made of x in its place, and the run.
    """
    place = _place_of_x(args, kwargs)
    x = place.get(args, kwargs)
    output = _Output()

    def call(_: Block, x: Hidden, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hidden:
        args, kwargs = place.put(x, args, kwargs)
        return output.pick(around(lambda: plain(*args, **kwargs)))

    # The side inputs are all arguments: x is in them as well, and is put in its place again by `call`.
    run = make_run(tuple(blocks), *place.without(args, kwargs), hooks, call=call, names=names)
    run.segments, run.planned = (segment,), planned
    try:
        return output.with_x(run.execute_planned(x)), run
    finally:
        output.forget()


class _Place:
    """Where x is among a call's arguments: the same object may be there several times, as in ``attention(x, x, x)``."""

    def __init__(self, positions: list[int], keywords: list[str]) -> None:
        self.positions, self.keywords = positions, keywords

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.positions:
            return args[self.positions[0]]
        return kwargs[self.keywords[0]] if self.keywords else None

    def put(
        self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = list(args)
        for position in self.positions:
            given[position] = x
        return tuple(given), {**kwargs, **dict.fromkeys(self.keywords, x)}

    def without(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a hole where x is; the order of keywords stays."""
        return self.put(None, args, kwargs)


def _place_of_x(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Place:
    favoured = [kwargs[name] for name in _FAVOURED if name in kwargs]
    candidates = [*args, *favoured, *kwargs.values()]
    for suits in (_carries_tensors, tensors_in):
        found = next((value for value in candidates if suits(value)), None)
        if found is not None:
            return _Place(
                [position for position, value in enumerate(args) if value is found],
                [name for name, value in kwargs.items() if value is found],
            )
    return _Place([], [])


def _carries_tensors(value: Any) -> bool:
    """Tell whether a value is a tensor or a plain container of some; an object, such as a cache, is x only if alone."""
    if isinstance(value, tuple | list):
        return any(map(_carries_tensors, value))
    return isinstance(value, Tensor) or (
        type(value) is dict and any(map(_carries_tensors, value.values()))
    )


class _Output:
    """What a block returned in the forward, and the part of it that is the next x.

    Holds it only until the call is over (R8), and nothing of a recompute.
    """

    __slots__ = ("open", "recomputing", "value", "x")

    def __init__(self) -> None:
        self.open, self.recomputing = True, is_recomputing()
        self.value: Any = None
        self.x: Any = None

    def pick(self, value: Any) -> Hidden:
        x = _first(value)
        # A hook may have the block executed again before the call is over.
        if self.open and is_recomputing() is self.recomputing:
            self.value, self.x = value, x
        return x

    def with_x(self, x: Hidden) -> Any:
        """The block's result, with another x in it if a hook has changed x."""
        if x is self.x or self.value is None:
            return self.value if x is self.x else x
        return _replaced(self.value, self.x, x)

    def forget(self) -> None:
        self.open, self.value, self.x = False, None, None


def _first(value: Any) -> Any:
    """The next x in a block's result: its first tensor, if it is a container at all."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return next((part for part in value.values() if isinstance(part, Tensor)), value)
    if isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
        return value[0]
    return value


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if value is old:
        return new
    kind: Any = type(value)
    if isinstance(value, Mapping):
        parts = {name: new if part is old else part for name, part in value.items()}
        return (
            kind(**parts) if hasattr(kind, "__dataclass_fields__") else kind(parts)
        )  # a ModelOutput, or a dict
    items = [new if part is old else part for part in value]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def in_backward() -> bool:
    """Whether this thread is executing a backward."""
    return torch._C._current_graph_task_id() != -1
