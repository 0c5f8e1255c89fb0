"""Route the calls of single modules elsewhere, without changing anything about the modules.

A module's call looks `forward` up on its class. So the class gets a `forward` that asks a registry of instances,
weakly held, whether this one is routed; nothing is put on the instance, and `vars(module)`, copies, pickles and
`state_dict` are what they were. It also sees `layer.forward(...)` called directly, and lies inside the module's own
hooks (FSDP's, accelerate's), which fire once. When the last routed instance of a class is gone, so is its `forward`.

Three kinds of modules answer a call elsewhere, and get the same treatment there: a module compiled in place (its
`__call__` runs compiled code, and a route inside would be compiled with it), a module with a `forward` among its own
attributes, and one of those on which accelerate has put a hook and kept the original in `_old_forward`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

__all__ = ["Route", "is_routed", "route", "unroute"]


class Route(Protocol):
    """What happens instead of a call."""

    def __call__(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call; `plain` is what would have been called."""


_routes: weakref.WeakKeyDictionary[nn.Module, Route] = weakref.WeakKeyDictionary()
_entries: dict[tuple[type, str], _Entry] = {}
_lock = threading.RLock()


def route(module: nn.Module, target: Route) -> None:
    """Send the calls of a module to `target` until `unroute`."""
    with _lock:
        _sweep()
        _routes[module] = target
        key = _entry_of(module)
        if key not in _entries:
            _entries[key] = _Entry(*key)
        _entries[key].members.add(module)


def unroute(module: nn.Module) -> None:
    """Give a module its own calls back."""
    with _lock:
        _routes.pop(module, None)
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
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return type(module), "__call__" if compiled or "forward" in vars(module) else "forward"


class _Entry:
    """A method of a class that asks for routes first."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name
        self.members: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.original = vars(owner).get(name)
        inherited = getattr(owner, name)

        @functools.wraps(inherited)
        def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            target = _routes.get(self)
            if target is None:
                return plain(self)(*args, **kwargs)
            return target(plain(self), args, kwargs)

        plain = self.plain
        self.method = method
        setattr(owner, name, method)

    def plain(self, module: nn.Module) -> Callable[..., Any]:
        """What the class would have called, bound to the module."""
        if self.original is None:
            return getattr(super(self.owner, module), self.name)  # type: ignore[no-any-return]
        return self.original.__get__(module, type(module))  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Take the method out again, unless somebody has put another one over it, which may call it."""
        if vars(self.owner).get(self.name) is not self.method:
            return
        if self.original is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
