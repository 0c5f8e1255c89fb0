"""`StateSnapshot`: the recompute sees the state that the forward saw, and leaves no trace."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import chain
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from blockhooks.errors import HookError
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import Segment
from blockhooks.recompute import keep_aside
from blockhooks.run import Run
from blockhooks.structure import (
    Captured,
    Capturing,
    Contents,
    Slots,
    atomic,
    capture,
    contents_of,
    rng_state,
    versions_of,
)
from blockhooks.survey import GLOBAL_HOOKS, Survey

__all__ = ["StateSnapshot"]


class StateSnapshot:
    """Carry what a block's forward changes: buffers, attributes, containers, mutable side inputs.

    * Buffers and other tensors that the forward changes in place (BatchNorm, spectral norm, router counters, EMA
      codebooks): the recompute works on copies of their values before the forward. Which ones change is learned, by
      comparing all of them at a module's first forward and at some later ones; the others are never copied.
    * Attributes of the blocks' modules (train/eval flags, counters, lists, dicts, plain objects), which parameters and
      buffers a module has (`torch.func.functional_call` puts others in place), and ``requires_grad`` flags.
    * What these hold in turn: tensors in lists and objects, NumPy arrays, slots; and gradients that a backward inside of a
      block accumulates.
    * Side inputs that can change (dicts, lists, caches): the recompute is given them as they were.
    * Forward hooks of the blocks' modules that only observe (return None, change no state, draw no random number) are
      not called in the recompute; all others are.
    * Variables of an outer function that a block reads: a loop goes on before the backward comes.

    After the recompute everything is put back as it was found, the user's own objects in their places. A list or counter
    in a plain function's closure is the user's own and is left alone. Of modules that a library's function holds
    (torch's `checkpoint_sequential`), buffers alone are carried: their attributes count each execution, as they do there.

    A block that holds an iterator or initialises a lazy module keeps what autograd saved, since it cannot be executed
    again; so does one that runs TorchScript, one that changes what holds an object of another library's compiled code,
    such as a search index, and one that lets an optimizer of its own change its parameters.
    A change through ``.data`` or NumPy counts no version: it is seen where it happens in one of the forwards that are
    compared, as it is by a module that makes it in its first.

    Side: crosses the boundary. See R2, R6 and R7.
    """

    @hookimpl
    def recompute_context(self, run: Run, segment: Segment) -> _State:
        """Capture the state of the segment's modules and of the side inputs."""
        return _State(run, run.survey(segment))


_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_registries = operator.itemgetter(*_REGISTRIES)


class _Learned:
    """What is known of the tensors of one module: how often it ran, and which of them its forward changes."""

    __slots__ = ("changing", "forwards")

    def __init__(self) -> None:
        self.forwards: dict[bool, int] = {}
        self.changing: set[str] = set()

    def due(self, training: bool) -> bool:
        """Whether to compare all tensors: at forwards 1, 2, 4, 8, ... of each mode, so that the cost vanishes."""
        count = self.forwards.get(training, 0) + 1
        self.forwards[training] = count
        return count & (count - 1) == 0


_learned: dict[int, _Learned] = {}


def _learned_of(owner: Any) -> _Learned:
    learned = _learned.get(id(owner))
    if learned is None:
        learned = _Learned()
        with contextlib.suppress(TypeError):  # without weak references nothing is remembered
            weakref.finalize(owner, _learned.pop, id(owner), None).atexit = False
            _learned[id(owner)] = learned
    return learned


_Holder = MutableMapping[str, Any]  # the dict of a module or object, or its slots


_Place = tuple[_Holder | None, str, Tensor, _Learned]
"""A tensor which the forward may change in place, and where it is: in a registry or attribute, or deeper (None)."""


class _Compared:
    """A place whose tensor is compared after the forward, since it is known to change, or to see whether it does."""

    __slots__ = ("before", "holder", "learned", "name", "sums", "tensor", "version")

    def __init__(
        self, holder: _Holder | None, name: str, tensor: Tensor, learned: _Learned
    ) -> None:
        self.holder, self.name, self.tensor, self.learned = holder, name, tensor, learned
        (self.version,) = versions_of([tensor])
        self.before: Tensor | None = None
        self.sums: list[int] | None = None
        if name in learned.changing or not isinstance(tensor, nn.Parameter):
            self.before = _clone(tensor)
        else:  # large, and hardly ever changed: a copy of each would be most of what a region holds
            self.sums = _sums(tensor)

    def changed(self) -> bool:
        """Whether the forward has changed the tensor in place."""
        if versions_of([self.tensor]) != [self.version]:
            return True
        # Through .data and NumPy no version is counted.
        if self.sums is not None:
            return self.sums != _sums(self.tensor)
        assert self.before is not None
        return not _wraps(self.tensor) and not _equal(self.before, self.tensor)

    def fresh(self) -> Tensor:
        """The tensor as it was before the forward, for one recompute."""
        assert self.before is not None  # `_State.forward_done` keeps the region otherwise
        copy = _clone(self.before)
        if isinstance(self.tensor, nn.Parameter):
            return nn.Parameter(copy, requires_grad=self.tensor.requires_grad)
        return copy.requires_grad_(self.tensor.requires_grad and self.tensor.is_leaf)


def _wraps(tensor: Tensor | None) -> bool:
    """Whether a tensor is a wrapper of others (DTensor), which has no memory of its own."""
    if tensor is None or type(tensor) is nn.Parameter or type(tensor) is Tensor:  # nearly always
        return False
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _without_graph(tensor: Tensor) -> Tensor:
    """A tensor of the same memory without its graph, which may lead through all of the forwards before.

    A module that stores what it computed would otherwise keep each forward alive by the next.
    """
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _clone(tensor: Tensor) -> Tensor:
    if _wraps(tensor):
        with torch.no_grad():
            return tensor.detach().clone()
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sums(tensor: Tensor) -> list[int]:
    """Sums over the bits of a tensor that depend on their places, for little memory and one reading."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        data = tensor.detach()
        if data.is_meta or data.layout is not torch.strided or data.numel() == 0:
            return []
        data = (torch.view_as_real(data) if data.is_complex() else data).contiguous()
        size = data.element_size()
        # Smaller integers than these are copied to them by a sum.
        row, start = size * (data.shape[-1] if data.dim() else 1), size * data.storage_offset()
        bits = data.view(_INTEGERS[size if row % 8 or start % 8 else 8])
        rows = bits.reshape(max(1, bits.shape[0] if bits.dim() > 1 else 1), -1)
        return [_weighted(rows.sum(0)), _weighted(rows.sum(1))]


def _weighted(values: Tensor) -> int:
    return int((values * torch.arange(1, len(values) + 1, device=values.device)).sum())


def _equal(one: Tensor, other: Tensor) -> bool:
    if other.is_meta:
        return True
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.equal(one, other)


class _State:
    """The factory: one region's state before its forward."""

    __slots__ = (
        "__weakref__",
        "accumulates",
        "attributes",
        "cells",
        "changed",
        "closed",
        "compared",
        "contents",
        "empty",
        "flags",
        "gradients",
        "hooked",
        "optimizes",
        "originals",
        "owners",
        "parameters",
        "places",
        "run",
        "side",
        "side_versions",
        "slotted",
        "stays",
        "structure",
        "versions",
        "watched",
    )

    def __init__(self, run: Run, found: Survey) -> None:
        self.run = run
        # Dicts, and what each holds before the forward; the same of slots.
        self.owners: list[dict[Any, Any]] = [hooks for hooks in GLOBAL_HOOKS if hooks]
        self.contents: list[dict[Any, Any]] = [hooks.copy() for hooks in self.owners]
        self.empty: list[dict[Any, Any]] = [hooks for hooks in GLOBAL_HOOKS if not hooks]
        self.slotted: list[tuple[_Holder, dict[str, Any]]] = []
        self.attributes: list[tuple[_Holder, str]] = []
        # Of owners that hold what cannot be looked into: its class.
        self.closed: list[tuple[_Holder, dict[str, Any], type]] = []
        self.places: list[_Place] = []
        self.compared: list[_Compared] = []
        self.parameters: list[Tensor] = []
        self.hooked, self.accumulates, self.changed = bool(self.owners), False, False
        self.stays: str | None = None
        capturing = Capturing()
        for module, attributes in zip(found.modules, found.attributes, strict=True):
            self._module(module, attributes, capturing)
        for module in found.lent:
            self._module(module, None, capturing)
        for owner in found.objects:
            self._object(owner, capturing)
        own = len(self.owners), len(self.slotted)
        for owner in found.hooks:
            self._object(owner, capturing)
        self.versions = versions_of(tensor for _, _, tensor, _ in self.places)
        self.flags = [parameter.requires_grad for parameter in self.parameters]
        self.gradients = _gradients(self.parameters)
        self.structure: Captured | None = capturing.captured() if self.attributes else None
        self.originals: list[int] = []
        if self.structure is not None:
            self.originals = list(map(id, self.structure.tensors))
            self.structure.tensors = list(map(_without_graph, self.structure.tensors))
        self.cells = found.cells
        self.optimizes = any(issubclass(kind, torch.optim.Optimizer) for kind in capturing.closed)
        if found.scripted:
            self.stays = "it runs TorchScript, which saves other tensors when it is executed again"
        if capturing.iterators:
            self.stays = "it holds an iterator, which can be read only once"
        self.side: Captured | None = None
        self.side_versions: list[int] = []
        if run.args or run.kwargs:
            self._side_inputs()
        self.watched = _Watch(found, self, own) if self.hooked else None

    # ---- capture -----------------------------------------------------------------------------------------------

    def _module(
        self, module: nn.Module, attributes: list[tuple[str, Any]] | None, capturing: Capturing
    ) -> None:
        """Note a module's state; without attributes, its tensors alone."""
        owner = module.__dict__
        learned = _learned_of(module)
        lazy = isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
        if lazy:
            self.stays = "it initialises a lazy module"
        elif isinstance(module, _NormBase) and module.training:
            # Its statistics change without a new version, whenever the momentum is not 0.
            learned.changing.update(("running_mean", "running_var"))
        compare = not lazy and learned.due(module.training)
        registries = _registries(owner)
        parameters, buffers = registries[:2]
        if any(registries[3:]):
            self.hooked = True
        if parameters:
            for name, parameter in parameters.items():
                if parameter is None or (lazy and is_lazy(parameter)):
                    continue
                self.parameters.append(parameter)
                self._place(parameters, name, parameter, learned, compare)
                if _wraps(parameter):
                    # Sharded parameters (FSDP) are swapped for whole ones, at times that the recompute has no say in.
                    registries = registries[1:]
        if buffers:
            for name, buffer in buffers.items():
                if buffer is not None and not (lazy and is_lazy(buffer)):
                    self._place(buffers, name, buffer, learned, compare)
        if attributes is None:
            if buffers:
                self._dict(buffers)
            return
        for registry in registries:
            if registry:
                self._dict(registry)
            else:
                self.empty.append(registry)
        contents = self._dict(owner)
        if attributes:
            self._owner(owner, contents, attributes, capturing, learned, compare)

    def _dict(self, owner: dict[str, Any]) -> dict[str, Any]:
        contents = owner.copy()
        self.owners.append(owner)
        self.contents.append(contents)
        return contents

    def _object(self, owner: Any, capturing: Capturing) -> None:
        learned = _learned_of(owner)
        compare = learned.due(True)
        attributes = getattr(owner, "__dict__", None)
        if attributes is not None:
            contents = self._dict(attributes)
            self._owner(attributes, contents, contents.items(), capturing, learned, compare)
        slots = Slots(owner)
        if len(slots):
            contents = dict(slots)
            self.slotted.append((slots, contents))
            self._owner(slots, contents, contents.items(), capturing, learned, compare)

    def _owner(
        self,
        owner: _Holder,
        contents: dict[str, Any],
        attributes: Iterable[tuple[str, Any]],
        capturing: Capturing,
        learned: _Learned,
        compare: bool,
    ) -> None:
        seen = len(capturing.closed)
        for name, value in list(attributes):
            if atomic(value):
                continue
            if isinstance(value, Tensor):
                self._place(owner, name, value, learned, compare)
                contents[name] = _without_graph(value)
            elif not isinstance(value, (nn.Module, random.Random)):
                self.attributes.append((owner, name))
                for tensor in capturing.add(value):
                    self._place(None, name, tensor, learned, compare)
        if len(capturing.closed) > seen:
            self.closed.append((owner, contents, capturing.closed[seen]))

    def _place(
        self, holder: _Holder | None, name: str, tensor: Tensor, learned: _Learned, compare: bool
    ) -> None:
        if name in learned.changing or (compare and not _wraps(tensor)):
            self.compared.append(_Compared(holder, name, tensor, learned))
        else:
            self.places.append((holder, name, tensor, learned))

    def _side_inputs(self) -> None:
        side = capture(self.run.side(), take_tensors=True, refuse=self._refuse_iterator)
        if side.tensors or not side.constant:
            self.side = side
            self.side_versions = versions_of(side.tensors)
            self.run.side_carried = True

    def _refuse_iterator(self, value: object) -> None:
        raise HookError(
            f"{self.run.describe(0, len(self.run.blocks))}: a side input is a {type(value).__name__}, an iterator, which "
            "the forward would use up so that the recompute finds it empty. Expected values that can be read again; pass "
            "a list or a tuple."
        )

    # ---- after the forward -------------------------------------------------------------------------------------

    def forward_done(self, failed: bool) -> str | None:
        """See what the forward has changed."""
        if self.watched is not None:
            self.watched.end()
        if failed:
            return None
        reason = self.stays
        versions = versions_of(tensor for _, _, tensor, _ in self.places)
        if versions != self.versions:
            for place, before, after in zip(self.places, self.versions, versions, strict=True):
                if before != after:
                    _, name, _, learned = place
                    learned.changing.add(name)
                    reason = _first_time(name)
        if self.compared:
            self.compared = [place for place in self.compared if place.changed()]
        for compared in self.compared:
            compared.learned.changing.add(compared.name)
            if compared.before is None:
                reason = _first_time(compared.name)
        if self.optimizes and any(
            place.tensor.is_leaf and place.tensor.requires_grad for place in self.compared
        ):
            reason = "it lets an optimizer change its parameters"
        if self.side is not None and versions_of(self.side.tensors) != self.side_versions:
            reason = "it changes a tensor of its side inputs in place"
        closed = self._changed_around()
        if closed is not None:
            reason = f"it changes what holds a {closed.__name__}, whose state cannot be given again"
        (before_gradients, before_counts), (gradients, counts) = (
            self.gradients,
            _gradients(self.parameters),
        )
        self.accumulates = before_counts != counts or not all(
            map(operator.is_, before_gradients, gradients)
        )
        self.gradients = [], []
        self.places, self.versions = [], []
        self.changed = self.structure is not None and not self.same_attributes()
        return reason

    def _changed_around(self) -> type | None:
        """The class of something that cannot be looked into, and that has probably changed, as what holds it has."""
        changed = [kind for owner, contents, kind in self.closed if not _holds(owner, contents)]
        for captured in (self.structure, self.side):
            if not changed and captured is not None:
                changed = captured.changed_around()
        return next(iter(changed), None)

    def same_attributes(self) -> bool:
        """Whether what the attributes hold is what they held before the forward."""
        assert self.structure is not None
        return self.structure.same([owner.get(name) for owner, name in self.attributes])

    # ---- around a recompute ------------------------------------------------------------------------------------

    def __call__(self) -> _Restored:
        return _Restored(self)

    def untouched(self) -> bool:
        """Whether dicts and slots hold the very things that they held before the forward, in the same order."""
        owners, contents = self.owners, self.contents
        return (
            not any(self.empty)
            and list(map(len, owners)) == list(map(len, contents))
            and list(chain.from_iterable(owners)) == list(chain.from_iterable(contents))
            and all(map(operator.is_, _values(owners), _values(contents)))
            and all(_holds(owner, held) for owner, held in self.slotted)
        )

    def put_back(self, contents: Iterable[tuple[_Holder, dict[str, Any]]]) -> None:
        """Give dicts and slots these contents; those that were empty before the forward, none."""
        for registry in self.empty:
            registry.clear()
        for holder, held in contents:
            _fill(holder, held)

    def all_contents(self) -> Iterator[tuple[_Holder, dict[str, Any]]]:
        """What each dict, and what each object's slots, held before the forward."""
        yield from zip(self.owners, self.contents, strict=True)
        yield from self.slotted


def _first_time(name: str) -> str:
    return f"it has changed {name!r} in place for the first time"


class _Restored(contextlib.AbstractContextManager[None]):
    """The state before the forward, in place for one recompute; and what was there, put back after it."""

    __slots__ = ("_cells", "_flags", "_gradients", "_now", "_own", "_side", "_state")

    def __init__(self, state: _State) -> None:
        self._state = state
        self._own: Contents | None = None
        self._side: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        state = self._state
        # What is as the forward found it needs no copy: in most regions, everything.
        self._now: list[tuple[_Holder, dict[str, Any]]] | None = None
        if not state.untouched():
            self._now = [(owner, dict(owner)) for owner, _ in state.all_contents()]
            self._now += [(registry, dict(registry)) for registry in state.empty if registry]
        self._cells = [
            (cell, value, now) for cell, value in state.cells if (now := _bound(cell)) is not value
        ]
        self._flags = [parameter.requires_grad for parameter in state.parameters]
        side = None if state.side is None else state.side.rebuild(state.side.tensors)
        if state.attributes or side is not None:
            # An early stop may leave the user's own containers half-way, also where the forward leaves them as they were.
            held = [holder[name] for holder, name in state.attributes if name in holder]
            self._own = contents_of([held, side])
        # A backward inside of the region has its effect once.
        self._gradients = [(t, t.grad) for t in state.parameters] if state.accumulates else []
        try:
            self._set()
            if side is not None:
                self._side = state.run.side_inputs(*side)
                self._side.__enter__()
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._side is not None:
                self._side.__exit__(None, None, None)
        finally:
            self._put_back()

    def _set(self) -> None:
        state = self._state
        for cell, value, _ in self._cells:
            cell.cell_contents = value
        for tensor, _ in self._gradients:
            tensor.grad = None
        fresh: dict[int, Tensor] = {}  # one tensor may have several places
        for place in state.compared:
            if id(place.tensor) not in fresh:
                fresh[id(place.tensor)] = place.fresh()
        copies = None
        structure = state.structure
        if structure is not None and (state.changed or fresh or not state.same_attributes()):
            copies = structure.rebuild(
                [
                    fresh.get(original, tensor)
                    for original, tensor in zip(state.originals, structure.tensors, strict=True)
                ]
            )
        if self._now is not None:
            state.put_back(state.all_contents())
        if copies is not None:
            for (holder, name), copy in zip(state.attributes, copies, strict=True):
                holder[name] = copy
        for place in state.compared:
            if place.holder is not None:
                place.holder[place.name] = fresh[id(place.tensor)]
        if state.watched is not None:
            state.watched.silence()
        _set_flags(state.parameters, state.flags)

    def _put_back(self) -> None:
        state = self._state
        if self._own is not None:
            self._own.put_back()
        if self._now is not None or not state.untouched():
            state.put_back(state.all_contents() if self._now is None else self._now)
        _set_flags(state.parameters, self._flags)
        for cell, _, now in self._cells:
            if now is _UNBOUND:
                del cell.cell_contents
            else:
                cell.cell_contents = now
        for tensor, grad in self._gradients:
            tensor.grad = grad


_UNBOUND: Any = object()


def _bound(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNBOUND


def _values(dicts: list[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _gradients(tensors: list[Tensor]) -> tuple[list[Tensor | None], list[int]]:
    """Parameters' gradients, and how often each was changed in place."""
    gradients = [tensor.grad for tensor in tensors]
    return gradients, [0 if grad is None else grad._version for grad in gradients]


def _holds(holder: _Holder, contents: dict[str, Any]) -> bool:
    """Whether a dict has these very contents, in this order."""
    return list(holder) == list(contents) and all(
        map(operator.is_, holder.values(), contents.values())
    )


def _fill(holder: _Holder, contents: dict[str, Any]) -> None:
    """Give a dict these contents, if it has others."""
    if not _holds(holder, contents):
        holder.clear()
        holder.update(contents)


def _set_flags(tensors: list[Tensor], flags: list[bool]) -> None:
    if [tensor.requires_grad for tensor in tensors] != flags:
        for tensor, flag in zip(tensors, flags, strict=True):
            if tensor.requires_grad is not flag and tensor.is_leaf:
                tensor.requires_grad_(flag)


# ---- forward hooks of modules ----------------------------------------------------------------------------------------


class _Watch:
    """Watches the forward hooks of a region's modules in the forward, to know which of them only observe.

    While the region runs, each hook stands in its registry inside of a `_Watched`; nothing is left behind.
    """

    __slots__ = ("hooks", "observers", "own", "rngs", "state")

    def __init__(self, found: Survey, state: _State, own: tuple[int, int]) -> None:
        # A hook may have a state of its own, which is no state of the modules: `own` counts theirs in `state`.
        self.state, self.own = weakref.ref(state), own
        self.rngs = (torch.default_generator, random, sys.modules.get("numpy.random"), *found.rngs)
        self.hooks: list[tuple[OrderedDict[int, Any], int, Any, _Watched]] = []
        self.observers: list[tuple[OrderedDict[int, Any], int]] = []
        for registry in (
            *(module.__dict__[name] for module in found.modules for name in _HOOK_DICTS),
            *GLOBAL_HOOKS,
        ):
            for key, hook in registry.items():
                watched = _Watched(hook, self)
                self.hooks.append((registry, key, hook, watched))
                registry[key] = watched

    def end(self) -> None:
        """Put the hooks back, and remember the ones that only observed."""
        for registry, key, hook, watched in self.hooks:
            if registry.get(key) is watched:
                registry[key] = hook
            if watched.called and watched.observes:
                self.observers.append((registry, key))
        self.hooks = []

    def silence(self) -> None:
        """Take the observers out, for a recompute."""
        for registry, key in self.observers:
            registry.pop(key, None)

    def states(self) -> list[dict[str, Any]]:
        """The present contents of the region's modules, their registries of hooks left out."""
        state = self.state()
        assert state is not None  # it lives as long as its region's forward
        return [
            {
                name: value
                for name, value in holder.items()
                if name not in _REGISTRIES and not isinstance(value, _Watched)
            }
            for holder in (
                *state.owners[: self.own[0]],
                *(slots for slots, _ in state.slotted[: self.own[1]]),
            )
        ]

    def versions(self) -> list[int]:
        state = self.state()
        assert state is not None
        tensors = [tensor for _, _, tensor, _ in state.places]
        return versions_of(tensors + [place.tensor for place in state.compared])


class _Watched:
    """One forward hook, watched while it is called."""

    __slots__ = ("__wrapped__", "called", "hook", "observes", "watch")

    def __init__(self, hook: Callable[..., Any], watch: _Watch) -> None:
        self.__wrapped__ = hook  # for a survey of an inner region
        self.hook, self.watch = hook, watch
        self.called, self.observes = False, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if not self.observes:
            return self.hook(*args, **kwargs)
        before = self._world(args, kwargs)
        with keep_aside() as aside:
            result = self.hook(*args, **kwargs)
            self.observes = result is None and self._unchanged(before, args, kwargs)
            if self.observes:
                # It will not be called again: what autograd saved for it must stay.
                aside.keep()
        return result

    def _world(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        given = capture((args[1:], kwargs), take_tensors=True)
        return (
            capture(self.watch.states()),
            self.watch.versions(),
            given,
            [t._version for t in given.tensors if not t.is_inference()],
            self._generators(),
            dict(contextvars.copy_context()),
        )

    def _unchanged(self, before: tuple[Any, ...], args: Any, kwargs: Any) -> bool:
        states, versions, given, given_versions, generators, context = before
        now = dict(contextvars.copy_context())
        return (
            versions == self.watch.versions()
            and given_versions == [t._version for t in given.tensors if not t.is_inference()]
            and given.same((args[1:], kwargs))
            and generators == self._generators()
            and states.same(self.watch.states())
            and now.keys() == context.keys()
            and all(value is context[variable] for variable, value in now.items())
        )

    def _generators(self) -> list[Any]:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return [rng_state(rng) for rng in self.watch.rngs]
