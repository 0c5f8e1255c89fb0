"""`VersionGuard`: notice what was changed in place between forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from blockhooks.errors import RecomputeError
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import Segment
from blockhooks.run import Run
from blockhooks.structure import tensors_in

__all__ = ["VersionGuard"]


class VersionGuard:
    """Raise where a weight or a side input was changed in place between forward and backward.

    Plain autograd raises there, since it checks the versions of what it saved; a recompute would silently use the new
    values. What the region itself changes in its forward is not guarded: `StateSnapshot` carries it.

    Side: crosses the boundary. Costs about 0.2 us per parameter and buffer. See R2.
    """

    @hookimpl
    def recompute_context(self, run: Run, segment: Segment) -> _Versions:
        """Note the versions of parameters, buffers and side inputs."""
        return _Versions(run, segment)


_NOTHING = contextlib.nullcontext()


class _Versions:
    """The factory: compares versions when a recompute begins."""

    __slots__ = ("run", "segment", "sides", "tensors", "versions")

    def __init__(self, run: Run, segment: Segment) -> None:
        self.run, self.segment = run, segment
        self.tensors: list[Tensor] = []
        for module in run.survey(segment).modules:
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
        """Compare: all that there is to do, when a recompute is about to begin."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RecomputeError(self._message(tensor, version))
        return _NOTHING

    def _message(self, tensor: Tensor, version: int) -> str:
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
        return f"a tensor of {self.sides[id(tensor)]}"

    def _path(self, module: object) -> str:
        for index in range(self.segment.start, self.segment.stop):
            block = self.run.blocks[index]
            for path, child in getattr(block, "named_modules", lambda: ())():
                if child is module:
                    inside = f".{path}" if path else ""
                    return f"block {index} ({self.run.name(index)}){inside}"
        return type(module).__name__
