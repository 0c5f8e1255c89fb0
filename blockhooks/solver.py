"""The fastest plan that keeps a memory budget.

Three searches, and the best of what they find by exact prediction:

* nested recompute on a chain of unequal blocks, by the dynamic programme of rotor, with several modes per block. It
  works on memory in slots. Sizes are rounded such that sums of neighbours stay right to half a slot, and what comes
  out is predicted to the byte before it is taken;
* the first k blocks recomputed and the rest kept, exactly, for every k;
* where slots are too coarse to find anything, the fastest plan of the least memory, for which bytes decide what fits.

References:
    Beaumont et al. (2019), Optimal checkpointing for heterogeneous chains, hal-02352969 (rotor).
    Zhao et al. (2023), Rockmate, PMLR 202 (several modes per block).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from blockhooks.costs import (
    BlockCosts,
    ChainProfile,
    Prediction,
    budget_in_bytes,
    check_profile,
    format_bytes,
    format_table,
    load_json,
    predict,
    save_json,
)
from blockhooks.errors import BudgetError, PlanError
from blockhooks.plan import MAX_DEPTH, Mode, Segment, binomial, every, first

__all__ = ["Plan", "Solver", "solve"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Segments = tuple[Segment, ...]

# The memory axis is divided anew for budgets below each quarter of the one before, so that at least a quarter of the
# slots lies below every budget.
RUNG: Final = 4
# The time of the dynamic programme goes with slots, and with how many pairs of parts it looks at.
MOST_BLOCKS: Final = 256
MOST_SLOTS: Final = 8000
LEAST_SLOTS: Final = 240
PAIRS_BY_BLOCKS: Final = 160_000
# Where there are more blocks than that, segments longer than LONG are of use only for budgets below a rung, longer than
# twice as many for those below the next, and so on; on the rung of the floor all are.
MANY_BLOCKS: Final = 64
LONG: Final = 32
# Slots are rounded: what seems to need up to this share of them more than a budget has may keep it all the same.
SPARE: Final = 0.01
# Bytes of what cannot be executed.
FAR: Final = 1 << 60
# Seconds of what by slots does not fit, where bytes decide.
NEVER: Final = 1e30


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for a given chain, with what it is predicted to cost. It is a plan function too.

    Attributes:
        segments: The segments.
        time: Predicted seconds of a step.
        peak: Predicted peak in bytes, above the run's input.
        plain_time: Predicted seconds of the plain loop.
        plain_peak: Predicted peak of the plain loop, in bytes.
        budget: The budget it was made for, in bytes; None if for none.
    """

    segments: Segments
    time: float
    peak: int
    plain_time: float
    plain_peak: int
    budget: int | None = None

    def __call__(self, n: int) -> Segments:
        """Return the segments.

        Raises:
            PlanError: If the plan is for another number of blocks than `n`.
        """
        blocks = self.segments[-1].stop if self.segments else 0
        if n != blocks:
            raise PlanError(
                f"the plan is for {blocks} blocks, but the run has {n}; measure the run and solve again."
            )
        return self.segments

    @property
    def slowdown(self) -> float:
        """Predicted time over the plain loop's."""
        return self.time / self.plain_time if self.plain_time else 1.0

    @property
    def share(self) -> float:
        """Predicted peak over the plain loop's."""
        return self.peak / self.plain_peak if self.plain_peak else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, lists and dicts, for JSON."""
        return {
            "segments": [segment.to_dict() for segment in self.segments],
            "time": self.time,
            "peak": self.peak,
            "plain_time": self.plain_time,
            "plain_peak": self.plain_peak,
            "budget": self.budget,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the plan that `to_dict` described.

        Raises:
            PlanError: If `data` is no description of a plan.
        """
        try:
            return cls(**{**data, "segments": tuple(map(Segment.from_dict, data["segments"]))})
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"expected a plan as a dict with a list of 'segments' and its predicted costs ({error})."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the plan that `save` wrote.

        Raises:
            PlanError: If the file holds no plan.
        """
        return cls.from_dict(load_json(path, PlanError))

    def __str__(self) -> str:
        rows: list[tuple[str, str]] = []

        def show(segments: Segments, level: int) -> None:
            for segment in segments:
                rows.append((f"{'  ' * level}{segment}", segment.mode))
                show(segment.children, level + 1)

        show(self.segments, 0)
        budget = f", budget {format_bytes(self.budget)}" if self.budget is not None else ""
        return "\n".join(
            [
                f"peak {format_bytes(self.peak)} ({self.share:.1%} of plain), "
                f"time {self.slowdown:.3f} of plain{budget}",
                *format_table(("blocks", "mode"), rows),
            ]
        )


def solve(profile: ChainProfile, memory_budget: str | int | float) -> Plan:
    """Return the fastest plan whose predicted peak is within a budget.

    A larger budget never gives a slower plan.

    Args:
        profile: What the blocks cost.
        memory_budget: Bytes (``"8GiB"``, or an integer), or a float in (0, 1]: a fraction of the plain loop's peak.

    Raises:
        BudgetError: If no plan keeps the budget; the message names the least that one can, and the error has it as
            ``floor`` (bytes) and ``plan``. Also if the budget or the profile is not one.
    """
    return Solver(check_profile(profile, "solve")).solve(memory_budget)


class Solver:
    """Looks for plans over one profile; what several budgets have in common is computed once.

    Args:
        profile: What the blocks cost.
        apart: Whether each segment has to be a single block, because somebody's own loop calls the blocks one by one.
    """

    def __init__(self, profile: ChainProfile, *, apart: bool = False) -> None:
        self.profile, self.apart = profile, apart
        self._tables: dict[tuple[int, int], _Table] = {}
        self._tops: dict[int, Plan | None] = {}

    @cached_property
    def _plain(self) -> Prediction:
        return self.profile.plain

    @cached_property
    def plain(self) -> Plan:
        """The plan that keeps everything."""
        kept = (Segment(0, len(self.profile), mode="keep"),) if self.profile.blocks else ()
        return self._told(kept)

    @cached_property
    def floor(self) -> Plan:
        """The plan of the least memory that was found, and the fastest of those that reach it."""
        least = min(self._family, key=lambda plan: (plan.peak, plan.time))
        if least.peak == self.plain.peak:
            return self.plain
        found = [least, self._first(least.peak)]
        if len(self.profile) <= MOST_BLOCKS and self._least.peak <= least.peak:
            found += self._within(least.peak)
        return _fastest(found, least.peak) or least

    @cached_property
    def _family(self) -> list[Plan]:
        """Plans for where little memory is left: exactly the least, or by rule where that would nest too deep."""
        n = len(self.profile)
        plans = [self.plain, self.plan(first(n)(n))]
        if n <= MAX_DEPTH:
            return [*plans, self.plan(self._least.plan)]
        plans.append(self.plan(self._moved))
        if self.apart:
            return plans
        sizes = [2**power for power in range(1, n.bit_length())]
        functions = [every(size) for size in sizes] + [
            binomial(slots) for slots in (3, 4, 6, *sizes[2:6])
        ]
        for function in functions:
            # So few slots may nest too deep for so many blocks.
            with contextlib.suppress(PlanError):
                plans.append(self.plan(function(n)))
        return plans

    @property
    def _moved(self) -> Segments:
        """The plan in which each block moves that can, and each other is recomputed by itself."""
        may = [any(m.mode == "offload" for m in block.modes) for block in self.profile.blocks]
        return tuple(
            Segment(index, index + 1, mode="offload" if moves else "recompute")
            for index, moves in enumerate(may)
        )

    def plan(self, segments: Segments, budget: int | None = None) -> Plan:
        """Return segments with what they cost, in which no block is kept that the backward does not need."""
        return self._told(_dropped(segments, self._not_needed), budget)

    @cached_property
    def _not_needed(self) -> frozenset[int]:
        blocks = enumerate(self.profile.blocks)
        return frozenset(index for index, block in blocks if not block.needed and block.kept)

    def _told(self, segments: Segments, budget: int | None = None) -> Plan:
        time, peak = predict(self.profile, segments)
        plain_time, plain_peak = self._plain
        return Plan(segments, time, peak, plain_time, plain_peak, budget)

    def solve(self, memory_budget: str | int | float, *, beside: int = 0) -> Plan:
        """See `solve`.

        Args:
            memory_budget: The budget, for all that is held.
            beside: Bytes of it that are held beside what a plan decides on.
        """
        asked = budget_in_bytes(memory_budget, self.plain.peak + beside)
        budget = asked - beside
        plan = self._best(budget)
        if plan is None:
            raise self._refusal(asked, beside)
        return Plan(plan.segments, plan.time, plan.peak, plan.plain_time, plan.plain_peak, budget)

    def _refusal(self, asked: int, beside: int) -> BudgetError:
        """Return the error for a budget that no plan keeps. No frame that it leaves holds it, and so the step's graph."""
        floor = self.floor
        least, plain = floor.peak + beside, floor.plain_peak + beside
        outside = beside + sum(block.gap for block in self.profile.blocks)
        held = f", of which {format_bytes(outside)} are held outside of the blocks"
        error = BudgetError(
            f"a memory budget of {format_bytes(asked)} ({asked} bytes) cannot be kept: the least that a plan "
            f"reaches is {format_bytes(least)} ({least} bytes, {least / plain:.1%} of the plain loop's "
            f"{format_bytes(plain)}{held if outside else ''}), at {floor.slowdown:.2f} of its time, with the segments "
            f"{_brief(floor.segments)}. Raise the budget to at least that, or make the inputs smaller."
        )
        error.floor, error.plan = least, floor
        return error

    def _best(self, budget: int) -> Plan | None:
        """Return the fastest plan that was found within a budget in bytes."""
        if budget >= self.plain.peak:
            return self.plain
        if budget < self._lowest:  # but what needs that little may have been found by chance
            return _fastest([self.floor], budget)
        rung = self._rung(budget)
        found = [self._on_rung(rung, budget), self._first(budget), *self._family]
        best = _fastest(found, budget)
        # A larger budget must not be slower for its coarser slots: what the next rung can do, this one can.
        below = max(self.plain.peak // RUNG ** (rung + 1), self._lowest)
        if best is None or best.time > self._bound(below):
            best = _fastest([best, self._top(rung + 1)], budget)
        return best

    def _rung(self, budget: int) -> int:
        rung = 0
        while max(budget, 1) * RUNG ** (rung + 1) <= self.plain.peak:
            rung += 1
        return rung

    def _bound(self, budget: int) -> float:
        """Return a time that no plan within a budget can beat.

        At the last block's backward those before it hold at most what its peak leaves of the budget. What they hold
        less than in the plain loop costs seconds, at the cheapest rates first.
        """
        *blocks, last = self.profile.blocks
        rates = [rate for block in blocks for rate in _rates(block)]
        excess = sum(_held(block) + block.gap for block in blocks) + last.gap
        excess += min(way.backward_peak for way in _ways(last).values()) - budget
        time = self.plain.time
        for rate, most in sorted(rates):
            if excess <= 0:
                break
            time += rate * min(most, excess)
            excess -= most
        return time

    def _top(self, rung: int) -> Plan | None:
        """Return the fastest plan at the highest budget of a rung, or the plan of the least memory if that is higher."""
        top = self.plain.peak // RUNG**rung
        if top < self._lowest:
            return self.floor
        if rung not in self._tops:
            self._tops[rung] = self._best(top)
        return self._tops[rung]

    def _on_rung(self, rung: int, budget: int) -> Plan | None:
        """Return the fastest plan of the dynamic programme whose exact peak is within the budget."""
        if len(self.profile) > MOST_BLOCKS:
            return None
        many = len(self.profile) > MANY_BLOCKS
        short = many and rung < self._rung(self._lowest)
        table = self._table(rung, LONG << rung if short else len(self.profile))
        plans = map(self.plan, table.plans(budget))
        return next((plan for plan in plans if _fits(plan, budget)), None)

    def _within(self, budget: int) -> list[Plan]:
        """Return plans that keep a budget where slots may be too coarse to find any."""
        table = self._table(self._rung(budget), len(self.profile))
        plans: list[Plan] = []

        def holds(slot: int) -> bool:
            """Whether a plan has to the byte the time that it has by slots."""
            time, segments = table.plan_within(slot, budget)
            plans.append(self.plan(segments))
            return plans[-1].time <= time * (1 + 1e-4)

        # The higher a slot, the faster its plan, but only from some slot down one holds.
        low = high = top = table.slot(budget)
        while not holds(low) and low:
            low, high = max(2 * low - top - 1, 0), low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return plans

    def _table(self, rung: int, longest: int) -> _Table:
        key = rung, min(longest, self._least.longest)
        if key not in self._tables:
            self._tables[key] = _Table(self._least, self.plain.peak // RUNG**rung, key[1])
        return self._tables[key]

    @cached_property
    def _least(self) -> _Least:
        return _Least(self.profile, longest=1 if self.apart else len(self.profile))

    @cached_property
    def _lowest(self) -> int:
        """A peak that no plan is below which is looked for."""
        if len(self.profile) > MOST_BLOCKS:
            ways = [_ways(block).values() for block in self.profile.blocks]
            return int(max(min(way.backward_peak for way in of_block) for of_block in ways))
        # By the first, all that a step may hold outside of its blocks is held: some plans hold less.
        return min(self._least.peak, *(plan.peak for plan in self._family))

    @cached_property
    def _first_peaks(self) -> list[int]:
        return _first_peaks(self.profile)

    def _first(self, budget: int) -> Plan | None:
        """Return the plan that recomputes the fewest first blocks."""
        for count, peak in enumerate(self._first_peaks):
            if peak <= budget:
                return self.plan(first(count)(len(self.profile)))
        return None


def _dropped(segments: Segments, blocks: frozenset[int]) -> Segments:
    """Return segments in which some blocks are not kept: each is a segment of its own to recompute."""
    found: list[Segment] = []
    for segment in segments:
        if segment.mode == "recompute" or blocks.isdisjoint(segment.indices):
            found.append(segment)
        elif segment.children:
            found.append(replace(segment, children=_dropped(segment.children, blocks)))
        else:
            for drops, group in groupby(segment.indices, blocks.__contains__):
                indices = list(group)
                if drops:
                    found += [Segment(index, index + 1) for index in indices]
                else:
                    found.append(Segment(indices[0], indices[-1] + 1, mode=segment.mode))
    return tuple(found)


def _held(block: BlockCosts) -> int:
    """Return the bytes that a block holds more after its forward than before, if it is kept."""
    return block.figures("keep")[0] + block.output


def _rates(block: BlockCosts) -> Iterator[tuple[float, int]]:
    """Yield the seconds for each byte that a block holds less, and how many it can at this rate, cheapest first."""
    held = _held(block)
    ways = [(held, block.recompute_time)]
    for costs in block.modes:
        kept, _, _, extra = block.figures(costs.mode)
        ways.append((held - block.output - kept, extra))
    dropped, spent = 0, 0.0
    while True:
        # The lower convex hull of what can be dropped at what cost.
        better = [((t - spent) / (d - dropped), d, t) for d, t in ways if d > dropped]
        if not better:
            return
        rate, further, time = min(better, key=lambda way: (way[0], -way[1]))
        yield rate, further - dropped
        dropped, spent = further, time


def _fastest(plans: Iterable[Plan | None], budget: int) -> Plan | None:
    """Return the fastest of the plans that keep a budget and can be executed."""
    fitting = [plan for plan in plans if plan is not None and _fits(plan, budget)]
    return min(fitting, key=lambda plan: (plan.time, plan.peak), default=None)


def _fits(plan: Plan, budget: int) -> bool:
    depth = max((segment.depth for segment in plan.segments), default=0)
    return plan.peak <= budget and depth <= MAX_DEPTH


def _brief(segments: Segments, most: int = 8) -> str:
    """Return segments as a short text, such as ``"0..4 (nested) 4..6 6..12 keep ..."``."""
    parts = [
        str(segment)
        + (" (nested)" if segment.children else "")
        + ("" if segment.mode == "recompute" else f" {segment.mode}")
        for segment in segments[:most]
    ]
    return " ".join(parts) + (" ..." if len(segments) > most else "")


def _first_peaks(profile: ChainProfile) -> list[int]:
    """Return the peak of ``first(count)`` for each count from none to all blocks, or a little more."""
    blocks = [_folded(block) for block in profile.blocks]
    gaps = [0, *accumulate(block.gap for block in blocks)]
    states = [0, *accumulate(block.output for block in blocks)]
    holds = [0, *accumulate(map(_held, blocks))]
    # Before each block, and after the last, with the gaps up to there.
    states = [state + gap for state, gap in zip(states, [*gaps[1:], gaps[-1]], strict=True)]
    holds = [hold + gap for hold, gap in zip(holds, [*gaps[1:], gaps[-1]], strict=True)]
    recomputed = accumulate(
        (
            state
            + max(
                block.forward_peak,
                block.backward_peak + block.twice,
                block.gradient + block.recompute_peak + block.twice,
                block.gap_peak - block.gap,
            )
            for state, block in zip(states, blocks, strict=False)
        ),
        max,
        initial=0,
    )
    kept = [holds[-1] + max(profile.tail_peak, profile.tail_forward)]
    for hold, block in zip(reversed(holds[:-1]), reversed(blocks), strict=True):
        backward_peak = block.backward_peak - block.freed
        most = max(block.forward_peak, backward_peak, block.gap_peak - block.gap)
        kept.append(max(kept[-1], hold + most))
    return [
        max(before, state + after - hold)
        for before, state, after, hold in zip(
            recomputed, states, reversed(kept), holds, strict=True
        )
    ]


# ------------------------------------------------------------------------------------------- nested recompute (rotor)


class _Way(NamedTuple):
    """One way to keep a block, in some mode: what the dynamic programmes need of it, in bytes or in slots.

    Or one way to keep all blocks, by arrays.
    """

    held: Any  # after the forward
    forward_peak: Any
    backward_peak: Any
    time: Any  # of forward and backward
    last_time: Any  # the same where a recompute ends early at the block
    last_peak: Any

    def least(self, waiting: int, rest: int = 0) -> Any:
        """Return what a block takes of memory.

        Args:
            waiting: The gradient that waits meanwhile, if that is in a recompute.
            rest: What the blocks after it take.
        """
        return max(self.forward_peak + waiting, self.backward_peak, self.held + rest)

    def leasts(self, waiting: Any, rests: Any = 0) -> Any:
        """Return the same of the first blocks, as many as gradients are given."""
        first = slice(len(waiting))
        live = np.maximum(self.forward_peak[first] + waiting, self.backward_peak[first])
        return np.maximum(live, self.held[first] + rests)


def _by_block(ways: Mapping[Mode, _Way]) -> list[dict[Mode, _Way]]:
    """Return ways to keep all blocks as ways of each block."""
    lists = {mode: [part.tolist() for part in way] for mode, way in ways.items()}
    count = len(lists["keep"][0])
    return [
        {mode: _Way(*(part[index] for part in parts)) for mode, parts in lists.items()}
        for index in range(count)
    ]


def _ways(block: BlockCosts) -> dict[Mode, _Way]:
    modes: list[Mode] = ["keep", *(costs.mode for costs in block.modes)]
    ways = {}
    for mode in modes:
        kept, forward_peak, backward_peak, extra = block.figures(mode)
        again = min(block.recompute_peak, forward_peak)
        input_held = block.freed if mode == "keep" else 0
        ways[mode] = _Way(
            # Only what moves, which it does in no segment, may leave less than there was before.
            held=max(kept + block.output, -FAR if mode == "offload" else 0),
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            time=block.forward + block.backward + extra,
            last_time=block.recompute_time + block.backward + extra,
            last_peak=block.twice
            + max(backward_peak + input_held, forward_peak, again + block.gradient),
        )
    return ways


def _folded(block: BlockCosts) -> BlockCosts:
    """Return a block's costs with all that may be held as if it were held in each plan.

    What the backward does not need is never kept.
    """
    if not block.needed:
        block = replace(block, kept=0, backward_peak=0, freed=0, modes=())
    kept_too, passing = block.placed - block.unkept, block.passing
    modes = (
        replace(
            m,
            kept=max(m.kept - block.placed + block.unkept_in(m.mode), 0),
            forward_peak=m.forward_peak + passing,
            let_go=m.let_go - m.lingering,
        )
        for m in block.modes
    )
    return replace(
        block,
        output=block.output + block.placed,
        kept=max(block.kept - kept_too, 0),
        forward_peak=block.forward_peak + passing,
        gap=block.gap + block.carried,
        modes=tuple(modes),
    )


def _gap(held: int, peak: int, time: float = 0.0) -> BlockCosts:
    """Return what is between two blocks as one more, of which only an output is held."""
    return BlockCosts(forward=time, backward=0.0, output=held, kept=0, backward_peak=peak)


class _Least:
    """The least memory that each part of a chain takes, to the byte.

    With blocks ``s..t`` (both included), ``least[s, t]`` is what has to be free beside the input of `s` for their
    forward and backward. Gaps stand among the blocks as more of them, of which only an output is held, and which can lie
    in no segment to recompute: the last one is what a step does between the blocks' forward and their backward.

    Args:
        profile: What the blocks cost.
        longest: The most blocks that a segment to recompute may have.
    """

    def __init__(self, profile: ChainProfile, longest: int) -> None:
        self.longest = longest
        stages, gaps = list[BlockCosts](), list[bool]()
        for block in map(_folded, profile.blocks):
            if block.gap or block.gap_peak:
                less = min(block.gap, 0)
                if less and stages:  # of what the block before gave, not all is held
                    stages[-1] = replace(stages[-1], output=stages[-1].output + less)
                stages.append(_gap(block.gap - less, block.gap_peak - less))
                gaps.append(True)
            stages.append(block)
            gaps.append(False)
        tail_peak = max(profile.tail_peak, profile.tail_forward)
        stages.append(_gap(0, tail_peak, profile.tail))
        self.count = len(stages)
        # Before each stage, and after the last, how many gaps are there.
        self.gaps = np.cumsum([0, *gaps, True])
        self.outputs = np.array([stage.output for stage in stages])
        self.forward = np.array([0.0, *accumulate(stage.forward for stage in stages)])
        self.waiting = [stage.gradient for stage in stages]
        found = [_ways(stage) for stage in stages]
        self.has = [set(ways) for ways in found]
        # A block that does not have a mode is kept plainly.
        self.ways = {
            mode: _Way(*map(np.array, zip(*(w.get(mode, w["keep"]) for w in found), strict=True)))
            for mode in dict.fromkeys(mode for ways in found for mode in ways)
        }
        self.by_block = _by_block(self.ways)
        # In what is executed again nothing moves.
        self.inside: list[Mode] = [mode for mode in self.ways if mode != "offload"]
        # A block that is recomputed by itself is recomputed plainly.
        self.last_modes: list[Mode] = ["keep"] if longest == 1 else self.inside
        self.least = np.zeros((self.count, self.count), np.int64)
        for length in range(self.count):
            self._fill(length)

    def segments(self, items: list[tuple[Mode, int] | Segment]) -> Segments:
        """Return choices for all stages as segments of blocks."""
        found = _merged(items[:-1])
        return _of_blocks(found, self.gaps) if self.gaps[-2] else found

    def beyond(self, length: int) -> npt.NDArray[np.bool_]:
        """Tell which parts of `length + 1` stages have a gap in them, so that they can be no segment, by the first."""
        barred = self.gaps[length + 1 :] > self.gaps[: self.count - length]
        barred[-1] = False  # of the whole step, not of a segment
        return barred

    def item(self, mode: Mode, index: int) -> tuple[Mode, int]:
        """Return the choice of a mode, or of keeping plainly where the block does not have it."""
        return (mode if mode in self.has[index] else "keep"), index

    def _fill(self, length: int) -> None:
        """Compute the least memory of all parts of `length + 1` blocks from that of shorter ones."""
        least, starts = self.least, self.count - length
        if length == 0:
            found = np.min([self.ways[mode].last_peak for mode in self.last_modes], axis=0)
            found[self.beyond(length)] = FAR
            np.fill_diagonal(least, found)
            return
        # Recompute the blocks s..s+f as a segment, then the rest; the output of s+f is held meanwhile.
        down, right = least.strides
        shape = starts, min(length, self.longest)
        inside = as_strided(least, shape, (down + right, right))  # least[s, s + f]
        rest = as_strided(
            least[1:, length:], shape, (down + right, down)
        )  # [s + f + 1, s + length]
        cuts = rest + sliding_window_view(self.outputs, shape[1])[:starts]
        found = np.maximum(cuts, inside, out=cuts).min(axis=1)
        # Keep the block s, then the rest.
        rest = least.diagonal(length - 1)[1:]
        for mode in self.inside:
            way = self.ways[mode]
            np.minimum(found, way.leasts(np.array(self.waiting[length:]), rest), out=found)
        to_end = (self.keeping(mode, starts - 1, self.count - 1) for mode in self.ways)
        found[-1] = min(found[-1], *to_end)
        found[self.beyond(length)] = FAR
        np.fill_diagonal(least[:, length:], found)

    def modes(self, last: int) -> Iterable[Mode]:
        """Return the modes in which a block may be kept that is not the last of its part, by that last one."""
        return self.ways if last == self.count - 1 else self.inside

    def keeping(self, mode: Mode, start: int, last: int) -> int:
        """Return what the blocks ``start..last`` take if the first is kept in a mode."""
        rest = int(self.least[start + 1, last])
        return int(self.by_block[start][mode].least(self.waiting[last], rest))

    def cutting(self, start: int, last: int) -> Ints:
        """Return what they take if a segment to recompute begins with the first, by its last block."""
        stop = min(last, start + self.longest)
        rest: Ints = self.outputs[start:stop] + self.least[start + 1 : stop + 1, last]
        return np.maximum(rest, self.least[start, start:stop], out=rest)

    @property
    def peak(self) -> int:
        """A peak that no plan is below."""
        return int(self.least[0, -1])

    @property
    def plan(self) -> Segments:
        """A plan that reaches the least peak."""
        return self.segments(self._choose(0, self.count - 1))

    def _choose(self, start: int, last: int) -> list[tuple[Mode, int] | Segment]:
        items: list[tuple[Mode, int] | Segment] = []
        while start < last:
            least = self.least[start, last]
            modes = [m for m in self.modes(last) if self.keeping(m, start, last) == least]
            if modes:
                items.append(self.item(modes[0], start))
                start += 1
                continue
            # Of the cuts with the least peak the most even one nests the least.
            cuts = np.flatnonzero(self.cutting(start, last) == least)
            cut = start + int(cuts[np.abs(2 * cuts + 1 - (last - start)).argmin()])
            items.append(_segment(start, cut + 1, self._choose(start, cut)))
            start = cut + 1
        mode = min(self.last_modes, key=lambda mode: self.by_block[last][mode].last_peak)
        return [*items, self.item(mode, last)]


class _Table:
    """Least times of parts of a chain for all amounts of memory up to `top` bytes, and a little more.

    With blocks ``s..t`` (both included), ``cost(s, t)[m]`` is the least time of their forward and backward when `m`
    slots of memory are free beside the input of `s`. The first block is kept in some mode, or the first blocks
    ``s..r-1`` are a segment to recompute: ``cost(s, t)[m] = forward(s..r-1) + cost(r, t)[m - output(r-1)] +
    cost(s, r-1)[m]``. What depends on `r` and `t` alone is stored shifted, so that one addition of two matrices and
    one minimum do for all `s`, or for all `r`. Parts are those to the end, and those that a segment can be.

    Args:
        exact: The chain.
        top: The highest budget.
        longest: The most blocks that a segment to recompute may have.
    """

    def __init__(self, exact: _Least, top: int, longest: int) -> None:
        self.exact = exact
        self._choices: dict[tuple[int, int, int, int | None], Mode | int] = {}
        self.end = end = exact.count - 1
        self.longest = longest = min(longest, end)
        pairs = sum((end - length) * (length + 1) for length in range(longest))
        most = PAIRS_BY_BLOCKS * end // max(pairs, 1)
        self.slots = slots = min(MOST_SLOTS, max(LEAST_SLOTS, most))
        self.spare = round(SPARE * slots) + 1
        self.unit = max(top, 1) / (slots - self.spare)
        self.memory = np.arange(slots + 1)
        self.forward = exact.forward.astype(np.float32)
        self.waiting = [round(waiting / self.unit) for waiting in exact.waiting]
        outputs = self._rounded(exact.outputs)
        # Slots of each block's input; those of the first are its caller's.
        self.before = np.array([0, *outputs[:-1]])
        self.ways = {mode: self._way(way, outputs) for mode, way in exact.ways.items()}
        self.by_block = _by_block(self.ways)
        # By mode and block, where to find what those after it cost, with less memory for what it holds; and what it and
        # they cost, with less for its input.
        rows = np.arange(exact.count)[:, None] * (slots + 1) + self.memory
        self.places = {mode: rows - way.held[:, None] for mode, way in self.ways.items()}
        self.inputs = rows - self.before[:, None]
        # By length and first block: costs[length, s][m] = cost(s, s + length)[m] + forward(0..s-1), and the same
        # shifted by the input of s, so that m counts from before that.
        self.costs = np.empty((longest, end, slots + 1), np.float32)
        self.shifted = np.empty_like(self.costs)
        for length in range(longest):
            self._fill(length)
        # The same of all that follows, by first block.
        self.costs_to_end = np.empty((end + 1, slots + 1), np.float32)
        self.shifted_to_end = np.empty_like(self.costs_to_end)
        for start in reversed(range(end + 1)):
            self._fill_to_end(start)

    def _rounded(self, sizes: Ints) -> Ints:
        """Return sizes in slots, such that each sum of neighbours is right to within one slot."""
        ends = np.rint(np.cumsum(sizes) / self.unit).astype(np.int64)
        return np.diff(ends, prepend=0)

    def _way(self, way: _Way, outputs: Ints) -> _Way:
        """Return a way with memory in slots."""
        return _Way(
            # No less than the output, unless the input is let go.
            held=np.where(
                way.held < self.exact.outputs,
                self._rounded(way.held),
                np.maximum(self._rounded(way.held), outputs),
            ),
            forward_peak=way.forward_peak / self.unit,
            backward_peak=way.backward_peak / self.unit,
            time=way.time.astype(np.float32),
            last_time=way.last_time.astype(np.float32),
            last_peak=np.rint(way.last_peak / self.unit),
        )

    def _fill(self, length: int) -> None:
        """Compute the costs of all parts of `length + 1` blocks from those of shorter ones."""
        starts = self.end - length
        costs, shifted = self.costs[length, :starts], self.shifted[length, :starts]
        forward, found = self.forward[:starts, None], np.empty_like(costs)
        costs.fill(np.inf)
        for cut in range(length):
            # Recompute the blocks s..s+cut as a segment, then the rest.
            rest = self.shifted[length - cut - 1, cut + 1 : cut + 1 + starts]
            np.add(rest, self.costs[cut, :starts], out=found)
            np.minimum(costs, found, out=costs)
        costs -= forward
        for mode in self.exact.inside if length else self.exact.last_modes:
            # Keep the block s, then the rest, whose costs contain the forward of s.
            way = self.ways[mode]
            if length:
                rest = self.costs[length - 1, 1 : 1 + starts]
                rest.take(self.places[mode][:starts], out=found, mode="clip")
                found += (way.time[:starts] - np.diff(self.forward[: starts + 1]))[:, None]
                least = np.rint(way.leasts(self.waiting[length : self.end]))
            else:
                np.add(way.last_time[:starts, None], forward, out=found)
                least = way.last_peak[:starts]
            found[self.memory < least[:, None]] = np.inf
            np.minimum(costs, found, out=costs)
        costs[self.exact.beyond(length)[:starts]] = np.inf
        costs.take(self.inputs[:starts], out=shifted, mode="clip")
        np.copyto(shifted, np.inf, where=self.memory < self.before[:starts, None])

    def _fill_to_end(self, start: int) -> None:
        """Compute the costs of all blocks from `start` on, from those of later ones."""
        row, forward = self.costs_to_end[start], self.forward[start]
        row.fill(np.inf)
        if start == self.end:
            for mode in self.exact.last_modes:
                way = self.by_block[start][mode]
                least = int(way.last_peak)
                np.minimum(row[least:], way.last_time + forward, out=row[least:])
        else:
            cuts = min(self.end - start, self.longest)
            rests = self.shifted_to_end[start + 1 : start + 1 + cuts]
            np.min(rests + self.costs[:cuts, start], axis=0, out=row)
            row -= forward
            rest = self.costs_to_end[start + 1]
            for way in self.by_block[start].values():
                least = round(way.least(self.waiting[self.end]))
                if least < len(row):
                    time = np.float32(way.time) - (self.forward[start + 1] - forward)
                    kept = rest[self._after(self.memory[least:], way)] + time
                    np.minimum(row[least:], kept, out=row[least:])
        shifted, before = self.shifted_to_end[start], self.before[start]
        shifted[:before] = np.inf
        shifted[before:] = row[: len(row) - before]

    def _after(self, slots: Any, way: _Way) -> Any:
        """Return the slots that are left for what comes after a block; more than before where its input is let go."""
        return np.clip(slots - way.held, 0, self.slots)

    def slot(self, budget: int) -> int:
        """Return a slot at and below which plans keep a budget, as far as rounding goes."""
        return min(self.slots, int(budget / self.unit) + self.spare)

    def plans(self, budget: int) -> Iterator[Segments]:
        """Yield those of the fastest plans of each slot that keep a budget, fastest first."""
        slot, times, exact = self.slot(budget), self.costs_to_end[0], self.exact
        while slot >= 0 and np.isfinite(times[slot]):
            # The least memory of this time.
            slot = int(np.searchsorted(-times[: slot + 1], -times[slot]))
            items, peak = self._choose(0, self.end, slot)
            if peak <= budget:
                yield exact.segments(items)
            # What is chosen is what rounding favours, in a long chain by many slots; half of them is not too far.
            slot -= max(int((peak - budget) / self.unit / 2), 1)

    def plan_within(self, slot: int, budget: int) -> tuple[float, Segments]:
        """Return a plan that keeps a budget to the byte, chosen by the costs of a slot, and its time by these."""
        items, _ = self._choose(0, self.end, slot, budget)
        return float(self.costs_to_end[0, slot]), self.exact.segments(items)

    def _choose(
        self, start: int, last: int, slot: int, budget: int | None = None
    ) -> tuple[list[tuple[Mode, int] | Segment], int]:
        """Make the choices behind ``cost(start, last)[slot]``.

        Args:
            start: The first block.
            last: The last block.
            slot: The slot.
            budget: Bytes that each choice has to keep; by default slots decide what fits.

        Returns:
            The choices, block by block, and their peak in bytes.
        """
        exact, items = self.exact, list[tuple[Mode, int] | Segment]()
        held = peak = 0
        while start < last:
            free = None if budget is None else budget - held
            choice = self._choice(start, last, slot, free)
            if isinstance(choice, int):
                inside, most = self._choose(start, choice, slot, free)
                items.append(_segment(start, choice + 1, inside))
                peak = max(peak, held + most)
                held += int(exact.outputs[choice])
                start = choice + 1
                slot = max(slot - int(self.before[start]), 0)
            else:
                items.append(exact.item(choice, start))
                way = exact.by_block[start][choice]
                peak = max(peak, held + way.least(exact.waiting[last]))
                held += way.held
                slot = int(self._after(slot, self.by_block[start][choice]))
                start += 1
        ways, free = (self.by_block, slot) if budget is None else (exact.by_block, budget - held)
        fitting = [mode for mode in exact.last_modes if ways[last][mode].last_peak <= free]
        mode = min(fitting, key=lambda mode: exact.by_block[last][mode].last_time)
        peak = max(peak, held + exact.by_block[last][mode].last_peak)
        return [*items, exact.item(mode, last)], peak

    def _choice(self, start: int, last: int, slot: int, free: int | None) -> Mode | int:
        """Return the mode to keep a block in, or the last block of the segment to recompute that begins with it.

        Args:
            start: The block.
            last: The last one of those after it.
            slot: The slot.
            free: Bytes that are left; None if slots decide what fits.
        """
        key = start, last, slot, free
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._chosen(start, last, slot, free)
        return choice

    def _chosen(self, start: int, last: int, slot: int, free: int | None) -> Mode | int:
        exact, forward = self.exact, self.forward[start]
        count = min(last - start, self.longest)
        if last == self.end:
            rests = self.shifted_to_end[start + 1 : start + 1 + count, slot]
            rest = self.costs_to_end[start + 1]
        else:
            # Of the parts from each block after `start` on to `last`.
            lengths = np.arange(last - start - 1, last - start - 1 - count, -1)
            rests = self.shifted[lengths, last - lengths, slot]
            rest = self.costs[last - start - 1, start + 1]
        times = self.costs[:count, start, slot] - forward + rests
        if free is not None:
            np.minimum(times, NEVER, out=times)
            times[exact.cutting(start, last) > free] = np.inf
        cut = int(times.argmin())
        best, chosen = times[cut], None
        for mode in exact.modes(last):
            way = self.by_block[start][mode]
            in_slots = round(way.least(self.waiting[last])) <= slot
            fits = in_slots if free is None else exact.keeping(mode, start, last) <= free
            if fits:
                time = rest[self._after(slot, way)] + way.time
                time = min(time - (self.forward[start + 1] - forward), NEVER)
                if time <= best:
                    best, chosen = time, mode
        return start + cut if chosen is None else chosen


def _segment(start: int, stop: int, items: list[tuple[Mode, int] | Segment]) -> Segment:
    """Return the segment to recompute whose inside was chosen as `items`."""
    children = _merged(items)
    plain = len(children) == 1 and children[0].mode == "keep"
    return Segment(start, stop, () if plain else children)


def _of_blocks(segments: Segments, gaps: Ints) -> Segments:
    """Return segments of stages as segments of the blocks among them, by how many gaps are before each stage."""
    found = []
    for segment in segments:
        start, stop = (edge - int(gaps[edge]) for edge in (segment.start, segment.stop))
        if start < stop:
            found.append(
                Segment(start, stop, _of_blocks(segment.children, gaps), mode=segment.mode)
            )
    return tuple(found)


def _merged(items: list[tuple[Mode, int] | Segment]) -> Segments:
    """Return choices as segments; neighbours that are kept in the same mode are one, unless they move."""
    segments: list[Segment] = []
    for item in items:
        if isinstance(item, Segment):
            segments.append(item)
            continue
        mode, index = item
        if segments and segments[-1].mode == mode != "offload":
            segments[-1] = Segment(segments[-1].start, index + 1, mode=mode)
        else:
            segments.append(Segment(index, index + 1, mode=mode))
    return tuple(segments)
