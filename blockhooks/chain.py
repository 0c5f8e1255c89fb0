"""The hook chain: a checked, ordered set of plugins, bound once into plain functions.

pluggy finds the hook implementations of a plugin, checks them against the hookspecs, and gives ``tryfirst``,
``trylast``, wrappers and first results their meaning. What it found is remembered by class, since its scan takes
milliseconds; and the calls are bound into closures, since its call loop costs more and keeps an exception's frames
alive (R8). The meaning is pluggy's in every respect.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pluggy

from blockhooks import hookspecs
from blockhooks.errors import BlockhooksWarning, HookError
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.hooks.state import StateSnapshot
from blockhooks.hooks.versions import VersionGuard
from blockhooks.plan import Segment, check_plan
from blockhooks.recompute import EarlyStop
from blockhooks.run import Hidden, HookRelay, Region, Run

__all__ = ["DEFAULT_HOOKS", "HookChain", "Hooks"]

DEFAULT_HOOKS: tuple[type, ...] = (VersionGuard, StateSnapshot, RNGSnapshot)
"""What is in every chain unless removed by name: what crosses the boundary so that `Checkpoint` alone is right."""

HOOKS = ("plan_segments", "run_blocks", "run_segment", "recompute_context", "run_block")


class _Found(NamedTuple):
    """One hook implementation of a plugin class, as pluggy found it."""

    hook: str
    attribute: str
    arguments: tuple[str, ...]
    wrapper: bool
    tryfirst: bool
    trylast: bool


class _Impl(NamedTuple):
    """One hook implementation of a plugin, bound: called with the values of its hookspec's arguments."""

    call: Callable[..., Any]
    wrapper: bool
    plugin: str


_found_by_class: weakref.WeakKeyDictionary[type, tuple[_Found, ...]] = weakref.WeakKeyDictionary()


def _scan(plugin: object, name: str) -> tuple[_Found, ...]:
    """Let pluggy find and check the implementations of a plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise HookError(_explain(plugin, name, str(error))) from None
    found = []
    for caller in manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            attribute = _attribute(plugin, impl.function)
            if impl.hookwrapper:
                raise HookError(
                    f"{name} uses hookwrapper=True; write @hookimpl(wrapper=True), whose yield receives the value itself."
                )
            if inspect.isgeneratorfunction(impl.function) and not impl.wrapper:
                raise HookError(
                    f"{caller.name} of {name} has a yield, but is no wrapper; write @hookimpl(wrapper=True)."
                )
            found.append(
                _Found(
                    caller.name, attribute, impl.argnames, impl.wrapper, impl.tryfirst, impl.trylast
                )
            )
    return tuple(found)


def _attribute(plugin: object, function: Any) -> str:
    for attribute in dir(plugin):
        if not attribute.startswith("__") and getattr(plugin, attribute, None) == function:
            return attribute
    return str(function.__name__)


def _explain(plugin: object, name: str, message: str) -> str:
    """Say in our words what pluggy found wrong."""
    for attribute in dir(plugin):
        options = getattr(getattr(plugin, attribute, None), f"{hookspecs.PROJECT}_impl", None)
        if not isinstance(options, dict):
            continue
        hook = options.get("specname") or attribute
        if hook not in HOOKS:
            return f"{name} implements {hook!r}, which is no hook of blockhooks;{_suggest(hook, HOOKS)}"
        known = tuple(inspect.signature(getattr(hookspecs, hook)).parameters)
        function = inspect.unwrap(getattr(plugin, attribute))
        if options.get("wrapper") and not inspect.isgeneratorfunction(function):
            return (
                f"{hook} of {name} is a wrapper, but has no yield; write `return (yield)` where what is inside runs, or "
                "leave wrapper=True out to take its place."
            )
        for argument in inspect.signature(function).parameters:
            if argument not in known:
                return (
                    f"{hook} of {name} takes the argument {argument!r}, which the hook does not have;"
                    f"{_suggest(argument, known)} It has: {', '.join(known)}."
                )
    return f"{name} is no plugin of blockhooks: {' '.join(message.split())}"


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" did you mean {close[0]!r}?" if close else f" known are {', '.join(known)}."


def _implementations(plugin: object, name: str) -> tuple[_Found, ...]:
    if isinstance(plugin, type):
        raise HookError(
            f"{name} is the class {plugin.__name__}, not an instance; write {plugin.__name__}()."
        )
    own = getattr(plugin, "__dict__", {})
    by_class = not isinstance(plugin, types.ModuleType) and not any(
        hasattr(value, f"{hookspecs.PROJECT}_impl") for value in own.values() if callable(value)
    )
    found = _found_by_class.get(type(plugin)) if by_class else None
    if found is None:
        found = _scan(plugin, name)
        if not found:
            raise HookError(
                f"{name} implements no hook of blockhooks. Expected an object with methods marked @hookimpl, named as "
                f"one of {', '.join(HOOKS)}; found {plugin!r}."
            )
        if by_class:
            _found_by_class[type(plugin)] = found
    return found


_ARGUMENTS = {hook: tuple(inspect.signature(getattr(hookspecs, hook)).parameters) for hook in HOOKS}


def _bind(
    function: Callable[..., Any], hook: str, arguments: tuple[str, ...]
) -> Callable[..., Any]:
    """Make a function of all of a hook's arguments out of one that wants some of them."""
    every = _ARGUMENTS[hook]
    if arguments == every:
        return function
    places = [every.index(argument) for argument in arguments]
    if not places:
        return lambda *values: function()
    if len(places) == 1:
        place = places[0]
        return lambda *values: function(values[place])
    pick = operator.itemgetter(*places)
    return lambda *values: function(*pick(values))


def _first_result(impls: Sequence[_Impl], default: Callable[..., Any]) -> Callable[..., Any]:
    """Call implementations until one has a result, else the default."""
    if not impls:
        return default
    calls = [impl.call for impl in impls]

    def first(*values: Any) -> Any:
        for call in calls:
            result = call(*values)
            if result is not None:
                return result
        return default(*values)

    return first


def _wrapped(impl: _Impl, inner: Callable[..., Any], hook: str) -> Callable[..., Any]:
    """Put one wrapper around a call, with the meaning of pluggy's new-style wrappers."""

    def wrapped(*values: Any) -> Any:
        generator = impl.call(*values)
        try:
            next(generator)
        except StopIteration:
            raise HookError(f"{hook} of {impl.plugin} is a wrapper that did not yield.") from None
        try:
            result = inner(*values)
        except BaseException as error:
            return _thrown(generator, error, impl, hook)
        try:
            generator.send(result)
        except StopIteration as stop:
            if stop.value is None and result is not None:
                raise HookError(_returned_none(impl, hook, values)) from None
            return stop.value
        generator.close()
        raise HookError(f"{hook} of {impl.plugin} is a wrapper that yielded twice.")

    return wrapped


def _thrown(generator: Any, error: BaseException, impl: _Impl, hook: str) -> Any:
    """Pass an exception through a wrapper. An early stop goes on, whatever the wrapper makes of it (R5)."""
    try:
        generator.throw(error)
    except StopIteration as stop:
        if isinstance(error, EarlyStop):
            raise error from None
        return stop.value
    except RuntimeError as wrapped:
        if isinstance(error, StopIteration) and wrapped.__cause__ is error:
            raise error from error.__cause__
        raise
    finally:
        # R8: this frame is in the traceback of the exception, which it must not refer to.
        del error
    generator.close()
    raise HookError(f"{hook} of {impl.plugin} is a wrapper that yielded twice.")


def _returned_none(impl: _Impl, hook: str, values: tuple[Any, ...]) -> str:
    where, what = "", "what the yield gave"
    if hook == "run_block":
        where, what = f" for block {values[1]}", "x: what the yield gave, or something in its place"
    return f"{hook} of {impl.plugin} returned None{where}; return {what}."


def _default_segment(
    run: Run, segment: Segment, region: Region, x: Hidden, recomputing: bool
) -> Hidden:
    return region(x)


def _default_blocks(run: Run, x: Hidden) -> Hidden:
    return run.run_segments(run.segments, x, False)


def _single_blocks(run: Run) -> tuple[Segment, ...]:
    return tuple([Segment(index, index + 1) for index in range(len(run.blocks))])


def _one_stretch(run: Run) -> tuple[Segment, ...]:
    return (Segment(0, len(run.blocks), mode="keep"),) if run.blocks else ()


class _Relay:
    """The hooks of a chain as plain functions; see `HookRelay`."""

    __slots__ = ("contexts", "names", "plan", "run_block", "run_blocks", "run_segment")

    def __init__(self, impls: dict[str, list[_Impl]], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.run_block = _compiled("run_block", impls, Run.run_block)
        self.run_segment = _compiled("run_segment", impls, _default_segment)
        self.run_blocks = _compiled("run_blocks", impls, _default_blocks)
        # Where no plugin sees segments, there is no need for more than one.
        default_plan = _single_blocks if impls.get("run_segment") else _one_stretch
        planners = impls.get("plan_segments", [])
        self.plan = _compiled(
            "plan_segments",
            {"plan_segments": [_named(p) for p in planners]},
            lambda run: (default_plan(run), None),
        )
        self.contexts = impls.get("recompute_context", [])

    def plan_segments(self, run: Run) -> tuple[Segment, ...]:
        segments, planner = self.plan(run)
        if planner is not None:
            check_plan(segments, len(run.blocks), planner)
        return tuple(segments)

    def recompute_context(
        self, run: Run, segment: Segment, x: Hidden
    ) -> list[Callable[[], AbstractContextManager[Any]]]:
        factories = []
        for call, _, plugin in self.contexts:
            factory = call(run, segment, x)
            if factory is None:
                continue
            if not callable(factory):
                raise HookError(
                    f"recompute_context of {plugin} returned a {type(factory).__name__}; expected a factory: a callable "
                    "that gives a new context manager for each recompute, or None."
                )
            factories.append(factory)
        return factories

    def describe(self) -> str:
        return ", ".join(self.names)


def _named(impl: _Impl) -> _Impl:
    """Let a planner's result carry the planner's name, for the checks of the plan."""
    if impl.wrapper:
        return impl

    def call(run: Run) -> Any:
        result = impl.call(run)
        return None if result is None else (result, impl.plugin)

    return impl._replace(call=call)


def _compiled(
    hook: str, impls: dict[str, list[_Impl]], default: Callable[..., Any]
) -> Callable[..., Any]:
    """Bind the implementations of a first-result hook, outermost wrapper first, into one function."""
    mine = impls.get(hook, [])
    call = _first_result([impl for impl in mine if not impl.wrapper], default)
    for impl in reversed([impl for impl in mine if impl.wrapper]):
        call = _wrapped(impl, call, hook)
    return call


class HookChain:
    """A checked, ordered set of plugins.

    ``HookChain([a, b])`` means that `a` is outermost and called first. `VersionGuard`, `StateSnapshot` and
    `RNGSnapshot` are added at the inner end unless an instance of theirs is given or their name is in `without`.

    Args:
        plugins: A plugin or a sequence of plugins: objects with methods marked `@hookimpl`.
        without: Names of default plugins to leave out, such as ``("RNGSnapshot",)``.

    Attributes:
        plugins: The plugins, outermost first, the defaults included.
        hooks: The chain's hooks, bound into plain functions.

    Raises:
        HookError: If something is no plugin, implements an unknown hook, takes an unknown argument, or is in the chain
            twice.
    """

    __slots__ = ("_names", "hooks", "plugins")

    def __init__(self, plugins: object = (), *, without: Iterable[str] = ()) -> None:
        given = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        if isinstance(without, str):
            without = (without,)
        names = [f"hooks[{i}] ({type(plugin).__name__})" for i, plugin in enumerate(given)]
        for i, plugin in enumerate(given):
            for j in range(i):
                if given[j] is plugin:
                    raise HookError(
                        f"{names[i]} is the same plugin as hooks[{j}]; expected each plugin once. Remove one, or make "
                        "two instances."
                    )
            if isinstance(plugin, type):
                names[i] = f"hooks[{i}]"
        defaults = {factory.__name__: factory for factory in DEFAULT_HOOKS}
        if not isinstance(without, Iterable):
            raise HookError(
                f"without={without!r}: expected names of default plugins, such as ['RNGSnapshot']."
            )
        without = tuple(without)
        for name in without:
            if not isinstance(name, str) or name not in defaults:
                raise HookError(
                    f"without={name!r} names no default plugin;{_suggest(str(name), defaults)}"
                )
        for name, factory in defaults.items():
            if name not in without and not any(isinstance(plugin, factory) for plugin in given):
                given.append(factory())
                names.append(name)
        self.plugins: tuple[Any, ...] = tuple(given)
        self._names = tuple(names)
        self.hooks: HookRelay = _Relay(self._bind(), [type(p).__name__ for p in given])
        self._warn_shadowed()

    def _warn_shadowed(self) -> None:
        """Warn of a second `Checkpoint`, whose plan is never asked for."""
        found = zip(self.plugins, self._names, strict=True)
        first, *others = [name for plugin, name in found if isinstance(plugin, Checkpoint)] or [""]
        for name in others:
            warnings.warn(
                f"{name} is shadowed by {first}: the first plan wins, so its own is never used. Expected one of them in "
                "a chain; a plan can nest segments and give each block its own mode.",
                BlockhooksWarning,
                stacklevel=3,
            )

    def _bind(self) -> dict[str, list[_Impl]]:
        ranked: dict[str, list[tuple[int, _Impl]]] = {}
        for plugin, name in zip(self.plugins, self._names, strict=True):
            for found in _implementations(plugin, name):
                call = _bind(getattr(plugin, found.attribute), found.hook, found.arguments)
                rank = -1 if found.tryfirst else int(found.trylast)
                ranked.setdefault(found.hook, []).append((rank, _Impl(call, found.wrapper, name)))
        return {
            hook: [impl for _, impl in sorted(impls, key=lambda entry: entry[0])]
            for hook, impls in ranked.items()
        }

    @classmethod
    def from_entry_points(cls, plugins: object = (), *, without: Iterable[str] = ()) -> HookChain:
        """Make a chain of plugins followed by those that installed packages offer as entry points of ``blockhooks``.

        Never done implicitly: what is installed on a machine must not change a gradient.
        """
        from importlib.metadata import entry_points

        given = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        for entry in entry_points(group=hookspecs.PROJECT):
            plugin = entry.load()
            given.append(plugin() if isinstance(plugin, type) else plugin)
        return cls(given, without=without)

    def explain(self) -> str:
        """Tell the order of the plugins for each hook, outermost first, and what is shadowed."""
        lines = []
        impls = self._bind()
        for hook in HOOKS:
            mine = impls.get(hook, [])
            if not mine:
                continue
            first = hook != "recompute_context"
            lines.append(hook)
            wrappers = [impl for impl in mine if impl.wrapper]
            others = [impl for impl in mine if not impl.wrapper]
            lines += [f"  {impl.plugin}: wrapper" for impl in wrappers]
            for place, impl in enumerate(others):
                shadowed = first and hook == "plan_segments" and place > 0
                lines.append(
                    f"  {impl.plugin}"
                    + (f": shadowed unless {others[0].plugin} has no plan" if shadowed else "")
                )
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Callable[..., HookChain], tuple[Any, ...]]:
        """Copy and pickle by the plugins; the bound functions are made anew."""
        return _rebuilt, (self.plugins,)

    def __repr__(self) -> str:
        return f"HookChain([{', '.join(type(plugin).__name__ for plugin in self.plugins)}])"


def _rebuilt(plugins: tuple[Any, ...]) -> HookChain:
    present = {type(plugin).__name__ for plugin in plugins}
    absent = [default.__name__ for default in DEFAULT_HOOKS if default.__name__ not in present]
    return HookChain(plugins, without=absent)


Hooks = HookChain | Sequence[Any] | Any
