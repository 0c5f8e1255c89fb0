"""`VersionGuard`: notice what was changed in place between forward and backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockhooks.errors import RecomputeError
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import Segment
from blockhooks.run import Run
from blockhooks.structure import tensors_in

__all__ = ["VersionGuard"]


class VersionGuard:
    """Raise where a weight or a side input was changed in place between forward and backward.

    Plain autograd raises there, since it checks the versions of what it saved; a recompute would silently use the new
    values. Guarded are the parameters and buffers of the modules that a region can reach, its side inputs, and tensors
    in closures. A function can reach more than it uses (it picks one of several blocks); for what is not the block's own
    the error comes where the recompute is about to use what was changed. What the region itself changes in its forward
    is not guarded: `StateSnapshot` carries it.

    Side: crosses the boundary. Costs about 0.2 us per parameter and buffer. See R2.
    """

    @hookimpl
    def recompute_context(self, run: Run, segment: Segment) -> _Versions:
        """Note the versions of parameters, buffers and side inputs."""
        return _Versions(run, segment)


_NOTHING = contextlib.nullcontext()
_CALLS = frozenset(("__call__", "_call_impl", "_wrapped_call_impl", "forward"))
"""Methods of a module that execute it as a whole."""


class _Versions:
    """The factory: compares versions when a recompute begins."""

    __slots__ = ("run", "segment", "sides", "tensors", "versions")

    def __init__(self, run: Run, segment: Segment) -> None:
        self.run, self.segment = run, segment
        found = run.survey(segment)
        self.tensors: list[Tensor] = list(found.tensors)
        for module in (*found.modules, *found.lent):
            if isinstance(module, LazyModuleMixin):
                continue  # its tensors are not there yet
            for owned in (module._parameters, module._buffers):
                if owned is module._buffers and isinstance(module, _NormBase) and module.training:
                    continue  # statistics are not read, and may be those of another block in a list of them
                self.tensors += [tensor for tensor in owned.values() if tensor is not None]
        self.sides: dict[int, str] = {}  # what to call a side input's tensor, by id
        if run.args or run.kwargs:
            args, kwargs = run.side()
            for place, value in enumerate(args):
                self._side(value, f"side input {place}")
            for name, value in kwargs.items():
                self._side(value, f"the side input {name!r}")
        self.tensors = [t for t in self.tensors if not t.is_inference()]
        self.versions = [tensor._version for tensor in self.tensors]

    def _side(self, value: Any, name: str) -> None:
        tensors = [value] if isinstance(value, Tensor) else tensors_in(value)
        self.tensors += tensors
        for tensor in tensors:
            self.sides.setdefault(id(tensor), name)

    def forward_done(self, failed: bool) -> None:
        """Leave out what the forward has changed itself."""
        same = [
            t._version == version for t, version in zip(self.tensors, self.versions, strict=True)
        ]
        if not all(same):
            self.tensors = [t for t, unchanged in zip(self.tensors, same, strict=True) if unchanged]
            self.versions = [
                v for v, unchanged in zip(self.versions, same, strict=True) if unchanged
            ]

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Compare: mostly all that there is to do, when a recompute is about to begin."""
        changed = {
            id(tensor): (tensor, version)
            for tensor, version in zip(self.tensors, self.versions, strict=True)
            if tensor._version != version
        }
        if not changed:
            return _NOTHING
        for tensor in self._used():
            if id(tensor) in changed:
                raise RecomputeError(self.message(*changed[id(tensor)]))
        return _Refusing(changed, self.message)

    def _used(self) -> Iterator[Tensor]:
        """Give the tensors that the region surely uses, where nobody sees it: a kernel may take them as addresses."""
        yield from (tensor for tensor in self.tensors if id(tensor) in self.sides)
        for block in self.run.blocks[self.segment.start : self.segment.stop]:
            while isinstance(block, functools.partial):
                block = block.func
            if getattr(block, "__name__", "") in _CALLS:
                block = getattr(block, "__self__", block)
            if isinstance(block, nn.Module):
                yield from itertools.chain(block.parameters(), block.buffers())

    def message(self, tensor: Tensor, version: int) -> str:
        """Say that a tensor is not as the forward saw it."""
        where = self.run.describe(self.segment.start, self.segment.stop)
        return (
            f"{where}: {self._name(tensor)} of shape {list(tensor.shape)} was modified in place between forward and "
            f"backward (version {tensor._version}, expected {version}), so the recompute would use other values than "
            "the forward. Run the backward before changing it (step the optimizer after), or change a copy."
        )

    def _name(self, tensor: Tensor) -> str:
        for module in self.run.survey(self.segment).modules:
            for kind, owned in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, value in owned.items():
                    if value is tensor:
                        return f"{kind} {name!r} of {self._path(module)}"
        if id(tensor) in self.sides:
            return f"a tensor of {self.sides[id(tensor)]}"
        return "a tensor in a closure"

    def _path(self, module: object) -> str:
        for index in range(self.segment.start, self.segment.stop):
            block = self.run.blocks[index]
            for path, child in getattr(block, "named_modules", lambda: ())():
                if child is module:
                    inside = f".{path}" if path else ""
                    return f"block {index} ({self.run.name(index)}){inside}"
        return type(module).__name__


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse to compute with tensors that have changed, by id, each with the version expected."""

    def __init__(
        self,
        changed: dict[int, tuple[Tensor, int]],
        message: Callable[[Tensor, int], str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changed, self.message = changed, message
        self.refused: str | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # compiled code stays so, as in the forward
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if id(value) in self.changed:
                self.refused = self.message(*self.changed[id(value)])
                raise RecomputeError(self.refused)
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self.refused is not None and not isinstance(error, RecomputeError):
            raise RecomputeError(self.refused)  # which the block has caught
