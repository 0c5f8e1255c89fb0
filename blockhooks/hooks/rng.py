"""`RNGSnapshot`: each recompute draws the random numbers of its forward."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from blockhooks.errors import HookError
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import Segment
from blockhooks.run import Run
from blockhooks.structure import is_rng

__all__ = ["RNGSnapshot"]


class RNGSnapshot:
    """Give each recompute the random numbers of its forward.

    Carries torch's CPU generator and those of the devices in use, Python's and NumPy's global generators, and every
    `torch.Generator`, `random.Random`, `numpy.random.Generator` and `RandomState` reachable from the blocks or the side
    inputs, also one that several blocks share. Only what the forward really drew from is restored in the recompute, and
    put back afterwards.

    Side: crosses the boundary (captured outside, restored around each recompute). Costs about 20 us per region and
    5 kB for each generator drawn from. See R2 and R6.

    Args:
        generators: Further random generators to carry, that blocks reach in ways of their own.

    Raises:
        HookError: If one of `generators` is no random generator.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self.generators = tuple(generators)
        for generator in self.generators:
            if not is_rng(generator):
                raise HookError(
                    f"RNGSnapshot(generators=...) expected random generators of torch, NumPy or Python, found "
                    f"{generator!r}."
                )

    @hookimpl
    def recompute_context(self, run: Run, segment: Segment) -> _Draws:
        """Read the states of all generators in reach."""
        found = {id(g): g for g in (*run.survey(segment).rngs, *self.generators)}
        return _Draws([*_global_sources(), *map(_source, found.values())])


class _Draws:
    """The factory: restores what the forward drew from."""

    __slots__ = ("before", "sources")

    def __init__(self, sources: list[_Source]) -> None:
        self.sources = sources
        self.before = [read() for read, _, _ in sources]

    def forward_done(self, failed: bool) -> None:
        """Keep the states of those generators alone that the forward drew from."""
        drawn = [
            (source, state)
            for source, state in zip(self.sources, self.before, strict=True)
            if not source[2](state, source[0]())
        ]
        self.sources = [source for source, _ in drawn]
        self.before = [state for _, state in drawn]

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._restored() if self.sources else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        now = [read() for read, _, _ in self.sources]
        try:
            for (_, write, _), state in zip(self.sources, self.before, strict=True):
                write(state)
            yield
        finally:
            for (_, write, _), state in zip(self.sources, now, strict=True):
                write(state)


_Source = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], bool]]
"""How to read a generator's state, how to write it, and whether two states are the same."""


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # no part of the step
        return torch.equal(one, other)


def _same_tuple(one: Any, other: Any) -> bool:
    return bool(one[1][-1] == other[1][-1] and one == other)


def _same_numpy(one: Any, other: Any) -> bool:
    """Of `numpy.random.get_state()`: the position changes with nearly every draw, so look at it first."""
    return bool(one[2:] == other[2:] and one[0] == other[0] and (one[1] == other[1]).all())


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_bits(one[k], other[k]) for k in one)
    return bool((one == other).all()) if hasattr(one, "shape") else bool(one == other)


def _torch_source(generator: torch.Generator) -> _Source:
    return generator.get_state, generator.set_state, _same_tensor


_CPU = _torch_source(torch.default_generator)
_PYTHON: _Source = (random.getstate, random.setstate, _same_tuple)


def _global_sources() -> list[_Source]:
    sources = [_CPU, _PYTHON]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        sources.append((numpy_random.get_state, numpy_random.set_state, _same_numpy))
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            sources += map(_torch_source, backend.default_generators)
    return sources


def _source(generator: Any) -> _Source:
    if isinstance(generator, torch.Generator):
        return _torch_source(generator)
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate, _same_bits
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state), _same_bits
    return generator.get_state, generator.set_state, _same_numpy
