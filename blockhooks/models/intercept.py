"""Route the calls of single modules elsewhere, without changing anything about the modules.

A module's call looks `forward` up on its class. So the class gets a `forward` that asks a registry of instances,
weakly held, whether this one is routed; nothing is put on the instance, and `vars(module)`, copies, pickles and
`state_dict` are what they were. It also sees `layer.forward(...)` called directly, and lies inside the module's own
hooks (FSDP's, accelerate's), which fire once. When the last routed instance of a class is gone, so is its `forward`.

Some modules answer a call elsewhere. One that is compiled (a route inside would be compiled with it), or that has a
`forward` among its own attributes, is routed in its class's `__call__`. If that `forward` is a hook of accelerate's,
which calls the module's `_old_forward`, the route is there, inside of the hook.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Route", "is_routed", "route", "unroute"]


class Route(Protocol):
    """What happens instead of a call."""

    def __call__(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call; `plain` is what would have been called."""

    def traced(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call that is being compiled, in a way that the compiler can follow."""


_routes: weakref.WeakKeyDictionary[nn.Module, Route] = weakref.WeakKeyDictionary()
_traced: dict[int, Route] = {}
"""The same by the module's id, which the compiler can follow; an id is taken out before it can be used again."""
_entries: dict[tuple[type, str], _Entry] = {}
_lock = threading.RLock()
_HOOKED = "_old_forward"
"""The attribute in which accelerate keeps the forward of a module that has one of its hooks."""


def route(module: nn.Module, target: Route) -> None:
    """Send the calls of a module to `target` until `unroute`."""
    with _lock:
        _sweep()
        _routes[module] = target
        _traced[id(module)] = target
        weakref.finalize(module, _traced.pop, id(module), None).atexit = False
        key = _entry_of(module)
        if key not in _entries:
            _entries[key] = _Entry(*key)
        _entries[key].members.add(module)


def unroute(module: nn.Module) -> None:
    """Give a module its own calls back."""
    with _lock:
        _routes.pop(module, None)
        _traced.pop(id(module), None)
        for entry in _entries.values():
            entry.members.discard(module)
        _sweep()


def is_routed(module: nn.Module) -> bool:
    """Tell whether a module's calls go to a route."""
    return module in _routes


def _sweep() -> None:
    """Free the classes of which no routed instance is left."""
    for key, entry in list(_entries.items()):
        if not entry.members:
            entry.remove()
            del _entries[key]


def _entry_of(module: nn.Module) -> tuple[type, str]:
    if getattr(module, "_compiled_call_impl", None) is not None:
        return type(module), "__call__"
    if "forward" in vars(module):
        return type(module), _HOOKED if _HOOKED in vars(module) else "__call__"
    return type(module), "forward"


class _Entry:
    """A method of a class that asks for routes first."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name
        self.members: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.original = vars(owner).get(name)
        self.method = _Slot() if name == _HOOKED else _method(owner, name, self.original)
        setattr(owner, name, self.method)

    def remove(self) -> None:
        """Take the method out again, unless somebody has put another one over it, which may call it."""
        if vars(self.owner).get(self.name) is not self.method:
            return
        if self.original is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def _method(owner: type, name: str, original: Any) -> Callable[..., Any]:
    function = getattr(owner, name)

    @functools.wraps(function)
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # No bound method: after a graph break the compiler would look it up by name, and find this one.
            target = _traced.get(id(self))
            if target is None:
                return function(self, *args, **kwargs)
            return target.traced(functools.partial(function, self), args, kwargs)
        # What is inherited is looked up now: a base class may have got, or lost, a route of its own.
        plain = (
            getattr(super(owner, self), name)
            if original is None
            else original.__get__(self, type(self))
        )
        target = _routes.get(self)
        return plain(*args, **kwargs) if target is None else target(plain, args, kwargs)

    return method


class _Slot:
    """The instances' attribute `_old_forward`, seen through their class: it gives the way through the route."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None or _HOOKED not in vars(module):
            raise AttributeError(_HOOKED)
        return functools.partial(_through, module, vars(module)[_HOOKED])

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[_HOOKED] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[_HOOKED]


def _through(module: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    target = _routes.get(module)
    return plain(*args, **kwargs) if target is None else target(plain, args, kwargs)
