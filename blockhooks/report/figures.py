"""The figures of a profile: what each block cost, over any number of steps, in bounded memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

__all__ = ["PHASES", "BlockStep", "Figures", "StepFigures", "compare", "scalars"]

PHASES: Final = ("forward", "recompute", "backward")

# Steps that are remembered one by one: enough for a p95 that is within a few points of the true one.
SAMPLE: Final = 512
# Steps at the beginning and at the end that are compared for drift, and the factors that are told.
WINDOW: Final = 16
DRIFT_FACTOR: Final = 1.5
OUTLIER_FACTOR: Final = 2.0
OUTLIERS: Final = 16


@dataclass(slots=True)
class BlockStep:
    """What one block did in one step.

    Attributes:
        index: The block's index in its run.
        name: Its readable name.
        mode: What became of what autograd saved: ``"keep"``, or the mode of the segment that did not keep it.
        ms: Milliseconds of forward, recompute and backward; time within another block is that block's alone.
        calls: Executions in each of these phases.
        kept_bytes: Distinct storages that autograd keeps for this block besides x, parameters and side inputs.
        dropped_bytes: The same that a segment dropped, to be recomputed, or moved elsewhere.
        x_bytes: Bytes of the block's input that are kept for it or for the segment that begins with it.
        flops: Floating-point operations in each phase, where they were counted.
    """

    index: int
    name: str
    mode: str = "keep"
    ms: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    calls: list[int] = field(default_factory=lambda: [0, 0, 0])
    kept_bytes: int = 0
    dropped_bytes: int = 0
    x_bytes: int = 0
    flops: list[int] | None = None

    def take_counted(self, other: BlockStep) -> None:
        """Take over from another step what was counted there."""
        self.mode = other.mode
        self.kept_bytes, self.dropped_bytes = other.kept_bytes, other.dropped_bytes
        self.x_bytes = other.x_bytes


@dataclass(slots=True)
class StepFigures:
    """What one step cost.

    Attributes:
        number: The step's number, from 0, with those that were not recorded.
        wall_ms: From the beginning of the first run to the end of the last backward.
        blocks: What each block did, by name.
        tokens: Tokens that went through the first block, where x tells.
    """

    number: int
    wall_ms: float
    blocks: dict[str, BlockStep]
    tokens: int | None = None

    def sums_ms(self) -> list[float]:
        """Milliseconds of all blocks in each phase, and of the rest."""
        sums = [sum(block.ms[phase] for block in self.blocks.values()) for phase in range(3)]
        return [*sums, self.wall_ms - sum(sums)]


@dataclass(slots=True)
class _Total:
    """Sums over all steps for one block."""

    last: BlockStep
    ms: list[float]
    calls: list[int]

    def add(self, block: BlockStep) -> None:
        # Not every step counts operations.
        block.flops = self.last.flops if block.flops is None else block.flops
        self.last = block
        for phase in range(3):
            self.ms[phase] += block.ms[phase]
            self.calls[phase] += block.calls[phase]


class Figures:
    """Statistics over steps; their size depends on the number of blocks, not on that of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall_ms = 0.0
        self._tokens: int | None = None
        self._totals: dict[str, _Total] = {}
        self._sample: list[StepFigures] = []
        self._early: list[StepFigures] = []
        self._late: deque[StepFigures] = deque(maxlen=WINDOW)
        self._usual: dict[str, list[float]] = {}
        self._outliers: deque[dict[str, Any]] = deque(maxlen=OUTLIERS)
        # A generator of its own: a profile must not draw from the user's.
        self._random = random.Random(0)

    def add(self, step: StepFigures) -> None:
        """Take in one more step, unless no block ran in it."""
        if not step.blocks:
            return
        self._note_outliers(step)
        self.steps += 1
        self._wall_ms += step.wall_ms
        self._tokens = step.tokens
        for name, block in step.blocks.items():
            if name in self._totals:
                self._totals[name].add(block)
            else:
                self._totals[name] = _Total(block, list(block.ms), list(block.calls))
        if len(self._early) < WINDOW:
            self._early.append(step)
        self._late.append(step)
        if len(self._sample) < SAMPLE:
            self._sample.append(step)
        elif (place := self._random.randrange(self.steps)) < SAMPLE:
            self._sample[place] = step

    def _note_outliers(self, step: StepFigures) -> None:
        if self.steps % WINDOW == 0:  # medians cost too much for every step
            self._usual = {
                name: [_median_ms(self._late, name, phase) for phase in range(3)]
                for name in (self._totals if self.steps else ())
            }
        for name, block in step.blocks.items():
            usual = self._usual.get(name, [0.0] * 3)
            for phase, ms, ms_before in zip(PHASES, block.ms, usual, strict=True):
                if ms_before and ms > OUTLIER_FACTOR * ms_before:
                    self._outliers.append(
                        {
                            "step": step.number,
                            "block": name,
                            "phase": phase,
                            "ms": ms,
                            "usual_ms": ms_before,
                        }
                    )

    def drift(self) -> list[dict[str, Any]]:
        """Return the blocks that became slower since the beginning, with medians of the first and the last steps."""
        if self.steps < 2 * WINDOW:
            return []
        found = []
        for name in self._totals:
            for index, phase in enumerate(PHASES):
                before = _median_ms(self._early, name, index)
                now = _median_ms(self._late, name, index)
                if before and now > DRIFT_FACTOR * before:
                    found.append(
                        {"block": name, "phase": phase, "first_ms": before, "last_ms": now}
                    )
        return found

    def blocks(self) -> list[dict[str, Any]]:
        """Return the figures of each block; times are per step."""
        return [self._block(name, total) for name, total in self._totals.items()]

    def _block(self, name: str, total: _Total) -> dict[str, Any]:
        last = total.last
        samples = [step.blocks[name].ms for step in self._sample if name in step.blocks]
        return {
            "index": last.index,
            "name": name,
            "mode": last.mode,
            "calls": dict(zip(PHASES, total.calls, strict=True)),
            "ms": {
                phase: _spread(total.ms[i] / self.steps, [ms[i] for ms in samples])
                for i, phase in enumerate(PHASES)
            },
            "kept_bytes": last.kept_bytes,
            "dropped_bytes": last.dropped_bytes,
            "x_bytes": last.x_bytes,
            "flops": None if last.flops is None else dict(zip(PHASES, last.flops, strict=True)),
        }

    def totals(self) -> dict[str, Any]:
        """Return the figures of a whole step."""
        lasts = [total.last for total in self._totals.values()]
        sums = [sum(total.ms[i] for total in self._totals.values()) for i in range(3)]
        sums.append(self._wall_ms - sum(sums))
        columns = list(zip(*(step.sums_ms() for step in self._sample), strict=True))
        ms = {
            phase: _spread(
                sums[i] / self.steps if self.steps else 0.0, columns[i] if columns else []
            )
            for i, phase in enumerate((*PHASES, "rest"))
        }
        ms["wall"] = _spread(
            self._wall_ms / self.steps if self.steps else 0.0,
            [step.wall_ms for step in self._sample],
        )
        flops = [last.flops for last in lasts if last.flops is not None]
        model = sum(f[0] + f[2] for f in flops) if flops else None
        hardware = sum(map(sum, flops)) if flops else None
        seconds = ms["wall"]["mean"] / 1e3
        return {
            "ms": ms,
            "kept_bytes": sum(last.kept_bytes for last in lasts),
            "dropped_bytes": sum(last.dropped_bytes for last in lasts),
            "x_bytes": sum(last.x_bytes for last in lasts),
            "model_flops": model,
            "hardware_flops": hardware,
            "model_flops_per_second": _rate(model, seconds),
            "hardware_flops_per_second": _rate(hardware, seconds),
            "tokens": self._tokens,
            "tokens_per_second": _rate(self._tokens, seconds),
        }

    def to_dict(self, memory: dict[str, Any] | None) -> dict[str, Any]:
        """Return all figures as plain numbers, strings, lists and dicts.

        Args:
            memory: What was measured of live bytes: ``peak_bytes``, and ``block_peak_bytes`` by name.
        """
        peaks = {} if memory is None else memory["block_peak_bytes"]
        peak = None if memory is None else memory["peak_bytes"]
        return {
            "steps": self.steps,
            "totals": {**self.totals(), "peak_bytes": peak},
            "blocks": [
                {**block, "peak_bytes": peaks.get(block["name"])} for block in self.blocks()
            ],
            "drift": self.drift(),
            "outliers": list(self._outliers),
        }


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or not seconds else count / seconds


def _median_ms(steps: Iterable[StepFigures], name: str, phase: int) -> float:
    return median([step.blocks[name].ms[phase] for step in steps if name in step.blocks] or [0.0])


def _spread(mean: float, values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {"mean": mean, "p50": _quantile(ordered, 0.5), "p95": _quantile(ordered, 0.95)}


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Return a quantile of sorted values, linear between neighbours."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def scalars(figures: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a profile that are numbers, by paths such as ``"blocks/3: Layer/recompute_ms"``."""
    found = _scalars("step", figures["totals"])
    for block in figures["blocks"]:
        found |= _scalars(f"blocks/{block['name']}", block)
    return found


def _scalars(path: str, figures: dict[str, Any]) -> dict[str, float]:
    times = {f"{path}/{phase}_ms": spread["mean"] for phase, spread in figures["ms"].items()}
    counts = {
        f"{path}/{key}": value
        for key, value in figures.items()
        if key.endswith(("_bytes", "_flops")) and value is not None
    }
    return times | counts


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare the figures of two profiles.

    Args:
        ours: Figures, as of ``profile.to_dict()``.
        theirs: The figures that they are divided by.

    Returns:
        Ratios of mean times and differences of bytes: ``"totals"`` for a step, and ``"blocks"`` for those that both
        profiles have, by name. A ratio is None where the other figure is zero.
    """
    others = {block["name"]: block for block in theirs["blocks"]}
    return {
        "totals": _difference(ours["totals"], theirs["totals"]),
        "blocks": [
            {
                "index": block["index"],
                "name": block["name"],
                **_difference(block, others[block["name"]]),
            }
            for block in ours["blocks"]
            if block["name"] in others
        ],
    }


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    ratios = {
        f"{phase}_ratio": _ratio(ours["ms"][phase]["mean"], theirs["ms"][phase]["mean"])
        for phase in ours["ms"]
    }
    differences = {
        f"{key}_more": ours[key] - theirs[key]
        for key in ("kept_bytes", "dropped_bytes", "x_bytes", "peak_bytes")
        if ours[key] is not None and theirs[key] is not None
    }
    return {**ratios, **differences}


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None
