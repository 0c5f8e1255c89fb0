"""Compare times side by side: interleaved rounds, CPU seconds of this process, medians, ratios to a base."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable


def interleaved(
    contenders: dict[str, Callable[[], object]], rounds: int = 41, repeat: int = 1
) -> dict[str, float]:
    """Time functions in turn, in another order each round, and return the median seconds of one call of each.

    On a shared machine the wall clock shows mostly what others do, so CPU time is taken; the garbage collector runs
    between the measurements and never inside one.

    Args:
        contenders: Functions by name.
        rounds: How often each is measured.
        repeat: Calls per measurement, for functions that take less than some 100 us.
    """
    for function in contenders.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            function = contenders[name]
            gc.collect()
            gc.disable()
            begin = time.process_time_ns()
            for _ in range(repeat):
                function()
            seconds[name].append((time.process_time_ns() - begin) / 1e9 / repeat)
            gc.enable()
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def paired(
    base: Callable[[], object], other: Callable[[], object], rounds: int = 41
) -> tuple[float, float]:
    """Return the median ratio of `other` to `base`, each of its calls between two of the base, and half the spread.

    The spread is the distance between the quartiles: what a repetition of the measurement may differ by.
    """

    def seconds(function: Callable[[], object]) -> float:
        gc.collect()
        gc.disable()
        begin = time.process_time_ns()
        function()
        taken = (time.process_time_ns() - begin) / 1e9
        gc.enable()
        return taken

    base(), other()
    before, ratios = seconds(base), []
    for _ in range(rounds):
        between, after = seconds(other), seconds(base)
        ratios.append(2 * between / (before + after))
        before = after
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, (high - low) / 2


def table(rows: list[tuple[str, str, str]]) -> str:
    """Lay out what was measured, its figure, and what it should be."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {target:<{widths[2]}}".rstrip()
        for name, figure, target in rows
    )
