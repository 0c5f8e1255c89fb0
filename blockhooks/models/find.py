"""Find the repeated blocks of a model: by structure, or by what the user names.

Structure tells where blocks are repeated, seldom at which level: a vision model is a list of stages, each a list of
blocks, each a list of convolutions. `find_stacks` weighs the levels by what activation checkpointing would keep: one
input per block, everything outside of blocks, and, during the recompute, the inside of the largest block. The unit is
a leaf module. The level with the least wins, so that a list of experts is never taken for a list of blocks.
"""

from __future__ import annotations

import copy
import difflib
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from blockhooks.errors import AttachError

__all__ = [
    "Blocks",
    "Stack",
    "check_model",
    "count_calls",
    "find_stacks",
    "inner_stacks",
    "rngs_kept",
    "select_stacks",
]

Blocks = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
"""What names blocks: a module path, a pattern of one, a class or its name, a module, or a predicate."""

Member = tuple[str, nn.Module]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_DEEPER = 1.5
"""How much less a deeper level must keep before it is preferred to blocks that have a class of their own."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Repeated blocks of a model, in the order in which the model holds them.

    Attributes:
        members: The path in the model and the module of each block. A module that a list holds twice is here twice.
    """

    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The path that all blocks have in common; empty where the model itself is the container."""
        split = [path.split(".")[:-1] for path, _ in self.members]
        common = []
        for parts in zip(*split, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join(common)

    @property
    def kind(self) -> str:
        """The classes of the blocks, most frequent first, as in ``"Bottleneck"`` or ``"Mamba, Attention"``."""
        counts = Counter(type(module).__name__ for _, module in self.members)
        return ", ".join(name for name, _ in counts.most_common())


def find_stacks(model: nn.Module, calls: Mapping[str, int] | None = None) -> list[Stack]:
    """Find the stacks of repeated blocks of a model by its structure.

    Args:
        model: Any module.
        calls: How often each module was called in one real forward, by path, from `count_calls`. With it, modules that
            are called several times are blocks too, and what was never called is none.

    Returns:
        Disjoint stacks in the order of `model.named_modules()`.

    Raises:
        AttachError: If nothing is repeated; the message lists the containers that were looked at.
    """
    finder = _Finder(calls)
    for rule in (finder.listed, finder.alike, finder.leaves):
        stacks = _disjoint(finder.search("", model, rule))
        if stacks:
            return stacks
    raise AttachError(
        f"no repeated blocks were found in {type(model).__name__}; expected a list or numbered attributes of at "
        f"least two modules of one class that hold parameters. {_containers(model)} "
        "If one module is applied several times, show it: attach(model, hooks=..., example=inputs). "
        "Name them: attach(model, hooks=..., blocks=[...]) takes module paths, patterns such as 'encoder.*', "
        "classes, or a predicate (name, module) -> bool."
    )


def count_calls(model: nn.Module, example: Any) -> Counter[str]:
    """Count the calls of each module in one real forward, by path; a copy of the model runs, without gradients.

    Args:
        model: Any module that can be copied.
        example: What it is called with: a tuple or list of arguments, a dict of keywords, or one argument.
    """
    copied = copy.deepcopy(model)
    args, kwargs = (), {}
    if isinstance(example, Mapping):
        kwargs = dict(example)
    else:
        args = tuple(example) if isinstance(example, tuple | list) else (example,)
    paths = {id(module): path for path, module in copied.named_modules()}
    calls: Counter[str] = Counter()

    def note(module: nn.Module, _: Any) -> None:
        if id(module) in paths:
            calls[paths[id(module)]] += 1

    watching = register_module_forward_pre_hook(note)
    try:
        with torch.no_grad(), rngs_kept():
            copied(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    finally:
        watching.remove()
    return calls


def check_model(model: object, whose: str) -> None:
    """Check the model that somebody gave as an argument; `whose` names the function.

    Raises:
        AttachError: If it is no module.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"{whose}(model, ...) expected an nn.Module, found {model!r}; run a list of blocks or functions with "
            "apply_blocks."
        )


@contextmanager
def rngs_kept() -> Iterator[None]:
    """Put back the global random generators: torch's, Python's and NumPy's."""
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(range(accelerators)):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(state)


def inner_stacks(stacks: Iterable[Stack]) -> list[Stack]:
    """Find the stacks inside blocks, for a model that never calls a block as a whole but only what is in it."""
    finder = _Finder()
    found: list[Stack] = []
    for path, module in [member for stack in stacks for member in stack.members]:
        deeper = finder.search(path, module, finder.listed)
        found += deeper + inner_stacks(deeper)
    return _disjoint(found)


def select_stacks(model: nn.Module, blocks: Blocks | Iterable[Blocks]) -> list[Stack]:
    """Take the blocks that the user names, as one stack per container.

    Args:
        model: Any module.
        blocks: One or several of: a module path (a container stands for its members), a pattern in which ``*`` is one
            part of a path and ``**`` any number, a class or the name of one, a module, a predicate
            ``(path, module) -> bool``.

    Raises:
        AttachError: If one of them matches nothing; the message lists near misses.
        TypeError: If one is none of these.
    """
    several = not isinstance(blocks, str | type | nn.Module) and isinstance(blocks, Iterable)
    wanted: Sequence[Blocks] = list(blocks) if several else [blocks]  # type: ignore[arg-type, list-item]
    if not wanted:
        raise AttachError(
            "blocks is empty; name at least one block, or leave it out to have them found."
        )
    everything = list(model.named_modules(remove_duplicate=False))
    chosen: dict[str, nn.Module] = {}
    for one in wanted:
        matches = _matches(model, one, everything)
        if not matches:
            raise AttachError(_no_match(model, one, everything))
        chosen.update(matches)
    inside = [path for path, _ in everything if path in chosen]
    stacks: dict[str, list[Member]] = {}
    for path in inside:
        stacks.setdefault(_container(path, dict(everything)), []).append((path, chosen[path]))
    return _disjoint([Stack(tuple(members)) for members in stacks.values()])


def runs(module: nn.Module) -> bool:
    """Tell whether a module can be called, unlike a ModuleList, and in a way that can be followed."""
    return callable_forward(module) and not isinstance(module, torch.jit.ScriptModule)


def callable_forward(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


class _Finder:
    """Searches one model; remembers what it has counted."""

    def __init__(self, calls: Mapping[str, int] | None = None) -> None:
        self.calls = calls
        self.counted: dict[int, int] = {}

    def search(
        self, path: str, module: nn.Module, rule: Callable[..., list[list[Member]]]
    ) -> list[Stack]:
        """Find the stacks inside a module, not counting the module itself as a block."""
        children = list(_children(path, module))
        stacks: list[Stack] = []
        covered: set[str] = set()
        for group in self.called(rule(path, module), path, module):
            covered.update(member for member, _ in group)
            stacks += self.level(Stack(tuple(group)), rule)
        for name, child in children:
            if not any(name == one or one.startswith(name + ".") for one in covered):
                stacks += self.search(name, child, rule)
        return stacks

    def level(self, stack: Stack, rule: Callable[..., list[list[Member]]]) -> list[Stack]:
        """Decide whether these are the blocks, or packages of the blocks."""
        inner = {path: self.search(path, module, rule) for path, module in stack.members}
        found = [deeper for stacks in inner.values() for deeper in stacks]
        if not any(_repeated(deeper) for deeper in found):
            return [stack]
        blocks = [member for deeper in found for member in deeper.members]
        blocks += [member for member in stack.members if not inner[member[0]]]
        size = {path: self.size(module) for path, module in stack.members}
        kept_outside = sum(size[path] for path in inner) - sum(
            self.size(module) for _, module in blocks
        )
        deeper_cost = (
            len(blocks) + max(kept_outside, 0) + max(self.size(module) for _, module in blocks)
        )
        cost = len(stack.members) + max(size.values())
        packages = all(type(module) is nn.Sequential for _, module in stack.members)
        if deeper_cost * (1.0 if packages else _DEEPER) > cost:
            return [stack]
        rest = tuple(member for member in stack.members if not inner[member[0]])
        return ([Stack(rest)] if rest else []) + found

    def called(
        self, groups: list[list[Member]], path: str, module: nn.Module
    ) -> list[list[Member]]:
        """Leave out what was never called, and add what was called several times."""
        if self.calls is None:
            return groups
        groups = [[member for member in group if self.calls.get(member[0])] for group in groups]
        grouped = {member[0] for group in groups for member in group}
        for child in _children(path, module):
            if self.calls.get(child[0], 0) > 1 and child[0] not in grouped and self.suits(child[1]):
                groups.append([child])
        return [group for group in groups if group]

    def listed(self, path: str, module: nn.Module) -> list[list[Member]]:
        """Group what a list holds, and attributes of one class whose names differ only in a number."""
        children = list(_children(path, module))
        if isinstance(module, nn.ModuleList):
            flat = [member for child in children for member in self.flattened(*child)]
            return [flat] if len(flat) >= 2 or (len(children) == 1 and flat) else []
        members = [child for child in children if self.suits(child[1])]
        if isinstance(module, _LISTS) and len(children) == 1 and members:
            return [members]
        if isinstance(module, _LISTS):
            times = Counter(type(child) for _, child in members)
            group = [member for member in members if times[type(member[1])] >= 2]
            return [group] if group else []
        return _alike(members, lambda name: re.sub(r"\d+[a-z]?(?=$|_)", "#", name), numbered=True)

    def alike(self, path: str, module: nn.Module) -> list[list[Member]]:
        """Group attributes of one class, whatever their names."""
        members = [child for child in _children(path, module) if self.suits(child[1])]
        return _alike(members, lambda name: "", numbered=False)

    def leaves(self, path: str, module: nn.Module) -> list[list[Member]]:
        """Group modules without children that do more than one operation: recurrent ones and the user's own."""
        members = [child for child in _children(path, module) if _rich_leaf(child[1])]
        return _alike(members, lambda name: "", numbered=False)

    def flattened(self, path: str, module: nn.Module) -> Iterator[Member]:
        """List the blocks in a member of a list; a member that is itself a list stands for its members."""
        if runs(module):
            if self.suits(module):
                yield path, module
        elif not isinstance(module, torch.jit.ScriptModule):
            for child in _children(path, module):
                yield from self.flattened(*child)

    def suits(self, module: nn.Module) -> bool:
        """Tell whether a module can be a block: it runs, holds parameters, and is made of others."""
        return (
            runs(module)
            and any(True for _ in _children("", module))
            and any(True for _ in module.parameters())
            and not (self.size(module) == 1 and "norm" in type(module).__name__.lower())
        )

    def size(self, module: nn.Module) -> int:
        """Count the leaf modules in a module, the measure of what its forward saves."""
        key = id(module)
        if key not in self.counted:
            children = {child for _, child in _children("", module)}
            self.counted[key] = (
                sum(self.size(c) for c in children if type(c) is not nn.Identity) or 1
            )
        return self.counted[key]


def _children(path: str, module: nn.Module) -> Iterator[Member]:
    """List the children with their paths; one that is held twice comes twice, unlike in `named_children`."""
    for name, child in module._modules.items():
        if (
            child is not None and name != "parametrizations"
        ):  # of a weight: no block, and not called as one
            yield (f"{path}.{name}" if path else name), child


def _alike(
    members: list[Member], key: Callable[[str], str], *, numbered: bool
) -> list[list[Member]]:
    groups: dict[tuple[str, type], list[Member]] = {}
    for path, module in members:
        name = key(path.rpartition(".")[2])
        if not numbered or "#" in name:
            groups.setdefault((name, type(module)), []).append((path, module))
    return [group for group in groups.values() if len(group) >= 2]


def _rich_leaf(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.RNNBase)
    return own and runs(module) and bool(module._parameters) and not module._modules


def _repeated(stack: Stack) -> bool:
    return max(Counter(type(module) for _, module in stack.members).values()) >= 2


def _disjoint(stacks: list[Stack]) -> list[Stack]:
    """Leave each module to the first stack that holds it."""
    taken: set[int] = set()
    result = []
    for stack in stacks:
        members = tuple(member for member in stack.members if id(member[1]) not in taken)
        taken.update(id(module) for _, module in members)
        if members:
            result.append(Stack(members))
    return result


def _matches(model: nn.Module, wanted: Blocks, everything: list[Member]) -> dict[str, nn.Module]:
    match wanted:
        case str():
            found = {path: module for path, module in everything if _path_matches(path, wanted)}
            if not found:
                return {path: m for path, m in everything if path and type(m).__name__ == wanted}
            return _opened(found)
        case type():
            return {path: m for path, m in everything if path and isinstance(m, wanted)}
        case nn.Module():
            return _opened({path: m for path, m in everything if path and m is wanted})
        case _ if callable(wanted):
            return {path: m for path, m in everything if path and runs(m) and wanted(path, m)}
    raise AttachError(
        "blocks expected module paths, patterns, classes, modules or predicates called with a path and a module; found "
        f"{wanted!r}."
    )


def _opened(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Let a container stand for its members."""
    opened: dict[str, nn.Module] = {}
    for path, module in found.items():
        alone_sequential = isinstance(module, nn.Sequential) and len(found) == 1
        if runs(module) and not alone_sequential:
            opened[path] = module
        else:
            opened.update(_opened_list(path, module))
    return opened


def _opened_list(path: str, module: nn.Module) -> dict[str, nn.Module]:
    members: dict[str, nn.Module] = {}
    for name, child in _children(path, module):
        members.update({name: child} if runs(child) else _opened_list(name, child))
    return members


def _path_matches(path: str, pattern: str) -> bool:
    """Match a path part by part; ``*`` within one part, ``**`` for any number of parts."""
    parts, wanted = path.split("."), pattern.split(".")
    return bool(path) and _parts_match(parts, wanted)


def _parts_match(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_parts_match(parts[start:], wanted[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _parts_match(parts[1:], wanted[1:])


def _container(path: str, modules: dict[str, nn.Module]) -> str:
    """Name the container of a block: the outermost of the lists around it that do not run themselves."""
    parent = path.rpartition(".")[0]
    while parent and not runs(modules[parent]):
        above = parent.rpartition(".")[0]
        if not isinstance(modules[above], nn.ModuleList):
            break
        parent = above
    return parent


def _no_match(model: nn.Module, wanted: Blocks, everything: list[Member]) -> str:
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", repr(wanted))
    known = [path for path, _ in everything if path] + sorted(
        {type(m).__name__ for _, m in everything}
    )
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f" Near misses: {', '.join(near)}." if near else ""
    return (
        f"blocks={name!r} matches no module of {type(model).__name__}.{hint} {_containers(model)}"
    )


def _containers(model: nn.Module) -> str:
    """Describe what a model holds in lists, for the message of an error."""
    found: Counter[str] = Counter()
    for path, module in model.named_modules():
        if isinstance(module, _LISTS) and len(module):
            counts = Counter(type(child).__name__ for child in module.children())
            held = ", ".join(f"{n} x {name}" for name, n in counts.most_common(4))
            where = re.sub(r"\d+", "*", path) or "(the model)"
            found[f"{where}: {type(module).__name__} of {held}"] += 1
    lines = [line if n == 1 else f"{n} times {line}" for line, n in found.items()]
    if not lines:
        held = ", ".join(
            f"{name}: {type(child).__name__}" for name, child in model.named_children()
        )
        return f"It has no containers; its children: {held or 'none'}."
    more = f"; and {len(lines) - 12} more" if len(lines) > 12 else ""
    return f"Containers found: {'; '.join(lines[:12])}{more}."
