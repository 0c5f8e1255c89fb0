"""`pareto`: what is possible between little memory and little time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from blockhooks import plan as plans
from blockhooks.costs import ChainProfile, check_profile, format_bytes, format_table
from blockhooks.errors import BudgetError, import_extra
from blockhooks.plan import PlanFunction
from blockhooks.solver import Plan, Solver

__all__ = ["Pareto", "Point", "pareto"]

BUDGETS: Final = 32
# Where the name of a point may stand, in points from it, the first choice first; and the side that is there.
NAME_AT: Final = tuple(
    (4 * right, up * distance, "left" if right > 0 else "right", "bottom" if up > 0 else "top")
    for distance in (4, 14, 24)
    for right in (1, -1)
    for up in (1, -1)
)


class Point(NamedTuple):
    """A plan with its name, as in ``"every(2)"``."""

    name: str
    plan: Plan

    @property
    def memory(self) -> int:
        """Predicted peak, in bytes."""
        return self.plan.peak

    @property
    def time(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.time


@dataclass(frozen=True, slots=True)
class Pareto:
    """The fastest plans from the least memory to the plain loop's, and the usual heuristics beside them.

    Attributes:
        points: The best plans, least memory first; each is faster than all before it.
        heuristics: All blocks recomputed, segments of several, about √n segments, the first blocks.
    """

    points: tuple[Point, ...]
    heuristics: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all points as plain numbers, strings, lists and dicts, for JSON."""

        def plain(points: Sequence[Point]) -> list[dict[str, Any]]:
            return [{"name": point.name, "plan": point.plan.to_dict()} for point in points]

        return {"points": plain(self.points), "heuristics": plain(self.heuristics)}

    def __str__(self) -> str:
        rows = [
            (name, format_bytes(plan.peak), f"{plan.share:.1%}", f"{plan.slowdown:.3f}")
            for name, plan in (*self.points, *self.heuristics)
        ]
        return "\n".join(format_table(("plan", "peak", "of plain", "time / plain"), rows))

    def plot(self, path: str | Path, chosen: Plan | None = None) -> None:
        """Draw time against memory.

        Args:
            path: The picture's file; its suffix tells the format.
            chosen: A plan to mark.

        Raises:
            BudgetError: If `chosen` is no plan, or the suffix of `path` no format.
            MissingExtraError: If matplotlib is not installed.
        """
        if chosen is not None and not isinstance(chosen, Plan):
            raise BudgetError(
                f"plot(chosen=...) expected a Plan, as blockhooks.budget.solve() gives it; found {chosen!r}."
            )
        figures = import_extra("matplotlib.figure", "demo", "drawing a Pareto curve")
        figure = figures.Figure(figsize=(7.5, 4.8), layout="constrained")
        formats = figure.canvas.get_supported_filetypes()
        suffix = Path(path).suffix[1:].lower()
        if suffix not in formats:
            raise BudgetError(
                f"plot(path) expected a file whose suffix is one of {', '.join(formats)}; found {str(path)!r}."
            )
        axes = figure.add_subplot()
        curve = [point.plan for point in self.points]
        axes.step(
            [100 * plan.share for plan in curve],
            [100 * (plan.slowdown - 1) for plan in curve],
            where="post",
            color="tab:blue",
            label="best plan for each budget",
        )
        rules = [(name, 100 * p.share, 100 * (p.slowdown - 1)) for name, p in self.heuristics]
        if rules:
            _, x, y = zip(*rules, strict=True)
            axes.plot(x, y, "o", color="tab:gray", label="plans by rule")
        if chosen is not None:
            axes.plot(
                100 * chosen.share,
                100 * (chosen.slowdown - 1),
                "*",
                markersize=14,
                color="tab:red",
                label=f"chosen: {chosen.share:.0%} of the memory at {chosen.slowdown:.3f} of the time",
            )
        axes.set_xlabel("peak of activation memory (% of the plain loop's)")
        axes.set_ylabel("more time than the plain loop (%)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        _name(axes, rules)
        figure.savefig(path, dpi=150)


def _name(axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Write the name of each point beside it, where it covers no other point or name."""
    axes.figure.draw_without_rendering()  # only then is it known where things are
    places = [axes.transData.transform((x, y)) for _, x, y in points]
    taken: list[Any] = []

    def free(box: Any) -> bool:
        inside = all(axes.bbox.contains(*corner) for corner in box.corners())
        return (
            inside
            and not any(box.padded(5).contains(*place) for place in places)  # half a dot
            and not any(map(box.overlaps, taken))
        )

    for name, x, y in points:
        text = axes.annotate(
            name, (x, y), (0, 0), textcoords="offset points", fontsize=8, color="dimgray"
        )
        for dx, dy, side, end in NAME_AT:
            text.xyann = (dx, dy)
            text.set(ha=side, va=end)
            if free(text.get_window_extent()):
                break
        taken.append(text.get_window_extent())


def pareto(profile: ChainProfile) -> Pareto:
    """Find the best plans for all budgets that one can keep.

    Args:
        profile: What the blocks cost.

    Raises:
        BudgetError: If `profile` is none.
    """
    solver = Solver(check_profile(profile, "pareto"))
    floor, plain = solver.floor.peak, solver.plain.peak
    budgets = sorted(
        {floor + (plain - floor) * step // (BUDGETS - 1) for step in range(BUDGETS)}
        # Where little memory is left, more of it is worth more.
        | {int(floor * (plain / max(floor, 1)) ** (step / BUDGETS)) for step in range(BUDGETS)}
    )
    points: list[Point] = []
    for budget in budgets:
        plan = solver.solve(budget) if budget > 0 else solver.plain
        if not points or plan.time < points[-1].time:
            points.append(Point(f"budget {plan.share:.0%}", plan))
    n = len(profile)
    return Pareto(
        tuple(points),
        tuple(Point(repr(rule), solver.plan(rule(n))) for rule in _rules(n)) if n else (),
    )


def _rules(n: int) -> list[PlanFunction]:
    firsts = sorted({n // 4, n // 2, 3 * n // 4} - {0})
    return [
        plans.every(1),
        *(plans.every(size) for size in (2, 4) if size < n),
        plans.sqrt(),
        *map(plans.first, firsts),
    ]
