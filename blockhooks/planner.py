"""A memory budget over the steps of a training: measure in the first, plan from the second on.

The first step with gradients of a stack of blocks, at given shapes, runs by a plan that needs little memory: a tree
whose leaves are single blocks. After each block's forward its costs are measured (`blockhooks.measuring`), in what the
floor of memory allows. From these the solver makes a plan for the budget, and it is used until shapes, dtypes, modes
or blocks are others. Plans are remembered per shape.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from blockhooks.costs import BlockCosts, ChainProfile, budget_in_bytes, format_bytes
from blockhooks.measuring import ModeContext, measure_block
from blockhooks.plan import Mode, Segment, every, tree
from blockhooks.recompute import as_recompute, can_recompute, is_recomputing
from blockhooks.run import Hidden, Region, Run
from blockhooks.solver import Plan, Solver
from blockhooks.structure import tensors_in

__all__ = ["Planner"]

# Shapes whose plans are remembered; the oldest is forgotten.
REMEMBERED: Final = 64

Factories = Sequence[Callable[[], AbstractContextManager[Any]]]
Signature = tuple[Any, ...]


@dataclass(slots=True)
class _Chain:
    """What is known of one stack at given shapes.

    Attributes:
        key: What tells it from others.
        about: The same, in words.
        count: Number of blocks.
        apart: Whether its blocks are called one by one by somebody's own loop, so that a segment is one block.
        costs: What was measured, by block.
        plan: The plan, once all is measured.
        input: Bytes of the first block's x.
        refused: Blocks that could not be executed again when they were to be measured.
        base: Bytes that were allocated beside the blocks' activations when the plan was made.
    """

    key: Signature
    about: str
    count: int
    apart: bool
    costs: dict[int, BlockCosts] = field(default_factory=dict)
    plan: Plan | None = None
    input: int = 0
    refused: set[int] = field(default_factory=set)
    base: int = 0

    @property
    def measured(self) -> bool:
        """Whether the costs of all blocks are known."""
        return len(self.costs) == self.count

    def measuring_plan(self) -> tuple[Segment, ...]:
        """A plan of little memory in which each block is a segment of its own."""
        plan = every(1) if self.apart else tree(max(1, (self.count - 1).bit_length()))
        return plan(self.count)

    def profile(self) -> ChainProfile:
        return ChainProfile(
            blocks=_evened([self.costs[index] for index in range(self.count)]), about=self.about
        )


class Planner:
    """Plans for a memory budget; what `Checkpoint(memory_budget=...)` plans with.

    Args:
        memory_budget: See `blockhooks.costs.budget_in_bytes`. Bytes are those of a step's peak: what is allocated on an
            accelerator, what the blocks' activations take on a CPU.
        modes: Modes that a plan may give a block, besides keeping and recomputing it, and what is entered around it.

    Raises:
        BudgetError: If `memory_budget` is not one.
    """

    def __init__(
        self, memory_budget: str | int | float, modes: Mapping[Mode, ModeContext] | None = None
    ) -> None:
        budget_in_bytes(memory_budget, 1 << 40)  # refuses what is no budget, before any step
        self.memory_budget = memory_budget
        self.modes = dict(modes or {})
        self._chains: dict[Signature, _Chain] = {}
        self._current: dict[Signature, _Chain] = {}
        self._step: list[
            _Chain
        ] = []  # the stacks that were called in this step, each by its own loop
        self._measuring = False

    # ---- the plan of a run ----------------------------------------------------------------------------------------

    def prepare(self, run: Run) -> tuple[Segment, ...]:
        """Plan a run of which x is not known yet: what is called one by one has it among its side inputs."""
        if not can_recompute():  # nothing is kept, and nothing can be measured
            return every(1)(len(run.blocks))
        chain = self._chain_of(run, (), apart=True)
        if any(other.key[0] == chain.key[0] for other in self._step):
            self._end_step()
        self._step.append(chain)
        run.state[self] = chain
        return self._begun(chain)

    def plan(self, run: Run, x: Hidden) -> None:
        """Plan a run that begins with x, unless each of its blocks is a run of its own."""
        prepared = run.state.get(self)
        if prepared is None:
            return
        self._step.remove(prepared)
        chain = self._chain_of(run, x, apart=False)
        base = self._base(x)
        if chain.measured and (chain.plan is None or base > chain.base):
            self._solve([chain], base)
        run.segments = self._begun(chain)

    def _chain_of(self, run: Run, x: Hidden, *, apart: bool) -> _Chain:
        given = (x, run.args, run.kwargs)
        key = (_blocks(run), apart, _signature(given), torch.is_autocast_enabled())
        return self._chains.get(key) or _Chain(key, _about(given), len(run.blocks), apart)

    def _begun(self, chain: _Chain) -> tuple[Segment, ...]:
        self._current[chain.key[0]] = chain
        self._measuring = any(chain.plan is None for chain in self._current.values())
        return chain.measuring_plan() if chain.plan is None else chain.plan.segments

    def _end_step(self) -> None:
        """Plan the stacks of a model together: their activations are held at the same time."""
        fresh = [chain for chain in self._step if chain.measured and chain.plan is None]
        step, self._step = self._step, []
        if fresh:
            planned = sum(chain.plan.peak for chain in step if chain.plan is not None)
            self._solve(fresh, self._base(None) + planned)

    def _solve(self, chains: Sequence[_Chain], base: int) -> None:
        """Plan stacks that follow each other within what the budget leaves beside `base` bytes.

        Raises:
            BudgetError: If no plan keeps the budget.
        """
        solver = Solver(ChainProfile(blocks=_joined(chains)), apart=chains[0].apart)
        # A loop that is not ours holds its first x, and may hold its last, beside what the blocks keep.
        beside = chains[0].input + solver.profile.blocks[-1].output if chains[0].apart else 0
        solved = solver.solve(self.memory_budget, beside=beside + base)
        start = 0
        for chain in chains:
            own = _cut(solved.segments, start, start + chain.count)
            chain.plan, chain.base = Solver(chain.profile()).plan(own, solved.budget), base
            start += chain.count

    def _base(self, x: Hidden) -> int:
        """Bytes of a peak beside the blocks' activations: parameters, gradients, what the optimizer holds."""
        tensors = tensors_in(x)
        on_host = bool(tensors) and tensors[0].device.type == "cpu"
        if isinstance(self.memory_budget, float) or on_host or not torch.accelerator.is_available():
            return 0
        return torch.accelerator.memory_allocated()

    # ---- measuring ------------------------------------------------------------------------------------------------

    def measure(
        self, run: Run, segment: Segment, region: Region, x: Hidden, factories: Factories
    ) -> None:
        """Measure a block whose region has just been executed, if that is still to do.

        Args:
            run: The run.
            segment: A segment of one block.
            region: Its region, whose forward is done.
            x: The hidden state that it was given.
            factories: What has to be entered around its recompute.

        Raises:
            BudgetError: If it was the last block, and no plan keeps the budget.
        """
        if not self._measuring or len(segment) > 1 or is_recomputing():
            return
        chain, index = self._current.get(_blocks(run)), segment.start
        if chain is None or chain.plan is not None or index in chain.costs:
            return
        self._remember(chain)
        if index == 0:
            chain.input = sum(t.nbytes for t in tensors_in(x))
        if segment in run.kept:
            if index not in chain.refused:  # its state may only have changed for the first time
                chain.refused.add(index)
                return
            chain.costs[index] = _kept_only(run.name(index))
        else:
            chain.costs[index] = measure_block(
                _executing(region, factories),
                x,
                modules=_modules(run.blocks[index]),
                side=run.side(),
                name=run.name(index),
                modes=self.modes,
            )
        if chain.measured and not chain.apart:
            self._solve([chain], self._base(x))

    def _remember(self, chain: _Chain) -> None:
        while len(self._chains) >= REMEMBERED and chain.key not in self._chains:
            del self._chains[next(iter(self._chains))]
        self._chains[chain.key] = chain

    # ---- what was done --------------------------------------------------------------------------------------------

    @property
    def profiles(self) -> list[ChainProfile]:
        """The profiles of all stacks and shapes that were measured."""
        return [chain.profile() for chain in self._chains.values() if chain.measured]

    @property
    def plans(self) -> list[Plan]:
        """The plans of all stacks and shapes that were measured."""
        return [chain.plan for chain in self._chains.values() if chain.plan is not None]

    def report(self) -> str:
        """Tell the budget, and for each stack and shape what is planned, or that it is yet to be measured."""
        lines = [f"memory budget {_tell(self.memory_budget)}"]
        for chain in self._chains.values():
            lines.append(f"{chain.count} blocks, {chain.about}:")
            told = str(chain.plan) if chain.plan else f"{len(chain.costs)} blocks measured so far"
            lines += [f"  {line}" for line in told.splitlines()]
        return "\n".join(lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> Planner:
        """A copy knows nothing of blocks that are not its own."""
        return Planner(self.memory_budget, self.modes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Planner, (self.memory_budget, self.modes)


def _joined(chains: Sequence[_Chain]) -> tuple[BlockCosts, ...]:
    """Return the blocks of stacks that follow each other; what a stack begins with is held with the end of the last."""
    blocks: list[BlockCosts] = []
    for chain in chains:
        if blocks:
            last = blocks[-1]
            blocks[-1] = replace(last, output=last.output + chain.input)
        blocks += chain.profile().blocks
    return tuple(blocks)


def _cut(segments: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return the part of a plan for blocks ``start..stop-1`` as a plan of its own."""
    whole = (start, stop) == (0, segments[-1].stop)
    return (
        tuple(segments)
        if whole
        else tuple(
            Segment(max(s.start, start) - start, min(s.stop, stop) - start, mode=s.mode)
            for s in segments
            if s.start < stop and s.stop > start
        )
    )


def _executing(region: Region, factories: Factories) -> Callable[..., Any]:
    def execute(x: Any, inside: AbstractContextManager[Any]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_recompute())
            for factory in factories:
                stack.enter_context(factory())
            stack.enter_context(inside)
            return region(x)

    return execute


def _blocks(run: Run) -> Signature:
    """What tells a stack from another: its modules, or what else its blocks are, which may be made anew each step."""
    return tuple(
        (id(block), block.training) if isinstance(block, nn.Module) else _kind(block)
        for block in run.blocks
    )


def _kind(block: Any) -> str:
    code = getattr(block, "__qualname__", None) or type(block).__qualname__
    return f"{getattr(block, '__module__', '')}.{code}"


def _modules(block: Any) -> list[nn.Module]:
    owner = getattr(block, "__self__", block)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def _signature(value: Any) -> Signature:
    """Shapes, dtypes and devices, in no order: x may stand in several places among the arguments."""
    return tuple(
        sorted(
            (str(t.dtype), str(t.device), tuple(t.shape), t.requires_grad)
            for t in tensors_in(value)
        )
    )


def _about(value: Any) -> str:
    tensors: list[Tensor] = tensors_in(value)
    if not tensors:
        return "no tensors"
    shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors[:3]]
    return f"{', '.join(shown)} on {tensors[0].device}"


def _tell(budget: str | int | float) -> str:
    if isinstance(budget, str):
        return budget
    return (
        f"{budget:.0%} of the plain loop's peak"
        if isinstance(budget, float)
        else format_bytes(budget)
    )


def _kept_only(name: str) -> BlockCosts:
    """Costs of a block that cannot be executed again: unknown, but never recomputed."""
    return BlockCosts(
        name=name, forward=0.0, backward=0.0, output=0, kept=0, recompute=float("inf")
    )


def _evened(blocks: Sequence[BlockCosts]) -> tuple[BlockCosts, ...]:
    """Give blocks of the same bytes the median of their times: what one measurement says of one block is noise."""
    groups: dict[Any, list[BlockCosts]] = {}
    for block in blocks:
        groups.setdefault(_bytes(block), []).append(block)
    medians = {key: _median(group) for key, group in groups.items()}
    return tuple(
        replace(block, **medians[_bytes(block)]) if len(groups[_bytes(block)]) > 1 else block
        for block in blocks
    )


def _bytes(block: BlockCosts) -> Any:
    modes = tuple((mode.mode, mode.kept) for mode in block.modes)
    return block.output, block.kept, block.forward_peak, block.backward_peak, modes


def _median(group: Sequence[BlockCosts]) -> dict[str, Any]:
    extras = zip(*(block.modes for block in group), strict=True)
    return {
        "forward": statistics.median(block.forward for block in group),
        "backward": statistics.median(block.backward for block in group),
        "recompute": statistics.median(block.recompute_time for block in group),
        "modes": tuple(
            replace(modes[0], extra=statistics.median(mode.extra for mode in modes))
            for modes in extras
        ),
    }
