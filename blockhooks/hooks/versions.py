"""`VersionGuard`: notice what was changed in place between forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.nn.parameter import is_lazy

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


class _Versions:
    """The factory: compares versions when a recompute begins."""

    __slots__ = ("run", "segment", "tensors", "versions")

    def __init__(self, run: Run, segment: Segment) -> None:
        self.run, self.segment = run, segment
        self.tensors: list[Tensor] = []
        for module in run.survey(segment).modules:
            for owned in (module._parameters, module._buffers):
                self.tensors += [tensor for tensor in owned.values() if tensor is not None]
        if run.args or run.kwargs:
            self.tensors += tensors_in(run.side())
        self.tensors = [t for t in self.tensors if not (is_lazy(t) or t.is_inference())]
        self.versions = [tensor._version for tensor in self.tensors]

    def forward_done(self, failed: bool) -> None:
        """Leave out what the forward has changed itself."""
        same = [t._version == version for t, version in zip(self.tensors, self.versions, strict=True)]
        if not all(same):
            self.tensors = [t for t, unchanged in zip(self.tensors, same, strict=True) if unchanged]
            self.versions = [v for v, unchanged in zip(self.versions, same, strict=True) if unchanged]

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._checked()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RecomputeError(self._message(tensor, version))
        yield

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
        for name, value in self.run.kwargs.items():
            if any(found is tensor for found in tensors_in(value)):
                return f"a tensor of the side input {name!r}"
        for place, value in enumerate(self.run.args):
            if any(found is tensor for found in tensors_in(value)):
                return f"a tensor of side input {place}"
        return "a tensor"

    def _path(self, module: object) -> str:
        for index in range(self.segment.start, self.segment.stop):
            block = self.run.blocks[index]
            for path, child in getattr(block, "named_modules", lambda: ())():
                if child is module:
                    inside = f".{path}" if path else ""
                    return f"block {index} ({self.run.name(index)}){inside}"
        return type(module).__name__
