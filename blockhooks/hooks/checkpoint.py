"""`Checkpoint`: activation checkpointing of segments."""

from __future__ import annotations

from typing import Final

from blockhooks.errors import HookError, PlanError
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import PlanFunction, Segment, every
from blockhooks.recompute import Check, can_recompute, checkpointed
from blockhooks.run import Hidden, Region, Run

__all__ = ["Checkpoint"]

CHECKS: Final = ("shapes", "values", "none")


class Checkpoint:
    """Drop what autograd would keep inside of segments, and recompute it in the backward.

    Acts whenever gradients are enabled, in train and eval mode alike. Loss, gradients, buffers and random generators
    are those of the plain loop, bit for bit.

    Args:
        plan: The plan function (see `blockhooks.plan`): which blocks make a segment, and which are kept. By default
            each block is a segment that is recomputed, ``every(1)``.
        early_stop: End a recompute once all saved tensors are back. Saves the end of each block (with a linear layer
            last a third of the recompute's FLOPs).
        check: What to compare between forward and recompute: ``"shapes"`` (shape, dtype and device of each saved
            tensor), ``"values"`` (every bit, too; recomputes to the end), or ``"none"``.

    Raises:
        PlanError: If `plan` is not a plan function.
        HookError: If `check` is none of the three.

    Note:
        Side: outside. A segment whose function changes its input in place, or is otherwise found impossible to
        execute again, keeps what autograd saved; ``run.kept`` tells the reason.

    References:
        Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174.
    """

    def __init__(
        self,
        plan: PlanFunction | None = None,
        *,
        early_stop: bool = True,
        check: Check = "shapes",
    ) -> None:
        if plan is not None and not callable(plan):
            raise PlanError(
                f"Checkpoint(plan=...) expected a plan function such as blockhooks.plan.every(2), found {plan!r}."
            )
        if check not in CHECKS:
            raise HookError(
                f"Checkpoint(check={check!r}): expected one of {', '.join(map(repr, CHECKS))}."
            )
        self.plan = every(1) if plan is None else plan
        self.early_stop, self.check = early_stop, check

    @hookimpl
    def plan_segments(self, run: Run) -> tuple[Segment, ...]:
        """Plan with the plan function."""
        return tuple(self.plan(len(run.blocks)))

    @hookimpl
    def run_segment(self, segment: Segment, region: Region, x: Hidden) -> Hidden | None:
        """Checkpoint the region, if its segment is to be recomputed and gradients are enabled."""
        if segment.mode != "recompute" or not can_recompute():
            return None
        return checkpointed(
            region,
            (x,),
            contexts=region.capture(x),
            early_stop=self.early_stop,
            check=self.check,
            describe=region.__str__,
            on_keep=region.keep,
        )

    def __repr__(self) -> str:
        return f"Checkpoint({self.plan!r})"
