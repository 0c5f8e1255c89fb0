"""Drop saved tensors of cheap operations, and rebuild them from others that are kept anyway.

`Rebuilder.forward` is a pair of saved-tensor hooks. Each tensor that autograd saves tells by its ``grad_fn`` which
operation made it. If a recipe knows that operation (`blockhooks.recipes`), and what it needs has been saved itself or
can be rebuilt in turn, a `_Rebuilt` stands in the graph in its place; everything else is kept, or handed to the
saved-tensor hooks around, so that offloading and enclosing regions compose.

Bit for bit, because:

* A recipe is trusted for a dtype, shape and layout only after its result was compared with the forward's. A tensor that
  was ever changed in place is compared each time.
* Autograd checks no versions where a saved-tensor hook is, so they are checked here.
* Inside a region, whether a tensor is kept depends on nothing but the graph that was made inside, so that a recompute
  decides as the forward did.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from blockhooks.recipes import RECIPES, Recipe
from blockhooks.saved import HookPair, Kept, Value, hooks_around

__all__ = ["Rebuilder"]

DEPTH = 6  # recipes one upon the other, so that what a backward computes stays in proportion

_Result: TypeAlias = tuple[Node, int]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rebuilder:
    """Decides which saved tensors are dropped.

    Args:
        min_bytes: Tensors smaller than this are kept: dropping them would gain nothing.
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.trusted: dict[Any, bool] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has everything to learn."""
        return Rebuilder, (self.min_bytes,)

    @contextlib.contextmanager
    def forward(self, where: str) -> Iterator[None]:
        """Drop what can be rebuilt of what autograd saves within a ``with`` statement.

        Args:
            where: Names what runs, in errors.
        """
        forward = _Forward(self, where)
        with saved_tensors_hooks(forward.pack, _unpack):
            try:
                yield
            finally:
                forward.end()


class _Value(Value):
    """A tensor of the forward, as it stands in autograd's graph.

    Attributes:
        depth: How many recipes stand upon each other.
        key: What the bits of a result made of it depend on besides values: dtype, layout, and how it is made itself.
    """

    __slots__ = ()
    depth: int
    key: Any

    def peek(self) -> Tensor | None:
        """Return the tensor during the forward, if it is at hand and unchanged."""
        raise NotImplementedError


class _Kept(Kept, _Value):
    """A tensor that is kept."""

    __slots__ = ()
    depth = 0

    @property
    def key(self) -> Any:
        return _layout(self.tensor)

    def peek(self) -> Tensor | None:
        return self.tensor if self.unchanged else None


class _Handed(_Value):
    """A tensor that was handed to the saved-tensor hooks around; at hand itself until the forward ends."""

    __slots__ = ("_packed", "_unpack", "key", "tensor", "version")
    depth = 0

    def __init__(self, tensor: Tensor, pair: HookPair) -> None:
        super().__init__()
        pack, self._unpack = pair
        self._packed = pack(tensor)
        self.tensor: Tensor | None = tensor.detach()
        self.key, self.version = _layout(tensor), tensor._version

    def peek(self) -> Tensor | None:
        tensor = self.tensor
        return tensor if tensor is not None and tensor._version == self.version else None

    def get(self) -> Tensor:
        return self._unpack(self._packed)


class _Rebuilt(_Value):
    """A tensor that was dropped, and its recipe."""

    __slots__ = ("_constants", "_recipe", "_sources", "depth", "key")

    def __init__(
        self,
        recipe: Recipe,
        sources: list[_Value | None],
        depth: int,
        constants: dict[str, Any],
        key: Any,
    ) -> None:
        super().__init__()
        self.depth, self.key = depth, key
        self._recipe, self._sources, self._constants = recipe, sources, constants

    def peek(self) -> Tensor | None:
        tensors = _peek(self._sources)
        return None if tensors is None else _call(self._recipe.function, tensors, self._constants)

    def get(self) -> Tensor:
        tensors = [None if source is None else source.hold() for source in self._sources]
        result: Tensor = _call(self._recipe.function, tensors, self._constants)
        return result


class _Constant(_Value):
    """A number."""

    __slots__ = ("tensor",)
    depth, key = 0, "number"

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def get(self) -> Tensor:
        return self.tensor

    peek = hold = get


def _unpack(value: _Value) -> Tensor:
    return value.take()


def _layout(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _peek(sources: Sequence[_Value | None]) -> list[Tensor | None] | None:
    tensors = []
    for source in sources:
        tensor = None if source is None else source.peek()
        if tensor is None and source is not None:
            return None
        tensors.append(tensor)
    return tensors


def _call(
    function: Callable[..., Any], tensors: list[Tensor | None], constants: dict[str, Any]
) -> Any:
    """Compute as it was computed below autograd and autocast."""
    grad, autocast = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
    if not (grad or autocast):
        return function(*tensors, **constants)
    with contextlib.ExitStack() as stack:
        if grad:
            stack.enter_context(torch.no_grad())
        if autocast:
            for device in {tensor.device.type for tensor in tensors if tensor is not None}:
                stack.enter_context(torch.autocast(device, enabled=False))
        return function(*tensors, **constants)


def _same(tensor: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors have the same layout and bits; those of meta tensors are taken to be."""
    if tensor is None or _layout(tensor) != _layout(other):
        return False
    if other.is_meta:
        return True
    with torch.no_grad():
        a, b = tensor.detach(), other.detach()
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        bits = _BITS[a.element_size()]
        return torch.equal(a.view(bits), b.view(bits))


def _constant(node: Node, name: str, output_nr: int, result: Tensor | None) -> Any:
    if name == "output_nr":
        return output_nr
    if name in ("shape", "dtype"):
        return getattr(node._input_metadata[output_nr] if result is None else result, name)
    value = getattr(node, f"_saved_{name}")
    return [_signed(item) for item in value] if isinstance(value, (tuple, list)) else _signed(value)


def _signed(value: Any) -> Any:
    # Nodes tell a negative dimension as an unsigned number (torch 2.14).
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _frozen(constants: dict[str, Any]) -> Any:
    return tuple(tuple(v) if isinstance(v, list) else v for v in constants.values())


@cache
def _tensors(node: type, names: tuple[str, ...]) -> list[tuple[Any, bool]]:
    """For each tensor of a recipe, the descriptor of what nodes save of it, or None, and whether it may be missing."""
    return [
        (getattr(node, "_raw_saved_" + name.rstrip("?"), None), name.endswith("?"))
        for name in names
    ]


class _Forward:
    """The saved-tensor hooks of one forward.

    Nodes can't be referred to weakly, so they are held, by `values`, until the forward ends; never beyond it, since
    they would hold themselves.
    """

    def __init__(self, rebuilder: Rebuilder, where: str) -> None:
        self.min_bytes, self.trusted = rebuilder.min_bytes, rebuilder.trusted
        self.where = where
        self.outer = hooks_around()
        self.begin = torch._C._autograd._get_sequence_nr()
        self.values: dict[_Result, weakref.ref[_Value]] = {}
        self.handed: list[weakref.ref[_Handed]] = []
        self.storages: dict[int, weakref.ref[_Value]] = {}

    def end(self) -> None:
        for reference in self.handed:
            value = reference()
            if value is not None:
                value.tensor = None
        self.values.clear()
        self.storages.clear()

    def pack(self, tensor: Tensor) -> _Value:
        node = tensor.grad_fn
        if node is None and self.outer is None:
            return _Kept(tensor, self.where)
        value: _Value | None = None
        if node is not None and type(node).__name__ in RECIPES:
            value = self.rebuilt(tensor, node)
        if value is None:
            value = self.kept(tensor, node)
        value.saved += 1
        return value

    def kept(self, tensor: Tensor, node: Node | None) -> _Value:
        value: _Value
        if self.outer is not None:
            value = _Handed(tensor, self.outer)
            self.handed.append(weakref.ref(value))
        else:
            value = _Kept(tensor, self.where)
        if node is not None:
            reference: weakref.ref[_Value] = weakref.ref(value)
            self.values[node, tensor.output_nr] = reference
            if tensor.layout is torch.strided and tensor.nbytes >= self.min_bytes:
                self.storages[tensor.untyped_storage()._cdata] = reference
        return value

    def rebuilt(self, tensor: Tensor, node: Node) -> _Value | None:
        """Return what rebuilds a tensor, if that is possible, worth it, and right."""
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.nbytes < self.min_bytes
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        if self.outer is None:
            there = self.storages.get(tensor.untyped_storage()._cdata)
            if there is not None and there() is not None:
                return None  # a view of what is kept
        value = self.result(node, tensor.output_nr, 0, tensor)
        if not isinstance(value, _Rebuilt) or not self.trust(value, tensor):
            return None
        return value

    def trust(self, value: _Rebuilt, tensor: Tensor) -> bool:
        """Whether a value is the tensor, bit for bit."""
        if tensor._version:
            # Perhaps changed since its node was made; inside a region that could not be decided alike again.
            return self.outer is None and _same(value.peek(), tensor)
        key = (value.key, _layout(tensor))
        trusted = self.trusted.get(key)
        if trusted is None:
            trusted = self.trusted[key] = _same(value.peek(), tensor)
        return trusted

    def result(
        self, node: Node, output_nr: int, depth: int, tensor: Tensor | None = None
    ) -> _Value | None:
        """Return the value that a node's operation gave, if it is kept or can be rebuilt.

        Args:
            node: The node.
            output_nr: Which of its results.
            depth: How many recipes stand upon this one.
            tensor: The result itself, where it is at hand.
        """
        known = self.values.get((node, output_nr))
        value = known() if known is not None else None
        if value is not None:
            return value if value.depth or value.peek() is not None else None
        recipe = RECIPES.get(type(node).__name__)
        if recipe is None or depth == DEPTH:
            return None
        value = self.make(node, recipe, output_nr, depth, tensor)
        if value is not None:
            self.values[node, output_nr] = weakref.ref(value)
        return value

    def make(
        self, node: Node, recipe: Recipe, output_nr: int, depth: int, tensor: Tensor | None
    ) -> _Rebuilt | None:
        if output_nr and "output_nr" not in recipe.constants:
            return None
        earlier = node._sequence_nr() < self.begin
        if earlier and self.outer is not None:
            return None
        # Of what was made before this forward little is at hand, so only chains are followed there.
        follow = not earlier or len(recipe.tensors) == 1
        sources: list[_Value | None] = []
        made_of: list[Any] = []
        upon = 0
        edges: Any = None
        for place, (saved, optional) in enumerate(_tensors(type(node), recipe.tensors)):
            source = None if saved is None else self.saved(saved.__get__(node).data)
            if source is None:
                edges = edges or node.next_functions
                origin, number = edges[place] if place < len(edges) else (None, 0)
                if origin is not None:
                    source = self.result(origin, number, depth + 1) if follow else None
                    if source is None:
                        return None
                elif not optional:
                    return None
            if source is None:
                made_of.append(None)
            else:
                made_of.append(source.key)
                upon = max(upon, source.depth)
            sources.append(source)
        if upon == DEPTH:
            return None
        constants = {name: _constant(node, name, output_nr, tensor) for name in recipe.constants}
        key = (type(node), tuple(made_of), _frozen(constants))
        return _Rebuilt(recipe, sources, upon + 1, constants, key)

    def saved(self, data: Any) -> _Value | None:
        """Return what a node has saved of a tensor, if it is at hand."""
        if isinstance(data, _Value):
            return data if data.depth or data.peek() is not None else None
        if isinstance(data, Tensor) and data.dim() == 0 and not data.requires_grad:
            return _Constant(data)
        return None
