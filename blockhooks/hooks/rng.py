"""`RNGSnapshot`: each recompute draws the random numbers of its forward."""

from __future__ import annotations

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
from blockhooks.survey import Survey

__all__ = ["RNGSnapshot"]


class RNGSnapshot:
    """Give each recompute the random numbers of its forward.

    Carries torch's CPU generator and those of the devices in use, Python's and NumPy's global generators, and every
    `torch.Generator`, `random.Random`, `numpy.random.Generator` and `RandomState` reachable from the blocks or the side
    inputs, also one that several blocks share: by attributes, closures, defaults and forward hooks, and by the globals,
    classes and objects that the code names (in these not deep inside of containers of more than 256 items). Only what
    the forward really drew from is restored in the recompute, and put back afterwards. A forward that makes a generator
    which outlives it keeps what autograd saved.

    Side: crosses the boundary (captured outside, restored around each recompute). Costs about 20 us per region and
    5 kB for each generator drawn from. See R2 and R6.

    Args:
        generators: Further random generators to carry, that blocks reach in ways of their own.

    Raises:
        HookError: If `generators` is no sequence, or one of them is no random generator.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        if is_rng(generators) or not isinstance(generators, Iterable):
            raise HookError(
                f"RNGSnapshot(generators=...) expected a sequence of random generators, found {generators!r}; write "
                "RNGSnapshot([generator]) for a single one."
            )
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
        survey = run.survey(segment)
        found = {id(g): g for g in (*survey.rngs, *self.generators)}
        return _Draws([*_global_sources(), *map(_source, found.values())], survey)


class _Draws:
    """The factory: restores what the forward drew from."""

    __slots__ = ("before", "sources", "survey")

    def __init__(self, sources: list[_Source], survey: Survey) -> None:
        self.sources, self.survey = sources, survey
        self.before = [read() for read, _, _ in sources]

    def forward_done(self, failed: bool) -> str | None:
        """Keep the states of those generators alone that the forward drew from; return why it cannot draw again."""
        made = self.survey.makes_generators()
        del self.survey  # it holds modules, and the region's x
        drawn = [
            (source, state)
            for source, state in zip(self.sources, self.before, strict=True)
            if not ((after := source[0]()) is state or source[2](state, after))
        ]
        self.sources = [source for source, _ in drawn]
        self.before = [state for _, state in drawn]
        return "it makes a random generator that outlives it" if made else None

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


_memcmp = (ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # no part of the step
        # Byte by byte, in place: a tenth of the time of an operation, and none that a mode would see.
        size = one.nbytes
        return size == other.nbytes and not _memcmp(one.data_ptr(), other.data_ptr(), size)


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


class _Watched:
    """Reads a generator's state only if its memory has changed since the last time.

    Python's and NumPy's generators take 10 and 40 us to tell their 2.5 kB, since they make objects of them; nearly
    always nobody has drawn. Both are Mersenne twisters: a draw moves the position, and when the position begins again all
    of the 624 words are new. So the position and the first words are looked at, and never written.
    """

    def __init__(self, memory: Callable[[], Any], read: Callable[[], Any]) -> None:
        self.memory, self.read = memory, read
        self.last: tuple[Any, Any] | None = None

    def __call__(self) -> Any:
        memory, last = self.memory(), self.last
        if last is None or last[0] != memory:
            last = self.last = memory, self.read()
        return last[1]


_WORDS = 64
"""Bytes of the first words."""


def _python_memory(generator: random.Random) -> Callable[[], Any]:
    # What it holds in C, after the head of every object: position and words. Classes add references and a dict.
    memory = _memory(id(generator) + object.__basicsize__, 8 + _WORDS)
    return lambda: (memory(), generator.gauss_next)  # type: ignore[attr-defined]


def _numpy_memory(generator: Any) -> Callable[[], Any]:
    bits = generator._bit_generator
    begin, kind = object.__basicsize__, type(generator)
    own = _memory(id(generator) + begin, kind.__basicsize__ - begin)  # a value put by
    address = bits.ctypes.state_address  # 624 words of 4 bytes, and the position
    words, position = _memory(address, _WORDS), _memory(address + 624 * 4, 4)
    # Another bit generator may be put in place: then nothing is known.
    return lambda: (own(), words(), position()) if generator._bit_generator is bits else object()


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
