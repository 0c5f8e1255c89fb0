"""`Checkpoint`: activation checkpointing of segments."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Final, get_args

from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from blockhooks.errors import HookError, PlanError, check_flag
from blockhooks.hookspecs import hookimpl
from blockhooks.offloading import Offloader, To
from blockhooks.plan import Mode, PlanFunction, Segment, every
from blockhooks.planner import Around, Planner
from blockhooks.rebuild import Rebuilder
from blockhooks.recompute import Check, can_recompute, checkpointed
from blockhooks.run import Hidden, Region, Run

__all__ = ["Checkpoint"]

CHECKS: Final = ("shapes", "values", "none")
SELECTIVE_MIN_BYTES: Final = 16384
OFFLOAD_MIN_BYTES: Final = 1 << 16


class Checkpoint:
    """Drop what autograd would keep inside of segments, and recompute it in the backward.

    Acts whenever gradients are enabled, in train and eval mode alike. Loss, gradients, buffers and random generators
    are those of the plain loop, bit for bit.

    Args:
        plan: The plan function (see `blockhooks.plan`): which blocks make a segment, and which are kept. By default
            each block is a segment that is recomputed, ``every(1)``.
        memory_budget: In place of a plan, the peak that a step may have, as ``"8GiB"``, as bytes, or as a float in
            (0, 1]: a fraction of the plain loop's activation peak. The first step at each shape measures the blocks,
            in little memory; from the second on the fastest plan within the budget holds. See `report`.
        save: Which operations' results a recomputed segment keeps, so that they are not executed again: a list of
            operators or a policy function, as `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes them.
            Such a segment can be gone through backward once.
        offload: Where segments planned ``"offload"`` go, block by block: ``"cpu"``, from a CUDA device to the host's
            memory, the default; or files, with the extra ``offload``: ``"disk"``, in the system's directory for
            temporary files, or a directory as a `pathlib.Path`. Given with a budget, blocks that may go there are
            measured in that way, too, and planned so where that is the fastest; on a CPU ``"cpu"`` gains nothing.
        early_stop: End a recompute once all saved tensors are back. Saves the end of each block (with a linear layer
            last a third of the recompute's FLOPs).
        check: What to compare between forward and recompute: ``"shapes"`` (shape, dtype and device of each saved
            tensor), ``"values"`` (every bit, too; recomputes to the end), or ``"none"``.

    Raises:
        PlanError: If `plan` is not a plan function, a budget is given together with `plan` or `save`, or `offload`
            without a plan or budget.
        HookError: If `check` is none of the three, `early_stop` is no bool, `offload` is no place, or `save` is neither
            a policy function nor a list of operator overloads.
        BudgetError: If `memory_budget` is no budget; or, in the first step, if no plan keeps it.
        MissingExtraError: If `offload` needs the extra, and it is not installed.
        OffloadError: In the forward or backward, the measuring one included, if a file cannot be written or read.

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
        memory_budget: str | int | float | None = None,
        save: Sequence[OpOverload] | Callable[..., Any] | None = None,
        offload: To | os.PathLike[str] | None = None,
        early_stop: bool = True,
        check: Check = "shapes",
    ) -> None:
        if plan is not None and memory_budget is not None:
            raise PlanError(
                f"Checkpoint has both plan={plan!r} and memory_budget={memory_budget!r}; give it one of them."
            )
        if save is not None and memory_budget is not None:
            raise PlanError(
                f"Checkpoint has both save={save!r} and memory_budget={memory_budget!r}; a budget decides itself what is "
                "kept, so give it one of them."
            )
        if plan is not None and not callable(plan):
            raise PlanError(
                f"Checkpoint(plan=...) expected a plan function such as blockhooks.plan.every(2), found {plan!r}."
            )
        if offload is not None and plan is None and memory_budget is None:
            raise PlanError(
                f"Checkpoint has offload={offload!r}, but by default every block is recomputed; give it a memory_budget, or "
                "a plan with segments of mode 'offload', too."
            )
        if check not in CHECKS:
            raise HookError(
                f"Checkpoint(check={check!r}): expected one of {', '.join(map(repr, CHECKS))}."
            )
        self.plan = every(1) if plan is None else plan
        self.save = None if save is None else _saved(save)
        self.early_stop = check_flag(early_stop, "Checkpoint(early_stop=...)")
        self.check = check
        self.offload = offload
        self._selective: Around = partial(_selective, Rebuilder(SELECTIVE_MIN_BYTES))
        modes: dict[Mode, Around] = {"selective": self._selective}
        if offload is not None:
            modes["offload"] = self._offloaded
        self.planner = None if memory_budget is None else Planner(memory_budget, modes)

    @cached_property
    def _offloaded(self) -> Around:
        """Made when it is asked for: a compiler that traces `Checkpoint(...)` cannot follow a thread's storage."""
        return partial(_offloaded, _offloader("cpu" if self.offload is None else self.offload))

    @hookimpl
    def plan_segments(self, run: Run) -> tuple[Segment, ...]:
        """Plan with the plan function, or for the memory budget."""
        if self.planner is not None:
            return self.planner.prepare(run)
        segments = self.plan(len(run.blocks))
        if not isinstance(segments, Sequence):
            raise PlanError(
                f"the plan function {self.plan!r} gave {segments!r} for {len(run.blocks)} blocks; expected segments, as "
                "blockhooks.plan.every(2) gives them (called with its numbers: every(2), not every)."
            )
        return tuple(segments)

    @hookimpl
    def run_blocks(self, run: Run, x: Hidden) -> None:
        """Plan for the memory budget, now that x is known."""
        if self.planner is not None:
            self.planner.plan(run, x)

    @hookimpl
    def run_segment(
        self, run: Run, segment: Segment, region: Region, x: Hidden, recomputing: bool
    ) -> Hidden | None:
        """Checkpoint the region, or keep it in its segment's mode, if gradients are enabled."""
        if segment.mode == "keep" or not can_recompute():
            return None
        if segment.mode == "selective":
            with self._selective(run, segment):
                return region(x)
        if segment.mode == "offload":
            if len(segment) > 1 and not segment.children:
                # Each block by itself: what it keeps is away before the next one begins.
                blocks = [Segment(index, index + 1, mode="offload") for index in segment.indices]
                return run.run_segments(blocks, x, recomputing)
            with self._offloaded(run, segment):
                return region(x)
        contexts = region.capture(x)
        around = None
        if self.save is not None:
            around, again = create_selective_checkpoint_contexts(self.save)  # type: ignore[no-untyped-call]
            contexts.append(lambda: again)
        measure = None if self.planner is None else self.planner.begin_block(run, segment, x)
        with nullcontext() if self.planner is None else self.planner.around_waiting(run, segment):
            result = checkpointed(
                region,
                (x,),
                contexts=contexts,
                early_stop=self.early_stop,
                check=self.check,
                describe=region.__str__,
                on_keep=region.keep,
                forward_context=around,
            )
        if measure is not None:
            measure(region, result, contexts)
        return result

    def report(self) -> str:
        """Tell the plan, or the memory budget and what is planned for each shape that was seen."""
        told = f"plan {self.plan!r}" if self.planner is None else self.planner.report()
        return told if self.offload is None else f"{told}\noffload to {_tell(self.offload)}"

    def __repr__(self) -> str:
        options = "" if self.offload is None else f", offload={self.offload!r}"
        if self.planner is not None:
            return f"Checkpoint(memory_budget={self.planner.memory_budget!r}{options})"
        return f"Checkpoint({self.plan!r}{options})"


def _selective(rebuilder: Rebuilder, run: Run, segment: Segment) -> AbstractContextManager[None]:
    return rebuilder.forward(run.describe(segment.start, segment.stop))


def _offloaded(offloader: Offloader, run: Run, segment: Segment) -> AbstractContextManager[None]:
    where = run.describe(segment.start, segment.stop)
    return offloader.forward(where, run.held_elsewhere(segment))


def _tell(place: To | os.PathLike[str]) -> str:
    if place == "cpu":
        return "the host's memory, from CUDA devices"
    return f"files in {tempfile.gettempdir() if place == 'disk' else os.fspath(place)}"


def _offloader(place: To | os.PathLike[str]) -> Offloader:
    """Return what moves to a place.

    Raises:
        HookError: If it is none.
    """
    if isinstance(place, os.PathLike):
        return Offloader("disk", OFFLOAD_MIN_BYTES, directory=place)
    if place in get_args(To):
        return Offloader(place, OFFLOAD_MIN_BYTES)
    raise HookError(
        f"Checkpoint(offload={place!r}): expected 'cpu', 'disk', or a directory for files as a pathlib.Path."
    )


def _saved(save: Any) -> list[OpOverload] | Callable[..., Any]:
    """Check what `save` names: operators, or a policy function.

    Raises:
        HookError: If it is neither.
    """
    if not isinstance(save, (OpOverload, OpOverloadPacket, type)):  # callable too, but no policies
        if callable(save):
            policy: Callable[..., Any] = save
            return policy
        operators = list(save) if isinstance(save, Iterable) else [save]
        if all(isinstance(operator, OpOverload) for operator in operators):
            return operators
    raise HookError(
        "Checkpoint(save=...) expected a list of operator overloads such as [torch.ops.aten.mm.default], or a policy "
        f"function; found {save!r}."
    )
