"""Walk, copy and compare the containers and objects that tensors live in.

A recompute must be given what the forward was given, although lists, dicts, caches and other objects may have changed
in between. `capture` records the structure of a value: mutable containers and plain objects by their contents,
everything else (tensors among it) by identity. `Captured.rebuild` gives it again: the very same objects where nothing
differs, copies of the containers around where something does. Tensors are never copied.
"""

from __future__ import annotations

import array
import collections.abc
import enum
import functools
import itertools
import logging
import pathlib
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy as copied
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DEAD_ENDS",
    "MAX_OBJECT_DEPTH",
    "MODULE_INTERNALS",
    "Captured",
    "Capturing",
    "Contents",
    "Slots",
    "atomic",
    "attributes_of",
    "capture",
    "contents_of",
    "is_plain",
    "is_rng",
    "of_a_library",
    "own_attributes",
    "parts_of",
    "plain_types",
    "rng_state",
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
_LEADING = {
    torch.Generator, random.Random, functools.partial,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType,
}  # fmt: skip
DEAD_ENDS = frozenset(_ATOMIC - _LEADING)
"""The types of values behind which no state can be found."""
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
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "blockhooks"))
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # of type.__flags__
_opaque_types: set[type] = set()
plain_types: set[type] = set()
"""Those of which `is_plain` is known to be true, for where a call takes too long."""


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
    return [(n, attributes[n]) for n in names if type(attributes[n]) not in DEAD_ENDS]


def of_a_library(module: str | None) -> bool:
    """Whether a function or class is of Python's library, torch or NumPy, or ours, by the name of its module."""
    return module is None or module.split(".")[0] in _LIBRARIES


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


def is_plain(value: object) -> bool:
    """Whether a value is an instance of an ordinary Python class, with attributes that may change."""
    kind = type(value)
    if kind in plain_types:
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
    (plain_types if plain else _opaque_types).add(kind)
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
        not of_a_library(kind.__module__)
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


def attributes_of(value: Any) -> dict[str, Any]:
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
    now = attributes_of(value)
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
        if kind in plain_types:  # first, for its class may make isinstance slow
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
        if is_plain(value):
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
        attributes = attributes_of(value)
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
    now = attributes_of(owner)
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
        elif is_plain(owner) and depth < MAX_OBJECT_DEPTH:
            attributes = attributes_of(owner)
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


def parts_of(tensor: Any) -> list[Tensor] | None:
    """The tensors that a wrapper (such as a `DTensor`) stands around; None of a tensor that is none."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]
