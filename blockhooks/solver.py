"""The fastest plan that keeps a memory budget.

Three searches, and the best of what they find by exact prediction:

* nested recompute on a chain of unequal blocks, by the dynamic programme of rotor, with several modes per block. It
  works on memory in slots. Sizes are rounded such that sums of neighbours stay right to half a slot, and what comes
  out is predicted to the byte before it is taken;
* the first k blocks recomputed and the rest kept, exactly, for every k;
* where nothing else fits, the plan of the least memory.

References:
    Beaumont et al. (2019), Optimal checkpointing for heterogeneous chains, hal-02352969 (rotor).
    Zhao et al. (2023), Rockmate, PMLR 202 (several modes per block).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from blockhooks.costs import (
    BlockCosts,
    ChainProfile,
    Prediction,
    budget_in_bytes,
    format_bytes,
    format_table,
    predict,
)
from blockhooks.errors import BudgetError, PlanError
from blockhooks.plan import MAX_DEPTH, Mode, Segment, binomial, every, first

__all__ = ["Plan", "Solver", "solve"]

Floats = npt.NDArray[np.float32]
Segments = tuple[Segment, ...]

# The memory axis is divided anew for budgets below each quarter of the one before, so that at least a quarter of the
# slots lies below every budget.
RUNG: Final = 4
# The time of the dynamic programme goes with blocks³ · slots.
MOST_BLOCKS: Final = 256
MOST_SLOTS: Final = 2000
LEAST_SLOTS: Final = 240
SLOTS_BY_BLOCKS: Final = 28_000


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
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the plan that `save` wrote.

        Raises:
            PlanError: If the file holds no plan.
        """
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

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
            ``floor`` (bytes) and ``plan``. Also if the budget is not one.
    """
    return Solver(profile).solve(memory_budget)


class Solver:
    """Looks for plans over one profile; what several budgets have in common is computed once.

    Args:
        profile: What the blocks cost.
        apart: Whether each segment has to be a single block, because somebody's own loop calls the blocks one by one.
    """

    def __init__(self, profile: ChainProfile, *, apart: bool = False) -> None:
        self.profile, self.apart = profile, apart
        self._predictions: dict[Segments, Prediction] = {}
        self._tables: dict[int, _Table] = {}
        self._tops: dict[int, Plan | None] = {}

    @cached_property
    def plain(self) -> Plan:
        """The plan that keeps everything."""
        kept = (Segment(0, len(self.profile), mode="keep"),) if self.profile.blocks else ()
        return self.plan(kept)

    @cached_property
    def floor(self) -> Plan:
        """The plan of the least memory that was found, and the fastest of those that reach it."""
        least = min(self._family, key=lambda plan: (plan.peak, plan.time))
        return self._best(least.peak) or least

    @cached_property
    def _family(self) -> list[Plan]:
        """Plans for where little memory is left: exactly the least, or by rule where that would nest too deep."""
        n = len(self.profile)
        plans = [self.plain, self.plan(first(n)(n))]
        if self.apart:
            return plans
        if n <= MAX_DEPTH:
            return [*plans, self.plan(self._least[1])]
        sizes = [2**power for power in range(1, n.bit_length())]
        functions = [every(size) for size in sizes] + [
            binomial(slots) for slots in (3, 4, 6, *sizes[2:6])
        ]
        for function in functions:
            # So few slots may nest too deep for so many blocks.
            with contextlib.suppress(PlanError):
                plans.append(self.plan(function(n)))
        return plans

    def plan(self, segments: Segments, budget: int | None = None) -> Plan:
        """Return segments with what they cost."""
        time, peak = predict(self.profile, segments)
        plain_time, plain_peak = self.profile.plain
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
            floor = self.floor
            least, plain = floor.peak + beside, floor.plain_peak + beside
            held = f", of which {format_bytes(beside)} are held beside the blocks" if beside else ""
            error = BudgetError(
                f"a memory budget of {format_bytes(asked)} ({asked} bytes) cannot be kept: the least that a plan "
                f"reaches is {format_bytes(least)} ({least} bytes, {least / plain:.1%} of the plain loop's "
                f"{format_bytes(plain)}{held}), at {floor.slowdown:.2f} of its time, with the segments "
                f"{_brief(floor.segments)}. Raise the budget to at least that, or make the inputs smaller."
            )
            error.floor, error.plan = least, floor
            raise error
        return Plan(plan.segments, plan.time, plan.peak, plan.plain_time, plan.plain_peak, budget)

    def _best(self, budget: int) -> Plan | None:
        """Return the fastest plan that was found within a budget in bytes."""
        if budget >= self.plain.peak:
            return self.plain
        if budget < self._least[0]:
            return None
        rung = 0
        while budget * RUNG ** (rung + 1) <= self.plain.peak:
            rung += 1
        found = [self._on_rung(rung, budget), self._first(budget), *self._family]
        plans = [plan for plan in found if plan is not None and plan.peak <= budget]
        best = min(plans, key=_by_time, default=None)
        # A larger budget must not be slower for its coarser slots: what the next rung can do, this one can.
        below = self.plain.peak // RUNG ** (rung + 1)
        if below >= self._least[0] and (best is None or best.time > self._bound(below)):
            lower = self._top(rung + 1)
            plans = [plan for plan in (best, lower) if plan is not None]
            best = min(plans, key=_by_time, default=None)
        return best

    def _bound(self, budget: int) -> float:
        """Return a time that no plan within a budget can beat.

        What a plan keeps at the end of the forward is at most the budget; what it keeps less than the plain loop costs
        each block at least its cheapest rate of seconds for bytes.
        """
        rates = []
        for block in self.profile.blocks:
            held = block.kept + block.output
            rate = block.recompute_time / held if held else 0.0
            for costs in block.modes:
                if costs.kept < block.kept:
                    rate = min(rate, costs.extra / (block.kept - costs.kept))
            rates.append((rate, held))
        time = self.plain.time
        excess = sum(held for _, held in rates) - budget
        for rate, held in sorted(rates):
            time += rate * max(0, min(held, excess))
            excess -= held
        return time

    def _top(self, rung: int) -> Plan | None:
        """Return the fastest plan at the highest budget of a rung."""
        if rung not in self._tops:
            self._tops[rung] = self._best(self.plain.peak // RUNG**rung)
        return self._tops[rung]

    def _on_rung(self, rung: int, budget: int) -> Plan | None:
        """Return the fastest plan of the dynamic programme whose exact peak is within the budget."""
        if len(self.profile) > MOST_BLOCKS:
            return None
        if rung not in self._tables:
            self._tables[rung] = _Table(
                self.profile,
                self.plain.peak // RUNG**rung,
                longest=1 if self.apart else len(self.profile),
            )
        for segments in self._tables[rung].plans(budget):
            if max(segment.depth for segment in segments) <= MAX_DEPTH:
                plan = self.plan(segments)
                if plan.peak <= budget:
                    return plan
        return None

    @cached_property
    def _least(self) -> tuple[int, Segments]:
        """A peak that no plan is below, and the plan that reaches it, if that one could be executed."""
        if len(self.profile) > MOST_BLOCKS:
            return max(block.backward_peak for block in self.profile.blocks), ()
        return _least_memory(self.profile)

    @cached_property
    def _first_peaks(self) -> list[int]:
        return _first_peaks(self.profile)

    def _first(self, budget: int) -> Plan | None:
        """Return the plan that recomputes the fewest first blocks."""
        for count, peak in enumerate(self._first_peaks):
            if peak <= budget:
                return self.plan(first(count)(len(self.profile)))
        return None


def _by_time(plan: Plan) -> tuple[float, int]:
    return plan.time, plan.peak


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
    """Return the peak of ``first(count)`` for each count from none to all blocks."""
    blocks = profile.blocks
    states = [0, *accumulate(block.output for block in blocks)]
    holds = [0, *accumulate(block.kept + block.output for block in blocks)]
    recomputed = accumulate(
        (
            state
            + max(block.forward_peak, block.backward_peak, block.gradient + block.recompute_peak)
            for state, block in zip(states, blocks, strict=False)
        ),
        max,
        initial=0,
    )
    kept = [holds[-1] + profile.tail_peak]
    for hold, block in zip(reversed(holds[:-1]), reversed(blocks), strict=True):
        kept.append(max(kept[-1], hold + max(block.forward_peak, block.backward_peak)))
    return [
        max(before, state + after - hold)
        for before, state, after, hold in zip(
            recomputed, states, reversed(kept), holds, strict=True
        )
    ]


# ------------------------------------------------------------------------------------------- nested recompute (rotor)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run a block that is kept in some mode: what the dynamic programme needs of it."""

    mode: Mode
    held: int  # bytes after its forward
    forward_peak: int
    backward_peak: int
    time: float  # forward and backward
    last_time: float  # the same where a recompute ends early at this block
    last_peak: int


def _ways(block: BlockCosts) -> list[_Way]:
    modes: list[Mode] = ["keep", *(costs.mode for costs in block.modes)]
    ways = []
    for mode in modes:
        kept, forward_peak, backward_peak, extra = block.figures(mode)
        again = min(block.recompute_peak, forward_peak)
        ways.append(
            _Way(
                mode,
                kept + block.output,
                forward_peak,
                backward_peak,
                block.forward + block.backward + extra,
                block.recompute_time + block.backward + extra,
                max(backward_peak, forward_peak, again + block.gradient),
            )
        )
    return ways


def _stages(profile: ChainProfile) -> tuple[BlockCosts, ...]:
    """Return the blocks and, as one more, what a step does between their forward and their backward."""
    tail = BlockCosts(
        forward=profile.tail, backward=0.0, output=0, kept=0, forward_peak=profile.tail_peak
    )
    return (*profile.blocks, tail)


class _Table:
    """Least times of all parts of a chain for all amounts of memory up to `top` bytes.

    With blocks ``s..t`` (both included), ``cost(s, t)[m]`` is the least time of their forward and backward when `m`
    slots of memory are free beside the input of `s`. The first block is kept in some mode, or the first blocks
    ``s..r-1`` are a segment to recompute: ``cost(s, t)[m] = forward(s..r-1) + cost(r, t)[m - output(r-1)] +
    cost(s, r-1)[m]``. What depends on `r` and `t` alone is stored shifted, so that one addition of two matrices and
    one minimum do for all `s`.
    """

    def __init__(self, profile: ChainProfile, top: int, longest: int) -> None:
        self.longest = longest
        stages = _stages(profile)
        self.count = count = len(stages)
        self.slots = slots = min(MOST_SLOTS, max(LEAST_SLOTS, SLOTS_BY_BLOCKS // count))
        self.unit = max(top, 1) / slots
        self.ways = [_ways(stage) for stage in stages]
        # A block that is recomputed by itself is recomputed plainly.
        self.last_ways = [ways[:1] for ways in self.ways] if longest == 1 else self.ways
        self.forward = np.array([0, *accumulate(s.forward for s in stages)], np.float32)
        outputs = self._rounded([stage.output for stage in stages])
        self.before = [
            0,
            *outputs[:-1],
        ]  # slots of each block's input; those of the first are its caller's
        self.waiting = [*(self._slots(stage.gradient) for stage in stages[:-1]), 0]
        self.held = self._held(stages, outputs)
        # By length and first block: costs[length, s][m] = cost(s, s + length)[m] + forward(0..s-1), and the same
        # shifted by the input of s, so that m counts from before that.
        self.costs = np.empty((count, count, slots + 1), np.float32)
        self.shifted = np.empty_like(self.costs)
        for length in range(count):
            self._fill(length)

    def _slots(self, count: int) -> int:
        return round(count / self.unit)

    def _rounded(self, sizes: list[int]) -> list[int]:
        """Return sizes in slots, such that each sum of neighbours is right to within one slot."""
        ends = [0, *map(self._slots, accumulate(sizes))]
        return [after - before for before, after in pairwise(ends)]

    def _held(self, stages: tuple[BlockCosts, ...], outputs: list[int]) -> list[dict[Mode, int]]:
        held: list[dict[Mode, int]] = [{} for _ in stages]
        for mode in {way.mode for ways in self.ways for way in ways}:
            sizes = [stage.figures(mode)[0] + stage.output for stage in stages]
            for index, size in enumerate(self._rounded(sizes)):
                held[index][mode] = max(size, outputs[index])
        return held

    def _fill(self, length: int) -> None:
        """Compute the costs of all parts of `length + 1` blocks from those of shorter ones."""
        starts, width = self.count - length, self.slots + 1
        costs, shifted = self.costs[length, :starts], self.shifted[length, :starts]
        costs.fill(np.inf)
        shifted.fill(np.inf)
        forward = self.forward[:starts, None]
        if length:
            sums = np.empty((starts, width), np.float32)
            for first in range(min(length, self.longest)):
                # Recompute the blocks s..s+first as a segment, then the rest.
                rest = self.shifted[length - first - 1, first + 1 : first + 1 + starts]
                np.add(rest, self.costs[first, :starts], out=sums)
                np.minimum(costs, sums, out=costs)
            costs -= forward
        for start in range(starts):
            row, edge = costs[start], self.before[start]
            for way in self.ways[start] if length else self.last_ways[start]:
                if length:
                    least = self._least(way, start, start + length)
                    self._keep_first(way, start, self.shifted[length - 1, start + 1], least, row)
                else:
                    least = self._slots(way.last_peak)
                    np.minimum(row[least:], way.last_time + forward[start], out=row[least:])
            shifted[start, edge:] = row[: width - edge]

    def _keep_first(self, way: _Way, start: int, rest: Floats, least: int, row: Floats) -> None:
        if least < len(row):
            move = self.held[start][way.mode] - self.before[start + 1]
            time = np.float32(way.time) - (self.forward[start + 1] - self.forward[start])
            np.minimum(row[least:], rest[least - move : len(row) - move] + time, out=row[least:])

    def _least(self, way: _Way, start: int, last: int) -> int:
        """Slots that must be free to keep block `start` in this way, before `last`."""
        live = max(way.backward_peak / self.unit, way.forward_peak / self.unit + self.waiting[last])
        return max(round(live), self.held[start][way.mode])

    def plans(self, budget: int) -> Iterator[Segments]:
        """Yield plans, fastest first, that keep a budget as far as slots can tell; from a little above it on."""
        slot = min(self.slots, int(budget / self.unit) + 1 + self.slots // 100)
        times = self.costs[self.count - 1, 0]
        while slot >= 0 and np.isfinite(times[slot]):
            # The least memory of this time.
            slot = int(np.searchsorted(-times[: slot + 1], -times[slot]))
            yield _merged(self._choose(0, self.count - 1, slot)[:-1])
            slot -= 1

    def _choose(self, start: int, last: int, free: int) -> list[tuple[Mode, int] | Segment]:
        """Return the choices behind ``cost(start, last)[free]``, block by block."""
        items: list[tuple[Mode, int] | Segment] = []
        while start < last:
            lengths = np.arange(min(last - start, self.longest))
            parts = self.costs[lengths, start, free] - self.forward[start]
            parts += self.shifted[last - start - 1 - lengths, start + 1 + lengths, free]
            cut = int(parts.argmin())
            best: tuple[np.float32, Mode | None] = (parts[cut], None)
            for way in self.ways[start]:
                if free >= self._least(way, start, last):
                    at = free - self.held[start][way.mode]
                    time = self.costs[last - start - 1, start + 1, at] + np.float32(way.time)
                    time -= self.forward[start + 1] - self.forward[start]
                    if time <= best[0]:
                        best = (time, way.mode)
            if best[1] is None:
                inner = self._choose(start, start + cut, free)
                items.append(_segment(start, start + cut + 1, inner))
                start += cut + 1
                free -= self.before[start]
            else:
                items.append((best[1], start))
                free -= self.held[start][best[1]]
                start += 1
        fitting = [way for way in self.last_ways[last] if self._slots(way.last_peak) <= free]
        items.append((min(fitting, key=lambda way: way.last_time).mode, last))
        return items


def _segment(start: int, stop: int, items: list[tuple[Mode, int] | Segment]) -> Segment:
    """Return the segment to recompute whose inside was chosen as `items`."""
    children = _merged(items)
    plain = len(children) == 1 and children[0].mode == "keep"
    return Segment(start, stop, () if plain else children)


def _merged(items: list[tuple[Mode, int] | Segment]) -> Segments:
    """Return choices as segments; neighbours that are kept in the same mode are one."""
    segments: list[Segment] = []
    for item in items:
        if isinstance(item, Segment):
            segments.append(item)
            continue
        mode, index = item
        if segments and segments[-1].mode == mode:
            segments[-1] = Segment(segments[-1].start, index + 1, mode=mode)
        else:
            segments.append(Segment(index, index + 1, mode=mode))
    return tuple(segments)


# ------------------------------------------------------------------------------------------------- the least memory


def _least_memory(profile: ChainProfile) -> tuple[int, Segments]:
    """Return the peak of the plan of the least memory that nested recompute can reach, and that plan."""
    stages = _stages(profile)
    count = len(stages)
    outputs = np.array([stage.output for stage in stages], np.int64)
    ways = [_ways(stage) for stage in stages]
    least = np.zeros((count, count), np.int64)

    def peaks(start: int, last: int) -> npt.NDArray[np.int64]:
        # By the last block of a first segment to recompute; the output of that one is held meanwhile.
        rest: npt.NDArray[np.int64] = outputs[start:last] + least[start + 1 : last + 1, last]
        np.maximum(rest, least[start, start:last], out=rest)
        return rest

    def kept(start: int, last: int) -> tuple[int, Mode]:
        # The least with the first block kept, and in which mode.
        waiting = stages[last].gradient if last + 1 < count else 0
        rest = int(least[start + 1, last])
        return min(
            (max(way.forward_peak + waiting, way.backward_peak, way.held + rest), way.mode)
            for way in ways[start]
        )

    for start in reversed(range(count)):
        least[start, start] = min(way.last_peak for way in ways[start])
        for last in range(start + 1, count):
            least[start, last] = min(peaks(start, last).min(), kept(start, last)[0])

    def choose(start: int, last: int) -> list[tuple[Mode, int] | Segment]:
        items: list[tuple[Mode, int] | Segment] = []
        while start < last:
            peak, mode = kept(start, last)
            if peak == least[start, last]:
                items.append((mode, start))
                start += 1
                continue
            # Of the cuts with the least peak the most even one nests the least.
            cuts = np.flatnonzero(peaks(start, last) == least[start, last])
            cut = start + int(cuts[np.abs(2 * cuts + 1 - (last - start)).argmin()])
            items.append(_segment(start, cut + 1, choose(start, cut)))
            start = cut + 1
        items.append((min(ways[last], key=lambda way: way.last_peak).mode, last))
        return items

    return int(least[0, count - 1]), _merged(choose(0, count - 1)[:-1])
