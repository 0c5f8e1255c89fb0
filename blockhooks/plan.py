"""Plans: which blocks of a run form a segment, and what happens to each segment.

A *plan* is a tuple of segments that covers blocks ``0..n`` in order. A *plan function* makes one for any number of
blocks, so that the same ``Checkpoint(plan=plan.every(2))`` serves stacks of every depth. Everything here is pure
Python and knows nothing of tensors.

References:
    Chen et al. (2016), Training deep nets with sublinear memory cost, arXiv:1604.06174 (`sqrt`).
    Griewank and Walther (2000), Algorithm 799: revolve, ACM TOMS 26(1) (`binomial`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, isqrt
from typing import Any, Final, Literal, SupportsIndex, get_args

from blockhooks.errors import PlanError

__all__ = [
    "Mode",
    "PlanFunction",
    "Segment",
    "Simulation",
    "binomial",
    "blocks",
    "check_plan",
    "every",
    "first",
    "simulate",
    "sqrt",
    "tree",
]

Mode = Literal["recompute", "keep", "selective", "offload"]
MODES: Final[tuple[str, ...]] = get_args(Mode)

# A nested segment costs the interpreter some ten frames per level when its blocks are executed; beyond this the
# recursion limit would end a step in the middle.
MAX_DEPTH: Final = 50


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks ``start..stop-1``, the unit of recompute.

    Attributes:
        start: Index of the first block.
        stop: Index after the last block.
        children: Segments within this one, by the same absolute indices: none, or such that they cover it in order.
            Each time that this segment's blocks are executed its children are run as segments in their turn, so a
            child to be recomputed keeps only its input even then.
        mode: ``"recompute"`` keeps the input alone and executes the blocks again in backward; ``"keep"`` leaves
            everything to autograd; ``"selective"`` and ``"offload"`` keep with less, or elsewhere.

    Raises:
        PlanError: If the numbers do not describe at least one block, or the children do not cover the segment.
    """

    start: int
    stop: int
    children: tuple[Segment, ...] = ()
    mode: Mode = "recompute"

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _integer(self.start, "a segment's start", 0))
        object.__setattr__(self, "stop", _integer(self.stop, "a segment's stop", 0))
        if self.stop <= self.start:
            raise PlanError(
                f"segment {self.start}..{self.stop} holds no block; stop is the index after its last block "
                f"and must be at least {self.start + 1}."
            )
        if self.mode not in MODES:
            raise PlanError(
                f"segment {self} has mode {self.mode!r}; the modes are {', '.join(map(repr, MODES))}."
            )
        object.__setattr__(
            self, "children", _segments(self.children, f"children of segment {self}")
        )
        if self.children:
            _check_cover(self.children, self.start, self.stop, f"segment {self}")

    def __str__(self) -> str:
        return f"{self.start}..{self.stop}"

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.stop - self.start

    @property
    def indices(self) -> range:
        """Indices of the blocks."""
        return range(self.start, self.stop)

    @property
    def depth(self) -> int:
        """Levels of segments, this one included."""
        return 1 + max((child.depth for child in self.children), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the segment as plain numbers, strings, lists and dicts, for JSON."""
        return {
            "start": self.start,
            "stop": self.stop,
            "mode": self.mode,
            "children": [child.to_dict() for child in self.children],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Segment:
        """Build the segment that `to_dict` described.

        Raises:
            PlanError: If `data` is no description of a segment.
        """
        try:
            children = tuple(cls.from_dict(child) for child in data.get("children", ()))
            return cls(data["start"], data["stop"], children, data.get("mode", "recompute"))
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"expected a segment as a dict with 'start' and 'stop', found {data!r}."
            ) from error


PlanFunction = Callable[[int], tuple[Segment, ...]]


@dataclass(frozen=True, slots=True, repr=False)
class _NamedPlan:
    """A plan function that prints as it was written, compares, and can be pickled."""

    build: Callable[..., tuple[Segment, ...]]
    arguments: tuple[Any, ...]

    def __call__(self, n: int) -> tuple[Segment, ...]:
        n = _integer(n, f"the number of blocks for {self!r}", 0)
        return self.build(n, *self.arguments) if n else ()

    def __repr__(self) -> str:
        return f"{self.build.__name__[1:]}({', '.join(map(repr, self.arguments))})"


# ---------------------------------------------------------------------------------------------------- plan functions


def every(blocks: int) -> PlanFunction:
    """Plan segments of `blocks` consecutive blocks; the last one may be shorter.

    Saves one hidden state per segment and recomputes each block once.

    Args:
        blocks: Number of blocks in a segment, at least 1.

    Raises:
        PlanError: If `blocks` is less than 1.
    """
    return _NamedPlan(_every, (_integer(blocks, "blocks of every(blocks)", 1),))


def _every(n: int, blocks: int) -> tuple[Segment, ...]:
    return tuple(Segment(start, min(start + blocks, n)) for start in range(0, n, blocks))


def sqrt() -> PlanFunction:
    """Plan about √n segments of about √n blocks, as even as they can be.

    Saves √n hidden states, holds the activations of √n blocks, and recomputes each block once (Chen et al. 2016).
    """
    return _NamedPlan(_sqrt, ())


def _sqrt(n: int) -> tuple[Segment, ...]:
    return _even(0, n, isqrt(n - 1) + 1)


def tree(depth: int) -> PlanFunction:
    """Plan halves of halves: two segments, each with two children, and so on, `depth` levels deep.

    Saves at most ``depth + 1`` hidden states at a time and executes each block at most ``depth + 1`` times.

    Args:
        depth: Number of levels, at least 1 and at most 50. Halves of one block are not divided further.

    Raises:
        PlanError: If `depth` is not between 1 and 50.
    """
    depth = _integer(depth, "depth of tree(depth)", 1)
    if depth > MAX_DEPTH:
        raise PlanError(f"depth of tree(depth) must be at most {MAX_DEPTH}, found {depth}.")
    return _NamedPlan(_tree, (depth,))


def _tree(n: int, depth: int) -> tuple[Segment, ...]:
    def halves(start: int, stop: int, depth: int) -> tuple[Segment, ...]:
        if depth == 0 or stop - start == 1:
            return ()
        parts = _even(start, stop, 2)
        return tuple(Segment(s.start, s.stop, halves(s.start, s.stop, depth - 1)) for s in parts)

    return halves(0, n, depth) or (Segment(0, n),)


def binomial(slots: int) -> PlanFunction:
    """Plan the fewest block executions that are possible with `slots` saved hidden states (revolve).

    A chain of ``comb(slots + r, slots)`` blocks executes each block at most ``r`` times before the execution that
    its backward uses, and holds the activations of a single block at a time: memory grows with the logarithm of the
    number of blocks when `slots` does.

    Args:
        slots: Number of hidden states that may be saved at a time, the run's input included; at least 1.

    Raises:
        PlanError: If `slots` is less than 1, or, when the plan is made, so few that segments would nest more than
            50 levels deep.

    References:
        Griewank and Walther (2000), Algorithm 799: revolve, ACM TOMS 26(1).
    """
    return _NamedPlan(_binomial, (_integer(slots, "slots of binomial(slots)", 1),))


def _binomial(n: int, slots: int) -> tuple[Segment, ...]:
    if _reach(slots, MAX_DEPTH) < n:
        enough = next(more for more in range(slots, n + 1) if _reach(more, MAX_DEPTH) >= n)
        raise PlanError(
            f"binomial({slots}) over {n} blocks nests segments more than {MAX_DEPTH} levels deep; "
            f"{enough} slots are enough for so many blocks."
        )

    def divide(start: int, stop: int, slots: int) -> tuple[Segment, ...]:
        segments = []
        while stop - start > 1:
            length = _first_part(stop - start, slots)
            middle = start + length
            segments.append(Segment(start, middle, divide(start, middle, slots)))
            start, slots = middle, max(slots - 1, 1)
        return (*segments, Segment(start, stop, mode="keep"))

    return divide(0, n, slots)


def _reach(slots: int, repeats: int) -> int:
    """Return how many blocks can be reversed with `slots` states when none is repeated more than `repeats` times."""
    return comb(slots + repeats, slots) if repeats >= 0 else 0


def _first_part(length: int, slots: int) -> int:
    """Return after how many of `length` blocks the next state is best saved, by Griewank and Walther's theorem."""
    if slots == 1:
        return length - 1
    repeats = 0
    while _reach(slots, repeats) < length:
        repeats += 1
    return max(_reach(slots, repeats - 2), length - _reach(slots - 1, repeats), 1)


def first(count: int) -> PlanFunction:
    """Plan to recompute each of the first `count` blocks by itself and to keep the rest.

    With equal blocks this is close to the best plan of every memory budget that it can meet: what the first blocks
    hold is held longest.

    Args:
        count: Number of blocks to recompute, at least 0; where there are fewer, all are.

    Raises:
        PlanError: If `count` is negative.
    """
    return _NamedPlan(_first, (_integer(count, "count of first(count)", 0),))


def _first(n: int, count: int) -> tuple[Segment, ...]:
    return _only(n, range(min(count, n)))


def blocks(indices: Iterable[SupportsIndex]) -> PlanFunction:
    """Plan to recompute each of the given blocks by itself and to keep the others.

    Args:
        indices: Indices of the blocks; negative ones count from the end, as everywhere in Python.

    Raises:
        PlanError: If an index is no integer, or, when the plan is made, no block of the run.
    """
    if not isinstance(indices, Iterable):
        raise PlanError(
            f"indices of blocks(indices) must be a sequence of integers, such as [0, 3], found {indices!r}."
        )
    return _NamedPlan(
        _blocks, (tuple(_integer(i, "an index of blocks(indices)") for i in indices),)
    )


def _blocks(n: int, indices: tuple[int, ...]) -> tuple[Segment, ...]:
    for index in indices:
        if not -n <= index < n:
            raise PlanError(
                f"blocks({indices}) names block {index}, but the run has {n} blocks; "
                f"the indices are {-n}..{n - 1}."
            )
    return _only(n, {index % n for index in indices})


def _only(n: int, chosen: Iterable[int]) -> tuple[Segment, ...]:
    """Plan a segment to recompute for each chosen block, and one to keep for each stretch of others."""
    segments = []
    kept = 0
    for index in sorted(chosen):
        if kept < index:
            segments.append(Segment(kept, index, mode="keep"))
        segments.append(Segment(index, index + 1))
        kept = index + 1
    if kept < n:
        segments.append(Segment(kept, n, mode="keep"))
    return tuple(segments)


def _even(start: int, stop: int, parts: int) -> tuple[Segment, ...]:
    """Divide into segments whose lengths differ by one at most."""
    cuts = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return tuple(Segment(a, b) for a, b in pairwise(cuts) if a < b)


# ------------------------------------------------------------------------------------------------------------ checks


def check_plan(segments: Iterable[Segment], n: int, by: str = "") -> tuple[Segment, ...]:
    """Check that segments cover blocks ``0..n`` in order, without gap or overlap, and return them as a tuple.

    Args:
        segments: The plan.
        n: Number of blocks of the run.
        by: Who made the plan, as in ``"hooks[1] (Checkpoint)"``, for messages.

    Raises:
        PlanError: If they do not; the message names the blocks concerned.
    """
    plan = f"plan by {by}" if by else "plan"
    segments = _segments(segments, plan)
    _check_cover(segments, 0, _integer(n, "the number of blocks", 0), plan)
    return segments


def _segments(segments: Iterable[Segment], whose: str) -> tuple[Segment, ...]:
    """Check that something is a sequence of segments; `whose` names it."""
    if isinstance(segments, Segment) or not isinstance(segments, Iterable):
        raise PlanError(f"{whose}: expected a sequence of Segment, found {segments!r}.")
    segments = tuple(segments)
    for segment in segments:
        if not isinstance(segment, Segment):
            raise PlanError(f"{whose}: expected a sequence of Segment, found {segment!r} in it.")
    return segments


def _check_cover(segments: tuple[Segment, ...], start: int, stop: int, plan: str) -> None:
    """Check that segments cover blocks ``start..stop`` in order; `plan` names whose they are."""
    where, before = start, f"the start of {start}..{stop}"
    for segment in segments:
        if segment.stop > stop:
            raise PlanError(
                f"{plan} reaches beyond the end: segment {segment} ends at {segment.stop}, "
                f"but the blocks are {start}..{stop}."
            )
        if segment.start < where:
            fault = "overlaps" if segment.stop > where else "is out of order"
            raise PlanError(
                f"{plan} {fault}: segment {segment} follows {before}, so it must start at {where}."
            )
        if segment.start > where:
            raise PlanError(
                f"{plan} leaves a gap: segment {segment} follows {before}; "
                f"{_in_none(where, segment.start)}."
            )
        where, before = segment.stop, f"segment {segment}"
    if where < stop:
        raise PlanError(f"{plan} leaves a gap: {_in_none(where, stop)}.")


def _in_none(start: int, stop: int) -> str:
    if stop - start == 1:
        return f"block {start} is in no segment"
    joined = f"{start} and {stop - 1}" if stop - start == 2 else f"{start} to {stop - 1}"
    return f"blocks {joined} are in no segment"


def _integer(value: SupportsIndex, what: str, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise PlanError(f"{what} must be an integer, found {value!r}.")
    if least is not None and number < least:
        raise PlanError(f"{what} must be at least {least}, found {number}.")
    return number


# -------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan costs, counted on a machine whose blocks are all alike.

    Attributes:
        executions: How often each block is executed in a forward and its backward.
        peak_states: Most hidden states saved at a time as inputs of segments to be recomputed.
        peak_blocks: Most blocks whose activations are held at a time.
    """

    executions: tuple[int, ...]
    peak_states: int
    peak_blocks: int

    @property
    def total(self) -> int:
        """Block executions altogether."""
        return sum(self.executions)

    @property
    def recomputed(self) -> int:
        """Block executions beyond the forward."""
        return self.total - len(self.executions)


class _Machine:
    """Executes a plan on blocks that only count."""

    def __init__(self, n: int, early_stop: bool) -> None:
        self.executions = [0] * n
        self.early_stop = early_stop
        self.states: Counter[int] = Counter()
        self.held = self.peak_states = self.peak_blocks = 0

    def forward(self, segments: Sequence[Segment], recomputing: bool) -> None:
        for segment in segments:
            # A recompute has all its saved tensors back once the last segment's input is there (early stop).
            ends = recomputing and self.early_stop and segment is segments[-1]
            if segment.mode == "recompute":
                self.states[segment.start] += 1
                self.peak_states = max(self.peak_states, len(self.states))
                if not ends:
                    self.execute(segment)
            elif segment.children:
                self.forward(segment.children, ends)
            else:
                self.execute(segment)
                self.held += len(segment)
                self.peak_blocks = max(self.peak_blocks, self.held)

    def backward(self, segments: Sequence[Segment]) -> None:
        for segment in reversed(segments):
            if segment.mode == "recompute":
                inside = segment.children or (Segment(segment.start, segment.stop, mode="keep"),)
                self.forward(inside, recomputing=True)
                self.backward(inside)
                self.states[segment.start] -= 1
                self.states += Counter()  # drops what is no longer saved
            elif segment.children:
                self.backward(segment.children)
            else:
                self.held -= len(segment)

    def execute(self, segment: Segment) -> None:
        for index in segment.indices:
            self.executions[index] += 1


def simulate(
    plan: PlanFunction | Sequence[Segment], n: int | None = None, *, early_stop: bool = True
) -> Simulation:
    """Count what one forward and its backward execute and hold under a plan.

    Args:
        plan: A plan, or a plan function.
        n: Number of blocks. Only a plan function needs it.
        early_stop: Whether a recompute ends once everything saved is back. Counted in whole blocks: a segment to be
            recomputed that comes last within its parent is not executed with the parent. The part of a block that
            an early stop leaves out is not counted.

    Raises:
        PlanError: If the plan does not cover ``0..n``, or `n` is missing.
    """
    if callable(plan):
        if n is None:
            raise PlanError(
                f"simulate({plan!r}) needs the number of blocks; write simulate({plan!r}, n)."
            )
        plan = plan(n)
    elif n is None:
        plan = _segments(plan, "plan")
        n = plan[-1].stop if plan else 0
    segments = check_plan(plan, n)
    machine = _Machine(n, early_stop)
    machine.forward(segments, recomputing=False)
    machine.backward(segments)
    return Simulation(tuple(machine.executions), machine.peak_states, machine.peak_blocks)
