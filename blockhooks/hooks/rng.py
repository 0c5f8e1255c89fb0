"""`RNGSnapshot`: each recompute draws the random numbers of its forward."""

from __future__ import annotations

import _random
import contextlib
import ctypes
import functools
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
        return self._restored() if self.sources else _NOTHING

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


_NOTHING = contextlib.nullcontext()
_Source = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], bool]]
"""How to read a generator's state, how to write it, and whether two states are the same."""


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # no part of the step
        # A comparison of bytes: a tenth of the time of an operation, and no operation that a mode would see.
        return ctypes.string_at(one.data_ptr(), one.nbytes) == ctypes.string_at(
            other.data_ptr(), other.nbytes
        )


def _same_numpy(one: Any, other: Any) -> bool:
    """Of `numpy.random.get_state()`: the position changes with nearly every draw, so look at it first."""
    if one is other:
        return True
    if isinstance(one, dict):
        return _same_bits(one, other)
    return bool(one[2:] == other[2:] and one[0] == other[0] and (one[1] == other[1]).all())


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_bits(one[k], other[k]) for k in one)
    return (
        bool((one == other).all()) if hasattr(one, "shape") else bool(one is other or one == other)
    )


def _memory(address: int, size: int) -> Callable[[], bytes]:
    return functools.partial(ctypes.string_at, address, size)


def _own_memory(value: object, base: type) -> Callable[[], bytes]:
    """Read what an object holds in C, next to the references and the dict that its class may add."""
    begin = object.__basicsize__
    return _memory(id(value) + begin, base.__basicsize__ - begin)


class _Watched:
    """Reads a generator's state only if its memory has changed since the last time.

    Python's and NumPy's generators take 10 and 40 us to tell their 2.5 kB, since they make objects of them; nearly
    always nobody has drawn. Their memory is compared as a whole, whatever its layout, and never written.
    """

    def __init__(self, memory: Callable[[], Any], read: Callable[[], Any]) -> None:
        self.memory, self.read = memory, read
        self.last: tuple[Any, Any] | None = None

    def __call__(self) -> Any:
        memory, last = self.memory(), self.last
        if last is None or last[0] != memory:
            last = self.last = memory, self.read()
        return last[1]


def _python_memory(generator: random.Random) -> Callable[[], Any]:
    memory = _own_memory(generator, _random.Random)
    return lambda: (memory(), generator.gauss_next)  # type: ignore[attr-defined]


def _numpy_memory(generator: Any) -> Callable[[], Any]:
    bits = generator._bit_generator
    own = _own_memory(generator, type(generator))
    key = _memory(bits.ctypes.state_address, 625 * 4)  # MT19937: 624 words and a position
    # Another bit generator may be put in place: then nothing is known.
    return lambda: (own(), key()) if generator._bit_generator is bits else object()


def _shows_draws(generator: Any, memory: Callable[[Any], Callable[[], Any]], *draws: str) -> bool:
    """Whether each draw of a generator, also one from a value put by, shows in what is taken for its memory."""
    try:
        look = memory(generator)
        for draw in draws:
            before, again = look(), look()
            getattr(generator, draw)()
            if before != again or before == look():
                return False
    except (AttributeError, TypeError):
        return False
    return True


def _torch_source(generator: torch.Generator) -> _Source:
    return generator.get_state, generator.set_state, _same_tensor


@functools.cache
def _python_source() -> _Source:
    """Python's global generator."""
    read: Callable[[], Any] = random.getstate
    own: random.Random = random._inst
    if _shows_draws(random.Random(0), _python_memory, "random", "normalvariate", "gauss", "gauss"):
        read = _Watched(_python_memory(own), read)
    return read, random.setstate, _same_bits


@functools.cache
def _numpy_source() -> _Source:
    """NumPy's global generator."""
    numpy_random = sys.modules["numpy.random"]
    read: Callable[[], Any] = numpy_random.get_state
    own = getattr(numpy_random.get_state, "__self__", None)
    known = getattr(own, "_bit_generator", None)
    if type(known).__name__ == "MT19937" and _shows_draws(
        numpy_random.RandomState(0),
        _numpy_memory,
        "random_sample",
        "standard_normal",
        "standard_normal",
    ):
        read = _Watched(_numpy_memory(own), read)
    return read, numpy_random.set_state, _same_numpy


_CPU = _torch_source(torch.default_generator)


def _global_sources() -> list[_Source]:
    sources = [_CPU, _python_source()]
    if "numpy.random" in sys.modules:
        sources.append(_numpy_source())
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
