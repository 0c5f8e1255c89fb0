"""Random chains of costs, all plans of a small one, and a solver that is slow and sure."""

import random
from dataclasses import replace
from functools import cache

import numpy as np

from blockhooks.costs import BlockCosts, ChainProfile, ModeCosts
from blockhooks.plan import Segment


def random_profile(seed, blocks, *, modes=False, even=False):
    """A chain of unequal blocks: widths, kept bytes, transients and times differ from block to block."""
    draw = random.Random(seed)
    made = []
    width, waits = draw.randint(2, 8), draw.choice((0, 1))
    for index in range(blocks):
        width = width if even else draw.randint(2, 8)
        kept = draw.randint(width, 12 * width)
        forward, peak = draw.randint(4, 40), kept + width + draw.randint(0, 12)
        lighter = ModeCosts(
            mode="selective",
            kept=kept // 2,
            forward_peak=peak,
            backward_peak=kept + 2 * width,
            extra=forward * draw.choice((0.05, 0.2)),
        )
        made.append(
            BlockCosts(
                name=f"block {index}",
                forward=forward,
                backward=2 * forward + draw.randint(0, 9),
                recompute=forward * draw.choice((0.6, 1.0)),
                output=width,
                kept=kept,
                forward_peak=peak,
                backward_peak=kept + 2 * width + draw.randint(0, 20),
                gradient=waits * width,
                modes=(lighter,) if modes else (),
            )
        )
    return ChainProfile(blocks=tuple(made), tail=5.0)


def with_offload(profile, seed):
    """The same chain with blocks that may move away, most of them together with the output of the block before."""
    draw = random.Random(seed)
    blocks, before = [], 0
    for block in profile.blocks:
        kept, back = draw.randint(0, block.kept // 4), block.kept + 2 * block.output
        moved = ModeCosts(
            mode="offload",
            kept=kept,
            forward_peak=kept + block.output + draw.randint(0, block.kept),
            backward_peak=back + draw.randint(0, 6),
            extra=block.forward * draw.choice((0.3, 0.9, 2.0)),
            let_go=draw.choice((before, before, 0)),
        )
        lighter = block.modes if draw.random() < 0.9 else ()
        blocks.append(replace(block, modes=(*lighter, moved)))
        before = block.output
    return replace(profile, blocks=tuple(blocks))


def with_gaps(profile, seed, *, before=range(10_000)):
    """The same chain with something held outside of the blocks: in front of some of them, and after the last."""
    draw = random.Random(seed)
    blocks, outputs = [], [0, *(block.output for block in profile.blocks)]
    for index, block in enumerate(profile.blocks):
        if index in before and draw.random() < 0.6:
            gap = draw.randint(-outputs[index], 20)
            peak, passing = gap + draw.randint(0, 40), draw.randint(0, 9)
            block = replace(block, gap=gap, gap_peak=peak, passing=passing)
        blocks.append(block)
    peaks = {name: draw.randint(0, 80) for name in ("tail_peak", "tail_forward")}
    return replace(profile, blocks=tuple(blocks), **peaks)


def with_side_inputs(profile, seed):
    """The same chain with blocks that put something into a cache, are given something else, or need more at first."""
    draw = random.Random(seed)
    blocks = []
    for index, block in enumerate(profile.blocks):
        last = draw.choice((None, *range(index, len(profile))))
        placed, carried, passing = (draw.choice((0, draw.randint(1, 20))) for _ in range(3))
        unkept = draw.randint(0, placed)
        side = {"placed": placed, "unkept": unkept, "carried": carried, "carried_to": last}
        blocks.append(replace(block, passing=passing, **side))
    return replace(profile, blocks=tuple(blocks))


def all_plans(start, stop, modes=("keep",), depth=3):
    """Every plan of the blocks ``start..stop-1``, with segments nested up to `depth` levels."""

    @cache
    def plans(start, depth, stop):
        if start == stop:
            return [()]
        found = [
            (Segment(start, start + 1, mode=mode), *rest)
            for mode in modes
            for rest in plans(start + 1, depth, stop)
        ]
        for middle in range(start + 1, stop + 1) if depth else ():
            insides = [(), *(i for i in plans(start, depth - 1, middle) if not _all_kept(i))]
            found += [
                (Segment(start, middle, inside), *rest)
                for inside in insides
                for rest in plans(middle, depth, stop)
            ]
        return found

    return plans(start, depth, stop)


def _all_kept(segments):
    return all(segment.mode == "keep" for segment in segments)


def least_times(profile):
    """The least time of any plan for each number of bytes, by a dynamic programme that goes byte by byte."""
    tail = BlockCosts(forward=profile.tail, backward=0, output=0, kept=0)
    blocks, most = (*profile.blocks, tail), profile.plain.peak
    costs = {}

    def shifted(times, nbytes):
        times = np.concatenate([np.full(max(nbytes, 0), np.inf), times[max(-nbytes, 0) :]])
        return np.pad(times[: most + 1], (0, max(-nbytes, 0)), "edge")

    def fits(times, nbytes):
        return np.where(np.arange(most + 1) < nbytes, np.inf, times)

    for start in reversed(range(len(blocks))):
        for last in range(start, len(blocks)):
            block = blocks[start]
            waiting = blocks[last].gradient if last < len(profile) else 0
            found = []
            for mode in ("keep", *(costs.mode for costs in block.modes)):
                if mode == "offload" and last < len(profile):
                    continue  # nothing moves in what is executed again
                kept, forward_peak, backward_peak, extra = block.figures(mode)
                time = block.backward + extra
                if start == last:  # the recompute ends early here
                    again = min(block.recompute_peak, forward_peak)
                    least = max(forward_peak, backward_peak, again + waiting)
                    found.append(fits(np.full(most + 1, time + block.recompute_time), least))
                else:
                    rest = shifted(costs[start + 1, last], kept + block.output)
                    least = max(forward_peak + waiting, backward_peak)
                    found.append(fits(rest + time + block.forward, least))
            for middle in range(start + 1, last + 1):
                rest = shifted(costs[middle, last], blocks[middle - 1].output)
                forward = sum(block.forward for block in blocks[start:middle])
                found.append(forward + rest + costs[start, middle - 1])
            costs[start, last] = np.min(found, axis=0)
    return costs[0, len(profile)]
