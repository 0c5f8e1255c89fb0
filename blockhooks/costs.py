"""What the blocks of a run cost, and what a plan over them costs: seconds and bytes, without a tensor.

A `ChainProfile` holds the measured costs of each block. `predict` executes a plan on it, on paper, with the engine's
own rules: what is held when, what is executed again, and where a recompute ends early. `blockhooks.solver` looks for
the plan of a memory budget by these costs.

The bytes of a chain are counted above those of the run's input, which its caller holds. What a step does outside of its
blocks is in the gaps, one before each block and one after the last: embedding, what lies between stacks, head and loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from blockhooks.errors import BlockhooksError, BudgetError
from blockhooks.plan import Mode, Segment, check_plan

__all__ = [
    "BlockCosts",
    "ChainProfile",
    "ModeCosts",
    "Prediction",
    "budget_in_bytes",
    "check_profile",
    "format_bytes",
    "format_table",
    "load_json",
    "predict",
    "save_json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCosts:
    """What a block costs in a mode other than plain keeping.

    Attributes:
        mode: ``"selective"`` or ``"offload"``.
        kept: Bytes held from the forward to the backward, without the block's input and output.
        forward_peak: Most bytes at a time in the forward; at least ``kept`` and the output.
        backward_peak: Most bytes at a time in the backward, those kept included.
        extra: Seconds more than keeping takes, most of them in the backward.
        let_go: Bytes of the block's input that are held neither, from the forward to the backward: they are away too.
        lingering: How many of these are held to the end of the step's forward, by the model's own code.
        unkept: Bytes of what the block puts into its side inputs that are not among those kept; by default as many as
            where it is kept plainly.
    """

    mode: Mode
    kept: int
    forward_peak: int = 0
    backward_peak: int = 0
    extra: float = 0.0
    let_go: int = 0
    lingering: int = 0
    unkept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """What one block costs. Bytes are above those held before the block, its input among them.

    Attributes:
        name: For tables.
        forward: Seconds of the forward.
        backward: Seconds of the backward.
        output: Bytes of the hidden state after the block.
        kept: Bytes that autograd keeps, without the input, the output, parameters, buffers and side inputs.
        forward_peak: Most bytes at a time in a forward that keeps; at least ``kept + output``, which is the default.
        backward_peak: Most bytes at a time in the backward, with what is kept and the gradients of output and input;
            at least ``kept``, which is the default.
        recompute: Seconds of a recompute that ends early at this block; ``forward`` by default.
        recompute_peak: Most bytes at a time in such a recompute; ``forward_peak`` by default.
        gradient: Bytes of the output's gradient, which waits while a segment that ends with this block is recomputed.
        gap: Bytes that come to be held before this block and after the one before it, until the backward, whatever the
            plan. Negative where not even the output before is held.
        gap_peak: Most bytes at a time there, with what is held; at least ``gap``.
        passing: Bytes that are held besides in the block's first forward, and no longer in its backward.
        placed: Bytes that the block puts into its side inputs, as into a cache. They are held to the end of the step's
            forward, and in the backward if a later block that was given them is recomputed.
        unkept: Bytes of these that are not among what autograd keeps.
        twice: Bytes of what autograd keeps that somebody else holds, too, as a cache: beside them are those that a
            recompute makes.
        carried: Bytes of side inputs that this block is the first to be given, and that autograd does not keep. They are
            held in the forward up to the last that is given them, and in the backward if this one or a later of these is
            recomputed.
        carried_to: Index of the last block that is given them; by default it is this or any later one.
        freed: Bytes of the input that are held no longer than the forward if the block is kept, since autograd does not
            keep them, but to the end of its backward if it is the first that is executed again.
        needed: Whether the step's backward needs the block. If not, it is never executed again.
        lasting: Whether the user holds what is kept of a block that is not needed, to the end of the step; else it is
            let go of when the model returns.
        modes: Costs of other modes that a plan may give this block.
    """

    forward: float
    backward: float
    output: int
    kept: int
    forward_peak: int = 0
    backward_peak: int = 0
    recompute: float | None = None
    recompute_peak: int = 0
    gradient: int = 0
    gap: int = 0
    gap_peak: int = 0
    passing: int = 0
    placed: int = 0
    unkept: int = 0
    twice: int = 0
    carried: int = 0
    carried_to: int | None = None
    freed: int = 0
    needed: bool = True
    lasting: bool = False
    modes: tuple[ModeCosts, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", tuple(self.modes))
        for attribute, least in (
            ("gap_peak", self.gap),
            ("forward_peak", self.kept + self.output),
            ("backward_peak", self.kept),
            ("recompute_peak", self.recompute_peak or max(self.forward_peak, self.kept)),
        ):
            object.__setattr__(self, attribute, max(getattr(self, attribute), least))

    @property
    def recompute_time(self) -> float:
        """Seconds of a recompute that ends early at this block."""
        return self.forward if self.recompute is None else self.recompute

    def figures(self, mode: Mode) -> tuple[int, int, int, float]:
        """Return kept bytes, forward peak, backward peak and extra seconds in a mode.

        A mode that was not measured costs what keeping costs. What keeping frees, or another mode lets go, of the input
        is less than nothing kept.
        """
        for costs in self.modes:
            if costs.mode == mode:
                forward_peak = max(costs.forward_peak, costs.kept + self.output)
                backward_peak = max(costs.backward_peak, costs.kept)
                return (
                    costs.kept - costs.let_go,
                    forward_peak,
                    backward_peak - costs.let_go,
                    costs.extra,
                )
        return self.kept - self.freed, self.forward_peak, self.backward_peak - self.freed, 0.0

    def unkept_in(self, mode: Mode) -> int:
        """Return how many of the bytes that are placed are not among those kept in a mode."""
        found = (m.unkept for m in self.modes if m.mode == mode and m.unkept is not None)
        return next(found, self.unkept)

    def lingering_in(self, mode: Mode) -> int:
        """Return how many bytes of the input are let go in a mode at the end of the step's forward only."""
        return sum(m.lingering for m in self.modes if m.mode == mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProfile:
    """The costs of the blocks of a run, in order.

    Attributes:
        blocks: Costs of each block.
        tail: Seconds of a step outside of the blocks.
        tail_peak: Most bytes at a time in the gap after the last block, between the blocks' forward and their backward
            (head, logits, loss).
        tail_forward: The same in the forward alone, but for what blocks have placed.
        about: What was measured: shapes, dtypes, device.
    """

    blocks: tuple[BlockCosts, ...]
    tail: float = 0.0
    tail_peak: int = 0
    tail_forward: int = 0
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    @property
    def plain(self) -> Prediction:
        """Seconds and peak of the plain loop, which keeps everything."""
        return predict(self, (Segment(0, len(self), mode="keep"),) if self.blocks else ())

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain numbers, strings, lists and dicts, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the profile that `to_dict` described.

        Raises:
            BudgetError: If `data` is no description of a profile.
        """
        try:
            blocks = [
                BlockCosts(
                    **{**block, "modes": tuple(ModeCosts(**m) for m in block.get("modes", ()))}
                )
                for block in data["blocks"]
            ]
            return cls(**{**data, "blocks": tuple(blocks)})
        except (TypeError, KeyError, AttributeError) as error:
            raise BudgetError(
                f"expected a profile as a dict with a list of 'blocks' ({error}); "
                "measure one with blockhooks.budget.measure()."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the profile that `save` wrote.

        Raises:
            BudgetError: If the file holds no profile.
        """
        return cls.from_dict(load_json(path, BudgetError))

    def __str__(self) -> str:
        rows = [
            (
                str(index),
                block.name,
                f"{block.forward * 1e3:.2f}",
                f"{block.recompute_time * 1e3:.2f}",
                f"{block.backward * 1e3:.2f}",
                format_bytes(block.kept),
                format_bytes(block.output),
                format_bytes(block.backward_peak),
                ", ".join(f"{m.mode} {format_bytes(m.kept)}" for m in block.modes) or "-",
            )
            for index, block in enumerate(self.blocks)
        ]
        head = (
            "block",
            "name",
            "forward ms",
            "recompute ms",
            "backward ms",
            "kept",
            "output",
            "peak",
            "modes",
        )
        about = [self.about] if self.about else []
        return "\n".join([*about, *format_table(head, rows)])


def save_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write plain data to a JSON file."""
    Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")


def load_json(path: str | Path, error: type[BlockhooksError]) -> Any:
    """Read what `save_json` wrote.

    Raises:
        BlockhooksError: `error`, if the file holds no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as reason:
        raise error(f"{path}: expected a JSON file that save() has written ({reason}).") from reason


def check_profile(profile: Any, whose: str) -> ChainProfile:
    """Check the costs that somebody gave as an argument; `whose` names the function.

    Raises:
        BudgetError: If they are no `ChainProfile`.
    """
    if not isinstance(profile, ChainProfile):
        raise BudgetError(
            f"{whose}(profile, ...) expected a ChainProfile, as blockhooks.budget.measure() gives it or "
            f"ChainProfile.load() reads it; found {profile!r}."
        )
    return profile


class Prediction(NamedTuple):
    """What a step costs under a plan.

    Attributes:
        time: Seconds.
        peak: Most bytes at a time above the run's input.
    """

    time: float
    peak: int


def predict(profile: ChainProfile, segments: Iterable[Segment]) -> Prediction:
    """Predict time and peak of a step under a plan.

    Raises:
        PlanError: If the plan does not cover the profile's blocks.
        BudgetError: If `profile` is none.
    """
    ledger = _Ledger(check_profile(profile, "predict").blocks)
    marks, held = ledger.forward(check_plan(segments, len(profile)), 0, gaps=True)
    ledger.see(held + profile.tail_forward + ledger.placed + ledger.lingering)
    ledger.see(held + ledger.beside + profile.tail_peak)
    ledger.backward(marks, gaps=True)
    return Prediction(ledger.time + profile.tail, ledger.peak)


# What waits for the backward: a kept block by its index, or a segment to recompute, and the bytes held before it.
_Mark = tuple[int | Segment, int, Mode]


@dataclass(slots=True)
class _Ledger:
    """Executes a plan on costs alone, by the engine's rules.

    Attributes:
        beside: What is kept of blocks that the backward does not need: in the backward, that of earlier ones that lasts,
            less that of later ones that does not.
    """

    blocks: Sequence[BlockCosts]
    time: float = 0.0
    peak: int = 0
    placed: int = 0
    beside: int = 0
    lingering: int = 0
    carried: list[tuple[int, int]] = field(default_factory=list)
    dropped: dict[int, tuple[float, int]] = field(default_factory=dict)

    def see(self, live: int) -> None:
        if live > self.peak:
            self.peak = live

    def still_carried(self, index: int) -> int:
        """Bytes that no plan holds so far, of side inputs that a block or a later one is given."""
        return sum(nbytes for last, nbytes in self.carried if last >= index)

    def forward(
        self,
        segments: Sequence[Segment],
        held: int,
        waiting: int = 0,
        *,
        region: int | None = None,
        early_stop: bool = False,
        gaps: bool = False,
    ) -> tuple[list[_Mark], int]:
        """Execute segments for a backward that comes next.

        Args:
            segments: What to execute.
            held: Bytes held before.
            waiting: Bytes of the gradient that waits meanwhile, if this is a recompute.
            region: The first block of the region that is executed, which holds its input.
            early_stop: Whether this is a recompute that ends once all that is saved is back.
            gaps: Whether this is the step's forward, which goes through the gaps too.

        Returns:
            What waits for the backward, and the bytes held after.
        """
        marks: list[_Mark] = []
        for segment in segments:
            ends = early_stop and segment is segments[-1]
            if segment.mode == "recompute":
                within = self.blocks[segment.start : segment.stop]
                passing = 0
                if gaps:
                    held += within[0].gap + within[0].carried + self.placed
                    held += self.still_carried(segment.start)
                    held += sum(block.placed for block in within[:-1])
                    passing, self.placed, self.carried = within[0].passing, 0, []
                marks.append((segment, held, segment.mode))
                if not ends:
                    time, peak = self.drop(segment)
                    self.time += time
                    self.see(held + waiting + peak + passing + self.lingering)
                    held += self.blocks[segment.stop - 1].output
                    if gaps:
                        held += sum(block.gap + block.carried for block in within[1:])
                        self.placed = within[-1].placed
            elif segment.children:
                more, held = self.forward(
                    segment.children, held, waiting, region=region, early_stop=ends, gaps=gaps
                )
                marks += more
            else:
                # In what is executed again nothing moves.
                mode: Mode = "keep" if segment.mode == "offload" and not gaps else segment.mode
                for index in segment.indices:
                    block = self.blocks[index]
                    kept, forward_peak, _, _ = block.figures(mode)
                    passing = 0
                    again = block.freed if index == region and segment.mode == "keep" else 0
                    if gaps:
                        held += block.gap
                        if block.carried:
                            last = block.carried_to
                            last = len(self.blocks) if last is None else last
                            self.carried.append((last, block.carried))
                        passing = block.passing + self.placed + self.lingering
                        passing += self.still_carried(index)
                        if not block.needed and not block.lasting:
                            self.beside -= kept
                    marks.append((index, held + again, mode))
                    if ends and index == segment.stop - 1:
                        self.time += block.recompute_time
                        self.see(held + waiting + min(block.recompute_peak, forward_peak))
                        held += kept + again
                    else:
                        self.time += block.forward
                        self.see(held + waiting + forward_peak + passing)
                        if gaps:
                            self.placed += block.unkept_in(mode)
                            self.lingering += block.lingering_in(mode)
                        held += kept + again + block.output
        return marks, held

    def backward(self, marks: list[_Mark], *, gaps: bool = False) -> None:
        for what, before, mode in reversed(marks):
            held = before + self.beside if gaps else before
            if isinstance(what, int):
                block = self.blocks[what]
                kept, _, peak, extra = block.figures(mode)
                if gaps and not block.needed:
                    self.beside += kept
                else:
                    self.time += block.backward + extra
                    self.see(held + peak)
            elif not gaps or any(self.blocks[index].needed for index in what.indices):
                waiting = self.blocks[what.stop - 1].gradient
                twice = sum(self.blocks[index].twice for index in what.indices)
                held += twice
                inner, _ = self.forward(
                    _inside(what), held, waiting, region=what.start, early_stop=True
                )
                self.backward(inner)
            if gaps:
                first = self.blocks[what if isinstance(what, int) else what.start]
                own = first.gap if isinstance(what, int) else first.gap + first.carried
                self.see(before + self.beside - own + first.gap_peak)

    def drop(self, segment: Segment) -> tuple[float, int]:
        """Seconds and peak of a region's forward, which lets go of what was saved when it returns, not before."""
        if id(segment) not in self.dropped:
            apart = _Ledger(self.blocks, dropped=self.dropped)
            apart.forward(_inside(segment), 0, region=segment.start)
            self.dropped[id(segment)] = apart.time, apart.peak
        return self.dropped[id(segment)]


def _inside(segment: Segment) -> tuple[Segment, ...]:
    return segment.children or (Segment(segment.start, segment.stop, mode="keep"),)


# ------------------------------------------------------------------------------------------------- bytes and tables

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}


def budget_in_bytes(budget: str | int | float, plain_peak: int) -> int:
    """Return a memory budget in bytes.

    Args:
        budget: Bytes as an integer or as text (``"8GiB"``, ``"500 MB"``), or a float in (0, 1]: a fraction of the
            plain loop's peak.
        plain_peak: The plain loop's peak in bytes.

    Raises:
        BudgetError: If it is none of these.
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", budget)
        unit = _UNITS.get(match[2].upper()) if match else None
        if (
            match and unit and float(match[1]) * unit >= 1
        ):  # "0.5" is meant as a fraction, which is no text
            return int(float(match[1]) * unit)
    elif isinstance(budget, float):
        if 0 < budget <= 1:
            return int(budget * plain_peak)
    elif isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    raise BudgetError(
        f"expected a memory budget as text like '8GiB' or '500 MB', as a positive integer (bytes), or as a float in "
        f"(0, 1] (a fraction of the plain loop's peak); found {budget!r}."
    )


def format_bytes(count: float) -> str:
    """Return bytes as text with a fitting binary unit, such as ``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a plain table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    ruler = tuple("-" * width for width in widths)
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (tuple(head), ruler, *rows)
    ]
