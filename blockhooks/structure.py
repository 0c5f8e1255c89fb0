"""Walk, copy and compare the containers and objects that tensors live in.

A recompute must be given what the forward was given, although lists, dicts, caches and other objects may have changed
in between. `capture` records the structure of a value: mutable containers and plain objects by their contents,
everything else (tensors among it) by identity. `Captured.rebuild` gives it again: the very same objects where nothing
differs, copies of the containers around where something does. Tensors are never copied.

`survey` finds what is reachable from a block: its modules, the objects with state of their own, and the random
generators (also those that a forward uses as globals).
"""

from __future__ import annotations

import array
import collections.abc
import contextlib
import dataclasses
import dis
import enum
import functools
import inspect
import itertools
import logging
import pathlib
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy as copied
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "MODULE_INTERNALS",
    "Captured",
    "Capturing",
    "Contents",
    "Slots",
    "Survey",
    "atomic",
    "capture",
    "contents_of",
    "is_rng",
    "own_attributes",
    "rng_state",
    "survey",
    "tensors_in",
    "versions_of",
]

MAX_OBJECT_DEPTH = 5
"""How many plain objects deep a capture looks: encoder-decoder cache, cache, layer, and two more."""

_ATOMIC: set[type] = {
    type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
    functools.partial, property, random.Random,
}  # fmt: skip
_LEADING = {torch.Generator, random.Random, types.FunctionType, functools.partial}
_DEAD_ENDS = _ATOMIC - _LEADING
_EVERY_MODULE_HAS = list(nn.Module().__dict__)
MODULE_INTERNALS = frozenset(_EVERY_MODULE_HAS)
"""The attributes that every `nn.Module` has: its registries, its hooks, its training flag."""
_OPAQUE_BASES = (
    nn.Module, enum.Enum, logging.Logger, logging.Handler, pathlib.PurePath, type, random.Random,
    types.ModuleType, BaseException, weakref.ref, torch.optim.Optimizer,
)  # fmt: skip
_OPAQUE_MODULES = tuple(f"{name}." for name in (
    "threading", "concurrent", "asyncio", "multiprocessing", "weakref", "contextvars", "typing", "abc",
    "torch._dynamo", "torch._C", "torch.distributed", "torch.fx", "torch._inductor", "torch.jit", "torch.cuda",
    "torch.optim", "torch.utils.data", "torch._ops", "torch.library", "torch.autograd", "numpy", "pluggy",
    "blockhooks",
))  # fmt: skip
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # of type.__flags__
_opaque_types: set[type] = set()
_plain_types: set[type] = set()


def atomic(value: object) -> bool:
    """Whether a value is passed on as it is: neither container, nor tensor, nor an object with a state."""
    return type(value) in _ATOMIC


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place; 0 for an inference tensor, which does not count it."""
    tensors = tuple(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module beside those that every `nn.Module` has, as far as they may hold or lead to state."""
    attributes = module.__dict__
    names = list(attributes)
    if names[: len(_EVERY_MODULE_HAS)] == _EVERY_MODULE_HAS:  # nearly always, they are set first
        names = names[len(_EVERY_MODULE_HAS) :]
    else:
        names = [name for name in names if name not in MODULE_INTERNALS]
    return [(n, attributes[n]) for n in names if type(attributes[n]) not in _DEAD_ENDS]


def is_rng(value: object) -> bool:
    """Whether a value is a random generator of torch, NumPy or Python."""
    kind = type(value)
    if kind is torch.Generator or isinstance(value, random.Random):
        return True
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and isinstance(
        value, (numpy_random.Generator, numpy_random.RandomState)
    )


def rng_state(rng: Any) -> Any:
    """The state of a random generator (or of the modules `random` and `numpy.random`), to be compared."""
    if isinstance(rng, torch.Generator):
        return rng.get_state().numpy().tobytes()
    if rng is random or isinstance(rng, random.Random):
        return rng.getstate()
    if rng is None:
        return None
    return pickle.dumps(rng.get_state() if hasattr(rng, "get_state") else rng.bit_generator.state)


def _is_iterator(value: object) -> bool:
    """Whether a value is one of Python's own iterators, which can be read only once."""
    return isinstance(value, collections.abc.Iterator) and type(value).__module__ in (
        "builtins",
        "itertools",
    )


def _is_array(value: object) -> bool:
    """Whether a value is a NumPy array, an array or a bytearray: numbers that are changed in place."""
    kind = type(value)
    return (
        kind is bytearray
        or kind is array.array
        or (kind.__name__ == "ndarray" and kind.__module__ == "numpy")
    )


def _is_plain(value: object) -> bool:
    """Whether a value is an instance of an ordinary Python class, with attributes that may change."""
    kind = type(value)
    if kind in _plain_types:
        return True
    if kind in _opaque_types:
        return False
    plain = kind is types.SimpleNamespace or (
        (hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__))
        # All of its state is Python's: no built-in base but object, no built-in type itself.
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
        and not kind.__flags__ & _IMMUTABLE_TYPE
        and not isinstance(value, (*_OPAQUE_BASES, Tensor))
        and not f"{kind.__module__}.".startswith(_OPAQUE_MODULES)
        and not is_rng(value)
    )
    (_plain_types if plain else _opaque_types).add(kind)
    return plain


@functools.cache
def _is_closed(kind: type) -> bool:
    """Whether instances have a state that cannot be given again: those of other libraries' compiled code, and optimizers.

    That they change is seen only by what changes around them, or by what they change.
    """
    if kind.__name__ == "SwigPyObject" or issubclass(kind, torch.optim.Optimizer):
        return True  # the first calls itself a built-in
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):  # such as a file in memory
        return True
    return (
        not _of_a_library(kind.__module__)
        and not issubclass(kind, (*_OPAQUE_BASES, *_DATA))
        and not f"{kind.__module__}.".startswith(_OPAQUE_MODULES)
        and not hasattr(kind, "__members__")  # an enumeration
    )


_DATA = (int, float, complex, str, bytes, frozenset)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that an instance holds itself, in its dict and in its slots."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}
    for name in _slots(type(value)):  # type: ignore[arg-type]  # a type is hashable
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return found


class _Node(Protocol):
    """One mutable container or object in a captured structure."""

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any: ...

    def same(self, value: object, by: _Comparison) -> bool: ...


class _Comparison:
    """One comparison of a captured structure with a value.

    Attributes:
        tensors: What stands in the places of the tensors taken out; None for the tensors themselves.
        seen: Nodes and values, by id, that are compared already; some reach themselves, and many are reached twice.
    """

    __slots__ = ("seen", "tensors")

    def __init__(self, tensors: list[Tensor] | None) -> None:
        self.tensors = tensors
        self.seen: set[tuple[int, int]] = set()


class _TensorNode:
    """A tensor that was taken out of the structure; `index` is its place in the list of tensors."""

    __slots__ = ("index", "reference")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index, self.reference = index, weakref.ref(tensor)

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        return tensors[self.index]

    def same(self, value: object, by: _Comparison) -> bool:
        return (self.reference() if by.tensors is None else by.tensors[self.index]) is value


_NODES: tuple[type, ...] = ()


def _rebuild(item: Any, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
    return item.rebuild(memo, tensors) if type(item) in _NODES else item


def _same(item: Any, value: object, by: _Comparison) -> bool:
    if type(item) not in _NODES:
        return item is value
    pair = id(item), id(value)
    if pair in by.seen:
        return True
    by.seen.add(pair)
    return bool(item.same(value, by))


class _TupleNode:
    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind, self.items = kind, items

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        items = [_rebuild(item, memo, tensors) for item in self.items]
        if self.kind is tuple:
            return tuple(items)
        return self.kind(*items) if hasattr(self.kind, "_fields") else self.kind(items)

    def same(self, value: object, by: _Comparison) -> bool:
        return type(value) is self.kind and _all_same(self.items, value, by)


def _all_same(items: Any, values: Any, by: _Comparison) -> bool:
    return len(items) == len(values) and all(map(_same, items, values, itertools.repeat(by)))


class _ListNode:
    """A list, deque or set: a copy is given to each recompute."""

    __slots__ = ("attributes", "extra", "items", "kind")

    def __init__(
        self, kind: type, items: list[Any], extra: Any, attributes: dict[str, Any]
    ) -> None:
        self.kind, self.items, self.extra, self.attributes = kind, items, extra, attributes

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if issubclass(self.kind, deque):
            copy: Any = deque.__new__(self.kind)
            deque.__init__(copy, (), self.extra)
            extend: Callable[..., Any] = deque.extend
        elif issubclass(self.kind, set):
            copy, extend = set.__new__(self.kind), set.update
        else:
            copy, extend = list.__new__(self.kind), list.extend
        memo[id(self)] = copy
        extend(copy, [_rebuild(item, memo, tensors) for item in self.items])
        _set_attributes(copy, self.attributes, memo, tensors)
        return copy

    def same(self, value: object, by: _Comparison) -> bool:
        if type(value) is not self.kind:
            return False
        if isinstance(value, set):  # unordered, and its members are hashable: compare as a set
            return len(value) == len(self.items) and value == set(self.items)
        return _all_same(self.items, value, by) and (
            not self.attributes or _same_attributes(self.attributes, value, by)
        )


class _DictNode:
    """A dict of any kind: a copy is given to each recompute."""

    __slots__ = ("attributes", "factory", "items", "kind")

    def __init__(
        self, kind: Any, items: dict[Any, Any], factory: Any, attributes: dict[str, Any]
    ) -> None:
        self.kind, self.items, self.factory, self.attributes = kind, items, factory, attributes

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copy: Any = self.kind.__new__(self.kind)
        memo[id(self)] = copy
        # The plain __setitem__: classes such as ModelOutput do more in theirs.
        put = OrderedDict.__setitem__ if issubclass(self.kind, OrderedDict) else dict.__setitem__
        for key, item in self.items.items():
            put(copy, key, _rebuild(item, memo, tensors))
        if self.factory is not None:
            copy.default_factory = self.factory
        _set_attributes(copy, self.attributes, memo, tensors)
        return copy

    def same(self, value: object, by: _Comparison) -> bool:
        return (
            type(value) is self.kind
            and isinstance(value, dict)
            and len(value) == len(self.items)
            and all(k is other or k == other for k, other in zip(self.items, value, strict=True))
            and _all_same(self.items.values(), dict.values(value), by)
            and (not self.attributes or _same_attributes(self.attributes, value, by))
        )


class _ObjectNode:
    """A plain object. The object itself is given again while its attributes are those captured, else a copy."""

    __slots__ = ("attributes", "kind", "reference")

    def __init__(self, value: object) -> None:
        self.kind = type(value)
        self.attributes: dict[str, Any] = {}
        self.reference = _weakly(value)

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        original = self.reference()
        if original is not None and _same(self, original, _Comparison(tensors)):
            memo[id(self)] = original
            return original
        base: Any = types.SimpleNamespace if self.kind is types.SimpleNamespace else object
        copy = base.__new__(self.kind)
        memo[id(self)] = copy
        _set_attributes(copy, self.attributes, memo, tensors)
        return copy

    def same(self, value: object, by: _Comparison) -> bool:
        return type(value) is self.kind and _same_attributes(self.attributes, value, by)


def _weakly(value: Any) -> Callable[[], Any]:
    """A weak reference, or one to None where there can be none.

    Never a strong one: an object may come to hold what the region made (a cache does), whose graph holds us.
    """
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


def _frozen(value: object, attributes: dict[str, Any]) -> bool:
    """Whether an object can never come to hold what it does not hold now: a frozen dataclass of atoms, with slots."""
    frozen = getattr(getattr(value, "__dataclass_params__", None), "frozen", False)
    return frozen and not any(type(item) in _NODES for item in attributes.values())


class _ArrayNode:
    """A NumPy array or bytearray. Itself is given again while its contents are those captured, else a copy."""

    __slots__ = ("before", "reference")

    def __init__(self, value: Any) -> None:
        self.before, self.reference = copied(value), _weakly(value)

    def rebuild(self, memo: dict[int, Any], tensors: list[Tensor]) -> Any:
        if id(self) not in memo:
            original = self.reference()
            unchanged = original is not None and self.same(original, _Comparison(tensors))
            memo[id(self)] = original if unchanged else copied(self.before)
        return memo[id(self)]

    def same(self, value: object, by: _Comparison) -> bool:
        return type(value) is type(self.before) and _same_array(self.before, value)


def _same_array(one: Any, other: Any) -> bool:
    if isinstance(one, (bytearray, array.array)):
        return bool(one == other)
    return bool(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def _same_attributes(attributes: dict[str, Any], value: object, by: _Comparison) -> bool:
    now = _attributes(value)
    if attributes.keys() != now.keys():
        return False
    others = [(item, now[name]) for name, item in attributes.items() if item is not now[name]]
    return all(_same(item, other, by) for item, other in others)


def _set_attributes(
    copy: object, attributes: dict[str, Any], memo: dict[int, Any], tensors: list[Tensor]
) -> None:
    for name, item in attributes.items():
        object.__setattr__(copy, name, _rebuild(item, memo, tensors))


_NODES = (_TensorNode, _TupleNode, _ListNode, _DictNode, _ObjectNode, _ArrayNode)


class Captured:
    """The structure of a value at one moment.

    Attributes:
        root: The value itself where there is nothing mutable in it, else a description.
        tensors: The tensors that were taken out, in order (empty unless `capture` was asked to).
    """

    __slots__ = ("_around", "root", "tensors")

    def __init__(
        self, root: Any, tensors: list[Tensor], around: list[tuple[_ObjectNode, type]]
    ) -> None:
        self.root, self.tensors, self._around = root, tensors, around

    @property
    def constant(self) -> bool:
        """Whether the value holds nothing that can change (no container, no object with attributes)."""
        return type(self.root) not in _NODES

    def rebuild(self, tensors: Iterable[Tensor] = ()) -> Any:
        """Give the value as it was captured.

        Args:
            tensors: What to put in the places of the tensors taken out, in order.
        """
        return _rebuild(self.root, {}, list(tensors))

    def same(self, value: object) -> bool:
        """Whether a value is, object for object, what was captured."""
        return _same(self.root, value, _Comparison(None))

    def changed_around(self) -> list[type]:
        """The classes of what cannot be looked into and is held by an object that has changed since."""
        return [
            kind
            for node, kind in self._around
            if (now := node.reference()) is not None and not _same(node, now, _Comparison(None))
        ]


class _Walk:
    def __init__(
        self, tensors: list[Tensor] | None, refuse: Callable[[object], None] | None = None
    ) -> None:
        self.tensors, self.refuse = tensors, refuse
        self.iterators = False
        self.closed: list[type] = []
        self.around: list[tuple[_ObjectNode, type]] = []
        self.memo: dict[
            int, tuple[Any, Any]
        ] = {}  # id -> node, and the value, so that its id stays taken

    def visit(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMIC:
            return value
        if id(value) in self.memo:
            return self.memo[id(value)][0]
        if kind in _plain_types:  # first, for its class may make isinstance slow
            return self._object(value, depth)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is tuple or isinstance(value, tuple):
            items = [self.visit(item, depth) for item in value]
            return _TupleNode(kind, items) if any(type(i) in _NODES for i in items) else value
        if isinstance(value, dict):
            return self._dict(value, kind, depth)
        if isinstance(value, (list, deque, set)):
            return self._list(value, kind, depth)
        if _is_plain(value):
            return self._object(value, depth)
        if _is_array(value):
            node = _ArrayNode(value)
            self.memo[id(value)] = (node, value)
            return node
        if _is_iterator(value):
            self.iterators = True
            if self.refuse is not None:
                self.refuse(value)
        elif _is_closed(kind):  # type: ignore[arg-type]  # a type is hashable
            self.closed.append(kind)
        return value

    def _tensor(self, value: Tensor) -> Any:
        if self.tensors is None:
            return value
        node = _TensorNode(len(self.tensors), value)
        self.tensors.append(value)
        self.memo[id(value)] = (node, value)
        return node

    def _extras(self, value: Any, depth: int) -> dict[str, Any]:
        if not getattr(value, "__dict__", None):
            return {}
        return {name: self.visit(item, depth + 1) for name, item in vars(value).items()}

    def _list(self, value: Any, kind: type, depth: int) -> _ListNode:
        node = _ListNode(kind, [], getattr(value, "maxlen", None), {})
        self.memo[id(value)] = (node, value)
        if set(map(type, value)) <= _ATOMIC:  # long histories of numbers: no walk
            node.items = list(value)
        else:
            node.items = [self.visit(item, depth) for item in value]
        node.attributes = self._extras(value, depth)
        return node

    def _dict(self, value: Any, kind: type, depth: int) -> _DictNode:
        factory = value.default_factory if isinstance(value, defaultdict) else None
        node = _DictNode(kind, {}, factory, {})
        self.memo[id(value)] = (node, value)
        if set(map(type, dict.values(value))) <= _ATOMIC:
            node.items = dict(dict.items(value))
        else:
            node.items = {key: self.visit(item, depth) for key, item in dict.items(value)}
        if kind is not dict:
            node.attributes = self._extras(value, depth)
        return node

    def _object(self, value: Any, depth: int) -> Any:
        if depth >= MAX_OBJECT_DEPTH:
            return value
        attributes = _attributes(value)
        node = _ObjectNode(value)
        self.memo[id(value)] = (node, value)
        seen = len(self.closed)
        node.attributes = {name: self.visit(item, depth + 1) for name, item in attributes.items()}
        if len(self.closed) > seen:
            self.around.append((node, self.closed[seen]))
        if node.reference() is None and _frozen(value, node.attributes):
            node.reference = lambda: value
        return node


def capture(
    value: Any, *, take_tensors: bool = False, refuse: Callable[[object], None] | None = None
) -> Captured:
    """Record the structure of a value.

    Args:
        value: Any value.
        take_tensors: Take the tensors out, into `Captured.tensors`; else they stay where they are, by reference.
        refuse: Called with each iterator found, which could be read only once; to raise an error.
    """
    tensors: list[Tensor] | None = [] if take_tensors else None
    walk = _Walk(tensors, refuse)
    return Captured(walk.visit(value, 0), tensors or [], walk.around)


class Capturing:
    """A capture of several values, one after the other; the containers that they share stay shared."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._tensors: list[Tensor] = []
        self._walk = _Walk(self._tensors)

    @property
    def iterators(self) -> bool:
        """Whether an iterator was among them, which cannot be given again."""
        return self._walk.iterators

    @property
    def closed(self) -> list[type]:
        """The classes of what was among them that cannot be looked into."""
        return self._walk.closed

    def add(self, value: Any) -> list[Tensor]:
        """Record one more value; return the tensors that were first seen in it."""
        start = len(self._tensors)
        self._items.append(self._walk.visit(value, 0))
        return self._tensors[start:]

    def captured(self) -> Captured:
        """The values as a list, in the order of adding."""
        return Captured(_ListNode(list, self._items, None, {}), self._tensors, self._walk.around)


class Contents:
    """What the mutable containers and plain objects in a value hold, so that they can be given it back."""

    __slots__ = ("_held",)

    def __init__(self, held: list[tuple[Any, Any, dict[str, Any]]]) -> None:
        self._held = held

    def put_back(self) -> None:
        """Give each container and object, in place, what it held."""
        for owner, items, attributes in self._held:
            if isinstance(owner, dict):
                if not _same_items(owner, items):
                    dict.clear(owner) if type(owner) is not OrderedDict else OrderedDict.clear(
                        owner
                    )
                    put = (
                        OrderedDict.__setitem__
                        if isinstance(owner, OrderedDict)
                        else dict.__setitem__
                    )
                    for key, item in items.items():
                        put(owner, key, item)
            elif isinstance(owner, (list, deque)):
                if len(owner) != len(items) or any(
                    a is not b for a, b in zip(owner, items, strict=True)
                ):
                    owner.clear()
                    owner.extend(items)
            elif isinstance(owner, set):
                if owner != items:
                    owner.clear()
                    owner.update(items)
            elif _is_array(owner) and not _same_array(owner, items):
                owner[:] = items
            if attributes:
                _put_back_attributes(owner, attributes)


def _same_items(owner: dict[Any, Any], items: dict[Any, Any]) -> bool:
    return len(owner) == len(items) and all(
        key is other and owner_item is item
        for (key, owner_item), (other, item) in zip(dict.items(owner), items.items(), strict=True)
    )


def _put_back_attributes(owner: object, attributes: dict[str, Any]) -> None:
    now = _attributes(owner)
    for name in now.keys() - attributes.keys():
        object.__delattr__(owner, name)
    for name, item in attributes.items():
        if name not in now or now[name] is not item:
            object.__setattr__(owner, name, item)


def contents_of(value: Any) -> Contents:
    """Note what the mutable containers and plain objects in a value hold, for a short time (by strong references)."""
    held: list[tuple[Any, Any, dict[str, Any]]] = []
    seen: set[int] = set()
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        owner, depth = stack.pop()
        if type(owner) in _ATOMIC or id(owner) in seen or isinstance(owner, Tensor):
            continue
        seen.add(id(owner))
        items: Any = ()
        attributes: dict[str, Any] = {}
        if isinstance(owner, dict):
            items = dict(dict.items(owner))
            inside: Iterable[Any] = items.values()
        elif isinstance(owner, (list, deque, set)):
            items = set(owner) if isinstance(owner, set) else list(owner)
            inside = items
        elif isinstance(owner, tuple):
            inside = owner
        elif _is_array(owner):
            items, inside = copied(owner), ()
        elif _is_plain(owner) and depth < MAX_OBJECT_DEPTH:
            attributes = _attributes(owner)
            inside, depth = attributes.values(), depth + 1
        else:
            continue
        if not isinstance(owner, tuple):
            held.append((owner, items, attributes))
        stack += [(item, depth) for item in inside if type(item) not in _ATOMIC]
    return Contents(held)


class Slots(collections.abc.MutableMapping[str, Any]):
    """The slots of an object as a dict."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        names = _slots(type(self._owner))  # type: ignore[arg-type]  # a type is hashable
        return (name for name in names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return len(list(iter(self)))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, each once, in order of first sight."""
    return capture(value, take_tensors=True).tensors


@dataclasses.dataclass(slots=True)
class Survey:
    """What is reachable from blocks.

    Attributes:
        modules: Every `nn.Module`, each once.
        attributes: The `own_attributes` of each.
        objects: Callable objects and the owners of bound methods that serve as blocks.
        hooks: Callable objects that serve as forward hooks of the modules.
        rngs: Random generators of torch, NumPy and Python.
        tensors: Tensors beside parameters and buffers: in closures, and without a graph in attributes and containers.
        cells: Variables of outer functions that are read, and that none of the functions sets; with what each is bound to.
        lent: Modules that functions of a library hold (`checkpoint_sequential`), and only they.
        scripted: Whether there is TorchScript, which saves other tensors when it is executed again.
    """

    modules: list[nn.Module]
    attributes: list[list[tuple[str, Any]]]
    objects: list[Any]
    hooks: list[Any]
    rngs: list[Any]
    tensors: list[Tensor]
    cells: list[tuple[types.CellType, Any]]
    lent: list[nn.Module]
    scripted: bool


def survey(blocks: Iterable[Any], side: Iterable[Any] = ()) -> Survey:
    """Find the modules, objects and random generators reachable from blocks and side inputs."""
    search = _Search()
    search.blocks = tuple(blocks)
    for block in search.blocks:
        search.block(block)
    tensors, search.tensors = search.tensors, []
    for value in side:
        search.value(value, 0)
    return Survey(
        search.modules,
        search.attributes,
        search.objects,
        search.hooks,
        search.rngs,
        tensors,
        [(cell, value) for cell, value in search.cells if id(cell) not in search.own],
        search.lent,
        search.scripted,
    )


def _leads_on(value: object) -> bool:
    """Whether a generator or module may be found in a value."""
    return type(value) not in _DEAD_ENDS


class _Search:
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.attributes: list[list[tuple[str, Any]]] = []
        self.objects: list[Any] = []
        self.hooks: list[Any] = []
        self.rngs: list[Any] = []
        self.tensors: list[Tensor] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.own: set[int] = set()  # of cells, those that a function sets
        self.lent: list[nn.Module] = []
        self.lending = self.scripted = False
        self.seen: set[int] = set()
        self.partly: set[int] = set()
        self.blocks: tuple[Any, ...] = ()

    def block(self, block: Any) -> None:
        if isinstance(block, nn.Module):
            self.module(block)
        elif isinstance(block, types.MethodType):
            first = block.__func__.__code__.co_varnames[:1] if _has_code(block.__func__) else ()
            self.owner(block.__self__, block.__func__, *first)
            self.function(block.__func__)
        elif isinstance(block, types.FunctionType):
            self.function(block)
        elif isinstance(block, functools.partial):
            self.block(block.func)
            for value in (*block.args, *block.keywords.values()):
                self.block(value) if callable(value) else self.held(value)
        elif isinstance(block, torch.jit.ScriptFunction):
            self.scripted = True
        elif callable(block) and not isinstance(block, (type, types.BuiltinFunctionType)):
            self.owner(block)

    def owner(self, value: Any, function: Any = None, name: str = "") -> None:
        """Look into what a function knows as `name`, as far as it uses it by attributes."""
        if isinstance(value, nn.Module):
            used = None if function is None or not name else _used(function, name, type(value))
            self.module(value) if used is None else self.parts(value, used)
        elif id(value) not in self.seen and _is_plain(value):
            self.seen.add(id(value))
            self.objects.append(value)
            for item in _attributes(value).values():
                self.value(item, 0)
            self.globals_of_class(type(value))

    def parts(self, module: nn.Module, used: Iterable[str]) -> None:
        """A module of which a function uses some attributes: itself, and those."""
        if id(module) in self.seen:
            return
        if id(module) not in self.partly:
            self.partly.add(id(module))
            self.modules.append(module)
            self.attributes.append(own_attributes(module))
        for name in used:
            part = module._modules.get(name)
            if part is not None:
                self.module(part)
            elif name in module.__dict__ and name not in MODULE_INTERNALS:
                self.value(module.__dict__[name], 1)
        self.globals_of_class(type(module))

    def function(self, function: Any) -> None:
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        if _of_a_library(getattr(function, "__module__", None)):
            self.library_function(function)
            return
        names = function.__code__.co_freevars if _has_code(function) else ()
        for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
            self.cells.append((cell, value))
            if name in _sets(function.__code__):
                self.own.add(id(cell))
            if isinstance(value, nn.Module):
                self.owner(value, function, name)
            elif callable(value):
                self.block(value)
            else:
                self.held(value)
        for value in getattr(function, "__defaults__", None) or ():
            self.held(value)
        self.globals_of(function)

    def library_function(self, function: Any) -> None:
        """Find the modules that a function of a library holds for its caller."""
        lending, self.lending = self.lending, True
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                value = cell.cell_contents
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, nn.Module):
                        self.value(item, 0)
                    elif isinstance(item, (types.FunctionType, types.MethodType)):
                        self.block(item)
        self.lending = lending

    def module(self, module: nn.Module) -> None:
        stack = [module]
        while stack:
            module = stack.pop()
            if id(module) in self.seen:
                continue
            self.seen.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted = True
                continue
            attributes = own_attributes(module)
            if self.lending:
                self.lent.append(module)
            elif id(module) not in self.partly:
                self.modules.append(module)
                self.attributes.append(attributes)
            for _, value in attributes:
                self.value(value, 1)
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for hook in hooks.values() if hooks else ():
                    hook = inspect.unwrap(hook)
                    if id(hook) not in self.seen and _is_plain(hook):
                        self.seen.add(id(hook))
                        self.hooks.append(hook)
            self.globals_of_class(type(module))
            if module._modules:
                children = [child for child in module._modules.values() if child is not None]
                stack.extend(reversed(children))

    def globals_of(self, function: Any) -> None:
        for inner in _functions(function):
            self.names(_names_reached(inner.__code__, _Namespace(inner.__globals__)))

    def globals_of_class(self, kind: type) -> None:
        reached = _reached_by_class.get(id(kind))
        if reached is None:
            reached = _reached_by_class[id(kind)] = _names_of_class(kind)
            weakref.finalize(kind, _reached_by_class.pop, id(kind), None).atexit = False
        if reached:
            self.names(reached)

    def names(self, reached: _Names) -> None:
        for names, name in reached:
            self.value(names.get(name), 0)

    def held(self, value: Any) -> None:
        """Look at what a function holds itself."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
        else:
            self.value(value, 0)

    def value(self, value: Any, depth: int) -> None:
        """Look for generators and tensors, and for modules that are held outside of `_modules`."""
        if not _leads_on(value) or id(value) in self.seen:
            return
        if isinstance(value, Tensor):
            if value.grad_fn is None:  # others are of a step, and not to be held longer
                self.tensors.append(value)
            return
        if type(value) in _plain_types:  # first, for its class may make isinstance slow
            if depth <= MAX_OBJECT_DEPTH:
                self.inside(value, depth)
        elif is_rng(value):
            self.seen.add(id(value))
            self.rngs.append(value)
        elif isinstance(value, nn.Module):
            if not self.is_parent(value):
                self.module(value)
        elif isinstance(value, (types.FunctionType, functools.partial)):
            self.block(value)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.scripted = True
        elif depth <= MAX_OBJECT_DEPTH:
            self.inside(value, depth)

    def is_parent(self, module: nn.Module) -> bool:
        """Whether one of the blocks is a part of a module: its model, which it only knows."""
        return any(part is block for part in module.modules() for block in self.blocks)

    def inside(self, value: Any, depth: int) -> None:
        if type(value) in _plain_types:
            items: Iterable[Any] = _attributes(value).values()
        elif isinstance(value, dict):
            items = dict.values(value)
        elif isinstance(value, (list, tuple, deque, set)):
            items = value
        elif _is_plain(value):
            items = _attributes(value).values()
        else:
            return
        self.seen.add(id(value))
        for item in items:
            if _leads_on(item):
                self.value(item, depth + 1)


class _Namespace:
    """A module's globals as a key: compared by identity."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names

    def __hash__(self) -> int:
        return id(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Namespace) and other.names is self.names


_Names = tuple[tuple[Mapping[str, Any], str], ...]
"""Names that hold a random generator or module, or may come to do so, each with the namespace that it is in."""
_reached_by_class: dict[int, _Names] = {}  # by id, for as long as the class lives
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "blockhooks"))


def _names_of_class(kind: type) -> _Names:
    """What the methods of a class read, and the class's own generators."""
    found: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    for base in kind.__mro__:
        if _of_a_library(base.__module__):
            continue
        members = vars(base)
        for name, value in members.items():
            if _worth_following(value):
                found[id(members), name] = (members, name)
            for function in _functions(value):
                for names, inner in _names_reached(
                    function.__code__, _Namespace(function.__globals__)
                ):
                    found[id(names), inner] = (names, inner)
    return tuple(found.values())


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """A function or the functions of a descriptor, and what a decorator has wrapped in them."""
    stack = [value]
    seen: set[int] = set()
    while stack:
        value = stack.pop()
        if isinstance(value, (staticmethod, classmethod)):
            stack.append(value.__func__)
        elif isinstance(value, property):
            stack.append(value.fget)
        elif isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            yield value
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a name that is not bound yet
                    stack.append(cell.cell_contents)


def _has_code(function: Any) -> bool:
    return isinstance(getattr(function, "__code__", None), types.CodeType)


def _used(function: Any, name: str, kind: type) -> frozenset[str] | None:
    """The attributes by which a function uses what it knows as `name`, an instance of `kind`; None if in other ways too.

    What the methods use that it calls is among them.
    """
    found: set[str] = set()
    seen: set[tuple[types.CodeType, str]] = set()
    stack = [(inner.__code__, name) for inner in _functions(function)]
    while stack:
        code, name = stack.pop()
        if (code, name) in seen:
            continue
        seen.add((code, name))
        used = _used_in(code, name)
        if used is None or not used.isdisjoint(_REGISTRIES):
            return None
        for attribute in used - found:
            found.add(attribute)
            codes = [f.__code__ for f in _functions(inspect.getattr_static(kind, attribute, None))]
            stack += [(code, code.co_varnames[0]) for code in codes if code.co_varnames]
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _used_in(code: types.CodeType, name: str) -> frozenset[str] | None:
    """The attributes by which a code uses a variable; None if it does anything else with it."""
    found: set[str] = set()
    if name in code.co_varnames or name in code.co_freevars or name in code.co_cellvars:
        if "super" in code.co_names:
            return None
        steps = [step for step in dis.get_instructions(code) if step.opname != "COPY"]
        for step, after in itertools.pairwise(steps):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if (
                not step.opname.startswith("LOAD_")
                or name not in names
                or step.opname in _NOT_LOADED
            ):
                continue
            if names[-1] != name or names.count(name) > 1 or after.opname not in _ATTRIBUTE_STEPS:
                return None
            found.add(after.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and name in constant.co_freevars:
            inner = _used_in(constant, name)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)


_REGISTRIES = MODULE_INTERNALS - {"training"}
_NOT_LOADED = frozenset(
    ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_CLOSURE")
)
_ATTRIBUTE_STEPS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))


def _of_a_library(module: str | None) -> bool:
    return module is None or module.split(".")[0] in _LIBRARIES


def _worth_following(value: object) -> bool:
    if type(value) in (list, tuple, dict):
        items: Any = value.values() if isinstance(value, dict) else value
        return any(is_rng(item) or isinstance(item, nn.Module) for item in items)
    return is_rng(value) or isinstance(value, (nn.Module, torch.jit.ScriptFunction))


@functools.lru_cache(maxsize=4096)
def _names_reached(code: types.CodeType, namespace: _Namespace) -> _Names:
    """What a function reads from its module and others, directly or through the functions that it calls."""
    found: list[tuple[Mapping[str, Any], str]] = []
    seen: set[tuple[types.CodeType, int]] = set()
    stack: list[tuple[types.CodeType, Mapping[str, Any]]] = [(code, namespace.names)]
    while stack:
        code, names = stack.pop()
        if (code, id(names)) in seen:
            continue
        seen.add((code, id(names)))
        read = tuple(_names(code))
        modules = [value for name in read if isinstance(value := names.get(name), types.ModuleType)]
        for place in (names, *(vars(m) for m in modules if not _of_a_library(m.__name__))):
            for name in read:
                value = place.get(name)
                if isinstance(value, types.FunctionType):
                    if not _of_a_library(value.__module__):
                        stack += [
                            (inner.__code__, inner.__globals__) for inner in _functions(value)
                        ]
                elif _worth_following(value) or (name in place and _empty(value)):
                    found.append((place, name))
    return tuple(found)


def _empty(value: object) -> bool:
    """Whether there may be a generator or module later: one that is made when it is needed first, for example."""
    return value is None or (type(value) in (list, dict) and not value)


@functools.lru_cache(maxsize=4096)
def _sets(code: types.CodeType) -> frozenset[str]:
    """The variables of outer functions that a function, or one in it, sets itself."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname in _SETS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _sets(constant)
    return frozenset(found)


_SETS = frozenset(("STORE_DEREF", "DELETE_DEREF"))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
