"""`StateSnapshot`: the recompute sees the state that the forward saw, and leaves no trace."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
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
    MODULE_INTERNALS,
    Captured,
    Capturing,
    Slots,
    Survey,
    atomic,
    capture,
    contents_of,
    rng_state,
)

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

    After the recompute everything is put back as it was found, the user's own objects in their places. A list or counter
    in a plain function's closure is the user's own and is left alone.

    A block that holds an iterator or initialises a lazy module keeps what autograd saved, since it cannot be executed
    again. A change through ``.data`` or NumPy counts no version: it is seen where it happens in one of the forwards that
    are compared, as it is by a module that makes it in its first.

    Side: crosses the boundary. See R2, R6 and R7.
    """

    @hookimpl
    def recompute_context(self, run: Run, segment: Segment) -> _State:
        """Capture the state of the segment's modules and of the side inputs."""
        return _State(run, run.survey(segment))


_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks")
_REGISTRIES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


_GLOBAL_HOOKS: tuple[Any, ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)


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


class _Place:
    """A tensor which the forward may change in place: in a registry or attribute of a module, or deeper inside of one.

    `holder` is the dict that it is in, or None where it is found inside of an attribute's value.
    """

    __slots__ = ("before", "holder", "learned", "name", "sums", "tensor", "version")

    def __init__(
        self,
        holder: _Holder | None,
        name: str,
        tensor: Tensor,
        learned: _Learned,
        compare: bool,
    ) -> None:
        self.holder, self.name, self.tensor, self.learned = holder, name, tensor, learned
        self.version = tensor._version if not tensor.is_inference() else None
        self.before: Tensor | None = None
        self.sums: list[int] | None = None
        known = name in learned.changing
        if known or (compare and not _wraps(tensor)):
            if known or not isinstance(tensor, nn.Parameter):
                self.before = _clone(tensor)
            else:  # large, and hardly ever changed: a copy of each would be most of what a region holds
                self.sums = _sums(tensor)

    def changed(self) -> bool:
        """Whether the forward has changed the tensor in place."""
        if self.version is not None and self.tensor._version != self.version:
            return True
        # Through .data and NumPy no version is counted.
        if self.sums is not None:
            return self.sums != _sums(self.tensor)
        if self.before is None or _wraps(self.tensor):
            return False
        return not _equal(self.before, self.tensor)

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
        data = torch.view_as_real(data) if data.is_complex() else data
        bits = data.contiguous().view(_INTEGERS[data.element_size()])
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
        "changed",
        "contents",
        "empty",
        "flags",
        "grads",
        "originals",
        "places",
        "run",
        "side",
        "side_versions",
        "stays",
        "structure",
        "watched",
    )

    def __init__(self, run: Run, found: Survey) -> None:
        self.run = run
        self.contents: list[tuple[_Holder, dict[str, Any]]] = []
        self.empty: list[dict[str, Any]] = []
        self.attributes: list[tuple[_Holder, str]] = []
        self.places: list[_Place] = []
        self.flags: list[tuple[Tensor, bool]] = []
        self.accumulates = self.changed = False
        self.stays: str | None = None
        capturing = Capturing()
        for registry in _GLOBAL_HOOKS:
            self._registry(registry)
        for module in found.modules:
            self._module(module, capturing)
        for owner in found.objects:
            self._object(owner, capturing)
        own = len(self.contents)
        for owner in found.hooks:
            self._object(owner, capturing)
        self.grads = [_grad(tensor) for tensor, _ in self.flags]
        self.structure: Captured | None = capturing.captured() if self.attributes else None
        self.originals: list[int] = []
        if self.structure is not None:
            self.originals = list(map(id, self.structure.tensors))
            self.structure.tensors = list(map(_without_graph, self.structure.tensors))
        if capturing.iterators:
            self.stays = "it holds an iterator, which can be read only once"
        self.side: Captured | None = None
        self.side_versions: list[int] = []
        if run.args or run.kwargs:
            self._side_inputs()
        self.watched = _Watch(found, self, own) if _any_hooks(found.modules) else None

    # ---- capture -----------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, capturing: Capturing) -> None:
        attributes = module.__dict__
        learned = _learned_of(module)
        lazy = isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
        if lazy:
            self.stays = "it initialises a lazy module"
        elif isinstance(module, _NormBase) and module.training:
            # Its statistics change without a new version, whenever the momentum is not 0.
            learned.changing.update(("running_mean", "running_var"))
        compare = not lazy and learned.due(module.training)
        for name in _REGISTRIES:
            registry = attributes[name]
            if not registry:
                self.empty.append(registry)
            # Sharded parameters (FSDP) are swapped for whole ones, at times that the recompute has no say in.
            elif name != "_parameters" or not any(map(_wraps, registry.values())):
                self.contents.append((registry, registry.copy()))
        for name, parameter in module._parameters.items():
            if parameter is not None and not (lazy and is_lazy(parameter)):
                self.flags.append((parameter, parameter.requires_grad))
                self._place(module._parameters, name, parameter, learned, compare)
        for name, buffer in module._buffers.items():
            if buffer is not None and not (lazy and is_lazy(buffer)):
                self._place(module._buffers, name, buffer, learned, compare)
        self._owner(attributes, capturing, learned, compare)

    def _registry(self, registry: dict[Any, Any]) -> None:
        if registry:
            self.contents.append((registry, registry.copy()))
        else:
            self.empty.append(registry)

    def _object(self, owner: Any, capturing: Capturing) -> None:
        learned = _learned_of(owner)
        compare = learned.due(True)
        attributes = getattr(owner, "__dict__", None)
        if attributes is not None:
            self._owner(attributes, capturing, learned, compare)
        slots = Slots(owner)
        if len(slots):
            self._owner(slots, capturing, learned, compare)

    def _owner(
        self, attributes: _Holder, capturing: Capturing, learned: _Learned, compare: bool
    ) -> None:
        contents = dict(attributes)
        self.contents.append((attributes, contents))
        for name, value in contents.items():
            if name in MODULE_INTERNALS or atomic(value):
                continue
            if isinstance(value, Tensor):
                self._place(attributes, name, value, learned, compare)
                contents[name] = _without_graph(value)
            elif not isinstance(value, (nn.Module, random.Random)):
                self.attributes.append((attributes, name))
                for tensor in capturing.add(value):
                    self._place(None, name, tensor, learned, compare)

    def _place(
        self, holder: _Holder | None, name: str, tensor: Tensor, learned: _Learned, compare: bool
    ) -> None:
        self.places.append(_Place(holder, name, tensor, learned, compare))

    def _side_inputs(self) -> None:
        side = capture(self.run.side(), take_tensors=True, refuse=self._refuse_iterator)
        if side.tensors or not side.constant:
            self.side = side
            self.side_versions = [0 if t.is_inference() else t._version for t in side.tensors]
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
        changing = []
        for place in self.places:
            if place.changed():
                place.learned.changing.add(place.name)
                if place.before is None:
                    reason = f"it has changed {place.name!r} in place for the first time"
                changing.append(place)
        self.places = changing
        if self.side is not None and any(
            not tensor.is_inference() and tensor._version != version
            for tensor, version in zip(self.side.tensors, self.side_versions, strict=True)
        ):
            reason = "it changes a tensor of its side inputs in place"
        self.accumulates = any(
            before is not now or version != now_version
            for (before, version), (now, now_version) in zip(
                self.grads, [_grad(tensor) for tensor, _ in self.flags], strict=True
            )
        )
        self.grads = []
        self.changed = self.structure is not None and not self._same_attributes()
        return reason

    def _same_attributes(self) -> bool:
        assert self.structure is not None
        return self.structure.same([owner.get(name) for owner, name in self.attributes])

    # ---- around a recompute ------------------------------------------------------------------------------------

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._restored()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        # What is as the forward found it needs no copy: in most regions, everything.
        now = [
            (holder, contents if _holds(holder, contents) else dict(holder))
            for holder, contents in self.contents
        ]
        now += [(registry, dict(registry)) for registry in self.empty if registry]
        flags = [(tensor, tensor.requires_grad) for tensor, _ in self.flags]
        side = None if self.side is None else self.side.rebuild(self.side.tensors)
        # An early stop may leave the user's own containers half-way, also where the forward leaves them as they were.
        held = [holder[name] for holder, name in self.attributes if name in holder]
        own = contents_of([held, side]) if held or side is not None else None
        # A backward inside of the region has its effect once.
        grads = [(tensor, tensor.grad) for tensor, _ in self.flags] if self.accumulates else []
        try:
            self._set(now)
            for tensor, _ in grads:
                tensor.grad = None
            with contextlib.nullcontext() if side is None else self.run.side_inputs(*side):
                yield
        finally:
            if own is not None:
                own.put_back()
            for registry in self.empty:
                registry.clear()
            for holder, contents in now:
                _fill(holder, contents)
            _set_flags(flags)
            for tensor, grad in grads:
                tensor.grad = grad

    def _set(self, now: list[tuple[_Holder, dict[str, Any]]]) -> None:
        fresh: dict[int, Tensor] = {}  # one tensor may have several places
        for place in self.places:
            if id(place.tensor) not in fresh:
                fresh[id(place.tensor)] = place.fresh()
        copies = None
        if self.structure is not None and (self.changed or fresh or not self._same_attributes()):
            copies = self.structure.rebuild(
                [
                    fresh.get(original, tensor)
                    for original, tensor in zip(self.originals, self.structure.tensors, strict=True)
                ]
            )
        for registry in self.empty:
            registry.clear()
        for (holder, contents), (_, present) in zip(self.contents, now, strict=False):
            if present is not contents:
                _fill(holder, contents)
        if copies is not None:
            for (holder, name), copy in zip(self.attributes, copies, strict=True):
                holder[name] = copy
        for place in self.places:
            if place.holder is not None:
                place.holder[place.name] = fresh[id(place.tensor)]
        if self.watched is not None:
            self.watched.silence()
        _set_flags(self.flags)


def _grad(tensor: Tensor) -> tuple[Tensor | None, int]:
    """A parameter's gradient, and how often it was changed in place."""
    grad = tensor.grad
    return grad, 0 if grad is None else grad._version


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


def _set_flags(flags: list[tuple[Tensor, bool]]) -> None:
    for tensor, flag in flags:
        if tensor.requires_grad is not flag and tensor.is_leaf:
            tensor.requires_grad_(flag)


# ---- forward hooks of modules ----------------------------------------------------------------------------------------


def _any_hooks(modules: list[nn.Module]) -> bool:
    return any(_GLOBAL_HOOKS) or any(m._forward_hooks or m._forward_pre_hooks for m in modules)


class _Watch:
    """Watches the forward hooks of a region's modules in the forward, to know which of them only observe.

    While the region runs, each hook stands in its registry inside of a `_Watched`; nothing is left behind.
    """

    __slots__ = ("hooks", "observers", "own", "rngs", "state")

    def __init__(self, found: Survey, state: _State, own: int) -> None:
        # A hook may have a state of its own, which is no state of the modules: `own` ends theirs in `state.contents`.
        self.state, self.own = weakref.ref(state), own
        self.rngs = (torch.default_generator, random, sys.modules.get("numpy.random"), *found.rngs)
        self.hooks: list[tuple[OrderedDict[int, Any], int, Any, _Watched]] = []
        self.observers: list[tuple[OrderedDict[int, Any], int]] = []
        for registry in (
            *(module.__dict__[name] for module in found.modules for name in _HOOK_DICTS),
            *_GLOBAL_HOOKS,
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
            for holder, _ in state.contents[: self.own]
        ]

    def versions(self) -> list[int]:
        state = self.state()
        assert state is not None
        return [0 if p.tensor.is_inference() else p.tensor._version for p in state.places]


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
