"""Find what a block reaches: its modules, the objects with state of their own, and the random generators.

A function reaches what it closes over, its defaults, and the globals that its code names, those of its decorators and
helpers among them; a module reaches its attributes and children, and what its class's methods and its forward hooks
reach. In objects, classes, methods and cached functions that are reached so only random generators are looked for.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import dis
import functools
import gc
import inspect
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockhooks.structure import (
    DEAD_ENDS,
    MAX_OBJECT_DEPTH,
    MODULE_INTERNALS,
    attributes_of,
    is_plain,
    is_rng,
    of_a_library,
    own_attributes,
    plain_types,
)

__all__ = ["GLOBAL_HOOKS", "Survey", "survey"]

GLOBAL_HOOKS: tuple[Any, ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
"""Forward hooks of all modules."""


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
        open: Globals that may come to hold a random generator: with nothing in them yet, or in a part of them.
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
    open: _Names

    def makes_generators(self) -> bool:
        """Whether a global holds a random generator now that it did not hold when the survey was made."""
        if not self.open:
            return False
        known = set(map(id, self.rngs))
        found = (names.get(name) for names, name in self.open)
        return any(id(rng) not in known for value in found for rng in _generators_in(value))


def survey(blocks: Iterable[Any], side: Iterable[Any] = ()) -> Survey:
    """Find the modules, objects and random generators reachable from blocks and side inputs."""
    search = _Search()
    search.blocks = tuple(blocks)
    for block in search.blocks:
        search.block(block)
    for hooks in GLOBAL_HOOKS:
        for hook in hooks.values() if hooks else ():
            search.hook(hook)
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
        tuple(search.open),
    )


def _leads_on(value: object) -> bool:
    """Whether a generator or module may be found in a value."""
    return type(value) not in DEAD_ENDS


class _Search:
    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.attributes: list[list[tuple[str, Any]]] = []
        self.objects: list[Any] = []
        self.hooks: list[Any] = []
        self.rngs: list[Any] = []
        self.tensors: list[Tensor] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.open: list[tuple[Mapping[str, Any], str]] = []
        self.own: set[int] = set()  # of cells, those that a function sets
        self.lent: list[nn.Module] = []
        self.lending = self.scripted = False
        self.seen: set[int] = set()
        self.named: set[int] = set()
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
        elif id(value) not in self.seen and is_plain(value):
            self.seen.add(id(value))
            self.objects.append(value)
            for item in attributes_of(value).values():
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
        if of_a_library(getattr(function, "__module__", None)):
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
        self.names(_reached(function))

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
                    self.hook(hook)
            self.globals_of_class(type(module))
            if module._modules:
                children = [child for child in module._modules.values() if child is not None]
                stack.extend(reversed(children))

    def hook(self, hook: Any) -> None:
        """Look at a forward hook, which may draw and count."""
        hook = inspect.unwrap(hook)
        if id(hook) in self.seen:
            return
        self.seen.add(id(hook))
        if is_plain(hook):
            self.hooks.append(hook)
        self.generators(hook)
        called = type(hook).__call__ if is_plain(hook) else getattr(hook, "func", hook)
        self.names(_reached(getattr(called, "__func__", called)))

    def generators(self, value: Any) -> None:
        """Look for generators alone."""
        for rng in _generators_in(value):
            self.value(rng, 0)

    def globals_of_class(self, kind: type) -> None:
        reached = _reached_by_class.get(id(kind))
        if reached is None:
            reached = _reached_by_class[id(kind)] = _names_of_class(kind)
            weakref.finalize(kind, _reached_by_class.pop, id(kind), None).atexit = False
        if reached:
            self.names(reached)

    def names(self, reached: Iterable[_Name]) -> None:
        for names, name in reached:
            value = names.get(name)
            if id(value) in self.named:
                continue
            if value is not None:  # which is another nothing each time
                self.named.add(id(value))
                if isinstance(value, type) or is_plain(value):
                    self.generators(value)
                else:
                    self.value(value, 0)
            if _open(value):
                self.open.append((names, name))

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
        if type(value) in plain_types:  # first, for its class may make isinstance slow
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
        elif isinstance(value, _HOLDERS):
            self.generators(value)
        elif depth <= MAX_OBJECT_DEPTH:
            self.inside(value, depth)

    def is_parent(self, module: nn.Module) -> bool:
        """Whether one of the blocks is a part of a module: its model, which it only knows."""
        return any(part is block for part in module.modules() for block in self.blocks)

    def inside(self, value: Any, depth: int) -> None:
        if type(value) in plain_types:
            items: Iterable[Any] = attributes_of(value).values()
        elif isinstance(value, dict):
            items = dict.values(value)
        elif isinstance(value, (list, tuple, deque, set)):
            items = value
        elif is_plain(value):
            items = attributes_of(value).values()
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


_Name = tuple[Mapping[str, Any], str]
"""A name that holds a random generator or module, or may come to do so, with the namespace that it is in."""
_Names = tuple[_Name, ...]
_reached_by_class: dict[int, _Names] = {}  # by id, for as long as the class lives


def _names_of_class(kind: type) -> _Names:
    """What the methods of a class read, and the class's own generators."""
    found: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    for base in kind.__mro__:
        if of_a_library(base.__module__):
            continue
        members = vars(base)
        for name, value in members.items():
            if _worth_following(value):
                found[id(members), name] = (members, name)
            for names, inner in _reached(value):
                found[id(names), inner] = (names, inner)
    return tuple(found.values())


def _reached(value: Any) -> Iterator[_Name]:
    """What a function, or those of a descriptor, read from their modules, and what they hold themselves."""
    stack = list(_functions(value))
    seen: set[int] = set()
    while stack:
        function = stack.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield from _names_reached(function.__code__, _Namespace(function.__globals__))
        for names, name in _held_by(function):
            held = names.get(name)
            if isinstance(held, types.FunctionType):
                continue  # among those of _functions
            if _worth_following(held) or _open(held):
                yield names, name
            stack += _methods(held, function.__code__.co_names)


class _Cells(Mapping[str, Any]):
    """What the variables are bound to that a function closes over."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # not bound yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _held_by(function: types.FunctionType) -> Iterator[_Name]:
    """What a function holds itself: what it closes over, its defaults and its attributes."""
    defaults = {str(index): value for index, value in enumerate(function.__defaults__ or ())}
    defaults |= function.__kwdefaults__ or {}
    fixed = {name: value for name, value in defaults.items() if value is not None}
    for names in (_Cells(function), fixed, vars(function)):
        for name in names:
            yield names, name


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


_CachedFunction = functools._lru_cache_wrapper
_HOLDERS = (
    types.MethodType,
    types.BuiltinFunctionType,
    _CachedFunction,
    contextvars.ContextVar,
    threading.local,
    weakref.ref,
)
"""Types of values in which generators alone are looked for."""
_MOST_ITEMS = 256
"""Containers of more items, and cached functions of more results, are taken for data: no generators are looked for."""


def _worth_following(value: object) -> bool:
    if isinstance(value, (nn.Module, torch.jit.ScriptFunction)):
        return True
    if type(value) in (list, tuple, dict):
        items: Any = value.values() if isinstance(value, dict) else value
        if any(is_rng(item) or isinstance(item, nn.Module) for item in items):
            return True
    return any(True for _ in _generators_in(value))


def _generators_in(value: object) -> Iterator[Any]:
    """Find random generators in a global, as deep as a capture looks."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    seen: set[int] = set()
    while stack:
        value, depth = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_rng(value):
            yield value
        elif depth <= MAX_OBJECT_DEPTH:
            stack += [(item, depth + 1) for item in _inside(value) if _leads_on(item)]


def _inside(value: Any) -> Iterable[Any]:
    """What a value holds: items, attributes, or results that it remembers."""
    if isinstance(value, (dict, list, tuple, deque, set)):
        if len(value) > _MOST_ITEMS:
            return ()
        return dict.values(value) if isinstance(value, dict) else value
    if isinstance(value, type):
        return () if of_a_library(value.__module__) else vars(value).values()
    if is_plain(value):
        return attributes_of(value).values()
    if isinstance(value, types.FunctionType):
        library = of_a_library(value.__module__)
        return () if library else [names.get(name) for names, name in _held_by(value)]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, types.BuiltinFunctionType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, _CachedFunction):
        return gc.get_referents(value) if value.cache_info().currsize <= _MOST_ITEMS else ()
    if isinstance(value, contextvars.ContextVar):
        return (value.get(None),)
    if isinstance(value, threading.local):
        return vars(value).values()
    return (value(),) if isinstance(value, weakref.ref) else ()


def _open(value: object) -> bool:
    """Whether a global may come to hold a random generator, which is made when it is needed first."""
    if isinstance(value, _CachedFunction) or _empty(value):
        return True
    return is_plain(value) and any(map(_empty, attributes_of(value).values()))


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
        for place in (names, *(vars(m) for m in modules if not of_a_library(m.__name__))):
            for name in read:
                value = place.get(name)
                if isinstance(value, types.FunctionType):
                    if not of_a_library(value.__module__):
                        stack += [
                            (inner.__code__, inner.__globals__) for inner in _functions(value)
                        ]
                    continue
                if _worth_following(value) or (name in place and _open(value)):
                    found.append((place, name))
                stack += [(f.__code__, f.__globals__) for f in _methods(value, read)]
    return tuple(found)


def _methods(value: object, names: Iterable[str]) -> Iterator[types.FunctionType]:
    """The methods of some names of a class or of an object's class, and what is executed when either is called."""
    if not isinstance(value, type) and not is_plain(value):
        return
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        if not of_a_library(base.__module__):
            for name in (*names, *_CALLED):
                yield from _functions(vars(base).get(name))


_CALLED = ("__init__", "__call__", "forward")


def _empty(value: object) -> bool:
    """Whether there may be a generator or module later."""
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
